"""Records made by hand, with known defects: healthy, sick, one head, many heads, missing data, hostile names."""

from __future__ import annotations

import base64
import math
import random
from array import array

from partita.monitor.record import COLUMNS, Block, Record, Site

HOSTILE = '</script><img src=x onerror="alert(1)">"\'`<!-- ]]> \u2028 \U0001f9e8 '


def record(
    layers: int = 6, heads: int = 12, steps: int = 40, *, sick: bool = False, missing: bool = False, seed: int = 0
) -> Record:
    """Random walks in plausible ranges; `sick` plants one defect of each kind, `missing` leaves holes and NaN."""
    rng = random.Random(seed)
    out = Record(
        provenance={
            "title": "synthetic run",
            "model": "Synthetic",
            "partita": "0",
            "options": {"every": 1, "rows": None},
            "training_length": 128,
        },
        sites=[Site(f"encoder.layer.{i}.attention.self", "sdpa", heads) for i in range(layers)],
        coverage={
            "text": f"{layers} of {layers} attention modules observed",
            "short": f"{layers} of {layers} attention modules seen",
            "missed": [],
        },
        overhead={
            "watch_s": 0.5,
            "elapsed_s": 20.0,
            "fraction": 0.0256,
            "steps": steps,
            "observed_steps": steps,
            "record_bytes": 10_000,
            "map_bytes": 3e8,
        },
    )
    level = {(i, h): rng.uniform(0.45, 0.85) for i in range(layers) for h in range(heads)}
    for t in range(steps):
        for layer in range(layers):
            values = array("d")
            bands: dict[int, array[float]] = {k: array("d") for k in range(1, 8)}
            for head in range(heads):
                row, slope = _row(rng, level, layer, head, t, steps, sick)
                if missing and (layer + head + t) % 5 == 0:
                    row = dict.fromkeys(COLUMNS, math.nan) | {"rows": 0, "single": 0, "nonfinite": 3, "length": 128}
                values.extend(row.get(c, 0.0) for c in COLUMNS)  # every row is looked at: no standard errors
                for band, store in bands.items():
                    n = 1.5 * 2**band
                    store.extend((2.0**band, n, max(1.0, n**slope), slope, row["sink_first"]))
            if not (missing and layer == layers - 1 and t < steps // 2):
                out.blocks.append(Block(t * 10, layer, True, values, bands))
        loss = 4.0 * math.exp(-t / 15) + 1.5 + rng.gauss(0, 0.03)
        bins = [[rng.randrange(5, 60), (k + 0.5) / 10, min(1.0, (k + 0.5) / 10 * 0.9)] for k in range(10)]
        out.losses.append(
            {
                "step": t * 10,
                "name": "cross_entropy",
                "type": "classification",
                "loss": loss,
                "entropy": loss * 0.9,
                "confidence": 0.5,
                "accuracy": 0.4,
                "rows": 512,
                "classes": 1000,
                "bins": bins,
            }
        )
        if sick:
            out.losses.append(
                {
                    "step": t * 10,
                    "name": "info_nce",
                    "type": "contrastive",
                    "loss": 0.02,
                    "candidates": 256,
                    "effective_negatives": 3.0,
                    "bound": 5.5,
                    "cap": 5.545,
                    "scale": 100.0,
                    "norm_query": 7.0,
                    "norm_key": 7.1,
                    "rows": 256,
                }
            )
    factors = [0.25, 0.5, 0.7071, 1.0, 1.4142, 2.0, 4.0]
    for layer in range(layers):
        mean = [[math.log(128) - 0.4 * f**1.2 * (1 + 0.1 * h / heads) for f in factors] for h in range(heads)]
        out.curves.append(
            {
                "step": (steps - 1) * 10,
                "layer": layer,
                "factors": factors,
                "scale": 0.125,
                "rows": 64,
                "mean": mean,
                "p10": [[v - 0.3 for v in m] for m in mean],
                "p90": [[min(v + 0.3, math.log(128)) for v in m] for m in mean],
                "keys": [[[0, 0.4], [7, 0.1], [3, 0.08], [90, 0.02], [11, 0.01]] for _ in range(heads)],
            }
        )
    cells = bytes(int(255 * math.exp(-abs(i - j) / 6)) for i in range(32) for j in range(32))
    out.maps.append(
        {
            "layer": 0,
            "head": 0,
            "step": 0,
            "rows": 32,
            "columns": 32,
            "n_query": 128,
            "n_key": 128,
            "peak": 0.3,
            "data": base64.b64encode(cells).decode(),
        }
    )
    for layer in range(layers):
        for step in (0, (steps - 1) * 10):
            shares = [[(0.5 if i == 0 else 0.5 / 31) if h % 2 else 1 / 32 for i in range(32)] for h in range(heads)]
            top = [[[0, 0.5 if h % 2 else 1 / 128], [7, 1 / 128]] for h in range(heads)]
            out.received.append(
                {
                    "step": step,
                    "layer": layer,
                    "n_key": 128,
                    "rows": [512] * heads,
                    "bins": shares,
                    "top": top,
                    "alike": [1 / 32] * 32,
                    "look": int(step > 0),
                }
            )
    for i, policy in enumerate(("1/sqrt(d)", "log n", "mixed")):
        for length in (64, 128, 256, 512):
            for run in range(2):
                drift = (0.25 - 0.1 * i) * max(0.0, math.log2(length / 128))
                out.studies.append(
                    {
                        "study": "scale-policy",
                        "policy": policy,
                        "length": length,
                        "seed": run,
                        "loss": 2.2 + drift + rng.gauss(0, 0.02),
                        "width": length ** (0.95 - 0.2 * i),
                        "training_length": 128,
                    }
                )
    return out


def _row(
    rng: random.Random, level: dict[tuple[int, int], float], layer: int, head: int, t: int, steps: int, sick: bool
) -> tuple[dict[str, float], float]:
    level[layer, head] = min(0.92, max(0.3, level[layer, head] + rng.gauss(0, 0.01)))
    ne, slope, sink, peak, bad, twin = (
        level[layer, head],
        0.55,
        0.08 + 0.1 * rng.random(),
        6 + 2 * rng.random(),
        0.0,
        0.2,
    )
    if sick and layer == 1 and head < 3:
        ne = 0.004
    if sick and layer == 2 and head < 2:
        ne = 0.9995
    if sick and layer == 3 and head == 4:
        sink = 0.7
    if sick and layer == 4 and head in (0, 5):
        peak = 10 + 130 * t / steps
    if sick and layer == 0 and head in (1, 2):
        twin = 0.999
    if sick and layer == 5 % max(1, len({k[0] for k in level})) and head == 0 and t == steps - 1:
        bad = 4.0
    if sick and layer == 3 and head == 0 and t > steps // 2:
        ne = max(0.05, ne - 0.55)
    h = ne * math.log(128)
    row = {
        "entropy": h,
        "normalized_entropy": ne,
        "normalized_entropy_p05": max(0.0, ne - 0.12),
        "normalized_entropy_p50": ne,
        "normalized_entropy_p95": min(1.0, ne + 0.1),
        "effective_width": math.exp(h),
        "max_score": peak,
        "log_partition": peak + 1.0,
        "score_variance": 1.0 + rng.random() * 0.1,
        "sink_first": sink,
        "sink_top": sink + 0.02,
        "sink_key": 0.0,
        "top_mass": 0.3,
        "visible": 128.0,
        "length": 128.0,
        "rows": 512.0,
        "single": 4.0,
        "nonfinite": bad,
        "twin": float(head ^ 1),
        "twin_similarity": twin,
        "scale": 0.125,
        "critical": 0.5 + 0.01 * layer + 0.001 * head,
        "rivals": 2.0,
    }
    return row, slope


def hostile() -> Record:
    """Names that try to leave the data block, and one of 10,000 characters."""
    out = record(2, 2, 3)
    out.sites = [Site(HOSTILE, HOSTILE, 2), Site("m" * 10_000, "sdpa", 2)]
    out.provenance = {"title": HOSTILE, "model": HOSTILE, HOSTILE: HOSTILE, "bad": math.nan, "lone": "\ud800"}
    out.coverage = {"text": HOSTILE, "short": HOSTILE, "missed": [{"name": HOSTILE, "reason": HOSTILE}]}
    out.losses = [{**r, "name": HOSTILE} for r in out.losses]
    out.studies = [{**r, "policy": HOSTILE + r["policy"]} for r in out.studies]
    return out
