"""What is measured at a softmax: row statistics by the streaming engine, and a few rows looked at closely.

Nothing of size n_query * n_key is built, except for a sample of rows kept under `SAMPLE` numbers.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita import Stats
from partita.monitor.accumulator import Accumulator
from partita.monitor.positions import Received
from partita.monitor.scores import Scores, raised
from partita.theory.sharpness import critical_scale

SAMPLE = 100_000  # probabilities looked at closely in one call
CHUNK = 2_000_000  # elements of a mask converted at once
FACTORS = (0.25, 0.5, 0.7071, 1.0, 1.4142, 2.0, 4.0)
MAP = 128


def evenly(count: int, wanted: int, phase: float, device: torch.device) -> Tensor:
    """`wanted` indices, evenly spaced; the phase moves with the step, so that every row has its turn."""
    return ((torch.arange(wanted, device=device) + phase) * (count / wanted)).long().clamp_(max=count - 1)


def measure(call: Scores, sums: Accumulator, *, rows: int | None, phase: float, stats: Any = None) -> None:
    """Add the call's rows to the sums; `stats` where the call came with them."""
    n = call.n_query
    if rows is not None and rows < n:
        call, stats = call.take(None, evenly(n, rows, phase, call.first.device)), None
        n = rows
    if stats is not None:
        _add(call, sums, stats)
        return
    if sums.add_attention(call):
        return
    dense = call.dense
    step = n
    if dense is not None and dense.shape[2] > 1 and dense.dtype != torch.bool:  # converted a few rows at a time
        step = max(1, min(n, CHUNK // max(1, dense.shape[0] * dense.shape[1] * dense.shape[3])))
    for start in range(0, n, step):
        part = call if step == n else call.take(None, slice(start, min(start + step, n)))
        _add(part, sums, part.gibbs().stats())


def _add(part: Scores, sums: Accumulator, stats: Stats) -> None:
    found = Stats(*(t.reshape(part.shape) if t.dim() != 3 and t.numel() > 1 else t.expand(part.shape) for t in stats))
    sums.add(part, found)


def sample(call: Scores) -> Scores:
    """Evenly spaced rows of a few batch entries, few enough to look at densely; all rows where they are few."""
    per_row = max(1, call.heads * call.n_key)
    budget = max(4, SAMPLE // per_row)
    batch = call.batch if call.batch * call.n_query <= budget else min(call.batch, max(1, budget // 16))
    rows = min(call.n_query, max(4, budget // batch))
    device = call.first.device
    middle = call.batch // 2  # one entry is a view
    entries = slice(middle, middle + 1) if batch == 1 else evenly(call.batch, batch, 0.5, device)
    few = call.take(entries, evenly(call.n_query, rows, 0.5, device))
    if few.query is None or few.key is None:
        return few
    return replace(few, query=raised(few.query), key=raised(few.key))  # weights come in the dtype of the query


def look(call: Scores, sums: Accumulator) -> None:
    """Strongest keys and likeness of heads, from a sample of rows."""
    part = sample(call)
    sums.add_sample(_probs(part), part.keep)


def _probs(part: Scores) -> Tensor:
    """(batch, heads, n_query, n_key), 0 in rows that are empty or not finite."""
    return part.gibbs().probs().float().nan_to_num(0.0).expand(*part.shape, part.n_key)


def criticality(call: Scores, sums: Accumulator) -> None:
    """The critical scale of sampled rows of the later half, which see about as much as the input is long.

    critical / scale = max over x > 0 of log N(x) / x        N(x) the keys whose score is within x of the row's best
    """
    part = sample(call.take(None, slice(call.n_query // 2, call.n_query)))
    wide = {name: x.double() for name in ("query", "key", "scores") if (x := getattr(part, name)) is not None}
    part = replace(part, **wide)  # gaps of up to 745 before a weight is 0
    weights = part.gibbs().probs().expand(*part.shape, part.n_key)
    live = (weights > 0).sum(-1) >= 2
    if part.keep is not None:
        live = live & part.keep[:, None, :]
    found = torch.where(live, critical_scale(weights.double().log()), torch.nan)
    sums.critical = [*sums.critical, found.transpose(0, 1).flatten(1)]
    if part.scores is None:
        scale = torch.as_tensor(part.scale, dtype=torch.float64, device=part.first.device).expand(part.shape)
        sums.scale = scale.mean((0, 2))


def receive(call: Scores, sums: Accumulator, *, rows: int | None, phase: float) -> None:
    """What each key received from the rows that are looked at."""
    if rows is not None and rows < call.n_query:
        call = call.take(None, evenly(call.n_query, rows, phase, call.first.device))
    sums.received = sums.received or Received()
    sums.received.add(call)


def curve(call: Scores, step: int, layer: int) -> dict[str, Any]:
    """Entropy of sampled rows at several factors of the present scale: mean and 10 to 90 % of the rows, per head."""
    part = sample(call)
    every = part.at_factors(FACTORS)  # one pass, and the small operations once
    stats = every.gibbs().stats()
    visible, entropy = stats.visible.expand(every.shape), stats.entropy.expand(every.shape)
    good = (visible >= 2) & torch.isfinite(entropy)
    if every.keep is not None:
        good = good & every.keep[:, None, :]
    apart = torch.where(good, entropy, torch.nan).unflatten(2, (len(FACTORS), -1))  # (batch, heads, factor, row)
    values = apart.permute(1, 2, 0, 3).flatten(2).float()
    low, high = torch.nanquantile(values, values.new_tensor([0.1, 0.9]), dim=-1)
    per_head = {"mean": values.nanmean(-1).tolist(), "p10": low.tolist(), "p90": high.tolist()}
    rows = int(good[:, 0, -part.n_query :].sum())
    scale = None if call.scores is not None else float(torch.as_tensor(call.scale).double().mean())
    return {"step": step, "layer": layer, "factors": list(FACTORS), "rows": rows, "scale": scale, **per_head}


def pooled_map(call: Scores, head: int, step: int, layer: int) -> dict[str, Any]:
    """p(j|i) of one head and the first batch entry, pooled to at most 128 x 128 while streaming over rows."""
    n, m = call.n_query, call.n_key
    rows, columns = min(n, MAP), min(m, MAP)
    device = call.first.device
    to_column = (torch.arange(m, device=device) * columns) // m
    to_row = (torch.arange(n, device=device) * rows) // n
    total = torch.zeros(rows, columns, dtype=torch.float64, device=device)
    first = torch.zeros(1, dtype=torch.long, device=device)
    mine = call.head(head)
    tall = max(1, 4 * SAMPLE // m)
    for start in range(0, n, tall):
        stop = min(n, start + tall)
        probs = _probs(mine.take(first, slice(start, stop)))[0, 0].double()
        by_column = total.new_zeros(stop - start, columns).index_add_(1, to_column, probs)
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
