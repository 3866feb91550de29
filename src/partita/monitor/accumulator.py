"""Sums of one layer over one step. Everything stays on the device until the step is over."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita.engine import Stats
from partita.engine.execute import accumulate, accumulate_attention
from partita.monitor import ranges
from partita.monitor.positions import Received
from partita.monitor.record import BAND_COLUMNS, COLUMNS, Block
from partita.monitor.scores import Scores

BINS = 256  # of the histogram of H / log(visible)
BANDS = 24  # of log2(visible)
SUMS = (
    "rows",
    "single",
    "nonfinite",
    "entropy",
    "normalized_entropy",
    "effective_width",
    "log_partition",
    "score_variance",
    "sink_first",
    "top_mass",
    "visible",
)
QUANTILES = tuple(name for name in COLUMNS if name.endswith(("_p05", "_p50", "_p95")))


class Accumulator:
    """Memory O(heads): no row and no map is kept."""

    def __init__(self, heads: int, device: torch.device, training: bool) -> None:
        self.heads = heads
        self.training = training

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.sums = zeros(len(SUMS), heads)
        self.peak = zeros(heads).fill_(-torch.inf)
        self.length = zeros(heads)
        self.histogram = zeros(heads, BINS)
        self.bands = zeros(len(BAND_COLUMNS), heads, BANDS)
        self.gram = zeros(heads, heads)
        self.sampled = zeros(2, heads)  # rows, rows * mass on the strongest key
        self.strongest = zeros(heads).fill_(torch.nan)
        self.keys: Tensor | None = None  # (heads, 5, 2): index and mass, of the last call
        self.critical: list[Tensor] = []  # (heads, rows) of each close look, if asked for
        self.scale = zeros(heads).fill_(torch.nan)
        self.received: Received | None = None  # the only part that grows with the number of keys; asked for
        self._alike: tuple[Tensor, Tensor] | None = None

    def add(self, call: Scores, stats: Stats) -> None:
        """The rows of a call, by their statistics, each (batch, heads, n)."""
        rows = (stats.entropy, stats.log_partition, stats.score_variance, stats.max_score, stats.visible)
        first: Any = call.plain()  # what the mass on key 0 is made from in the walk over the rows
        if first is None or first[1].shape[1] != call.heads or call.n_key == 0:
            first = call.first_key(stats.log_partition)
        if not accumulate(self._totals, *rows, first, call.keep):
            self._add(stats, call.first_key(stats.log_partition), call.keep)

    def add_attention(self, call: Scores) -> bool:
        """The rows of plain attention, in one go; False where the long way has to be taken."""
        plain = call.plain()
        return plain is not None and accumulate_attention(self._totals, *plain, call.causal, call.keep)

    @property
    def _totals(self) -> tuple[Tensor, ...]:
        return self.sums, self.peak, self.length, self.histogram, self.bands

    def _add(self, stats: Stats, sink: Tensor, keep: Tensor | None) -> None:
        visible, entropy = stats.visible, stats.entropy
        there = visible > 0
        if keep is not None:
            there = there & keep[:, None, :]
        finite = torch.isfinite(stats.log_partition) & torch.isfinite(entropy) & torch.isfinite(stats.max_score)
        good = there & finite & (visible >= 2)
        weight = good.to(entropy.dtype)
        zero = torch.zeros((), dtype=entropy.dtype, device=entropy.device)

        def clean(x: Tensor) -> Tensor:
            return torch.where(good, x, zero)

        top_mass = (stats.max_score - stats.log_partition).exp()
        normal = clean(entropy / visible.clamp(min=2).log())
        width = clean(entropy.exp())
        sink = clean(sink)
        seen = clean(visible)
        single = (there & finite & (visible < 2)).to(entropy.dtype)
        bad = (there & ~finite).to(entropy.dtype)
        columns = [
            weight,
            single,
            bad,
            clean(entropy),
            normal,
            width,
            clean(stats.log_partition),
            clean(stats.score_variance),
            sink,
            clean(top_mass),
            seen,
        ]
        self.sums += torch.stack([c.sum((0, 2), dtype=torch.float64) for c in columns])
        shown = there & finite
        self.peak = torch.maximum(self.peak, torch.where(shown, stats.max_score, -torch.inf).amax((0, 2)).double())
        self.length = torch.maximum(self.length, torch.where(there, visible, zero).amax((0, 2)).double())
        flat = torch.stack([weight, seen, width, normal, sink]).transpose(1, 2).flatten(2)  # (column, heads, rows)
        self._add_histogram(flat[3], flat[0])
        self._add_bands(flat, visible)

    def _add_histogram(self, normal: Tensor, weight: Tensor) -> None:
        head = torch.arange(self.heads, device=normal.device)[:, None]
        bin_ = (normal * BINS).long().clamp_(0, BINS - 1) + head * BINS
        count = torch.bincount(bin_.flatten(), weight.flatten(), minlength=self.heads * BINS)
        self.histogram += count.view(self.heads, BINS)

    def _add_bands(self, flat: Tensor, visible: Tensor) -> None:
        """Sums by band of visible keys. Heads see the same keys as a rule, and then one small product does."""
        # log2 of an exact power of two must not fall below it
        band = (visible.clamp(min=1).log2() + 1e-4).long().clamp_(0, BANDS - 1)  # (batch, heads, rows)
        if torch.equal(band, band[:, :1].expand_as(band)):
            to_band = torch.nn.functional.one_hot(band[:, 0].flatten(), BANDS).to(flat.dtype)
            self.bands += flat @ to_band
            return
        index = (
            band.transpose(0, 1).flatten(1) + torch.arange(self.heads, device=band.device)[:, None] * BANDS
        ).flatten()
        for i, column in enumerate(flat):
            found = torch.bincount(index, column.flatten(), minlength=self.heads * BANDS)
            self.bands[i] += found.view(self.heads, BANDS)

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
            self._alike = _twins(self.gram)
        return self._alike


def _twins(gram: Tensor) -> tuple[Tensor, Tensor]:
    nothing = torch.full_like(gram[0], torch.nan)
    if len(gram) < 2:
        return nothing, nothing
    norm = gram.diagonal().clamp(min=1e-18).sqrt()
    like = gram / (norm[:, None] * norm)
    like.fill_diagonal_(-torch.inf)
    value, index = like.max(-1)
    flat = gram.diagonal() < 1e-12  # uniform rows have no direction to compare
    return index.double(), torch.where(flat, torch.nan, value)


def _quantiles(histogram: Tensor, rows: Tensor, levels: Sequence[float]) -> Tensor:  # (levels, heads)
    """Linear inside the bin where the cumulative count passes a level."""
    total = histogram.cumsum(-1)
    goal = torch.outer(torch.tensor(levels, dtype=rows.dtype, device=rows.device), rows)[..., None]
    at = (total < goal).sum(-1, keepdim=True).clamp(max=BINS - 1)
    inside = histogram.expand(len(levels), -1, -1).gather(-1, at).clamp(min=1e-12)
    before = total.expand(len(levels), -1, -1).gather(-1, at) - inside
    value = (at + ((goal - before) / inside).clamp(0, 1)) / BINS
    return torch.where(rows > 0, value[..., 0], torch.nan)


def blocks(parts: Sequence[tuple[int, int, Accumulator]], wrong: list[ranges.Impossible] | None = None) -> list[Block]:
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
    faults = [ranges.Impossible(*place[at], name, value) for name, at, value in ranges.check(column)]
    if wrong is not None:
        wrong += faults
    table = torch.stack([column[name] for name in COLUMNS], -1).tolist()
    bands = torch.cat([part.bands for part in sums], 1)  # (column, heads, band)
    filled = (bands[0] > 0).any(0).nonzero().flatten().tolist()  # few of them: the rest is not looked at
    bands = bands[..., filled]
    means = torch.cat([bands[:1], bands[1:] / bands[:1].clamp(min=1)])
    sick = {place.index((f.step, f.layer, f.head)) for f in faults}
    means[1:, sorted(sick)] = torch.nan  # bands are parts of the same sums
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
        out.append(Block(step, layer, part.training, values, inside))
        start += part.heads
    return out


def _columns(parts: Sequence[Accumulator]) -> dict[str, Tensor]:
    """Every column of the record, for the heads of all parts one after the other."""
    sums = dict(zip(SUMS, torch.cat([t.sums for t in parts], 1), strict=True))
    rows = sums["rows"]
    none = torch.where(rows > 0, rows, torch.nan)
    column = {name: total / none for name, total in sums.items()}
    column |= {name: sums[name] for name in ("rows", "single", "nonfinite")}
    column["length"] = torch.cat([t.length for t in parts])
    peak = torch.cat([t.peak for t in parts])
    column["max_score"] = torch.where(peak.isneginf(), torch.nan, peak)
    levels = _quantiles(torch.cat([t.histogram for t in parts]), rows, (0.05, 0.5, 0.95))
    column |= dict(zip(QUANTILES, levels, strict=True))
    sampled = torch.cat([t.sampled for t in parts], 1)
    column["sink_top"] = sampled[1] / torch.where(sampled[0] > 0, sampled[0], torch.nan)
    column["sink_key"] = torch.cat([t.strongest for t in parts])
    column["scale"] = torch.cat([t.scale for t in parts])
    looked = [torch.cat([torch.full_like(t.scale, torch.nan)[:, None], *t.critical], 1) for t in parts]
    column["critical"] = torch.cat([t.nanmedian(1).values for t in looked])
    column["twin"], column["twin_similarity"] = (torch.cat(x) for x in zip(*(t.twins() for t in parts), strict=True))
    return column
