"""The executable errata: every row's right formula agrees with its measurement, and its printed one does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from partita.errors import ShapeError, ValueRangeError
from partita.nn import MultiheadAttention
from partita_theory import errata
from partita_theory.errata.row import Book, Numbers
from partita_theory.experiment import Row
from partita_theory.experiments.errata import EXPERIMENT, errata_table

WRONG = {
    "contrast": "(4.4.4) (4.4.15) (4.4.16) (4.4.27)",
    "losses": "(4.3.2) (4.3.3) (4.3.5) (4.3.6)",
    "noise": "(2) (16) (35) (36) (37) (43) (62) (72) (73) (76) (77)",
    "scale": "(23) (30) (31) (32) (37) (41) (42) (59) (61)",
}
CONDITIONAL = {
    "contrast": "(4.4.8)",
    "losses": "(4.3.1) (4.3.4) (4.3.12)",
    "attention": "(5.1.9) (5.1.11)",
    "noise": "(6) (7) (8) (9) (10) (17) (25) (27) (32) (33) (39) (45) (49) (53) (54) (56) (67) (71) (78)",
    "scale": "(10) (11) (13) (14) (16) (17) (18) (19) (24) (28) (29) (38) (40) (49) (51) (63)",
}
UNTAGGED = {"contrast u1", "noise u3", "scale u4-u6", "scale u7", "scale u8"}
CODE = {f"code K{k}" for k in range(1, 10)}
# Wording (P9), advice (P41), patterns left to experiments (P42) and an analogy (P44) hold nothing to compute.
PROSE = set(range(1, 57)) - {9, 41, 42, 44}


@pytest.mark.parametrize("row", errata.ROWS, ids=lambda row: row.label)
def test_row_is_confirmed(row):
    verdict = row.check()
    assert verdict.right_holds, verdict.reading
    assert not verdict.printed_holds, verdict.reading


def test_every_wrong_and_conditional_equation_has_a_row():
    kinds = {row.label: row.kind for row in errata.ROWS}
    for table, kind, count in ((WRONG, "W", 28), (CONDITIONAL, "C", 41)):
        labels = [f"{document} {equation}" for document, equations in table.items() for equation in equations.split()]
        assert len(labels) == count
        for label in labels:
            assert kinds.get(label) == kind, label
    assert set(kinds) >= UNTAGGED
    assert {label for label, kind in kinds.items() if kind == "K"} == CODE
    prose = {int(label.split()[1][1:]) for label, kind in kinds.items() if kind == "P"}
    assert prose == PROSE


def test_labels_are_unique_and_rows_say_what_they_compute():
    assert len({row.label for row in errata.ROWS}) == len(errata.ROWS)
    for row in errata.ROWS:
        assert row.spec.startswith("M-") and row.quantity and row.printed != row.right and row.kind in errata.KINDS


def test_heads_must_divide_the_model():
    """M-ATT-3 (K7): where the printed program reshapes and fails, or drops features, ours refuses."""
    with pytest.raises(ShapeError, match="multiple of num_heads"):
        MultiheadAttention(10, 3)


def test_the_same_numbers_every_time():
    row = errata.find("noise (16)")
    assert row.check() == row.check()


def row(*numbers: float) -> Callable[[], Numbers]:
    def compute() -> Numbers:
        """printed: 3
        right: 2
        quantity: 1 + 1
        """
        return numbers

    return compute


def test_a_row_can_fail():
    book = Book("example")
    for numbers in ((3, 2, 3), (float("nan"), 2, 2), (2, 2, 2)):
        book.add("(1)", "W", "M-GIB-1")(row(*numbers))
    assert [each.check().confirmed for each in book.rows] == [False, True, False]


def test_what_is_no_row_is_refused():
    def wrong() -> Numbers:
        """printed: 3"""
        return 3, 2, 2

    with pytest.raises(ValueRangeError, match="no erratum"):
        errata.find("contrast (9)")
    with pytest.raises(ValueRangeError, match="kind must be one of W"):
        Book("x").add("(1)", "Z", "M-GIB-1")
    with pytest.raises(ValueRangeError, match="three lines printed: , right: , quantity: ; got \\['printed: 3'\\]"):
        Book("x").add("(1)", "W", "M-GIB-1")(wrong)


PAGE = Path(__file__).parents[1] / "docs" / "reference" / "errata.md"
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?|-?inf")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for cell in EXPERIMENT.cells("quick") for row in EXPERIMENT.run(cell.settings, cell.seed)]


def test_every_row_is_recomputed(rows: list[Row]) -> None:
    assert {row["label"] for row in rows} == {row.label for row in errata.ROWS}
    assert len(rows) == len(errata.ROWS) == 149


def test_the_page_is_what_is_computed(rows: list[Row]) -> None:
    """Text to the letter; numbers as near as the row's own tolerance, since torch and processors round differently."""
    made, kept = errata_table(rows).splitlines(), PAGE.read_text(encoding="utf-8").splitlines()
    assert len(made) == len(kept)
    tolerances = iter([row["tolerance"] for row in rows])
    for new, old in zip(made, kept, strict=True):
        if not re.match(r"\| (?!row|---)", new):
            assert new == old
            continue
        tolerance = next(tolerances)
        for a, b in zip(re.split(r"(?<!\\)\|", new), re.split(r"(?<!\\)\|", old), strict=True):
            if NUMBER.fullmatch(a.strip()) and NUMBER.fullmatch(b.strip()):
                assert float(a) == pytest.approx(float(b), abs=tolerance, rel=1e-2)
            else:
                assert a == b


def test_the_verdict_can_be_negative(rows: list[Row]) -> None:
    assert EXPERIMENT.judge(rows).answer == "holds"
    for change in ({"right_holds": False}, {"printed_holds": True}):
        verdict = EXPERIMENT.judge([*rows[:-1], {**rows[-1], **change}])
        assert verdict.answer == "does not hold" and rows[-1]["label"] in verdict.evidence
