"""Why softmax? Normalisers at each one's best, for one relevant key and for a set, under noise, length and an outlier.

Scores have deviation 1, those of relevant keys are around a margin; relevant values are 1, all have noise, the output
should be 1. Every normaliser is a softmax of another score, which is how the engine serves it:

    p_j = w(s_j) / sum_k w(s_k) = softmax(log w)_j          error = (1 - P)^2 + noise^2 sum p^2, P over relevant keys

    softmax  w = e^(x s)      sigmoid  w = sigmoid(x (s - c))      ReLU  w = max(s - c, 0)      L1  w = |s|

x and c are tuned on draws set aside, at every length. The same x and c are then read with noise on the scores, with one
irrelevant key far above the relevant ones, and carried from the shortest rows to longer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, interval, lines, mean_by, only, paired, said
from partita_theory.verdict import Verdict, above, alike, below, weigh

TASKS = {"one": (6.0, 0.3), "number": (4.0, 1.0), "share": (4.0, 1.0)}  # margin, noise of the values
SETS = ("number", "share")
FEW, PART = 8, 32  # a number of relevant keys; a share is one in PART
JITTER, ABOVE = 0.5, 6.0  # noise on the scores; how far the outlier is above the margin
SHARP = [0.5 * 1.4**k for k in range(9)]  # 0.5 to 7.4
PLACES = [0.5 * k for k in range(14)]  # 0 to 6.5
Setting = tuple[float, float]

KINDS: dict[str, tuple[Callable[[Tensor, float, float], Tensor], list[Setting]]] = {
    "softmax": (lambda s, x, c: x * s, [(x, 0.0) for x in SHARP]),
    "sigmoid": (lambda s, x, c: logsigmoid(x * (s - c)), [(x, c) for x in SHARP for c in PLACES]),
    "ReLU": (lambda s, x, c: (s - c).clamp(min=1e-30).log(), [(1.0, c) for c in PLACES]),
    "L1": (lambda s, x, c: s.abs().log(), [(1.0, 0.0)]),
}


def error(kind: str, setting: Setting, scores: Tensor, m: int, noise: float) -> float:
    """Mean squared error of rows whose first m keys are relevant."""
    p = KINDS[kind][0](scores, *setting).softmax(-1)
    return float(((1 - p[:, :m].sum(-1)) ** 2 + noise**2 * p.square().sum(-1)).mean())


def measure(seed: int, task: str, n: list[int], trials: int) -> Iterable[Row]:
    (margin, noise), first = TASKS[task], dict[str, Setting]()
    for size in n:
        m = {"one": 1, "number": FEW}.get(task, size // PART)
        source = torch.Generator().manual_seed(104729 * seed + size)
        aside, scores, shake = torch.randn(3, trials, size, generator=source, dtype=torch.float64).unbind()
        aside[:, :m] += margin
        scores[:, :m] += margin
        far = scores.clone()
        far[:, -1] = margin + ABOVE
        for kind, (_, settings) in KINDS.items():
            best = min(settings, key=lambda setting: error(kind, setting, aside, m, noise))
            read = {"error": scores, "noisy": scores + JITTER * shake, "outlier": far}
            yield {
                "task": task, "n": size, "normaliser": kind, "sharpness": best[0], "threshold": best[1],
                **{name: error(kind, best, s, m, noise) for name, s in read.items()},
                "carried": error(kind, first.setdefault(kind, best), scores, m, noise),
            }  # fmt: skip


def judge(rows: list[Row]) -> Verdict:
    longest = max(row["n"] for row in rows)
    claims, told = [], []
    for task in TASKS:
        last = only(rows, task=task, n=longest)
        mean = {name: mean_by(last, name, "normaliser") for name in ("error", "noisy", "outlier", "carried")}
        base = mean["error"]["softmax"].mean
        gain = {name: paired(last, name, "normaliser", "sigmoid", "softmax") for name in mean}
        relative = interval((s["error"] - t["error"]) / base for s, t in zip(*_pair(last), strict=True))
        if task == "one":
            claims.append(alike("one key is read as well by either", relative, 0.1))
        else:
            spoilt = {
                name: interval(
                    (t[name] - t["error"]) - (s[name] - s["error"]) for s, t in zip(*_pair(last), strict=True)
                )
                for name in ("noisy", "outlier")
            }
            claims += [
                below(f"a sigmoid reads a set better ({task})", relative, -0.05),
                above(f"noise on the scores costs it less ({task})", spoilt["noisy"]),
                above(f"an outlier costs it less ({task})", spoilt["outlier"], 0.1),
            ]
        if task == "share":
            claims.append(below("carried to longer rows it reads a share better", gain["carried"]))
        claims.append(above(f"L1 errs most ({task})", paired(last, "error", "normaliser", "L1", "ReLU"), 0.1))
        told.append(
            f"{task}: "
            + "; ".join(f"{name} {said(each, '{0} {1:.3f}')}" for name, each in mean.items())
            + f"; sigmoid less softmax, relative {relative}"
        )
    return weigh(claims, f"Errors at n = {longest}, {'. '.join(told)}.")


def _pair(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of sigmoid and of softmax, by seed."""
    one, other = (sorted(only(rows, normaliser=kind), key=lambda row: row["seed"]) for kind in ("sigmoid", "softmax"))
    return one, other


def panels(rows: list[Row]) -> list[Panel]:
    found = [
        Panel(
            f"Relevant keys: {task}. Each at its best",
            "keys", "error", lines(only(rows, task=task), "n", "error", "normaliser", KINDS), log_x=True, log_y=True,
        )
        for task in TASKS
    ]  # fmt: skip
    hit = only(rows, task="number")
    drawn = [
        line
        for name in ("outlier", "noisy")
        for line in lines(hit, "n", name, "normaliser", ("softmax", "sigmoid"), f"{{}}, {name}")
    ]
    return [*found, Panel("A number, with an outlier or noisy scores", "keys", "error", drawn, log_x=True, log_y=True)]


EXPERIMENT = experiment(
    __name__,
    question="Why softmax: is another normaliser, at its best, better at reading one key or a set of keys?",
    expected="A sigmoid divided by its sum reads one key as well as a softmax, within a tenth of its error, and a set "
    "better, of a fixed number or a fixed share; there noise on the scores and an outlier cost it less, and a share of "
    "longer rows is read better with what was tuned at short ones. L1 errs most.",
    ids=("M-GIB-1", "M-GIB-7", "M-ROB-2", "M-SCL-21"),
    tiny=Size(grid(task=list(TASKS), n=[[64, 256]], trials=16), seeds=2, seconds=0.3),
    quick=Size(grid(task=list(TASKS), n=[[256, 1024]], trials=64), seeds=3, seconds=2.0),
    full=Size(grid(task=list(TASKS), n=[[256, 1024, 4096]], trials=96), seeds=5, seconds=8.0),
)
