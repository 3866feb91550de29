"""One, two and four processes give the same bits in exact rows, and a row does not know its company over a group.

Slices of classes are even; slices of a sequence begin where leaves of the tree do, and then three processes agree too.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.exactly import SEEN
from tests.distributed.world import Worlds

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def run(worlds: Worlds, size: int, call: str, **given: object) -> dict[str, str]:
    """What every rank found; all of them the same."""
    first, *others = worlds.of(size).run("exactly", call, **given)
    assert all(other == first for other in others)
    return first


def assert_same(one: dict[str, str], other: dict[str, str]) -> None:
    assert [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", ["cross_entropy", "tokens", "divergence"])
def test_classes(worlds: Worlds, call: str, dtype: torch.dtype) -> None:
    one, two, four = (run(worlds, size, call, dtype=dtype) for size in (1, 2, 4))
    assert_same(one, two)
    assert_same(one, four)
    alone = run(worlds, 2, call, dtype=dtype, alone=True)
    assert alone and alone.items() <= two.items()


@pytest.mark.parametrize(
    ("seen", "dtype"), [(seen, dtype) for seen in SEEN for dtype in DTYPES[: 1 if seen == "holes" else None]], ids=str
)
def test_a_sequence(worlds: Worlds, seen: str, dtype: torch.dtype) -> None:
    one = run(worlds, 1, "attention", seen=seen, dtype=dtype)
    for size in (2, 3, 4):
        assert_same(one, run(worlds, size, "attention", seen=seen, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_in_zigzag_order(worlds: Worlds, dtype: torch.dtype) -> None:
    given = {"seen": "causal", "zigzag": True, "dtype": dtype}
    one, two, four = (run(worlds, size, "attention", **given) for size in (1, 2, 4))
    assert_same(one, two)
    assert_same(one, four)


@pytest.mark.parametrize(
    ("call", "noticed"), [("cross_entropy", "plain gradient of hidden, row"), ("attention", "gradient of the query")]
)
def test_joining_in_order_of_arrival_is_noticed(worlds: Worlds, call: str, noticed: str) -> None:
    given = {"dtype": torch.float32} | ({"seen": "all"} if call == "attention" else {})
    one, four = (worlds.of(size).run("exactly", "mutated", call=call, **given) for size in (1, 4))
    assert any(found[noticed] != one[0][noticed] for found in four)


@pytest.mark.parametrize("size", [1, 2])
def test_what_comes_behind_a_row_is_nothing_to_it(worlds: Worlds, size: int) -> None:
    worlds.of(size).run("exactly", "behind", dtype=torch.float32)
