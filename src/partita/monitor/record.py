"""Rows of measurements, in memory or as JSON lines. Imports neither torch nor numpy, so a report needs no torch.

A record is a list of *blocks*: one per (step, layer), holding a row of `COLUMNS` for each head, and a row of
`BAND_COLUMNS` for each head and each band of visible keys. Losses, temperature curves, maps and
profiles of what keys received are plain dicts.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.monitor.files import replace_file

if TYPE_CHECKING:
    from partita.monitor.findings import Finding, Thresholds

SCHEMA = "partita.record/1"

PHASES = ("train", "eval", "generate", "other")
# means over rows, which have a standard error where rows are sampled
SAMPLED_MEANS = (
    *("entropy", "normalized_entropy", "effective_width", "log_partition", "score_variance", "sink_first", "top_mass"),
)
# unit and meaning of each number; the order is the order of storage
COLUMNS: dict[str, str] = {
    "entropy": "nats, mean over rows of H",
    "normalized_entropy": "mean over rows of H / log(visible)",
    "normalized_entropy_p05": "5 % quantile over rows of H / log(visible), read from a histogram of 256 bins",
    "normalized_entropy_p50": "median over rows of H / log(visible), read from a histogram of 256 bins",
    "normalized_entropy_p95": "95 % quantile over rows of H / log(visible), read from a histogram of 256 bins",
    "effective_width": "keys, mean over rows of exp(H)",
    "max_score": "largest score of any row",
    "log_partition": "nats, mean over rows of log Z",
    "score_variance": "mean over rows of the variance of the score under p",
    "sink_first": "mean over rows of the mass on key 0",
    "sink_top": "mean mass on the one key that gets most, over evenly spaced rows; in training of one step in eight",
    "sink_key": "index of that key",
    "top_mass": "mean over rows of the largest probability",
    "visible": "mean number of keys a row may see",
    "length": "largest number of keys any row may see",
    "rows": "rows behind the means (rows that see at least two keys)",
    "single": "rows that see one key, left out of the means",
    "nonfinite": "rows with a NaN or an infinite score, left out of the means",
    "twin": "the head of the same layer that attends most alike",
    "twin_similarity": "correlation with it, over evenly spaced rows",
    "scale": "what scores were multiplied by, mean over the rows of a close look; with critical=True",
    "critical": "critical scale over that scale, median over evenly spaced rows of the later half; with critical=True",
    "rivals": "keys with at least 1/e of the best key's weight, with itself, mean over those rows; with critical=True",
    **{f"{name}_se": f"standard error of {name} over the rows taken; 0 where all rows are" for name in SAMPLED_MEANS},
}
BAND_COLUMNS = ("rows", "visible", "width", "normalized_entropy", "sink_first")
INTEGERS = {"sink_key", "length", "rows", "single", "nonfinite", "twin"}
ADDED = {"rows", "single", "nonfinite"}
LARGEST = {"max_score", "length"}
FROM_FIRST = {"sink_key", "twin"}  # of several ranks
# the numbers a row of a loss may have; a row also has `step` and `name`, and perhaps `type` and `bins`
LOSS_COLUMNS = (
    *("loss", "entropy", "confidence", "accuracy", "rows", "classes", "candidates", "effective_negatives"),
    *("bound", "cap", "scale", "alignment", "uniformity", "norm_query", "norm_key"),
)


@dataclass(frozen=True)
class Site:
    """Where a distribution lives: a layer of the table."""

    name: str
    kind: str
    heads: int
    cross: bool = False  # keys of another sequence: cross-attention


@dataclass
class Block:
    """One layer at one step, in one phase."""

    step: int
    layer: int
    training: bool
    values: array[float]  # heads * len(COLUMNS)
    # log2 band of visible keys -> heads * len(BAND_COLUMNS)
    bands: dict[int, array[float]] = field(default_factory=dict)
    phase: str = ""  # one of `PHASES`

    def __post_init__(self) -> None:
        self.phase = self.phase or ("train" if self.training else "eval")

    @property
    def heads(self) -> int:
        return len(self.values) // len(COLUMNS)

    def row(self, head: int) -> dict[str, float]:
        width = len(COLUMNS)
        return dict(zip(COLUMNS, self.values[head * width : (head + 1) * width], strict=True))

    def column(self, name: str) -> list[float]:
        return list(self.values[_INDEX[name] :: len(COLUMNS)])

    def overall(self, name: str) -> float | None:
        """One number of all heads: counts add up, maxima are maxima, the rest are means; None where none is finite."""
        values = self.column(name)
        found = _combine(name, values, [1.0] * len(values))
        return None if math.isnan(found) else found


_INDEX = {name: i for i, name in enumerate(COLUMNS)}


class Readings:
    """What a record gives, and a watch that is still making one."""

    thresholds: Any = None  # of its findings, unless others are given

    def finished(self) -> Record:
        """The record with everything that was measured."""
        raise NotImplementedError

    def frame(self, pandas: bool | None = None) -> Any:
        """One row per step, layer and head: a pandas DataFrame where pandas is installed, else a `Table`."""
        return Table(self.finished().rows(), columns=frame_columns()).native(pandas)

    def loss_frame(self, pandas: bool | None = None) -> Any:
        """One row per step and loss."""
        return Table(self.finished().losses).native(pandas)

    def findings(self, thresholds: Thresholds | dict[str, float] | None = None) -> list[Finding]:
        """What is worth a look, worst first."""
        from partita.monitor.findings import find

        return find(self.finished(), thresholds if thresholds is not None else self.thresholds)

    def save(self, path: str | Path) -> Path:
        """Write JSON lines, the first a header with schema, columns and provenance; `partita.load_record` reads it."""
        return replace_file(path, self.finished().lines())

    def report(self, path: str | Path, other: Record | None = None, **options: Any) -> Path:
        """Write the self-contained HTML report; with `other`, a comparison of the two runs."""
        options = {"thresholds": self.thresholds, **options}
        return render_page().write(self.finished(), path, other=other, **options)  # type: ignore[no-any-return]

    def plot(self, kind: str = "entropy") -> Any:
        """A figure that notebooks show, and `.save(path)` writes as SVG: "entropy" (H / log n over the run), "scores"
        (the largest score), "width" (against length)."""
        return render_page("plots").plot(self.finished(), kind)

    def summary(self, thresholds: Thresholds | dict[str, float] | None = None) -> str:
        """A sentence about the run, its findings, and what was not seen."""
        record, found = self.finished(), self.findings(thresholds)
        text = [str(render_page("verdict").sentence(record, found)), str(record.coverage.get("text") or "")]
        return "\n".join([line for line in text if line] + ([repr(found)] if found else []))

    def _repr_html_(self) -> str:
        return str(render_page().notebook(self.finished()))


@dataclass(repr=False)
class Record(Readings):
    """Everything one run of `watch` measured."""

    provenance: dict[str, Any] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    losses: list[dict[str, Any]] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)
    studies: list[dict[str, Any]] = field(default_factory=list)
    coverage: dict[str, Any] = field(default_factory=dict)
    overhead: dict[str, Any] = field(default_factory=dict)
    received: list[dict[str, Any]] = field(default_factory=list)  # profiles of `measure.Received`

    def finished(self) -> Record:
        return self

    def steps(self) -> list[int]:
        return sorted({b.step for b in self.blocks} | {int(r["step"]) for r in self.losses})

    def by_phase(self) -> list[tuple[str, Record]]:
        """The record of each phase. The first has of every layer the first of `PHASES` it was seen in: what a run is
        judged and drawn by, since numbers of training are not averaged with those of a generation."""
        order = {name: i for i, name in enumerate(PHASES)}
        phases = sorted({b.phase for b in self.blocks}, key=lambda p: order.get(p, len(order)))
        first: dict[int, str] = {}
        for phase in phases:
            for block in self.blocks:
                if block.phase == phase:
                    first.setdefault(block.layer, phase)
        if len(phases) < 2:
            return [(name, self) for name in phases] or [("", self)]
        leading = [b for b in self.blocks if first[b.layer] == b.phase]
        rest = {p: [b for b in self.blocks if b.phase == p != first[b.layer]] for p in phases}
        return [(phases[0], replace(self, blocks=leading))] + [
            (phase, replace(self, blocks=blocks, losses=[], coverage={})) for phase, blocks in rest.items() if blocks
        ]

    def losses_by_name(self, kind: str | None = None) -> dict[str, list[dict[str, Any]]]:
        """The rows of each loss; of those of one type."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self.losses:
            if kind is None or row.get("type") == kind:
                found.setdefault(str(row["name"]), []).append(row)
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per step, layer and head."""
        for block in self.blocks:
            site = self.sites[block.layer] if block.layer < len(self.sites) else Site(str(block.layer), "", 0)
            for head in range(block.heads):
                place = {"step": block.step, "layer": block.layer, "head": head}
                numbers = {k: int(v) if k in INTEGERS and math.isfinite(v) else v for k, v in block.row(head).items()}
                about = {"name": site.name, "training": block.training, "phase": block.phase, "cross": site.cross}
                yield {**place, **numbers, **about}

    @property
    def title(self) -> str:
        return str(self.provenance.get("title") or self.provenance.get("model") or "a model")

    def __repr__(self) -> str:
        heads, steps = sum(s.heads for s in self.sites), len(self.steps())
        counts = f"{len(self.sites)} layers, {heads} heads, {steps} {self.unit}{'s' * (steps != 1)}"
        return f"<record of {self.title[:60]!r}: {counts}, {len(self.losses_by_name())} losses>"

    @property
    def frozen(self) -> bool:
        """Nothing was trained while it was watched: what was recorded are inputs, not steps of learning."""
        return bool(self.blocks) and not any(b.training for b in self.blocks)

    @property
    def unit(self) -> str:
        return "input" if self.frozen else "step"

    def lines(self) -> Iterator[str]:
        """The lines of its file."""
        columns = {"columns": list(COLUMNS), "band_columns": list(BAND_COLUMNS)}
        yield _text("header", {"schema": SCHEMA, **columns, "provenance": self.provenance})
        yield from self.part()
        yield _text("summary", {"coverage": self.coverage, "overhead": self.overhead})

    def part(self, known: int = 0) -> Iterator[str]:
        """The lines between header and summary, without those of the first sites, which are `known`."""
        for layer, site in enumerate(self.sites[known:], known):
            about = {"layer": layer, "name": site.name, "type": site.kind, "heads": site.heads}
            yield _text("site", about | ({"cross": True} if site.cross else {}))
        for block in self.blocks:
            about = {"step": block.step, "layer": block.layer, "training": block.training, "phase": block.phase}
            bands = {band: _cut(values, len(BAND_COLUMNS)) for band, values in block.bands.items()}
            yield _text("attention", {**about, "values": _cut(block.values, len(COLUMNS)), "bands": bands})
        kinds = {"loss": self.losses, "curve": self.curves, "map": self.maps, "received": self.received}
        for kind, rows in (kinds | {"study": self.studies}).items():
            for row in rows:
                yield _text(kind, row)


def band_sums(blocks: Iterable[Block]) -> dict[tuple[int, int, int], list[float]]:
    """(layer, head, band of visible keys) -> rows, and sums over them of the keys they may see and of their width."""
    sums: dict[tuple[int, int, int], list[float]] = {}
    for block in blocks:
        for band, values in block.bands.items():
            for head in range(len(values) // len(BAND_COLUMNS)):
                rows, visible, width, *_ = values[head * len(BAND_COLUMNS) :]
                if rows > 0 and math.isfinite(visible) and math.isfinite(width):
                    total = sums.setdefault((block.layer, head, band), [0.0, 0.0, 0.0])
                    total[:] = (a + b for a, b in zip(total, (rows, rows * visible, rows * width), strict=True))
    return dict(sorted(sums.items()))


def render_page(part: str = "") -> Any:
    """The page module, loaded when a page is requested."""
    return importlib.import_module("partita.monitor.report" + (f".{part}" if part else ""))


def frame_columns() -> list[str]:
    return ["step", "layer", "head", *COLUMNS, "name", "training", "phase", "cross"]


def keep_newest(rows: list[dict[str, Any]], row: dict[str, Any], *names: str) -> None:
    """The newest of its kind replaces the older one: memory stays O(layers x heads)."""
    rows[:] = [r for r in rows if any(r[name] != row[name] for name in names)] + [row]


def _text(kind: str, line: dict[str, Any]) -> str:
    """A line of the file."""
    return json.dumps({"kind": kind, **clean(line)}, allow_nan=False, separators=(",", ":")) + "\n"


def _cut(values: array[float], width: int) -> list[list[float]]:
    """The row of each head."""
    return [list(values[i : i + width]) for i in range(0, len(values), width)]


def _digits(value: float) -> float | None:
    """Nine significant digits carry a float32 exactly; JSON has no NaN, so anything not finite is null."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e9 else float(f"{value:.9g}")


def clean(value: Any) -> Any:
    """The value as strict JSON: nonfinite numbers become null, unknown objects their text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return _digits(value)
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [clean(v) for v in value]
    return str(value)


# ---- a plain table ---------------------------------------------------------------------------------------------------


class Table:
    """Rows of named values; a pandas DataFrame where pandas is installed.

    >>> t = Table([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    >>> t["a"], t.b, t[1], len(t)  # columns by name or as attributes, as in pandas
    ([1, 3], [2, 4], {'a': 3, 'b': 4}, 2)
    """

    def __init__(self, rows: Iterable[dict[str, Any]], columns: list[str] | None = None) -> None:
        self.rows = list(rows)
        self.columns = columns or list(dict.fromkeys(key for row in self.rows for key in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, (int, slice)):
            return self.rows[key]
        if key not in self.columns:
            raise KeyError(f"no column {key!r}; the columns are {', '.join(self.columns)}")
        return [row.get(key) for row in self.rows]

    def __getattr__(self, name: str) -> Any:
        columns = self.__dict__.get("columns", ())
        if name not in columns:
            raise AttributeError(f"a table has no {name!r}; its columns are {', '.join(columns)}")
        return self[name]

    def to_dict(self, orient: str = "records") -> Any:
        """As pandas does it: "records" (list of rows) or "list" (dict of columns)."""
        if orient == "records":
            return [dict(row) for row in self.rows]
        if orient == "list":
            return {name: self[name] for name in self.columns}
        raise ValueError(f"orient must be 'records' or 'list'; got {orient!r}")

    def native(self, pandas: bool | None = None) -> Any:
        """A DataFrame if pandas is wanted (None: if it is installed), else this table."""
        if pandas is False or (pandas is None and importlib.util.find_spec("pandas") is None):
            return self
        import pandas as pd

        return pd.DataFrame(self.rows, columns=self.columns)

    def __repr__(self) -> str:
        shown = [[_short(row.get(name)) for name in self.columns] for row in self.rows[:20]]
        widths = [max([len(name), *(len(line[i]) for line in shown)]) for i, name in enumerate(self.columns)]
        head = "  ".join(name.rjust(w) for name, w in zip(self.columns, widths, strict=True))
        body = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in shown]
        more = [f"... {len(self) - 20} more rows"] if len(self) > 20 else []
        return "\n".join([head, *body, *more])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- records of several ranks ----------------------------------------------------------------------------------------


def merge_records(records: Sequence[Record]) -> Record:
    """The record that the ranks would have made as one process: counts add, maxima are maxima, means are weighted.

    Blocks of one rank only are kept. Quantiles and the strongest key's mass are averaged: close, not exact. Curves,
    maps and profiles are the first's.
    """
    first = records[0]
    blocks: dict[tuple[int, int, str], list[Block]] = {}
    for record in records:
        for block in record.blocks:
            blocks.setdefault((block.step, block.layer, block.phase), []).append(block)
    merged = [_join(parts) for _, parts in sorted(blocks.items())]
    losses = [row for record in records for row in record.losses]
    return replace(first, provenance={**first.provenance, "ranks": len(records)}, blocks=merged, losses=losses)


def _join(parts: list[Block]) -> Block:
    found = {band: [p.bands[band] for p in parts if band in p.bands] for p in parts for band in p.bands}
    bands = {band: _combined(tables, BAND_COLUMNS) for band, tables in sorted(found.items())}
    return replace(parts[0], values=_combined([p.values for p in parts], tuple(COLUMNS)), bands=bands)


def _combined(parts: list[array[float]], names: tuple[str, ...]) -> array[float]:
    """Tables with a row of these columns for each head."""
    out, width = array("d"), len(names)
    for start in range(0, max(map(len, parts)), width):
        rows = [dict(zip(names, p[start : start + width], strict=True)) for p in parts if start < len(p)]
        out.extend(_combine(name, [r[name] for r in rows], [r["rows"] for r in rows]) for name in names)
    return out


def _combine(name: str, values: list[float], weights: list[float]) -> float:
    """One number of several; NaN where none is finite."""
    good = [v for v in values if math.isfinite(v)]
    if not good:
        return math.nan
    if name in ADDED:
        return sum(good)
    if name in LARGEST:
        return max(good)
    if name.endswith("_se"):  # the means of which these are the errors are independent
        return math.sqrt(
            weighted_mean([v * v * w for v, w in zip(values, weights, strict=True)], weights) / sum(weights)
        )
    return good[0] if name in FROM_FIRST else weighted_mean(values, weights)


def weighted_mean(values: list[float], weights: list[float]) -> float:
    """Over the finite values of some weight; NaN where there is none."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if math.isfinite(v) and w > 0]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else math.nan
