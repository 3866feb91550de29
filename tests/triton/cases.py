"""A problem, asked everything at once, of the kernels and of the oracle's dense float64."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import partita
from partita.engine.backends import TABLE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
# The interpreter serves float64 too, where what is computed shows to the last digits; a device does not.
DTYPE = torch.float64 if INTERPRETED else torch.float32

_REASON = TABLE["triton"].why_not(partita.Gibbs(torch.zeros(1, 1, device=DEVICE), torch.zeros(1, 1)).request()) if (
    DEVICE.type == "cpu"
) else None  # fmt: skip
needs_triton = pytest.mark.skipif(_REASON is not None, reason=f"triton: {_REASON}; make test-triton sets everything up")

NAMES = ("query", "key", "value", "scale", "bias")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    """The same numbers on every device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).to(DEVICE)


def everything(
    backend: str,
    operands: dict[str, Tensor | None],
    *,
    statistics: bool = True,
    variance: bool = True,
    target: Tensor | None = None,
    differentiate: bool = True,
    **options: object,
) -> dict[str, Tensor]:
    """Results of a pass and gradients of a sum that every one of them is part of."""
    leaves = {n: x.detach().clone().requires_grad_(differentiate) for n, x in operands.items() if x is not None}
    value = leaves.get("value")
    with partita.backend(backend):
        gibbs = partita.Gibbs(
            leaves["query"], leaves["key"], scale=leaves.get("scale"), bias=leaves.get("bias"), **options
        )
        asked = {"statistics": statistics, "variance": variance, "mean": value is not None}
        sums = gibbs.reduce(value, target, rank=target is not None, **asked)
        state = sums.state
        found = {"log_partition": state.log_partition(), "visible": state.visible()}
        if statistics:
            found |= state.stats()._asdict()
        if value is not None:
            found["mean"] = sums.mean
        if target is not None:
            found["nll"], found["rank"] = sums.nll(), sums.rank
        if not differentiate:
            return found
        weight = torch.linspace(0.3, 1.3, gibbs.query.shape[-2], dtype=state.mass.dtype, device=DEVICE)
        total = state.mass.new_zeros(())
        for place, (name, x) in enumerate(found.items()):
            if x.requires_grad:
                rows = x.sin().sum(-1) if name == "mean" else torch.where(x.isfinite(), x, torch.zeros_like(x))
                rows = torch.zeros_like(rows) if name == "score_variance" and not variance else rows
                total = total + (place + 1) * (rows * weight).sum()
    # outside the block: the same backend serves the backward pass
    grads = torch.autograd.grad(total, leaves.values())
    return {**{n: x.detach() for n, x in found.items()}, **dict(zip(("d " + n for n in leaves), grads, strict=True))}


def assert_agree(found: dict[str, Tensor], want: dict[str, Tensor], terms: int, magnitude: float = 1.0) -> None:
    """Equal up to rounding: a sum of `terms` numbers is known to terms * eps of its largest part.

    A variance and its gradient are squares of scores, and a score is a sum itself: hence the square of the magnitude,
    the largest score, which the numbers below are multiples of.
    """
    assert found.keys() == want.keys()
    for name, x in found.items():
        y = want[name].to(x.device)
        assert x.shape == y.shape, name
        assert torch.equal(x.isfinite(), y.isfinite()), name
        if not x.is_floating_point():
            assert torch.equal(x, y), name
            continue
        size = max(1.0, magnitude**2, float(y[y.isfinite()].abs().max()) if y.isfinite().any() else 1.0)
        slack = terms * torch.finfo(x.dtype).eps * size
        torch.testing.assert_close(
            x.double(), y.double(), rtol=0, atol=slack, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def compare(operands: dict[str, Tensor | None], *, terms: int | None = None, **options: object) -> None:
    """The kernels against one dense tile in float64."""
    query, key = operands["query"], operands["key"]
    wide = {n: None if x is None else x.double() for n, x in operands.items()}
    found, want = everything("triton", operands, **options), everything("dense", wide, **options)
    raw = (wide["query"] @ wide["key"].mT).abs().max()
    scale = wide.get("scale")
    magnitude = float(raw) * (1.0 if scale is None else float(scale.abs().max()))
    terms = terms or query.shape[-1] + key.shape[-2] + query.shape[-2]
    assert_agree(found, want, terms, max(1.0, magnitude))
