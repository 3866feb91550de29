"""Two distributions at once, on every backend: against dense formulas, gradients, and supports that differ."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import partita
from partita import Gibbs
from partita.comparison import weighted_divergence
from partita.engine.divergences import KINDS
from partita.errors import DtypeError, ShapeError, ValueRangeError
from tests import reference
from tests.conformance.serving import serving
from tests.differences import gradcheck
from tests.strategies import INF, SUPPORTS, catalogue, masked, problem, problems, supports
from tests.tolerances import assert_exact, assert_no_worse_than_naive

NAN = float("nan")


def pair(n_query=7, n_key=9, dims=(3, 5), batch=(), kinds=("mask", "mask"), **options):
    """Two problems over the same keys' index, of different dims."""
    known = catalogue(n_query, n_key, batch)
    p, q = (
        problem(n_query, n_key, dim=dim, batch=batch, seed=seed, support=known[kind], **options)
        for seed, (dim, kind) in enumerate(zip(dims, kinds, strict=True))
    )
    return p, q


@st.composite
def pairs(draw: st.DrawFn):
    """A random problem, and another over as many queries and keys with features and a support of its own."""
    p = draw(problems())
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    dim = draw(st.sampled_from((1, 4)))
    support = draw(supports(p.n_query, p.n_key, p.batch)) if draw(st.booleans()) else (p.support, p.visible)
    q = replace(
        p,
        query=torch.randn(*p.batch, p.n_query, dim, generator=g, dtype=torch.float64),
        key=torch.randn(p.n_key, dim, generator=g, dtype=torch.float64),
        support=support[0],
        visible=support[1],
        bias=p.bias if draw(st.booleans()) else None,
    )
    return p, q


@pytest.mark.parametrize("kind", KINDS)
@given(both=pairs(), beta=st.sampled_from((0.1, 0.5, 0.8)))
def test_every_divergence_is_its_definition(backend, kind, both, beta):
    """M-DIV-1 to M-DIV-4, and where supports differ M-DIV-5."""
    p, q = both
    with serving(backend):
        found = partita.divergence(p.gibbs(), q.gibbs(), kind, beta=beta)
    assert_exact(found, reference.divergence(p.score(), q.score(), kind, beta), magnitude=p.magnitude + q.magnitude)


@pytest.mark.parametrize("kind", SUPPORTS)
def test_every_support_beyond_one_block_of_keys(blocked, kind):
    p, q = pair(131, 523, kinds=(kind, kind), scale=0.5)
    with serving(blocked):
        for name in KINDS:
            expected = reference.divergence(p.score(), q.score(), name, 0.3)
            assert_exact(partita.divergence(p.gibbs(), q.gibbs(), name, beta=0.3), expected, magnitude=10)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"bias": torch.randn(7, 9).double()}])
@pytest.mark.parametrize("kind", KINDS)
def test_first_derivatives_to_both_sides(backend, kind, options):
    """M-DIV-6."""
    p, q = pair(**options)
    scale = torch.rand(7, dtype=torch.float64) + 0.2
    leaves = [x.clone().requires_grad_() for x in (p.query, p.key, scale, q.query, q.key)]
    leaves += [x.bias.clone().requires_grad_() for x in (p, q) if x.bias is not None]

    def read(query, key, scale, other_query, other_key, *biases):
        first, second = biases or (None, None)
        one = replace(p, query=query, key=key, scale=scale, bias=first).gibbs()
        other = replace(q, query=other_query, key=other_key, bias=second).gibbs()
        return partita.divergence(one, other, kind, beta=0.3)

    with serving(backend):
        assert gradcheck(read, leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [0, 1])
def test_one_side_alone_may_want_a_gradient(natural, kind, side):
    """The gradient of one side is the same whether the other has one or not."""
    both = pair(67, 131, kinds=("all", "all"), scale=0.5)
    g = torch.randn(67).double()
    with serving(natural):
        grads = []
        for wanted in ((0, 1), (side,)):
            leaves = [(x.query.clone(), x.key.clone()) for x in both]
            for at in wanted:
                for t in leaves[at]:
                    t.requires_grad_()
            one, other = (replace(x, query=a, key=b).gibbs() for x, (a, b) in zip(both, leaves, strict=True))
            found = partita.divergence(one, other, kind)
            grads.append(torch.autograd.grad(found, leaves[side], g))
        for a, b in zip(*grads, strict=True):
            assert_exact(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("support", ["all", "causal", "mask"])
def test_a_weighted_sum_has_the_value_and_gradients_of_its_rows(natural, kind, support):
    """Gradients computed in the forward pass are the same; a retained graph gives them twice."""
    p, q = pair(67, 523, dims=(9, 4), kinds=(support, support), scale=0.5)
    bias = torch.randn(523, dtype=torch.float64)
    weight = torch.rand(67, dtype=torch.float64)
    scale = torch.rand(67, dtype=torch.float64)
    with serving(natural):
        leaves = [x.clone().requires_grad_() for x in (p.query, p.key, bias, q.query, q.key, scale)]
        a, b, c, d, e, f = leaves

        def both():
            return replace(p, query=a, key=b, bias=c).gibbs(), replace(q, query=d, key=e, scale=f).gibbs()

        total = weighted_divergence(*both(), weight, kind, beta=0.3)
        rows = (weight * partita.divergence(*both(), kind, beta=0.3)).sum()
        assert_exact(total.detach(), rows.detach(), magnitude=10)
        expected = torch.autograd.grad(3 * rows, leaves)
        for found in (
            torch.autograd.grad(3 * total, leaves, retain_graph=True),
            torch.autograd.grad(3 * total, leaves),
        ):
            for x, y in zip(found, expected, strict=True):
                assert_exact(x, y, magnitude=10)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_are_at_distance_0(backend, kind):
    """M-DIV-1: two spellings of one distribution; the cross entropy is then the entropy."""
    p = problem(7, 11, support=catalogue(7, 11)["mask"])
    with serving(backend):
        found = partita.divergence(p.gibbs(), replace(p, query=2 * p.query, scale=0.5).gibbs(), kind)
        assert_exact(found, p.gibbs().entropy() if kind == "cross_entropy" else torch.zeros(7).double())


def test_the_kinds_hang_together(backend):
    """M-DIV-2: H(p, q) = H(p) + KL(p||q); reverse is forward with p and q exchanged; js(beta) is js(1 - beta) then."""
    p, q = pair(kinds=("causal", "causal"))
    with serving(backend):
        a, b = p.gibbs(), q.gibbs()
        forward = partita.divergence(a, b)
        assert_exact(partita.divergence(a, b, "cross_entropy"), a.entropy() + forward)
        assert_exact(partita.divergence(b, a, "reverse"), forward)
        assert_exact(partita.divergence(a, b, "js", beta=0.2), partita.divergence(b, a, "js", beta=0.8))
        small = 1e-6  # M-DIV-3: js(beta) / (1 - beta) -> KL(q||p) as beta -> 1, with a step of that size
        limit = partita.divergence(a, b, "js", beta=1 - small) / small
        torch.testing.assert_close(limit, partita.divergence(b, a), rtol=1e-3, atol=1e-4)


def test_supports_that_differ_have_decided_values(backend):
    """M-DIV-5: +inf for a KL whose first side sees more, bounded js and hellinger, 0 for an empty row of p."""
    everything = torch.ones(5, 4, dtype=torch.bool)
    fewer, other, none = everything.clone(), everything.clone(), everything.clone()
    fewer[:, 2:] = False
    other[:, :2] = False
    none[:] = False
    make = {k: problem(5, 4, support=masked(v)).gibbs() for k, v in
            (("all", everything), ("fewer", fewer), ("other", other), ("none", none))}  # fmt: skip
    with serving(backend):
        read = lambda p, q, kind: partita.divergence(make[p], make[q], kind, beta=0.3)  # noqa: E731
        for kind in ("forward", "cross_entropy"):
            assert (read("all", "fewer", kind) == INF).all()
            assert read("fewer", "all", kind).isfinite().all()
            assert (read("fewer", "none", kind) == INF).all()
        assert (read("fewer", "all", "reverse") == INF).all()
        assert read("all", "fewer", "reverse").isfinite().all()
        # nothing in common: -beta log beta - (1 - beta) log(1 - beta), and 1
        disjoint = torch.full((5,), -0.3 * math.log(0.3) - 0.7 * math.log(0.7), dtype=torch.float64)
        assert_exact(read("fewer", "other", "js"), disjoint, magnitude=10)
        assert_exact(read("fewer", "other", "hellinger"), torch.ones(5).double())
        assert (read("fewer", "all", "js") < disjoint[0]).all()
        for kind in KINDS:
            for q in make:
                assert (read("none", q, kind) == 0).all()
        assert (read("fewer", "none", "reverse") == 0).all()
        assert_exact(read("fewer", "none", "hellinger"), torch.ones(5).double())
        assert_exact(read("fewer", "none", "js"), torch.full((5,), -0.3 * math.log(0.3), dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_infinite_or_empty_have_no_gradient_and_disturb_no_other(backend, kind):
    keep = torch.rand(9, 13) < 0.7
    keep[:, 0] = True
    wide, narrow = keep.clone(), keep.clone()
    wide[2], narrow[4] = False, False  # p empty; q empty
    narrow[6, 0], wide[8, 0] = False, False  # p sees more; q sees more
    p, q = problem(9, 13, support=masked(wide)), problem(9, 13, seed=1, support=masked(narrow))
    leaves = [x.clone().requires_grad_() for x in (p.query, p.key, q.query, q.key)]
    with serving(backend):
        one, other = p.gibbs(query=leaves[0], key=leaves[1]), q.gibbs(query=leaves[2], key=leaves[3])
        found = partita.divergence(one, other, kind)
        grads = torch.autograd.grad(found.sum(), leaves)
    s, t = p.score(query=leaves[0], key=leaves[1]), q.score(query=leaves[2], key=leaves[3])
    dense = reference.divergence(s, t, kind)
    kept = dense.detach().isfinite() & (wide.any(-1))
    expected = torch.autograd.grad(dense[kept].sum(), leaves)
    assert_exact(found.detach(), dense.detach(), magnitude=10)
    for a, b in zip(grads, expected, strict=True):
        assert_exact(a, b, magnitude=10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_query", [0, 1, 5])
@pytest.mark.parametrize("n_key", [0, 1])
def test_degenerate_sizes(backend, kind, n_query, n_key):
    """One key is certain on both sides; no key is an empty row of p."""
    p, q = problem(n_query, n_key), problem(n_query, n_key, seed=1)
    query = p.query.clone().requires_grad_()
    with serving(backend):
        found = partita.divergence(p.gibbs(query=query), q.gibbs(), kind)
        assert_exact(found.detach(), torch.zeros(n_query).double())
        assert (torch.autograd.grad(found.sum(), query)[0] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_key_poisons_nothing(backend, kind):
    keep = torch.ones(5, 9, dtype=torch.bool)
    keep[:, 4] = False
    p, q = problem(5, 9, support=masked(keep)), problem(5, 9, seed=1, support=masked(keep))
    leaves = [x.clone().requires_grad_() for x in (p.query, q.query, p.key)]
    poisoned, key = (x.key.clone() for x in (p, q))
    poisoned[4], key[4] = NAN, INF
    with serving(backend):
        clean = torch.autograd.grad(
            partita.divergence(p.gibbs(query=leaves[0]), q.gibbs(query=leaves[1]), kind).sin().sum(), leaves[:2]
        )
        one, other = p.gibbs(query=leaves[0], key=poisoned), q.gibbs(query=leaves[1], key=key)
        found = partita.divergence(one, other, kind)
        assert_exact(found.detach(), reference.divergence(p.score(), q.score(), kind))
        for a, b in zip(torch.autograd.grad(found.sin().sum(), leaves[:2]), clean, strict=True):
            assert_exact(a, b)
        seen = partita.divergence(Gibbs(p.query, poisoned), q.gibbs(), kind)
        assert seen.isnan().all()


def test_batches_broadcast_and_heads_may_be_grouped_differently(backend):
    query, other = torch.randn(2, 4, 5, 3).double(), torch.randn(4, 5, 6).double()
    few, two, four = torch.randn(2, 1, 7, 3).double(), torch.randn(2, 7, 6).double(), torch.randn(4, 7, 6).double()
    with serving(backend):
        for key, options in ((two, {"grouped": True}), (four, {})):
            p, q = Gibbs(query, few, grouped=True), Gibbs(other, key, **options)
            s = reference.score(query, reference.repeat_heads(few, 4))
            t = reference.score(other, reference.repeat_heads(key, 4))
            found = partita.divergence(p, q, "js")
            assert_exact(found, reference.divergence(s, t.expand(2, 4, 5, 7), "js"))
        same = partita.divergence(Gibbs(query, few, grouped=True), Gibbs(2 * query, few, grouped=True))
        s = reference.score(query, reference.repeat_heads(few, 4))
        assert_exact(same, reference.divergence(s, 2 * s))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_the_naive_formula(natural, dtype, kind):
    p, q = pair(256, 320, dims=(16, 24), kinds=("all", "all"), dtype=dtype, scale=0.5)
    a, b = (((x.query.float() @ x.key.float().mT).to(dtype) * 0.5).log_softmax(-1) for x in (p, q))
    naive = {
        "forward": a.exp() * (a - b),
        "reverse": b.exp() * (b - a),
        "cross_entropy": -a.exp() * b,
        "hellinger": 1 / 320 - (a.exp() * b.exp()).sqrt(),
    }
    m = torch.logaddexp(a + math.log(0.3), b + math.log(0.7))
    naive["js"] = 0.3 * a.exp() * (a - m) + 0.7 * b.exp() * (b - m)
    truth = reference.divergence(p.score(), q.score(), kind, 0.3)
    with serving(natural):
        found = partita.divergence(p.gibbs(), q.gibbs(), kind, beta=0.3)
    assert found.dtype == torch.float32
    assert_no_worse_than_naive(found, naive[kind].sum(-1), truth)


def test_what_cannot_be_compared_is_refused():
    p = Gibbs(torch.zeros(3, 2), torch.zeros(4, 2))
    with pytest.raises(ShapeError, match="the same numbers of queries and keys; got 3 and 3 queries, 4 and 5 keys"):
        partita.divergence(p, Gibbs(torch.zeros(3, 2), torch.zeros(5, 2)))
    with pytest.raises(ShapeError, match="3 and 2 queries"):
        partita.divergence(p, Gibbs(torch.zeros(2, 2), torch.zeros(4, 2)))
    with pytest.raises(ShapeError, match="batch dimensions must broadcast; q has"):
        partita.divergence(
            Gibbs(torch.zeros(2, 3, 2), torch.zeros(4, 2)), Gibbs(torch.zeros(3, 3, 2), torch.zeros(4, 2))
        )
    with pytest.raises(DtypeError, match=r"summed in one dtype; got torch\.float32 and torch\.float64"):
        partita.divergence(p, Gibbs(torch.zeros(3, 2).double(), torch.zeros(4, 2).double()))
    with pytest.raises(DtypeError, match="q must be a Gibbs; got Tensor"):
        partita.divergence(p, torch.zeros(3, 4))
    with pytest.raises(ValueRangeError, match="unknown kind 'kl' of divergence; known are forward, reverse"):
        partita.divergence(p, p, "kl")
    for beta in (0.0, 1.0, NAN, True):
        with pytest.raises(ValueRangeError, match="beta must be strictly between 0 and 1"):
            partita.divergence(p, p, "js", beta=beta)
