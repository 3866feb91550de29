"""Rows of measurements, in memory or as JSON lines. Imports neither torch nor numpy, so a report needs no torch.

A record is a list of *blocks*: one per (step, layer), holding a row of `COLUMNS` for each head, and a row of
`BAND_COLUMNS` for each head and each band of visible keys. Losses, temperature curves, maps and
profiles of what keys received are plain dicts.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.monitor.files import replace_file
from partita.monitor.table import Table

SCHEMA = "partita.record/1"

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
}
BAND_COLUMNS = ("rows", "visible", "width", "normalized_entropy", "sink_first")
INTEGERS = {"sink_key", "length", "rows", "single", "nonfinite", "twin"}
ADDED = {"rows", "single", "nonfinite"}
LARGEST = {"max_score", "length"}
# the numbers a row of a loss may have; a row has `step` and `name` besides, and perhaps `type` and `bins`
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

    def line(self, layer: int) -> dict[str, Any]:
        """As a file has it."""
        about = {"kind": "site", "layer": layer, "name": self.name, "type": self.kind, "heads": self.heads}
        return about | ({"cross": True} if self.cross else {})


@dataclass
class Block:
    """One layer at one step."""

    step: int
    layer: int
    training: bool
    values: array[float]  # heads * len(COLUMNS)
    bands: dict[int, array[float]] = field(
        default_factory=dict
    )  # log2 band of visible keys -> heads * len(BAND_COLUMNS)

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
        good = [v for v in self.column(name) if math.isfinite(v)]
        if not good:
            return None
        return sum(good) if name in ADDED else max(good) if name in LARGEST else sum(good) / len(good)


_INDEX = {name: i for i, name in enumerate(COLUMNS)}


@dataclass(repr=False)
class Record:
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
    received: list[dict[str, Any]] = field(default_factory=list)  # profiles, as positions.py makes them

    def steps(self) -> list[int]:
        return sorted({b.step for b in self.blocks} | {int(r["step"]) for r in self.losses})

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per step, layer and head."""
        for block in self.blocks:
            site = self.sites[block.layer] if block.layer < len(self.sites) else Site(str(block.layer), "", 0)
            for head in range(block.heads):
                row: dict[str, Any] = {"step": block.step, "layer": block.layer, "head": head}
                for key, value in block.row(head).items():
                    row[key] = int(value) if key in INTEGERS and math.isfinite(value) else value
                row["name"] = site.name
                row["training"] = block.training
                row["cross"] = site.cross
                yield row

    def frame(self, pandas: bool | None = None) -> Any:
        """One row per step, layer and head: a pandas DataFrame where pandas is installed, else a `Table`."""
        return Table(self.rows(), columns=frame_columns()).native(pandas)

    def loss_frame(self, pandas: bool | None = None) -> Any:
        """One row per observed loss call and step."""
        return Table(self.losses).native(pandas)

    def findings(self, thresholds: Any = None) -> list[Any]:
        from partita.monitor.findings import find

        return find(self, thresholds)

    def save(self, path: str | Path) -> Path:
        """Write JSON lines; the first line is the header with schema, columns and provenance."""
        return replace_file(path, (text_of(line) for line in self.lines()))

    def __repr__(self) -> str:
        heads, steps = sum(s.heads for s in self.sites), len(self.steps())
        name = str(self.provenance.get("title") or self.provenance.get("model") or "a model")
        counts = f"{len(self.sites)} layers, {heads} heads, {steps} {self.unit}{'s' * (steps != 1)}"
        return f"<record of {name[:60]!r}: {counts}, {len({r['name'] for r in self.losses})} losses>"

    @property
    def frozen(self) -> bool:
        """Nothing was trained while it was watched: what was recorded are inputs, not steps of learning."""
        return bool(self.blocks) and not any(b.training for b in self.blocks)

    @property
    def unit(self) -> str:
        return "input" if self.frozen else "step"

    def lines(self) -> Iterator[dict[str, Any]]:
        yield header(self.provenance)
        for layer, site in enumerate(self.sites):
            yield site.line(layer)
        for block in self.blocks:
            yield block_line(block)
        told = {"loss": self.losses, "curve": self.curves, "map": self.maps, "received": self.received}
        for kind, rows in (told | {"study": self.studies}).items():
            for row in rows:
                yield {"kind": kind, **clean(row)}
        yield {"kind": "summary", "coverage": clean(self.coverage), "overhead": clean(self.overhead)}

    def report(self, path: str | Path, other: Record | None = None, **options: Any) -> Path:
        """Write the self-contained HTML report; with `other`, a comparison of the two runs."""
        return render_page().write(self, path, other=other, **options)  # type: ignore[no-any-return]

    def plot(self, kind: str = "entropy") -> Any:
        """A figure: "entropy" (H / log n over the run), "scores" (the largest score), "width" (against length)."""
        return render_page("plots").plot(self, kind)

    def summary(self, thresholds: Any = None) -> str:
        """What a person would say about the run, and what was not seen."""
        found = self.findings(thresholds)
        said = [str(render_page("verdict").sentence(self, found)), str(self.coverage.get("text") or "")]
        return "\n".join([text for text in said if text] + ([repr(found)] if found else []))

    def _repr_html_(self) -> str:
        return str(render_page().notebook(self))


def render_page(part: str = "") -> Any:
    """The page module. It lives in the layer above (`lab`), so it is looked up by name when a page is asked for."""
    import importlib

    return importlib.import_module("partita.lab.report" + (f".{part}" if part else ""))


def frame_columns() -> list[str]:
    return ["step", "layer", "head", *COLUMNS, "name", "training", "cross"]


def keep_newest(rows: list[dict[str, Any]], row: dict[str, Any], *names: str) -> None:
    """The newest of its kind replaces the older one: memory stays O(layers x heads)."""
    rows[:] = [r for r in rows if any(r[name] != row[name] for name in names)] + [row]


def text_of(line: dict[str, Any]) -> str:
    """A line of the file."""
    return json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n"


def header(provenance: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "header",
        "schema": SCHEMA,
        "columns": list(COLUMNS),
        "band_columns": list(BAND_COLUMNS),
        "provenance": clean(provenance),
    }


def block_line(block: Block) -> dict[str, Any]:
    return {
        "kind": "attention",
        "step": block.step,
        "layer": block.layer,
        "training": block.training,
        "values": _cut(block.values, len(COLUMNS)),
        "bands": {str(key): _cut(values, len(BAND_COLUMNS)) for key, values in block.bands.items()},
    }


def _cut(values: Iterable[float], width: int) -> list[list[float | None]]:
    flat = [digits(v) for v in values]
    return [flat[i : i + width] for i in range(0, len(flat), width)]


def digits(value: float) -> float | None:
    """Nine significant digits carry a float32 exactly; JSON has no NaN, so anything not finite is null."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e9 else float(f"{value:.9g}")


def clean(value: Any) -> Any:
    """The value as strict JSON: nonfinite numbers become null, unknown objects their text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return digits(value)
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [clean(v) for v in value]
    return str(value)
