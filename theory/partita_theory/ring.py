"""What a pass over the keys of all ranks costs: latency, bandwidth and compute, for the ring and for gathering.

    ring      W blocks one after the other; a hop hides behind the work on the block at hand
    gather    every rank fetches all keys first, works on them in one go, and the gradients are summed back

    hop(bytes) = latency + bytes / bandwidth          work(flops) = overhead + flops / rate

Blocks go round in parts of a megabyte or more, whose latencies are left out here: beside their bytes they are small.
The ring needs some parts' memory, gathering needs W blocks. The ring hides its traffic as soon as the work on a block
takes longer than its hop; below that it pays W latencies and W overheads where gathering pays one overhead: hence a
crossing point. `python -m benchmarks distributed` measures the parameters and holds the prediction against gloo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from partita.errors import ValueRangeError

__all__ = ["Machine", "Work", "crossing", "gather_bytes", "gather_time", "ring_bytes", "ring_time"]


@dataclass(frozen=True)
class Machine:
    """A device and its link to the next one.

    overlap: how much of the shorter of work and traffic is hidden behind the longer: 1 where a network card moves the
    bytes, 0 where the processor that computes also copies them.
    """

    latency_s: float  # of a hop
    bandwidth: float  # bytes per second, one way
    rate: float  # floating-point operations per second that the engine reaches
    overhead_s: float = 0.0  # of starting the work on a block
    overlap: float = 1.0
    collective_s: float | None = None  # latency of a step of all-gather and reduce-scatter, if it is not that of a hop
    collective_bandwidth: float | None = None  # theirs, if it is not that of a hop

    def __post_init__(self) -> None:
        if min(self.bandwidth, self.rate) <= 0 or min(self.latency_s, self.overhead_s) < 0:
            raise ValueRangeError("bandwidth and rate must be positive, latency_s and overhead_s not negative.")
        if not 0.0 <= self.overlap <= 1.0:
            raise ValueRangeError(f"overlap must lie between 0 and 1; got {self.overlap!r}.")

    def hop(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bandwidth

    def step(self, size_bytes: float) -> float:
        """One of the W - 1 steps of an all-gather or a reduce-scatter."""
        latency = self.latency_s if self.collective_s is None else self.collective_s
        return latency + size_bytes / (self.collective_bandwidth or self.bandwidth)

    def work(self, flops: float) -> float:
        return self.overhead_s + flops / self.rate

    def both(self, work_s: float, traffic_s: float) -> float:
        """Work and traffic at the same time, as far as they overlap."""
        return max(work_s, traffic_s) + (1.0 - self.overlap) * min(work_s, traffic_s)


@dataclass(frozen=True)
class Work:
    """What one rank brings: rows, keys, and how wide they are; `batch` counts heads and batch entries."""

    rows: int
    keys: int
    dim: int
    dim_value: int = 0
    batch: int = 1
    item_bytes: int = 4
    gradient_bytes: int = 4  # of a number of a gradient on its way; sums are kept in float32 at least
    backward: bool = True

    @property
    def block_bytes(self) -> int:
        """A block of keys and values."""
        return self.batch * self.keys * (self.dim + self.dim_value) * self.item_bytes

    @property
    def returned_bytes(self) -> int:
        """The gradient of a block."""
        return self.batch * self.keys * (self.dim + self.dim_value) * self.gradient_bytes if self.backward else 0

    @property
    def forward_flops(self) -> float:
        """Own rows against one block: scores, and the sum of the values."""
        return 2.0 * self.batch * self.rows * self.keys * (self.dim + self.dim_value)

    @property
    def backward_flops(self) -> float:
        """Scores again, then the gradients of query and key; with values also those of weights and values."""
        return 2.0 * self.batch * self.rows * self.keys * (3 * self.dim + 2 * self.dim_value) if self.backward else 0.0


def ring_bytes(work: Work, world: int) -> int:
    """Bytes a rank sends: W - 1 hops of a block forward; the same backward, and the same of its gradient.

    >>> ring_bytes(Work(rows=10, keys=10, dim=8), world=4)  # (3 + 3 + 3) blocks of 320 bytes
    2880
    """
    passes = 2 if work.backward else 1
    return (world - 1) * (passes * work.block_bytes + work.returned_bytes)


def gather_bytes(work: Work, world: int) -> int:
    """Bytes a rank sends where keys are gathered: W - 1 blocks, and as many gradients to be summed.

    >>> gather_bytes(Work(rows=10, keys=10, dim=8), world=4)  # (3 + 3) blocks of 320 bytes
    1920
    """
    return (world - 1) * (work.block_bytes + work.returned_bytes)


def ring_time(work: Work, machine: Machine, world: int) -> float:
    """Seconds of a pass and its backward round the ring.

    >>> slow = Machine(latency_s=1.0, bandwidth=1e9, rate=1e30)
    >>> ring_time(Work(rows=1, keys=0, dim=1, backward=False), slow, world=4)  # three hops of nothing
    3.0
    """
    forward = machine.work(work.forward_flops)
    total = (world - 1) * machine.both(forward, machine.hop(work.block_bytes)) + forward
    if not work.backward:
        return total
    backward = machine.work(work.backward_flops)
    if world == 1:
        return total + backward
    there, home = machine.hop(work.block_bytes), machine.hop(work.returned_bytes)
    # the own block has no gradient to wait for; the last gradient has no work to hide behind
    total += machine.both(backward, there) + (world - 2) * machine.both(backward, there + home)
    return total + backward + home


def gather_time(work: Work, machine: Machine, world: int) -> float:
    """Seconds of fetching all keys, one pass over them, its backward, and summing the gradients to their owners.

    >>> slow = Machine(latency_s=1.0, bandwidth=1e9, rate=1e30)
    >>> gather_time(Work(rows=1, keys=0, dim=1, backward=False), slow, world=4)
    3.0
    """
    total = (world - 1) * machine.step(work.block_bytes) + machine.work(world * work.forward_flops)
    if not work.backward:
        return total
    return total + machine.work(world * work.backward_flops) + (world - 1) * machine.step(work.returned_bytes)


def crossing(work: Work, machine: Machine, world: int, most: int = 1 << 24) -> int | None:
    """The smallest number of rows and keys per rank from which the ring is at least as fast; None if there is none.

    >>> even = Machine(latency_s=1e-5, bandwidth=1e10, rate=1e14, overhead_s=1e-5)
    >>> crossing(Work(rows=0, keys=0, dim=128), even, world=8) is not None
    True
    """

    def ahead(n: int) -> bool:
        at = replace(work, rows=n, keys=n)
        return ring_time(at, machine, world) <= gather_time(at, machine, world)

    high = 1
    while high <= most and not ahead(high):
        high *= 2
    if high > most:
        return None
    low = high // 2
    while high - low > max(1, math.floor(0.001 * high)):
        middle = (low + high) // 2
        low, high = (low, middle) if ahead(middle) else (middle, high)
    return high
