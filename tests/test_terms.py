"""A term cuts itself, and so does a union of them: what is left of a support is the same part of its matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita import support
from partita.engine.terms import Visibility, both, visible, window_mask

Q, K, BATCH = 11, 13, (2, 4)
CPU = torch.device("cpu")
IDS = torch.arange(K) // 3
SUPPORTS = {
    "all": support.all(),
    "causal": support.causal(),
    "band": support.window(2, 3),
    "not self": support.not_self(),
    "causal, not self": support.causal() & support.not_self(),
    "lengths": support.lengths(torch.tensor([[5, 13, 0, 7], [1, 2, 3, 4]])),
    "segments, not self": support.segments(IDS[:Q], IDS) & support.not_self(),
    "mask": support.mask(torch.rand(4, Q, K, generator=torch.Generator().manual_seed(0)) < 0.5),
    "mask of keys": support.mask(torch.rand(2, 1, 1, K, generator=torch.Generator().manual_seed(1)) < 0.5),
    "union": (support.window(0, 0) | support.lengths(3)) & support.not_self(),
}
NAMES = st.sampled_from(sorted(SUPPORTS))


def bound(name: str) -> Visibility:
    return Visibility.of(SUPPORTS[name].bind(Q, K, BATCH, CPU), Q, K, BATCH, CPU)


def dense(terms, n_query: int, n_key: int, batch) -> torch.Tensor:
    if terms is None:
        return torch.zeros(*batch, n_query, n_key, dtype=torch.bool)
    out = window_mask(terms, slice(0, n_query), slice(0, n_key), CPU) if terms else None
    return (torch.ones((), dtype=torch.bool) if out is None else out).expand(*batch, n_query, n_key)


def assert_shows(seen: Visibility, expected: torch.Tensor) -> None:
    n_query, n_key = expected.shape[-2:]
    assert (seen.n_query, seen.n_key) == (n_query, n_key)
    for terms in (seen.terms_here(), seen.shown()):
        assert torch.equal(dense(terms, n_query, n_key, seen.batch), expected)
        assert all(len(part.batch) in (0, len(seen.batch)) for part in terms or ())
    assert torch.equal(seen.visible(), expected.sum(-1))


cuts = st.tuples(st.integers(0, 13), st.integers(0, 13)).map(sorted)


@given(name=NAMES, rows=cuts, keys=cuts, again=cuts)
def test_a_cut_shows_that_part_of_the_matrix(name, rows, keys, again):
    rows, keys = slice(*(min(x, Q) for x in rows)), slice(*keys)
    whole = SUPPORTS[name].dense(Q, K, BATCH)
    seen = bound(name).cut(rows, keys)
    assert_shows(seen, whole[..., rows, keys])
    more = slice(*(min(x, seen.n_query) for x in again))
    assert_shows(seen.cut(more), whole[..., rows, keys][..., more, :])


@given(name=NAMES, rows=st.lists(st.integers(0, Q - 1), max_size=9, unique=True), keys=cuts)
def test_rows_may_be_anywhere(name, rows, keys):
    at, keys = torch.tensor(rows, dtype=torch.long), slice(*keys)
    whole = SUPPORTS[name].dense(Q, K, BATCH)
    assert_shows(bound(name).cut(at).cut(keys=keys), whole[..., at, :][..., keys])


@pytest.mark.parametrize("name", SUPPORTS)
def test_entries_and_heads(name):
    whole, seen = SUPPORTS[name].dense(Q, K, BATCH), bound(name)
    assert_shows(seen.entries(1, slice(1, 3)), whole[:, 1:3])
    assert_shows(seen.split_heads(2), whole.unflatten(1, (2, 2)))
    mask = torch.rand(Q, K, generator=torch.Generator().manual_seed(2)) < 0.5
    assert_shows(seen.also(mask), whole & mask)


def test_a_key_that_is_left_out_moves_with_the_keys_and_is_forgotten_where_it_is_none_of_them():
    seen = bound("not self")
    assert seen.cut(slice(0, 3), slice(5, 9)).shown() == ()
    (term,) = seen.cut(slice(2, 6), slice(1, 9)).shown()
    assert term.skip.flatten().tolist() == [1, 2, 3, 4]


def test_each_of_two_terms_may_leave_out_a_key_of_its_own():
    here, moved = (bound("not self").cut(keys=slice(first, first + 9)).terms[0] for first in (0, 2))
    assert len(both(here, here)) == 1
    rows = slice(0, Q), slice(0, 9)
    expected = window_mask((here,), *rows, CPU) & window_mask((moved,), *rows, CPU)
    found = both(here, moved)
    assert torch.equal(window_mask(found, *rows, CPU), expected)
    assert torch.equal(visible(found, Q, 9, (1, 1), CPU), expected.sum(-1))
