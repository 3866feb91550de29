"""Train one sentence encoder on several processes, with the pairs of all of them as negatives.

Run it with `torchrun --nproc-per-node 2 examples/distributed_contrastive.py` (any number will do). The encoder is
replicated by DistributedDataParallel, every process reads its own part of a batch, and `group=` makes the keys of all
processes candidates: the loss and its gradients are those of one process with the whole batch, which is checked here
in the first step. The data are those of `sentence_pairs.py`.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from sentence_pairs import BATCH, Encoder, features, pairs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import partita
from partita.distributed import for_ddp, traffic
from partita.metrics import mean_reciprocal_rank, top_k_accuracy

STEPS = 10 if "--quick" in sys.argv else 120


class Towers(nn.Module):
    """One encoder for both sides, and a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(0.05)))

    def forward(self, left: list[str], right: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (self.encoder(features(side))["sentence_embedding"] for side in (left, right))
        return q, k, self.log_temperature.clone()


def loss_of(model: nn.Module, left: list[str], right: list[str], group: object | None) -> Tensor:
    q, k, log_temperature = model(left, right)
    loss = partita.info_nce_loss(q, k, log_temperature=log_temperature, symmetric=True, group=group)
    assert isinstance(loss, Tensor)
    return loss


def check(model: DistributedDataParallel, left: list[str], right: list[str], loss: Tensor) -> str:
    """How far this step is from the one a single process would make with the whole batch."""
    alone = Towers()
    alone.load_state_dict(model.module.state_dict())
    whole = loss_of(alone, left, right, None)
    whole.backward()
    given = dict(model.module.named_parameters())
    gaps = [float((p.grad - given[name].grad).abs().max()) for name, p in alone.named_parameters()]  # type: ignore[operator]
    return f"differs from one process: loss {abs(float(loss - whole.detach())):.1e}, gradients {max(gaps):.1e}"


def main() -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    torch.manual_seed(0)
    left, right, what = pairs()
    order = torch.randperm(len(left), generator=torch.Generator().manual_seed(0)).tolist()
    test, train = order[:512], order[512:]
    say(f"{len(left)} pairs: {what}; {world} processes, batches of {BATCH} in all")

    model = DistributedDataParallel(Towers())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    generator = torch.Generator().manual_seed(1)
    # Sizes need not be even: the first process takes a few pairs less.
    edges = [0, *(BATCH * (r + 1) // world - 3 for r in range(world - 1)), BATCH]
    start, sent_bytes = time.perf_counter(), 0
    for step in range(STEPS):
        picked = [train[i] for i in torch.randint(len(train), (BATCH,), generator=generator)]
        batch = [left[i] for i in picked], [right[i] for i in picked]
        mine = tuple(side[edges[rank] : edges[rank + 1]] for side in batch)
        optimizer.zero_grad()
        with traffic() as sent:
            loss = loss_of(model, mine[0], mine[1], group)
            for_ddp(loss, group).backward()  # DDP averages gradients; those of a global loss are to be summed
        sent_bytes = sent.sent_bytes
        if step == 0:
            say(check(model, batch[0], batch[1], loss.detach()))
        optimizer.step()
        if step % max(1, STEPS // 5) == 0 or step == STEPS - 1:
            say(f"step {step:>4}  loss {loss.item():.4f}  temperature {model.module.log_temperature.exp().item():.4f}")
    say(f"{STEPS} steps in {time.perf_counter() - start:.1f} s; {sent_bytes / 1024:.0f} KB sent by rank 0 in a step")

    share = [test[r] for r in range(rank, len(test), world)]  # each process judges its part of the held-out pairs
    with torch.no_grad():
        q, k, log_temperature = model.module([left[i] for i in share], [right[i] for i in share])
        _, stats = partita.info_nce_loss(q, k, log_temperature=log_temperature, return_stats=True, group=group)
    measured = torch.stack([top_k_accuracy(stats, 1), mean_reciprocal_rank(stats), torch.tensor(1.0)]) * len(share)
    dist.all_reduce(measured)
    recall, reciprocal = (measured[:2] / measured[2]).tolist()
    say(
        f"held-out pairs, among {len(test)} candidates: recall at 1 {recall:.3f}, mean reciprocal rank {reciprocal:.3f}"
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # a wrapped model lies in a cycle and holds the group, whose threads have to end before Python does
    dist.destroy_process_group()
