"""Gaussian and Laplace likelihoods against torch's densities, torch's losses, and the best scales (M-LOSS-10)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from partita import gaussian_nll_loss, laplace_nll_loss
from partita.errors import DtypeError, ShapeError, ValueRangeError

LAWS = {gaussian_nll_loss: torch.distributions.Normal, laplace_nll_loss: torch.distributions.Laplace}
PLAIN = {
    gaussian_nll_loss: lambda x, y, r: F.mse_loss(x, y, reduction=r) / 2,
    laplace_nll_loss: lambda x, y, r: F.l1_loss(x, y, reduction=r),
}


@pytest.fixture(params=LAWS, ids=lambda f: f.__name__)
def loss(request):
    return request.param


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(), (4,), (3, 1), (3, 4)])
def test_the_loss_is_minus_the_log_density(loss, reduction, shape):
    """M-LOSS-10."""
    x, y = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()
    rows = -LAWS[loss](x, scale).log_prob(y)
    want = rows if reduction == "none" else getattr(rows, reduction)()
    got = loss(x, y, scale, reduction=reduction)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(z.sum(), (x, y, scale)) for z in (got, want)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_a_scale_it_is_torchs_error(loss, reduction):
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(loss(x, y, constant=False, reduction=reduction), PLAIN[loss](x, y, reduction))


def test_the_best_scale_is_the_size_of_the_residuals(loss):
    """d loss / d scale is 0 at the root mean square, or at the mean size, and the loss is larger elsewhere."""
    gap = torch.randn(1000, dtype=torch.float64)
    best = gap.square().mean().sqrt() if loss is gaussian_nll_loss else gap.abs().mean()
    best = best.requires_grad_()
    at = loss(gap, torch.zeros_like(gap), best)
    assert torch.autograd.grad(at, best)[0].abs() < 1e-10
    assert all(loss(gap, torch.zeros_like(gap), best.detach() * f) > at for f in (0.9, 1.1))


def test_mean_and_median():
    """The best constant: the mean for squares, the median for sizes (M-LOSS-10)."""
    y = torch.tensor([0.0, 0.0, 1.0, 9.0, 90.0], dtype=torch.float64)
    for loss, best in ((gaussian_nll_loss, y.mean()), (laplace_nll_loss, y.median())):
        at = loss(best.expand(5), y)
        assert all(loss((best + d).expand(5), y) > at for d in (-0.5, 0.5))


def test_half_inputs_are_summed_in_float32(loss):
    x, y = torch.randn(100).bfloat16(), torch.randn(100).bfloat16()
    got, want = loss(x, y, 0.7), loss(x.double(), y.double(), 0.7)
    assert got.dtype == torch.bfloat16
    assert abs(got.double() - want) <= 2.0**-8 * want.abs()


def test_mistakes_are_named(loss):
    x = torch.zeros(4)
    mistakes = [
        ((x, torch.zeros(4, 1)), ShapeError, "same shape"),
        ((x, torch.zeros(4, dtype=torch.long)), DtypeError, "target"),
        ((x, x, 0.0), ValueRangeError, "scale"),
        ((x, x, torch.tensor([1.0, 1.0, -1.0, 1.0])), ValueRangeError, "positive"),
        ((x, x, torch.ones(2, 4)), ShapeError, "scale must broadcast"),
        ((x, x, torch.ones(3)), ShapeError, "scale must broadcast"),
    ]
    for given, error, message in mistakes:
        with pytest.raises(error, match=message):
            loss(*given)
    with pytest.raises(ValueRangeError, match="reduction"):
        loss(x, x, reduction="median")
