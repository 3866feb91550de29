"""How large should queries and keys start, with and without 1/sqrt(d), for attention to learn?

One attention layer reads handwritten digits as sixteen patches. Its query and key weights start at Xavier's size
times a gain; everything else is the same for all.

Expected: entropy starts at log n - s^2 / 2, where s is the scale times the scores' standard deviation, until s nears
sqrt(2 log n). Far beyond that most rows pass no gradient on, the gradient by queries and keys is smaller than at a
moderate start (the gain whose s is nearest to 1), and the loss after the same number of steps is higher. Without
1/sqrt(d) the same start has a gain smaller by d^(1/4), which is an identity and not asked here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.lab.figure import Figure, Line, Panel
from partita.losses import cross_entropy
from partita.nn import TransformerEncoderLayer
from partita.scale import measure_sigma
from partita.theory.information import expected_init_entropy
from partita.theory.sharpness import condensation_sharpness
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by, paired
from partita_studies.experiments._claims import above, below, fact, weigh
from partita_studies.experiments._digits import NEEDS, fit, read_out, split
from partita_studies.experiments._series import note, only, series

PATCHES, WIDTH = 16, 64
NEAR = 0.1  # the law of entropy counts as true where its gap to log n is right to this many nats
SURE = 0.99  # a row with more on one key passes next to nothing on to its scores (M-DER-7)
SCALES = {"1/sqrt(d)": None, "1": 1.0}


class Reader(nn.Module):
    """Patches of 2 x 2 pixels with learned positions, one layer of attention with one head, a mean, ten classes."""

    def __init__(self, gain: float, scale: float | None) -> None:
        super().__init__()
        self.patch, self.position = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(PATCHES, WIDTH))
        self.layer = TransformerEncoderLayer(
            WIDTH, 1, WIDTH, 0.0, "gelu", batch_first=True, norm_first=True, scale=scale
        )
        self.classes = nn.Linear(WIDTH, 10)
        with torch.no_grad():
            self.projection[: 2 * WIDTH] *= gain

    @property
    def projection(self) -> Tensor:
        weight = self.layer.self_attn.in_proj_weight
        assert weight is not None
        return weight

    def tokens(self, x: Tensor) -> Tensor:  # (n, 64) -> (n, 16, WIDTH)
        patches = x.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, PATCHES, 4)
        out: Tensor = self.patch(patches) + self.position
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classes(self.layer(self.tokens(x)).mean(1))
        return out


def run(settings: Settings, seed: int) -> Iterable[Row]:
    data = split(seed)
    torch.manual_seed(seed)
    model = Reader(float(settings["gain"]), SCALES[str(settings["scale"])])
    attention = model.layer.self_attn
    with torch.no_grad():
        x = model.layer.norm1(model.tokens(data.x[:256]))  # type: ignore[operator]
        _, stats = attention(x, x, x, return_stats=True)
        query, key, _ = attention.project(x, x, x)
        sharpness = measure_sigma(query, key) * (WIDTH**-0.5 if SCALES[str(settings["scale"])] is None else 1.0)
    loss = cross_entropy(model(data.x), data.y)
    assert isinstance(loss, Tensor)
    (grad,) = torch.autograd.grad(loss, model.projection)
    # By the logarithm of the weights' size, so that large weights are not favoured: what a relative step would gain.
    pull = (grad[: 2 * WIDTH].norm() * model.projection[: 2 * WIDTH].norm()).item()
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


def judge(rows: list[Row]) -> Verdict:
    limit = float(condensation_sharpness(PATCHES))
    sharp, loss = mean_by(rows, "sharpness", "scale", "gain"), mean_by(rows, "loss", "scale", "gain")
    gap, pull = mean_by(rows, "entropy", "scale", "gain"), mean_by(rows, "gradient", "scale", "gain")
    dead = mean_by(rows, "saturated", "scale", "gain")
    law = mean_by([row for row in rows if "law" in row], "law", "scale", "gain")
    lawful = [key for key in law if sharp[key].mean <= 0.6 * limit]
    off = max((abs(gap[key].mean - law[key].mean) for key in lawful), default=math.inf)
    claims = [fact("entropy at the start follows its law", off <= NEAR)]
    says = [f"entropy off its law by at most {off:.3f} nats below 0.6 of the limit"]
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
    def lines(y: str) -> list[Line]:
        return [series(only(rows, scale=name), f"scale {name}", "gain", y) for name in SCALES]

    lawful = [row for row in rows if "law" in row]
    laws = [series(only(lawful, scale=name), f"scale {name}", "gain", "law", "theory") for name in SCALES]
    panels = [
        Panel("Entropy at the start, and its law", "gain", "entropy (nats)", [*lines("entropy"), *laws], log_x=True),
        Panel("Saturated at the start", "gain", "share of rows with p > 0.99", lines("saturated"), log_x=True),
        Panel("Loss after training", "gain", "training loss (nats)", lines("loss"), log_x=True, log_y=True),
        Panel("Held out", "gain", "accuracy", lines("accuracy"), log_x=True),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


_GAINS = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
EXPERIMENT = Experiment(
    name="initialisation",
    question="How large should queries and keys start, with and without 1/sqrt(d), for attention to learn?",
    expected="Entropy starts at log n - s^2/2 until s nears sqrt(2 log n); far beyond, most rows are saturated, the "
    "gradient by queries and keys is smaller than where s is 1, and the loss after the same steps is higher.",
    ids=("M-INF-3", "M-INF-4", "M-SCL-1", "M-DER-7", "M-SCL-12"),
    sizes={
        "tiny": Size(grid(scale=list(SCALES), gain=[0.5, 8.0], steps=[4]), seeds=2, seconds=0.15),
        "quick": Size(grid(scale=list(SCALES), gain=[0.25, 1.0, 2.0, 8.0], steps=[100]), seeds=5, seconds=1.0),
        "full": Size(grid(scale=list(SCALES), gain=[0.125, *_GAINS, 16.0], steps=[600]), seeds=10, seconds=6.0),
    },
    run=run,
    judge=judge,
    figure=figure,
    needs=NEEDS,
)
