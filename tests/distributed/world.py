"""Real processes in a gloo group that stay alive for many checks: importing torch costs more than most of them.

A worker receives the name of a function of `tests.distributed.checks` and its arguments, runs it as one rank of the
group, and says how it went. Every rank makes the whole problem from the same seed, so that it can compare its own part
with what one process finds.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENCE_S = 240.0  # the machine may be busy with something else


def serve(rank: int, size: int, store: str, pipe: Connection, timeout_s: float) -> None:
    """The life of a worker."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    while (task := pipe.recv()) is not None:
        module, name, arguments = task
        try:
            function = getattr(importlib.import_module(f"tests.distributed.{module}"), name)
            pipe.send((True, function(dist.group.WORLD, **arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class World:
    """`size` processes; `run` calls a function on all of them and gives what each returned."""

    def __init__(self, size: int, timeout_s: float = PATIENCE_S, start: str = "forkserver"):
        self.size = size
        self.broken = False
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context(start)
        context.set_forkserver_preload(["torch", "torch.distributed", "partita", "tests.distributed.checks"])
        self._pipes: list[Connection] = []
        self._workers = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            worker = context.Process(target=serve, args=(rank, size, store, theirs, timeout_s), daemon=True)
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)

    def attempt(
        self, module: str, name: str, patience_s: float = PATIENCE_S, grace_s: float = 3.0, **arguments: Any
    ) -> list[tuple[bool, Any]]:
        """(whether it went well, result or traceback) of every rank; (False, None) if the process is gone."""
        for pipe in self._pipes:
            pipe.send((module, name, arguments))
        out: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + patience_s
        while len(out) < self.size and (left := deadline - time.monotonic()) > 0:
            waiting = {id(pipe): rank for rank, pipe in enumerate(self._pipes) if rank not in out}
            for pipe in wait([self._pipes[rank] for rank in waiting.values()], left):
                rank = waiting[id(pipe)]
                try:
                    out[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    out[rank] = (False, None)
                if not out[rank][0]:  # the others may wait for it in vain
                    deadline = min(deadline, time.monotonic() + grace_s)
        self.broken = self.broken or len(out) < self.size or not all(fine for fine, _ in out.values())
        return [out.get(rank, (False, "no answer in time")) for rank in range(self.size)]

    def run(self, module: str, name: str, **arguments: Any) -> list[Any]:
        """What every rank returned; a rank that raised makes the test fail with its traceback."""
        out = self.attempt(module, name, **arguments)
        wrong = [f"rank {rank}:\n{text}" for rank, (fine, text) in enumerate(out) if not fine]
        assert not wrong, "\n".join(wrong)
        return [result for _, result in out]

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for worker in self._workers:
            worker.join(0.5 if self.broken else 10)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


class Worlds:
    """Worlds by size, made when first needed; one that a failed check left out of step is replaced."""

    def __init__(self) -> None:
        self._known: dict[int, World] = {}

    def of(self, size: int) -> World:
        known = self._known.get(size)
        if known is None or known.broken:
            if known is not None:
                known.close()
            self._known[size] = World(size)
        return self._known[size]

    def close(self) -> None:
        for world in self._known.values():
            world.close()
