"""Peak memory beyond the inputs, measured in a process of its own.

A probe is a function of a size that makes the inputs and gives the work; a question has its probes in `PROBES`. A short
call loads the code first, so that libraries are not counted; then the peak of the resident set is taken while the work
runs, gradients included.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import partita

from .harness import Options, Row

MB = 2**20


# ---- inside the process of a probe ----


def peak_of(work: Callable[[], object]) -> tuple[int, float]:
    """Peak of the resident set during `work` beyond what was there before, in bytes; and its seconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # or memory freed earlier would be reused unseen
    before = _status("VmRSS")
    sampler = None if _reset_peak() else _Sampler()
    start = time.perf_counter()
    kept = work()
    elapsed = time.perf_counter() - start
    peak = sampler.stop() if sampler else _status("VmHWM")
    del kept
    return max(0, peak - before), elapsed


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; the memory benchmark needs Linux")


def _reset_peak() -> bool:
    """Ask the kernel to forget the peak so far; some containers do not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class _Sampler(threading.Thread):
    """Looks at the resident set every millisecond, where the kernel's own peak cannot be reset."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._peak, self._done = 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.wait(0.001):
            self._peak = max(self._peak, _status("VmRSS"))

    def stop(self) -> int:
        self._done.set()
        self.join()
        return max(self._peak, _status("VmRSS"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one probe and print {"bytes": ..., "seconds": ...}."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question", help="the module of `benchmarks` that has the probe")
    parser.add_argument("probe")
    parser.add_argument("n", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeat", type=int, default=1, help="calls to time, the best counts")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    probe = importlib.import_module(f"benchmarks.{given.question}").PROBES[given.probe]
    with partita.backend(given.backend):
        probe(32)()
        work = probe(given.n)
        size, seconds = peak_of(work)
        for _ in range(given.repeat - 1):  # the first call pays for the memory it takes
            start = time.perf_counter()
            work()
            seconds = min(seconds, time.perf_counter() - start)
    print(json.dumps({"bytes": size, "seconds": seconds}))


# ---- outside ----


def measure(question: str, probe: str, n: int, options: Options, repeat: int = 1) -> tuple[float, float]:
    """Extra peak bytes and seconds of one probe, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peak", question, probe, str(n)]
    command += ["--threads", str(options.threads), "--backend", options.backend, "--repeat", str(repeat)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"probe {probe!r} with n={n} of {question} failed:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    return float(result["bytes"]), float(result["seconds"])


def memory_row(
    case: str,
    peer: str,
    ours: float,
    theirs: float,
    unit: str,
    bar: float | None,
    note: str = "",
    question: str = "memory",
) -> Row:
    return Row(question, case, peer, ours, theirs, unit, bar=bar, load=round(os.getloadavg()[0], 2), note=note)


if __name__ == "__main__":
    main()
