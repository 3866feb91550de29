"""Records of several ranks -> one: counts add, maxima are maxima, means are weighted by their rows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from partita.monitor.record import ADDED, BAND_COLUMNS, COLUMNS, LARGEST, Block, Record

FROM_FIRST = {"sink_key", "twin"}


def merge_records(records: Sequence[Record]) -> Record:
    """The record the ranks would have made as one process; blocks present on one rank only are kept.

    Quantiles and the strongest key's mass are averaged: close, not exact. Curves, maps and profiles are the first's.
    """
    first = records[0]
    blocks: dict[tuple[int, int], list[Block]] = {}
    for record in records:
        for block in record.blocks:
            blocks.setdefault((block.step, block.layer), []).append(block)
    merged = [_join(parts) for _, parts in sorted(blocks.items())]
    losses = [row for record in records for row in record.losses]
    about = {**first.provenance, "ranks": len(records)}
    return Record(
        about, first.sites, merged, losses, first.curves, first.maps, first.studies, first.coverage, first.overhead,
        first.received,
    )  # fmt: skip


def _join(parts: list[Block]) -> Block:
    out = array("d")
    for head in range(parts[0].heads):
        rows = [p.row(head) for p in parts if head < p.heads]
        for name in COLUMNS:
            out.append(_combine(name, [r[name] for r in rows], [r["rows"] for r in rows]))
    bands: dict[int, array[float]] = {}
    width = len(BAND_COLUMNS)
    for band in sorted({k for p in parts for k in p.bands}):
        given = [p.bands[band] for p in parts if band in p.bands]
        total = array("d")
        for at in range(0, len(given[0]), width):
            weights = [g[at] for g in given]
            total.append(sum(weights))
            total.extend(weighted_mean([g[at + i] for g in given], weights) for i in range(1, width))
        bands[band] = total
    return Block(parts[0].step, parts[0].layer, parts[0].training, out, bands)


def _combine(name: str, values: list[float], weights: list[float]) -> float:
    good = [v for v in values if math.isfinite(v)]
    if not good:
        return math.nan
    if name in ADDED:
        return sum(good)
    if name in LARGEST:
        return max(good)
    return good[0] if name in FROM_FIRST else weighted_mean(values, weights)


def weighted_mean(values: list[float], weights: list[float]) -> float:
    """Over the finite values of some weight; NaN where there is none."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if math.isfinite(v) and w > 0]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else math.nan
