"""Regression's half: squared and absolute error as the likelihoods they are, with a scale (M-LOSS-4, M-LOSS-10).

Gaussian   r^2 / (2 scale^2) + log scale + log(2 pi) / 2        squared error is its case scale = 1
Laplace    |r| / scale       + log scale + log 2                absolute error is its case scale = 1

r = input - target. The scale that fits best is the root mean square of the residuals, or their mean size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from partita import _checks
from partita._checks import Reduction
from partita._torch_function import overridable
from partita.errors import ShapeError, ValueRangeError
from partita.precision import loss_dtype
from partita.rows import reduce_rows

__all__ = ["gaussian_nll_loss", "laplace_nll_loss"]


@overridable
def gaussian_nll_loss(
    input: Tensor, target: Tensor, scale: float | Tensor = 1.0, *, constant: bool = True, reduction: Reduction = "mean"
) -> Tensor:
    """Negative log-likelihood of a target with Gaussian noise around the input: squared error, with its scale.

        loss = r^2 / (2 scale^2) + log(scale sqrt(2 pi))          r = input - target        (M-LOSS-10)

    With scale 1 and constant=False it is half of ``F.mse_loss``. A scale that is learned, or a network's output,
    settles at the standard deviation of the residuals: the log keeps it from growing.

    >>> gaussian_nll_loss(torch.zeros(2), torch.tensor([3.0, -3.0]), constant=False)  # 9 / 2
    tensor(4.5000)

    scale: the standard deviation, positive; a number, or broadcastable to the input.
    constant: add log sqrt(2 pi), so that losses of different noise compare.
    """
    gap, spread = _residual(input, target, scale, reduction)
    rows = (gap / spread).square() / 2 + spread.log()
    return _reduced(rows + 0.5 * math.log(2 * math.pi) if constant else rows, gap, reduction, input)


@overridable
def laplace_nll_loss(
    input: Tensor, target: Tensor, scale: float | Tensor = 1.0, *, constant: bool = True, reduction: Reduction = "mean"
) -> Tensor:
    """Negative log-likelihood of a target with Laplace noise around the input: absolute error, with its scale.

        loss = |r| / scale + log(2 scale)          r = input - target        (M-LOSS-10)

    With scale 1 and constant=False it is ``F.l1_loss``. A learned scale settles at the mean size of the residuals. Its
    best constant input is the median of the targets, where that of `gaussian_nll_loss` is their mean.

    >>> laplace_nll_loss(torch.zeros(2), torch.tensor([3.0, -5.0]), 2.0, constant=False)  # 4/2 + log 2
    tensor(2.6931)

    constant: add log 2, so that losses of different noise compare.
    """
    gap, spread = _residual(input, target, scale, reduction)
    rows = gap.abs() / spread + spread.log()
    return _reduced(rows + math.log(2) if constant else rows, gap, reduction, input)


def _reduced(rows: Tensor, gap: Tensor, reduction: Reduction, input: Tensor) -> Tensor:
    return reduce_rows(rows.expand_as(gap), reduction).to(loss_dtype(input))


def _residual(input: Tensor, target: Tensor, scale: float | Tensor, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """input - target and the scale, in float32 or better; everything is checked here."""
    _checks.check_reduction(reduction)
    _checks.check_float("input", input)
    _checks.check_float("target", target)
    _checks.check_device(("input", "target"), (input, target))
    if input.shape != target.shape:
        raise ShapeError(
            f"input and target must have the same shape; got {_checks.shape_text(input)} and "
            f"{_checks.shape_text(target)}. Broadcasting (N, 1) against (N,) would compare "
            f"every pair: use squeeze or unsqueeze."
        )
    dtype = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    if isinstance(scale, Tensor):
        _checks.check_float("scale", scale)
        if not _checks.expands(scale.shape, input.shape):
            raise ShapeError(
                f"scale must broadcast to the input {_checks.shape_text(input)}; got {_checks.shape_text(scale)}."
            )
        if _checks.has_values(scale) and not bool((scale > 0).all()):
            raise ValueRangeError(
                "scale must be positive; the tensor given is not. Use softplus or exp of what is learned."
            )
        spread = scale.to(dtype)
    else:
        _checks.check_positive("scale", scale)
        spread = torch.full((), float(scale), dtype=dtype, device=input.device)
    return input.to(dtype) - target.to(dtype), spread
