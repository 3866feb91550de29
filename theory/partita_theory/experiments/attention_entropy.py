"""A penalty on the entropy of attention: two layers of four heads learn a few or many digits, as patches, by heart.

loss = cross entropy + entropy_loss(model)          penalty of a layer = -weight * mean H / log n        (M-INF-5)
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from partita import Gibbs
from partita.nn import entropy_loss
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._digits import NEEDS, PATCHES, Reader, Split, split
from partita_theory.experiments._training import descend
from partita_theory.figure import Panel
from partita_theory.results import Row, distinct, lines, mean_by, only, paired, said
from partita_theory.spectrum import head_diversity
from partita_theory.verdict import Verdict, above, alike, below, weigh

WIDTH, HEADS, LAYERS = 32, 4, 2
BATCH, RATE = 32, 3e-3
SMALL, SAME = 0.3, 0.02  # the largest weight that should leave accuracy alone, and how still that is


@torch.no_grad()
def read(model: Reader, data: Split, count: int) -> Row:
    """Held-out accuracy and loss, the loss on what was learnt, and what the heads look like on held-out digits."""
    model.eval()
    logits = model(data.x_test)
    inside = F.cross_entropy(model(data.x[:count]), data.y[:count]).item()
    outside = F.cross_entropy(logits, data.y_test).item()
    found = {"accuracy": (logits.argmax(-1) == data.y_test).float().mean().item(), "held_out": outside, "loss": inside}
    shares, apart = [], []
    for layer, x in enumerate(model.inputs(data.x_test[:128])):
        query, key, _ = model.attention(layer).project(x, x, x)
        law = Gibbs(query, key, scale=query.shape[-1] ** -0.5)
        shares.append(law.entropy().mean((0, 2)) / math.log(PATCHES))  # (heads,)
        apart.append(head_diversity(law.probs().transpose(1, 2)).divergence.mean())  # heads beside the keys
    heads = torch.stack(shares)
    spread = (heads.amax(1) - heads.amin(1)).mean().item()
    more = {"entropy": heads.mean().item(), "spread": spread, "diversity": torch.stack(apart).mean().item()}
    return {**found, "gap": outside - inside, **more}


def measure(seed: int, weight: float, train: int, steps: int) -> Iterable[Row]:
    data = split(seed)
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(seed)
    model = Reader(WIDTH, HEADS, LAYERS)
    for layer in range(LAYERS):
        model.attention(layer).attention_entropy_weight = weight

    def loss() -> Tensor:
        rows = torch.randint(train, (BATCH,), generator=source)
        return F.cross_entropy(model(data.x[rows]), data.y[rows]) + entropy_loss(model)

    list(descend(torch.optim.Adam(model.parameters(), RATE), steps, loss))
    yield read(model, data, train)


def judge(rows: list[Row]) -> Verdict:
    weights, counts, same = distinct(rows, "weight"), distinct(rows, "train"), ("seed", "train")
    low, high = weights[0], weights[-1]
    few = only(rows, train=counts[0])
    moved = {w: paired(rows, "accuracy", "weight", w, 0.0, same) for w in weights if w}
    over_fits = paired(few, "gap", "weight", high, 0.0)
    claims = [
        above("a positive weight broadens", paired(rows, "entropy", "weight", high, 0.0, same)),
        below("a negative weight sharpens", paired(rows, "entropy", "weight", low, 0.0, same)),
        *(alike(f"{w:+g} leaves accuracy alone", moved[w], SAME) for w in moved if abs(w) <= SMALL),
        below("with few digits a positive weight over-fits less", over_fits),
        below("a positive weight makes heads alike", paired(rows, "diversity", "weight", high, 0.0, same)),
        above("a negative weight sets them apart", paired(rows, "diversity", "weight", low, 0.0, same)),
    ]

    def cells(count: int, y: str) -> str:
        means = mean_by(only(rows, train=count), y, "weight")
        return f"{y} {' '.join(f'{means[w]:.3f}' for w in weights)}"

    table = {c: ", ".join(cells(c, y) for y in ("entropy", "accuracy", "gap", "diversity", "spread")) for c in counts}
    evidence = (
        f"By weight {' '.join(f'{w:+g}' for w in weights)}: {said(table, '{0} digits: {1}', '; ')}. Accuracy against "
        f"no weight: {said(moved, '{0:+g} {1}')}; over-fitting with {counts[0]} digits, {high:+g} less none: "
        f"{over_fits}."
    )
    return weigh(claims, evidence)


def panels(rows: list[Row]) -> list[Panel]:
    shown = (
        ("Does it move entropy?", "entropy", "H / log n"),
        ("Does it cost accuracy?", "accuracy", "held-out accuracy"),
        ("Does it over-fit less?", "gap", "held-out less training loss, nats"),
        ("Do heads differ?", "diversity", "Jensen-Shannon divergence of the heads, nats"),
    )
    return [Panel(t, "weight", label, lines(rows, "weight", y, "train", label="{} digits")) for t, y, label in shown]


WEIGHTS = [-1.0, -0.3, -0.03, 0.0, 0.03, 0.3, 1.0]
EXPERIMENT = experiment(
    __name__,
    question="What does a penalty on the entropy of attention do: to accuracy, to over-fitting, to the heads?",
    expected="A positive weight broadens and makes heads alike, a negative one sharpens and sets them apart; weights "
    "up to 0.3 leave accuracy alone; with few digits a positive weight over-fits less.",
    ids=("M-INF-5", "M-INF-6"),
    tiny=Size(grid(weight=[-1.0, 0.0, 1.0], train=32, steps=4), seeds=2, seconds=0.1),
    quick=Size(grid(weight=WEIGHTS, train=[64, 512], steps=60), seeds=3, seconds=1.0),
    full=Size(grid(weight=WEIGHTS, train=[64, 512], steps=300), seeds=6, seconds=4.5),
    needs=NEEDS,
)
