"""Every read of a distribution, on every backend, against the oracle: statistics, ends of a row, columns, best keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

import partita
from partita import Gibbs
from partita.engine import scans as counting
from tests import reference
from tests.conformance.serving import serving
from tests.differences import gradcheck
from tests.strategies import INF, SUPPORTS, Problem, catalogue, masked, problem, problems
from tests.tolerances import assert_exact

NAN = float("nan")
ROW_STATISTICS = ("log_partition", "entropy", "mean_score", "score_variance", "max_score", "visible", "effective_width")
TARGET_STATISTICS = ("nll", "log_prob", "target_rank")


EDGES = (1.0, 0.0, 0.3, 5.0, 0.3, INF)  # of gaps: in no order, one of them twice


def assert_best(gibbs: Gibbs, s: torch.Tensor, magnitude: float) -> None:
    """Values as the oracle has them; a key that is named has that score, to rounding, and is the first that has it."""
    assert_exact(gibbs.max_score(), reference.max_score(s), magnitude=magnitude)
    place, best, there = gibbs.argmax(), reference.max_score(s), reference.visible(s) > 0
    assert place.dtype == torch.int64
    assert (place[~there] == -1).all()
    found = s.gather(-1, place.clamp(min=0)[..., None])[..., 0] if s.shape[-1] else best
    assert_exact(found[there], best[there], magnitude=magnitude)


def assert_counts(gibbs: Gibbs, s: torch.Tensor, near: float, edges: tuple[float, ...] = EDGES) -> None:
    """What lies inside an edge by more than a rounding counts, what lies outside by more does not."""
    found, at = gibbs.gaps(edges), torch.tensor(edges, dtype=torch.float64)
    assert found.dtype == torch.int64
    assert not found.requires_grad
    low, high = reference.gaps(s, (at - near).clamp(min=0)), reference.gaps(s, at + near)
    assert found.shape == low.shape
    assert (found >= torch.where(at > near, low, low.clamp(max=1))).all()  # at least one within 0, of a row that sees
    assert (found <= high).all()
    assert torch.equal(found[..., edges.index(INF)], reference.visible(s).long())


def assert_all_exact(p: Problem) -> None:
    """Everything a Gibbs can be asked, against the definitions."""
    s, gibbs, magnitude = p.score(), p.gibbs(), p.magnitude
    for name in ROW_STATISTICS:
        expected = getattr(reference, name)(s)
        # A variance is a square: its rounding grows with the square of the scores.
        size = magnitude**2 if name == "score_variance" else magnitude
        assert_exact(getattr(gibbs, name)(), expected.double(), magnitude=size)
    for name in TARGET_STATISTICS:
        assert_exact(getattr(gibbs, name)(p.target), getattr(reference, name)(s, p.target), magnitude=magnitude)
    assert gibbs.target_rank(p.target).dtype == torch.int64
    assert_exact(gibbs.expectation(p.value), reference.expectation(s, p.value), magnitude=magnitude)
    assert_exact(gibbs.probs(), reference.probs(s), magnitude=magnitude)
    for name, column in zip(partita.Stats._fields, gibbs.stats(), strict=True):
        assert torch.equal(column, getattr(gibbs, name)()), name
    assert_best(gibbs, s, magnitude)
    assert_counts(gibbs, s, 1e-11 * max(1.0, magnitude))
    weight = torch.rand((*p.batch, p.n_query), dtype=torch.float64) - 0.3
    assert_exact(gibbs.received(), reference.received(s), magnitude=p.n_query)
    assert_exact(gibbs.received(weight), reference.received(s, weight), magnitude=p.n_query)
    shown = (gibbs.visible() > 0).double()
    assert_exact(gibbs.received(weight).sum(-1), (shown * weight).sum(-1), magnitude=p.n_query)


@given(p=problems())
def test_every_statistic_is_its_definition(backend, p):
    """M-GIB-1, M-ENT-1, M-COL-1, M-COL-4, M-COL-5, and all that is received is all that is given: M-COL-3."""
    with serving(backend):
        assert_all_exact(p)


@pytest.mark.parametrize("kind", SUPPORTS)
def test_every_support_is_its_matrix(backend, kind):
    with serving(backend):
        assert_all_exact(problem(11, 13, batch=(2,), support=catalogue(11, 13, (2,))[kind], scale=0.7))


@pytest.mark.parametrize("kind", SUPPORTS)
def test_every_support_is_its_matrix_beyond_one_block_of_keys(blocked, kind):
    """More keys than a native block, more rows than a block of rows, and more than one tile of each."""
    size = (67, 523) if blocked == "triton" else (131, 1523)
    with serving(blocked):
        assert_all_exact(problem(*size, dim=9, support=catalogue(*size)[kind], scale=0.5))


def test_query_groups_share_keys_without_repeating_them(backend):
    """(batch, key heads, group, n_query, dim) against (batch, key heads, 1, n_key, dim)."""
    p = problem(7, 11, batch=(2, 3, 4), support=catalogue(7, 11, (2, 3, 4))["mask"], scale=0.8)
    with serving(backend):
        assert_all_exact(replace(p, key=p.key[:, :, :1], value=p.value[:, :, :1]))


def test_batches_broadcast_in_every_direction(backend):
    p = problem(5, 7)
    with serving(backend):
        gibbs = partita.Gibbs(p.query.expand(3, 1, 5, 5), p.key.expand(2, 7, 5), scale=torch.rand(3, 2, 5).double())
        s = reference.score(p.query.expand(3, 1, 5, 5), p.key.expand(2, 7, 5), scale=gibbs.scale)
        assert_exact(gibbs.entropy(), reference.entropy(s))
        assert_exact(gibbs.expectation(p.value), reference.expectation(s, p.value))


def test_a_bias_may_bring_the_batch(backend):
    p = problem(5, 7)
    bias = torch.randn(2, 3, 1, 7, dtype=torch.float64)
    with serving(backend):
        s = reference.score(p.query, p.key, bias=bias)
        gibbs = partita.Gibbs(p.query, p.key, bias=bias)
        assert_exact(gibbs.log_partition(), reference.log_partition(s))
        assert_exact(gibbs.expectation(p.value), reference.expectation(s, p.value))


@pytest.mark.parametrize("n_query", [0, 1, 7])
@pytest.mark.parametrize("n_key", [0, 1, 123])
def test_degenerate_sizes(backend, n_query, n_key):
    p = problem(n_query, n_key)
    with serving(backend):
        s, gibbs = p.score(), p.gibbs()
        for name in ROW_STATISTICS:
            assert_exact(getattr(gibbs, name)(), getattr(reference, name)(s).double(), magnitude=100)
        assert_exact(gibbs.expectation(p.value), reference.expectation(s, p.value))
        assert_exact(gibbs.received(), reference.received(s))
        if n_key == 1:  # certain
            assert (gibbs.entropy() == 0).all() and (gibbs.score_variance() == 0).all()
            assert torch.equal(gibbs.log_partition(), gibbs.max_score())
        query = p.query.clone().requires_grad_()
        assert torch.autograd.grad(p.gibbs(query=query).received().sum(), query)[0].shape == query.shape


def test_top_is_the_sorted_scores(backend):
    p = problem(9, 31, batch=(2,), support=catalogue(9, 31, (2,))["mask"])
    with serving(backend):
        for k in (0, 1, 5, 31, 40):
            scores, indices = p.gibbs().top(k)
            want_scores, want_indices = reference.top(p.score(), k)
            assert_exact(scores, want_scores)
            assert torch.equal(indices, want_indices)


@pytest.mark.parametrize("kind", ["all", "causal", "mask", "window | mask"])
def test_top_beyond_one_block_of_keys(blocked, kind):
    """Up to 64 a native kernel of its own serves, past it the tiles; rows in several chunks."""
    p = problem(1131, 723, dim=9, support=catalogue(1131, 723)[kind], scale=0.5)
    with serving(blocked):
        for k in (1, 7, 64, 65):
            scores, indices = p.gibbs().top(k)
            want_scores, want_indices = reference.top(p.score(), k)
            assert_exact(scores, want_scores, magnitude=20)
            assert torch.equal(indices, want_indices)


def test_top_puts_the_lower_of_two_copies_first(natural):
    query, key = torch.ones(3, 1).double(), torch.tensor([2.0, 3.0, 1.0]).double().repeat(300)[:, None]
    with serving(natural):
        if natural != "native":
            pytest.skip("torch's topk says nothing about ties")
        scores, indices = Gibbs(query, key).top(5)
        assert indices.tolist() == [[1, 4, 7, 10, 13]] * 3
        assert_exact(scores, torch.full((3, 5), 3.0, dtype=torch.float64))


def test_log_prob_of_the_top_is_that_of_its_keys(backend):
    p = problem(9, 31, support=catalogue(9, 31)["mask"])
    with serving(backend):
        found, index = p.gibbs().top_log_prob(3)
        expected = reference.log_probs(p.score()).gather(-1, index.clamp(min=0)).masked_fill(index < 0, -torch.inf)
        assert_exact(found, expected)
        query = p.query.clone().requires_grad_()
        assert gradcheck(lambda x: p.gibbs(query=x).top_log_prob(2)[0][:4].exp(), query)


def test_the_same_call_twice_is_bitwise_equal(natural):
    p = problem(67, 211, batch=(3,), support=catalogue(67, 211)["causal"])
    with serving(natural):
        first, second = ([*p.gibbs().stats(), p.gibbs().expectation(p.value)] for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)


# The best key of a row, and how many keys are near it ---------------------------------------------------------


def test_ties_go_to_the_lowest_index(natural):
    """Copies of a key tie, in one block and in several; few rows split the keys. Products of single whole numbers are
    exact, where the sum of several may be rounded in two ways for two copies."""
    for n_query, copies in ((2, 700), (67, 3), (1, 5)):
        query, few = (1 - 2 * (torch.arange(n_query) % 2)).double()[:, None], torch.randperm(7).double()[:, None]
        key = few.repeat(copies, 1)
        s = reference.score(query, few)
        with serving(natural):
            gibbs = Gibbs(query, key)
            assert torch.equal(gibbs.argmax(), reference.argmax(s))
            hidden = Gibbs(query, key, support=partita.support.mask(torch.arange(7 * copies) >= 7))
            if copies > 1:
                assert torch.equal(hidden.argmax(), reference.argmax(s) + 7)


def test_rows_without_a_best_key_are_decided(backend):
    keep = torch.rand(5, 9) < 0.6
    keep[:, 4] = False
    keep[2] = False
    p = problem(5, 9, support=masked(keep))
    key = p.key.clone()
    key[4] = NAN
    with serving(backend):
        gibbs = p.gibbs(key=key)
        assert_best(gibbs, p.score(), 10.0)
        assert gibbs.argmax()[2] == -1
        spoiled = Gibbs(p.query, key)  # every row sees the nan
        assert (spoiled.argmax() == 4).all()
        none = problem(3, 0).gibbs()
        assert (none.argmax() == -1).all()
        assert (problem(3, 1).gibbs().argmax() == 0).all()
        assert problem(0, 3).gibbs().argmax().shape == (0,)


def whole(n_query: int, n_key: int, *, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers whose scores every dtype holds: no rounding, many ties, gaps that meet their edge."""
    return torch.randint(-2, 3, (n_query, 3)).to(dtype), torch.randint(-2, 3, (n_key, 3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_an_edge_that_is_met_exactly_counts(natural, dtype, softcap):
    """Ties, and gaps of whole numbers, on both sides of an edge; copies of a capped score tie too."""
    query, key = whole(67, 700, dtype=dtype)
    s = reference.score(query, key, bias=torch.arange(700) % 2)
    edges = [0.0, 1.0, 2.0, 0.5, 100.0]
    with serving(natural):
        gibbs = Gibbs(query, key, bias=(torch.arange(700) % 2).to(dtype)[None], softcap=softcap)
        found = gibbs.gaps(edges)
        if softcap is None:
            assert torch.equal(found, reference.gaps(s, torch.tensor(edges)))
        assert torch.equal(gibbs.gaps(torch.tensor(edges)), found)


def test_below_float64_only_what_rounding_can_move_is_moved(natural):
    """A score of 9 products is within 9 roundings of sum |q k|, in float32; the difference of two within twice that."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p = problem(33, 301, dim=9, support=catalogue(33, 301)["causal"], scale=0.5)
        query, key = p.query.to(dtype), p.key.to(dtype)
        size = 0.5 * float((query.double().abs() @ key.double().abs().mT).max())
        with serving(natural):
            near = 2 * 10 * torch.finfo(torch.float32).eps * size
            assert_counts(p.gibbs(query=query, key=key), p.score(query=query, key=key), near)


def test_gaps_of_rows_without_a_best_key_are_decided(backend):
    keep = torch.rand(5, 9) < 0.6
    keep[:, 4] = False
    keep[2] = False
    keep[3] = True
    keep[3, 4] = False
    p = problem(5, 9, support=masked(keep))
    key = p.key.clone()
    key[4] = NAN
    with serving(backend):
        gibbs = p.gibbs(key=key)
        assert_counts(gibbs, p.score(), 1e-10)
        assert (gibbs.gaps(EDGES)[2] == 0).all()
        seen = p.gibbs(key=key, support=partita.support.mask(keep | (torch.arange(5) == 3)[:, None])).gaps(EDGES)
        assert (seen[3] == 0).all()  # a nan that the row sees
        assert torch.equal(seen[[0, 1, 2, 4]], gibbs.gaps(EDGES)[[0, 1, 2, 4]])
        far = Gibbs(torch.ones(1, 1), torch.tensor([[INF], [1.0], [INF]]))
        assert far.gaps([0.0, 3.0, INF]).tolist() == [[2, 2, 3]]
        assert (problem(3, 0).gibbs().gaps([0.0, INF]) == 0).all()
        assert (problem(3, 1).gibbs().gaps([0.0, INF]) == 1).all()
        assert problem(0, 3).gibbs().gaps([0.0]).shape == (0, 1)
        assert p.gibbs().gaps([]).shape == (5, 0)


def test_n_bounds_the_mass(backend):
    """M-COL-5: N exp(-x) <= mass <= N + (visible - N) exp(-x), and N rises with x."""
    p = problem(7, 123, scale=2.0)
    edges = torch.tensor([0.0, 0.5, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    with serving(backend):
        gibbs = p.gibbs()
        count, mass = gibbs.gaps(edges).double(), (gibbs.log_partition() - gibbs.max_score()).exp()[:, None]
        assert (count.diff(dim=-1) >= 0).all()
        assert (count * (-edges).exp() <= mass * (1 + 1e-12)).all()
        assert (mass <= (count + (123 - count) * (-edges).exp()) * (1 + 1e-12)).all()


def test_the_native_kernel_serves_what_it_can(monkeypatch):
    query, key = whole(40, 600)

    def tiles(request):
        raise AssertionError("computed by tiles")

    with serving("native"):
        expected = reference.gaps(reference.score(query, key), torch.tensor([1.0]))
        monkeypatch.setattr(counting.tiled, "score_tiles", tiles)
        assert torch.equal(Gibbs(query, key).gaps([1.0]), expected)


def test_grouped_queries_have_the_best_keys_and_gaps_of_repeated_keys(backend):
    query, key = torch.randn(2, 6, 5, 3).double(), torch.randn(2, 2, 7, 3).double()
    s = reference.score(query, reference.repeat_heads(key, 6))
    with serving(backend):
        gibbs = Gibbs(query.requires_grad_(), key, grouped=True)
        entropy = gibbs.entropy()
        assert_best(gibbs, s, 10.0)
        entropy.sum().backward()  # the pass of the rows is still there
        first = Gibbs(query, key, grouped=True)
        assert torch.equal(first.argmax(), reference.argmax(s))
        assert first.log_partition().requires_grad
        assert_counts(first, s, 1e-10)
        shared = Gibbs(query.detach(), key[:, :1], scale=torch.rand(2, 6, 5).double())
        assert_counts(shared, reference.score(query, key[:, :1], scale=shared.scale), 1e-10)


def test_every_read_compiles_into_one_graph(backend):
    """The same values and gradients; a graph is made once, and whatever backend is chosen serves it."""
    p = problem(7, 11)
    leaves = [x.clone().requires_grad_() for x in (p.query, p.key, p.query + 1, p.key.flip(0))]

    def read(query, key, other, others, edges):
        one, two = (Gibbs(a, b, support=partita.support.causal()) for a, b in ((query, key), (other, others)))
        ends = one.argmax(), one.entropy(), one.gaps(edges), one.gaps([0.0, 2.0])
        both = partita.divergence(one, two, "js").sum() + partita.divergence(one, two, "reverse").sin().sum()
        return one.received().sin().sum() + both, ends

    edges = torch.tensor([1.0, 0.0])
    with serving(backend):
        torch._dynamo.reset()
        compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
        (found, ends), (want, others) = compiled(*leaves, edges), read(*leaves, edges)
        for a, b in zip((found, *ends), (want, *others), strict=True):
            assert_exact(a.detach(), b.detach())
        for a, b in zip(*(torch.autograd.grad(x, leaves) for x in (found, want)), strict=True):
            assert_exact(a, b)
        with pytest.raises(partita.errors.ValueRangeError, match="not negative"):
            compiled(*leaves, -1 - edges)


def test_gaps_under_vmap():
    query, key = whole(15, 9)
    found = torch.vmap(lambda q: Gibbs(q, key).gaps([0.0, 1.0]))(query.view(3, 5, 3))
    assert torch.equal(found.view(15, 2), Gibbs(query, key).gaps([0.0, 1.0]))
