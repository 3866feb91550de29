"""A closed loop around a layer's temperature, so that its entropy stays where it should.

    log scale  <-  log scale + gain * (H - H_target) / Var[score]

d H / d log(scale) = -Var[score], so this is Newton's step, damped: too much entropy makes the scale grow. The update
printed in the notes, scale <- scale * H_target / H, has the opposite sign of feedback and runs away (M-SCL-10).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from partita._checks import check_positive
from partita.engine import Stats
from partita.errors import ShapeError, ValueRangeError
from partita.scale import Policy

__all__ = ["TemperatureController"]


class TemperatureController(nn.Module, Policy):
    """A scale per head that is steered, not trained: `scale=` of a module, updated from the statistics it sees.

    Give one of: entropy (nats), fraction (of log n), each a number or a band (low, high) inside which nothing is done.
    `observe(stats)` takes one step; MultiheadAttention, and Hugging Face models on partita's attention, do so after
    each forward pass in training. In evaluation the scale stands still. It is a buffer: saved, loaded, no gradient.

    >>> control = TemperatureController(1, entropy=0.5, gain=1.0)
    >>> control(4, 64)  # starts at 1 / sqrt(64)
    tensor([[0.1250]])
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
        check_positive("heads", heads)
        given = entropy if fraction is None else fraction
        ends = [float(end) for end in (given if isinstance(given, tuple) else (given, given))]  # type: ignore[arg-type]
        for end in ends:
            check_positive("the target", end, zero=True)
        if len(ends) != 2 or ends[1] < ends[0]:
            raise ValueRangeError(f"a band is (low, high); got {given!r}.")
        check_positive("gain", gain)
        check_positive("max_step", max_step)
        self.entropy, self.fraction, self.gain, self.max_step, self.limits = entropy, fraction, gain, max_step, limits
        self.register_buffer("log_scale", torch.zeros(heads))

    def forward(self, visible: Tensor | int, dim: int, query: Tensor | None = None) -> Tensor:
        n = torch.as_tensor(visible, device=self.log_scale.device)
        n = n if n.is_floating_point() else n.to(self.log_scale.dtype)
        return self.multiplier(n, dim)

    __call__ = nn.Module.__call__

    def multiplier(self, n: Tensor, dim: int) -> Tensor:
        return self.log_scale.exp().to(n.dtype)[:, None] / math.sqrt(dim) * torch.ones_like(n)

    @torch.no_grad()
    def observe(self, stats: Stats) -> Tensor:  # (heads,)
        """One step from the statistics of a pass, (..., heads, n_query); gives the mean miss H - H_target per head.

        Rows with fewer than two keys have nothing to steer and are left out; so are targets above log n.
        """
        heads = self.log_scale.shape[0]
        if stats.entropy.dim() < 2 or stats.entropy.shape[-2] != heads:
            raise ShapeError(f"stats must be (..., {heads} heads, n_query); got {tuple(stats.entropy.shape)}.")
        rows = Stats(*(field.detach().movedim(-2, 0).reshape(heads, -1) for field in stats))
        ceiling = rows.visible.clamp(min=1).log()
        least, most = (self._target(end, ceiling) for end in (0, 1))
        usable = ((rows.visible >= 2) & (least < ceiling)).to(ceiling.dtype)
        count = usable.sum(-1).clamp(min=1)
        # the head's mean is held, not each row: below the band it misses by what lacks, above by what is too much
        under, over = (((rows.entropy - end) * usable).sum(-1) / count for end in (least, most))
        miss = torch.where(under < 0, under, over.clamp(min=0.0))
        variance = (rows.score_variance * usable).sum(-1) / count
        step = self.gain * miss / variance.clamp(min=1e-6)
        step = torch.where(step.isfinite(), step, torch.zeros_like(step)).clamp(-self.max_step, self.max_step)
        low, high = (math.log(x) for x in self.limits)
        self.log_scale.copy_((self.log_scale + step.to(self.log_scale)).clamp(low, high))
        return miss

    def _target(self, end: int, ceiling: Tensor) -> Tensor:
        """One end of the band, in nats, for rows whose entropy is at most `ceiling`."""
        given = self.entropy if self.entropy is not None else self.fraction
        number = float(given[end] if isinstance(given, tuple) else given)  # type: ignore[arg-type]
        return torch.full_like(ceiling, number) if self.entropy is not None else number * ceiling

    def extra_repr(self) -> str:
        target = f"entropy={self.entropy}" if self.entropy is not None else f"fraction={self.fraction}"
        return f"heads={self.log_scale.shape[0]}, {target}, gain={self.gain}"
