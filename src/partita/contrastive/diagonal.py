"""Pairs in a batch: row i belongs to column i, every other column is a negative, and so it is for columns.

loss = mean_i ( log Z_row_i - s_ii ),        symmetric: averaged with  mean_j ( log Z_column_j - s_jj )
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita import support as supports
from partita.contrastive.candidates import Bank, positive_score
from partita.contrastive.readout import readout, similarity_moments
from partita.engine import Stats
from partita.processes import ALONE, Processes

__all__ = ["diagonal_loss"]


def diagonal_loss(
    query: Tensor,  # (n, dim)
    key: Tensor,  # (n, dim)
    scale: float | Tensor,
    *,
    symmetric: bool,
    reduction: str,
    return_stats: bool,
    dtype: torch.dtype,
    bias: Tensor | None = None,  # (1, 1)
    processes: Processes = ALONE,
) -> Tensor | tuple[Tensor, Stats]:
    """InfoNCE with the batch's other pairs as negatives."""
    own = torch.arange(len(query), device=query.device)
    if symmetric and not return_stats:
        rows, columns = processes.both_ways_nll(query, key, scale, bias, own)
        return processes.reduce((rows + columns) / 2, reduction).to(dtype)
    sums = processes.sums(query, key, scale, bias=bias, target=own, rank=return_stats, statistics=return_stats)
    rows = nll = sums.nll()
    if symmetric:
        rows = (nll + processes.sums(key, query, scale, bias=bias, target=own, statistics=False).nll()) / 2
    loss = processes.reduce(rows, reduction).to(dtype)
    if not return_stats:
        return loss
    others = Bank(key, supports.not_self(), processes=processes)
    with torch.no_grad():
        negatives = others.state(query, scale)
    positive = positive_score(query, key, 1.0)
    assert sums.rank is not None
    moments = similarity_moments([others], query, positive, [positive])
    return loss, readout(sums.state, negatives, sums.rank, nll, positive, moments, scale, (query, key))
