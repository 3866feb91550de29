"""A support means one boolean matrix, and can count its rows without building it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita import support
from partita.errors import ValueRangeError
from tests.strategies import SUPPORTS, both, catalogue, either, supports


@st.composite
def shaped(draw):
    """(n_query, n_key, batch, (support, matrix))."""
    n_query, n_key = draw(st.sampled_from((0, 1, 3, 7, 12))), draw(st.sampled_from((0, 1, 4, 7, 11)))
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    return n_query, n_key, batch, draw(supports(n_query, n_key, batch, depth=3))


@given(shaped())
def test_a_support_is_the_matrix_of_its_definition_and_counts_its_rows(case):
    """M-SCL-5: n_i is the number of keys a row may see."""
    n_query, n_key, batch, (given_support, visible) = case
    visible = visible.expand(*batch, n_query, n_key)
    assert torch.equal(given_support.dense(n_query, n_key, batch), visible)
    counts = given_support.visible(n_query, n_key, batch)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, visible.sum(-1))


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


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3))
def test_a_window_is_refused_if_and_only_if_no_query_could_see_a_key(left, right, step):
    for make in (support.window, lambda a, b: support.dilated(step, a, b)):
        if left + right < 0:
            with pytest.raises(ValueRangeError, match="Unbounded is None, not -1"):
                make(left, right)
        else:
            assert make(left, right).dense(60, 60).any()


@pytest.mark.parametrize("sides", [(None, -1), (-1, None), (3, -1), (-1, 3), (None, None), (None, 0)])
def test_minus_one_is_a_distance_and_none_is_unbounded(sides):
    left, right = sides
    i, j = torch.arange(6)[:, None], torch.arange(6)
    want = (j >= i - (6 if left is None else left)) & (j <= i + (6 if right is None else right))
    assert torch.equal(support.window(left, right).dense(6, 6), want)


@pytest.mark.parametrize("shape", [(), (2,), (2, 1), (2, 3)])
def test_lengths_are_aligned_with_the_leading_batch_dimensions(shape):
    n = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    full = n.reshape(*shape, *[1] * (2 - len(shape))).expand(2, 3)
    for length in (n, int(n)) if not shape else (n,):  # a plain number holds for every batch entry
        assert torch.equal(support.lengths(length).visible(4, 9, (2, 3)), full[..., None].expand(2, 3, 4))


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


@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 1, 3], [7, 7, 2, 2, 2, -1], [5], [4, 4, 4]])
def test_documents_that_stand_together_are_intervals(ids):
    """The keys of other documents are skipped then, and never looked at; what a device holds is not read."""
    k_ids = torch.tensor(ids)
    q_ids = torch.tensor([9, *ids, -2])  # with rows whose document has no keys
    (term,) = support.segments(q_ids, k_ids).bind(len(ids) + 2, len(ids), (2,), torch.device("cpu"))
    assert term.is_interval
    assert torch.equal(support.segments(q_ids, k_ids).dense(len(ids) + 2, len(ids)), q_ids[:, None] == k_ids)
    batched = support.segments(q_ids.expand(2, -1), torch.stack([k_ids, k_ids.flip(0)]))
    (term,) = batched.bind(len(ids) + 2, len(ids), (2, 3), torch.device("cpu"))
    assert term.is_interval
    meta = support.segments(q_ids.to("meta"), k_ids.to("meta"))
    assert not meta.bind(len(ids) + 2, len(ids), (), torch.device("meta"))[0].is_interval
    scattered = torch.cat([k_ids, k_ids[:1] + 1, k_ids[:1]])
    assert not support.segments(scattered).bind(len(ids) + 2, len(ids) + 2, (), torch.device("cpu"))[0].is_interval


def test_segment_ids_need_not_be_small_or_sorted_and_two_sets_must_both_agree():
    ids = torch.tensor([2**40, -5, 2**40, 0, -5])
    assert torch.equal(support.segments(ids, ids).dense(5, 5), ids[:, None] == ids)
    assert support.segments(ids, ids).visible(5, 5).tolist() == [2, 2, 2, 1, 2]
    a, b = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 0])
    both = support.segments(a, a) & support.segments(b, b)
    assert torch.equal(both.dense(4, 4), torch.eye(4, dtype=torch.bool))


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
