"""Train a small causal language model on one long text that is spread over several processes.

Run it with `torchrun --nproc-per-node 2 examples/context_parallel.py` (any number will do). Every process holds a part
of the positions, in zigzag order so that causal work is even; a DeviceMesh names the processes; keys and values go
round in blocks. The scale of the attention grows with the logarithm of the keys a row sees in the whole text, not in
its part. The text is Python's own language reference; a token is a character.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import partita
from partita.distributed import shard, traffic, zigzag
from partita.scale import LogLength

QUICK = "--quick" in sys.argv
LENGTH, STEPS, HEADS, WIDTH = (512, 5, 4, 64) if QUICK else (4096, 40, 4, 64)


class Model(nn.Module):
    """Embedding, one attention layer, one feed-forward layer, head."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(128, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, tokens: Tensor, positions: Tensor, group: object | None) -> tuple[Tensor, partita.Stats]:
        x = self.token(tokens) + self.place(positions % 64)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1) for t in self.qkv(x).chunk(3, -1))
        seen, stats = partita.attention(
            q, k, v, is_causal=True, scale=LogLength(reference=512), return_stats=True, group=group
        )
        x = x + self.out(seen.transpose(0, 1).flatten(-2))
        return self.head(x + self.mix(x)), stats


def main() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    group = zigzag(mesh["cp"])

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    text = "".join(text for _, text in sorted(topics.items()))
    codes = torch.tensor([min(ord(c), 127) for c in text[: LENGTH + 1]])
    tokens, target = (shard(t, group, 0) for t in (codes[:-1], codes[1:]))
    positions = shard(torch.arange(LENGTH), group, 0)
    say(f"{LENGTH} characters on {world} processes, {len(tokens)} on rank 0: positions {_runs(positions)}")

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    start = time.perf_counter()
    for step in range(STEPS):
        optimizer.zero_grad()
        with traffic() as sent:
            logits, stats = model(tokens, positions, group)
            part = F.cross_entropy(logits, target, reduction="sum") / LENGTH  # this rank's share of the mean
            part.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=mesh.get_group("cp"))  # parts add up
        if step == 0:
            say(_check(model, codes, part.detach(), mesh.get_group("cp")))
        optimizer.step()
        report = torch.stack([part.detach(), stats.entropy.exp().sum()])
        dist.all_reduce(report, group=mesh.get_group("cp"))
        if step % max(1, STEPS // 5) == 0 or step == STEPS - 1:
            width = float(report[1]) / (HEADS * LENGTH)
            say(f"step {step:>3}  loss {float(report[0]):.4f} nats   a row looks at {width:.0f} keys   "
                f"{sent.sent_bytes / 1024:.0f} KB sent by rank 0")  # fmt: skip
    say(f"{STEPS} steps in {time.perf_counter() - start:.1f} s")


def _check(model: Model, codes: Tensor, part: Tensor, group: dist.ProcessGroup) -> str:
    """How far loss and gradients are from those of one process with the whole text."""
    alone = Model()
    alone.load_state_dict(model.state_dict())
    logits, _ = alone(codes[:-1], torch.arange(LENGTH), None)
    whole = F.cross_entropy(logits, codes[1:])
    whole.backward()
    dist.all_reduce(part, group=group)
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    gaps = [float((a.grad - b.grad).abs().max()) for a, b in pairs]  # type: ignore[operator]
    return f"differs from one process: loss {abs(float(part - whole.detach())):.1e}, gradients {max(gaps):.1e}"


def _runs(positions: Tensor) -> str:
    """Positions as a few intervals."""
    breaks = [0, *((positions[1:] != positions[:-1] + 1).nonzero()[:, 0] + 1).tolist(), len(positions)]
    return ", ".join(f"{int(positions[a])} to {int(positions[b - 1])}" for a, b in itertools.pairwise(breaks))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # a wrapped model lies in a cycle and holds the group, whose threads have to end before Python does
    dist.destroy_process_group()
