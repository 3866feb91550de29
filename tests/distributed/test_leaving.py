"""A group that is destroyed is gone: nothing of ours keeps it, and its threads do not outlive it.

torch's gloo threads drop tensors under Python's lock. One that is still busy when the interpreter ends aborts the
process, after all work was done; seen about once in eight runs of a busy machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import gc, os, sys, torch
import torch.distributed as dist
import partita
from partita.distributed import for_ddp

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)

def names():
    tasks = [f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task")]
    return [name for task in tasks if "gloo" in (name := open(task).read().strip())]

def work():
    group = dist.group.WORLD
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    x = model(torch.randn(6, 4))
    loss = partita.info_nce_loss(x, x.roll(1, 0), group=group)
    loss = loss + partita.linear_cross_entropy(x, torch.randn(9, 4), torch.arange(6), group=group)
    loss = loss + partita.attention(x[None], x[None], x[None], is_causal=True, group=group).sum()
    for_ddp(loss, group).backward()
    optimizer.step()

work()
assert names()
gc.collect()
dist.destroy_process_group()
print("left:", names())
"""


ALONE = """
import sys, torch, partita
x = torch.randn(6, 4)

def work():
    loss = partita.info_nce_loss(x, x, labels=torch.arange(6)) + partita.clip_loss(x, x, 1.0)
    loss = loss + partita.nt_xent_loss(x, x) + partita.supcon_loss(x, torch.arange(6) // 2)
    loss = loss + partita.linear_cross_entropy(x, x, torch.arange(6), return_stats=True)[0]
    return loss + partita.attention(x, x, x, is_causal=True, attn_mask=torch.ones(6, 6)).sum()

work()
found = [name for name in ("torch.distributed.nn", "partita.distributed") if name in sys.modules]
x.requires_grad_()  # from here on torch's own operators may load what they like
work().backward()
print(found, "partita.distributed" in sys.modules)
"""


def last_line(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[-2]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="names of threads are read from /proc")
def test_threads_end_with_the_group(tmp_path: Path) -> None:
    assert last_line(CODE, str(tmp_path / "store")) == "left: []"


def test_a_process_without_a_group_loads_nothing_distributed() -> None:
    assert last_line(ALONE) == "[] False"
