"""What is measured at a softmax: statistics of its rows by the streaming engine, and a few rows looked at closely.

Sums of one layer over one step stay on the device until the step is over. Nothing of size n_query * n_key is built,
except for a sample of rows kept under `SAMPLE` numbers.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita import Stats
from partita.engine.dispatch import row_statistics
from partita.monitor.record import BAND_COLUMNS, COLUMNS, SAMPLED_MEANS, Block
from partita.monitor.scores import Scores, hide, invisible, raised
from partita.scale import critical_scale

SAMPLE = 100_000  # probabilities looked at closely in one call
CHUNK = 2_000_000  # elements of a mask converted at once
FACTORS = (0.25, 0.5, 0.7071, 1.0, 1.4142, 2.0, 4.0)
MAP = 128
BINS = 256  # of the histogram of H / log(visible)
BANDS = 24  # of log2(visible)
SUMS = (
    *("rows", "single", "nonfinite", "entropy", "normalized_entropy", "effective_width", "log_partition"),
    *("score_variance", "sink_first", "top_mass", "visible"),
)
QUANTILES = tuple(name for name in COLUMNS if name.endswith(("_p05", "_p50", "_p95")))
POSITIONS = 64  # bins of key positions
TOP = 5  # keys that are named
KEPT = 8  # profiles of a layer: the first, the newest, and some between them
# Row statistics are float32 sums of up to n terms, whose relative error stays far below this; a wrong formula does not.
SLACK = 1e-3


class Accumulator:
    """Sums of one layer over one step and phase. Memory O(heads): no row and no map is kept.

    sampled: rows are taken of those there are, so that means have a standard error.
    """

    def __init__(
        self, heads: int, device: torch.device, training: bool, phase: str = "", sampled: bool = False
    ) -> None:
        self.heads, self.training, self.phase = heads, training, phase
        kind: Any = {"dtype": torch.float64, "device": device}
        self.sums = torch.zeros(len(SUMS), heads, **kind)
        self.squares = torch.zeros(len(SAMPLED_MEANS), heads, **kind)
        self.sampled_rows, self.taken, self.there = sampled, 0, 0  # rows taken, of those there are
        self.peak = torch.full((heads,), -torch.inf, **kind)
        self.length = torch.zeros(heads, **kind)
        self.histogram = torch.zeros(heads, BINS, **kind)
        self.bands = torch.zeros(len(BAND_COLUMNS), heads, BANDS, **kind)
        self.gram = torch.zeros(heads, heads, **kind)
        self.sampled = torch.zeros(2, heads, **kind)  # rows, rows * mass on the strongest key
        self.strongest = torch.full((heads,), torch.nan, **kind)
        self.keys: Tensor | None = None  # (heads, 5, 2): index and mass, of the last call
        self.critical: list[Tensor] = []  # (2, heads, rows) of each close look, with critical=True: that, and rivals
        self.scale = torch.full((heads,), torch.nan, **kind)
        self.received = Received()  # the only part that grows with the number of keys; with received=True
        self._alike: tuple[Tensor, Tensor] | None = None

    def add(self, stats: Stats, sink: Tensor, keep: Tensor | None) -> None:
        """The rows of a call: their statistics and their mass on key 0, (batch, heads, n); keep: (batch, n)."""
        visible, entropy = stats.visible, stats.entropy
        there = visible > 0
        if keep is not None:
            there = there & keep[:, None, :]
        finite = torch.isfinite(stats.log_partition) & torch.isfinite(entropy) & torch.isfinite(stats.max_score)
        shown = there & finite
        good = shown & (visible >= 2)
        single, bad = (x.to(entropy.dtype) for x in (shown & (visible < 2), there & ~finite))
        rows = [good.to(entropy.dtype), entropy, entropy / visible.clamp(min=2).log(), entropy.exp()]
        rows += [stats.log_partition, stats.score_variance, sink, (stats.max_score - stats.log_partition).exp()]
        weight, *means = torch.where(good, torch.stack([*rows, visible]), 0.0)  # a row that is left out may hold NaN
        self.sums += torch.stack([weight, single, bad, *means]).sum((1, 3), dtype=torch.float64)
        if self.sampled_rows:
            self.squares += torch.stack(means[: len(SAMPLED_MEANS)]).double().square().sum((1, 3))
        self.peak = torch.maximum(self.peak, torch.where(shown, stats.max_score, -torch.inf).amax((0, 2)).double())
        self.length = torch.maximum(self.length, torch.where(there, visible, 0.0).amax((0, 2)).double())
        _, normal, width, _, _, sink, _, seen = means
        flat = torch.stack([weight, seen, width, normal, sink]).transpose(1, 2).flatten(2)  # (column, heads, rows)
        self.histogram += self._counted(flat[3] * BINS, flat[0], BINS)
        # bands of visible keys; log2 of an exact power of two must not fall below it
        band = visible.clamp(min=1).log2() + 1e-4  # (batch, heads, rows)
        if torch.equal(band, band[:, :1].expand_as(band)):  # heads see the same keys as a rule: one small product
            place = band[:, 0].flatten().long().clamp_(0, BANDS - 1)
            self.bands += flat @ torch.nn.functional.one_hot(place, BANDS).to(flat.dtype)
        else:
            band = band.transpose(0, 1).flatten(1)
            self.bands += torch.stack([self._counted(band, column, BANDS) for column in flat])

    def _counted(self, place: Tensor, weight: Tensor, bins: int) -> Tensor:  # (heads, rows) -> (heads, bins)
        head = torch.arange(self.heads, device=place.device)[:, None]
        index = place.long().clamp_(0, bins - 1) + head * bins
        return torch.bincount(index.flatten(), weight.flatten(), minlength=self.heads * bins).view(self.heads, bins)

    def add_sample(self, probs: Tensor, keep: Tensor | None) -> None:
        """probs: (batch, heads, rows, n_key) of evenly spaced rows: strongest key, and how alike the heads are."""
        live = probs.sum(-1) > 0.5  # empty rows, and NaN ones, are 0 here
        if keep is not None:
            live = live & keep[:, None, :]
        probs = torch.where(live[..., None], probs, torch.zeros((), dtype=probs.dtype, device=probs.device))
        visible = (probs > 0).sum(-1, keepdim=True).clamp(min=1)
        rows = live.sum((0, 2)).double()
        mass = probs.sum((0, 2), dtype=torch.float64) / rows.clamp(min=1)[:, None]  # (heads, n_key)
        top, index = mass.topk(min(5, mass.shape[-1]), -1)
        self.keys = torch.stack([index.double(), top], -1)
        # out of place: what was borrowed belongs to an earlier step, which may not be finished
        self.sampled = self.sampled + torch.stack([rows, rows * top[:, 0]])
        self.strongest = torch.where(rows > 0, index[:, 0].double(), self.strongest)
        centred = torch.where(probs > 0, probs - 1.0 / visible, 0.0).transpose(0, 1).reshape(self.heads, -1)
        self.gram = self.gram + centred @ centred.T
        self._alike = None

    def borrow(self, other: Accumulator) -> None:
        """Take the sampled numbers of an earlier step."""
        self.gram, self.sampled, self.strongest, self.keys = other.gram, other.sampled, other.strongest, other.keys
        self.critical, self.scale = other.critical, other.scale
        self._alike = other.twins()

    def twins(self) -> tuple[Tensor, Tensor]:
        """For each head the one most alike, and their correlation."""
        if self._alike is None:
            gram, norm = self.gram, self.gram.diagonal().clamp(min=1e-18).sqrt()
            like = (gram / (norm[:, None] * norm)).fill_diagonal_(-torch.inf)
            value, index = like.max(-1)
            none = (gram.diagonal() < 1e-12) | (len(gram) < 2)  # uniform rows have no direction to compare
            lone = torch.full_like(value, torch.nan) if len(gram) < 2 else index.double()
            self._alike = lone, torch.where(none, torch.nan, value)
        return self._alike


def _quantiles(histogram: Tensor, rows: Tensor, levels: Sequence[float]) -> Tensor:  # (levels, heads)
    """Linear inside the bin where the cumulative count passes a level."""
    total = histogram.cumsum(-1)
    goal = torch.outer(torch.tensor(levels, dtype=rows.dtype, device=rows.device), rows)[..., None]
    at = (total < goal).sum(-1, keepdim=True).clamp(max=BINS - 1)
    inside = histogram.expand(len(levels), -1, -1).gather(-1, at).clamp(min=1e-12)
    before = total.expand(len(levels), -1, -1).gather(-1, at) - inside
    value = (at + ((goal - before) / inside).clamp(0, 1)) / BINS
    return torch.where(rows > 0, value[..., 0], torch.nan)


def blocks(parts: Sequence[tuple[int, int, Accumulator]], wrong: list[str] | None = None) -> list[Block]:
    """Finished rows of (step, layer, sums), all heads worked on side by side; a mean over no row is NaN.

    What cannot be is NaN too, and is added to `wrong`.
    """
    if not parts:
        return []
    sums = [part for _, _, part in parts]
    if len({part.sums.device for part in sums}) > 1:  # a model over several devices
        return [block for one in parts for block in blocks([one], wrong)]
    column = _columns(sums)
    place = [(step, layer, head) for step, layer, part in parts for head in range(part.heads)]
    faults = check(column)
    if wrong is not None:
        wrong += [impossible(*place[at], name, value) for name, at, value in faults]
    table = torch.stack([column[name] for name in COLUMNS], -1).tolist()
    bands = torch.cat([part.bands for part in sums], 1)  # (column, heads, band)
    filled = (bands[0] > 0).any(0).nonzero().flatten().tolist()  # few of them: the rest is not looked at
    bands = bands[..., filled]
    means = torch.cat([bands[:1], bands[1:] / bands[:1].clamp(min=1)])
    means[1:, sorted({at for _, at, _ in faults})] = torch.nan  # bands are parts of the same sums
    shown = means.permute(2, 1, 0).tolist()  # [filled band][head][column]
    out, start = [], 0
    for step, layer, part in parts:
        heads = slice(start, start + part.heads)
        values = array("d", [x for row in table[heads] for x in row])
        inside = {
            band: array("d", [x for row in rows[heads] for x in row])
            for band, rows in zip(filled, shown, strict=True)
            if any(row[0] > 0 for row in rows[heads])
        }
        out.append(Block(step, layer, part.training, values, inside, part.phase))
        start += part.heads
    return out


def _columns(parts: Sequence[Accumulator]) -> dict[str, Tensor]:
    """Every column of the record, for the heads of all parts one after the other."""
    sums = dict(zip(SUMS, torch.cat([t.sums for t in parts], 1), strict=True))
    rows = sums["rows"]
    none = torch.where(rows > 0, rows, torch.nan)
    column = {name: total / none for name, total in sums.items()}
    column |= {name: sums[name] for name in ("rows", "single", "nonfinite")}
    column |= _errors(parts, sums)
    column["length"] = torch.cat([t.length for t in parts])
    peak = torch.cat([t.peak for t in parts])
    column["max_score"] = torch.where(peak.isneginf(), torch.nan, peak)
    levels = _quantiles(torch.cat([t.histogram for t in parts]), rows, (0.05, 0.5, 0.95))
    column |= dict(zip(QUANTILES, levels, strict=True))
    sampled = torch.cat([t.sampled for t in parts], 1)
    column["sink_top"] = sampled[1] / torch.where(sampled[0] > 0, sampled[0], torch.nan)
    column["sink_key"] = torch.cat([t.strongest for t in parts])
    column["scale"] = torch.cat([t.scale for t in parts])
    looked = [torch.cat([t.scale.new_full((2, t.heads, 1), torch.nan), *t.critical], -1) for t in parts]
    column["critical"] = torch.cat([t[0].nanmedian(1).values for t in looked])
    column["rivals"] = torch.cat([t[1].nanmean(1) for t in looked])
    column["twin"], column["twin_similarity"] = (torch.cat(x) for x in zip(*(t.twins() for t in parts), strict=True))
    return column


def _errors(parts: Sequence[Accumulator], sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """sqrt(Var / rows * share of the rows not taken): of the means of evenly spaced rows, as if they were drawn."""
    rows = sums["rows"]
    left = torch.cat([t.sums.new_full((t.heads,), 1 - t.taken / t.there if t.there else 0.0) for t in parts])
    squares = dict(zip(SAMPLED_MEANS, torch.cat([t.squares for t in parts], 1), strict=True))
    out = {}
    for name, square in squares.items():
        variance = (square - sums[name].square() / rows).clamp(min=0) / (rows - 1)
        known = torch.where(rows > 1, (variance / rows * left).sqrt(), torch.nan)
        out[f"{name}_se"] = torch.where(left > 0, known, torch.where(rows > 0, 0.0, torch.nan))
    return out


# ---- what a number can be --------------------------------------------------------------------------------------------

MEANS = {"entropy", "normalized_entropy", "effective_width", "score_variance", "sink_first", "top_mass", "visible"}


def impossible(step: int, layer: int, head: int, column: str, value: float) -> str:
    """A number outside what its column can be: a fault of partita, which is reported, and never shown."""
    return f"{column} of layer {layer}, head {head}, step {step} came out as {value:.6g}"


def limits(length: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The least and the largest value of each column, for heads that see at most `length` = n keys; others: anything.

    0 <= entropy <= log n      0 <= H / log n <= 1      1 <= exp H <= n      0 <= mass <= 1
    """
    zero, one, many = torch.zeros_like(length), torch.ones_like(length), length.clamp(min=1)
    shares = ("normalized_entropy", *QUANTILES, "sink_first", "sink_top", "top_mass")
    return {
        **dict.fromkeys(shares, (zero, one)),
        **dict.fromkeys(("score_variance", "critical"), (zero, torch.full_like(length, torch.inf))),
        "entropy": (zero, many.log()),
        **dict.fromkeys(("effective_width", "rivals"), (one, many)),
        "visible": (2 * one, length.clamp(min=2)),
        "twin_similarity": (-one, one),
    }


def check(column: dict[str, Tensor]) -> list[tuple[str, int, float]]:
    """(column, head, value) of what cannot be; the column then holds NaN there, and is inside its limits elsewhere."""
    wrong: list[tuple[str, int, float]] = []
    there = column["rows"] > 0
    for name, (low, high) in limits(column["length"]).items():
        values = column[name]
        slack = SLACK * torch.where(high.isinf(), 1.0, high.abs()).clamp(min=1.0)
        bad = (values < low - slack) | (values > high + slack)
        if name in MEANS:
            bad |= there & values.isnan()
        column[name] = torch.where(bad, torch.nan, values.clamp(low, high))
        if bool(bad.any()):
            wrong += [(name, int(head), float(values[head])) for head in bad.nonzero()[:, 0]]
    return wrong


# ---- one call --------------------------------------------------------------------------------------------------------


def evenly(count: int, wanted: int, phase: float, device: torch.device) -> Tensor:
    """`wanted` indices, evenly spaced; the phase moves with the step, so that every row has its turn."""
    return ((torch.arange(wanted, device=device) + phase) * (count / wanted)).long().clamp_(max=count - 1)


def measure(call: Scores, sums: Accumulator, *, rows: int | None, phase: float, stats: Any = None) -> None:
    """Add the call's rows to the sums; `stats` where the call came with them."""
    n = call.n_query
    sums.there += n * call.batch
    sums.taken += min(n, rows or n) * call.batch
    if rows is not None and rows < n:
        call, stats, n = call.take(None, evenly(n, rows, phase, call.first.device)), None, rows
    if stats is not None:
        _add(call, sums, stats)
        return
    plain = call.plain()
    if plain is not None and (found := row_statistics(*plain)) is not None:
        *known, first = found  # of attention without a mask in one go, with the score of key 0
        sums.add(Stats(*known), (first - known[0]).exp(), call.keep)
        return
    step, dense = n, call.dense
    if dense is not None and dense.shape[2] > 1 and dense.dtype != torch.bool:  # converted a few rows at a time
        step = max(1, min(n, CHUNK // max(1, dense.shape[0] * dense.shape[1] * dense.shape[3])))
    for start in range(0, n, step):
        part = call if step == n else call.take(None, slice(start, min(start + step, n)))
        _add(part, sums, part.gibbs().stats())


def _add(part: Scores, sums: Accumulator, stats: Stats) -> None:
    found = Stats(*(t.reshape(part.shape) if t.dim() != 3 and t.numel() > 1 else t.expand(part.shape) for t in stats))
    sums.add(found, part.first_key(found.log_partition), part.keep)


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
    """The critical scale and the rivals of sampled rows of the later half, which see about what the input is long.

    critical / scale = max over x > 0 of log N(x) / x,   rivals = N(1)        N(x) keys score within x of the row's best
    """
    part = sample(call.take(None, slice(call.n_query // 2, call.n_query)))
    wide = {name: x.double() for name in ("query", "key", "scores") if (x := getattr(part, name)) is not None}
    part = replace(part, **wide)  # gaps of up to 745 before a weight is 0
    weights = part.gibbs().probs().expand(*part.shape, part.n_key)
    live = (weights > 0).sum(-1) >= 2
    if part.keep is not None:
        live = live & part.keep[:, None, :]
    scores = weights.double().log()
    rivals = (scores >= scores.amax(-1, keepdim=True) - 1).sum(-1)
    found = torch.where(live, torch.stack([critical_scale(scores), rivals]), torch.nan)
    sums.critical = [*sums.critical, found.transpose(1, 2).flatten(2)]
    if part.scores is None:
        scale = torch.as_tensor(part.scale, dtype=torch.float64, device=part.first.device).expand(part.shape)
        sums.scale = scale.mean((0, 2))


def receive(call: Scores, sums: Accumulator, *, rows: int | None, phase: float) -> None:
    """What each key received from the rows that are looked at."""
    if rows is not None and rows < call.n_query:
        call = call.take(None, evenly(call.n_query, rows, phase, call.first.device))
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
    by_factor = torch.where(good, entropy, torch.nan).unflatten(2, (len(FACTORS), -1))  # (batch, heads, factor, row)
    values = by_factor.permute(1, 2, 0, 3).flatten(2).float()
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


# ---- attention received per key --------------------------------------------------------------------------------------


class Received:
    """Attention received per key, pooled by position and followed over the run: sums of one layer over one step.

        share_j = sum_i p(j|i) / rows        summed over the keys of a bin, so that the bins of a head add up to 1

    `alike` is what the same rows would give if each saw its keys alike: under a causal mask early keys receive more
    than late ones whatever a head does.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None  # (heads, n_key)
        self.alike: Tensor | None = None  # (n_key), mean over heads
        self.rows: Tensor | None = None  # (heads)

    def add(self, call: Scores) -> None:
        own, key = call, call.key
        if key is not None and key.shape[1] != call.heads:  # grouped queries: counted by query head
            own = replace(call, key=key.repeat_interleave(call.heads // key.shape[1], 1))
        total, rows = _received(own)
        alike, _ = _received(_alike(call))
        self.total, self.rows = _sum(self.total, total), _sum(self.rows, rows)
        self.alike = _sum(self.alike, alike.mean(0))

    def row(self, step: int, layer: int, wrong: list[str]) -> dict[str, Any] | None:
        """What the record keeps; a head whose shares do not add up to 1 is left out, and added to `wrong`."""
        if self.total is None or self.alike is None or self.rows is None or not bool((self.rows > 0).any()):
            return None
        share = self.total / self.rows.clamp(min=1)[:, None]
        sums, n = share.sum(-1), share.shape[-1]
        known = sums.isfinite() & (self.rows > 0)  # NaN in a row is the model's, and counted elsewhere
        bad = known & (((sums - 1).abs() > SLACK) | (share < -SLACK).any(-1))
        wrong += [impossible(step, layer, int(h), "received", float(sums[h])) for h in bad.nonzero()[:, 0]]
        # keys of a bin: the same number in each but the last, or shares of bins would not compare
        wide = -(-n // POSITIONS)
        bins, to_bin = -(-n // wide), torch.arange(n, device=share.device) // wide
        pooled = share.new_zeros(len(share), bins).index_add_(1, to_bin, share)
        alike = share.new_zeros(bins).index_add_(0, to_bin, self.alike)
        best, index = share.nan_to_num(0.0).topk(min(TOP, n), -1)
        shown, pairs = (known & ~bad).tolist(), zip(index.tolist(), best.tolist(), strict=True)
        top = [[[key, _digits(mass)] for key, mass in zip(*pair, strict=True)] for pair in pairs]
        lines = [[_digits(v) for v in line] for line in pooled.tolist()]
        return {
            "step": step,
            "layer": layer,
            "n_key": n,
            "rows": [int(r) for r in self.rows.tolist()],
            "bins": [line if ok else None for line, ok in zip(lines, shown, strict=True)],
            "top": [pair if ok else None for pair, ok in zip(top, shown, strict=True)],
            "alike": [_digits(v) for v in (alike / alike.sum().clamp(min=1e-300)).tolist()],
        }


def keep_profile(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
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
