"""Small runs to be watched, healthy ones and ones with a defect planted where we know it is.

Bytes of the language reference that comes with Python; two layers of four heads; a defect is made by writing to the
weights of a head (or to its scale) after every step, so that training cannot undo it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita import clip_loss, info_nce_loss, scale
from partita.monitor import Record, Watch
from partita_theory.experiments._training import reference, windows

__all__ = ["HEADS", "LAYERS", "RUNS", "Run", "record_of"]

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 2, 4, 48, 48, 12
EVERY_HEAD = tuple((layer, head) for layer in range(LAYERS) for head in range(HEADS))
Where = tuple[int, int]


class Attention(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.causal, self.gain, self.policy, self.norm = run.causal, run.gain, run.policy(), run.norm
        self.rotary, self.sink = run.rotary, run.sink  # sink: score that every query gives to the first key on top
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.broken: int | None = None  # a head whose queries are infinite for one call

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.norm:
            q, k = 4 * F.normalize(q, dim=-1), 2 * F.normalize(k, dim=-1)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        n = x.shape[1]
        visible = torch.arange(1, n + 1, dtype=x.dtype) if self.causal else torch.full((n,), float(n))
        q = self.policy.fold(q, visible) * self.gain
        if self.sink:  # a feature of its own, so that the score of key 0 rises and no other
            first = torch.zeros(n, 1)
            first[0] = self.sink
            q = torch.cat([q, torch.ones_like(q[..., :1])], -1)
            k = torch.cat([k, first.expand(*k.shape[:-1], 1)], -1)
        if self.broken is not None:
            q = q.clone()
            q[:, self.broken, -1] = math.inf
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=1.0)
        return self.out(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: pairs of features turn with the position, so scores depend on distances."""
    n, dim = x.shape[-2:]
    angle = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class OwnKernelAttention(nn.Module):
    """Attention that no seam sees: its weights are no softmax."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.relu(x @ x.mT) ** 2 + 1e-6
        return (weight / weight.sum(-1, keepdim=True)) @ x


class Model(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.rotary = run.rotary
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(1024, WIDTH)
        nn.init.normal_(self.place.weight, std=0.3)
        self.attention = nn.ModuleList(Attention(run) for _ in range(LAYERS))
        self.own_attention = OwnKernelAttention() if run.unseen else None
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS + 1))

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if not self.rotary:
            x = x + self.place(torch.arange(ids.shape[1]) % LENGTH)
        for norm, attention, mlp in zip(self.norm, self.attention, self.mlp, strict=False):
            x = x + attention(norm(x))
            x = x + mlp(x)
        if self.own_attention is not None:
            x = x + self.own_attention(x)
        return self.norm[-1](x)  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(ids) @ self.embed.weight.T


@dataclass(frozen=True)
class Run:
    """What is trained and what is broken in it. `planted`: the findings that must come, with their heads if they are
    about heads. `allowed`: findings that are true of such a run too, and count neither way."""

    planted: dict[str, tuple[Where, ...]] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    causal: bool = True
    norm: bool = False
    gain: float = 1.0
    policy: Callable[[], scale.Policy] = scale.InverseSqrt
    rate: float = 2e-3
    rotary: bool = False
    sink: float = 0.0
    unseen: bool = False
    read_at: tuple[int, ...] = ()  # trained unwatched, then read, frozen, at these lengths
    after: Callable[[Model, float], None] | None = None  # the defect, written after each step; told how much is over
    contrast: Callable[[Tensor, Tensor], Any] | None = None
    noise: float = 0.5  # between the two sides of a contrastive pair


# ---- defects: what is done to the weights after a step -------------------------------------------------------------


def _rows(model: Model, layer: int, head: int, part: int = 0) -> Tensor:
    """The weights that make the queries (0) or the keys (1) of a head."""
    size = WIDTH // HEADS
    attention = model.attention[layer]
    assert isinstance(attention, Attention)
    return attention.qkv.weight.data[part * WIDTH + head * size : part * WIDTH + (head + 1) * size]


def _dead(model: Model, over: float) -> None:
    _rows(model, 1, 2).zero_()


def _sharp(model: Model, over: float) -> None:
    """At half of the run one head's queries become long, and stay so."""
    if over >= 0.5:
        rows = _rows(model, 0, 1)
        rows *= 60.0 / rows.norm(dim=1).mean()


def _grow(model: Model, over: float) -> None:
    """The queries of every head grow by a factor of 200 over the run."""
    for layer, head in EVERY_HEAD:
        rows = _rows(model, layer, head)
        rows *= max(1.0, 0.6 * 200.0**over / rows.norm(dim=1).mean().item())


def _twins(model: Model, over: float) -> None:
    for part in (0, 1):
        _rows(model, 0, 3, part).copy_(_rows(model, 0, 0, part))


def _infinite(model: Model, over: float) -> None:
    attention = model.attention[1]
    assert isinstance(attention, Attention)
    attention.broken = 1 if 0.6 <= over < 0.65 else None


RUNS: dict[str, Run] = {
    "healthy: next byte": Run(),
    "healthy: masked bytes": Run(causal=False),
    "healthy: fast": Run(rate=6e-3),
    "healthy: slow": Run(rate=5e-4),
    "healthy: rotary": Run(rotary=True, rate=6e-3),
    "healthy: normalised query and key": Run(norm=True),
    "healthy: scale log n": Run(policy=lambda: scale.LogLength(reference=LENGTH)),
    "healthy: frozen": Run(read_at=(12, 24, LENGTH, LENGTH)),
    "healthy: contrast": Run(contrast=lambda a, b: info_nce_loss(a, b, temperature=0.2), noise=1.0),
    "too cold": Run({"HEAD_COLLAPSED": EVERY_HEAD}, ("LOGIT_GROWTH", "ENTROPY_DROP", "SINK_HEAD"), gain=200.0),
    "too hot": Run({"HEAD_UNIFORM": EVERY_HEAD}, gain=0.01),
    "a dead head": Run({"HEAD_UNIFORM": ((1, 2),)}, after=_dead),
    "a head collapses": Run({"HEAD_COLLAPSED": ((0, 1),), "ENTROPY_DROP": ((0, 1),)}, ("LOGIT_GROWTH",), after=_sharp),
    "scores blow up": Run({"LOGIT_GROWTH": EVERY_HEAD}, ("HEAD_COLLAPSED", "ENTROPY_DROP", "SINK_HEAD"), after=_grow),
    "two heads are one": Run({"DUPLICATE_HEADS": ((0, 0), (0, 3))}, after=_twins),
    "sinks": Run({"SINK_HEAD": EVERY_HEAD}, ("ENTROPY_DROP",), sink=4.5),
    "infinite scores": Run({"NONFINITE": ((1, 1),)}, after=_infinite),
    "beyond its length": Run({"LENGTH_DILUTION": ()}, ("HEAD_UNIFORM",), read_at=(24, LENGTH, 96, 192, 384)),
    "vectors not normalised": Run(
        {"NOT_NORMALISED": ()},
        ("MI_SATURATED", "EFFECTIVE_NEGATIVES_LOW"),
        contrast=lambda a, b: info_nce_loss(a, b, temperature=20.0, normalize=False),
        noise=1.0,
    ),
    "few negatives": Run(
        {"EFFECTIVE_NEGATIVES_LOW": ()},
        ("MI_SATURATED",),
        contrast=lambda a, b: info_nce_loss(a, b, temperature=0.004),
        noise=2.0,
    ),
    "an easy contrast": Run(
        {"MI_SATURATED": ()},
        ("EFFECTIVE_NEGATIVES_LOW",),
        contrast=lambda a, b: info_nce_loss(a, b, temperature=0.1),
        noise=0.02,
    ),
    "scale at its cap": Run(
        {"SCALE_AT_CAP": ()},
        ("MI_SATURATED", "EFFECTIVE_NEGATIVES_LOW"),
        contrast=lambda a, b: clip_loss(F.normalize(a, dim=-1), F.normalize(b, dim=-1), torch.tensor(100.0)),
        noise=1.0,
    ),
    "attention out of sight": Run({"COVERAGE": ()}, unseen=True),
}


# ---- running -------------------------------------------------------------------------------------------------------


def record_of(name: str, steps: int, seed: int) -> Record:
    """Train one of the runs and give what the monitor recorded."""
    run = RUNS[name]
    torch.manual_seed(seed)
    model = Model(run)
    if run.read_at:
        _train(model, run, steps, seed)
        model.eval()
        source = torch.Generator().manual_seed(seed + 1)
        with Watch(model) as watched, torch.no_grad():
            for length in run.read_at:
                model(windows(_DATA, 4, length, source))
        record = watched.finished()
        record.provenance["training_length"] = LENGTH
        return record
    with Watch(model, every=max(1, steps // 40)) as watched:
        _train(model, run, steps, seed)
    return watched.finished()


_DATA = torch.tensor(list(reference().encode()), dtype=torch.long)


def _train(model: Model, run: Run, steps: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = run.rate * min(1.0, (step + 1) / (0.1 * steps)) * (1 - 0.9 * step / steps)
        ids = windows(_DATA, *((BATCH, LENGTH + 1) if run.contrast is None else (64, 16)), source)
        loss = _of(model, run, ids, source)
        optimizer.zero_grad()
        if loss.isfinite():
            loss.backward()
            optimizer.step()
        if run.after is not None:
            with torch.no_grad():
                run.after(model, (step + 1) / steps)


def _of(model: Model, run: Run, ids: Tensor, source: torch.Generator) -> Tensor:
    if run.contrast is not None:
        mean = model(ids).mean(1)
        return torch.as_tensor(
            run.contrast(mean, mean + run.noise * mean.std() * torch.randn(mean.shape, generator=source))
        )
    if run.causal:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    seen, hidden = ids[:, 1:], torch.rand(ids[:, 1:].shape, generator=source) < 0.15
    logits = model(seen.masked_fill(hidden, 0))
    return F.cross_entropy(logits.flatten(0, 1), seen.masked_fill(~hidden, -100).flatten())
