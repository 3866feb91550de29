"""Plain-text mathematics as HTML: the equations of pages and docstrings are written to be read in a terminal.

    s_j -> subscript      x^2 -> superscript      sum_j -> a sum sign      <q, k> -> angle brackets      sqrt( -> a root

Lines keep their order and their gaps; what is no equation (a command, a tree of files) is left as it is.
"""

from __future__ import annotations

import html
import re

__all__ = ["is_equation", "typeset"]

RELATION = re.compile(r"(?:^|\s)(?:=|<=|>=|<-|->|~|!=|<|>)(?:\s|$)")
COMMAND = re.compile(
    r"^\s*(?:make|pip|partita|python|torchrun|git|import|from|with|for|def|class|print|--|\$|#)\b|[\"'{}`;]|\w\(\w+=|\.py\b"
)
WORDS = {
    "sum": "∑", "prod": "∏", "sqrt": "√", "alpha": "α", "beta": "β", "gamma": "γ", "kappa": "κ", "lambda": "λ",
    "sigma": "σ", "tau": "τ", "eta": "η", "infinity": "∞", "pi": "π", "theta": "θ", "epsilon": "ε",
}  # fmt: skip
SIGNS = (("&lt;=", "≤"), ("&gt;=", "≥"), ("!=", "≠"), ("&lt;-", "←"), ("-&gt;", "→"), (" * ", " · "), (" - ", " − "))
UPRIGHT = {
    "log", "exp", "max", "min", "Var", "Cov", "KL", "cos", "erf", "in", "of", "the", "is", "as", "on", "by", "or",
    "and", "for", "all", "own", "if", "not", "to", "at", "no", "key", "new", "old", "row", "one", "its", "two",
    "are", "has",
}  # fmt: skip
NAME = re.compile(r"([A-Za-z]+)((?:_(?:\{[^}]*\}|[A-Za-z0-9+]+(?:,[A-Za-z0-9]+)*))*)")
POWER = re.compile(r"\^(\([^()]*\)|-?[A-Za-z0-9.]+)")


def is_equation(text: str) -> bool:
    """Whether a block of plain text is mathematics: relations in most lines, and nothing of a shell or of Python.

    >>> is_equation("H = log mass - first / mass"), is_equation("make test     # what CI runs")
    (True, False)
    """
    lines = [line for line in text.splitlines() if line.strip()]
    related = sum(bool(RELATION.search(line)) for line in lines)
    return bool(lines) and 2 * related >= len(lines) and not any(COMMAND.search(line) for line in lines)


def typeset(text: str) -> str:
    """The block as HTML.

    >>> typeset("x_i <= sum_j y_j^2")
    '<div class="equation"><div><i>x</i><sub>i</sub> ≤ ∑<sub>j</sub> <i>y</i><sub>j</sub><sup>2</sup></div></div>'
    """
    lines = text.strip("\n").splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    lines = [line[margin:] for line in lines]
    write = _row if sum(" = " in line for line in lines) > 1 else _line
    return '<div class="equation">' + "".join(f"<div>{write(line)}</div>" for line in lines) + "</div>"


def _row(line: str) -> str:
    """Two cells, so that the first equality signs of a block stand under each other."""
    left, sign, right = line.partition(" = ")
    if not sign:
        return f"<span>{_line(line)}</span>"
    return f"<span>{_line(left.rstrip())}\u2002</span><span>= {_line(right.lstrip())}</span>"


def _line(line: str) -> str:
    line = html.escape(line, quote=False)
    line = re.sub(r"&lt;([\w+\- ]+, ?[^&]+?)&gt;", r"⟨\1⟩", line)
    for plain, sign in SIGNS:
        line = line.replace(plain, sign)
    parts = re.split(r"(&\w+;)", line)  # escaped characters are no names
    line = "".join(p if p.startswith("&") else NAME.sub(_name, p) for p in parts)
    line = POWER.sub(lambda m: f"<sup>{m.group(1).removeprefix('(').removesuffix(')')}</sup>", line)
    return re.sub(r" {3,}", "\u2003\u2003", line) or "&nbsp;"


def _name(found: re.Match[str]) -> str:
    word, below = found.group(1), [part for part in found.group(2).split("_") if part]
    indices = [part for part in below if len(part.strip("{}")) <= 3 or part[0].isdigit() or part.startswith("{")]
    if len(indices) < len(below):  # a name of the code, such as g_moment or n_query: not an index
        return f"<i>{found.group(0)}</i>" if word not in WORDS else found.group(0)
    body = WORDS.get(word) or (word if word in UPRIGHT or len(word) > 3 else f"<i>{word}</i>")
    return body + "".join(f"<sub>{part.strip('{}')}</sub>" for part in indices)
