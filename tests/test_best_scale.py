"""The best scale for relevant keys: against quadrature that shares nothing with it, draws, and the policy on it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import partita
from partita import scale, support
from partita.scale.relevant import reading

SMALL = [(0.5, 1, 1, 2.0, 0.3), (3.0, 1, 1, 2.0, 1.0), (1.5, 2, 1, 1.0, 0.5), (4.0, 1, 2, 3.0, 1.0)]
LARGE = [(1.0, 100, 8, 4.0, 0.3), (3.0, 100, 8, 4.0, 1.0), (6.0, 500, 4, 4.0, 0.3), (10.0, 500, 1, 4.0, 0.3)]


def read(x: float, scores: Tensor, relevant: int, noise: float) -> tuple[Tensor, Tensor]:
    """Entropy and error of rows of scores (..., n), written out."""
    p = (x * scores).softmax(-1)
    error = (1 - p[..., :relevant].sum(-1)) ** 2 + noise**2 * p.square().sum(-1)
    return -(p * p.clamp(min=1e-300).log()).sum(-1), error


@pytest.mark.parametrize(("x", "others", "relevant", "margin", "noise"), SMALL)
def test_entropy_and_error_are_those_of_two_or_three_keys_by_quadrature(x, others, relevant, margin, noise):
    """M-SCL-21."""
    n = others + relevant
    at = torch.linspace(-8, 8, 161, dtype=torch.float64)
    grid = torch.cartesian_prod(*[at] * n)
    weight = torch.exp(-grid.square().sum(-1) / 2)
    weight = weight / weight.sum()
    grid[:, :relevant] += margin
    entropy, error = (float(weight @ y) for y in read(x, grid, relevant, noise))
    found = reading(x, others, relevant, margin, noise)
    assert found.error == pytest.approx(error, abs=1e-7) and found.entropy == pytest.approx(entropy, abs=1e-7)


@pytest.mark.parametrize(("x", "others", "relevant", "margin", "noise"), LARGE)
def test_and_those_of_drawn_rows(x, others, relevant, margin, noise):
    source = torch.Generator().manual_seed(5)
    scores = torch.randn(20_000, others + relevant, generator=source, dtype=torch.float64)
    scores[:, :relevant] += margin
    found = reading(x, others, relevant, margin, noise)
    for value, drawn in zip((found.entropy, found.error), read(x, scores, relevant, noise), strict=True):
        assert abs(value - float(drawn.mean())) < 4 * float(drawn.std()) / 20_000**0.5


def test_no_other_scale_errs_less_and_units_do_not_matter():
    best = scale.best_for(1000, 8, margin=4.0, noise=0.5)
    assert isinstance(best, scale.BestScale)
    errors = [reading(best.scale * by, 992, 8, 4.0, 0.5).error for by in (0.3, 0.97, 1.03, 3.0)]
    assert best.error < min(errors)
    wide = scale.best_for(1000, 8, margin=32.0, noise=0.5, sigma=8.0)
    assert wide.scale * 8 == pytest.approx(best.scale) and wide[1:] == best[1:]
    assert scale.best_for(5, 8, margin=4.0, noise=3.0) == (0.0, math.log(5), 9 / 5)  # relevant all: their mean


def test_a_number_of_keys_wants_a_growing_scale_and_a_share_a_growing_entropy():
    """M-SCL-21: the four exponents and slopes of the statement, from 256 to 16384 keys."""
    for noise, number, share in ((0.3, (1.52, -0.19), (0.03, 0.79)), (1.0, (1.25, 0.16), (0.47, 0.62))):
        for arm, want in ((lambda n: 8.0, number), (lambda n: n / 32, share)):
            short, long = (scale.best_for(n, arm(n), margin=4.0, noise=noise) for n in (256, 16384))
            growth = math.log(long.scale / short.scale) / math.log(14 / 8)
            assert (growth, (long.entropy - short.entropy) / math.log(64)) == pytest.approx(want, abs=0.02)


@pytest.mark.parametrize("given", [{"relevant": 8}, {"share": 1 / 32}], ids=str)
def test_the_policy_is_that_scale_at_any_number_of_visible_keys(given):
    policy = scale.BestFor(**given, margin=16.0, noise=0.7, sigma=4.0)
    n = torch.tensor([40, 100, 777, 5000, 40_000])
    relevant = [max(1.0, given.get("relevant", 0) or float(k) / 32) for k in n]
    best = [scale.best_for(float(k), m, margin=16.0, noise=0.7, sigma=4.0) for k, m in zip(n, relevant, strict=True)]
    torch.testing.assert_close(policy(n, 64), torch.tensor([b.scale for b in best]), rtol=0.01, atol=0)
    torch.testing.assert_close(policy.entropy(n), torch.tensor([b.entropy for b in best]), rtol=0, atol=0.02)
    assert policy.number(777, 64) == pytest.approx(float(policy(777, 64)))
    query, key = torch.randn(3, 4), torch.randn(60, 4)
    seen = partita.Gibbs(query, key, scale=policy, support=support.lengths(40)).scale
    torch.testing.assert_close(seen, policy(40, 4).float().expand(3))  # visible keys, not the padded length


def test_rows_that_see_relevant_keys_alone_are_averaged():
    policy = scale.BestFor(relevant=8, margin=4.0)
    assert policy(torch.tensor([0, 1, 8]), 64).tolist() == [0.0, 0.0, 0.0]
    assert policy.entropy(8).item() == pytest.approx(math.log(8)) and float(policy(9, 64)) > 0
    assert policy(2**30, 64) == policy(2**25, 64)  # beyond what was solved


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: scale.BestFor(margin=4.0), "give relevant or share"),
        (lambda: scale.BestFor(8, 0.5, margin=4.0), "give relevant or share"),
        (lambda: scale.BestFor(0.1, margin=4.0), "A part of the keys is share="),
        (lambda: scale.BestFor(share=1.0, margin=4.0), "between 0 and 1"),
        (lambda: scale.BestFor(8, margin=0.0), "margin must be"),
        (lambda: scale.best_for(100, 0.5, margin=4.0), "a relevant key or more"),
        (lambda: scale.best_for(100, 8, margin=4.0, noise=-1.0), "noise must"),
    ],
)
def test_what_is_no_model_of_relevance_is_refused(made, says):
    with pytest.raises(ValueError, match=says):
        made()
