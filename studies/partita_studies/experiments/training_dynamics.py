"""What becomes of the entropy of attention while a small model trains, over-fits, and is held back?

An encoder (words hidden, both sides seen) and a decoder (the next word, the past seen) on a little text, trained for so
long that they learn it by heart; plain, with dropout, with weight decay, with an entropy penalty of either sign.
Written down as training goes on: H / log n by layer, and its spread over the heads, on held-out windows.

Expected, as the notes have it: entropy falls as a model trains; dropout and weight decay keep it higher; a positive
weight keeps attention broad and a negative one sharpens it (M-INF-5); the deeper layer is the sharper one; broad
attention over-fits less, so that a positive weight lowers the held-out loss. The notes give no numbers, and such claims
are empirical (M-INF-8): each is put to the test by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from partita.lab.figure import Figure, Panel
from partita.losses import linear_cross_entropy
from partita.nn import TransformerEncoderLayer, entropy_loss
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, interval, paired
from partita_studies.experiments._claims import above, below, weigh
from partita_studies.experiments._language_model import Model, Plan, corpus, draw
from partita_studies.experiments._series import note, only, series

TASKS = {"encoder": "masked", "decoder": "next"}
TREATMENTS: dict[str, dict[str, float]] = {
    "plain": {},
    "dropout": {"dropout": 0.2},
    "decay": {"decay": 0.3},
    "broad": {"weight": 0.3},
    "sharp": {"weight": -0.3},
}
RATE = 3e-3


def made(plan: Plan, treatment: dict[str, float]) -> Model:
    model = Model(plan, None)
    for layer in model.layers:
        assert isinstance(layer, TransformerEncoderLayer)
        layer.self_attn.attention_entropy_weight = treatment.get("weight", 0.0)
        for module in layer.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = treatment.get("dropout", 0.0)
        layer.self_attn.dropout = treatment.get("dropout", 0.0)
    return model


@torch.no_grad()
def read(model: Model, plan: Plan, blocks: Tensor) -> tuple[float, list[Tensor]]:
    """Loss on held-out windows, and H / log n of each head by layer."""
    was = model.training
    model.eval()
    source = torch.Generator().manual_seed(1)  # every model is asked the same
    seen, truth = draw(blocks, plan.length, plan.batch, plan.task, source)
    loss = linear_cross_entropy(model(seen), model.embed.weight, truth)
    assert isinstance(loss, Tensor)
    heads = []
    for layer, x in zip(model.layers, model.inputs(seen), strict=True):
        rows: Any = layer.self_attn(x, x, x, is_causal=model.causal, return_stats=True)[1]  # type: ignore[operator]
        share = torch.where(rows.visible > 1, rows.entropy / rows.visible.clamp(min=2).log(), 0.0)
        heads.append(share.sum((0, 2)) / (rows.visible > 1).sum((0, 2)))
    model.train(was)
    return loss.item(), heads


def run(settings: Settings, seed: int) -> Iterable[Row]:
    kind, name = str(settings["model"]), str(settings["treatment"])
    width, length, batch, steps = (int(settings[k]) for k in ("width", "length", "batch", "steps"))
    plan = Plan(TASKS[kind], "reference", 512, width, 4, 2, length, batch, steps, RATE)
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(seed)
    blocks, held_out = corpus(plan.text, plan.words)
    blocks = blocks[: int(settings["blocks"])]  # a little text, to be learnt by heart
    model = made(plan, TREATMENTS[name]).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=TREATMENTS[name].get("decay", 0.0))
    looks = {0, *(round(steps * k / 8) for k in range(1, 9))}
    for step in range(steps + 1):
        seen, truth = draw(blocks, length, batch, plan.task, source)
        loss = linear_cross_entropy(model(seen), model.embed.weight, truth)
        assert isinstance(loss, Tensor)
        if step in looks:
            penalty = float(entropy_loss(model).detach())
            outside, heads = read(model, plan, held_out)
            for layer, shares in enumerate(heads):
                yield {
                    "model": kind, "treatment": name, "seed": seed, "step": step, "layer": layer,
                    "entropy": shares.mean().item(), "spread": (shares.max() - shares.min()).item(),
                    "loss": loss.item(), "held_out": outside, "penalty": penalty,
                }  # fmt: skip
            loss = linear_cross_entropy(model(seen), model.embed.weight, truth)
            assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        (loss + entropy_loss(model)).backward()
        optimizer.step()


def over_layers(rows: list[Row]) -> list[Row]:
    """One row per look at a model: its layers are no runs of their own."""
    names = ("model", "treatment", "seed", "step")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return [{**g[0], "entropy": sum(r["entropy"] for r in g) / len(g)} for g in groups.values()]


def judge(rows: list[Row]) -> Verdict:
    last = max(row["step"] for row in rows)
    every, rows = only(rows, step=last), over_layers(rows)
    end = only(rows, step=last)
    keys = ("seed", "model")

    def against(name: str, column: str = "entropy") -> Any:
        return paired(end, column, "treatment", name, "plain", same=keys)

    plain = only(rows, treatment="plain")
    falls = paired([r for r in plain if r["step"] in (0, last)], "entropy", "step", last, 0, same=keys)
    deeper = paired(only(every, treatment="plain"), "entropy", "layer", 1, 0, same=("seed", "model"))
    models = paired(only(end, treatment="plain"), "entropy", "model", "encoder", "decoder", same=("seed",))
    over = interval(row["held_out"] - row["loss"] for row in only(end, treatment="plain"))
    claims = [
        below("entropy falls while a model trains", falls),
        above("dropout keeps it higher", against("dropout")),
        above("weight decay keeps it higher", against("decay")),
        above("a positive weight keeps it higher", against("broad")),
        below("a negative weight lowers it", against("sharp")),
        below("the deeper layer is the sharper one", deeper),
        below("a positive weight lowers the held-out loss", against("broad", "held_out")),
    ]
    evidence = (
        f"H / log n from start to end, plain: {falls}; against plain at the end: dropout {against('dropout')}, decay "
        f"{against('decay')}, positive weight {against('broad')}, negative {against('sharp')}; second layer less first "
        f"{deeper}; encoder less decoder {models}; held-out loss less training loss, plain: {over}; held-out loss "
        f"against plain: positive weight {against('broad', 'held_out')}, negative {against('sharp', 'held_out')}, "
        f"dropout {against('dropout', 'held_out')}."
    )
    return weigh(claims, evidence)


def figure(rows: list[Row]) -> Figure:
    panels = []
    for kind in TASKS:
        here = only(rows, model=kind)
        lines = [series(only(here, treatment=name), name, "step", "entropy") for name in TREATMENTS]
        panels.append(Panel(f"Does the entropy of the {kind} fall?", "step", "H / log n", lines))
        lines = [series(only(here, treatment=name), name, "step", "held_out") for name in TREATMENTS]
        panels.append(Panel(f"Who over-fits, of the {kind}s?", "step", "held-out loss, nats", lines))
    return Figure(EXPERIMENT.question, panels, note(rows))


SHAPE = {"model": list(TASKS), "treatment": list(TREATMENTS)}
EXPERIMENT = Experiment(
    name="training_dynamics",
    question="What becomes of the entropy of attention while a small model trains, over-fits, and is held back?",
    expected="It falls; dropout, weight decay and a positive entropy weight keep it higher, a negative one lowers it; "
    "the deeper layer is sharper; a positive weight lowers the held-out loss.",
    ids=("M-INF-5", "M-INF-8", "M-INF-3"),
    sizes={
        "tiny": Size(grid(**SHAPE, width=[16], length=[12], batch=[4], steps=[3], blocks=[1]), seeds=1, seconds=0.15),
        "quick": Size(
            grid(**SHAPE, width=[32], length=[32], batch=[16], steps=[100], blocks=[2]), seeds=2, seconds=3.0
        ),
        "full": Size(
            grid(**SHAPE, width=[64], length=[64], batch=[32], steps=[2000], blocks=[4]), seeds=5, seconds=120.0
        ),
    },
    run=run,
    judge=judge,
    figure=figure,
)
