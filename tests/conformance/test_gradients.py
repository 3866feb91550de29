"""Gradients: against finite differences, to second order where promised, and their closed forms; absent ones too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

import partita
from tests import reference
from tests.conformance.serving import serving
from tests.differences import gradcheck, gradgradcheck
from tests.strategies import SUPPORTS, catalogue, masked, problem, problems
from tests.tolerances import assert_exact

DIFFERENTIABLE = ("log_partition", "entropy", "mean_score", "score_variance", "effective_width")
TWICE = ("log_partition", "entropy", "expectation", "nll", "mean_score", "score_variance")


def leaves(p, *names):
    return tuple(getattr(p, name).clone().requires_grad_() for name in names)


def finite(rows):
    """Rows without keys hold -inf, which finite differences cannot subtract; their gradient is tested elsewhere."""
    return rows[rows.isfinite()]


def readers(p, names=(*DIFFERENTIABLE, "expectation", "nll", "log_prob")):
    """(query, key, value, bias, scale) -> every differentiable output."""

    def read(query, key, value, bias, scale):
        gibbs = p.gibbs(query=query, key=key, bias=bias, scale=scale)
        out = []
        for name in names:
            argument = {"expectation": (value,), "nll": (p.target,), "log_prob": (p.target,)}.get(name, ())
            rows = getattr(gibbs, name)(*argument)
            out.append(rows if name == "expectation" else finite(rows))
        return tuple(out)

    return read


def small(kind="all", n_query=4, n_key=5, batch=(), **options):
    p = problem(
        n_query, n_key, dim=2, dim_value=2, batch=batch, support=catalogue(n_query, n_key, batch)[kind], **options
    )
    fields = {**p.__dict__}
    fields["bias"] = torch.randn(n_query, n_key, generator=torch.Generator().manual_seed(5)).double()
    fields["scale"] = torch.linspace(0.3, 1.7, n_query).double()
    return type(p)(**fields)


@pytest.mark.parametrize(("kind", "softcap"), [*((kind, None) for kind in SUPPORTS), ("causal", 1.3)])
def test_first_order_under_every_support(backend, kind, softcap):
    """query, key, value, bias and per-row scale, of every differentiable output (M-DER-2..6)."""
    p = small(kind, softcap=softcap)
    with serving(backend):
        assert gradcheck(readers(p), leaves(p, "query", "key", "value", "bias", "scale"))


def test_first_order_with_broadcast_operands(backend):
    """A gradient has the shape of its operand, summed over what it was broadcast to."""
    p = problem(3, 4, dim=2, dim_value=2, batch=(2, 3))
    shapes = {"query": (2, 1, 3, 2), "key": (3, 4, 2), "value": (1, 4, 2), "bias": (2, 1, 1, 4), "scale": (3, 1)}
    g = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=g).double().requires_grad_() for shape in shapes.values()]
    with serving(backend):
        assert gradcheck(readers(p), inputs)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 1), (2, 4), "zero"])
def test_a_scale_of_any_row_shape_has_a_gradient(backend, shape):
    p = problem(4, 5, dim=2, batch=(2,))
    scale = torch.zeros(4) if shape == "zero" else torch.rand(shape).add(0.5)
    with serving(backend):
        read = lambda x: (p.gibbs(scale=x).entropy(), p.gibbs(scale=x).expectation(p.value))  # noqa: E731
        assert gradcheck(read, scale.double().requires_grad_())


TWICE_UNDER = ("all", "causal", "mask", "window | mask", "segments & causal")


@pytest.mark.parametrize(("kind", "softcap"), [*((kind, None) for kind in TWICE_UNDER), ("causal", 1.3)])
def test_second_order(backend, kind, softcap):
    """gradgradcheck of log_partition, entropy, expectation, nll and the moments, with respect to everything."""
    p = small(kind, 3, 4, softcap=softcap)
    with serving(backend):
        assert gradgradcheck(readers(p, TWICE), leaves(p, "query", "key", "value", "bias", "scale"))


def test_second_order_in_a_batch_with_shared_keys(backend):
    p = problem(3, 4, dim=2, dim_value=2, batch=(2,))
    inputs = [x.clone().requires_grad_() for x in (p.query, p.key[:1], p.value[:1])]
    with serving(backend):
        assert gradgradcheck(
            lambda q, k, v: (partita.Gibbs(q, k).entropy(), partita.Gibbs(q, k).expectation(v)), inputs
        )


def test_a_merge_of_states_is_differentiable(backend):
    p = small("mask", 3, 6)

    def read(query, key, value):
        keep = p.visible
        parts = [
            partita.Gibbs(query, key[a:b], support=partita.support.mask(keep[:, a:b])).state(value[a:b])
            for a, b in ((0, 1), (1, 4), (4, 6))
        ]
        state = partita.merge(*parts)
        return (finite(state.stats().log_partition), state.stats().entropy, state.expectation())

    with serving(backend):
        assert gradcheck(read, leaves(p, "query", "key", "value"))


# What has no gradient, and what must not be computed ------------------------------------------------------------


def test_what_counts_or_is_given_constants_has_no_gradient(backend):
    p = problem(4, 5)
    query, key = leaves(p, "query", "key")
    with serving(backend):
        gibbs = p.gibbs(query=query, key=key)
        assert gibbs.entropy().requires_grad
        counts = gibbs.max_score(), gibbs.visible(), gibbs.target_rank(p.target), gibbs.stats().max_score
        assert not any(x.requires_grad for x in (*counts, *p.gibbs().stats()))


@pytest.mark.parametrize("frozen", ["query", "key", "value", "bias", "scale"])
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(backend, frozen):
    p = small("causal")
    names = ("query", "key", "value", "bias", "scale")

    def gradients(without):
        inputs = [getattr(p, name).clone().requires_grad_(name != without) for name in names]
        with serving(backend):
            loss = sum(x.sum() for x in readers(p)(*inputs))
        loss.backward()
        return {name: x.grad for name, x in zip(names, inputs, strict=True)}

    some, every = gradients(frozen), gradients(None)
    assert some[frozen] is None
    for name in names:
        if name != frozen:
            assert_exact(some[name], every[name])


# Policies ------------------------------------------------------------


@pytest.mark.parametrize("name", ["KappaLog", "LogLength", "SqrtLogLength", "Mixed", "ScalableSoftmax"])
def test_policies_are_differentiable_through_the_query(backend, name):
    policy = {"ScalableSoftmax": lambda: partita.scale.ScalableSoftmax(2).double()}.get(
        name, lambda: getattr(partita.scale, name)()
    )()
    p = problem(4, 5, dim=2, batch=(2,), support=catalogue(4, 5, (2,))["causal"])
    with serving(backend):
        assert gradcheck(lambda q, k: (p.gibbs(query=q, key=k, scale=policy).entropy(),), leaves(p, "query", "key"))


def test_learned_policy_parameters_get_a_gradient(backend):
    """One learned factor per head: finite differences in the parameter itself."""
    p = problem(4, 5, dim=2, batch=(3,), support=catalogue(4, 5, (3,))["causal"])
    policy = partita.scale.ScalableSoftmax(3).double()
    ((name, parameter),) = policy.named_parameters()
    counts = p.visible.sum(-1).double().expand(3, 4)

    def read(values):
        gibbs = p.gibbs(scale=torch.func.functional_call(policy, {name: values}, (counts, 2)))
        return gibbs.entropy(), gibbs.expectation(p.value)

    with serving(backend):
        gibbs = p.gibbs(scale=policy)
        (grad,) = torch.autograd.grad(gibbs.entropy().sum() + gibbs.expectation(p.value).sum(), parameter)
        values = parameter.detach().clone().requires_grad_()
        assert gradcheck(read, values)
        (expected,) = torch.autograd.grad(sum(x.sum() for x in read(values)), values)
        assert_exact(grad, expected)


def test_masked_rows_have_gradient_zero_in_every_input(backend):
    keep = torch.ones(4, 5, dtype=torch.bool)
    keep[1] = False
    p = problem(4, 5, support=masked(keep))
    query, key, value = leaves(p, "query", "key", "value")
    scale = torch.ones(4, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
    with serving(backend):
        gibbs = p.gibbs(query=query, key=key, scale=scale, bias=bias)
        total = finite(gibbs.log_partition()).sum() + gibbs.entropy().sum() + gibbs.expectation(value).sum()
        grads = torch.autograd.grad(total + gibbs.score_variance().sum(), (query, scale, bias))
    for grad in grads:
        assert (grad[1] == 0).all()
        assert grad.isfinite().all()


# Closed forms -------------------------------------------------------------------------------------------------------


@given(p=problems())
def test_gradients_by_the_scores_are_their_closed_forms(backend, p):
    """M-DER-2: d log Z / d s = p. M-DER-1: the softmax Jacobian is p (delta - p), here against the weights v of a mean.

    M-DER-3: d H / d s_j = -p_j (s_j - E[s]), which sums to 0. The bias is a leaf: its gradient is that of the scores.
    """
    s = p.score()
    prob = reference.probs(s)
    bias = torch.zeros(1, 1, dtype=torch.float64) if p.bias is None else p.bias
    bias = bias.expand(*p.batch, p.n_query, p.n_key).clone().requires_grad_()
    total, mean = p.value.sum(-1)[..., None, :], reference.expectation(s, p.value).sum(-1)[..., None]
    with serving(backend):
        gibbs = p.gibbs(bias=bias)
        reads = finite(gibbs.log_partition()).sum(), gibbs.expectation(p.value).sum(), gibbs.entropy().sum()
        level, pull, entropy = (torch.autograd.grad(x, bias, retain_graph=True)[0] for x in reads)
    assert_exact(level, prob, magnitude=p.magnitude)
    assert_exact(pull, prob * (total - mean), magnitude=p.magnitude)
    centred = torch.where(reference.seen(s), s - reference.mean_score(s)[..., None], 0.0)
    assert_exact(entropy, -prob * centred, magnitude=p.magnitude)
    assert_exact(entropy.sum(-1), torch.zeros_like(entropy[..., 0]), magnitude=p.magnitude)


@given(p=problems(with_softcap=False, scales=("row",)))
def test_derivatives_with_respect_to_the_scale(backend, p):
    """M-DER-2, M-DER-4, M-DER-5: dlogZ/dl = E[r], dH/dl = -Cov(s, r), dE[v]/dl = Cov(v, r), with r the raw scores."""
    scale = p.scale.expand(*p.batch, p.n_query).clone().requires_grad_()
    s = p.score()
    prob = reference.probs(s)
    raw = torch.where(reference.seen(s), (p.query @ p.key.mT).expand(s.shape), 0.0)
    safe = torch.where(reference.seen(s), s, 0.0)

    def mean(x):
        return (prob * x).sum(-1)

    with serving(backend):
        gibbs = p.gibbs(scale=scale)
        log_z = gibbs.log_partition()
        (grad,) = torch.autograd.grad(log_z[log_z.isfinite()].sum(), scale, retain_graph=True)
        assert_exact(grad, mean(raw), magnitude=p.magnitude)
        (grad,) = torch.autograd.grad(gibbs.entropy().sum(), scale)
        assert_exact(grad, -(mean(safe * raw) - mean(safe) * mean(raw)), magnitude=p.magnitude**2)
        out = p.gibbs(scale=scale).expectation(p.value)
        (grad,) = torch.autograd.grad(out.sum(), scale)
        total = p.value.sum(-1)[..., None, :]
        assert_exact(grad, mean(total * raw) - mean(total) * mean(raw), magnitude=p.magnitude**2)


def test_entropy_is_not_monotone_in_the_scale_under_a_bias(backend):
    """M-DER-4: b = -2 s cancels the scores at scale 2."""
    raw = torch.randn(1, 200, dtype=torch.float64)
    with serving(backend):
        entropies = [
            float(partita.Gibbs(torch.ones(1, 1).double(), raw.mT, scale=float(x), bias=-2 * raw).entropy())
            for x in range(5)
        ]
    assert entropies[0] < entropies[1] < entropies[2] > entropies[3] > entropies[4]
    assert entropies[2] == pytest.approx(math.log(200), abs=1e-12)
