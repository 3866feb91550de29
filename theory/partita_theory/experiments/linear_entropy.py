"""Linear attention and entropy invariance: can a scale hold the entropy of weights that are inner products of features?

Random queries and keys, rows of n keys; H is the entropy of the weights <phi(q), phi(k_j)> divided by their sum.

    elu + 1        phi(x) = elu(a x) + 1: weights that grow at most linearly with the scores
    exp            phi(x) = exp(a x): weights that grow exponentially with each feature
    exp, log n     the same with a growing like log n, a at 64 keys
    softmax        scale a / sqrt(d), for comparison; and with LogLength

A key that stands out, a query of its own direction, says what the weights are good for: its share of the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

import partita
from partita.attn import linear_attention
from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, distinct, lines, only, said, slope_by_seed
from partita_theory.verdict import Verdict, above, below, weigh

DIM, SHORT = 16, 64
MAPS = ("elu + 1", "exp", "exp, log n", "softmax", "softmax, log n")
SHARPNESS = [1.0, 4.0, 16.0]  # of elu + 1, where only the signs remain; exp and softmax have a fourth of it


def read(kind: str, a: float, query: Tensor, key: Tensor) -> tuple[float, float]:
    """Mean entropy of the rows, and mean share of the first key."""
    n = key.shape[-2]
    grown = a * (math.log(n) / math.log(SHORT) if kind.endswith("log n") else 1.0)
    value = torch.zeros(*key.shape[:-1], 1, dtype=key.dtype)
    value[..., 0, :] = 1.0
    if kind.startswith("softmax"):
        out, stats = partita.attention(query, key, value, scale=grown / 4 * DIM**-0.5, return_stats=True)
        return float(stats.entropy.mean()), float(out.mean())
    elu = kind.startswith("elu")
    out, weights = linear_attention(
        query, key, value, return_stats=True,
        feature_map=lambda x: F.elu(grown * x) + 1 if elu else (grown / 4 * x).exp(),
    )  # fmt: skip
    return float(weights.entropy.mean()), float(out.mean())


def measure(seed: int, map: str, sharpness: float, n: list[int], rows: int) -> Iterable[Row]:
    for size in n:
        source = torch.Generator().manual_seed(7919 * seed + size)
        query = torch.randn(rows, 1, DIM, generator=source, dtype=torch.float64)
        key = torch.randn(rows, size, DIM, generator=source, dtype=torch.float64)
        entropy = read(map, sharpness, query, key)[0]
        key[:, :1] = 2 * query  # it points where the query points, twice as far
        yield {
            "map": map,
            "sharpness": sharpness,
            "n": size,
            "entropy": entropy,
            "share": read(map, sharpness, query, key)[1],
        }


def judge(rows: list[Row]) -> Verdict:
    slopes = {
        (kind, a): slope_by_seed(only(rows, map=kind, sharpness=a), "n", "entropy")
        for kind in MAPS
        for a in distinct(rows, "sharpness")
    }
    most = max(distinct(rows, "sharpness"))
    share = {kind: slope_by_seed(only(rows, map=kind, sharpness=most), "n", "share", log_y=True) for kind in MAPS}
    claims = [
        *(above(f"no scale holds elu + 1 ({a:g})", slopes["elu + 1", a], 0.95) for a in distinct(rows, "sharpness")),
        below("a map that sharpens dilutes less", slopes["exp", most], 0.9),
        above("and yet dilutes at a fixed scale", slopes["exp", most], 0.3),
        below("with a scale that grows like log n it stands nearly still", slopes["exp, log n", most], 0.3),
        below("the share of one key in elu + 1 falls like 1/n", share["elu + 1"], -0.9),
    ]
    told = {f"{kind} ({a:g})": each for (kind, a), each in slopes.items()}
    return weigh(
        claims,
        f"dH / dlog n: {said(told, '{0} {1:.2f}')}; d log share / dlog n at {most:g}: {said(share, '{0} {1:.2f}')}.",
    )


def panels(rows: list[Row]) -> list[Panel]:
    most = only(rows, sharpness=max(distinct(rows, "sharpness")))
    return [
        Panel("Does the entropy stand still?", "keys", "nats", lines(most, "n", "entropy", "map", MAPS), log_x=True),
        Panel("Who keeps one key?", "keys", "share", lines(most, "n", "share", "map", MAPS), log_x=True, log_y=True),
        Panel(
            "elu + 1 by sharpness", "keys", "nats", lines(only(rows, map="elu + 1"), "n", "entropy", "sharpness"), True
        ),
    ]


EXPERIMENT = experiment(
    __name__,
    question="Can a scale hold the entropy of linear attention as rows grow?",
    expected="Not with elu + 1: its entropy grows like log n and a key's share falls like 1/n at any scale. With "
    "features exp(a x) it grows less, and with a growing like log n it stands nearly still: a map that sharpens is "
    "needed.",
    ids=("M-SCL-0", "M-SCL-2", "M-GIB-1"),
    tiny=Size(grid(map=list(MAPS), sharpness=SHARPNESS, n=[[64, 128]], rows=4), seeds=2, seconds=0.05),
    quick=Size(grid(map=list(MAPS), sharpness=SHARPNESS, n=[[64, 256, 1024]], rows=32), seeds=3, seconds=0.2),
    full=Size(grid(map=list(MAPS), sharpness=SHARPNESS, n=[[64, 256, 1024, 4096]], rows=64), seeds=6, seconds=0.5),
)
