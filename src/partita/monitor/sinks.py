"""Where measurements go while they are made. A sink is called after each observed step:

    sink(record, step, blocks, losses)

A sink that raises is reported once in the log, and the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from partita.monitor.loading import check_header
from partita.monitor.record import Block, Record, block_line, clean, header, text_of

Sink = Callable[[Record, int, list[Block], list[dict[str, Any]]], None]
SCALARS = ("normalized_entropy", "effective_width", "max_score", "log_partition", "sink_first", "sink_top", "nonfinite")


def scalars(
    record: Record, blocks: list[Block], losses: list[dict[str, Any]], *, heads: bool = False
) -> dict[str, float]:
    """Flat names and numbers, one per layer (and per head if asked): what trackers take."""
    out: dict[str, float] = {}
    for block in blocks:
        for name in SCALARS:
            if (value := block.overall(name)) is not None:
                out[f"partita/{name}/layer{block.layer}"] = value
            if heads:
                out |= {
                    f"partita/{name}/layer{block.layer}/head{h}": v
                    for h, v in enumerate(block.column(name))
                    if math.isfinite(v)
                }
    for row in losses:
        for key in ("loss", "entropy", "confidence", "calibration_error", "effective_negatives", "bound"):
            value = row.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                out[f"partita/{row['name']}/{key}"] = float(value)
    return out


def log_to(function: Callable[..., Any], *, heads: bool = False, pass_step: bool = True) -> Sink:
    """Any `log(dict, step=...)`: wandb.log, trackio.log, your own. `pass_step=False` leaves the step to it."""

    def sink(record: Record, step: int, blocks: list[Block], losses: list[dict[str, Any]]) -> None:
        values = scalars(record, blocks, losses, heads=heads)
        function(values, step=step) if pass_step else function({**values, "partita/step": step})

    return sink


def json_lines(path: str | Path) -> Sink:
    """A file that grows with each step and that `load_record` reads, also after an interruption.

    A record that is there already is continued, never overwritten: a resumed training adds to the first run's file.
    A file that is no record is refused at once.
    """
    path = Path(path)
    if path.exists():
        with path.open("rb") as there:
            first = there.readline()
        if first.strip():
            check_header(path, first.decode("utf-8", "replace"))
    sites = 0
    fresh = True

    def sink(record: Record, step: int, blocks: list[Block], losses: list[dict[str, Any]]) -> None:
        nonlocal sites, fresh
        lines = [header(record.provenance)] if fresh else []
        lines += [record.sites[layer].line(layer) for layer in range(sites, len(record.sites))]
        lines += [block_line(b) for b in blocks]
        lines += [{"kind": "loss", **clean(row)} for row in losses]
        if fresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished(path)
        with path.open("a", encoding="utf-8") as out:
            out.writelines(text_of(line) for line in lines)
        sites, fresh = len(record.sites), False

    return sink


def _cut_unfinished(path: Path) -> None:
    """Cut off what an interruption left of the last line, so that the next one starts on its own."""
    if not path.exists():
        return
    with path.open("r+b") as there:
        end = there.seek(0, 2)
        while end > 0:
            start = max(0, end - 65536)
            there.seek(start)
            found = there.read(end - start).rfind(b"\n")
            if found >= 0:
                there.truncate(start + found + 1)
                return
            end = start
        there.truncate(0)
