"""solve_scale and TargetEntropy: the scale at which a row has a given entropy (M-SCL-10)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import partita
from partita.errors import PartitaError
from tests import reference
from tests.conformance.serving import serving
from tests.strategies import SUPPORTS, catalogue, problem
from tests.tolerances import assert_exact


def column(*scores: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One query and keys with these raw scores."""
    return torch.ones(1, 1, dtype=torch.float64), torch.tensor(scores, dtype=torch.float64)[:, None]


@given(n=st.sampled_from((2, 7, 123)), fraction=st.floats(0.05, 0.95), seed=st.integers(0, 999))
def test_the_target_is_hit(n, fraction, seed):
    p = problem(5, n, seed=seed)
    target = fraction * math.log(n)
    solved = partita.solve_scale(p.query, p.key, entropy=target)
    assert solved.shape == (5,)
    reached = partita.Gibbs(p.query, p.key, scale=solved).entropy()
    torch.testing.assert_close(reached, torch.full((5,), target, dtype=torch.float64), rtol=0, atol=1e-8)
    assert (solved > 0).all()


def test_it_is_the_root_that_bisection_finds():
    """However large the raw scores are, the scaled ones are the same; a width is the exponential of an entropy."""
    p = problem(7, 31, batch=(2,))
    solved = partita.solve_scale(p.query, p.key, entropy=2.0)
    torch.testing.assert_close(solved, reference.solve_scale(p.score(), 2.0), rtol=1e-6, atol=0)
    larger = partita.solve_scale(1000 * p.query, p.key, entropy=2.0)
    torch.testing.assert_close(larger, solved / 1000, rtol=1e-6, atol=0)
    assert_exact(partita.solve_scale(p.query, p.key, width=math.exp(2.0)), solved)


@pytest.mark.parametrize("backend_name", ["dense", "tiled-5x3"])
@pytest.mark.parametrize("kind", SUPPORTS)
def test_every_support(kind, backend_name):
    """Rows with fewer than two keys have nothing to solve; the others meet the target where they can."""
    p = problem(11, 13, support=catalogue(11, 13)[kind])
    target = 0.7
    with serving(backend_name):
        solved = partita.solve_scale(p.query, p.key, entropy=target, support=p.support)
        reached = p.gibbs(scale=solved).entropy()
    assert solved.isfinite().all()
    wide = reference.visible(p.score()) > math.exp(target)
    torch.testing.assert_close(reached[wide], torch.full_like(reached[wide], target), rtol=0, atol=1e-8)
    few = reference.visible(p.score()).clamp(min=1).double()
    assert_exact(reached[~wide], few[~wide].log())  # out of reach above: uniform


@pytest.mark.parametrize(
    "scores",
    [
        torch.randn(300, generator=torch.Generator().manual_seed(0)).double(),
        torch.rand(300, generator=torch.Generator().manual_seed(0)).double(),
        torch.randn(300, generator=torch.Generator().manual_seed(0)).double().pow(3),  # heavy tails
        torch.cat([torch.zeros(299), torch.ones(1)]).double(),  # a needle
        torch.cat([torch.zeros(290), torch.ones(10)]).double() + 1e5,  # ties, far from zero
    ],
    ids=["gaussian", "uniform", "heavy", "needle", "tied"],
)
@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.98])
def test_hard_score_laws(scores, fraction):
    """Where an unguarded Newton fails."""
    target = fraction * math.log(len(scores))
    ties = int((scores == scores.max()).sum())
    query, key = column(*scores.tolist())
    solved = partita.solve_scale(query, key, entropy=target)
    reached = float(partita.Gibbs(query, key, scale=solved).entropy())
    assert reached == pytest.approx(max(target, math.log(ties)), abs=1e-7)


@pytest.mark.parametrize(
    ("scores", "target", "reached"),
    [
        ((0.0, 1.0, 2.0), {"entropy": math.log(3) + 0.1}, math.log(3)),  # more than log n: scale 0
        ((0.0, 1.0, 2.0), {"width": 100.0}, math.log(3)),
        ((0.0, 5.0, 5.0), {"entropy": 0.1}, math.log(2)),  # two maxima: H cannot fall below log 2
        ((0.0, 1.0, 5.0), {"entropy": 0.0}, 0.0),
        ((3.0,), {"entropy": 0.5}, 0.0),  # one key
        ((2.0, 2.0, 2.0), {"entropy": 0.5}, math.log(3)),  # all equal
    ],
)
def test_a_target_out_of_reach_gives_a_finite_scale(scores, target, reached):
    query, key = column(*scores)
    solved = partita.solve_scale(query, key, **target)
    assert solved.isfinite().all()
    if len(set(scores)) == 3 and reached == math.log(3):
        assert float(solved) == 0.0
    close = {math.log(2): 1e-9, 0.0: 1e-12 if len(scores) == 1 else 1e-8}.get(reached, 1e-12)
    assert float(partita.Gibbs(query, key, scale=solved).entropy()) == pytest.approx(reached, abs=close)
    empty = partita.support.lengths(0)
    assert partita.solve_scale(query, key, support=empty, **target).isfinite().all()  # rows without keys


def test_the_implicit_gradient_is_right():
    """d lambda / d s_j = -lambda p_j (s_j - E[s]) / Var[s]: against finite differences of the solver itself."""
    p = problem(3, 7, dim=2, support=catalogue(3, 7)["window-left"])

    def solve(query, key):
        return partita.solve_scale(query, key, entropy=0.9, support=p.support)

    inputs = (p.query.clone().requires_grad_(), p.key.clone().requires_grad_())
    assert gradcheck(solve, inputs, eps=1e-5, atol=1e-5)


def test_the_gradient_of_a_row_sums_to_minus_the_scale():
    """Euler: sum_j s_j d lambda / d s_j = -lambda."""
    p = problem(5, 31)
    key = torch.eye(31, dtype=torch.float64)
    scores = p.score().clone().requires_grad_()
    solved = partita.solve_scale(scores, key, entropy=2.0)
    (grad,) = torch.autograd.grad(solved.sum(), scores)
    torch.testing.assert_close((grad * scores.detach()).sum(-1), -solved.detach(), rtol=1e-6, atol=0)


def test_an_unreachable_row_has_gradient_zero():
    query, key = (x.requires_grad_() for x in column(0.0, 1.0, 2.0))
    solved = partita.solve_scale(query, key, entropy=5.0)
    if solved.requires_grad:
        for grad in torch.autograd.grad(solved.sum(), (query, key), allow_unused=True):
            assert grad is None or (grad == 0).all()


def test_solving_through_the_gibbs_keeps_its_entropy_whatever_the_scores():
    """The derivative of a held entropy is zero: the policy's gradient cancels the scores'."""
    p = problem(5, 31)
    query = p.query.clone().requires_grad_()
    gibbs = partita.Gibbs(query, p.key, scale=partita.scale.TargetEntropy(entropy=2.0))
    torch.testing.assert_close(gibbs.entropy().detach(), torch.full((5,), 2.0, dtype=torch.float64), rtol=0, atol=1e-8)
    (grad,) = torch.autograd.grad(gibbs.entropy().sum(), query)
    assert grad.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"entropy": 1.0}, [0.0, math.log(2), 1.0, 1.0]),
        ({"width": 2.0}, [0.0] + [math.log(2)] * 3),
        ({"fraction": 0.5}, [0.5 * math.log(n) for n in range(1, 5)]),
    ],
)
def test_target_entropy_under_a_causal_support(options, expected):
    p, policy = problem(4, 4, support=catalogue(4, 4)["causal"]), partita.scale.TargetEntropy(**options)
    _, stats = partita.attention(p.query, p.key, p.value, is_causal=True, scale=policy, return_stats=True)
    for reached in (p.gibbs(scale=policy).entropy(), stats.entropy):
        close = 1e-8 if "fraction" in options else 1e-7
        torch.testing.assert_close(reached, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=close)


def test_attention_with_a_target_width():
    q, k, v = (torch.randn(2, 3, n, 5, dtype=torch.float64) for n in (7, 31, 31))
    _, stats = partita.attention(q, k, v, scale=partita.scale.TargetEntropy(width=5.0), return_stats=True)
    torch.testing.assert_close(stats.entropy, torch.full_like(stats.entropy, math.log(5.0)), rtol=0, atol=1e-8)


def test_float32_reaches_the_target_to_four_digits():
    p = problem(7, 301, dim=16, dtype=torch.float32)
    solved = partita.solve_scale(p.query, p.key, entropy=3.0)
    reached = reference.entropy(reference.score(p.query, p.key, scale=solved))
    assert (reached - 3.0).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options", [{}, {"entropy": 1.0, "width": 2.0}, {"entropy": -1.0}, {"width": 0.5}, {"entropy": math.nan}]
)
def test_a_target_that_means_nothing_is_refused(options):
    p = problem(3, 5)
    with pytest.raises(PartitaError):
        partita.solve_scale(p.query, p.key, **options)


def test_a_bias_that_only_hides_is_a_support():
    p = problem(3, 5)
    keep = torch.rand(3, 5) < 0.8
    hides = torch.zeros(3, 5, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    assert_exact(
        partita.solve_scale(p.query, p.key, entropy=0.5, bias=hides),
        partita.solve_scale(p.query, p.key, entropy=0.5, support=partita.support.mask(keep)),
    )


def scanned(s, bias, target):
    """The first scale of a fine walk at which the entropy passes the target, or None: dense, row by row."""
    scales = torch.logspace(-4, 4, 4000, dtype=torch.float64) / s.std()
    h = torch.special.entr((scales[:, None] * s + bias).softmax(-1)).sum(-1) - target
    start = torch.special.entr(bias.softmax(-1)).sum() - target
    passes = torch.cat([start[None], h]).sign().diff().nonzero()
    return None if not len(passes) else scales[passes[0, 0]].item()


def test_with_a_bias_the_first_scale_is_found_or_said_to_be_missing():
    """With a bias the entropy is not monotone in the scale (M-DER-4): some rows have roots, some have none."""
    torch.manual_seed(5)
    q, k = torch.randn(12, 4, dtype=torch.float64), torch.randn(20, 4, dtype=torch.float64)
    bias = torch.randn(12, 20, dtype=torch.float64) * 3
    bias[3, 7] = -torch.inf
    bias[8:] = -2 * (q[8:] @ k.mT)  # here the entropy rises to log n before it falls
    bias[0, (q[0] @ k.mT).argmax()] = 60.0  # here one key has won whatever the scale
    targets = torch.tensor([1.0, 2.5], dtype=torch.float64).repeat(6)
    found, reached = partita.solve_scale(q, k, entropy=targets, bias=bias, return_reached=True)
    entropy = partita.Gibbs(q, k, scale=found, bias=bias).entropy()
    for i in range(12):
        want = scanned(q[i] @ k.mT, bias[i].nan_to_num(neginf=-1e9), targets[i])
        assert reached[i] == (want is not None), i
        if want is not None:
            assert abs(found[i].item() / want - 1) < 1e-2, i
            assert abs(entropy[i] - targets[i]) < 1e-8
    assert reached[8:].all() and not reached[0]
    everywhere = partita.solve_scale(q, k, entropy=1.0, return_reached=True)
    assert everywhere[1].all()


def test_the_implicit_gradient_under_a_bias():
    torch.manual_seed(6)
    q, k = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 9))
    bias = (torch.randn(4, 9, dtype=torch.float64).clamp(-2, 2) / 4).requires_grad_()  # alone it leaves H above 1.3

    def solve(q, k, bias):
        return partita.solve_scale(q, k, entropy=1.3, bias=bias)

    assert partita.solve_scale(q, k, entropy=1.3, bias=bias, return_reached=True)[1].all()
    assert torch.autograd.gradcheck(solve, (q, k, bias), eps=1e-5, atol=1e-4)


def test_a_policy_of_a_target_takes_a_bias():
    torch.manual_seed(7)
    q, k, bias = torch.randn(6, 4).double(), torch.randn(9, 4).double(), torch.randn(6, 9).double()
    p = partita.Gibbs(q, k, bias=bias, scale=partita.scale.TargetEntropy(entropy=1.0))
    scale, reached = partita.solve_scale(q, k, entropy=1.0, bias=bias, return_reached=True)
    assert torch.equal(p.scale, scale)
    assert bool(((p.entropy() - 1.0).abs() < 1e-8)[reached].all())
