"""Write docs/sections.md: every section of the notes, with the function, the test, the study and the page it became.

    python docs/sections.py

tests/sections.toml names the statements (M-...) of each section and its page; who cites them is found as for the page
of statements, and what cites nothing is named there.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[1]
MOST = 3  # names in a cell; the page of statements has them all
HEAD = """# The notes, section by section

The five texts this project began with ([statements](statements.md) says which), and what became of each section: the
statements it was corrected to, the functions that compute them, the tests that would fail if they were false, the
studies that put them to the test, and the page to read. Sections are numbered as in the notes, titles are ours;
neighbours that the sources of the statements do not tell apart share a row. A cell names a few of what there is; the
statements have all of it.

This page is written by `python docs/sections.py` from `tests/sections.toml` and the sources.
"""
TITLES = {
    "contrast": "Contrast",
    "losses": "Losses",
    "attention": "Attention",
    "noise": "Noise and entropy",
    "scale": "Scale and length",
}


class Cells(NamedTuple):
    """What a section became."""

    ids: list[str]
    code: list[str]
    tests: list[str]
    studies: list[str]
    page: str


def sections() -> list[dict[str, Any]]:
    """The sections, in the order of the notes."""
    found: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "sections.toml").read_text(encoding="utf-8"))[
        "section"
    ]
    return found


def load_statements() -> Any:
    """The script of the other page."""
    spec = importlib.util.spec_from_file_location("statements", ROOT / "docs" / "statements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(section: dict[str, Any], script: Any, found: Any) -> Cells:
    """What is named in the file comes first, then what cites the statements of the section."""
    order = list(script.statements())
    ids = sorted(script.ids(section["ids"]), key=order.index)

    def cited(kind: str) -> list[str]:
        names = section.get(kind, "").split()
        for each in ids:
            names += [name for name in getattr(found, kind).get(each, []) if name not in names]
        return names

    return Cells(ids, cited("code"), cited("tests"), cited("studies"), section.get("page", ""))


def _few(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:MOST])
    return shown + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def page() -> str:
    """The text of docs/sections.md."""
    script = load_statements()
    found = script.sources()
    parts, note = [HEAD], ""
    for section in sections():
        if section["note"] != note:
            note = section["note"]
            parts.append(f"\n## {TITLES[note]}\n")
            parts.append("| section | statements | functions | tests | studies | page |\n|---|---|---|---|---|---|")
        one = cells(section, script, found)
        ids = ", ".join(f"[{each}](statements.md#{each.lower()})" for each in one.ids)
        name = Path(one.page).stem
        link = f"[{re.sub(r'^[0-9]+-', '', name)}]({one.page})" if one.page else section.get("why", "")
        columns = (
            f"{section['at']} {section['title']}",
            ids,
            _few(one.code),
            _few(one.tests),
            _few(one.studies) or section.get("no_study", ""),
            link,
        )
        parts.append("| " + " | ".join(columns) + " |")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "sections.md").write_text(page(), encoding="utf-8")
