"""The entropy of attention while a small model trains, over-fits, and is held back.

An encoder (words hidden, both sides seen) and a decoder (the next word, the past seen) on a little text, and an encoder
on the patches of a few handwritten digits (which digit?), trained for so long that they learn it by heart; plain, with
dropout, with weight decay, with an entropy penalty of either sign. Written down as training goes on: H / log n by
layer, of the sharpest and the broadest head, on what was held out.

The notes give no numbers, and such claims are empirical (M-INF-8): each is put to the test by itself. Patches of an
image say little each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partita.losses import linear_cross_entropy
from partita.nn import TransformerEncoderLayer, entropy_loss
from partita_theory.experiment import Size, experiment, grid
from partita_theory.experiments._digits import NEEDS, Reader, split
from partita_theory.experiments._language_model import Model, Plan, corpus, draw
from partita_theory.experiments._training import descend
from partita_theory.figure import Panel
from partita_theory.results import Interval, Row, interval, lines, only, paired, said
from partita_theory.verdict import Verdict, above, below, weigh

TASKS = {"encoder": "masked", "decoder": "next"}
MODELS = (*TASKS, "images")
TREATMENTS: dict[str, dict[str, float]] = {
    "plain": {},
    "dropout": {"dropout": 0.2},
    "decay": {"decay": 0.3},
    "broad": {"weight": 0.3},
    "sharp": {"weight": -0.3},
}
RATE = 3e-3
HEADS, LAYERS = 4, 2
DIGITS = 32  # images that stand for a block of text


class Batch(NamedTuple):
    """What a model sees, and what it should say."""

    seen: Tensor
    truth: Tensor


class Text:
    """Words of a little text; the text and what is held out are the same for every seed."""

    def __init__(self, kind: str, width: int, length: int, batch: int, count: int) -> None:
        self.plan = Plan(TASKS[kind], "reference", 512, width, HEADS, LAYERS, length, batch, 0, RATE)
        blocks, others = corpus(self.plan.text, self.plan.words)
        self.blocks = blocks[:count]
        self.held_out = self._windows(others, torch.Generator().manual_seed(1))
        self.model = Model(self.plan, None)

    def _windows(self, blocks: Tensor, source: torch.Generator) -> Batch:
        return Batch(*draw(blocks, self.plan.length, self.plan.batch, self.plan.task, source))

    def draw(self, source: torch.Generator) -> Batch:
        return self._windows(self.blocks, source)

    def loss(self, batch: Batch) -> Tensor:
        return torch.as_tensor(linear_cross_entropy(self.model(batch.seen), self.model.embed.weight, batch.truth))


class Images:
    """A few digits as patches; another seed, other digits."""

    def __init__(self, width: int, batch: int, count: int, seed: int) -> None:
        data = split(seed)
        self.data, self.batch = Batch(data.x[:count], data.y[:count]), batch
        self.held_out = Batch(data.x_test[:128], data.y_test[:128])
        self.model = Reader(width, HEADS, LAYERS)

    def draw(self, source: torch.Generator) -> Batch:
        which = torch.randint(len(self.data.seen), (self.batch,), generator=source)
        return Batch(self.data.seen[which], self.data.truth[which])

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(batch.seen), batch.truth)


Task = Text | Images  # a model, batches of what it learns by heart, and one that it does not see


def treat(model: nn.Module, treatment: dict[str, float]) -> None:
    """Dropout and entropy weight of every layer."""
    for layer in model.modules():
        if isinstance(layer, TransformerEncoderLayer):
            layer.self_attn.attention_entropy_weight = treatment.get("weight", 0.0)
            layer.self_attn.dropout = treatment.get("dropout", 0.0)
        elif isinstance(layer, nn.Dropout):
            layer.p = treatment.get("dropout", 0.0)


def shares(model: Model | Reader, seen: Tensor) -> list[Tensor]:
    """H / log n of each head, by layer, over the rows that have a choice."""
    heads = []
    for layer, x in zip(model.layers, model.inputs(seen), strict=True):
        rows: Any = layer.self_attn(x, x, x, is_causal=model.causal, return_stats=True)[1]  # type: ignore[operator]
        share = torch.where(rows.visible > 1, rows.entropy / rows.visible.clamp(min=2).log(), 0.0)
        heads.append(share.sum((0, 2)) / (rows.visible > 1).sum((0, 2)))
    return heads


@torch.no_grad()
def look(task: Task, batch: Batch) -> Iterable[Row]:
    """A row per layer: entropy on what is held out, loss there and on a batch that is learnt, both without dropout."""
    task.model.eval()
    loss, outside = task.loss(batch).item(), task.loss(task.held_out).item()
    for layer, heads in enumerate(shares(task.model, task.held_out.seen)):
        found = {"layer": layer, "entropy": heads.mean().item()}
        found |= {"lowest": heads.min().item(), "highest": heads.max().item()}
        yield {**found, "spread": found["highest"] - found["lowest"], "loss": loss, "held_out": outside}
    task.model.train()


def measure(
    seed: int, model: str, treatment: str, width: int, length: int, batch: int, steps: int, blocks: int
) -> Iterable[Row]:
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(seed)
    images = model == "images"
    task: Task = Images(width, batch, DIGITS * blocks, seed) if images else Text(model, width, length, batch, blocks)
    given = TREATMENTS[treatment]
    treat(task.model, given)
    optimizer = torch.optim.AdamW(task.model.parameters(), RATE, weight_decay=given.get("decay", 0.0))
    done = 0
    for step in sorted({0, *(round(steps * k / 8) for k in range(1, 9))}):
        list(descend(optimizer, step - done, lambda: task.loss(task.draw(source)) + entropy_loss(task.model)))
        done, state = step, source.get_state()
        for row in look(task, task.draw(source)):  # the batch of the next step
            yield {"step": step, **row}
        source.set_state(state)


def over_layers(rows: list[Row]) -> list[Row]:
    """One row per look at a model: its layers are no runs of their own."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in ("model", "treatment", "seed", "step")), []).append(row)
    return [{**g[0], "entropy": sum(r["entropy"] for r in g) / len(g)} for g in groups.values()]


def judge(rows: list[Row]) -> Verdict:
    last = max(row["step"] for row in rows)
    every, rows = only(rows, step=last), over_layers(rows)
    end = only(rows, step=last)
    keys = ("seed", "model")

    def against(name: str, column: str = "entropy") -> Interval:
        return paired(end, column, "treatment", name, "plain", same=keys)

    def fall(some: list[Row]) -> Interval:
        return paired([r for r in some if r["step"] in (0, last)], "entropy", "step", last, 0, same=keys)

    plain, final = only(rows, treatment="plain"), only(end, treatment="plain")
    deeper = paired(only(every, treatment="plain"), "entropy", "layer", 1, 0, same=keys)
    sides = paired(final, "entropy", "model", "encoder", "decoder")
    images = paired(final, "entropy", "model", "images", "encoder")
    over = interval(row["held_out"] - row["loss"] for row in final)
    claims = [
        below("entropy falls while a model trains", fall(plain)),
        above("dropout keeps it higher", against("dropout")),
        above("weight decay keeps it higher", against("decay")),
        above("a positive weight keeps it higher", against("broad")),
        below("a negative weight lowers it", against("sharp")),
        below("the deeper layer is the sharper one", deeper),
        below("a positive weight lowers the held-out loss", against("broad", "held_out")),
        above("patches are read more broadly than words", images),
    ]
    falls = said({kind: fall(only(plain, model=kind)) for kind in MODELS}, "{0} {1}")
    evidence = (
        f"H / log n at the end less at the start, plain: {falls}; against plain at the end: dropout "
        f"{against('dropout')}, decay {against('decay')}, positive weight {against('broad')}, negative "
        f"{against('sharp')}; second layer less first {deeper}; encoder less decoder {sides}; images less text "
        f"{images}; held-out loss less training loss, plain: {over}; held-out loss against plain: dropout "
        f"{against('dropout', 'held_out')}, decay {against('decay', 'held_out')}, positive weight "
        f"{against('broad', 'held_out')}, negative {against('sharp', 'held_out')}."
    )
    return weigh(claims, evidence)


def panels(rows: list[Row]) -> list[Panel]:
    means = [{**row, "gap": row["held_out"] - row["loss"]} for row in over_layers(rows)]
    drawn = {k: lines(only(means, model=k), "step", "entropy", "treatment", TREATMENTS) for k in MODELS}
    gaps = lines(only(means, treatment="plain"), "step", "gap", "model", MODELS)
    return [
        *(Panel(f"Does the entropy fall: {kind}?", "step", "H / log n", found) for kind, found in drawn.items()),
        Panel("Who over-fits, of the plain ones?", "step", "held-out less training loss, nats", gaps),
    ]


SHAPE = {"model": list(MODELS), "treatment": list(TREATMENTS)}
EXPERIMENT = experiment(
    __name__,
    question="What becomes of the entropy of attention while a small model trains, over-fits, and is held back?",
    expected="It falls; dropout, weight decay and a positive entropy weight keep it higher, a negative one lowers it; "
    "the deeper layer is sharper; a positive weight lowers the held-out loss; patches are read more broadly than "
    "words.",
    ids=("M-INF-5", "M-INF-8", "M-INF-3"),
    tiny=Size(grid(**SHAPE, width=16, length=12, batch=4, steps=3, blocks=1), seeds=1, seconds=0.1),
    quick=Size(grid(**SHAPE, width=32, length=32, batch=16, steps=60, blocks=1), seeds=2, seconds=1.5),
    full=Size(grid(**SHAPE, width=64, length=48, batch=16, steps=600, blocks=1), seeds=4, seconds=10.0),
    needs=NEEDS,
)
