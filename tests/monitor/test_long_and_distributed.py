"""What takes long: memory at length 8192, and two processes under DDP."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
from oracle import assert_equal, expected
from test_torch_models import Bare
from torch import nn

from partita.monitor import watch


def test_long_input_needs_no_map() -> None:
    """At length 8192 one head's map is 268 MB; watching may add 50 MB."""
    import subprocess
    import sys

    code = """
import resource, torch, torch.nn as nn, torch.nn.functional as F
import partita
from partita.monitor import watch
torch.set_num_threads(1)
class M(nn.Module):
    def forward(self, q): return F.scaled_dot_product_attention(q, q, q, is_causal=True)
q = torch.randn(1, 2, 8192, 16); m = M(); m(q)
with watch(m) as w: m(q[:, :, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with watch(m, rows=256) as w: m(q)
with watch(m, layers=[0], maps=[(0, 1)], rows=64) as v: v.attach(); m(q)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert w.frame(pandas=False)[0]["length"] >= 8000 and v.record.maps[0]["rows"] == 128
print((after - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, timeout=600)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 50, done.stdout


def _rank(rank: int, folder: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo"
    )
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    _watched_step(rank, folder)
    gc.collect()  # DDP is in a reference cycle and holds the group, whose threads have to end before Python does
    dist.destroy_process_group()


def _watched_step(rank: int, folder: str) -> None:
    import torch.distributed as dist

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Bare())
    x = torch.randn(2, 3, 13, 16)[rank]
    with watch(model) as w:
        model(x).sum().backward()
    dist.all_gather_object = None  # what ranks send is text, never a pickle
    merged = w.gather()
    w.save(f"{folder}/rank{rank}.jsonl")
    merged.save(f"{folder}/all{rank}.jsonl")


def test_two_processes_under_ddp(tmp_path: Path) -> None:
    import torch.multiprocessing as mp

    from partita.monitor import load_record

    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    torch.manual_seed(0)
    model = Bare()
    x = torch.randn(2, 3, 13, 16)
    for rank in range(2):
        assert_equal(list(load_record(tmp_path / f"rank{rank}.jsonl").rows()), 0, expected(model.scores(x[rank])))
        want = expected(model.scores(x.flatten(0, 1)))
        want.pop("sink_top")  # a maximum of means does not merge
        assert_equal(list(load_record(tmp_path / f"all{rank}.jsonl").rows()), 0, want)
