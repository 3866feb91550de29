"""The executable errata: every row's right formula agrees with its measurement, and its printed one does not."""

from __future__ import annotations

import pytest

from partita.errors import ShapeError, ValueRangeError
from partita.nn import MultiheadAttention
from partita_studies import errata
from partita_studies.errata.row import Book, Reading

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
# Wording (P9, P51), advice (P41), patterns left to experiments (P42) and an analogy (P44) hold nothing to compute.
PROSE = set(range(1, 54)) - {9, 41, 42, 44, 51}


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
    labels = [row.label for row in errata.ROWS]
    assert len(set(labels)) == len(labels)
    for row in errata.ROWS:
        assert row.spec.startswith("M-")
        assert row.quantity
        assert row.printed != row.right
        assert row.kind in errata.KINDS


def test_heads_must_divide_the_model():
    """M-ATT-3 (K7): where the printed program reshapes and fails, or drops features, ours refuses."""
    with pytest.raises(ShapeError, match="multiple of num_heads"):
        MultiheadAttention(10, 3)


def test_the_same_numbers_every_time():
    row = errata.find("noise (16)")
    assert row.check() == row.check()


def test_a_row_can_fail():
    book = Book("example")
    options = {"printed": "3", "right": "2", "spec": "M-GIB-1", "quantity": "1 + 1"}
    book.add("(1)", "W", **options)(lambda: Reading(3.0, 2.0, 3.0))
    book.add("(2)", "W", **options)(lambda: Reading(float("nan"), 2.0, 2.0))
    book.add("(3)", "W", **options)(lambda: Reading(2.0, 2.0, 2.0))
    assert [row.check().confirmed for row in book.rows] == [False, True, False]


def test_unknown_names_are_refused():
    with pytest.raises(ValueRangeError, match="no erratum"):
        errata.find("contrast (9)")
    with pytest.raises(ValueRangeError, match="kind must be one of W"):
        Book("x").add("(1)", "Z", printed="", right="", spec="M-GIB-1", quantity="")
