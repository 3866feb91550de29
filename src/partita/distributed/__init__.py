"""Across processes: partition functions add, so the sums of ranks are merged by the rule that merges tiles.

team       the group; sums over ranks with the right gradients; `replicate`, `for_ddp`, `zigzag`
agree      what the ranks tell each other before a call, and the errors if they disagree
merge      states of disjoint keys, one on every rank
ring       one pass over the keys of all ranks, and its backward
passes     the distribution of this rank's rows over the keys of all ranks
count      how many keys score above a level
layout     which positions of a sequence a rank holds; `shard`, `gather`
cost       a model of time and bytes, for ring and gather
travel     blocks of keys and their gradients on their way; `traffic` counts the bytes
parts      how blocks are cut, so that little is held on the way
"""

from __future__ import annotations

# For a side effect: the default arguments of this module keep the group that exists when it is first imported, which
# DDP and optimizers do late. Its threads then outlive destroy_process_group, and abort Python's exit if they are busy.
import torch.distributed.nn  # noqa: F401

from partita.distributed.agree import Fact, joint_checks, meet
from partita.distributed.count import count_above
from partita.distributed.layout import Layout, gather, shard
from partita.distributed.merge import merge, merge_scores, merge_states
from partita.distributed.passes import Ring, View
from partita.distributed.team import Team, Zigzag, check_alone, for_ddp, replicate, team_of, zigzag
from partita.distributed.travel import Traffic, pass_on, traffic, wait
from partita.engine.sums import Sums
from partita.engine.visibility import Visibility

__all__ = [
    "Fact",
    "Layout",
    "Ring",
    "Sums",
    "Team",
    "Traffic",
    "View",
    "Visibility",
    "Zigzag",
    "check_alone",
    "count_above",
    "for_ddp",
    "gather",
    "joint_checks",
    "meet",
    "merge",
    "merge_scores",
    "merge_states",
    "pass_on",
    "replicate",
    "shard",
    "team_of",
    "traffic",
    "wait",
    "zigzag",
]
