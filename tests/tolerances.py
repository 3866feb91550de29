"""How near is near enough: exact in float64, measured below it."""

from __future__ import annotations

import torch
from torch import Tensor

import partita


def assert_exact(actual: Tensor, expected: Tensor, *, magnitude: float = 1.0) -> None:
    """Equal in float64 up to rounding, for scores of at most this magnitude; nan and inf must be in the same places.

    A score of size m is known to about m * 2e-16, and every statistic inherits that: hence the absolute part.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == torch.float64 or not actual.is_floating_point(), f"{actual.dtype}, expected float64"
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=1e-11, atol=1e-11 * max(1.0, magnitude), equal_nan=True
    )


def assert_same_statistics(
    actual: partita.Stats, expected: partita.Stats, magnitude: float = 1.0, *, but: tuple[str, ...] = ()
) -> None:
    """Every field of Stats but these; a variance is a square, and so is its rounding."""
    for name in partita.Stats._fields:
        if name not in but:
            size = magnitude**2 if name == "score_variance" else magnitude
            assert_exact(getattr(actual, name), getattr(expected, name), magnitude=size)


def assert_no_worse_than_naive(
    actual: Tensor,
    naive: Tensor,
    truth: Tensor,
    *,
    factor: float = 2.0,
    ulps: int = 4,
    dtype: torch.dtype | None = None,
) -> None:
    """max |actual - truth| <= factor * max |naive - truth| + floor, the naive formula being torch's in the same dtype.

    floor = `ulps` units in the last place, in the dtype of the result, of the largest true value (at least of 1). Where
    the naive formula is right to the last digit by luck (one key, tiny sizes), twice its error is zero, and a single
    rounding of ours would count as a failure. It is far below any error that a wrong formula makes.
    """
    truth = truth.double()
    assert actual.shape == truth.shape, f"shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    finite = truth.isfinite()
    torch.testing.assert_close(actual.double()[~finite], truth[~finite], equal_nan=True)
    if not finite.any():
        return
    eps = torch.finfo(actual.dtype).eps
    floor = ulps * eps * max(1.0, float(truth[finite].abs().max()))
    ours = float((actual.double() - truth)[finite].abs().max())
    theirs = float((naive.double() - truth)[finite].abs().nan_to_num(torch.inf).max())
    assert ours <= factor * theirs + floor, (
        f"our error {ours:.3g}, naive {theirs:.3g} (allowed x{factor}, +{floor:.3g})"
    )
