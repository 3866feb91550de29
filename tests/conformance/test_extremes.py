"""The best and the worst key of a row on every backend: with the pass, ties to the first, -1 where there is none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import partita
from partita import Gibbs
from tests import reference
from tests.conformance.serving import serving
from tests.strategies import INF, SUPPORTS, catalogue, masked, problem, problems
from tests.tolerances import assert_exact

NAN = float("nan")


def assert_ends(gibbs: Gibbs, s: torch.Tensor, magnitude: float) -> None:
    """Values as the oracle has them; a key that is named has that score, to rounding, and is the first that has it."""
    assert_exact(gibbs.max_score(), reference.max_score(s), magnitude=magnitude)
    assert_exact(gibbs.min_score(), reference.min_score(s), magnitude=magnitude)
    for name, of in (("argmax", reference.max_score), ("argmin", reference.min_score)):
        place = getattr(gibbs, name)()
        assert place.dtype == torch.int64
        there = reference.visible(s) > 0
        assert (place[~there] == -1).all()
        found = s.gather(-1, place.clamp(min=0)[..., None])[..., 0] if s.shape[-1] else of(s)
        assert_exact(found[there], of(s)[there], magnitude=magnitude)


@given(p=problems())
def test_the_ends_of_a_row_are_its_extreme_scores(backend, p):
    """M-COL-4."""
    with serving(backend):
        assert_ends(p.gibbs(), p.score(), p.magnitude)


@pytest.mark.parametrize("kind", SUPPORTS)
def test_the_ends_beyond_one_block_of_keys(natural, kind):
    p = problem(67, 1523, dim=9, support=catalogue(67, 1523)[kind], scale=0.5)
    with serving(natural):
        assert_ends(p.gibbs(), p.score(), 20.0)


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
            assert torch.equal(gibbs.argmin(), reference.argmin(s))
            hidden = Gibbs(query, key, support=partita.support.mask(torch.arange(7 * copies) >= 7))
            if copies > 1:
                assert torch.equal(hidden.argmax(), reference.argmax(s) + 7)
                assert torch.equal(hidden.argmin(), reference.argmin(s) + 7)


def test_edges_are_decided(backend):
    keep = torch.rand(5, 9) < 0.6
    keep[:, 4] = False
    keep[2] = False
    p = problem(5, 9, support=masked(keep))
    key = p.key.clone()
    key[4] = NAN
    with serving(backend):
        gibbs = p.gibbs(key=key)
        assert_ends(gibbs, p.score(), 10.0)
        assert gibbs.argmax()[2] == gibbs.argmin()[2] == -1
        assert gibbs.min_score()[2] == INF
        spoiled = Gibbs(p.query, key)  # every row sees the nan
        assert (spoiled.argmax() == 4).all()
        assert (spoiled.argmin() == 4).all()
        assert spoiled.min_score().isnan().all()
        none = problem(3, 0).gibbs()
        assert (none.argmax() == -1).all()
        assert (none.min_score() == INF).all()
        one = problem(3, 1).gibbs()
        assert (one.argmin() == 0).all()
        # one score, perhaps made twice: two sums of 5 products, each within 5 roundings of sum |q k|
        bound = 2 * 5 * torch.finfo(torch.float64).eps * float((one.query.abs() @ one.key.abs().mT).max())
        torch.testing.assert_close(one.min_score(), one.max_score(), rtol=0.0, atol=bound)
        assert problem(0, 3).gibbs().argmax().shape == (0,)


def test_grouped_queries_and_graphs_change_nothing(backend):
    query, key = torch.randn(2, 6, 5, 3).double(), torch.randn(2, 2, 7, 3).double()
    s = reference.score(query, reference.repeat_heads(key, 6))
    with serving(backend):
        gibbs = Gibbs(query.requires_grad_(), key, grouped=True)
        entropy = gibbs.entropy()
        assert torch.equal(gibbs.argmax(), reference.argmax(s))
        assert torch.equal(Gibbs(query, key, grouped=True).argmin(), reference.argmin(s))
        assert not gibbs.min_score().requires_grad
        entropy.sum().backward()  # the pass of the rows is still there
        first = Gibbs(query, key, grouped=True)
        assert torch.equal(first.argmax(), reference.argmax(s))
        assert first.log_partition().requires_grad


def test_a_change_in_place_is_noticed(backend):
    p = problem(5, 9)
    query = p.query.clone()
    with serving(backend):
        gibbs = p.gibbs(query=query)
        gibbs.argmax()
        query.neg_()
        assert torch.equal(gibbs.argmax(), p.gibbs(query=-p.query).argmax())


def test_the_ends_compile_into_one_graph(backend):
    p = problem(5, 9)

    def read(query, key):
        gibbs = Gibbs(query, key)
        return gibbs.argmax(), gibbs.argmin(), gibbs.min_score(), gibbs.entropy()

    with serving(backend):
        torch._dynamo.reset()
        found = torch.compile(read, backend="aot_eager", fullgraph=True)(p.query, p.key)
        for a, b in zip(found, read(p.query, p.key), strict=True):
            assert_exact(a, b)
