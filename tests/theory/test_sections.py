"""The table of the notes' sections: nothing in it is empty without a reason, nothing in it is made up."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import partita
from partita_studies.experiments import names

ROOT = Path(__file__).parents[2]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("sections", ROOT / "docs" / "sections.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = script()
SECTIONS = SCRIPT.sections()
STATEMENTS = SCRIPT.load_statements()
SOURCES = STATEMENTS.sources()
BEYOND = ("M-COL-", "M-DIV-")  # statements that the notes do not have


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s['note']} {s['at']}")
def test_a_section_has_function_test_study_and_page(section):
    cells = SCRIPT.cells(section, STATEMENTS, SOURCES)
    assert cells.ids and set(cells.ids) <= set(STATEMENTS.statements())
    if "why" in section:
        assert len(section["why"]) > 10 and not cells.page
        return
    assert cells.code and cells.tests and (ROOT / "docs" / cells.page).is_file()
    assert bool(cells.studies) != ("no_study" in section), "a study, or the reason why there is none"
    assert set(cells.studies) <= set(names())
    for name in section.get("code", "").split():
        assert found(name) is not None
    for path in section.get("tests", "").split():
        assert (ROOT / path).is_file()


def found(name: str) -> object:
    thing: object = partita
    for part in name.split(".")[1:]:
        thing = getattr(thing, part)
    return thing


def test_every_statement_of_the_notes_has_a_section():
    told = {each for section in SECTIONS for each in STATEMENTS.ids(section["ids"])}
    missing = set(STATEMENTS.statements()) - told
    assert not {each for each in missing if not each.startswith(BEYOND)}
    assert len({(s["note"], s["at"]) for s in SECTIONS}) == len(SECTIONS)


LAST = {"contrast": "4.4.5", "losses": "4.3.7", "attention": "5.1.8", "noise": "25", "scale": "29"}


def numbers(at: str) -> list[str]:
    """The sections of a row: "5.1.1 to 5.1.3" has three.

    >>> numbers("25 to 26"), numbers("4.4.3, end")
    (['25', '26'], ['4.4.3'])
    """
    first, _, last = at.partition(",")[0].partition(" to ")
    head, _, start = first.rpartition(".")
    stop = int(last.rpartition(".")[2]) if last else int(start)
    return [f"{head}.{k}" if head else str(k) for k in range(int(start), stop + 1)]


@pytest.mark.parametrize("note", LAST)
def test_no_section_of_a_note_is_left_out(note):
    """Sections are numbered one after another: from the first to the last each is in the table, in its order."""
    told = [number for section in SECTIONS if section["note"] == note for number in numbers(section["at"])]
    head, _, last = LAST[note].rpartition(".")
    assert list(dict.fromkeys(told)) == numbers(f"{head}.1 to {LAST[note]}" if head else f"1 to {last}")


def test_the_page_is_up_to_date():
    kept = (ROOT / "docs" / "sections.md").read_text(encoding="utf-8")
    assert kept == SCRIPT.page(), "run python docs/sections.py"
