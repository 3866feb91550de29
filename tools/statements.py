"""Write theory/docs/reference/statements.md: every statement (M-...), and code, tests, studies and errata that cite it.

    python tools/statements.py

The statements are those of theory/statements.toml. Who cites them is read from the sources, not by importing them: a
function or class by its docstring or body, a test by the docstring of the test function, where stands what would fail
if the statement were false; a study by its `ids`, an erratum by its `spec`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[1]
ROOTS = (ROOT / "src" / "partita", ROOT / "theory" / "partita_theory")
TESTS = (ROOT / "tests", ROOT / "theory" / "tests")
CITED = re.compile(r"\b(M-[A-Z]+-)(\d+)(?:(?:\.\.| to M-[A-Z]+-)(\d+))?\b")
GROUPS = {
    "GIB": "The law of a row",
    "ENT": "Entropy",
    "DER": "Derivatives",
    "LOSS": "Losses",
    "GEO": "Geometry of the simplex",
    "NCE": "Noise-contrastive estimation",
    "INC": "InfoNCE",
    "TMP": "Temperature",
    "ATT": "Attention",
    "SCL": "Scale policies",
    "ROB": "Noise and attacks",
    "INF": "Information",
    "SPE": "Spectra",
    "SPA": "Sparse and hard choices",
    "COL": "Attention received per key, and the ends of a row",
    "DIV": "Two distributions over the same keys",
    "RMK": "Remarks",
}
HEAD = """# Statements

What the ids in docstrings, tests, studies and errata mean. Each statement stands here in full, with its conditions;
under it, what computes it and what would fail if it were false. Letters: s raw scores, z = scale * s + bias logits,
p = softmax(z), Z its normaliser, H entropy in nats, n the keys a row sees, d the dimension of its scores, J = diag(p) -
p p^T, T a temperature, q and k queries and keys, v values and o their mean; x^T is a transpose, kron a Kronecker
product.

An id is a group and a number: M-ENT-3 is the third statement about entropy, M-SCL-2 the second about scale policies;
the headings below are the groups. Where a docstring, a study or an erratum says *the notes*, it means the five texts
this project began with, lecture notes on contrast (equations 4.4.x), losses (4.3.x), attention (5.1.x), noise (1 to 80)
and scale (1 to 63), and the program printed with them. They are not part of partita and nothing here depends on them:
what was right in them is stated below in corrected form, what was not is in the [errata](errata.md), by their equation
numbers.

This page is written by `python tools/statements.py` from `theory/statements.toml` and the sources.
"""


class Sources(NamedTuple):
    """Who cites each statement, by kind, in the order of the files."""

    code: dict[str, list[str]]
    tests: dict[str, list[str]]
    studies: dict[str, list[str]]
    errata: dict[str, list[str]]


def ids(text: str) -> set[str]:
    """The ids a text names; M-DER-2..4 and M-DER-2 to M-DER-4 name three."""
    return {
        f"{group}{number}"
        for group, first, last in CITED.findall(text)
        for number in range(int(first), int(last or first) + 1)
    }


def statements() -> dict[str, dict[str, str]]:
    """Title and full text of each statement by its id, and in `code` what computes it without naming it."""
    return tomllib.loads((ROOT / "theory" / "statements.toml").read_text(encoding="utf-8"))


def definitions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function and class with its dotted name, innermost last."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{node.name}" if inside else node.name
            yield name, node
            yield from definitions(node, name)
        else:
            yield from definitions(node, inside)


def cited_in_tests(source: str) -> dict[str, set[str]]:
    """The ids that the docstring of each test function names: an id in its body may be an example."""
    return {
        name: ids(ast.get_docstring(node) or "")
        for name, node in definitions(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def cited_in_code(source: str) -> dict[str, set[str]]:
    """The ids in each function or class, its own and not those of what it contains; "" is the file outside of them."""
    lines = source.splitlines()
    owner = [""] * len(lines)
    for name, node in definitions(ast.parse(source)):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for at in range(node.lineno - 1, node.end_lineno or node.lineno):
            owner[at] = name
    found: dict[str, set[str]] = {}
    for name, line in zip(owner, lines, strict=True):
        if named := ids(line):
            found.setdefault(name, set()).update(named)
    return found


def rows_of_errata(source: str) -> Iterator[tuple[str, set[str]]]:
    """Label and ids of each @book.add(where, kind, spec)."""
    book = re.search(r'^book = Book\("(\w+)"\)', source, re.MULTILINE)
    for _, node in definitions(ast.parse(source)):
        for call in getattr(node, "decorator_list", []):
            if book and isinstance(call, ast.Call) and ast.unparse(call.func) == "book.add":
                where, _, spec = map(ast.literal_eval, call.args)
                yield f"{book[1]} {where}", ids(spec)


def sources() -> Sources:
    """Read both packages and their tests."""
    found = Sources({}, {}, {}, {})
    for each, statement in statements().items():
        if "code" in statement:
            found.code[each] = statement["code"].split()

    def note(kind: dict[str, list[str]], named: set[str], name: str) -> None:
        for each in named:
            names = kind.setdefault(each, [])
            if name not in names:
                names.append(name)

    for root in ROOTS:
        for path in sorted(root.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            module = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
            if module.startswith("partita_theory.experiments."):
                if "\nEXPERIMENT = " in text:
                    note(found.studies, ids(text[text.index("\nEXPERIMENT = ") :]), path.stem)
            elif module.startswith("partita_theory.errata."):
                for label, named in rows_of_errata(text):
                    note(found.errata, named, label)
            else:
                for name, named in cited_in_code(text).items():
                    note(found.code, named, f"{module}.{name}" if name else module)
    for path in sorted(path for folder in TESTS for path in folder.rglob("test_*.py")):
        where = path.relative_to(ROOT).as_posix()
        for name, named in cited_in_tests(path.read_text(encoding="utf-8")).items():
            note(found.tests, named, f"{where}::{name}")
    return found


def page() -> str:
    """The text of theory/docs/reference/statements.md."""
    found = sources()
    parts, group = [HEAD], ""
    for each, statement in statements().items():
        if each.split("-")[1] != group:
            group = each.split("-")[1]
            parts.append(f"## {GROUPS[group]}\n")
        parts.append(f"### {each}\n\n**{_capital(statement['title'])}.** {_plain(statement['states'])}\n")
        # a file that cites an id above its functions is named only if none of its functions is
        code = [name for name in found.code.get(each, []) if not _stands_for(name, found.code[each])]
        parts.append(f"- code: {_listed(code) or 'none'}")
        parts.append(f"- tests: {_listed(found.tests.get(each, [])) or 'none'}")
        if each in found.studies:
            parts.append(f"- studies: {_listed(found.studies[each])}")
        if each in found.errata:
            parts.append(f"- errata: {', '.join(found.errata[each])}")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _stands_for(module: str, names: list[str]) -> bool:
    return any(name.startswith(module + ".") for name in names if name != module)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _capital(text: str) -> str:
    return _plain(text[0].upper() + text[1:])


def _plain(text: str) -> str:
    return re.sub(r"([*_<|\[\]])", r"\\\1", text)


if __name__ == "__main__":
    (ROOT / "theory" / "docs" / "reference" / "statements.md").write_text(page(), encoding="utf-8")
