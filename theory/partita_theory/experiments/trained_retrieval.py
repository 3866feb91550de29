"""Retrieval of one key, of a fixed number and of a fixed share of keys: trained at 256 keys, read at up to 4096.

A row holds n tokens; 4 classes have their relevant tokens in it, in a class's own direction, and all tokens have
noise. The relevant values of a class are one random vector, all values have noise, and a query that names the class
should give the vector. One attention layer learns the projections of queries and keys, as a softmax, or as a sigmoid
divided by its sum (`score.LogSigmoid`) with a learned sharpness and threshold, which starts at log n, or at 0: from
there, in a first run, 400 steps did not bring it to where it is needed. The softmax is read at 1/sqrt(d) and with
`LogLength`.

`rivals` is the column of `watch(critical=True)`: which task it was, seen from outside.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

import partita
from partita import scale
from partita.score import LogSigmoid
from partita_theory.experiment import Size, experiment, geometric, grid
from partita_theory.experiments._training import descend, warm
from partita_theory.figure import Panel
from partita_theory.results import Row, lines, mean_by, only, paired, slope_by_seed
from partita_theory.verdict import Claim, Verdict, above, alike, below, weigh

TRAINED, DIM, OUT, CLASSES = 256, 16, 8, 4
TASKS = {"one": (6.0, 0.3), "number": (4.0, 1.0), "share": (4.0, 1.0)}  # height of the direction, noise of the values
FEW, PART = 8, 32
SOFTMAX, LOG, SIGMOID, FROM_0 = "softmax", "softmax, log n", "sigmoid", "sigmoid from 0"
WAYS = (SOFTMAX, LOG, SIGMOID, FROM_0)
STARTS = {SIGMOID: math.log(TRAINED), FROM_0: 0.0}  # of the threshold


class Reader(nn.Module):
    """Vectors that a named class has in a row of tokens."""

    def __init__(self, threshold: float | None) -> None:
        super().__init__()
        self.query, self.key = nn.Embedding(CLASSES, DIM), nn.Linear(DIM, DIM, bias=False)
        self.score = None if threshold is None else LogSigmoid(DIM**-0.5, threshold, heads=1)
        self.policy: scale.Policy | None = None

    def forward(self, tokens: Tensor, values: Tensor) -> Tensor:  # (rows, 1, n, .) -> (rows, 1, CLASSES, OUT)
        query = self.query.weight.expand(len(tokens), 1, -1, -1)
        out = partita.attention(query, self.key(tokens), values, score=self.score, scale=self.policy)
        return torch.as_tensor(out)


def rows_of(task: str, n: int, rows: int, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, values, and what is to be read; the first m tokens belong to class 0, the next to class 1, and so on."""
    height, noise = TASKS[task]
    m = {"one": 1, "number": FEW}.get(task, n // PART)
    tokens = torch.randn(rows, 1, n, DIM, generator=source)
    values = noise * torch.randn(rows, 1, n, OUT, generator=source)
    answer = torch.randn(rows, 1, CLASSES, OUT, generator=source)
    for k in range(CLASSES):  # the direction of a class is a coordinate
        tokens[..., k * m : (k + 1) * m, k] += height
        values[..., k * m : (k + 1) * m, :] += answer[..., k : k + 1, :]
    return tokens, values, answer


@functools.lru_cache(maxsize=4)
def trained(task: str, threshold: float | None, seed: int, steps: int, batch: int) -> Reader:
    torch.manual_seed(seed)
    source, model = torch.Generator().manual_seed(seed), Reader(threshold)

    def loss() -> Tensor:
        tokens, values, answer = rows_of(task, TRAINED, batch, source)
        gap: Tensor = model(tokens, values) - answer
        return gap.square().mean()

    list(descend(torch.optim.Adam(model.parameters()), steps, loss, warm(2e-2, steps)))
    return model.eval()


@torch.no_grad()
def rivals(model: Reader, tokens: Tensor, values: Tensor) -> float:
    """The logarithm of the keys that rival the best one, as watch counts them: of inner products alone."""
    if model.score is not None:
        return math.nan
    with partita.watch(model, critical=True) as seen:
        model(tokens, values)
    (row,) = seen.frame(pandas=False)
    return math.log(row["rivals"])


def measure(seed: int, task: str, longest: int, steps: int, batch: int, rows: int) -> Iterable[Row]:
    for way in WAYS:
        model = trained(task, STARTS.get(way), seed, steps, batch)
        model.policy = scale.LogLength(TRAINED) if way == LOG else None
        for n in geometric(TRAINED, longest):
            tokens, values, answer = rows_of(task, n, rows, torch.Generator().manual_seed(1_000_003 * seed + n))
            with torch.no_grad():
                error = (model(tokens, values) - answer).square().mean().item()
            yield {"task": task, "way": way, "n": n, "error": error, "rivals": rivals(model, tokens, values)}


def judge(rows: list[Row]) -> Verdict:
    claims, told = list[Claim](), []
    longest = max(row["n"] for row in rows)
    for task in TASKS:
        own = only(rows, task=task)
        short, last = only(own, n=TRAINED), only(own, n=longest)
        base = mean_by(short, "error", "way")[SOFTMAX].mean
        gap = paired(short, "error", "way", SIGMOID, SOFTMAX)
        relative = type(gap)(gap.mean / base, gap.half / base, gap.count)
        grown = paired(last, "error", "way", LOG, SOFTMAX)
        rivals = slope_by_seed(only(own, way=SOFTMAX), "n", "rivals")
        if task == "one":
            claims.append(alike("one key is read as well by either", relative, 0.1))
        else:
            claims.append(below(f"a sigmoid reads a set better ({task})", relative))
        if task == "share":
            claims.append(above("with a share log n errs more than 1/sqrt(d) on longer rows", grown))
            claims.append(above("the rivals of a share grow", rivals, 0.1))
        else:
            claims.append(below(f"log n errs less than 1/sqrt(d) on longer rows ({task})", grown))
            claims.append(alike(f"its rivals stand still ({task})", rivals, 0.1))
        means = mean_by(own, "error", "n", "way")
        told.append(
            f"{task}: error at {TRAINED} and {longest} "
            + "; ".join(f"{w} {means[TRAINED, w]:.3f}, {means[longest, w]:.3f}" for w in WAYS)
            + f"; sigmoid less softmax at {TRAINED}, relative {relative}; slope of log rivals {rivals}"
        )
    return weigh(claims, ". ".join(told) + ".")


def panels(rows: list[Row]) -> list[Panel]:
    found = [
        Panel(
            f"Trained on {task}", "keys", "error", lines(only(rows, task=task), "n", "error", "way", WAYS), True, True
        )
        for task in TASKS
    ]
    seen = lines(only(rows, way=SOFTMAX), "n", "rivals", "task")
    return [*found, Panel("Which task is it? Seen by watch", "keys", "log rivals", seen, log_x=True)]


EXPERIMENT = experiment(
    __name__,
    question="Trained to read one key, a fixed number or a fixed share: which normaliser, which scale on longer rows?",
    expected="A sigmoid divided by its sum, its threshold started at log n, learns one key as well as a softmax, "
    "within a tenth of its error, and sets better. On longer rows LogLength errs less than 1/sqrt(d) for one key and a "
    "fixed number, more for a fixed share; the keys that rival the best stand still or grow accordingly.",
    ids=("M-SCL-21", "M-SCL-7", "M-GIB-7", "M-INF-8"),
    tiny=Size(grid(task=list(TASKS), longest=1024, steps=30, batch=8, rows=8), seeds=2, seconds=0.4),
    quick=Size(grid(task=list(TASKS), longest=1024, steps=100, batch=16, rows=64), seeds=2, seconds=2.5),
    full=Size(grid(task=list(TASKS), longest=4096, steps=400, batch=16, rows=64), seeds=5, seconds=12.0),
)
