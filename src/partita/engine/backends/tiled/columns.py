"""The other margin, tile by tile: what the columns of the weights add up to."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.engine.backends.tiled import score_tiles
from partita.engine.request import Request
from partita.engine.state import centre

__all__ = ["column_sums"]


@torch.no_grad()
def column_sums(
    request: Request, peak: Tensor, weight: Tensor, shared: bool, *, whole: bool = False
) -> Tensor:  # (*b, K)
    """sum_i weight_i exp(s_ij - peak_i) of every key; `shared`: also over the last batch dimension, kept with size 1.

    A row gives nothing to a key it does not see, whatever else is in it: not even its nan.
    """
    level = peak.to(request.dtype)
    total = weight.new_zeros((*request.batch, request.n_key))
    for rows, tiles in score_tiles(request, whole=whole):
        own = weight[..., rows, None]
        for cols, s in tiles:
            given = torch.where(s.isneginf(), torch.zeros_like(s), own * centre(s, level[..., rows])[1])
            total[..., cols] += given.sum(-2)
    return total.sum(-2, keepdim=True) if shared else total
