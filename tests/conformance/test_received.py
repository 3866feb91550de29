"""Attention received per key, on every backend: against the dense sum, its gradients, its edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import partita
from partita import Gibbs
from partita.errors import DtypeError, ShapeError
from tests import reference
from tests.conformance.serving import serving
from tests.differences import gradcheck, gradgradcheck
from tests.strategies import Problem, catalogue, masked, problem
from tests.tolerances import assert_exact, assert_no_worse_than_naive

NAN = float("nan")


def rows_weight(p: Problem) -> torch.Tensor:
    return torch.rand((*p.batch, p.n_query), dtype=torch.float64) - 0.3


def test_a_thousand_rows_are_added_up(blocked):
    """More rows than a native task packs at a time, for one entry and for several."""
    for batch in ((), (3,)):
        p = problem(2311, 37, dim=3, batch=batch, support=catalogue(2311, 37)["window"], scale=0.5)
        with serving(blocked):
            assert_exact(p.gibbs().received(), reference.received(p.score()), magnitude=2311)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"bias": torch.randn(7, 9).double()}])
def test_first_and_second_derivatives_of_received(backend, options):
    """M-COL-2: the gradient of a column sum is that of a mean value."""
    p = problem(7, 9, dim=3, support=catalogue(7, 9)["mask"], **options)
    query, key = p.query.clone().requires_grad_(), p.key.clone().requires_grad_()
    scale, weight = (torch.rand(7, dtype=torch.float64).requires_grad_() for _ in range(2))
    bias = None if p.bias is None else p.bias.clone().requires_grad_()
    leaves = [x for x in (query, key, scale, weight, bias) if x is not None]

    def read(query, key, scale, weight, bias=None):
        return replace(p, query=query, key=key, scale=scale, bias=bias).gibbs().received(weight)

    with serving(backend):
        assert gradcheck(read, leaves)
        if not options:
            assert gradgradcheck(read, leaves)


def test_received_and_the_mean_value_are_each_others_transpose(backend):
    """M-COL-2: <value, received(weight)> = <weight, E[value]>, for every value and weight."""
    p = problem(7, 11, batch=(2,), support=catalogue(7, 11, (2,))["mask"])
    weight = rows_weight(p)
    with serving(backend):
        gibbs = p.gibbs()
        one = torch.einsum("bkv,bk->bv", p.value, gibbs.received(weight))
        other = torch.einsum("bqv,bq->bv", gibbs.expectation(p.value), weight)
        assert_exact(one, other, magnitude=10)


def test_grouped_queries_give_a_number_per_key_head(backend):
    query, key = torch.randn(2, 6, 5, 3).double(), torch.randn(2, 2, 7, 3).double()
    weight = torch.rand(6, 1).double()
    s = reference.score(query, reference.repeat_heads(key, 6))
    expected = reference.received(s, weight.expand(2, 6, 5)).unflatten(-2, (2, 3)).sum(-2)
    with serving(backend):
        leaf = key.clone().requires_grad_()
        found = Gibbs(query, leaf, grouped=True).received(weight)
        assert_exact(found.detach(), expected)
        g = torch.randn_like(found)
        again = key.clone().requires_grad_()
        s = reference.score(query, reference.repeat_heads(again, 6))
        dense = reference.received(s, weight.expand(2, 6, 5)).unflatten(-2, (2, 3)).sum(-2)
        assert_exact(torch.autograd.grad(found, leaf, g)[0], torch.autograd.grad(dense, again, g)[0])


def test_shared_keys_keep_a_number_per_batch_entry(backend):
    query, key = torch.randn(3, 5, 4).double(), torch.randn(6, 4).double()
    with serving(backend):
        assert_exact(Gibbs(query, key).received(), reference.received(reference.score(query, key)))


def test_an_empty_row_gives_nothing_whatever_its_weight(backend):
    keep = torch.rand(7, 11) < 0.5
    keep[3] = False
    p = problem(7, 11, support=masked(keep))
    weight = torch.ones(7, dtype=torch.float64)
    expected = reference.received(p.score(), weight)
    weight[3] = NAN
    query = p.query.clone().requires_grad_()
    with serving(backend):
        found = p.gibbs(query=query).received(weight)
        assert_exact(found.detach(), expected)
        grad = torch.autograd.grad(found.sin().sum(), query)[0]
        assert (grad[3] == 0).all()
        assert grad.isfinite().all()


def test_a_masked_key_poisons_nothing(backend):
    """A nan where no row may look changes nothing; one that row 0 sees spoils what row 0 gives to, and no other."""
    keep = torch.ones(5, 9, dtype=torch.bool)
    keep[:, 4] = False
    p = problem(5, 9, support=masked(keep))
    clean = reference.received(p.score())
    key = p.key.clone()
    key[4] = NAN
    with serving(backend):
        leaf = p.query.clone().requires_grad_()
        found = p.gibbs(query=leaf, key=key).received()
        assert_exact(found.detach(), clean)
        assert torch.autograd.grad(found.sin().sum(), leaf)[0].isfinite().all()
        keep = keep.clone()
        keep[0, 4], keep[0, 6] = True, False
        p = problem(5, 9, support=masked(keep))
        spoiled = partita.Gibbs(p.query, key, support=p.support).received()
        expected = torch.full((9,), NAN, dtype=torch.float64)
        expected[6] = reference.received(p.score())[6]
        assert_exact(spoiled, expected)


@pytest.mark.parametrize("kind", ["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_the_naive_formula(natural, dtype, kind):
    p = problem(256, 320, dim=16, support=catalogue(256, 320)[kind], dtype=dtype, scale=0.5)
    s = (p.query.float() @ p.key.float().mT).to(dtype) * 0.5
    if p.visible is not None:
        s = s.masked_fill(~p.visible, -torch.inf)
    with serving(natural):
        found = p.gibbs().received()
    assert found.dtype == torch.float32
    assert_no_worse_than_naive(found, s.softmax(-1).sum(-2), reference.received(p.score()))


def test_received_reads_the_rows_that_are_known(backend):
    """After a read of the rows one pass is left, and both give what a fresh object gives."""
    p = problem(7, 11)
    with serving(backend):
        gibbs = p.gibbs()
        gibbs.entropy()
        assert torch.equal(gibbs.received(), p.gibbs().received())


def test_what_is_no_weight_of_rows_is_refused():
    p = Gibbs(torch.zeros(3, 4, 2), torch.zeros(3, 5, 2))
    with pytest.raises(ShapeError, match=r"weight must broadcast to the rows \(3, 4\); got \(5,\)"):
        p.received(torch.ones(5))
    with pytest.raises(ShapeError, match="weight must broadcast"):
        p.received(torch.ones(2, 3, 4))
    with pytest.raises(DtypeError, match="weight must hold real floating-point numbers"):
        p.received(torch.ones(4, dtype=torch.int64))
