"""What watch should record, computed from dense scores in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LOW = -1e8


class Truth:
    """Columns of one softmax, dense, in float64, from its final scores (batch, heads, n_query, n_key)."""

    def __init__(self, scores: Tensor, keep: Tensor | None = None) -> None:
        self.scores = s = scores.double().masked_fill(scores <= LOW, -math.inf)
        self.batch, self.heads, self.n, self.n_key = s.shape
        self.visible = (s > -math.inf).sum(-1)
        some = self.visible > 0
        self.p = torch.softmax(torch.where(some[..., None], s, 0.0), -1)
        self.entropy = -torch.where(self.p > 0, self.p * self.p.clamp(min=1e-300).log(), 0.0).sum(-1)
        self.normal = self.entropy / self.visible.clamp(min=2).double().log()
        held = torch.where(s > -math.inf, s, 0.0)
        mean = (self.p * held).sum(-1, keepdim=True)
        real = torch.ones_like(some) if keep is None else keep[:, None, :].expand_as(some)
        self.there, self.good = real & some, real & (self.visible >= 2)
        self.rows: dict[str, Tensor] = {
            "entropy": self.entropy,
            "normalized_entropy": self.normal,
            "effective_width": self.entropy.exp(),
            "log_partition": torch.logsumexp(s, -1),
            "score_variance": (self.p * (held - mean) ** 2).sum(-1),
            "sink_first": self.p[..., 0] * (s[..., 0] > -math.inf),
            "top_mass": self.p.amax(-1),
            "visible": self.visible.double(),
        }
        self.largest = torch.where(self.there, s.amax(-1), -math.inf).amax((0, 2))
        self.size = max(1.0, float(torch.where(self.there[..., None], held, 0.0).abs().max()))

    def means(self) -> dict[str, Tensor]:  # each (heads,); rows that see one key are counted and left out
        count = self.good.sum((0, 2)).double()
        out = {name: torch.where(self.good, x, 0.0).sum((0, 2)) / count for name, x in self.rows.items()}
        out["rows"], out["nonfinite"] = count, torch.zeros_like(count)
        out["single"] = (self.there & (self.visible == 1)).sum((0, 2)).double()
        out["length"] = torch.where(self.there, self.visible, 0).amax((0, 2)).double()
        out["max_score"] = torch.where(self.largest.isneginf(), math.nan, self.largest)
        return out

    def key_mass(self) -> Tensor:  # (heads, n_key)
        count = self.there.sum((0, 2)).clamp(min=1)[:, None]
        return torch.where(self.there[..., None], self.p, 0.0).sum((0, 2)) / count


def expected(scores: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
    """One number per head for each checked column."""
    truth = Truth(scores, keep)
    return truth.means() | {"sink_top": truth.key_mass().amax(-1)}


def assert_equal(frame: Any, layer: int, want: dict[str, Tensor], step: int = 0, tolerance: float = 1e-4) -> None:
    """Every checked column of one layer and step."""
    rows = [r for r in frame if r["layer"] == layer and r["step"] == step]
    for name, values in want.items():
        got = torch.tensor([float(r[name]) for r in rows], dtype=torch.float64)
        assert got.shape == values.shape, f"layer {layer}: {len(got)} heads recorded, {len(values)} expected"
        worst = (got - values).abs().max().item()
        scale = max(1.0, values.abs().max().item())
        assert worst <= tolerance * scale, f"layer {layer} {name}: got {got.tolist()}, expected {values.tolist()}"


class Softmaxes:
    """Records the scores that reach F.softmax, as eager attention makes them."""

    def __enter__(self) -> list[Tensor]:
        import torch.nn.functional as F

        self.seen: list[Tensor] = []
        self.real = F.softmax

        def spy(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.seen.append(input.detach().clone())
            with torch._C.DisableTorchFunction():  # a function mode would be handed this spy, and count once more
                return self.real(input, *args, **kwargs)

        F.softmax = spy  # type: ignore[assignment]
        return self.seen

    def __exit__(self, *_: Any) -> None:
        import torch.nn.functional as F

        F.softmax = self.real
