"""Every statement of the mathematics is cited by a test, and no test cites one that does not exist.

`ids.txt` lists the statements, one per line. A citation counts inside a test function (its decorators and docstring
included), because there stands what would fail if the statement were false.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ID = re.compile(r"\bM-[A-Z]+-\d+\b")
TITLES = dict(line.split(" ", 1) for line in (Path(__file__).parent / "ids.txt").read_text().splitlines())
# remarks from which nothing follows that could be computed
WITHOUT_PROGRAM = {"M-RMK-1", "M-RMK-4", "M-RMK-6"}


def citations(source: str) -> set[str]:
    """The ids named inside the test functions of a file."""
    lines = source.splitlines()
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found |= set(ID.findall("\n".join(lines[first - 1 : node.end_lineno])))
    return found


@cache
def cited() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path.name in ("test_ids.py", "test_study.py"):  # these name ids as examples
            continue
        for each in citations(path.read_text(encoding="utf-8")):
            found.setdefault(each, []).append(path.name)
    return found


@pytest.mark.parametrize("each", [each for each in TITLES if each not in WITHOUT_PROGRAM])
def test_is_cited(each: str) -> None:
    assert each in cited(), f"no test cites {each} ({TITLES[each]}): write one that fails if it is false"


def test_nothing_unknown_is_cited() -> None:
    assert set(cited()) <= set(TITLES)
    source = TESTS.parent / "src"
    named = {each for path in source.rglob("*.py") for each in ID.findall(path.read_text(encoding="utf-8"))}
    assert named <= set(TITLES)


def test_the_list_is_whole() -> None:
    assert len(TITLES) == 121 and set(TITLES) >= WITHOUT_PROGRAM
    assert all(ID.fullmatch(each) and title.strip() for each, title in TITLES.items())


def test_a_citation_outside_a_test_does_not_count() -> None:
    source = '"""M-GIB-1"""\n# M-GIB-2\ndef helper():\n    """M-GIB-3"""\ndef test_it():\n    """M-GIB-4 M-GIB-40"""\n'
    assert citations(source) == {"M-GIB-4", "M-GIB-40"}
