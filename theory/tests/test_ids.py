"""Every statement is cited by a test, every heading of the notes has a place, and the pages list them all.

theory/statements.toml holds the statements, tools/statements.py writes their page. A citation counts in the docstring
of a test function, because there stands what would fail if the statement were false.
"""

from __future__ import annotations

import importlib
import re
from functools import cache, reduce
from pathlib import Path

import pytest
from programs import program

from partita_theory import errata
from partita_theory.experiments import names

ROOT = Path(__file__).parents[2]
# remarks from which nothing follows that could be computed
WITHOUT_PROGRAM = {"M-RMK-1", "M-RMK-4", "M-RMK-6"}


SCRIPT, TABLE = program("statements.py"), program("sections.py")
STATEMENTS = SCRIPT.statements()
SECTIONS = TABLE.sections()
BEYOND = ("M-COL-", "M-DIV-")  # statements that the notes do not have


@cache
def sources():
    return SCRIPT.sources()


def found(name: str) -> object:
    package, *parts = name.split(".")
    return reduce(getattr, parts, importlib.import_module(package))


@pytest.mark.parametrize("each", [each for each in STATEMENTS if each not in WITHOUT_PROGRAM])
def test_is_cited(each: str) -> None:
    assert each in sources().tests, f"no test cites {each} ({STATEMENTS[each]['title']}): write one that can fail"


@pytest.mark.parametrize("each", [each for each in STATEMENTS if each not in WITHOUT_PROGRAM])
def test_is_computed_somewhere(each: str) -> None:
    assert each in sources().code, f"nothing computes {each} ({STATEMENTS[each]['title']}), or says that it does"


def test_nothing_unknown_is_cited() -> None:
    for kind, found in sources()._asdict().items():
        assert set(found) <= set(STATEMENTS), kind
    for page in sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "theory" / "docs").rglob("*.md")]):
        assert SCRIPT.ids(page.read_text(encoding="utf-8")) <= set(STATEMENTS), page.name


def test_the_list_is_whole() -> None:
    assert len(STATEMENTS) == 134 and set(STATEMENTS) >= WITHOUT_PROGRAM
    for each, statement in STATEMENTS.items():
        assert SCRIPT.ids(each) == {each}
        assert statement["title"].strip() and len(statement["states"]) > 40, each


def test_what_is_said_to_compute_a_statement_exists() -> None:
    for statement in STATEMENTS.values():
        for name in statement.get("code", "").split():
            assert found(name) is not None


def test_the_page_is_what_the_script_makes() -> None:
    kept = (ROOT / "theory" / "docs" / "reference" / "statements.md").read_text(encoding="utf-8")
    assert kept == SCRIPT.page(), "run python tools/statements.py"


def test_a_citation_outside_a_docstring_of_a_test_does_not_count() -> None:
    source = (
        '"""M-GIB-1"""\n# M-GIB-2\ndef helper():\n    """M-GIB-3"""\n'
        'def test_it():\n    """M-GIB-4, M-DER-2..4"""\n    row = {"spec": "M-GIB-5"}\n'
    )
    assert SCRIPT.cited_in_tests(source) == {"test_it": {"M-GIB-4", "M-DER-2", "M-DER-3", "M-DER-4"}}


def test_code_is_named_by_its_innermost_function() -> None:
    source = '"""M-GIB-1"""\nclass A:\n    """M-GIB-2"""\n    def f(self):\n        """M-GIB-3 to M-GIB-4"""\n'
    assert SCRIPT.cited_in_code(source) == {"": {"M-GIB-1"}, "A": {"M-GIB-2"}, "A.f": {"M-GIB-3", "M-GIB-4"}}


# ---- the headings of the notes ---------------------------------------------------------------------------------------

# headings.txt lists them as the notes print them, by nothing that the pages are made of: note | number | level | titles
HEADINGS = [
    tuple(line.split(" | "))
    for line in (Path(__file__).parent / "headings.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
NUMBERS = {note: made[0] for note, made in TABLE.NOTES.items()}  # contrast -> 000
# headings of each note, and those without one below
NAMED = {
    "contrast": (21, 16),
    "losses": (9, 8),
    "noise": (31, 30),
    "scale": (35, 34),
    "attention": (10, 9),
}
MADE = TABLE.pages()


def pages() -> dict[str, str]:
    return {note: (ROOT / "theory" / "docs" / "notes" / f"{note}.md").read_text(encoding="utf-8") for note in NUMBERS}


def test_the_list_of_headings_is_whole() -> None:
    assert len(HEADINGS) == 106 and len(set(HEADINGS)) == 106
    assert [row[2] for row in HEADINGS].count("##") == 19
    for note, (count, leaves) in NAMED.items():
        assert sum(row[0] == NUMBERS[note] for row in HEADINGS) == count
        assert sum(s["note"] == note and not TABLE.is_parent(s) for s in SECTIONS) == leaves
    assert ("003", "30", "###", "总结与展望", "Summary and outlook") in HEADINGS


def test_every_heading_is_in_the_file_in_its_order() -> None:
    """From the file that pages and table are made of."""
    told = [(NUMBERS[s["note"]], s.get("at", "-"), "#" * s["level"], s["zh"], s["en"]) for s in SECTIONS]
    assert told == HEADINGS


@pytest.mark.parametrize("note", NUMBERS)
def test_every_heading_is_on_its_page_in_its_order(note: str) -> None:
    """Read off the page: its level, its number and both titles."""
    lines = [line for line in pages()[note].splitlines() if line.startswith("##")]
    expected = [
        f"{level} {'' if at == '-' else at + ' '}{zh} · {en}"
        for of, at, level, zh, en in HEADINGS
        if of == NUMBERS[note]
    ]
    assert lines == expected


def test_every_heading_is_in_the_table_and_no_cell_is_empty() -> None:
    """Read off the table: only a heading without software has empty cells, and says why in the first."""
    text = (ROOT / "theory" / "docs" / "reference" / "sections.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(("| [", "| **["))]
    assert len(rows) == len(HEADINGS)
    for line, (_, at, _, zh, en) in zip(rows, HEADINGS, strict=True):
        title, *columns = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert zh in title and en in title and (at == "-" or f"[{at}]" in title)
        assert len(columns) == 7
        reason, rest = columns[0], columns[1:]
        if reason.startswith("*"):
            assert len(reason) > 10 and not any(rest)
        else:
            assert all(columns), title


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s['note']} {s.get('at', s['en'])}")
def test_a_heading_has_statement_call_test_study_picture_and_page(section):
    if TABLE.is_parent(section):  # the next heading is below it
        below = SECTIONS[SECTIONS.index(section) + 1]
        assert set(section) <= {"note", "at", "level", "zh", "en"} and below["level"] > section["level"]
        return
    cells = TABLE.cells(section, SCRIPT, sources())
    assert set(cells.ids) <= set(STATEMENTS) and len(set(cells.ids)) == len(cells.ids)
    if "why" in section:
        assert len(section["why"]) > 10 and not cells.page and not cells.figure and "call" not in section
        return
    assert cells.ids and cells.code and cells.tests and found(section["call"]) is not None
    assert TABLE.place(cells.page).is_file() and (TABLE.HOME / "notes" / TABLE.picture(cells.figure)).is_file()
    assert bool(cells.studies) != ("no_study" in section), "a study, or the reason why there is none"
    assert set(cells.studies) <= set(names())
    for name in section.get("code", "").split():
        assert found(name) is not None
    for path in section.get("tests", "").split():
        assert (ROOT / path).is_file()


def test_under_each_heading_of_software_stand_statement_call_number_picture_study_and_page():
    """Read off the pages, between one heading and the next."""
    for note, text in pages().items():
        parts = re.split(r"^##+ .*$", text, flags=re.MULTILINE)[1:]
        own = [section for section in SECTIONS if section["note"] == note]
        assert len(parts) == len(own)
        for section, part in zip(own, parts, strict=True):
            if TABLE.is_parent(section):
                assert not part.strip()
            elif "why" in section:
                assert section["why"] in part
            else:
                one = TABLE.cells(section, SCRIPT, sources())
                assert all(f"[{each}](../reference/statements.md#" in part for each in one.ids)
                call = re.search(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
                assert call is not None and section["call"].rpartition(".")[2] in call[1]
                assert [line for line in call[1].splitlines() if line and not line.startswith((">>>", "..."))]
                assert f"]({TABLE.picture(one.figure)})" in part and "Read on: [" in part
                assert "- Study [`" in part or "- No study: " in part
                assert part.count("- **Printed otherwise**") == len(one.errata)


def test_every_statement_of_the_notes_and_every_erratum_has_a_heading():
    told = {each for section in SECTIONS for each in SCRIPT.ids(section.get("ids", ""))}
    assert not {each for each in set(STATEMENTS) - told if not each.startswith(BEYOND)}
    placed = {row.label for section in SECTIONS for row in TABLE.cells(section, SCRIPT, sources()).errata}
    assert placed == {row.label for row in errata.ROWS}


def test_a_study_is_in_the_table_under_each_heading_it_is_named_for():
    for section in SECTIONS:
        for name in section.get("studies", "").split():
            assert name in TABLE.cells(section, SCRIPT, sources()).studies


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_the_pages_of_the_notes_are_up_to_date(path: Path):
    assert path.read_text(encoding="utf-8") == MADE[path], "run python tools/sections.py"
