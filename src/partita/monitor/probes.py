"""What is measured at a softmax: row statistics by the streaming engine, and a few rows looked at closely.

Nothing of size n_query * n_key is built, except for a sample of rows kept under `SAMPLE` numbers.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita import Gibbs, Stats, support
from partita.monitor.tally import Tally

SAMPLE = 100_000  # probabilities looked at closely in one call
CHUNK = 2_000_000  # elements of a mask converted at once
FACTORS = (0.25, 0.5, 0.7071, 1.0, 1.4142, 2.0, 4.0)
MAP = 128


@dataclass(frozen=True)
class Scores:
    """One call, in canonical form. Either query and key, or finished scores (then query and key are None)."""

    query: Tensor | None  # (batch, heads, n_query, dim)
    key: Tensor | None  # (batch, key heads, n_key, dim)
    scale: Any = 1.0  # a number, or a tensor that broadcasts to (batch, heads, n_query)
    mask: Tensor | None = None  # bool (True: visible) or added; broadcasts to (batch, heads, n_query, n_key)
    causal: bool = False  # top left
    softcap: float | None = None
    scores: Tensor | None = None  # (batch, heads, n_query, n_key)
    keep: Tensor | None = None  # (batch, n_query): real queries

    @property
    def batch(self) -> int:
        return self._first.shape[0]

    @property
    def heads(self) -> int:
        return self._first.shape[1]

    @property
    def n_query(self) -> int:
        return self._first.shape[2]

    @property
    def n_key(self) -> int:
        if self.scores is not None:
            return self.scores.shape[3]
        assert self.key is not None
        return self.key.shape[2]

    @property
    def _first(self) -> Tensor:
        first = self.query if self.scores is None else self.scores
        assert first is not None
        return first

    def take(self, batch: Tensor | None, rows: Tensor | slice) -> Scores:
        """The same call for some batch entries and some rows."""
        pick = slice(None) if batch is None else batch

        def both(t: Tensor | None, dim: int) -> Tensor | None:
            if t is None:
                return None
            t = t[pick] if t.shape[0] > 1 else t
            if t.shape[dim] == 1:
                return t
            return (
                t.narrow(dim, rows.start, rows.stop - rows.start)
                if isinstance(rows, slice)
                else t.index_select(dim, rows)
            )

        mask = self.mask
        if self.causal:
            device = self._first.device
            index = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows
            seen = (index[:, None] >= torch.arange(self.n_key, device=device))[None, None]
            mask = both(mask, 2)
            mask = (
                seen
                if mask is None
                else (mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf))
            )
        else:
            mask = both(mask, 2)
        scale = both(self.scale, 2) if isinstance(self.scale, Tensor) and self.scale.dim() == 3 else self.scale
        key = self.key if self.key is None or batch is None else self.key[pick]
        keep = None if self.keep is None else self.keep[pick]
        keep = keep if keep is None else (keep[:, rows])
        return Scores(both(self.query, 2), key, scale, mask, False, self.softcap, both(self.scores, 2), keep)

    def head(self, index: int) -> Scores:
        """The same call for one head."""

        def one(t: Tensor | None, heads: int) -> Tensor | None:
            return None if t is None else t if t.shape[1] == 1 else t[:, index * t.shape[1] // heads :][:, :1]

        scale = one(self.scale, self.heads) if isinstance(self.scale, Tensor) and self.scale.dim() == 3 else self.scale
        heads = self.heads
        return Scores(
            one(self.query, heads),
            one(self.key, heads),
            scale,
            one(self.mask, heads),
            self.causal,
            self.softcap,
            one(self.scores, heads),
            self.keep,
        )

    def gibbs(self, factor: float = 1.0) -> Gibbs:
        """The distribution; `factor` multiplies the scale (the bias stays)."""
        if self.scores is not None:
            s = self.scores.float() if factor == 1.0 else self.scores.float() * factor
            s = torch.where(self.scores <= invisible(self.scores.dtype), -torch.inf, s)
            zero = s.new_zeros(1, 1, 1, 1)
            return Gibbs(zero.expand(1, 1, self.n_query, 1), zero.expand(1, 1, self.n_key, 1), bias=s)
        assert self.query is not None
        assert self.key is not None
        seen, bias = support.all(), None
        if self.mask is not None and self.mask.dtype == torch.bool:
            seen = support.mask(self.mask)
        elif self.mask is not None:
            bias = torch.where(self.mask <= invisible(self.mask.dtype), -torch.inf, self.mask.float())
        if self.causal:
            seen = seen & support.causal()
        grouped = self.key.shape[1] != self.query.shape[1]
        return Gibbs(
            self.query,
            self.key,
            scale=self.scale * factor,
            bias=bias,
            support=seen,
            softcap=self.softcap,
            grouped=grouped,
        )

    def first_key(self, log_partition: Tensor) -> Tensor:  # (batch, heads, n_query)
        """Mass on key 0: exp(score_i0 - log Z_i), 0 where it is not visible."""
        if self.scores is not None:
            score = self.scores[..., 0].float()
            return torch.where(self.scores[..., 0] <= invisible(self.scores.dtype), 0.0, (score - log_partition).exp())
        assert self.query is not None
        assert self.key is not None
        head = self.key[:, :, 0, :].repeat_interleave(self.heads // self.key.shape[1], 1)
        score = (self.query.to(log_partition.dtype) @ head.to(log_partition.dtype)[..., None])[..., 0] * self.scale
        if self.softcap:
            score = self.softcap * torch.tanh(score / self.softcap)
        if self.mask is None:
            return (score - log_partition).exp()
        column = self.mask[..., 0]
        if column.dtype == torch.bool:
            return torch.where(column, (score - log_partition).exp(), 0.0)
        return torch.where(
            column <= invisible(column.dtype), 0.0, (score + column.to(score.dtype) - log_partition).exp()
        )


def invisible(dtype: torch.dtype) -> float:
    """Added values at or below this hide a key: the dtype's minimum (and sums with it), and the -1e9 of older code."""
    return max(torch.finfo(dtype).min / 2, -1e8)


def spread(count: int, wanted: int, phase: float, device: torch.device) -> Tensor:
    """`wanted` indices, evenly spaced; the phase moves with the step, so that every row has its turn."""
    return ((torch.arange(wanted, device=device) + phase) * (count / wanted)).long().clamp_(max=count - 1)


def measure(call: Scores, tally: Tally, *, rows: int | None, phase: float, stats: Any = None) -> None:
    """Add the call's rows to the tally; `stats` where the call came with them."""
    n = call.n_query
    if rows is not None and rows < n:
        call = call.take(None, spread(n, rows, phase, call._first.device))
        n = rows
    dense = call.mask if call.scores is None else call.scores
    step = n
    if dense is not None and dense.shape[2] > 1:  # a mask per row: convert a few rows at a time
        step = max(1, min(n, CHUNK // max(1, dense.shape[0] * dense.shape[1] * dense.shape[3])))
    for start in range(0, n, step):
        part = call if step == n else call.take(None, slice(start, min(start + step, n)))
        found = part.gibbs().stats() if stats is None else stats
        shape = (part.batch, part.heads, part.n_query)
        found = Stats(*(t.expand(shape) for t in found))
        tally.add(found, FirstKey(part, found.log_partition), part.keep)


@dataclass(frozen=True)
class FirstKey:
    """The mass on key 0, which plain attention lets the tally compute."""

    call: Scores
    log_partition: Tensor  # (batch, heads, n_query)

    def given(self) -> Tensor | tuple[Tensor, Tensor, float]:
        c = self.call
        simple = c.mask is None and not c.softcap and isinstance(c.scale, (int, float)) and c.n_key > 0
        if simple and c.query is not None and c.key is not None and c.key.shape[1] == c.heads:
            return c.query, c.key, float(c.scale)
        return self.mass()

    def mass(self) -> Tensor:
        return self.call.first_key(self.log_partition).expand(self.log_partition.shape)


def sample(call: Scores) -> Scores:
    """Evenly spaced rows of a few batch entries, few enough to look at densely; all rows where they are few."""
    per_row = max(1, call.heads * call.n_key)
    budget = max(4, SAMPLE // per_row)
    batch = call.batch if call.batch * call.n_query <= budget else min(call.batch, max(1, budget // 16))
    rows = min(call.n_query, max(4, budget // batch))
    device = call._first.device
    return call.take(spread(call.batch, batch, 0.5, device), spread(call.n_query, rows, 0.5, device))


def look(call: Scores, tally: Tally) -> None:
    """Strongest keys and likeness of heads, from a sample of rows."""
    part = sample(call)
    probs = part.gibbs().probs().float().nan_to_num(0.0)
    tally.add_sample(probs.expand(part.batch, part.heads, part.n_query, part.n_key), part.keep)


def curve(call: Scores, step: int, layer: int) -> dict[str, Any]:
    """Entropy of sampled rows at several factors of the present scale: mean and 10 to 90 % of the rows, per head."""
    part = sample(call)
    columns: dict[str, list[list[float]]] = {"mean": [], "p10": [], "p90": []}
    rows = 0
    for factor in FACTORS:
        gibbs = part.gibbs(factor)
        stats = gibbs.stats()
        shape = (part.batch, part.heads, part.n_query)
        good = (stats.visible.expand(shape) >= 2) & torch.isfinite(stats.entropy.expand(shape))
        if part.keep is not None:
            good = good & part.keep[:, None, :]
        values = (
            torch.where(good, stats.entropy.expand(shape), torch.nan).transpose(0, 1).reshape(part.heads, -1).float()
        )
        rows = int(good[:, 0].sum())
        columns["mean"].append(values.nanmean(-1).tolist())
        low, high = torch.nanquantile(values, values.new_tensor([0.1, 0.9]), dim=-1)
        columns["p10"].append(low.tolist())
        columns["p90"].append(high.tolist())
    per_head = {name: [list(row) for row in zip(*values, strict=True)] for name, values in columns.items()}
    scale = float(call.scale) if not isinstance(call.scale, Tensor) and call.scores is None else None
    return {"step": step, "layer": layer, "factors": list(FACTORS), "rows": rows, "scale": scale, **per_head}


def pooled_map(call: Scores, head: int, step: int, layer: int) -> dict[str, Any]:
    """p(j|i) of one head and the first batch entry, pooled to at most 128 x 128 while streaming over rows."""
    n, m = call.n_query, call.n_key
    rows, columns = min(n, MAP), min(m, MAP)
    device = call._first.device
    to_column = (torch.arange(m, device=device) * columns) // m
    to_row = (torch.arange(n, device=device) * rows) // n
    total = torch.zeros(rows, columns, dtype=torch.float64, device=device)
    first = torch.zeros(1, dtype=torch.long, device=device)
    mine = call.head(head)
    tall = max(1, 4 * SAMPLE // m)
    for start in range(0, n, tall):
        stop = min(n, start + tall)
        probs = (
            mine.take(first, slice(start, stop))
            .gibbs()
            .probs()
            .float()
            .nan_to_num(0.0)
            .expand(1, 1, stop - start, m)[0, 0]
            .double()
        )
        by_column = torch.zeros(stop - start, columns, dtype=torch.float64, device=device).index_add_(
            1, to_column, probs
        )
        total.index_add_(0, to_row[start:stop], by_column)
    total /= torch.bincount(to_row, minlength=rows)[:, None]
    peak = float(total.max())
    # square root: small weights keep some of the 8 bits
    cells = ((total / max(peak, 1e-12)).sqrt() * 255).round().to(torch.uint8).flatten().tolist()
    return {
        "step": step,
        "layer": layer,
        "head": head,
        "rows": rows,
        "columns": columns,
        "n_query": n,
        "n_key": m,
        "peak": peak,
        "data": base64.b64encode(bytes(cells)).decode(),
    }
