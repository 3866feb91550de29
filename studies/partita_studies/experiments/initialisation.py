"""How large should queries and keys start, with and without 1/sqrt(d), for attention to learn?

One attention layer reads handwritten digits as sixteen patches. Its query and key weights start at Xavier's size
times a gain, or where `init_sharpness_` puts them; everything else is the same for all.

Expected: entropy starts at log n - s^2 / 2, where s is the scale times the scores' standard deviation, until s nears
sqrt(2 log n). Far beyond that most rows pass no gradient on, the gradient by queries and keys is smaller than at a
moderate start (the gain whose s is nearest to 1), and the loss after the same number of steps is higher. Without
1/sqrt(d) the same start has a gain smaller by d^(1/4), which is an identity and not asked here. `init_sharpness_` takes
its inputs for independent numbers of variance 1; patches are not, so that where it says s the layer starts within a
fifth of s, under either scale.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.lab.figure import Figure, Line, Panel
from partita.losses import cross_entropy
from partita.nn import init_sharpness_
from partita.scale import measure_sigma
from partita.theory.information import expected_init_entropy
from partita.theory.sharpness import condensation_sharpness
from partita_studies.experiment import (
    Experiment,
    Interval,
    Row,
    Settings,
    Size,
    Verdict,
    grid,
    interval,
    mean_by,
    paired,
)
from partita_studies.experiments._claims import above, alike, below, fact, weigh
from partita_studies.experiments._digits import NEEDS, fit, read_out, split
from partita_studies.experiments._patches import PATCHES, Reader
from partita_studies.experiments._series import note, only, series

WIDTH = 64
CLOSE = 0.2  # so far from what was asked for may a start be, as a share of it
NEAR = 0.1  # the law of entropy counts as true where its gap to log n is right to this many nats
SURE = 0.99  # a row with more on one key passes next to nothing on to its scores (M-DER-7)
SCALES = {"1/sqrt(d)": None, "1": 1.0}


def made(settings: Settings) -> Reader:
    """One layer, one head; queries and keys at Xavier's size times a gain, or at a sharpness that is asked for."""
    model = Reader(WIDTH, 1, 1, SCALES[str(settings["scale"])])
    if "sigma" in settings:
        init_sharpness_(model, sigma=float(settings["sigma"]), length=PATCHES)
    else:
        with torch.no_grad():
            projection(model)[: 2 * WIDTH] *= float(settings["gain"])
    return model


def projection(model: Reader) -> Tensor:
    weight = model.attention().in_proj_weight
    assert weight is not None
    return weight


def run(settings: Settings, seed: int) -> Iterable[Row]:
    data = split(seed)
    torch.manual_seed(seed)
    model = made(settings)
    attention = model.attention()
    with torch.no_grad():
        (x,) = model.inputs(data.x[:256])
        _, stats = attention(x, x, x, return_stats=True)
        query, key, _ = attention.project(x, x, x)
        sharpness = measure_sigma(query, key) * (WIDTH**-0.5 if SCALES[str(settings["scale"])] is None else 1.0)
    loss = cross_entropy(model(data.x), data.y)
    assert isinstance(loss, Tensor)
    (grad,) = torch.autograd.grad(loss, projection(model))
    # By the logarithm of the weights' size, so that large weights are not favoured: what a relative step would gain.
    pull = (grad[: 2 * WIDTH].norm() * projection(model)[: 2 * WIDTH].norm()).item()
    gone = ((stats.max_score - stats.log_partition).exp() > SURE).float().mean().item()
    start = {"entropy": stats.entropy.mean().item(), "sharpness": sharpness, "saturated": gone, "gradient": pull}
    if sharpness < float(condensation_sharpness(PATCHES)):  # beyond, there is no law
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # to go where it warns is the point here
            start["law"] = float(expected_init_entropy(PATCHES, sharpness))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    source, steps = torch.Generator().manual_seed(seed), int(settings["steps"])
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(data.x), (64,), generator=source)
        losses += fit(model, data.x[rows], data.y[rows], cross_entropy, 1, optimizer)
    with torch.no_grad():
        final = F.cross_entropy(model(data.x), data.y).item()
    yield {
        **settings,
        "seed": seed,
        **start,
        "loss_half": sum(losses[steps // 2 - 5 : steps // 2]) / max(1, len(losses[steps // 2 - 5 : steps // 2])),
        "loss": final,
        "accuracy": read_out(model, data.x_test, data.y_test)[0]["accuracy"],
    }


def minus_one(found: Interval) -> Interval:
    return Interval(found.mean - 1, found.half, found.count)


def judge(rows: list[Row]) -> Verdict:
    asked, rows = [row for row in rows if "sigma" in row], [row for row in rows if "gain" in row]
    limit = float(condensation_sharpness(PATCHES))
    sharp, loss = mean_by(rows, "sharpness", "scale", "gain"), mean_by(rows, "loss", "scale", "gain")
    gap, pull = mean_by(rows, "entropy", "scale", "gain"), mean_by(rows, "gradient", "scale", "gain")
    dead = mean_by(rows, "saturated", "scale", "gain")
    law = mean_by([row for row in rows if "law" in row], "law", "scale", "gain")
    lawful = [key for key in law if sharp[key].mean <= 0.6 * limit]
    off = max((abs(gap[key].mean - law[key].mean) for key in lawful), default=math.inf)
    claims = [fact("entropy at the start follows its law", off <= NEAR)]
    says = [f"entropy off its law by at most {off:.3f} nats below 0.6 of the limit"]
    if asked:
        share = interval(row["sharpness"] / row["sigma"] for row in asked)
        claims.append(alike("init_sharpness_ starts where it is asked to", minus_one(share), CLOSE))
        best = min(mean_by(asked, "loss", "scale", "sigma").items(), key=lambda pair: pair[1].mean)
        says.append(
            f"init_sharpness_ starts at {share} of what it is asked for; lowest loss of those {best[1]} (scale "
            f"{best[0][0]}, sigma {best[0][1]:g})"
        )
    for scale in SCALES:
        keys = [key for key in sharp if key[0] == scale]
        # by how sharp they start, which is known before anything is trained, and not by how well they end
        fair = min(keys, key=lambda key: abs(math.log(sharp[key].mean)))
        last = max(keys, key=lambda key: sharp[key].mean)
        own = only(rows, scale=scale)
        worse, faded = (paired(own, value, "gain", last[1], fair[1]) for value in ("loss", "gradient"))
        claims += [
            above(f"scale {scale}: most rows of the sharpest start pass no gradient on", dead[last], 0.5),
            below(f"scale {scale}: its gradient by queries and keys is smaller", faded),
            above(f"scale {scale}: it learns worse", worse),
        ]
        says.append(
            f"scale {scale}: loss {loss[fair]} at gain {fair[1]:g} (sharpness {sharp[fair].mean:.2f}, entropy "
            f"{gap[fair].mean:.2f}), {loss[last]} at gain {last[1]:g} (sharpness {sharp[last].mean:.1f}, entropy "
            f"{gap[last].mean:.2f}, {dead[last].mean:.0%} of the rows saturated), paired difference {worse}; gradient "
            f"by the log of the weights {pull[last].mean:.3g} there, {pull[fair].mean:.3g} at the moderate start"
        )
    return weigh(claims, "; ".join(says) + ".")


def figure(rows: list[Row]) -> Figure:
    count, asked = note(rows), [row for row in rows if "sigma" in row]
    rows = [row for row in rows if "gain" in row]

    def lines(y: str) -> list[Line]:
        return [series(only(rows, scale=name), f"scale {name}", "gain", y) for name in SCALES]

    lawful = [row for row in rows if "law" in row]
    laws = [series(only(lawful, scale=name), f"scale {name}", "gain", "law", "theory") for name in SCALES]
    placed = [series(only(asked, scale=name), f"scale {name}", "sigma", "sharpness") for name in SCALES]
    placed += [series(asked, "as asked", "sigma", "sigma", "theory")]
    panels = [
        Panel("Entropy at the start, and its law", "gain", "entropy (nats)", [*lines("entropy"), *laws], log_x=True),
        Panel("Saturated at the start", "gain", "share of rows with p > 0.99", lines("saturated"), log_x=True),
        Panel("Loss after training", "gain", "training loss (nats)", lines("loss"), log_x=True, log_y=True),
        Panel("Where does init_sharpness_ start?", "sigma asked for", "sharpness", placed, log_x=True, log_y=True),
    ]
    return Figure(EXPERIMENT.question, panels, count)


def cells(gains: list[float], sigmas: list[float], steps: int) -> list[dict[str, Any]]:
    return [s for axis in ({"gain": gains}, {"sigma": sigmas}) for s in grid(scale=list(SCALES), **axis, steps=[steps])]


EXPERIMENT = Experiment(
    name="initialisation",
    question="How large should queries and keys start, with and without 1/sqrt(d), for attention to learn?",
    expected="Entropy starts at log n - s^2/2 until s nears sqrt(2 log n); far beyond, most rows are saturated, the "
    "gradient by queries and keys is smaller than where s is 1, and the loss after the same steps is higher; "
    "init_sharpness_ starts within a fifth of the s it is asked for.",
    ids=("M-INF-3", "M-INF-4", "M-SCL-1", "M-DER-7", "M-SCL-12"),
    sizes={
        "tiny": Size(cells([0.5, 8.0], [1.0], 4), seeds=2, seconds=0.15),
        "quick": Size(cells([0.5, 1.0, 2.0, 8.0], [0.5, 1.0], 100), seeds=4, seconds=1.2),
        "full": Size(cells([0.25, 0.5, 1.0, 1.5, 4.0, 8.0, 16.0], [0.5, 1.0, 2.0], 300), seeds=6, seconds=3.5),
    },
    run=run,
    judge=judge,
    figure=figure,
    needs=NEEDS,
)
