"""How large queries and keys should start, with and without 1/sqrt(d).

One attention layer reads handwritten digits as sixteen patches. Its query and key weights start at Xavier's size times
a gain, or where `init_sharpness_` puts them; everything else is the same for all. s is the scale times the scores'
standard deviation, the moderate start the gain whose s is nearest to 1. Without 1/sqrt(d) the same start has a gain
smaller by d^(1/4), which is an identity and not tested here. `init_sharpness_` takes its inputs for independent numbers
of variance 1, which patches are not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.losses import cross_entropy
from partita.nn import init_sharpness_
from partita.scale import measure_sigma
from partita_theory.experiment import Settings, Size, experiment, grid
from partita_theory.experiments._digits import NEEDS, PATCHES, Reader, read_out, split
from partita_theory.experiments._training import descend
from partita_theory.figure import Line, Panel
from partita_theory.information import expected_init_entropy
from partita_theory.results import Row, columns, interval, lines, mean_by, only, paired
from partita_theory.sharpness import condensation_sharpness
from partita_theory.verdict import Verdict, above, alike, below, fact, weigh

WIDTH = 64
CLOSE = 0.2  # so far from what was asked for may a start be, as a share of it
NEAR = 0.1  # the law of entropy counts as true where its gap to log n is right to this many nats
SURE = 0.99  # a row with more on one key passes next to nothing on to its scores (M-DER-7)
SCALES = {"1/sqrt(d)": None, "1": 1.0}


def projection(model: Reader) -> Tensor:
    weight = model.attention().in_proj_weight
    assert weight is not None
    return weight


def measure(seed: int, scale: str, steps: int, gain: float | None = None, sigma: float | None = None) -> Iterable[Row]:
    data = split(seed)
    torch.manual_seed(seed)
    model = Reader(WIDTH, 1, 1, SCALES[scale])
    if sigma is not None:
        init_sharpness_(model, sigma=sigma, length=PATCHES)
    else:
        with torch.no_grad():
            projection(model)[: 2 * WIDTH] *= 1.0 if gain is None else gain
    attention = model.attention()
    with torch.no_grad():
        (x,) = model.inputs(data.x[:256])
        _, stats = attention(x, x, x, return_stats=True)
        query, key, _ = attention.project(x, x, x)
        sharpness = measure_sigma(query, key) * (WIDTH**-0.5 if SCALES[scale] is None else 1.0)
    (grad,) = torch.autograd.grad(torch.as_tensor(cross_entropy(model(data.x), data.y)), projection(model))
    # By the logarithm of the weights' size, so that large weights are not favoured: what a relative step would gain.
    pull = (grad[: 2 * WIDTH].norm() * projection(model)[: 2 * WIDTH].norm()).item()
    gone = ((stats.max_score - stats.log_partition).exp() > SURE).float().mean().item()
    start = {"entropy": stats.entropy.mean().item(), "sharpness": sharpness, "saturated": gone, "gradient": pull}
    if sharpness < float(condensation_sharpness(PATCHES)):  # beyond, there is no law
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # to go where it warns is the point here
            start["law"] = float(expected_init_entropy(PATCHES, sharpness))
    source = torch.Generator().manual_seed(seed)

    def loss() -> object:
        rows = torch.randint(len(data.x), (64,), generator=source)
        return cross_entropy(model(data.x[rows]), data.y[rows])

    losses = list(descend(torch.optim.Adam(model.parameters(), lr=1e-3), steps, loss))
    with torch.no_grad():
        final = F.cross_entropy(model(data.x), data.y).item()
    half = losses[steps // 2 - 5 : steps // 2]
    accuracy = read_out(model, data.x_test, data.y_test)[0]["accuracy"]
    yield {**start, "loss_half": sum(half) / max(1, len(half)), "loss": final, "accuracy": accuracy}


def judge(rows: list[Row]) -> Verdict:
    asked, rows = [row for row in rows if "sigma" in row], [row for row in rows if "gain" in row]
    limit = float(condensation_sharpness(PATCHES))
    sharp, loss, entropy, pull, dead = (
        mean_by(rows, column, "scale", "gain") for column in ("sharpness", "loss", "entropy", "gradient", "saturated")
    )
    law = mean_by([row for row in rows if "law" in row], "law", "scale", "gain")
    lawful = [key for key in law if sharp[key].mean <= 0.6 * limit]
    off = max((abs(entropy[key].mean - law[key].mean) for key in lawful), default=math.inf)
    claims = [fact("entropy at the start follows its law", off <= NEAR)]
    says = [f"entropy off its law by at most {off:.3f} nats below 0.6 of the limit"]
    if asked:
        share = interval(row["sharpness"] / row["sigma"] for row in asked)
        claims.append(alike("init_sharpness_ starts where it is asked to", share - 1, CLOSE))
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
        worse, faded = (paired(only(rows, scale=scale), y, "gain", last[1], fair[1]) for y in ("loss", "gradient"))
        claims += [
            above(f"scale {scale}: most rows of the sharpest start pass no gradient on", dead[last], 0.5),
            below(f"scale {scale}: its gradient by queries and keys is smaller", faded),
            above(f"scale {scale}: it learns worse", worse),
        ]
        says.append(
            f"scale {scale}: loss {loss[fair]} at gain {fair[1]:g} (sharpness {sharp[fair]:.2f}, entropy "
            f"{entropy[fair]:.2f}), {loss[last]} at gain {last[1]:g} (sharpness {sharp[last]:.1f}, entropy "
            f"{entropy[last]:.2f}, {dead[last]:.0%} of the rows saturated), paired difference {worse}; gradient by the "
            f"log of the weights {pull[last]:.3g} there, {pull[fair]:.3g} at the moderate start"
        )
    return weigh(claims, "; ".join(says) + ".")


def panels(rows: list[Row]) -> list[Panel]:
    asked, rows = [row for row in rows if "sigma" in row], [row for row in rows if "gain" in row]

    def drawn(y: str) -> list[Line]:
        return lines(rows, "gain", y, "scale", SCALES, "scale {}")

    laws = lines([row for row in rows if "law" in row], "gain", "law", "scale", SCALES, "scale {}", "theory")
    placed = lines(asked, "sigma", "sharpness", "scale", SCALES, "scale {}")
    placed += columns(asked, "sigma", {"as asked": "sigma"}, "theory")
    entropies = [*drawn("entropy"), *laws]
    return [
        Panel("Entropy at the start, and its law", "gain", "entropy (nats)", entropies, log_x=True),
        Panel("Saturated at the start", "gain", "share of rows with p > 0.99", drawn("saturated"), log_x=True),
        Panel("Loss after training", "gain", "training loss (nats)", drawn("loss"), log_x=True, log_y=True),
        Panel("Where does init_sharpness_ start?", "sigma asked for", "sharpness", placed, log_x=True, log_y=True),
    ]


def cells(gains: list[float], sigmas: list[float], steps: int) -> list[Settings]:
    scales = list(SCALES)
    return [*grid(scale=scales, gain=gains, steps=steps), *grid(scale=scales, sigma=sigmas, steps=steps)]


EXPERIMENT = experiment(
    __name__,
    question="How large should queries and keys start, with and without 1/sqrt(d), for attention to learn?",
    expected="Entropy starts at log n - s^2/2 until s nears sqrt(2 log n); far beyond, most rows are saturated, the "
    "gradient by queries and keys is smaller than where s is 1, and the loss after the same steps is higher; "
    "init_sharpness_ starts within a fifth of the s it is asked for.",
    ids=("M-INF-3", "M-INF-4", "M-SCL-1", "M-DER-7", "M-SCL-12"),
    tiny=Size(cells([0.5, 8.0], [1.0], 4), seeds=2, seconds=0.15),
    quick=Size(cells([0.5, 1.0, 2.0, 8.0], [0.5, 1.0], 100), seeds=4, seconds=1.2),
    full=Size(cells([0.25, 0.5, 1.0, 1.5, 4.0, 8.0, 16.0], [0.5, 1.0, 2.0], 300), seeds=6, seconds=3.5),
    needs=NEEDS,
)
