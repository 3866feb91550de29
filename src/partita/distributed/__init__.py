"""Across processes: partition functions add, so the sums of ranks are merged by the rule that merges tiles.

Faces take `group=`; this is what goes with it.

    merge                        states of disjoint keys, one on every rank
    shard, gather, zigzag        a sequence in slices, put together again, in an order that makes causal work even
    replicate, for_ddp           gradients of what every rank holds: summed here, averaged by DDP
    traffic                      counts the bytes that go round
    gather_bytes                 text of every rank, on every rank
"""

from __future__ import annotations

import torch

from partita.distributed.blocks import traffic
from partita.distributed.gradients import for_ddp, replicate
from partita.distributed.sequence import gather, gather_bytes, shard, zigzag
from partita.distributed.states import merge

__all__ = ["for_ddp", "gather", "gather_bytes", "merge", "replicate", "shard", "traffic", "zigzag"]

# For a side effect: the default arguments of torch.distributed.nn keep the group that exists when it is first imported,
# which DDP does. Its threads then outlive destroy_process_group, and abort Python's exit if they are busy. So it is
# imported before there is a group; when there is one, an import of ours would be the one that keeps it.
if torch.distributed.is_available() and not torch.distributed.is_initialized():
    import torch.distributed.nn
