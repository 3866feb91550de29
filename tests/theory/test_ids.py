"""Every statement of the mathematics is cited by a test, none is cited that is not there, and the page lists them all.

docs/statements.toml holds the statements, docs/statements.py writes their page. A citation counts in the docstring of a
test function, because there stands what would fail if the statement were false.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache, reduce
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# remarks from which nothing follows that could be computed
WITHOUT_PROGRAM = {"M-RMK-1", "M-RMK-4", "M-RMK-6"}


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("statements", ROOT / "docs" / "statements.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = script()
STATEMENTS = SCRIPT.statements()


@cache
def sources():
    return SCRIPT.sources()


@pytest.mark.parametrize("each", [each for each in STATEMENTS if each not in WITHOUT_PROGRAM])
def test_is_cited(each: str) -> None:
    assert each in sources().tests, f"no test cites {each} ({STATEMENTS[each]['title']}): write one that can fail"


@pytest.mark.parametrize("each", [each for each in STATEMENTS if each not in WITHOUT_PROGRAM])
def test_is_computed_somewhere(each: str) -> None:
    assert each in sources().code, f"nothing computes {each} ({STATEMENTS[each]['title']}), or says that it does"


def test_nothing_unknown_is_cited() -> None:
    for kind, found in sources()._asdict().items():
        assert set(found) <= set(STATEMENTS), kind
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert SCRIPT.ids(page.read_text(encoding="utf-8")) <= set(STATEMENTS), page.name


def test_the_list_is_whole() -> None:
    assert len(STATEMENTS) == 133 and set(STATEMENTS) >= WITHOUT_PROGRAM
    for each, statement in STATEMENTS.items():
        assert SCRIPT.ids(each) == {each}
        assert statement["title"].strip() and len(statement["states"]) > 40, each


def test_what_is_said_to_compute_a_statement_exists() -> None:
    for statement in STATEMENTS.values():
        for name in statement.get("code", "").split():
            reduce(getattr, name.split(".")[1:], importlib.import_module("partita"))


def test_the_page_is_what_the_script_makes() -> None:
    kept = (ROOT / "docs" / "statements.md").read_text(encoding="utf-8")
    assert kept == SCRIPT.page(), "run python docs/statements.py"


def test_a_citation_outside_a_docstring_of_a_test_does_not_count() -> None:
    source = (
        '"""M-GIB-1"""\n# M-GIB-2\ndef helper():\n    """M-GIB-3"""\n'
        'def test_it():\n    """M-GIB-4, M-DER-2..4"""\n    row = {"spec": "M-GIB-5"}\n'
    )
    assert SCRIPT.cited_in_tests(source) == {"test_it": {"M-GIB-4", "M-DER-2", "M-DER-3", "M-DER-4"}}


def test_code_is_named_by_its_innermost_function() -> None:
    source = '"""M-GIB-1"""\nclass A:\n    """M-GIB-2"""\n    def f(self):\n        """M-GIB-3 to M-GIB-4"""\n'
    assert SCRIPT.cited_in_code(source) == {"": {"M-GIB-1"}, "A": {"M-GIB-2"}, "A.f": {"M-GIB-3", "M-GIB-4"}}
