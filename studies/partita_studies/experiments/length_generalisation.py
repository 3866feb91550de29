"""Trained at length 64 and read at up to 1024: which scale keeps a small language model working?

Masked words and next words of a real text, one model for each policy and seed. Where a policy has a free number it is
set so that the policy agrees with 1/sqrt(d) at the training length; `kappa log n / d` has kappa = sqrt(d), and
CalibratedLog takes sigma from the model that the same seed gives under 1/sqrt(d). In training, a row of the masked
task always sees 64 keys, where LogLength and SqrtLogLength are 1/sqrt(d): those three share one trained model and
differ in reading alone.

The published pattern of masked accuracy (percent at 64, 128, 256, 512, 1024) is 43.27 36.53 23.02 15.12 11.54 for
1/sqrt(d) and 43.11 41.17 34.04 20.15 13.58 for log n.

Expected: accuracy falls with length under every policy; under LogLength it falls less than under 1/sqrt(d) at every
length beyond the trained one, and is equal at that one. Entropy grows by less than log n under the policies that know
n.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable

from partita import scale
from partita.lab.figure import Figure, Line, Panel
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by, paired
from partita_studies.experiments._language_model import TEXT, Model, Plan, measured_sigma, read_at, train
from partita_studies.experiments._series import note, only, series, slope_by_seed

TRAINED = 64
USUAL, LOG = "1/sqrt(d)", "LogLength"
POLICIES = (
    USUAL,
    "kappa log n / d",
    LOG,
    "SqrtLogLength",
    "Mixed",
    "CalibratedLog",
    "ScalableSoftmax",
    "TargetEntropy",
)
PUBLISHED = {
    USUAL: dict(zip((64, 128, 256, 512, 1024), (43.27, 36.53, 23.02, 15.12, 11.54), strict=True)),
    LOG: dict(zip((64, 128, 256, 512, 1024), (43.11, 41.17, 34.04, 20.15, 13.58), strict=True)),
}
FRACTIONS = {"loss_tenth": 0.1, "loss_quarter": 0.25, "loss_half": 0.5, "loss_end": 1.0}
_PLAN = ("task", "text", "words", "width", "heads", "layers", "batch", "steps", "rate")


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
        "SqrtLogLength": scale.SqrtLogLength(reference=TRAINED),
        "Mixed": scale.Mixed(),
        "ScalableSoftmax": scale.ScalableSoftmax(plan.heads, init=1 / math.log(TRAINED)),
        "TargetEntropy": scale.TargetEntropy(fraction=0.7),
    }
    return known[name]


def trained(name: str, plan: Plan, seed: int) -> tuple[Model, list[float]]:
    chosen = policy(name, plan, seed)
    if plan.task == "masked" and name in (USUAL, LOG, "SqrtLogLength"):  # the same numbers while n = 64
        model, losses = usual(plan, seed)
        model = copy.deepcopy(model)
        for layer in model.layers:
            layer.self_attn.scale = chosen  # type: ignore[union-attr]
        return model, losses
    return train(plan, chosen, seed)


def run(settings: Settings, seed: int) -> Iterable[Row]:
    plan = Plan(**{name: settings[name] for name in _PLAN}, length=TRAINED)
    name = str(settings["policy"])
    model, losses = trained(name, plan, seed)
    tenth = max(1, plan.steps // 10)
    speed = {}
    for label, fraction in FRACTIONS.items():  # the mean of the tenth of all steps that ends there
        window = losses[: max(1, round(fraction * plan.steps))][-tenth:]
        speed[label] = sum(window) / len(window)
    sigma, n = measured_sigma(model, plan), TRAINED
    while n <= settings["longest"]:
        row: Row = {**settings, "seed": seed, "n": n, **read_at(model, plan, n, int(settings["tokens"])), **speed}
        row["sigma"] = sigma
        if plan.task == "masked" and n in PUBLISHED.get(name, {}):
            row["published"] = PUBLISHED[name][n]
        yield row
        n *= 2


def judge(rows: list[Row]) -> Verdict:
    masked = only(rows, task="masked")
    lengths = sorted({row["n"] for row in masked})
    mean = mean_by(masked, "accuracy", "policy", "n")
    lead = {n: paired(only(masked, n=n), "accuracy", "policy", LOG, USUAL) for n in lengths}
    beyond = [n for n in lengths if n > TRAINED]
    better = [n for n in beyond if lead[n].low > 0]
    growth = {name: slope_by_seed(only(masked, policy=name), "n", "entropy") for name in _names(masked)}
    last = lengths[-1]
    best = max(_names(masked), key=lambda name: mean[name, last].mean)

    def line(name: str) -> str:
        published = "/".join(f"{PUBLISHED[name][n]:.1f}" for n in lengths if n in PUBLISHED[name])
        return f"{name} {'/'.join(f'{mean[name, n].mean:.1f}' for n in lengths)} (published {published})"

    says = (
        f"masked accuracy at {'/'.join(map(str, lengths))}: {line(USUAL)}, {line(LOG)}; LogLength leads by "
        f"{', '.join(f'{lead[n]} at {n}' for n in lengths)}. Best at {last}: {best}, {mean[best, last]}. Entropy grows "
        f"by {', '.join(f'{value.mean:.2f} ({name})' for name, value in growth.items())} nats per nat of log n."
    )
    following = only(rows, task="next", n=last)
    if following:
        surprise = mean_by(following, "perplexity", "policy")
        says += f" Next words, perplexity at {last}: "
        says += ", ".join(f"{surprise[name,].mean:.1f} ({name})" for name in _names(following)) + "."
    speed = mean_by(only(masked, n=TRAINED), "loss_quarter", "policy")
    says += " Loss after a quarter of the steps: "
    says += ", ".join(f"{speed[name,].mean:.2f} ({name})" for name in _names(masked)) + "."
    falls = paired(only(masked, policy=USUAL), "accuracy", "n", last, TRAINED).high < 0
    flatter = growth[LOG].mean < growth[USUAL].mean
    if not better or not flatter:
        return Verdict("does not hold", says)
    if better == beyond and falls and lead[TRAINED].high > -1.0:
        return Verdict("holds", says)
    return Verdict("holds within", says, f"lengths {', '.join(map(str, better))} of {', '.join(map(str, beyond))}")


def _names(rows: list[Row]) -> list[str]:
    found = {row["policy"] for row in rows}
    return [name for name in POLICIES if name in found]


def figure(rows: list[Row]) -> Figure:
    masked, following = only(rows, task="masked"), only(rows, task="next")
    lengths = sorted({row["n"] for row in rows})
    first = [name for name in (USUAL, LOG, "ScalableSoftmax", "TargetEntropy", "CalibratedLog") if name in _names(rows)]

    def lines(found: list[Row], y: str) -> list[Line]:
        shown = [series(only(found, policy=name), name, "n", y) for name in first]
        rest = [
            series(only(found, policy=name), name, "n", y, "context") for name in _names(found) if name not in first
        ]
        return shown + rest

    published = [
        Line(f"{name}, published", [n for n in lengths if n in at], [at[n] for n in lengths if n in at], kind="theory")
        for name, at in PUBLISHED.items()
    ]
    panels = [
        Panel("Masked words", "length", "accuracy (percent)", [*lines(masked, "accuracy"), *published], log_x=True),
        Panel("Attention", "length", "entropy / log n", lines(masked, "normalised_entropy"), log_x=True),
    ]
    if following:
        panels.append(
            Panel("Next word", "length", "perplexity", lines(following, "perplexity"), log_x=True, log_y=True)
        )
    parts = [
        [{**row, "at": 100 * f, "loss": row[key]} for row in only(masked, n=TRAINED)] for key, f in FRACTIONS.items()
    ]
    speed = [row for part in parts for row in part]
    shown = [series(only(speed, policy=name), name, "at", "loss") for name in first]
    panels.append(Panel("Learning", "percent of the steps", "training loss (nats)", shown))
    return Figure(EXPERIMENT.question, panels, note(rows))


def _settings(
    task: str,
    names: Iterable[str],
    text: str,
    steps: int,
    rate: float,
    longest: int,
    tokens: int,
    *shape: int,
) -> list[Row]:
    words, width, heads, layers, batch = shape
    fixed = {"task": task, "text": text, "words": words, "width": width, "heads": heads, "layers": layers}
    fixed |= {"batch": batch, "steps": steps, "rate": rate, "longest": longest, "tokens": tokens}
    return grid(policy=list(names), **{key: [value] for key, value in fixed.items()})


EXPERIMENT = Experiment(
    name="length_generalisation",
    question="Trained at length 64 and read at up to 1024: which scale keeps a small language model working?",
    expected="Accuracy falls with length under every policy; under LogLength less than under 1/sqrt(d), at no cost at "
    "the trained length.",
    ids=("M-SCL-0", "M-SCL-1", "M-SCL-2", "M-SCL-3", "M-SCL-7", "M-SCL-10", "M-SCL-14", "M-SCL-16", "M-LOSS-11"),
    sizes={
        "tiny": Size(
            _settings("masked", POLICIES, "reference", 4, 2e-3, 128, 256, 300, 16, 2, 1, 2), seeds=2, seconds=0.1
        ),
        "quick": Size(
            _settings("masked", (USUAL, LOG, "ScalableSoftmax"), TEXT, 500, 5e-3, 512, 8192, 1000, 64, 4, 2, 12),
            seeds=3,
            seconds=6.0,
        ),
        "full": Size(
            [
                *_settings("masked", POLICIES, TEXT, 1500, 2e-3, 1024, 16384, 2000, 96, 4, 2, 16),
                *_settings("next", POLICIES, TEXT, 1000, 2e-3, 1024, 16384, 2000, 96, 4, 2, 16),
            ],
            seeds=3,
            seconds=35.0,
        ),
    },
    run=run,
    judge=judge,
    figure=figure,
)
