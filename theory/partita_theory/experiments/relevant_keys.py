"""When is entropy invariance right? The best scale where a fixed number of keys matters, and where a fixed share does.

Scores have deviation 1, those of relevant keys are around a margin. Relevant values are 1, all have noise, the output
should be 1; the error is exact over the values and simulated over the scores:

    error(scale) = (1 - P)^2 + noise^2 sum p^2          P = the sum of p over the relevant keys

Both arms have 8 relevant keys of 256, and start at the scale that is best there. Longer rows are read with that scale
as it is, with that scale times log n / log 256, and with the one of `scale.BestFor`. `rivals` is what a model can show
without knowing which keys are relevant: those with at least 1/e of the weight of the best, at the scale of 256 keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

import partita
from partita import scale
from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, distinct, interval, lines, mean_by, note, only, said, slope_by_seed
from partita_theory.verdict import Claim, Verdict, above, alike, below, weigh

MARGIN, FEW, SHORT = 4.0, 8, 256
ARMS: dict[str, dict[str, float]] = {"number": {"relevant": FEW}, "share": {"share": FEW / SHORT}}
NOISES = [0.3, 1.0]
STEP = 1.1  # between neighbouring scales
SCALES = [0.5 * STEP**k for k in range(28)]  # 0.5 to 6.6
WAYS = ("constant", "log n", "BestFor")


def measure(seed: int, arm: str, noise: float, n: int, trials: int) -> Iterable[Row]:
    m = FEW if arm == "number" else n * FEW // SHORT
    source = torch.Generator().manual_seed(7919 * seed + n)
    scores = torch.randn(trials, n, generator=source, dtype=torch.float64)
    scores[:, :m] += MARGIN
    relevant = torch.zeros(n, 1, dtype=torch.float64)
    relevant[:m] = 1.0
    one = torch.ones(trials, 1, 1, dtype=torch.float64)

    def read(factor: float) -> tuple[float, float]:
        """Entropy and error of the rows at this scale."""
        p = partita.Gibbs(one, scores[..., None], scale=factor)
        twice = partita.Gibbs(one, scores[..., None], scale=2 * factor)
        squares = (twice.log_partition() - 2 * p.log_partition()).exp()  # sum p^2
        error = (1 - p.expectation(relevant)[..., 0]) ** 2 + noise**2 * squares
        return float(p.entropy().mean()), float(error.mean())

    policy = scale.BestFor(**ARMS[arm], margin=MARGIN, noise=noise)
    start = float(policy(SHORT, 1))
    scales = {"constant": start, "log n": start * math.log(n) / math.log(SHORT), "BestFor": float(policy(n, 1))}
    found = [(factor, *read(factor)) for factor in SCALES]
    best = min(found, key=lambda row: row[2])
    rivals = partita.Gibbs(one, scores[..., None], scale=start).gaps(torch.ones(1, dtype=torch.float64))
    yield {
        "n": n, "best": best[0], "entropy": best[1], "error": best[2], "promised": float(policy.entropy(n)),
        "rivals": float(rivals.double().mean()), **{way: read(scales[way])[1] / best[2] for way in WAYS},
    }  # fmt: skip


def judge(rows: list[Row]) -> Verdict:
    longest, claims, told = max(row["n"] for row in rows), list[Claim](), []
    grown = [{**row, "loglog": math.log(row["n"]), "rivals_log": math.log(row["rivals"])} for row in rows]
    for noise in distinct(rows, "noise"):
        own = {arm: only(grown, noise=noise, arm=arm) for arm in ARMS}
        at = f"at noise {noise}"
        power = {arm: slope_by_seed(own[arm], "loglog", "best", log_y=True) for arm in ARMS}
        slope = {arm: slope_by_seed(own[arm], "n", "entropy") for arm in ARMS}
        rivals = {arm: slope_by_seed(own[arm], "n", "rivals_log") for arm in ARMS}
        last = {arm: only(own[arm], n=longest) for arm in ARMS}
        worse = {
            arm: interval(row[right] - row[wrong] for row in last[arm])
            for arm, right, wrong in (("number", "log n", "constant"), ("share", "constant", "log n"))
        }
        cost = {arm: interval(row["BestFor"] for row in own[arm]) for arm in ARMS}
        claims += [
            above(f"with a fixed number the best scale grows at least like log n {at}", power["number"], 0.9),
            alike(f"and the best entropy stands still {at}", slope["number"], 0.3),
            below(f"with a fixed share the best scale hardly grows {at}", power["share"], 0.6),
            above(f"and the best entropy grows {at}", slope["share"], 0.5),
            below(f"log n errs less than a constant with a fixed number {at}", worse["number"]),
            below(f"a constant errs less than log n with a fixed share {at}", worse["share"]),
            *(below(f"BestFor errs as little as the best scale of a {arm} {at}", cost[arm], 1.05) for arm in ARMS),
            alike(f"rivals stand still with a fixed number {at}", rivals["number"], 0.1),
            above(f"and grow with a fixed share {at}", rivals["share"], 0.1),
        ]
        ends = {arm: mean_by(last[arm], "constant", "n")[longest] for arm in ARMS}
        logs = {arm: mean_by(last[arm], "log n", "n")[longest] for arm in ARMS}
        told.append(
            f"Noise {noise}: exponent of the best scale in log n {said(power, '{0} {1:.2f}')}; slope of the best "
            f"entropy against log n {said(slope, '{0} {1:.2f}')}; error at n = {longest} over the least: constant "
            f"{said(ends, '{0} {1:.2f}')}, log n {said(logs, '{0} {1:.2f}')}; BestFor anywhere "
            f"{said(cost, '{0} {1:.3f}')}; slope of log rivals {said(rivals, '{0} {1:.2f}')}."
        )
    return weigh(claims, " ".join(told))


def panels(rows: list[Row]) -> list[Panel]:
    named = [{**row, "line": f"{row['arm']}, noise {row['noise']}"} for row in rows]
    drawn = {y: lines(named, "n", y, "line") for y in ("best", "entropy", "rivals")}
    promised = lines(named, "n", "promised", "line", kind="theory")
    longest = only(rows, noise=max(row["noise"] for row in rows))
    cost = [
        line for arm in ARMS for way in WAYS[:2]
        for line in lines(only(longest, arm=arm), "n", way, "arm", label=f"{{}}, {way}")
    ]  # fmt: skip
    return [
        Panel("Which scale errs least?", "keys", "scale", drawn["best"], log_x=True),
        Panel("Which entropy is that?", "keys", "nats", [*drawn["entropy"], *promised], log_x=True),
        Panel("What does the other rule cost?", "keys", "error / least error", cost, log_x=True),
        Panel("Can it be seen without the answer?", "keys", "rivals", drawn["rivals"], log_x=True, log_y=True),
    ]


EXPERIMENT = experiment(
    __name__,
    question="When is entropy invariance right: with a fixed number of relevant keys, or with a fixed share of them?",
    expected="With a fixed number the best scale grows at least like log n and the best entropy stands still; with a "
    "fixed share the best scale hardly grows and the best entropy does. Each rule of the length errs less in its own "
    "arm, BestFor errs at most 5 % more than the best scale in both, and the keys that rival the best one stand still "
    "in number or grow with the share.",
    ids=("M-SCL-21", "M-SCL-0", "M-SCL-2", "M-COL-5"),
    tiny=Size(grid(arm=list(ARMS), noise=NOISES, n=[SHORT, 512], trials=32), seeds=2, seconds=0.1),
    quick=Size(grid(arm=list(ARMS), noise=NOISES, n=[SHORT, 1024, 4096], trials=128), seeds=3, seconds=0.5),
    full=Size(grid(arm=list(ARMS), noise=NOISES, n=[SHORT * 2**k for k in range(7)], trials=256), seeds=6, seconds=1.5),
    note=lambda rows: f"{note(rows)}; dashed: what scale.BestFor promises",
)
