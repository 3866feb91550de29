"""Feedback control of a layer's scale, which keeps its entropy at a target.

    log scale  <-  log scale + gain * (H - H_target) / Var[score]

d H / d log(scale) = -Var[score], so this is a damped Newton step. The update printed in the notes,
scale <- scale * H_target / H, has the opposite sign and diverges (M-SCL-10).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from partita._checks import check_positive, check_whole
from partita.engine import Stats
from partita.errors import ShapeError, ValueRangeError
from partita.scale import Policy
from partita.scale.policies import check_head_dim

__all__ = ["TemperatureController"]


class TemperatureController(nn.Module, Policy):
    """A scale per head that is controlled, not trained: `scale=` of a module, updated from its statistics.

    Give one of: entropy (nats), fraction (of log n), each a number or a band (low, high) inside which nothing is done.
    `observe(stats)` takes one step; MultiheadAttention, and Hugging Face models on partita's attention, call it after
    each forward pass in training. The scale is a buffer: saved, loaded, no gradient.

    >>> control = TemperatureController(1, entropy=0.5, gain=1.0)
    >>> control(4, 64)  # starts at 1 / sqrt(64)
    tensor([[0.1250]], dtype=torch.float64)

    gain, max_step: the share of Newton's step in log scale, and the largest step.
    limits: (low, high) of the scale relative to 1 / sqrt(dim).
    """

    log_scale: Tensor  # (heads,), relative to 1/sqrt(dim)

    def __init__(
        self,
        heads: int,
        *,
        entropy: float | tuple[float, float] | None = None,
        fraction: float | tuple[float, float] | None = None,
        gain: float = 0.3,
        max_step: float = 0.5,
        limits: tuple[float, float] = (1e-3, 1e3),
    ):
        super().__init__()
        if (entropy is None) == (fraction is None):
            raise ValueRangeError("give exactly one of entropy (nats) and fraction (of log n).")
        check_whole("heads", heads, least=1)
        name, given = ("entropy", entropy) if fraction is None else ("fraction", fraction)
        low, high = _pair(name, given)
        check_positive(name, low, zero=True)
        if fraction is not None and high > 1:
            raise ValueRangeError(f"fraction is of log n, between 0 and 1; got {fraction!r}. In nats it is entropy=.")
        check_positive("gain", gain)
        check_positive("max_step", max_step)
        self.limits = _pair("limits", limits)
        check_positive("limits", self.limits[0])
        self.entropy, self.fraction, self.gain, self.max_step = entropy, fraction, gain, max_step
        self.register_buffer("log_scale", torch.zeros(heads))

    forward = Policy.__call__  # with the hooks of a module around it
    __call__ = nn.Module.__call__

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        check_head_dim("TemperatureController", self.log_scale.shape[0], n)
        return self.log_scale.to(n.dtype).exp()[:, None] / math.sqrt(dim) * torch.ones_like(n)

    @torch.no_grad()
    def observe(self, stats: Stats) -> Tensor:  # (heads,)
        """One step from the statistics of a pass, (..., heads, n_query); returns the mean of H - H_target per head.

        Rows with fewer than two keys, or with a target above log n, are left out.
        """
        heads = self.log_scale.shape[0]
        if stats.entropy.dim() < 2 or stats.entropy.shape[-2] != heads:
            raise ShapeError(f"stats must be (..., {heads} heads, n_query); got {tuple(stats.entropy.shape)}.")
        rows = Stats(*(field.detach().movedim(-2, 0).reshape(heads, -1) for field in stats))
        ceiling = rows.visible.clamp(min=1).log()  # of the entropy, in nats
        ends = _pair("the target", self.fraction if self.entropy is None else self.entropy)
        least, most = (end * ceiling if self.entropy is None else torch.full_like(ceiling, end) for end in ends)
        usable = ((rows.visible >= 2) & (least < ceiling)).to(ceiling.dtype)
        count = usable.sum(-1).clamp(min=1)
        # the mean of a head is controlled, not each row
        under, over = (((rows.entropy - end) * usable).sum(-1) / count for end in (least, most))
        miss = torch.where(under < 0, under, over.clamp(min=0.0))
        variance = (rows.score_variance * usable).sum(-1) / count
        step = self.gain * miss / variance.clamp(min=1e-6)
        step = torch.where(step.isfinite(), step, torch.zeros_like(step)).clamp(-self.max_step, self.max_step)
        low, high = (math.log(x) for x in self.limits)
        self.log_scale.copy_((self.log_scale + step.to(self.log_scale)).clamp(low, high))
        return miss

    def extra_repr(self) -> str:
        target = f"entropy={self.entropy}" if self.entropy is not None else f"fraction={self.fraction}"
        return f"heads={self.log_scale.shape[0]}, {target}, gain={self.gain}"


def _pair(name: str, given: object) -> tuple[float, float]:
    """(low, high); a number is both."""
    try:
        low, high = (float(x) for x in (given if isinstance(given, tuple | list) else (given, given)))
    except (TypeError, ValueError):
        low = high = math.nan
    if not -math.inf < low <= high < math.inf:
        raise ValueRangeError(f"{name} must be a finite number or (low, high), the smaller one first; got {given!r}.")
    return low, high
