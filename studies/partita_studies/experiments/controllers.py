"""Does a feedback rule find the scale with a wanted entropy, on fixed scores and while a model trains?

    printed       scale <- scale * target / H                     as in the notes
    reciprocal    scale <- scale * H / target                     the sign put right
    newton        scale <- scale + (H - target) / (scale * Var)   M-SCL-10; TemperatureController damps it

Expected: the printed rule runs away from every start on every score; the reciprocal one converges only where
scale^2 Var < 2 target (Gaussian scores, not a needle); Newton's converges on both when it starts on the flat side. In
training, TemperatureController holds each head at the target to a few hundredths of a nat, the printed rule drives the
scale to its limits, and holding the entropy costs little loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from partita import Stats
from partita.lab.figure import Figure, Line, Panel
from partita.losses import linear_cross_entropy
from partita.nn import MultiheadAttention, TemperatureController
from partita.theory.information import entropy
from partita.theory.sharpness import controller_multiplier, controller_step, entropy_scale
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, interval, paired
from partita_studies.experiments._series import note, only, series

RULES = ("printed", "reciprocal", "newton")
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


def run(settings: Settings, seed: int) -> Iterable[Row]:
    case, steps = str(settings["case"]), int(settings["steps"])
    for row in fixed(case, seed) if settings["loop"] == "fixed" else training(case, steps, seed):
        yield {**settings, **row}


def fixed(scores: str, seed: int) -> Iterable[Row]:
    """Each rule from 0.7 and 1.4 times the root, on one row of scores."""
    n = 1024
    s = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
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
                "seed": seed,
                "root": float(root),
                "multiplier": float(controller_multiplier(s, root, rule)),
                "miss": misses[-1],
                "best": min(misses),
                "scale_over_root": float(scale / root),
            }


def _text() -> Tensor:
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))[:200_000]
    return torch.tensor([min(ord(c), 127) for c in text])


def training(rule: str, steps: int, seed: int) -> Iterable[Row]:
    """A one-layer causal character model on English text; the rule steers the scale of its heads."""
    torch.manual_seed(seed)
    kinds = {"controller": TemperatureController, "printed": PrintedController}
    control = kinds[rule](HEADS, fraction=FRACTION) if rule in kinds else None
    layer = MultiheadAttention(DIM, HEADS, batch_first=True, scale=control, rotary=True)
    embed, norm, head = nn.Embedding(128, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 128, bias=False)
    learned = [p for m in (layer, embed, norm, head) for p in m.parameters()]
    optimiser = torch.optim.Adam(learned, lr=3e-3)
    text, source = _text(), torch.Generator().manual_seed(seed)
    for step in range(steps):
        first = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=source)
        batch = text[first + torch.arange(LENGTH + 1)]
        x = embed(batch[:, :-1])
        out, stats = layer(x, x, x, is_causal=True, return_stats=True)
        loss = torch.as_tensor(linear_cross_entropy(norm(x + out), head.weight, batch[:, 1:]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 5 == 4:
            seen = stats.visible >= 2
            share = (stats.entropy[seen] / stats.visible[seen].log()).mean()
            target = FRACTION * stats.visible[seen].log().mean()
            yield {
                "seed": seed,
                "step": step + 1,
                "loss": float(loss.detach()),
                "share": float(share.detach()),
                "miss": float((stats.entropy[seen].mean() - target).detach()),
                "scale": 1.0 if control is None else float(control.log_scale.exp().mean()),
            }


def judge(rows: list[Row]) -> Verdict:
    alone = only(rows, loop="fixed")
    found = {
        (rule, case): [row["miss"] <= FOUND for row in only(alone, rule=rule, case=case)]
        for rule in RULES
        for case in dict.fromkeys(row["case"] for row in alone)
    }
    share = {key: sum(hits) / len(hits) for key, hits in found.items()}
    trained = only(rows, loop="training")
    last = max(row["step"] for row in trained)
    late = [row for row in trained if row["step"] > 0.9 * last]
    held = {
        case: interval([_mean([r["miss"] for r in only(late, case=case, seed=s)]) for s in _seeds(late)])
        for case in ("controller", "printed", "none")
    }
    ends = [
        {"seed": s, "case": case, "loss": _mean([r["loss"] for r in only(late, case=case, seed=s)])}
        for s in _seeds(late)
        for case in held
    ]
    cost = paired(ends, "loss", "case", "controller", "none")
    says = (
        "Share of runs on fixed scores that end on the root: "
        + ", ".join(f"{rule} {case} {value:.0%}" for (rule, case), value in share.items())
        + f". Training ({last} steps): miss of the controller {held['controller']} nats, of the printed rule "
        f"{held['printed']}, of a fixed scale {held['none']}; loss with the controller minus without {cost}."
    )
    steered = abs(held["controller"].mean) <= HELD
    away = all(share["printed", case] == 0 for _, case in share) and abs(held["printed"].mean) > HELD
    newton = [case for rule, case in share if rule == "newton" and share[rule, case] == 1]
    if not (steered and away and newton):
        return Verdict("does not hold", says)
    if share.get(("reciprocal", "gaussian")) == 1 and not share.get(("reciprocal", "needle"), 0) and len(newton) > 1:
        return Verdict("holds", says)
    return Verdict("holds within", says, f"Newton's rule from both starts: {', '.join(newton)} scores; training")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _seeds(rows: list[Row]) -> list[int]:
    return sorted({row["seed"] for row in rows})


def figure(rows: list[Row]) -> Figure:
    trained, alone = only(rows, loop="training"), only(rows, loop="fixed")
    cases = ("controller", "printed", "none")
    steps = sorted({float(row["step"]) for row in trained})
    target = Line("target", [steps[0], steps[-1]], [FRACTION, FRACTION], kind="theory")
    panels = [
        Panel(
            "Entropy / log n while training",
            "step",
            "share",
            [*(series(only(trained, case=c), c, "step", "share") for c in cases), target],
        ),
        Panel(
            "Scale over 1/sqrt(dim)",
            "step",
            "scale",
            [series(only(trained, case=c), c, "step", "scale") for c in cases],
            log_y=True,
        ),
        Panel("Loss", "step", "nats", [series(only(trained, case=c), c, "step", "loss") for c in cases]),
        Panel(
            f"Fixed scores: final scale over the root after {STEPS} steps, by multiplier",
            "multiplier at the root",
            "scale / root",
            [
                Line(
                    rule,
                    [r["multiplier"] for r in only(alone, rule=rule)],
                    [r["scale_over_root"] for r in only(alone, rule=rule)],
                    kind="points",
                )
                for rule in RULES
            ],
            log_y=True,
        ),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


def _settings(steps: int) -> list[dict[str, object]]:
    return [
        *grid(loop=["fixed"], case=["gaussian", "needle"], steps=[0]),
        *grid(loop=["training"], case=["controller", "printed", "none"], steps=[steps]),
    ]


EXPERIMENT = Experiment(
    name="controllers",
    question="Does a feedback rule find the scale with a wanted entropy, on fixed scores and while a model trains?",
    expected="The printed rule always runs away; the reciprocal one converges for Gaussian scores, not for a needle; "
    "Newton's converges; TemperatureController holds the target in training at little cost.",
    ids=("M-SCL-10", "M-DER-4", "M-INF-8"),
    sizes={
        "tiny": Size(_settings(10), seeds=1, seconds=0.2),
        "quick": Size(_settings(300), seeds=3, seconds=1.0),
        "full": Size(_settings(3000), seeds=10, seconds=18.0),
    },
    run=run,
    judge=judge,
    figure=figure,
)
