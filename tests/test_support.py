"""A support means one boolean matrix, and can count its rows without building it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita import support
from tests.strategies import SUPPORTS, both, catalogue, either, supports


@st.composite
def shaped(draw):
    """(n_query, n_key, batch, (support, matrix))."""
    n_query, n_key = draw(st.sampled_from((0, 1, 3, 7, 12))), draw(st.sampled_from((0, 1, 4, 7, 11)))
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    return n_query, n_key, batch, draw(supports(n_query, n_key, batch, depth=3))


@given(shaped())
def test_dense_is_the_matrix_of_the_definition(case):
    n_query, n_key, batch, (given_support, visible) = case
    assert torch.equal(given_support.dense(n_query, n_key, batch), visible.expand(*batch, n_query, n_key))


@given(shaped())
def test_visible_counts_the_row_of_the_matrix(case):
    """M-SCL-5: n_i is the number of keys a row may see."""
    n_query, n_key, batch, (given_support, visible) = case
    counts = given_support.visible(n_query, n_key, batch)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, visible.expand(*batch, n_query, n_key).sum(-1))


@pytest.mark.parametrize("kind", SUPPORTS)
@pytest.mark.parametrize(("n_query", "n_key"), [(123, 7), (7, 123), (123, 123)])
def test_visible_counts_the_row_at_odd_sizes(kind, n_query, n_key):
    given_support, visible = catalogue(n_query, n_key, (2,))[kind]
    counts = given_support.visible(n_query, n_key, (2,))
    assert torch.equal(counts, visible.expand(2, n_query, n_key).sum(-1))


@pytest.mark.parametrize("first", SUPPORTS[:10])
def test_every_pair_of_kinds_joins(first):
    """All kinds with all kinds, by & and |, also where closed forms for the count must give way to each other."""
    for n_query, n_key in ((11, 13), (13, 11)):
        kinds = catalogue(n_query, n_key, (2,))
        for second in SUPPORTS[:10]:
            for join in (both, either):
                joined, visible = join(kinds[first], kinds[second])
                expected = visible.expand(2, n_query, n_key)
                assert torch.equal(joined.dense(n_query, n_key, (2,)), expected), (second, join)
                assert torch.equal(joined.visible(n_query, n_key, (2,)), expected.sum(-1)), (second, join)


def test_and_or_are_boolean_algebra():
    a, b, c = support.causal(), support.window(1, 2), support.not_self()
    for left, right in [
        (a & b, b & a),
        (a | b, b | a),
        (a & (b | c), (a & b) | (a & c)),
        (a | (b & c), (a | b) & (a | c)),
        (a & support.all(), a),
        (a | support.all(), support.all()),
        (a & a, a),
        (c | c, c),
    ]:
        assert torch.equal(left.dense(7, 9), right.dense(7, 9))


def test_causal_sees_itself_and_what_came_before():
    assert support.causal().visible(4, 6).tolist() == [1, 2, 3, 4]
    assert support.causal(align="bottom-right").visible(4, 6).tolist() == [3, 4, 5, 6]
    assert support.causal(align="bottom-right").visible(3, 1).tolist() == [0, 0, 1]  # more rows than keys: empty rows


def test_window_is_inclusive_on_both_sides():
    rows = support.window(1, 2).dense(5, 5).int().tolist()
    assert rows == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]


def test_window_without_bounds_is_everything():
    assert torch.equal(support.window(None, None).dense(3, 5), support.all().dense(3, 5))
    assert torch.equal(support.window(None, 0).dense(3, 5), support.causal().dense(3, 5))


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_lengths_are_aligned_with_the_leading_batch_dimensions(shape):
    n = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    counts = support.lengths(n).visible(4, 9, (2, 3))
    full = n.reshape(*shape, *[1] * (2 - len(shape))).expand(2, 3)
    assert torch.equal(counts, full[..., None].expand(2, 3, 4))


def test_a_plain_length_holds_for_every_batch_entry():
    assert support.lengths(3).visible(2, 5, (2, 3)).eq(3).all()
    assert support.lengths(torch.tensor(3)).visible(2, 5, (2, 3)).eq(3).all()


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 1, 4), (2, 3, 4)])
def test_segment_ids_are_aligned_with_the_leading_batch_dimensions(shape):
    ids = torch.arange(torch.Size(shape).numel()).view(shape) % 3
    full = ids if ids.ndim == 1 else ids.reshape(*shape[:-1], *[1] * (3 - len(shape)), 4)
    want = (full[..., :, None] == full[..., None, :]).expand(2, 3, 4, 4)
    assert torch.equal(support.segments(ids, ids).dense(4, 4, (2, 3)), want)


def test_packed_documents_do_not_see_each_other():
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    packed = support.segments(ids, ids) & support.causal()
    assert packed.visible(6, 6).tolist() == [1, 2, 3, 1, 2, 1]


def test_two_segmentations_together_need_both_to_agree():
    a, b = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 0])
    both = support.segments(a, a) & support.segments(b, b)
    assert torch.equal(both.dense(4, 4), torch.eye(4, dtype=torch.bool))


def test_segment_ids_need_not_be_small_or_sorted():
    ids = torch.tensor([2**40, -5, 2**40, 0, -5])
    assert torch.equal(support.segments(ids, ids).dense(5, 5), ids[:, None] == ids)
    assert support.segments(ids, ids).visible(5, 5).tolist() == [2, 2, 2, 1, 2]


def test_not_self_hides_exactly_the_diagonal():
    assert torch.equal(~support.not_self().dense(4, 6), torch.eye(4, 6, dtype=torch.bool))
    assert support.not_self().visible(6, 4).tolist() == [3, 3, 3, 3, 4, 4]


@pytest.mark.parametrize("shape", [(1, 5), (4, 1), (1, 1), (4, 5), (3, 4, 5), (2, 1, 1, 5)])
def test_a_mask_broadcasts_from_the_right_as_in_torch(shape):
    keep = torch.arange(torch.Size(shape).numel()).view(shape) % 3 != 0
    assert torch.equal(support.mask(keep).dense(4, 5, (2, 3)), keep.expand(2, 3, 4, 5))


def test_supports_are_frozen():
    with pytest.raises(AttributeError):
        support.causal().left = 3
