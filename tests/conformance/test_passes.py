"""One pass, many reads: what reads share, and when a new pass begins."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import partita
from partita import Gibbs
from partita.engine.dispatch import execute
from tests.conformance.serving import serving
from tests.strategies import catalogue, problem
from tests.tolerances import assert_exact

READS = ("entropy", "log_partition")


def leaves(p, *names):
    return tuple(getattr(p, name).clone().requires_grad_() for name in names)


def test_two_reads_add_their_gradients(backend):
    """Double use: the gradient of a sum of reads is the sum of their gradients."""
    p = problem(7, 9, support=catalogue(7, 9)["causal"])
    with serving(backend):
        (query,) = leaves(p, "query")
        gibbs = p.gibbs(query=query)
        together = torch.autograd.grad(gibbs.entropy().sum() + 3 * gibbs.log_partition().sum(), query)[0]
        apart = [torch.autograd.grad(getattr(p.gibbs(query=query), read)().sum(), query)[0] for read in READS]
        assert_exact(together, apart[0] + 3 * apart[1])


def test_a_read_after_backward_starts_a_new_pass(backend):
    """After a backward that freed the graph a read does not raise and has the right gradient; a retained one serves."""
    p = problem(7, 9)
    (query,) = leaves(p, "query")
    with serving(backend):
        gibbs = p.gibbs(query=query)
        entropy = gibbs.entropy().sum()
        retained = torch.autograd.grad(entropy, query, retain_graph=True)[0]
        first = torch.autograd.grad(entropy, query)[0]
        second = torch.autograd.grad(gibbs.entropy().sum(), query)[0]
        third = torch.autograd.grad(gibbs.log_partition().sum() + gibbs.expectation(p.value).sum(), query)[0]
        fresh = p.gibbs(query=query)
        expected = torch.autograd.grad(fresh.log_partition().sum() + fresh.expectation(p.value).sum(), query)[0]
        assert torch.equal(retained, first)
        assert torch.equal(first, second)
        assert_exact(third, expected)


@pytest.mark.parametrize("kind", ["learned", "solved"])
def test_a_read_after_backward_starts_a_new_pass_for_policies(backend, kind):
    """The graph of a scale that a policy made is part of the pass."""
    p = problem(7, 9, batch=(2,))
    policy = (
        partita.scale.ScalableSoftmax(2).double() if kind == "learned" else partita.scale.TargetEntropy(entropy=1.0)
    )
    (query,) = leaves(p, "query")
    wanted = (*policy.parameters(),) if kind == "learned" else (query,)
    with serving(backend):
        gibbs = p.gibbs(query=query, scale=policy)
        first, second = (torch.autograd.grad(gibbs.log_partition().sum(), wanted) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["query", "scale", "scale of another dtype", "policy", "autocast"])
def test_a_read_after_the_inputs_changed_in_place_sees_the_change(backend, kind):
    """An optimiser step between two reads of the same Gibbs: never the statistics of before."""
    dtype = torch.float32 if kind == "autocast" else torch.float64
    p = problem(7, 9, batch=(2,), dtype=dtype)
    policy = partita.scale.ScalableSoftmax(2).to(dtype)
    changed = {
        "scale": torch.full((7,), 0.7, dtype=dtype),
        "scale of another dtype": torch.full((7,), 0.7, dtype=torch.float32),
        "policy": next(policy.parameters()),
    }.get(kind, p.query.clone())
    changed = changed.requires_grad_()
    given = {"policy": {"scale": policy}, "query": {"query": changed}, "autocast": {"query": changed}}
    options = given.get(kind, {"scale": changed})
    with serving(backend), torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        gibbs = p.gibbs(**options)
        gibbs.entropy().sum().backward()
        with torch.no_grad():
            changed.mul_(0.5)
        for read in ("entropy", "argmax"):
            assert torch.equal(getattr(gibbs, read)().detach(), getattr(p.gibbs(**options), read)().detach())


def test_reads_inside_no_grad_do_not_take_the_gradient_from_later_reads(backend):
    p = problem(7, 9)
    (query,) = leaves(p, "query")
    with serving(backend):
        gibbs = p.gibbs(query=query)
        with torch.no_grad():
            before = gibbs.entropy()
        after = gibbs.entropy()
        assert not before.requires_grad
        assert after.requires_grad
        assert_exact(after.detach(), before)


def test_who_looks_at_operators_sees_the_pass():
    """Without a gradient the operator is left out, for speed, but not under a dispatch mode or the profiler."""
    query, key = torch.randn(3, 4), torch.randn(5, 4)
    seen = []

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Looking():
        watched = Gibbs(query, key).entropy()
    assert any("partita.reduce" in name for name in seen)
    with torch.profiler.profile() as profile:
        profiled = Gibbs(query, key).entropy()
    assert any(event.name == "partita::reduce" for event in profile.events())
    plain = Gibbs(query, key).entropy()
    torch.testing.assert_close(watched, plain)
    torch.testing.assert_close(profiled, plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports forward mode
def test_forward_mode_is_refused_and_not_lost():
    query, key = torch.randn(3, 4), torch.randn(5, 4)
    with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError), match="jvp"):
        Gibbs(forward_ad.make_dual(query, torch.ones_like(query)), key).entropy()


# What was not asked for is not there --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all", "causal", "segments"])
def test_without_the_variance_everything_else_is_the_same(backend, kind):
    """Results and gradients; a GPU's kernel of this level is another one."""
    p = problem(5, 7, dim=3, dim_value=2, support=catalogue(5, 7)[kind])
    found = {}
    for variance in (True, False):
        query, key, value = (x.clone().requires_grad_() for x in (p.query, p.key, p.value))
        with serving(backend):
            sums = p.gibbs(query=query, key=key).reduce(value, p.target, variance=variance, mean=True)
            rows = (sums.state.entropy(), sums.state.mean_score(), sums.nll())
            rows = tuple(torch.where(x.isfinite(), x, torch.zeros_like(x)) for x in rows)
            total = (rows[0] - 0.3 * rows[1] + 0.7 * rows[2]).sum() + sums.mean.sin().sum()
        found[variance] = (*rows, sums.mean, *torch.autograd.grad(total, (query, key, value)))
        assert (sums.spread is None) != variance
        assert sums.state.score_variance().isnan().all() == (not variance)
    for less, full in zip(found[False], found[True], strict=True):
        assert_exact(less.detach(), full.detach())


def test_a_pass_without_the_variance_is_not_what_later_reads_find(backend):
    p = problem(4, 6, dim=3, dim_value=2, support=catalogue(4, 6)["all"])
    with serving(backend):
        gibbs = p.gibbs()
        gibbs.reduce(variance=False)
        assert_exact(gibbs.score_variance(), p.gibbs().score_variance())


@pytest.mark.parametrize(
    ("options", "level"),
    [({"z_loss": 0.1}, 0), ({"entropy_weight": 0.1}, 1), ({"entropy_weight": 0.1, "return_stats": True}, 2)],
)
def test_a_loss_asks_for_what_it_reads(monkeypatch, options, level):
    seen = []

    def watched(request):
        seen.append(request.level)
        return execute(request)

    monkeypatch.setattr("partita.collective.execute", watched)
    x, weight, target = torch.randn(4, 3), torch.randn(6, 3, requires_grad=True), torch.arange(4)
    partita.losses.linear_cross_entropy(x, weight, target, **options)
    assert seen == [level]
