"""How many keys lie near the best one, on every backend: the count of a dense matrix, to the last key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import partita
from partita import Gibbs
from partita.engine import gaps as counting
from tests import reference
from tests.conformance.serving import serving
from tests.strategies import INF, SUPPORTS, catalogue, masked, problem, problems

NAN = float("nan")
EDGES = (1.0, 0.0, 0.3, 5.0, 0.3, INF)  # in no order, one of them twice


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


def whole(n_query: int, n_key: int, *, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers whose scores every dtype holds: no rounding, many ties, gaps that meet their edge."""
    return torch.randint(-2, 3, (n_query, 3)).to(dtype), torch.randint(-2, 3, (n_key, 3)).to(dtype)


@given(p=problems())
def test_gaps_are_those_of_the_matrix(backend, p):
    """M-COL-5."""
    with serving(backend):
        assert_counts(p.gibbs(), p.score(), 1e-11 * max(1.0, p.magnitude))


@pytest.mark.parametrize("kind", SUPPORTS)
def test_gaps_beyond_one_block_of_keys(natural, kind):
    p = problem(67, 1523, dim=9, support=catalogue(67, 1523)[kind], scale=0.5)
    with serving(natural):
        assert_counts(p.gibbs(), p.score(), 1e-10)


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


def test_edges_are_decided(backend):
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


def test_grouped_queries_and_batches(backend):
    query, key = torch.randn(2, 6, 5, 3).double(), torch.randn(2, 2, 7, 3).double()
    s = reference.score(query, reference.repeat_heads(key, 6))
    with serving(backend):
        assert_counts(Gibbs(query.requires_grad_(), key, grouped=True), s, 1e-10)
        shared = Gibbs(query.detach(), key[:, :1], scale=torch.rand(2, 6, 5).double())
        assert_counts(shared, reference.score(query, key[:, :1], scale=shared.scale), 1e-10)


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
        raise AssertionError("the tiles were asked")

    with serving("native"):
        expected = reference.gaps(reference.score(query, key), torch.tensor([1.0]))
        monkeypatch.setattr(counting.tiled, "score_tiles", tiles)
        assert torch.equal(Gibbs(query, key).gaps([1.0]), expected)


def test_gaps_compile_into_one_graph(backend):
    query, key = whole(5, 9)

    def read(query, key, edges):
        gibbs = Gibbs(query, key, support=partita.support.causal())
        return gibbs.gaps(edges), gibbs.gaps([0.0, 2.0])

    with serving(backend):
        torch._dynamo.reset()
        compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
        edges = torch.tensor([1.0, 0.0])
        for a, b in zip(compiled(query, key, edges), read(query, key, edges), strict=True):
            assert torch.equal(a, b)
        with pytest.raises(partita.errors.ValueRangeError, match="not negative"):
            compiled(query, key, -1 - edges)


def test_gaps_under_vmap():
    query, key = whole(15, 9)
    found = torch.vmap(lambda q: Gibbs(q, key).gaps([0.0, 1.0]))(query.view(3, 5, 3))
    assert torch.equal(found.view(15, 2), Gibbs(query, key).gaps([0.0, 1.0]))
