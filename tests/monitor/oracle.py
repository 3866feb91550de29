"""What watch should say, computed from dense scores in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LOW = -1e8


def expected(scores: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
    """(batch, heads, n_query, n_key) final scores -> one number per head for each checked column."""
    s = scores.double()
    s = torch.where(s <= LOW, -math.inf, s)
    visible = (s > -math.inf).sum(-1)
    p = torch.softmax(torch.where(visible[..., None] > 0, s, 0.0), -1)
    log_p = torch.where(p > 0, p.log(), 0.0)
    entropy = -(p * log_p).sum(-1)
    finite = torch.where(s > -math.inf, s, 0.0)
    mean = (p * finite).sum(-1)
    rows: dict[str, Tensor] = {
        "entropy": entropy,
        "normalized_entropy": entropy / visible.clamp(min=2).double().log(),
        "effective_width": entropy.exp(),
        "log_partition": torch.logsumexp(s, -1),
        "score_variance": (p * (finite - mean[..., None]) ** 2).sum(-1),
        "sink_first": p[..., 0],
        "top_mass": p.amax(-1),
        "visible": visible.double(),
    }
    real = torch.ones_like(visible, dtype=torch.bool) if keep is None else keep[:, None, :].expand_as(visible)
    good = real & (visible >= 2)
    out = {name: torch.where(good, value, 0.0).sum((0, 2)) / good.sum((0, 2)) for name, value in rows.items()}
    out["max_score"] = torch.where((real & (visible > 0))[..., None], s, -math.inf).amax((0, 2, 3))
    out["rows"] = good.sum((0, 2)).double()
    out["single"] = (real & (visible == 1)).sum((0, 2)).double()
    mass = (
        torch.where((real & (visible > 0))[..., None], p, 0.0).sum((0, 2)) / (real & (visible > 0)).sum((0, 2))[:, None]
    )
    out["sink_top"] = mass.amax(-1)
    return out


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
            return self.real(input, *args, **kwargs)

        F.softmax = spy  # type: ignore[assignment]
        return self.seen

    def __exit__(self, *_: Any) -> None:
        import torch.nn.functional as F

        F.softmax = self.real
