"""What does a penalty on the entropy of attention do: to accuracy, to over-fitting, to the heads?

    loss = cross entropy + entropy_loss(model)          penalty of a layer = -weight * mean H / log n        (M-INF-5)

Two layers of four heads read handwritten digits as patches, from few and from many digits, until they know them by
heart. Expected: a positive weight makes attention broader and a negative one sharper; weights up to 0.3 leave held-out
accuracy where it is, within two points; a positive weight makes a model that has seen few digits over-fit less (a
smaller distance between held-out and training loss); under a positive weight the heads become alike, as they all look
everywhere, and under a negative one they look at different places (M-INF-6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from partita import Gibbs
from partita.lab.figure import Figure, Panel
from partita.nn import entropy_loss
from partita.theory.spectrum import head_diversity
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by, paired
from partita_studies.experiments._claims import above, alike, below, weigh
from partita_studies.experiments._digits import NEEDS, Split, split
from partita_studies.experiments._patches import PATCHES, Reader
from partita_studies.experiments._series import note, only, series

WIDTH, HEADS, LAYERS = 32, 4, 2
BATCH, RATE = 32, 3e-3
SMALL, SAME = 0.3, 0.02  # the largest weight that should leave accuracy alone, and how still that is


@torch.no_grad()
def read(model: Reader, data: Split, count: int) -> dict[str, float]:
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


def run(settings: Settings, seed: int) -> Iterable[Row]:
    data, count = split(seed), int(settings["train"])
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(seed)
    model = Reader(WIDTH, HEADS, LAYERS)
    for layer in range(LAYERS):
        model.attention(layer).attention_entropy_weight = float(settings["weight"])
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    for _ in range(int(settings["steps"])):
        rows = torch.randint(count, (BATCH,), generator=source)
        loss: Tensor = F.cross_entropy(model(data.x[rows]), data.y[rows])
        optimizer.zero_grad()
        (loss + entropy_loss(model)).backward()
        optimizer.step()
    yield {**settings, "seed": seed, **read(model, data, count)}


def judge(rows: list[Row]) -> Verdict:
    weights, counts = sorted({row["weight"] for row in rows}), sorted({row["train"] for row in rows})
    same = ("seed", "train")
    low, high = weights[0], weights[-1]
    small = [w for w in weights if w and abs(w) <= SMALL]
    few = only(rows, train=counts[0])
    claims = [
        above("a positive weight broadens", paired(rows, "entropy", "weight", high, 0.0, same)),
        below("a negative weight sharpens", paired(rows, "entropy", "weight", low, 0.0, same)),
        *(
            alike(f"{w:+g} leaves accuracy alone", paired(rows, "accuracy", "weight", w, 0.0, same), SAME)
            for w in small
        ),
        below("with few digits a positive weight over-fits less", paired(few, "gap", "weight", high, 0.0)),
        below("a positive weight makes heads alike", paired(rows, "diversity", "weight", high, 0.0, same)),
        above("a negative weight sets them apart", paired(rows, "diversity", "weight", low, 0.0, same)),
    ]
    lines = []
    for count in counts:
        own = only(rows, train=count)
        cells = {y: mean_by(own, y, "weight") for y in ("entropy", "accuracy", "gap", "diversity", "spread")}
        lines.append(
            f"{count} digits: "
            + ", ".join(f"{y} {' '.join(f'{cells[y][w,].mean:.3f}' for w in weights)}" for y in cells)
        )
    moved = ", ".join(f"{w:+g} {paired(rows, 'accuracy', 'weight', w, 0.0, same)}" for w in weights if w)
    evidence = (
        f"By weight {' '.join(f'{w:+g}' for w in weights)}: {'; '.join(lines)}. Accuracy against no weight: {moved}; "
        f"over-fitting with {counts[0]} digits, {high:+g} less none: {paired(few, 'gap', 'weight', high, 0.0)}."
    )
    return weigh(claims, evidence)


def figure(rows: list[Row]) -> Figure:
    counts = sorted({row["train"] for row in rows})
    shown = (
        ("Does it move entropy?", "entropy", "H / log n"),
        ("Does it cost accuracy?", "accuracy", "held-out accuracy"),
        ("Does it over-fit less?", "gap", "held-out less training loss, nats"),
        ("Do heads differ?", "diversity", "Jensen-Shannon divergence of the heads, nats"),
    )
    panels = [
        Panel(title, "weight", label, [series(only(rows, train=c), f"{c} digits", "weight", y) for c in counts])
        for title, y, label in shown
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="attention_entropy",
    question="What does a penalty on the entropy of attention do: to accuracy, to over-fitting, to the heads?",
    expected="A positive weight broadens and makes heads alike, a negative one sharpens and sets them apart; weights "
    "up to 0.3 leave accuracy alone; with few digits a positive weight over-fits less.",
    ids=("M-INF-5", "M-INF-6"),
    sizes={
        "tiny": Size(grid(weight=[-1.0, 0.0, 1.0], train=[32], steps=[4]), seeds=2, seconds=0.1),
        "quick": Size(
            grid(weight=[-1.0, -0.3, -0.03, 0.0, 0.03, 0.3, 1.0], train=[64, 512], steps=[60]), seeds=3, seconds=1.0
        ),
        "full": Size(
            grid(weight=[-1.0, -0.3, -0.03, 0.0, 0.03, 0.3, 1.0], train=[64, 512], steps=[300]), seeds=6, seconds=4.5
        ),
    },
    run=run,
    judge=judge,
    figure=figure,
    needs=NEEDS,
)
