"""The same contrastive training with the parameters sharded too: FSDP (`fully_shard`) and `group=` together.

Run it with `torchrun --nproc-per-node 2 examples/distributed_fsdp.py`. Like DDP, FSDP averages gradients over ranks, so
the loss goes through `for_ddp`. The images are the digits below, drawn and shifted: two views of each are a pair.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import partita
from partita.distributed import for_ddp

STEPS, BATCH = (5 if "--quick" in sys.argv else 60), 64
# Six rows of three bits each.
GLYPHS = ["755557", "262227", "717447", "717117", "557111", "747117", "747557", "711222", "757557", "757117"]


def digit(number: Tensor, shift: Tensor, noise: Tensor) -> Tensor:  # (n,), (n, 2), (n, 8, 8) -> (n, 64)
    """8 x 8 pictures of digits, moved by a pixel or two, with noise."""
    bits = torch.tensor([[[int(row) >> (2 - c) & 1 for c in range(3)] for row in glyph] for glyph in GLYPHS])
    pictures = torch.zeros(len(number), 8, 8)
    for i, (d, (down, right)) in enumerate(zip(number.tolist(), shift.tolist(), strict=True)):
        pictures[i, down : down + 6, right : right + 3] = bits[d].float()
    return (pictures + noise).flatten(1)


def views(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    number = torch.randint(10, (n,), generator=generator)

    def view() -> Tensor:
        return digit(
            number, torch.randint(3, (n, 2), generator=generator), 0.2 * torch.randn(n, 8, 8, generator=generator)
        )

    return view(), view()


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))


def main() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    mesh = init_device_mesh("cpu", (world,))
    model, alone = encoder(), encoder()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    generator = torch.Generator().manual_seed(1)
    if rank == 0:
        print(f"{world} processes; rank 0 holds {held} of {sum(p.numel() for p in alone.parameters())} parameters")
    for step in range(STEPS):
        first, second = views(generator, BATCH)
        mine = [side.tensor_split(world)[rank] for side in (first, second)]
        optimizer.zero_grad()
        loss = partita.nt_xent_loss(model(mine[0]), model(mine[1]), temperature=0.2, group=mesh)
        assert isinstance(loss, Tensor)
        for_ddp(loss, mesh).backward()
        if step == 0:
            whole = partita.nt_xent_loss(alone(first), alone(second), temperature=0.2)
            assert isinstance(whole, Tensor)
            whole.backward()
            gaps = [
                float((p.grad.full_tensor() - q.grad).abs().max())  # type: ignore[union-attr]
                for p, q in zip(model.parameters(), alone.parameters(), strict=True)
            ]
            if rank == 0:
                gap = abs(float((loss - whole).detach()))
                print(f"differs from one process: loss {gap:.1e}, gradients {max(gaps):.1e}")
        optimizer.step()
        if rank == 0 and (step % max(1, STEPS // 4) == 0 or step == STEPS - 1):
            print(f"step {step:>3}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
    time.sleep(0.1)  # DTensor's caches keep the group, and its threads have to be idle before Python ends
