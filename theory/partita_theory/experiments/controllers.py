"""Feedback rules that should find the scale with a wanted entropy, on fixed scores and while a model trains.

printed       scale <- scale * target / H                     as in the notes
reciprocal    scale <- scale * H / target                     the sign put right; converges if scale^2 Var < 2 target
newton        scale <- scale + (H - target) / (scale * Var)   M-SCL-10; TemperatureController damps it
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from partita import Stats
from partita.losses import linear_cross_entropy
from partita.nn import MultiheadAttention, TemperatureController
from partita_theory.experiment import Settings, Size, experiment, grid
from partita_theory.experiments._training import descend, reference, windows
from partita_theory.figure import Panel
from partita_theory.information import entropy
from partita_theory.results import Row, distinct, interval, lines, only, paired, points, said, theory
from partita_theory.sharpness import controller_multiplier, controller_step, entropy_scale
from partita_theory.verdict import Verdict, settle

RULES, CASES = ("printed", "reciprocal", "newton"), ("controller", "printed", "none")
STEPS = 40
FOUND, HELD = 1e-3, 0.1  # nats: the root of fixed scores, the mean over the last tenth of a training run
DIM, HEADS, LENGTH, BATCH = 32, 2, 64, 8
FRACTION = 0.5  # of log n: what each row should keep of its choice


class PrintedController(TemperatureController):
    """TemperatureController with the update of the notes in place of its own."""

    @torch.no_grad()
    def observe(self, stats: Stats) -> Tensor:
        before = self.log_scale.clone()
        miss = super().observe(stats)
        rows = stats.entropy.detach().movedim(-2, 0).reshape(HEADS, -1)
        goal = FRACTION * stats.visible.movedim(-2, 0).reshape(HEADS, -1).clamp(min=2).log().mean(-1)
        low, high = (math.log(x) for x in self.limits)
        step = goal.log() - rows.mean(-1).clamp(min=1e-12).log()
        self.log_scale.copy_((before + step).clamp(low, high))
        return miss


def measure(seed: int, loop: str, case: str, steps: int) -> Iterable[Row]:
    return fixed(case, seed) if loop == "fixed" else training(case, steps, seed)


def fixed(scores: str, seed: int) -> Iterable[Row]:
    """Each rule from 0.7 and 1.4 times the root, on one row of scores."""
    s = torch.randn(1024, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if scores == "needle":  # one key ahead of all others, which are alike
        s = 0.01 * s
        s[0] = 1.0
    target = {"gaussian": 4.0, "needle": 1.0}[scores]
    root = entropy_scale(s, target).scale
    for rule in RULES:
        for start in (0.7, 1.4):
            scale, misses = start * root, []
            for _ in range(STEPS):
                scale = controller_step(s, scale, target, rule)
                if not (1e-9 < float(scale) < 1e9):
                    scale = scale.nan_to_num(0.0, 1e9, 0.0).clamp(1e-9, 1e9)  # gone; entropies stay finite
                misses.append(abs(float(entropy(scale * s)) - target))
            yield {
                "rule": rule,
                "start": start,
                "root": float(root),
                "multiplier": float(controller_multiplier(s, root, rule)),
                "miss": misses[-1],
                "best": min(misses),
                "scale_over_root": float(scale / root),
            }


def training(rule: str, steps: int, seed: int) -> Iterable[Row]:
    """A one-layer causal character model on English text; the rule steers the scale of its heads."""
    torch.manual_seed(seed)
    kinds = {"controller": TemperatureController, "printed": PrintedController}
    control = kinds[rule](HEADS, fraction=FRACTION) if rule in kinds else None
    layer = MultiheadAttention(DIM, HEADS, batch_first=True, scale=control, rotary=True)
    embed, norm, head = nn.Embedding(128, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 128, bias=False)
    learned = [p for m in (layer, embed, norm, head) for p in m.parameters()]
    text = torch.tensor([min(ord(c), 127) for c in " ".join(reference().split())[:200_000]])
    source = torch.Generator().manual_seed(seed)
    stats: Any = None

    def loss() -> Any:
        nonlocal stats
        batch = windows(text, BATCH, LENGTH + 1, source)
        x = embed(batch[:, :-1])
        out, stats = layer(x, x, x, is_causal=True, return_stats=True)
        return linear_cross_entropy(norm(x + out), head.weight, batch[:, 1:])

    for step, value in enumerate(descend(torch.optim.Adam(learned, lr=3e-3), steps, loss), 1):
        if step % 5 == 0:
            seen = stats.visible >= 2
            most = stats.visible[seen].log()
            yield {
                "step": step,
                "loss": value,
                "share": float((stats.entropy[seen] / most).mean().detach()),
                "miss": float((stats.entropy[seen].mean() - FRACTION * most.mean()).detach()),
                "scale": 1.0 if control is None else float(control.log_scale.exp().mean()),
            }


def judge(rows: list[Row]) -> Verdict:
    alone, trained = only(rows, loop="fixed"), only(rows, loop="training")
    cases = dict.fromkeys(row["case"] for row in alone)
    share = {
        (rule, case): interval(row["miss"] <= FOUND for row in only(alone, rule=rule, case=case)).mean
        for rule in RULES
        for case in cases
    }
    last = max(row["step"] for row in trained)
    late = [row for row in trained if row["step"] > 0.9 * last]
    ends = [  # of each run, the means over its last tenth
        {"seed": s, "case": case, **{y: _mean(only(late, case=case, seed=s), y) for y in ("miss", "loss")}}
        for s in distinct(late, "seed")
        for case in CASES
    ]
    held = {case: interval(row["miss"] for row in only(ends, case=case)) for case in CASES}
    cost = paired(ends, "loss", "case", "controller", "none")
    says = (
        f"Share of runs on fixed scores that end on the root: {said(share, '{0[0]} {0[1]} {1:.0%}')}. Training ({last} "
        f"steps): miss of the controller {held['controller']} nats, of the printed rule {held['printed']}, of a fixed "
        f"scale {held['none']}; loss with the controller minus without {cost}."
    )
    steered = abs(held["controller"].mean) <= HELD
    away = all(share["printed", case] == 0 for case in cases) and abs(held["printed"].mean) > HELD
    newton = [case for case in cases if share["newton", case] == 1]
    gaussian_alone = share.get(("reciprocal", "gaussian")) == 1 and not share.get(("reciprocal", "needle"), 0)
    within = f"Newton's rule from both starts: {', '.join(newton)} scores; training"
    holds = steered and away and bool(newton)
    return settle(says, holds=holds, whole=gaussian_alone and len(newton) > 1, within=within)


def _mean(rows: list[Row], column: str) -> float:
    return float(sum(row[column] for row in rows) / len(rows))


def panels(rows: list[Row]) -> list[Panel]:
    trained, alone = only(rows, loop="training"), only(rows, loop="fixed")
    share, scale, loss = (lines(trained, "step", y, "case", CASES) for y in ("share", "scale", "loss"))
    target = theory("target", distinct(trained, "step"), FRACTION)
    ends = [points(only(alone, rule=rule), rule, "multiplier", "scale_over_root") for rule in RULES]
    title = f"Fixed scores: final scale over the root after {STEPS} steps, by multiplier"
    return [
        Panel("Entropy / log n while training", "step", "share", [*share, target]),
        Panel("Scale over 1/sqrt(dim)", "step", "scale", scale, log_y=True),
        Panel("Loss", "step", "nats", loss),
        Panel(title, "multiplier at the root", "scale / root", ends, log_y=True),
    ]


def _settings(steps: int) -> list[Settings]:
    return [
        *grid(loop="fixed", case=["gaussian", "needle"], steps=0),
        *grid(loop="training", case=CASES, steps=steps),
    ]


EXPERIMENT = experiment(
    __name__,
    question="Does a feedback rule find the scale with a wanted entropy, on fixed scores and while a model trains?",
    expected="The printed rule always runs away; the reciprocal one converges for Gaussian scores, not for a needle; "
    "Newton's converges; TemperatureController holds the target in training at little cost.",
    ids=("M-SCL-10", "M-DER-4", "M-INF-8"),
    tiny=Size(_settings(10), seeds=1, seconds=0.2),
    quick=Size(_settings(300), seeds=3, seconds=1.0),
    full=Size(_settings(3000), seeds=10, seconds=18.0),
)
