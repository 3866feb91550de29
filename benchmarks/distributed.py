"""Ring or gather across processes: when does passing blocks round beat fetching all keys, and does the model know?

Real gloo processes on this machine, one thread each. Latency, bandwidth, the engine's rate and how far work and traffic
overlap are measured in each world; `partita_theory.ring` predicts both times from them. With more processes than
cores everything is slower, which the calibration sees too: it runs in the same world at the same time on all ranks.

Memory: what a rank needs beyond its inputs, gradients included, beside a W-th of what one process needs for the whole.

The last table is a MODEL, not a measurement: the same formulas with assumed numbers of large machines.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partita.collective import Collective
from partita.distributed.blocks import send_receive, wait
from partita.gibbs import Gibbs
from partita_theory.ring import Machine, Work, crossing, gather_time, ring_bytes, ring_time

from .harness import Options, Row
from .held import classes, pairs, sequence
from .peak import peak_of

DIM = 128
WORLDS = {2: (16, 64, 256, 1024, 4096), 4: (16, 64, 256, 1024, 4096), 8: (16, 64, 256, 1024)}  # ranks: rows of each
QUICK = {2: (16, 32)}
SMALL, LARGE = 1 << 10, 1 << 22  # bytes of the messages that latency and bandwidth are read off


@dataclass(frozen=True)
class Measured:
    """What rank 0 reports of a world."""

    machine: Machine
    ring_s: dict[int, float]
    gather_s: dict[int, float]


def cases(options: Options) -> Iterator[list[Row]]:
    for world, sizes in (QUICK if options.quick else WORLDS).items():
        if not options.wants(f"W={world}"):
            continue
        found = _run_world(world, sizes, options.repeat)
        yield [_row(world, n, found) for n in sizes]
        _say_crossing(world, sizes, found)
    if options.wants("memory"):
        yield from _memory((2,) if options.quick else tuple(WORLDS), 16 if options.quick else 1)
    _extrapolate()


def _row(world: int, n: int, found: Measured) -> Row:
    work = Work(n, n, DIM)
    ring, gather = ring_time(work, found.machine, world), gather_time(work, found.machine, world)
    return Row(
        "distributed",
        f"contrast fwd+bwd W={world} {n} rows a rank d={DIM}",
        "gather all keys",
        found.ring_s[n],
        found.gather_s[n],
        "s",
        load=os.getloadavg()[0],
        note=f"model: ring {ring * 1e3:.2f} ms, gather {gather * 1e3:.2f} ms",
        extra={"model_ring_s": ring, "model_gather_s": gather, "ring_bytes": ring_bytes(work, world)},
    )


def _say_crossing(world: int, sizes: tuple[int, ...], found: Measured) -> None:
    ahead = [n for n in sizes if found.ring_s[n] <= found.gather_s[n]]
    m = found.machine
    predicted = crossing(Work(0, 0, DIM), m, world)
    model = "at no size" if predicted is None else f"from {predicted} rows a rank"
    measured = f"from {ahead[0]}" if ahead else f"not up to {sizes[-1]}"
    print(
        f"W={world}: hop {m.latency_s * 1e6:.0f} us + bytes / {m.bandwidth / 1e9:.2f} GB/s, "
        f"work {m.overhead_s * 1e6:.0f} us + flops / {m.rate / 1e9:.1f} GF/s a rank, overlap {m.overlap:.2f}\n"
        f"      ring at least as fast: model {model}; measured {measured} (of {', '.join(map(str, sizes))})",
        flush=True,
    )


# ---- a world ---------------------------------------------------------------------------------------------------------


def _run_world(world: int, sizes: tuple[int, ...], repeat: int) -> Measured:
    found: Measured = _ask(world, _serve, sizes, repeat)
    return found


def _ask(world: int, target: Callable[..., None], *arguments: object) -> Any:
    """What rank 0 of this many new processes sends back."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = [
            context.Process(target=target, args=(rank, world, store, *arguments, theirs), daemon=True)
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        if not ours.poll(1800):
            raise RuntimeError(f"{world} processes gave no answer")
        found = ours.recv()
        for worker in workers:
            worker.join(60)
    return found


def _serve(rank: int, world: int, store: str, sizes: tuple[int, ...], repeat: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    machine = _calibrate(world, repeat, max(sizes))
    ring, gather, group = {}, {}, Collective.of(dist.group.WORLD)
    for n in sizes:
        query, key = (torch.randn(n, DIM, requires_grad=True) for _ in range(2))
        ring[n] = _time(lambda q=query, k=key: _by_ring(q, k, group), repeat)  # type: ignore[misc]
        gather[n] = _time(lambda q=query, k=key: _by_gathering(q, k), repeat)  # type: ignore[misc]
    if rank == 0:
        pipe.send(Measured(machine, ring, gather))
    dist.barrier()
    dist.destroy_process_group()


def _time(call: Callable[[], object], repeat: int) -> float:
    """Best over repetitions of the slowest rank's time, all ranks starting together."""
    times = []
    for turn in range(repeat + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if turn:  # the first one warms up
            times.append(float(spent))
    return min(times)


def _loss(log_partition: Tensor) -> Tensor:
    return log_partition.sum()


def _by_ring(query: Tensor, key: Tensor, group: Collective) -> object:
    sums = replace(group, sizes=((len(key),) * group.size,)).sums(query, key, 0.1, statistics=False)
    return torch.autograd.grad(_loss(sums.state.log_partition()), (query, key))


def _by_gathering(query: Tensor, key: Tensor) -> object:
    whole = _Gather.apply(key)  # type: ignore[no-untyped-call]
    sums = Gibbs(query, whole, scale=0.1).reduce(statistics=False)
    return torch.autograd.grad(_loss(sums.state.log_partition()), (query, key))


class _Gather(torch.autograd.Function):
    """All keys on every rank; their gradients summed to the ranks they came from."""

    @staticmethod
    def forward(ctx: Any, key: Tensor) -> Tensor:
        parts = [torch.empty_like(key) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, key.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        world = dist.get_world_size()
        out = torch.empty_like(grad[: len(grad) // world])
        dist.reduce_scatter(out, [part.contiguous() for part in grad.chunk(world)])
        return out


# ---- memory ----------------------------------------------------------------------------------------------------------


HELD: dict[str, Callable[[Any, int], Callable[[], object]]] = {  # of a group, and how many share the whole
    "contrast, 8192 pairs d=1024": lambda group, share: pairs(group, 8192 // share, 1024, symmetric=False),
    "contrast, the same, symmetric": lambda group, share: pairs(group, 8192 // share, 1024, symmetric=True),
    "attention, causal, 4096 positions, 32 heads d=64": lambda group, share: sequence(group, 4096 // share),
    "cross entropy with statistics, 32768 classes d=512": lambda group, share: classes(
        group, 512, 32768 // share, 512, return_stats=True
    ),
}


def _memory(worlds: tuple[int, ...], less: int) -> Iterator[list[Row]]:
    """Beyond the inputs, forward and backward; `less` divides the sizes."""
    # freed blocks of this size go back at once: what is measured is what is in use
    before = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    try:
        alone: dict[str, float] = _ask(1, _serve_memory, less, True)
        for world in worlds:
            found: dict[str, float] = _ask(world, _serve_memory, less, False)
            yield [
                Row(
                    "distributed",
                    f"memory W={world} {name}",
                    f"one process / {world}",
                    found[name],
                    alone[name] / world,
                    "bytes",
                    load=os.getloadavg()[0],
                    note=f"one process {alone[name] / 2**20:.1f} MB",
                )
                for name in HELD
            ]
    finally:
        if before is None:
            del os.environ["MALLOC_MMAP_THRESHOLD_"]
        else:
            os.environ["MALLOC_MMAP_THRESHOLD_"] = before


def _serve_memory(rank: int, world: int, store: str, less: int, alone: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    group = None if alone else dist.group.WORLD
    found = {}
    for name, make in HELD.items():
        make(group, world * less)()  # libraries are loaded, threads have their stacks
        held = torch.tensor(peak_of(make(group, world * less))[0], dtype=torch.float64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        found[name] = float(held)
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


# ---- calibration -----------------------------------------------------------------------------------------------------


def _line(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float]:
    """Intercept and inverse slope of the line through two points, neither below what a clock can tell."""
    slope = max((y1 - y0) / (x1 - x0), 1e-15)
    return max(y0 - slope * x0, 1e-7), 1.0 / slope


def _calibrate(world: int, repeat: int, largest: int) -> Machine:
    group = Collective.of(dist.group.WORLD)
    # a ring of one: what a block costs without its journey
    groups = [dist.new_group([rank]) for rank in range(world)]
    alone = Collective.of(groups[dist.get_rank()])

    def hop(size: int) -> float:
        out, into = torch.zeros(size // 4), torch.zeros(size // 4)
        return _time(lambda: wait(send_receive(group, out, into, 0)), repeat)

    def collect(size: int) -> float:
        own = torch.zeros(size // 4)
        parts = [torch.empty_like(own) for _ in range(world)]
        return _time(lambda: dist.all_gather(parts, own), repeat) / (world - 1)

    def block(n: int) -> Callable[[], object]:
        query, key = (torch.randn(n, DIM, requires_grad=True) for _ in range(2))
        return lambda: _by_ring(query, key, alone)

    few, many = 8, max(largest, 256)
    latency, bandwidth = _line(SMALL, hop(SMALL), LARGE, hop(LARGE))
    collective, collective_bandwidth = _line(SMALL, collect(SMALL), LARGE, collect(LARGE))
    costs = {n: Work(n, n, DIM).forward_flops + Work(n, n, DIM).backward_flops for n in (few, many)}
    work_s = {n: _time(block(n), repeat) for n in (few, many)}
    overhead, rate = _line(costs[few], work_s[few], costs[many], work_s[many])

    out, into, busy = torch.zeros(LARGE // 4), torch.zeros(LARGE // 4), block(many)

    def together() -> None:
        moves = send_receive(group, out, into, 0)
        busy()
        wait(moves)

    traffic_s, both_s = hop(LARGE), _time(together, repeat)
    hidden = (traffic_s + work_s[many] - both_s) / max(min(traffic_s, work_s[many]), 1e-9)
    overlap = min(1.0, max(0.0, hidden))
    # forward and backward are two calls: each has half of what starting both costs
    return Machine(latency, bandwidth, rate, overhead / 2, overlap, collective, collective_bandwidth)


# ---- the model, far away ---------------------------------------------------------------------------------------------

# An accelerator that reaches 400 TFLOP/s in bfloat16, 20 us to start a kernel, and a 400 Gb/s network card of its own
# that moves bytes by itself (10 us a hop, 45 GB/s). No congestion, no stragglers, every hop alike.
FAR = Machine(latency_s=10e-6, bandwidth=45e9, rate=4e14, overhead_s=20e-6, overlap=1.0)
FAR_WORK = {
    "contrast, 1024 pairs a device, d=1024": Work(1024, 1024, 1024, item_bytes=2),
    "attention, 8192 positions a device, 32 heads, d=128": Work(8192, 8192, 128, 128, batch=32, item_bytes=2),
}


def _extrapolate() -> None:
    print("\nMODEL, not a measurement: 400 TFLOP/s (bfloat16) a device, 20 us to start a kernel, 10 us a hop, 45 GB/s,")
    print("traffic hidden behind work, no congestion and no stragglers; memory is that of the keys and values held")
    names = ("ring", "gather", "ring sends", "ring holds", "gather holds")
    print(f"{'work':<54} {'devices':>7} " + " ".join(f"{name:>12}" for name in names))
    for name, work in FAR_WORK.items():
        for world in (8, 64, 1024, 16384):
            # the own block, and of its parts (partita.distributed.blocks) the one at hand and the next
            part = max(work.block_bytes // 16, min(work.block_bytes, 1 << 20))
            sent, held, whole = ring_bytes(work, world), work.block_bytes + 2 * part, world * work.block_bytes
            times = _seconds(ring_time(work, FAR, world)), _seconds(gather_time(work, FAR, world))
            cells = (*times, _size(sent), _size(held), _size(whole))
            print(f"{name:<54} {world:>7} " + " ".join(f"{cell:>12}" for cell in cells))
        print(f"{'':<54} ring at least as fast from {crossing(work, FAR, 64)} rows a device on 64 devices")


def _seconds(x: float) -> str:
    return f"{x * 1e3:.2f} ms" if x < 1 else f"{x:.2f} s"


def _size(x: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if x < 1024:
            return f"{x:.0f} {unit}"
        x /= 1024
    return f"{x:.1f} TB"
