"""Sums of one layer over one step. Everything stays on the device until the step is over."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from partita.watch.record import BAND_COLUMNS, COLUMNS, Block

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


class Tally:
    """Memory O(heads): no row and no map is kept."""

    def __init__(self, heads: int, device: torch.device, training: bool) -> None:
        self.heads = heads
        self.training = training
        self.sums = torch.zeros(len(SUMS), heads, dtype=torch.float64, device=device)
        self.peak = torch.full((heads,), -torch.inf, dtype=torch.float64, device=device)
        self.length = torch.zeros(heads, dtype=torch.float64, device=device)
        self.histogram = torch.zeros(heads * BINS, dtype=torch.float64, device=device)
        self.bands = torch.zeros(len(BAND_COLUMNS), heads * BANDS, dtype=torch.float64, device=device)
        self.gram = torch.zeros(heads, heads, dtype=torch.float64, device=device)
        self.sampled = torch.zeros(
            2, heads, dtype=torch.float64, device=device
        )  # rows, rows * mass on the strongest key
        self.strongest = torch.full((heads,), torch.nan, dtype=torch.float64, device=device)
        self.keys: Tensor | None = None  # (heads, 5, 2): index and mass, of the last call

    def add(self, rows: dict[str, Tensor], keep: Tensor | None) -> None:
        """rows: entropy, log_partition, score_variance, max_score, visible, sink_first, each (batch, heads, n)."""
        visible, entropy = rows["visible"], rows["entropy"]
        there = visible > 0
        if keep is not None:
            there = there & keep[:, None, :]
        finite = torch.isfinite(rows["log_partition"]) & torch.isfinite(entropy) & torch.isfinite(rows["max_score"])
        good = there & finite & (visible >= 2)
        weight = good.to(entropy.dtype)
        zero = torch.zeros((), dtype=entropy.dtype, device=entropy.device)

        def clean(x: Tensor) -> Tensor:
            return torch.where(good, x, zero)

        top_mass = (rows["max_score"] - rows["log_partition"]).exp()
        normal = clean(entropy / visible.clamp(min=2).log())
        width = clean(entropy.exp())
        sink = clean(rows["sink_first"])
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
            clean(rows["log_partition"]),
            clean(rows["score_variance"]),
            sink,
            clean(top_mass),
            seen,
        ]
        self.sums += torch.stack([c.sum((0, 2), dtype=torch.float64) for c in columns])
        shown = there & finite
        self.peak = torch.maximum(self.peak, torch.where(shown, rows["max_score"], -torch.inf).amax((0, 2)).double())
        self.length = torch.maximum(self.length, torch.where(there, visible, zero).amax((0, 2)).double())
        flat = torch.stack([weight, seen, width, normal, sink]).transpose(1, 2).flatten(2)  # (column, heads, rows)
        self._add_histogram(flat[3], flat[0])
        self._add_bands(flat, visible)

    def _add_histogram(self, normal: Tensor, weight: Tensor) -> None:
        head = torch.arange(self.heads, device=normal.device)[:, None]
        bin_ = (normal * BINS).long().clamp_(0, BINS - 1) + head * BINS
        self.histogram += torch.bincount(bin_.flatten(), weight.flatten(), minlength=self.heads * BINS)

    def _add_bands(self, flat: Tensor, visible: Tensor) -> None:
        """Sums by band of visible keys. Heads see the same keys as a rule, and then one small product does."""
        # log2 of an exact power of two must not fall below it
        band = (visible.clamp(min=1).log2() + 1e-4).long().clamp_(0, BANDS - 1)  # (batch, heads, rows)
        if torch.equal(band, band[:, :1].expand_as(band)):
            to_band = torch.nn.functional.one_hot(band[:, 0].flatten(), BANDS).to(flat.dtype)
            self.bands += (flat @ to_band).flatten(1)
            return
        index = (
            band.transpose(0, 1).flatten(1) + torch.arange(self.heads, device=band.device)[:, None] * BANDS
        ).flatten()
        for i, column in enumerate(flat):
            self.bands[i] += torch.bincount(index, column.flatten(), minlength=self.heads * BANDS)

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
        self.sampled[0] += rows
        self.sampled[1] += rows * top[:, 0]
        self.strongest = torch.where(rows > 0, index[:, 0].double(), self.strongest)
        centred = torch.where(probs > 0, probs - 1.0 / visible, 0.0).transpose(0, 1).reshape(self.heads, -1)
        self.gram += centred @ centred.T

    def borrow(self, other: Tally) -> None:
        """Take the sampled numbers of an earlier step."""
        self.gram, self.sampled, self.strongest, self.keys = other.gram, other.sampled, other.strongest, other.keys

    def block(self, step: int, layer: int) -> Block:
        """The finished row of each head; a mean over no row is NaN."""
        sums = dict(zip(SUMS, self.sums, strict=True))
        rows = sums["rows"]
        none = torch.where(rows > 0, rows, torch.nan)
        column = {name: total / none for name, total in sums.items()}
        column |= {"rows": rows, "single": sums["single"], "nonfinite": sums["nonfinite"], "length": self.length}
        column["max_score"] = torch.where(self.peak.isneginf(), torch.nan, self.peak)
        for name, q in (("entropy_p05", 0.05), ("entropy_p50", 0.5), ("entropy_p95", 0.95)):
            column[name] = self._quantile(q, rows)
        column["sink_top"] = self.sampled[1] / torch.where(self.sampled[0] > 0, self.sampled[0], torch.nan)
        column["sink_key"] = self.strongest
        column["twin"], column["twin_similarity"] = self._twins()
        table = torch.stack([column[name] for name in COLUMNS], -1)
        bands = self.bands.view(len(BAND_COLUMNS), self.heads, BANDS)
        means = torch.cat([bands[:1], bands[1:] / bands[:1].clamp(min=1)]).permute(2, 1, 0)  # (band, head, column)
        filled = (bands[0].sum(0) > 0).nonzero().flatten().tolist()
        return Block(
            step,
            layer,
            self.training,
            array("d", table.flatten().tolist()),
            {i: array("d", means[i].flatten().tolist()) for i in filled},
        )

    def _quantile(self, q: float, rows: Tensor) -> Tensor:
        """Linear inside the bin where the cumulative count passes q."""
        count = self.histogram.view(self.heads, BINS)
        total = count.cumsum(-1)
        goal = (q * rows)[:, None]
        at = (total < goal).sum(-1, keepdim=True).clamp(max=BINS - 1)
        inside = count.gather(-1, at).clamp(min=1e-12)
        before = total.gather(-1, at) - inside
        value = (at + ((goal - before) / inside).clamp(0, 1)) / BINS
        return torch.where(rows > 0, value[:, 0], torch.nan)

    def _twins(self) -> tuple[Tensor, Tensor]:
        nothing = torch.full((self.heads,), torch.nan, dtype=torch.float64, device=self.gram.device)
        if self.heads < 2:
            return nothing, nothing
        norm = self.gram.diagonal().clamp(min=1e-18).sqrt()
        like = self.gram / (norm[:, None] * norm)
        like.fill_diagonal_(-torch.inf)
        value, index = like.max(-1)
        flat = self.gram.diagonal() < 1e-12  # uniform rows have no direction to compare
        return index.double(), torch.where(flat, torch.nan, value)
