"""Trained at length 64 and read at up to 1024, under every scale policy: masked words and next words of a real text.

Where a policy has a free number it is set so that the policy agrees with 1/sqrt(d) at the training length; `kappa log n
/ d` has kappa = sqrt(d), and CalibratedLog takes sigma from the model that the same seed gives under 1/sqrt(d). In
training, a row of the masked task always sees 64 keys, where LogLength and SqrtLogLength are 1/sqrt(d): those three
share one trained model and differ in reading alone. PUBLISHED is masked accuracy in percent of RoFormer small, from
the blog archive's number 8823 (kexue.fm).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any

from partita import scale
from partita_theory.experiment import Size, experiment, geometric, grid
from partita_theory.experiments._language_model import LARGE, TEXT, TINY, Model, Plan, measured_sigma, read_at, train
from partita_theory.figure import Line, Panel
from partita_theory.results import Row, distinct, lines, mean_by, only, paired, said, slope_by_seed
from partita_theory.verdict import Verdict, settle

TRAINED = 64
USUAL, LOG, SQRT_LOG = "1/sqrt(d)", "LogLength", "SqrtLogLength"
POLICIES = (USUAL, "kappa log n / d", LOG, SQRT_LOG, "Mixed", "CalibratedLog", "ScalableSoftmax", "TargetEntropy")
PUBLISHED = {
    USUAL: {64: 43.27, 128: 36.53, 256: 23.02, 512: 15.12, 1024: 11.54},
    LOG: {64: 43.11, 128: 41.17, 256: 34.04, 512: 20.15, 1024: 13.58},
}
FRACTIONS = {"loss_tenth": 0.1, "loss_quarter": 0.25, "loss_half": 0.5, "loss_end": 1.0}


@functools.lru_cache(maxsize=8)
def usual(plan: Plan, seed: int) -> tuple[Model, list[float]]:
    """The model under 1/sqrt(d): a policy of its own, and what sigma is measured on."""
    return train(plan, None, seed)


def policy(name: str, plan: Plan, seed: int) -> scale.Policy | None:
    dim = plan.width // plan.heads
    if name == "CalibratedLog":
        sigma = measured_sigma(usual(plan, seed)[0], plan)
        return scale.CalibratedLog(reference=TRAINED, sigma=sigma)
    known: dict[str, scale.Policy | None] = {
        USUAL: None,
        "kappa log n / d": scale.KappaLog(dim**0.5),
        LOG: scale.LogLength(reference=TRAINED),
        SQRT_LOG: scale.SqrtLogLength(reference=TRAINED),
        "Mixed": scale.Mixed(),
        "ScalableSoftmax": scale.ScalableSoftmax(plan.heads, init=1 / math.log(TRAINED)),
        "TargetEntropy": scale.TargetEntropy(fraction=0.7),
    }
    return known[name]


def trained(name: str, plan: Plan, seed: int) -> tuple[Model, list[float]]:
    chosen = policy(name, plan, seed)
    if plan.task == "masked" and name in (USUAL, LOG, SQRT_LOG):  # the same numbers while n = 64
        model, losses = usual(plan, seed)
        model = copy.deepcopy(model)
        for layer in model.layers:
            layer.self_attn.scale = chosen  # type: ignore[union-attr]
        return model, losses
    return train(plan, chosen, seed)


def measure(seed: int, policy: str, longest: int, tokens: int, **shape: Any) -> Iterable[Row]:
    plan = Plan(**shape, length=TRAINED)
    model, losses = trained(policy, plan, seed)
    tenth = max(1, plan.steps // 10)
    speed = {}
    for label, fraction in FRACTIONS.items():  # the mean of the tenth of all steps that ends there
        window = losses[: max(1, round(fraction * plan.steps))][-tenth:]
        speed[label] = sum(window) / len(window)
    sigma = measured_sigma(model, plan)
    for n in geometric(TRAINED, longest, 2):
        row: Row = {"n": n, **read_at(model, plan, n, tokens), **speed, "sigma": sigma}
        if plan.task == "masked" and n in PUBLISHED.get(policy, {}):
            row["published"] = PUBLISHED[policy][n]
        yield row


def judge(rows: list[Row]) -> Verdict:
    masked = only(rows, task="masked")
    lengths = distinct(masked, "n")
    mean = mean_by(masked, "accuracy", "policy", "n")
    lead = {n: paired(only(masked, n=n), "accuracy", "policy", LOG, USUAL) for n in lengths}
    beyond = [n for n in lengths if n > TRAINED]
    better = [n for n in beyond if lead[n].low > 0]
    growth = {name: slope_by_seed(only(masked, policy=name), "n", "entropy") for name in _names(masked)}
    last = lengths[-1]
    best = max(growth, key=lambda name: mean[name, last].mean)

    def line(name: str) -> str:
        published = "/".join(f"{PUBLISHED[name][n]:.1f}" for n in lengths if n in PUBLISHED[name])
        return f"{name} {'/'.join(f'{mean[name, n]:.1f}' for n in lengths)} (published {published})"

    def each(found: list[Row], column: str, form: str) -> str:
        means = mean_by(found, column, "policy")
        return said({name: means[name] for name in _names(found)}, form)

    says = (
        f"masked accuracy at {'/'.join(map(str, lengths))}: {line(USUAL)}, {line(LOG)}; LogLength leads by "
        f"{said(lead, '{1} at {0}')}. Best at {last}: {best}, {mean[best, last]}. Entropy grows by "
        f"{said(growth, '{1:.2f} ({0})')} nats per nat of log n."
    )
    if following := only(rows, task="next", n=last):
        says += f" Next words, perplexity at {last}: {each(following, 'perplexity', '{1:.1f} ({0})')}."
    says += f" Loss after a quarter of the steps: {each(only(masked, n=TRAINED), 'loss_quarter', '{1:.2f} ({0})')}."
    falls = paired(only(masked, policy=USUAL), "accuracy", "n", last, TRAINED).high < 0
    flatter = growth[LOG].mean < growth[USUAL].mean
    whole = better == beyond and falls and lead[TRAINED].high > -1.0
    within = f"lengths {', '.join(map(str, better))} of {', '.join(map(str, beyond))}"
    return settle(says, holds=bool(better) and flatter, whole=whole, within=within)


def _names(rows: list[Row]) -> list[str]:
    found = {row["policy"] for row in rows}
    return [name for name in POLICIES if name in found]


def panels(rows: list[Row]) -> list[Panel]:
    masked, following = only(rows, task="masked"), only(rows, task="next")
    lengths = distinct(rows, "n")
    first = [name for name in (USUAL, LOG, "ScalableSoftmax", "TargetEntropy", "CalibratedLog") if name in _names(rows)]

    def drawn(found: list[Row], y: str) -> list[Line]:
        rest = [name for name in _names(found) if name not in first]
        return lines(found, "n", y, "policy", first) + lines(found, "n", y, "policy", rest, kind="context")

    published = [
        Line(f"{name}, published", [n for n in lengths if n in at], [at[n] for n in lengths if n in at], kind="theory")
        for name, at in PUBLISHED.items()
    ]
    accuracy, entropy = [*drawn(masked, "accuracy"), *published], drawn(masked, "normalised_entropy")
    found = [
        Panel("Masked words", "length", "accuracy (percent)", accuracy, log_x=True),
        Panel("Attention", "length", "entropy / log n", entropy, log_x=True),
    ]
    if following:
        surprise = drawn(following, "perplexity")
        found.append(Panel("Next word", "length", "perplexity", surprise, log_x=True, log_y=True))
    speed = [
        {**row, "at": 100 * f, "loss": row[key]} for key, f in FRACTIONS.items() for row in only(masked, n=TRAINED)
    ]
    shown = lines(speed, "at", "loss", "policy", first)
    return [*found, Panel("Learning", "percent of the steps", "training loss (nats)", shown)]


MIDDLE = {"words": 1000, "width": 64, "heads": 4, "layers": 2, "batch": 12, "rate": 5e-3}
QUICK = {"policy": (USUAL, LOG, "ScalableSoftmax"), "task": "masked", "text": TEXT, "longest": 512, "tokens": 8192}
WHOLE = {"policy": POLICIES, "text": TEXT, "longest": 1024, "tokens": 16384, **LARGE}
EXPERIMENT = experiment(
    __name__,
    question="Trained at length 64 and read at up to 1024: which scale keeps a small language model working?",
    expected="Accuracy falls with length under every policy; under LogLength less than under 1/sqrt(d), at no cost at "
    "the trained length.",
    ids=("M-SCL-0", "M-SCL-1", "M-SCL-2", "M-SCL-3", "M-SCL-7", "M-SCL-10", "M-SCL-14", "M-SCL-16", "M-LOSS-11"),
    tiny=Size(
        grid(policy=POLICIES, task="masked", text="reference", longest=128, tokens=256, steps=4, **TINY), 2, seconds=0.1
    ),
    quick=Size(grid(**QUICK, steps=500, **MIDDLE), seeds=3, seconds=6.0),
    full=Size(grid(task="masked", **WHOLE, steps=1500) + grid(task="next", **WHOLE, steps=1000), seeds=3, seconds=35.0),
)
