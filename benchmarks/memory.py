"""How much memory beyond the inputs, and how time and memory grow with length.

Each number comes from a process of its own: inputs first, then the peak of the resident set while the work runs,
gradients included. A short call before it loads the code, so that libraries are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

import partita

from .attention import eager_with_entropy
from .contrastive import ours as info_nce
from .contrastive import two_cross_entropies, two_logsumexps
from .harness import Options, Row
from .trainer import step_of as trainer_step

MB = 2**20
LONG = 65536  # one head, causal, forward with statistics
LONG_LIMIT = 200 * MB


# ---- what is measured, by name: size -> the work; making the inputs is not part of it ----


def _attention_stats(n: int) -> Callable[[], object]:
    q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))
    return lambda: partita.attention(q, k, v, is_causal=True, return_stats=True)


def _attention_eager(n: int) -> Callable[[], object]:
    q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))
    return lambda: eager_with_entropy(q, k, v, causal=True)


def _attention_sdpa(n: int) -> Callable[[], object]:
    q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _reductions_backward(n: int) -> Callable[[], object]:
    q, k, v = (torch.randn(n, 64, requires_grad=True) for _ in range(3))

    def work() -> object:
        p = partita.Gibbs(q, k, scale=0.125)
        (p.log_partition().sum() + p.entropy().sum() + p.expectation(v).sum()).backward()
        return q.grad, k.grad, v.grad

    return work


def _cross_entropy(n: int, loss: Callable[..., torch.Tensor]) -> Callable[[], object]:
    x = torch.randn(n, 512, requires_grad=True)
    w = (torch.randn(16 * n, 512) * 512**-0.5).requires_grad_()
    target = torch.randint(16 * n, (n,))
    return lambda: loss(x, w, target).backward()


def _contrastive(n: int, loss: Callable[..., torch.Tensor]) -> Callable[[], object]:
    a, b = (F.normalize(torch.randn(n, 256), dim=-1).requires_grad_() for _ in range(2))
    return lambda: loss(a, b).backward()


PROBES: dict[str, Callable[[int], Callable[[], object]]] = {
    "attention": _attention_stats,
    "attention eager": _attention_eager,
    "attention sdpa": _attention_sdpa,
    "reductions backward": _reductions_backward,
    "cross entropy": lambda n: _cross_entropy(n, partita.linear_cross_entropy),
    "cross entropy torch": lambda n: _cross_entropy(n, F.linear_cross_entropy),
    "contrastive": lambda n: _contrastive(n, info_nce),
    "contrastive two cross entropies": lambda n: _contrastive(n, two_cross_entropies),
    "contrastive two logsumexps": lambda n: _contrastive(n, two_logsumexps),
    "trainer step": lambda n: trainer_step(n, True),
    "trainer step with logits": lambda n: trainer_step(n, False),
}
WITH_GRADIENT = ("reductions", "cross entropy", "contrastive", "trainer step")


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
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("n", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeat", type=int, default=1, help="calls to time, the best counts")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    gradient = given.probe.startswith(WITH_GRADIENT)
    with partita.backend(given.backend), torch.set_grad_enabled(gradient):
        PROBES[given.probe](32)()
        work = PROBES[given.probe](given.n)
        size, seconds = peak_of(work)
        for _ in range(given.repeat - 1):  # the first call pays for the memory it takes
            start = time.perf_counter()
            work()
            seconds = min(seconds, time.perf_counter() - start)
    print(json.dumps({"bytes": size, "seconds": seconds}))


# ---- outside ----


def measure(probe: str, n: int, options: Options, repeat: int = 1) -> tuple[float, float]:
    """Extra peak bytes and seconds of one probe, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", probe, str(n)]
    command += ["--threads", str(options.threads), "--backend", options.backend, "--repeat", str(repeat)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"probe {probe!r} with n={n} failed:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    return float(result["bytes"]), float(result["seconds"])


# case, ours, peer, size, size in a quick run (0: left out of it), bar
RATIOS = [
    ("linear CE fwd+bwd N={n} V=16N D=512", "cross entropy", "cross entropy torch", 2048, 64, 1 / 6),
    ("symmetric InfoNCE fwd+bwd {n} d=256", "contrastive", "contrastive two cross entropies", 8192, 0, 0.1),
    ("symmetric InfoNCE fwd+bwd {n} d=256", "contrastive", "contrastive two logsumexps", 8192, 0, 0.1),
    ("attention causal with stats n={n} d=64", "attention", "attention eager", 8192, 0, None),
    ("attention causal with stats n={n} d=64", "attention", "attention sdpa", 8192, 0, None),
]
# case, what, size, size in a quick run, limit
LIMITS = [
    ("attention causal with stats n={n} d=64", "attention", LONG, 0, LONG_LIMIT),
    ("log Z + H + E[v] fwd+bwd n={n} d=64", "reductions backward", 16384, 512, 96 * MB),
]


def cases(options: Options) -> Iterator[list[Row]]:
    for case, mine, theirs, full, small, bar in RATIOS:
        n = small if options.quick else full
        name = "memory " + case.format(n=n)
        if n and options.wants(name):
            ours, peer = measure(mine, n, options)[0], measure(theirs, n, options)[0]
            yield [_row(name, theirs, ours, peer, "bytes", None if options.quick else bar)]

    for case, probe, full, small, limit in LIMITS:
        n = small if options.quick else full
        name = "memory " + case.format(n=n)
        if n and options.wants(name):
            size, seconds = measure(probe, n, options)
            yield [_row(name, f"limit {limit // MB} MB", size, limit, "bytes", 1.0, f"{seconds:.2f} s")]

    if options.wants("growth"):
        yield _growth([256, 512] if options.quick else [4096, 8192, 16384, 32768], options)


def _growth(sizes: list[int], options: Options) -> list[Row]:
    """Exponents fitted on log-log: time should grow as n^2, memory as n."""
    runs = [measure("attention", n, options, repeat=1 if options.quick else 5) for n in sizes]
    memory, seconds = [size for size, _ in runs], [elapsed for _, elapsed in runs]
    name = f"growth attention causal n={sizes[0]}..{sizes[-1]}"
    return [
        _row(name, "time as n^2", fitted_exponent(sizes, seconds), 2.0, "exponent", None if options.quick else 1.05),
        _row(name, "memory as n", fitted_exponent(sizes, memory), 1.0, "exponent", None if options.quick else 1.1),
    ]


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log(value) over log(size), least squares.

    >>> round(fitted_exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    x, y = [math.log(s) for s in sizes], [math.log(max(v, 1e-9)) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def _row(case: str, peer: str, ours: float, theirs: float, unit: str, bar: float | None, note: str = "") -> Row:
    return Row("memory", case, peer, ours, theirs, unit, bar=bar, load=round(os.getloadavg()[0], 2), note=note)


if __name__ == "__main__":
    main()
