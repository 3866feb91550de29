"""Other normalisers next to a softmax: with length, with noise on the input, with an outlier.

One key stands out: its score is a fixed number of standard deviations above zero, the others are Gaussian. The value of
that key is 1 and that of all others 0, so that the output is the weight it gets (a sigmoid's weights need not add up
to 1: its output is divided by their sum here, which compares selection alone). The sink of a softmax has the score
log n, what n keys of score 0 have together; its output is not divided. The scale is 1.5 log n / margin. L1 sees no
signs. What can select can be misled: whether softmax or sigmoid moves less, and what noise does relative to the weight,
is left open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

import partita
from partita.attn import l1_attention, linear_attention, sigmoid_attention
from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, lines, mean_by, only, paired, said, slope_by_seed
from partita_theory.verdict import Verdict, above, below, weigh

DIM = 32
MARGIN = 6.0  # the score of the key that stands out, in standard deviations of the others
OUTLIER = -30.0  # the score of a key that is far away in the wrong direction
NOISE = 0.3  # standard deviation of noise on the entries of the keys, whose own is 1
KINDS = ("softmax", "sink", "sigmoid", "l1", "linear")


def share(kind: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # (rows, 1)
    """The weight of the key whose value is 1, of all weights."""
    n = key.shape[-2]
    scale = math.log(n) / MARGIN * 1.5  # scores of the others have standard deviation 1 before it
    if kind == "softmax":
        return partita.attention(query, key, value, scale=scale)
    if kind == "sink":
        return partita.attention(query, key, value, scale=scale, sink=torch.tensor(math.log(n), dtype=query.dtype))
    if kind == "sigmoid":
        out, stats = sigmoid_attention(query, key, value, scale=scale, return_stats=True)
        return out / stats.total[..., None]
    if kind == "l1":
        return torch.as_tensor(l1_attention(query, key, value, scale=scale))
    return torch.as_tensor(linear_attention(query * scale**0.5, key * scale**0.5, value))


def problem(n: int, rows: int, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of length 1, keys whose scores have variance 1, the first of them raised to the margin."""
    query = torch.randn(rows, 1, DIM, generator=source, dtype=torch.float64)
    query = query / query.norm(dim=-1, keepdim=True)
    key = torch.randn(rows, n, DIM, generator=source, dtype=torch.float64)
    key[:, :1] += (MARGIN - (key[:, :1] * query).sum(-1, keepdim=True)) * query
    value = torch.zeros(rows, n, 1, dtype=torch.float64)
    value[:, 0] = 1.0
    return query, key, value


def measure(seed: int, n: int, rows: int) -> Iterable[Row]:
    source = torch.Generator().manual_seed(1000 * seed + n)
    query, key, value = problem(n, rows, source)
    noisy = key + NOISE * torch.randn(key.shape, generator=source, dtype=torch.float64)
    far = key.clone()
    far[:, -1:] = OUTLIER * query
    for kind in KINDS:
        plain = share(kind, query, key, value)
        shaken = (share(kind, query, noisy, value) - plain).abs()
        yield {
            "normaliser": kind,
            "weight": float(plain.mean()),
            "log_weight": float(plain.clamp(min=1e-300).log().mean()),
            "moved": float(shaken.mean()),
            "relative": float((shaken / plain).mean()),
            "outlier": float((share(kind, query, far, value) - plain).abs().mean() / plain.mean()),
        }


def judge(rows: list[Row]) -> Verdict:
    longest = max(row["n"] for row in rows)
    last = only(rows, n=longest)
    slopes = {kind: slope_by_seed(only(rows, normaliser=kind), "n", "log_weight") for kind in KINDS}
    outlier = paired(last, "outlier", "normaliser", "l1", "softmax")
    noise = paired(last, "moved", "normaliser", "softmax", "l1")
    claims = [
        above("a softmax gives the key more than L1 does", paired(last, "weight", "normaliser", "softmax", "l1"), 0.1),
        above("a softmax keeps it as rows grow", slopes["softmax"], -0.1),
        above("with a sink it keeps it too", slopes["sink"], -0.1),
        below("the share of L1 falls like 1/n", slopes["l1"], -0.8),
        below("so does that of linear attention", slopes["linear"], -0.3),
        above("an outlier of the wrong sign takes from L1 and not from a softmax", outlier, 0.0),
        above("noise moves a softmax more than L1", noise, 0.0),
    ]
    held, shaken = (mean_by(last, column, "normaliser") for column in ("weight", "relative"))
    evidence = (
        f"At n = {longest} the key gets {said(held, '{0} {1:.3g}')}; d log weight / d log n: "
        f"{said(slopes, '{0} {1:.2f}')}; outlier, L1 less softmax: {outlier}; noise, softmax less L1: {noise}; noise "
        f"moves the weight, relative to it, by {said(shaken, '{0} {1:.1%}')}."
    )
    return weigh(claims, evidence)


def panels(rows: list[Row]) -> list[Panel]:
    shown = (
        ("weight", "Who keeps one key as rows grow?", "weight of the key"),
        ("relative", "Whom does noise on the keys move?", "mean relative change of the weight"),
        ("outlier", "Whom does one far key of the wrong sign move?", "mean relative change of the weight"),
    )
    drawn = {y: lines(rows, "n", y, "normaliser", KINDS) for y, _, _ in shown}
    return [Panel(title, "keys", label, drawn[y], log_x=True) for y, title, label in shown]


EXPERIMENT = experiment(
    __name__,
    question="How do other normalisers do beside a softmax: with length, with noise on the input, with an outlier?",
    expected="A softmax, with a sink or without, keeps one outstanding key at any length, L1 gives it a share of order "
    "1/n and is misled by an outlier of the wrong sign; noise moves a softmax more than L1.",
    ids=("M-GIB-1", "M-SCL-19", "M-ROB-2"),
    tiny=Size(grid(n=[16, 64, 256], rows=16), seeds=2, seconds=0.05),
    quick=Size(grid(n=[16, 64, 256, 1024, 4096], rows=64), seeds=4, seconds=1.0),
    full=Size(grid(n=[4**k for k in range(2, 8)], rows=64), seeds=8, seconds=4.0),
)
