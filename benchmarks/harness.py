"""Measure functions side by side and print ratios.

A machine drifts (clock, neighbours, page cache), so a time alone says little. All functions of a case run in
one process in turns, each keeps the best of its times, and what is reported is the ratio ours / peer, next to
what else ran on the machine meanwhile. The absolute seconds go to the JSON lines.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

import torch

import partita
from partita.engine.backends.native import library

Call = Callable[[], object]
CLOSE = 3.0
BEFORE_BAR = 1.02


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    quick: bool = False
    repeat: int = 9
    seconds: float = 6.0
    threads: int = 2
    only: str = ""
    backend: str = "auto"
    json: str = ""
    before: ModuleType | None = None  # an earlier revision of partita, as a peer of every case

    def wants(self, case: str) -> bool:
        return any(text in case for text in self.only.split("|"))


@dataclass(frozen=True)
class Row:
    """One comparison: `ratio` = ours / peer, smaller is better; `bar` is what we want it to be at most."""

    benchmark: str
    case: str
    peer: str
    ours: float
    theirs: float
    unit: str
    bar: float | None = None
    pairs: float | None = None  # the median over rounds of ours / peer: steadier than the ratio of the best
    load: float = 0.0  # the machine's one-minute load average; about `threads` of it is this benchmark itself
    others: float = 0.0  # processors that were busy with other work during the case
    note: str = ""
    extra: dict[str, float | str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs else float("nan")

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        return "ok" if self.ratio <= self.bar else "MISSED"


@dataclass(frozen=True)
class Timing:
    """The times of one function, in seconds, round by round."""

    times: tuple[float, ...]

    @property
    def best_s(self) -> float:
        return min(self.times)

    @property
    def median_s(self) -> float:
        return statistics.median(self.times)

    def beside(self, other: Timing) -> float:
        """The median over rounds of the ratio of two times that were taken one after the other."""
        return statistics.median(a / b for a, b in zip(self.times, other.times, strict=False))


def interleave(
    calls: dict[str, Call], *, repeat: int, warmup: int = 2, seconds: float = 0.0
) -> tuple[dict[str, Timing], float]:
    """Times of each call, taken in turns; and how many processors were busy for others meanwhile.

    The order turns by one each round, so that no form always runs after the same neighbour. After `repeat` rounds those
    that take less than CLOSE times the fastest go on for some seconds: the best of nine short times is luck.
    """
    names = list(calls)
    for name in names:
        for _ in range(warmup):
            calls[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    clock = _Neighbours()

    def take(names: list[str], turn: int) -> None:
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)

    for turn in range(repeat):
        take(names, turn)
    fastest = min(min(series) for series in times.values())
    close = [name for name in names if min(times[name]) < CLOSE * fastest]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        take(close, len(times[close[0]]))
    return {name: Timing(tuple(series)) for name, series in times.items()}, clock.others()


class _Neighbours:
    """Processor time used by anybody but this process, from /proc/stat; 0 where there is none."""

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        own = time.process_time()
        try:
            fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        except (OSError, ValueError, IndexError):
            return time.perf_counter(), own, own
        idle_and_wait = fields[3] + fields[4]
        # guest time (fields 8, 9) is already inside user time
        return time.perf_counter(), own, (sum(fields[:8]) - idle_and_wait) / os.sysconf("SC_CLK_TCK")

    def others(self) -> float:
        wall, own, busy = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 else 0.0


def mm_peak(size: int = 2048, repeat: int = 5, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of a large torch.mm in this dtype: the practical multiply-add peak.

    The processor could do a little more; no code for general shapes is known to us that does.
    """
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    timings, _ = interleave({"mm": lambda: torch.mm(a, b)}, repeat=repeat)
    return 2 * size**3 / timings["mm"].best_s


def in_half(dtype: torch.dtype) -> str:
    """What the name of a case ends in, if it is in another dtype than float32."""
    return "" if dtype == torch.float32 else f", {str(dtype).removeprefix('torch.')}"


def bar_in(dtype: torch.dtype, bar: float | None) -> float | None:
    """The bar of a case; in bfloat16 None where the native kernels widen it."""
    found = library.load()
    return bar if dtype == torch.float32 or (found is not None and found.pairs) else None


def compare(
    benchmark: str,
    case: str,
    ours: Call,
    peers: dict[str, Call],
    options: Options,
    *,
    bars: dict[str, float] | None = None,
    flops: float | None = None,
    note: str = "",
    warmup: int = 2,
    dtype: torch.dtype = torch.float32,  # of the matrix product that operations are compared with
) -> list[Row]:
    """One row for each peer, and a roofline row where the number of operations is known."""
    if options.before is not None:
        peers = {"partita before": bound(ours, options.before), **peers}
        bars = {"partita before": BEFORE_BAR, **(bars or {})}
    timings, others = interleave(
        {"partita": ours, **peers}, repeat=options.repeat, warmup=warmup, seconds=options.seconds
    )
    mine = timings["partita"]
    common = {"load": round(os.getloadavg()[0], 2), "others": round(others, 2)}
    rows = [
        Row(
            benchmark,
            case,
            peer,
            mine.best_s,
            timings[peer].best_s,
            "s",
            bar=None if options.quick else (bars or {}).get(peer),
            note=note,
            pairs=mine.beside(timings[peer]),
            extra={"ours_median": mine.median_s, "theirs_median": timings[peer].median_s},
            **common,
        )
        for peer in peers
    ]
    if flops is not None:
        peak = mm_peak(512 if options.quick else 2048, dtype=dtype)
        achieved = flops / mine.best_s
        rows.append(
            Row(
                benchmark,
                case,
                "roofline (larger is better)",
                achieved / 1e9,
                peak / 1e9,
                "GFLOP/s",
                **common,
            )
        )
    return rows


def bound(call: Call, package: ModuleType) -> Call:
    """The same call with `package` in the place of partita, which is a global of the file that made the call."""
    names: dict[str, object] = call.__globals__  # type: ignore[attr-defined]

    def other() -> object:
        ours = names["partita"]
        names["partita"] = package
        try:
            return call()
        finally:
            names["partita"] = ours

    return other


def environment(options: Options) -> dict[str, object]:
    """Where the numbers come from; goes into every JSON line."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit(),
        "partita": partita.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "backend": options.backend,
        "repeat": options.repeat,
        "seconds": options.seconds,
        "quick": options.quick,
        "load": round(os.getloadavg()[0], 2),
    }


def _commit() -> str:
    """The commit of the working tree this file lies in, with a + where it was changed; "unknown" outside of git."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def show(row: Row) -> None:
    """Print one line of the table as soon as it is known."""
    bar = "" if row.bar is None else f"{row.bar:.2f}"
    pairs = "" if row.pairs is None else f"{row.pairs:.3f}"
    print(
        f"{row.case:<46} {row.peer:<30} {_quantity(row.ours, row.unit):>10} {_quantity(row.theirs, row.unit):>10} "
        f"{row.ratio:>7.3f} {bar:>5} {row.verdict:<6} {pairs:>6} {row.load:>5.2f} {row.others:>6.2f}"
        f"  {row.note}".rstrip(),
        flush=True,
    )


def head() -> None:
    print(
        f"{'case':<46} {'peer':<30} {'ours':>10} {'peer':>10} "
        f"{'ratio':>7} {'bar':>5} {'':<6} {'pairs':>6} {'load':>5} {'others':>6}"
    )


def write_json(rows: Iterable[Row], options: Options) -> None:
    """Append one JSON line per row, with the environment; the absolute numbers live here."""
    if not options.json:
        return
    env = environment(options)
    with open(options.json, "a", encoding="utf-8") as out:
        for row in rows:
            record = {**asdict(row), "ratio": row.ratio, "verdict": row.verdict, "environment": env}
            out.write(json.dumps(record) + "\n")


def _quantity(x: float, unit: str) -> str:
    if unit == "s":
        return f"{x * 1e3:.2f} ms" if x < 10 else f"{x:.2f} s"
    if unit == "bytes":
        return f"{x / 2**20:.1f} MB"
    if unit == "GFLOP/s":
        return f"{x:.0f} GF/s"
    return f"{x:.2e}" if unit == "error" else f"{x:.4g}"
