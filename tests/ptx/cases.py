"""A problem by the compiled kernels, by the oracle in float64, and by the plain formula in lower precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import partita
from tests.ptx.device import Device, executing
from tests.ptx.opcodes import NEAREST, Rounding
from tests.tolerances import assert_no_worse_than_naive
from tests.triton.cases import everything

__all__ = ["Problem", "agrees", "served"]

_BY_ROW = ("log_partition", "entropy", "mean_score", "score_variance", "max_score", "visible", "nll", "rank")


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Problem:
    """Operands of some precision, and what is asked of them: the options of `tests.triton.cases.everything`."""

    def __init__(
        self, dtype: torch.dtype, n_query: int, n_key: int, dim: int, dim_value: int | None = None,
        batch: tuple[int, ...] = (2,), shared: tuple[int, ...] | None = None, **options: Any,
    ):  # fmt: skip
        of_keys = batch if shared is None else shared
        bias = options.pop("bias", None)
        self.operands = {
            "query": normal(*batch, n_query, dim, seed=1, dtype=dtype),
            "key": normal(*of_keys, n_key, dim, seed=2, dtype=dtype),
            "value": normal(*of_keys, n_key, dim_value or dim, seed=3, dtype=dtype),
            "scale": (normal(n_query, seed=4).abs() + 0.3) / dim**0.5,
            "bias": None if bias is None else normal(*bias, seed=5),
        }
        self.dtype, self.options = dtype, options

    def results(self, rounding: Rounding = NEAREST, **how: Any) -> tuple[dict[str, Tensor], Device]:
        with executing(rounding, **how) as device:
            found = everything("triton", self.operands, **self.options)
        return found, device

    def truth(self) -> dict[str, Tensor]:
        return everything(
            "dense", {n: None if x is None else x.double() for n, x in self.operands.items()}, **self.options
        )

    def plainly(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The formula as one writes it in torch, and its gradients, in one precision."""
        o, given = self.options, {n: x.to(dtype).requires_grad_() for n, x in self.operands.items() if x is not None}
        q, k, v = (given[n] for n in ("query", "key", "value"))
        if o.get("grouped"):
            k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
        s = (q @ k.mT) * given["scale"][:, None]
        bias, cap = given.get("bias", s.new_zeros(())), o.get("softcap")
        s = s + bias if cap is None else cap * torch.tanh(s / cap) + bias
        rows, keys = s.shape[-2:]
        shown = o.get("support", partita.support.all()).dense(rows, keys, s.shape[:-2])
        there = shown.any(-1)
        low = torch.where(there[..., None], torch.where(shown, s, -torch.inf), 0.0)
        p = low.softmax(-1) * shown
        s = torch.where(shown, s, 0.0)
        log_z = torch.where(there, low.logsumexp(-1), -torch.inf)
        found = {"log_partition": log_z, "visible": shown.sum(-1).to(dtype)}
        if o.get("statistics", True):
            mean = (p * s).sum(-1)
            found["entropy"] = torch.where(there, low.logsumexp(-1) - mean, 0.0)
            found["mean_score"] = mean
            found["score_variance"] = (p * (s - mean[..., None]) ** 2).sum(-1)
            found["max_score"] = torch.where(there, low.amax(-1), -torch.inf)
        found["mean"] = p @ v
        target = o.get("target")
        if target is not None:
            hit = torch.where(shown, s, -torch.inf).gather(-1, target.expand(s.shape[:-1])[..., None])[..., 0]
            found["nll"] = log_z - hit
            found["rank"] = (low > hit[..., None]).sum(-1)
        if not o.get("differentiate", True):
            return {name: x.detach() for name, x in found.items()}
        total, weight = s.new_zeros(()), torch.linspace(0.3, 1.3, rows, dtype=dtype)
        for place, (name, x) in enumerate(found.items()):
            if x.requires_grad:
                row = x.sin().sum(-1) if name == "mean" else torch.where(x.isfinite(), x, 0.0)
                row = 0 * row if name == "score_variance" and not o.get("variance", True) else row
                total = total + (place + 1) * (row * weight).sum()
        grads = torch.autograd.grad(total, list(given.values()))
        return {**{n: x.detach() for n, x in found.items()}, **{"d " + n: g for n, g in zip(given, grads, strict=True)}}


def agrees(problem: Problem, found: dict[str, Tensor], ulps: int = 4) -> None:
    """No worse than twice the plain formula: in float32 for what is summed there, else in the operands' precision.

    In half precision that formula rounds its scores too and knows little of their gradients: there, in addition, within
    `ulps` units of the operands' precision of the largest true value, which is what rounded weights of a sum may do.
    """
    truth, exact, low = problem.truth(), problem.plainly(torch.float32), problem.plainly(problem.dtype)
    assert found.keys() == truth.keys()
    for name, x in found.items():
        want = truth[name]
        if not x.is_floating_point():
            assert torch.equal(x, want), f"{name}: not the same"
        elif not (name == "score_variance" and not problem.options.get("variance", True)):
            naive = exact if name in _BY_ROW else low
            try:
                assert_no_worse_than_naive(x, naive[name].to(x.dtype), want, ulps=ulps)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            if name not in _BY_ROW:
                error, size = float((x.double() - want).abs().max()), float(want.abs().max())
                near = max(ulps, 4) * torch.finfo(problem.dtype).eps
                if problem.dtype != torch.float32:
                    assert error <= near * size, f"{name}: off by {error:.2g}, the largest is {size:.2g}"


def served(device: Device) -> list[str]:
    """The kernels that ran, careful ones in brackets."""
    return [f"({x.name})" if x.constants.get("CAREFUL") else x.name for x in device.launches]
