"""A record -> what the page holds: few bytes, no NaN, at most 256 points in time.

Means of a metric are stored as float32 while that is small, else as 16-bit steps of the metric's range
(then 8-bit), differences along time, compressed. The page names the one it has.
"""

from __future__ import annotations

import base64
import gzip
import math
import struct
from array import array
from itertools import accumulate
from typing import Any

from partita.monitor.record import LOSS_COLUMNS, Record, band_sums, clean
from partita.monitor.report.studies import KIND

METRICS = (
    *("normalized_entropy", "effective_width", "max_score", "log_partition", "score_variance"),
    *("sink_first", "sink_top", "top_mass"),
)
OPTIONAL = ("critical",)  # measured on request only; a page without it does not offer it
QUANTILES = ("normalized_entropy_p05", "normalized_entropy_p50", "normalized_entropy_p95")
BUDGET = 1_600_000  # bytes of base64 for all metrics together
EXACT = 60_000  # values of one metric that may be stored as float32
POINTS = 256
LARGEST = 3.4e38  # of float32; larger values are drawn as missing, as NaN is


def pack(record: Record, *, points: int = POINTS) -> dict[str, Any]:
    """Metrics, bands, curves, keys, maps, losses, and the totals behind them."""
    steps = sorted({b.step for b in record.blocks})
    size = max(1, math.ceil(len(steps) / points))
    bins = [steps[i : i + size] for i in range(0, len(steps), size)]
    shown = [group[-1] for group in bins]
    slot = {step: i for i, group in enumerate(bins) for step in group}
    columns = {name: _gather(record, name, slot, len(bins)) for name in (*METRICS, *QUANTILES, *OPTIONAL)}
    empty = [name for name in OPTIONAL if not any(map(math.isfinite, columns[name]))]
    metrics, resolution = _encode({name: found for name, found in columns.items() if name not in empty}, len(bins))
    packed = {
        "sites": [{"name": s.name, "kind": s.kind, "heads": s.heads, "cross": s.cross} for s in record.sites],
        "steps": shown,
        "metrics": metrics,
        "resolution": resolution,
        "rowsPerStep": _rows(record, slot, len(bins)),
        "bands": _bands(record, steps),
        "curves": {str(c["layer"]): c for c in record.curves},
        "keys": {str(c["layer"]): c.get("keys") or [] for c in record.curves},
        "maps": {f"{m['layer']},{m['head']}": _map(m) for m in record.maps},
        "received": _received(record),
        "losses": _losses(record, points),
        "studies": [row for row in record.studies if row.get("study") != KIND],
        "totals": {k: int(sum(b.overall(k) or 0 for b in record.blocks)) for k in ("rows", "single", "nonfinite")},
    }
    return dict(clean(packed))


def _gather(record: Record, name: str, slot: dict[int, int], points: int) -> array[float]:
    """(head, time) values, NaN where nothing was seen; several steps of one bin are averaged, maxima kept."""
    *offsets, heads = accumulate((site.heads for site in record.sites), initial=0)
    total, count = (array("d", bytes(8 * heads * points)) for _ in range(2))
    for block in record.blocks:
        for head, value in enumerate(block.column(name)[: record.sites[block.layer].heads]):
            if abs(value) <= LARGEST:
                at = (offsets[block.layer] + head) * points + slot[block.step]
                count[at] += 1
                if name != "max_score":
                    total[at] += value
                elif count[at] == 1 or value > total[at]:
                    total[at] = value
    shares = [1.0] * len(count) if name == "max_score" else count
    return array("d", (v / s if n else math.nan for v, s, n in zip(total, shares, count, strict=True)))


def _encode(columns: dict[str, array[float]], steps: int) -> tuple[dict[str, Any], str]:
    kinds = {"f32": "float32", "u16": "16 bits of each metric's range", "u8": "8 bits of each metric's range (0.4 %)"}
    if len(columns["normalized_entropy"]) > EXACT:
        del kinds["f32"]
    for kind in kinds:
        less = dict.fromkeys(QUANTILES, "u8") if kind == "u16" else {}
        packed = {name: _one(values, less.get(name, kind), steps) for name, values in columns.items()}
        if sum(len(p["data"]) for p in packed.values()) <= BUDGET:
            break
    return packed, kinds[kind]


def _one(values: array[float], kind: str, steps: int) -> dict[str, Any]:
    finite = [v for v in values if math.isfinite(v)]
    lo, hi = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if kind == "f32":
        raw = struct.pack(f"<{len(values)}f", *values)
    else:
        top = 65535 if kind == "u16" else 255  # the last code stands for "no value"
        step = (hi - lo) / (top - 1) or 1.0
        codes = [top if v != v else round((v - lo) / step) for v in values]
        delta = [c if i % steps == 0 else (c - codes[i - 1]) % (top + 1) for i, c in enumerate(codes)]
        raw = bytes(d >> 8 for d in delta) + bytes(d & 255 for d in delta) if kind == "u16" else bytes(delta)
    data = base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()
    return {"encoding": kind, "count": len(values), "lo": lo, "hi": hi, "data": data}


def _rows(record: Record, slot: dict[int, int], points: int) -> dict[str, list[float | None]]:
    rows: dict[str, list[float | None]] = {}
    for block in record.blocks:
        line = rows.setdefault(str(block.layer), [None] * points)
        line[slot[block.step]] = next(iter(block.column("rows")), None)
    return rows


def _bands(record: Record, steps: list[int]) -> dict[str, Any]:
    """Width by visible keys for each head, over the last quarter of the run and over the first."""
    if not steps:
        return {}
    quarter = max(1, len(steps) // 4)
    late = _band_means(record, set(steps[-quarter:]))
    # different lengths at different steps make one curve: use them all, or the curve has holes
    if len({b.column("length")[0] for b in record.blocks if b.heads}) > 2:
        late = _band_means(record, set(steps))
    early = _band_means(record, set(steps[:quarter])) if len(steps) >= 8 else {}
    for key, band in late.items():
        if key in early:
            band["first"] = {k: early[key][k] for k in ("visible", "width")}
    return late


def _band_means(record: Record, steps: set[int]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    sums = band_sums(block for block in record.blocks if block.step in steps)
    for (layer, head, _), (rows, visible, wide) in sums.items():
        line = out.setdefault(f"{layer},{head}", {"rows": [], "visible": [], "width": []})
        line["rows"].append(int(rows))
        line["visible"].append(float(f"{visible / rows:.5g}"))
        line["width"].append(float(f"{wide / rows:.5g}"))
    return out


def _received(record: Record) -> dict[str, Any]:
    """The first and the newest profile of each layer, in the digits a figure shows."""
    out: dict[str, Any] = {}

    def few(values: list[float | None] | None) -> Any:
        return None if values is None else [None if v is None else float(f"{v:.4g}") for v in values]

    for layer in sorted({r["layer"] for r in record.received}):
        mine = [r for r in record.received if r["layer"] == layer]
        shown = mine if len(mine) == 1 else [mine[0], mine[-1]]
        out[str(layer)] = [{**r, "bins": list(map(few, r["bins"])), "alike": few(r["alike"])} for r in shown]
    return out


def _map(given: dict[str, Any]) -> dict[str, Any]:
    """A picture whose bytes are there; else its place, marked as damaged: it must not take the page with it."""
    sizes = [given.get(k) for k in ("rows", "columns", "n_query", "n_key")]
    try:
        whole = all(isinstance(n, int) and n > 0 for n in sizes) and isinstance(given.get("peak"), (int, float))
        if whole and len(base64.b64decode(given["data"], validate=True)) == given["rows"] * given["columns"]:
            return given
    except (KeyError, TypeError, ValueError):
        pass
    return {"layer": given["layer"], "head": given["head"], "damaged": True}


def _losses(record: Record, points: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, rows in record.losses_by_name().items():
        rows = rows[:: max(1, math.ceil(len(rows) / points))]
        late = rows[-max(1, len(rows) // 4) :]
        bins = _reliability(late)
        seen = sum(b[0] for b in bins)
        gap = sum(b[0] * abs(b[1] - b[2]) for b in bins) / seen if seen else None
        out[name] = {
            "type": rows[0].get("type"),
            "steps": [r["step"] for r in rows],
            "columns": {c: [r.get(c) for r in rows] for c in LOSS_COLUMNS if any(r.get(c) is not None for r in rows)},
            "bins": bins,
            "calibration_error": gap,
        }
    return out


def _reliability(rows: list[dict[str, Any]]) -> list[list[float]]:
    """Per confidence bin: rows, mean confidence, share right; over several steps."""
    sums: dict[int, list[float]] = {}
    for row in rows:
        for i, (count, confidence, right) in enumerate(row.get("bins") or []):
            seen = count, count * (confidence or 0.0), count * (right or 0.0)
            sums[i] = [a + b for a, b in zip(sums.get(i, (0.0, 0.0, 0.0)), seen, strict=True)]
    return [[n, c / n, r / n] for _, (n, c, r) in sorted(sums.items()) if n > 0]
