"""Docstrings as Markdown: examples become code, equations keep their lines, public names become links."""

from __future__ import annotations

import re
from typing import Any

import griffe

SESSION = re.compile(r"^(?P<indent> *)>>> ")
TAG = re.compile(r"<(?=[a-z_/])")
OPTION = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


def to_markdown(text: str) -> str:
    """Sessions in fences, lines `name: what it is` as a list, everything else as it stands.

    >>> to_markdown("One.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['One.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    out: list[str] = []
    lines = iter([*text.splitlines(), ""])
    for line in lines:
        session = SESSION.match(line)
        if session:
            block = [line]
            for more in lines:
                if not more.strip():
                    break
                block.append(more)
            margin = len(session["indent"])
            out += ["```pycon", *(row[margin:] for row in block), "```", ""]
        elif OPTION.match(line):
            if out and out[-1].strip() and not out[-1].startswith(("- ", "  ")):
                out.append("")
            out.append(OPTION.sub(r"- `\1`: ", prose(line)))
        elif out and out[-1].startswith(("- `", "  ")) and line.startswith(" ") and line.strip():
            out.append("  " + prose(line.strip()))
        else:
            out.append(line if line.startswith("    ") else prose(line))  # an equation as it stands
    return "\n".join(out).rstrip()


def prose(line: str) -> str:
    """A product <query, key> is no tag of HTML.

    >>> prose("`<a>` of <query, key>")
    '`<a>` of &lt;query, key>'
    """
    return "`".join(part if k % 2 else TAG.sub("&lt;", part) for k, part in enumerate(line.split("`")))


class Docstrings(griffe.Extension):
    """Asked of every object that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
