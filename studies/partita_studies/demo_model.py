"""A small language model on bytes, trained under three scale policies and read at lengths it never saw."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita import scale
from partita.monitor import Record, Watch


@dataclass(frozen=True)
class Sizes:
    """What fits into a few minutes on two cores."""

    dim: int = 128
    heads: int = 4
    layers: int = 4
    length: int = 128
    batch: int = 12
    steps: int = 400  # at most; the time decides
    lengths: tuple[int, ...] = (64, 128, 256, 512)
    every: int = 8


class Attention(nn.Module):
    """Causal, rotary, with the scale folded into the query: torch's own kernel serves any policy."""

    def __init__(self, sizes: Sizes, policy: Any) -> None:
        super().__init__()
        self.heads, self.policy = sizes.heads, policy
        self.qkv = nn.Linear(sizes.dim, 3 * sizes.dim, bias=False)
        self.out = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = rotate(q), rotate(k)
        visible = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        q = self.policy.fold(q, visible)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        mixed: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return mixed


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: pairs of features turn with the position, so scores depend on distances."""
    n, dim = x.shape[-2:]
    angle = torch.arange(n, device=x.device)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Model(nn.Module):
    """Bytes in, bytes out."""

    def __init__(self, sizes: Sizes, policy: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes, policy) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    def __init__(self, sizes: Sizes, policy: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.dim), nn.LayerNorm(sizes.dim)
        self.attention = Attention(sizes, policy)
        self.mlp = nn.Sequential(nn.Linear(sizes.dim, 4 * sizes.dim), nn.GELU(), nn.Linear(4 * sizes.dim, sizes.dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def policies(length: int) -> dict[str, Any]:
    """Three answers to: how sharp, given how many keys a query sees?"""
    return {
        "1/sqrt(d)": scale.InverseSqrt(),
        "log n": scale.LogLength(reference=length),
        "sqrt log n": scale.SqrtLogLength(reference=length),
    }


def train_policies(text: str, sizes: Sizes, *, minutes: float, seed: int, progress: Any) -> Iterator[Record]:
    """One record per policy: the watched training, and the losses and widths at all lengths as study rows."""
    data = torch.tensor(list(text.encode("utf-8")), dtype=torch.uint8)
    cut = max(len(data) * 9 // 10, len(data) - 400_000)
    train, held_out = data[:cut], data[cut:]
    named = policies(sizes.length)
    steps = fitting(train, sizes, 60.0 * minutes / len(named))
    for name, policy in named.items():
        torch.manual_seed(seed)  # the same start and the same batches for each policy
        model = Model(sizes, policy)
        started = time.perf_counter()
        with Watch(model, every=sizes.every, title=f"byte language model, scale {name}") as watched:
            _train(model, train, sizes, steps, seed, progress, name)
        record = watched.finished()
        record.provenance["training_length"] = sizes.length
        record.studies = evaluate(model, held_out, sizes, name, seed)
        last = record.losses[-1]["loss"] if record.losses else float("nan")
        spent = time.perf_counter() - started
        progress.stage(
            f"language model, {name}: {steps} steps in {spent:.0f} s, loss {last:.3f}, watching cost "
            f"{100 * (record.overhead['fraction'] or 0):.1f} %"
        )
        yield record


def fitting(data: Tensor, sizes: Sizes, budget: float) -> int:
    """How many steps fit into the budget: the same number, and so the same schedule, for each policy."""
    model = Model(sizes, scale.InverseSqrt())
    spent = []
    for _ in range(3):
        started = time.perf_counter()
        batch = draw(data, sizes.batch, sizes.length + 1, torch.Generator().manual_seed(0))
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        spent.append(time.perf_counter() - started)
    # a tenth of the budget is left for the optimizer, for watching, and for reading at other lengths
    return max(min(sizes.steps, 150), min(sizes.steps, int(0.9 * budget / min(spent))))


def _train(model: Model, data: Tensor, sizes: Sizes, steps: int, seed: int, progress: Any, name: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        batch = draw(data, sizes.batch, sizes.length + 1, generator)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            progress.tick(f"language model, {name}: step {step} of {steps}, loss {loss.item():.3f}")


def draw(data: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(data) - length, (batch,), generator=generator).tolist()
    return torch.stack([data[s : s + length] for s in starts]).long()


@torch.no_grad()
def evaluate(model: Model, data: Tensor, sizes: Sizes, name: str, seed: int) -> list[dict[str, Any]]:
    """Held-out loss and mean width at each length; the same text for each policy."""
    rows = []
    model.eval()
    for length in sizes.lengths:
        batch = draw(data, max(2, 4096 // length), length + 1, torch.Generator().manual_seed(seed + 1))
        with Watch(model) as watched:
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
        # the second half of each text: there the length makes the difference
        late = F.cross_entropy(logits[:, length // 2 :].flatten(0, 1), batch[:, 1 + length // 2 :].flatten()).item()
        width = [v for block in watched.record.blocks for v in block.column("effective_width") if v == v]
        rows.append(
            {
                "study": "scale-policy",
                "policy": name,
                "length": length,
                "training_length": sizes.length,
                "seed": seed,
                "unit": "byte",
                "loss": late,
                "loss_all": loss,
                "width": sum(width) / len(width) if width else None,
            }
        )
    return rows
