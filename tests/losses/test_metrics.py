"""Metrics from streamed statistics against the dense ones, and calibration on a real classifier."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import partita
from partita import metrics
from partita.calibration import fit_temperature
from partita.errors import DtypeError, ValueRangeError
from partita.losses import linear_cross_entropy


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(3)
    x, w, y = torch.randn(200, 6).double(), torch.randn(31, 6).double(), torch.randint(31, (200,))
    y[:120] = (x[:120] @ w.mT + torch.randn(120, 31)).argmax(-1)
    y[-20:] = -100
    _, stats = linear_cross_entropy(x, w, y, return_stats=True)
    kept = y != -100
    return x, w, y, stats, (x @ w.mT)[kept], y[kept]


@pytest.mark.parametrize("k", [1, 3, 10])
def test_top_k_accuracy(problem, k):
    *_, stats, z, y = problem
    dense = (z.topk(k).indices == y[:, None]).any(-1).float().mean()
    torch.testing.assert_close(metrics.top_k_accuracy(stats, k), dense)
    torch.testing.assert_close(metrics.top_k_accuracy(stats.target_rank, k), dense)


def test_mean_reciprocal_rank(problem):
    *_, stats, z, y = problem
    place = (z.argsort(-1, descending=True) == y[:, None]).float().argmax(-1) + 1
    torch.testing.assert_close(metrics.mean_reciprocal_rank(stats), (1 / place.float()).mean())


def test_perplexity(problem):
    *_, stats, z, y = problem
    torch.testing.assert_close(metrics.perplexity(stats), F.cross_entropy(z, y).exp())


def test_expected_calibration_error(problem):
    *_, stats, z, y = problem
    confidence, guess = z.softmax(-1).max(-1)
    total = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            gap = (guess == y)[inside].double().mean() - confidence[inside].mean()
            total += float(inside.double().mean() * gap.abs())
    assert math.isclose(metrics.expected_calibration_error(stats).item(), total, abs_tol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_brier_score_needs_no_probabilities(problem, softcap):
    x, w, y, *_ = problem
    kept = y != -100
    bias = torch.randn(1, 31).double()
    gibbs = partita.Gibbs(x[kept], w, scale=0.7, bias=bias, softcap=softcap)
    p = gibbs.probs()
    dense = (p - F.one_hot(y[kept], 31)).square().sum(-1)
    torch.testing.assert_close(metrics.brier_score(gibbs, y[kept]), dense)


def test_metrics_refuse_what_they_cannot_read():
    with pytest.raises(ValueError, match="at least 1"):
        metrics.top_k_accuracy(torch.tensor([0]), k=0)
    with pytest.raises(ValueError, match="one shape"):
        metrics.expected_calibration_error(torch.rand(3), torch.ones(4, dtype=torch.bool))
    assert metrics.top_k_accuracy(torch.full((3,), -1)).item() == 0.0


# ---- calibration ----


def best_temperature(logits, target):
    """The optimum by bisection of the slope, in float64: the loss is convex in 1/T."""
    low, high = 1e-4, 1e4
    for _ in range(60):
        scale = torch.tensor(math.sqrt(low * high), dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(F.cross_entropy(scale * logits, target), scale)
        low, high = (low, scale.item()) if slope > 0 else (scale.item(), high)
    return 1 / math.sqrt(low * high)


@pytest.fixture
def passes(monkeypatch):
    """Counts passes over the data."""
    seen = []
    original = partita.Gibbs.reduce

    def counted(self, *arguments, **options):
        seen.append(1)
        return original(self, *arguments, **options)

    monkeypatch.setattr(partita.Gibbs, "reduce", counted)
    return seen


@pytest.fixture(scope="module")
def digits_classifier():
    """A trained hidden layer on handwritten digits: hidden states and labels held out, class vectors, bias."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed: pip install scikit-learn")
    digits = datasets.load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held = order[:900], order[900:]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
    head = torch.nn.Linear(32, 10)
    step = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=0.01)
    for _ in range(60):
        loss = linear_cross_entropy(net(x[train]), head.weight, y[train], linear_bias=head.bias)
        step.zero_grad()
        loss.backward()
        step.step()
    with torch.no_grad():
        return net(x[held]), y[held], head.weight.detach(), head.bias.detach()


@pytest.mark.parametrize("wrong", [0.01, 0.1, 0.3, 1.0, 4.0, 10.0, 100.0])
def test_a_wrong_temperature_of_a_real_classifier_is_recovered(wrong, passes, digits_classifier):
    """1e-3 in at most 8 passes, however wrong it was (M-TMP-1)."""
    hidden, target, weight, bias = digits_classifier
    weight, bias = wrong * weight, wrong * bias
    truth = best_temperature((hidden.double() @ weight.double().mT + bias.double()), target)
    found = fit_temperature(hidden, weight, target, bias=bias)
    assert len(passes) <= 8
    assert abs(found.item() / truth - 1) < 1e-3


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 10.0])
def test_the_optimum_is_reached_from_both_sides(sharpness, passes):
    """Labels drawn at logits that spread by `sharpness` nats: flatter and sharper than where the search starts."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (4000, 20))
    z = x @ w.mT
    z = sharpness * z / z.std()
    y = torch.multinomial(z.softmax(-1), 1, generator=generator)[:, 0]
    found = fit_temperature(x, w, y)
    assert len(passes) <= 8
    assert abs(found.item() / best_temperature(x @ w.mT, y) - 1) < 1e-6


def test_fitting_leaves_ignored_rows_out():
    x, w = torch.randn(50, 4).double(), torch.randn(5, 4).double()
    y = torch.randint(5, (50,))
    y[:25] = (x[:25] @ w.mT).argmax(-1)
    some = y.clone()
    some[::3] = -100
    kept = some != -100
    torch.testing.assert_close(fit_temperature(x, w, some), fit_temperature(x[kept], w, y[kept]))


def test_fitting_without_an_optimum_stays_finite():
    """Every target wins: the sharper the better. None does better than chance: the flatter the better."""
    x, w = torch.eye(4), torch.eye(4)
    sharp = fit_temperature(x, w, torch.arange(4)).item()
    flat = fit_temperature(x, w, torch.arange(4).roll(1)).item()
    assert 0 < sharp < 0.1
    assert 1e3 < flat < math.inf
    with pytest.raises(ValueError, match="no row"):
        fit_temperature(x, w, torch.full((4,), -100))
    with pytest.raises(ValueError, match="target"):
        fit_temperature(x, w, torch.arange(3))


def test_the_bound_on_mutual_information():
    """M-INC-2: log n - mean loss, at most log n; slack below half a nat is saturation; domains are checked."""
    bound = partita.mutual_information_bound(torch.tensor([0.1, 0.3]), 16)
    assert bound.value.item() == pytest.approx(math.log(16) - 0.2, abs=1e-6)
    assert bound.cap.item() == pytest.approx(math.log(16))
    assert bound.slack.item() == pytest.approx(0.2, abs=1e-6)
    assert bound.fraction.item() == pytest.approx(1 - 0.2 / math.log(16))
    assert bound.saturated
    assert not partita.mutual_information_bound(2.0, 64).saturated
    assert partita.mutual_information_bound(0.0, 1).fraction.isnan()
    with pytest.raises(ValueRangeError, match="n >= 1"):
        partita.mutual_information_bound(0.1, 0)
    with pytest.raises(ValueRangeError, match="not negative"):
        partita.mutual_information_bound(-0.1, 4)
    with pytest.raises(DtypeError, match="a number"):
        partita.mutual_information_bound("0.1", 4)
