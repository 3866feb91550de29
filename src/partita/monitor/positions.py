"""Which key positions draw the mass: what each key received from all rows, pooled, and followed over the run.

    share_j = sum_i p(j|i) / rows        summed over the keys of a bin, so that the bins of a head add up to 1

Beside it stands what the same rows would give if each saw its keys alike: under a causal mask early keys receive more
than late ones without any head's doing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita.monitor.ranges import SLACK, Impossible
from partita.monitor.scores import Scores, hide, invisible

BINS = 64  # of positions
TOP = 5  # keys that are named
KEPT = 8  # profiles of a layer: the first, the newest, and some between them


class Received:
    """Sums of one layer over one step, by head and key."""

    def __init__(self) -> None:
        self.total: Tensor | None = None  # (heads, n_key)
        self.alike: Tensor | None = None  # (n_key), mean over heads
        self.rows: Tensor | None = None  # (heads)

    def add(self, call: Scores) -> None:
        total, rows = _received(_per_query_head(call))
        alike, _ = _received(_alike(call))
        self.total, self.rows = _sum(self.total, total), _sum(self.rows, rows)
        self.alike = _sum(self.alike, alike.mean(0))

    def row(self, step: int, layer: int, wrong: list[Impossible]) -> dict[str, Any] | None:
        """What the record keeps; a head whose shares do not add up to 1 is left out, and added to `wrong`."""
        if self.total is None or self.alike is None or self.rows is None or not bool((self.rows > 0).any()):
            return None
        share = self.total / self.rows.clamp(min=1)[:, None]
        sums, n = share.sum(-1), share.shape[-1]
        known = sums.isfinite() & (self.rows > 0)  # NaN in a row is the model's affair, and said elsewhere
        bad = known & (((sums - 1).abs() > SLACK) | (share < -SLACK).any(-1))
        wrong += [Impossible(step, layer, int(h), "received", float(sums[h])) for h in bad.nonzero()[:, 0]]
        wide = -(-n // BINS)  # keys of a bin: as many in each but the last, or shares of bins would not compare
        bins, to_bin = -(-n // wide), torch.arange(n, device=share.device) // wide
        pooled = share.new_zeros(len(share), bins).index_add_(1, to_bin, share)
        alike = share.new_zeros(bins).index_add_(0, to_bin, self.alike)
        best, index = share.nan_to_num(0.0).topk(min(TOP, n), -1)
        shown, pairs = (known & ~bad).tolist(), zip(index.tolist(), best.tolist(), strict=True)
        top = [[[key, _digits(mass)] for key, mass in zip(*pair, strict=True)] for pair in pairs]
        return {
            "step": step,
            "layer": layer,
            "n_key": n,
            "rows": [int(r) for r in self.rows.tolist()],
            "bins": [
                [_digits(v) for v in line] if ok else None for line, ok in zip(pooled.tolist(), shown, strict=True)
            ],
            "top": [pair if ok else None for pair, ok in zip(top, shown, strict=True)],
            "alike": [_digits(v) for v in (alike / alike.sum().clamp(min=1e-300)).tolist()],
        }


def keep(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a profile; of each layer at most `KEPT` stay: the first, the newest, and evenly spaced ones between."""
    mine = [r for r in rows if r["layer"] == row["layer"]]
    row["look"] = mine[-1]["look"] + 1 if mine else 0
    stride = 1
    while row["look"] >= stride * (KEPT - 1):
        stride *= 2
    mine = [r for r in mine if r["look"] % stride == 0]
    rows[:] = [r for r in rows if r["layer"] != row["layer"]] + mine + [row]


def _received(call: Scores) -> tuple[Tensor, Tensor]:
    """(heads, n_key) sums over batch and rows, and the (heads) rows behind them: those that are real and see a key."""
    gibbs = call.gibbs()
    stats = gibbs.stats()
    live = (stats.visible.expand(call.shape) > 0) & stats.log_partition.expand(call.shape).isfinite()
    if call.keep is not None:
        live = live & call.keep[:, None, :]
    received = gibbs.received(live.to(stats.entropy.dtype))
    return received.sum(0, dtype=torch.float64), live.sum((0, 2)).double()


def _per_query_head(call: Scores) -> Scores:
    """Grouped queries with a key head each: what is received is asked for by query head."""
    if call.key is None or call.key.shape[1] == call.heads:
        return call
    return replace(call, key=call.key.repeat_interleave(call.heads // call.key.shape[1], 1))


def _alike(call: Scores) -> Scores:
    """The same rows, each seeing what it sees, with all scores 0."""
    dense = call.dense
    seen = dense if dense is None or dense.dtype == torch.bool else dense > invisible(dense.dtype)
    heads = call.heads if call.support is not None or (seen is not None and seen.shape[1] > 1) else 1
    zero = torch.zeros(1, 1, 1, 1, device=call.first.device)
    query, key = (zero.expand(call.batch, heads, n, 1) for n in (call.n_query, call.n_key))
    return Scores(query, key, 1.0, hide(None, seen), call.causal, call.support, keep=call.keep)


def _sum(old: Tensor | None, new: Tensor) -> Tensor:
    """Calls of other lengths begin at the same first key."""
    if old is None:
        return new
    n = max(old.shape[-1], new.shape[-1])
    return torch.nn.functional.pad(old, (0, n - old.shape[-1])) + torch.nn.functional.pad(new, (0, n - new.shape[-1]))


def _digits(value: float) -> float:
    """Six digits: a picture has no more."""
    return float(f"{value:.6g}")
