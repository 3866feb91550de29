"""A small language model on bytes, trained under three scale policies and read at lengths it never saw."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita import scale
from partita.losses import linear_cross_entropy
from partita.monitor import Record, Watch
from partita_theory.experiments._language_model import Model, Plan
from partita_theory.experiments._training import descend, windows

PLAN = Plan("next", "bytes", 256, 128, 4, 4, length=128, batch=12, steps=400, rate=2e-3)


@dataclass(frozen=True)
class Sizes:
    """What fits into a few minutes on two cores; the time decides how many of the steps are made."""

    plan: Plan = PLAN
    lengths: tuple[int, ...] = (64, 128, 256, 512)
    every: int = 8


def policies(length: int) -> dict[str, scale.Policy]:
    """Three answers to: how sharp, given how many keys a query sees?"""
    return {
        "1/sqrt(d)": scale.InverseSqrt(),
        "log n": scale.LogLength(reference=length),
        "sqrt log n": scale.SqrtLogLength(reference=length),
    }


def loss_of(model: Model, batch: Tensor, start: int = 0) -> Tensor:
    """Nats per byte of a batch, from a place in each text on."""
    hidden = model(batch[:, :-1])[:, start:]
    return torch.as_tensor(linear_cross_entropy(hidden, model.embed.weight, batch[:, 1 + start :]))


def train_policies(text: str, sizes: Sizes, *, minutes: float, seed: int, progress: Any) -> Iterator[Record]:
    """One record per policy: the watched training, and the losses and widths at all lengths as study rows."""
    data = torch.tensor(list(text.encode("utf-8")), dtype=torch.uint8)
    cut = max(len(data) * 9 // 10, len(data) - 400_000)
    train, held_out = data[:cut], data[cut:]
    plan = sizes.plan
    named = policies(plan.length)
    steps = fitting(train, plan, 60.0 * minutes / len(named))
    for name, policy in named.items():
        torch.manual_seed(seed)  # the same start and the same batches for each policy
        model, source = Model(plan, policy), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        started, loss = time.perf_counter(), float("nan")

        def batch_loss(model: Model = model, source: torch.Generator = source) -> Tensor:
            return loss_of(model, windows(train, plan.batch, plan.length + 1, source).long())

        def rate(step: int) -> float:
            return plan.rate * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)

        with Watch(model, every=sizes.every, title=f"byte language model, scale {name}") as watched:
            for step, loss in enumerate(descend(optimizer, steps, batch_loss, rate)):
                if step % 5 == 0:
                    progress.tick(f"language model, {name}: step {step} of {steps}, loss {loss:.3f}")
        record = watched.finished()
        record.provenance["training_length"] = plan.length
        record.studies = evaluate(model, held_out, sizes, name, seed)
        progress.stage(
            f"language model, {name}: {steps} steps in {time.perf_counter() - started:.0f} s, loss {loss:.3f}, "
            f"watching cost {100 * (record.overhead['fraction'] or 0):.1f} %"
        )
        yield record


def fitting(data: Tensor, plan: Plan, budget: float) -> int:
    """How many steps fit into the budget: the same number, and so the same schedule, for each policy."""
    model, spent = Model(plan, scale.InverseSqrt()), []
    batch = windows(data, plan.batch, plan.length + 1, torch.Generator().manual_seed(0)).long()
    for _ in range(3):
        started = time.perf_counter()
        loss_of(model, batch).backward()
        spent.append(time.perf_counter() - started)
    # a tenth of the budget is left for the optimizer, for watching, and for reading at other lengths
    return max(min(plan.steps, 150), min(plan.steps, int(0.9 * budget / min(spent))))


@torch.no_grad()
def evaluate(model: Model, data: Tensor, sizes: Sizes, name: str, seed: int) -> list[dict[str, Any]]:
    """Held-out loss and mean width at each length; the same text for each policy."""
    rows = []
    model.eval()
    for length in sizes.lengths:
        batch = windows(data, max(2, 4096 // length), length + 1, torch.Generator().manual_seed(seed + 1)).long()
        with Watch(model) as watched:
            loss = loss_of(model, batch)
        width = [v for block in watched.record.blocks for v in block.column("effective_width") if v == v]
        rows.append(
            {
                "study": "scale-policy",
                "policy": name,
                "length": length,
                "training_length": sizes.plan.length,
                "seed": seed,
                "unit": "byte",
                # of the second half of each text: there the length makes the difference
                "loss": loss_of(model, batch, length // 2).item(),
                "loss_all": loss.item(),
                "width": sum(width) / len(width) if width else None,
            }
        )
    return rows
