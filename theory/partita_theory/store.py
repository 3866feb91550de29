"""Store: the finished cells of one experiment at one size, as JSON lines on disk.

    {"cell": key, "settings": {...}, "seed": 0, "rows": [...], "elapsed_s": 1.2, "time": "...Z", "partita": "0.1.0",
     "backend": "auto", "environment": {...}}

A cell is written in one piece and forced to the disk before the next one starts, so a process may be killed at any
time: what a kill can leave is one unfinished line at the end, which is cut off when the file is next opened. Rows come
back in the order of the plan, whatever the order in which they were computed. Numbers that JSON cannot write become
{"float": "nan"}, {"float": "inf"}, {"float": "-inf"}.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.errors import DtypeError, PartitaError
from partita_theory.experiment import Cell
from partita_theory.results import Row

try:
    import fcntl
except ImportError:  # Windows: two runs at once are not prevented there
    fcntl = None  # type: ignore[assignment]

__all__ = ["BusyError", "Store", "environment", "locked"]


class BusyError(PartitaError):
    """Another process is writing to the same file."""


class Store:
    """Finished cells by key; used as a context manager it may be written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Store(Path(folder), "example", "tiny") as store:
    ...     cell = Cell({"n": 4}, seed=0)
    ...     store.add(cell, [{"n": 4, "seed": 0, "entropy": math.nan}], elapsed_s=0.5)
    ...     store.rows([cell, Cell({"n": 8}, seed=0)])
    [{'n': 4, 'seed': 0, 'entropy': nan}]
    """

    def __init__(self, folder: Path, name: str, size: str) -> None:
        self.path = folder / f"{name}-{size}.jsonl"
        self._file: int | None = None
        self._read()

    # ---- writing ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Store:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # rows are added to what is there, so a symbolic link under this name is refused, not followed
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.open(self.path, flags, 0o644)
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a killed process loses its lock by itself
            except BlockingIOError:
                os.close(self._file)
                self._file = None
                raise BusyError(f"{self.path} is being written by another run; wait for it, or give --out.") from None
        self._mend()
        self._read()
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def add(self, cell: Cell, rows: Iterable[Row], *, elapsed_s: float) -> None:
        """Write a finished cell; when this returns it is on the disk. A cell that is there already is left as it is."""
        assert self._file is not None, "a store is written to inside `with`"
        if cell.key in self.records:
            return
        import partita

        record = {
            "cell": cell.key,
            "settings": _flat(cell.settings, self.path.stem),
            "seed": cell.seed,
            "rows": [_flat(row, self.path.stem) for row in rows],
            "elapsed_s": round(elapsed_s, 4),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "partita": partita.__version__,
            "backend": str(partita.backend()),
            "environment": environment(),
        }
        line = json.dumps(record, allow_nan=False, ensure_ascii=True).encode() + b"\n"
        written = 0
        while written < len(line):
            written += os.write(self._file, line[written:])
        os.fsync(self._file)
        self.records[cell.key] = _record(line) or record

    def _mend(self) -> None:
        """Cut off what a kill left of the last line; a whole line that only lacks its end gets it."""
        assert self._file is not None
        held = self.path.read_bytes()
        if not held or held.endswith(b"\n"):
            return
        cut = held.rfind(b"\n") + 1
        if _record(held[cut:]) is None:
            os.ftruncate(self._file, cut)
        else:
            os.write(self._file, b"\n")
        os.fsync(self._file)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        held = self.path.read_bytes() if self.path.exists() else b""
        found = [_record(line) for line in held.split(b"\n") if line.strip()]
        self.dropped = found.count(None)  # lines that could not be read
        # of a cell that is there twice, the first
        self.records: dict[str, dict[str, Any]] = {r["cell"]: r for r in reversed(found) if r is not None}

    def __contains__(self, cell: Cell) -> bool:
        return cell.key in self.records

    def missing(self, plan: Sequence[Cell]) -> list[Cell]:
        """The cells of the plan that are still to run."""
        return [cell for cell in plan if cell.key not in self.records]

    def rows(self, plan: Sequence[Cell]) -> list[Row]:
        """The rows of all finished cells of the plan, in its order."""
        return [dict(row) for cell in plan if cell in self for row in self.records[cell.key]["rows"]]

    def seconds(self, plan: Sequence[Cell]) -> float | None:
        """The mean time of a finished cell of the plan, None if there is none."""
        spent = [float(self.records[cell.key]["elapsed_s"]) for cell in plan if cell in self]
        return sum(spent) / len(spent) if spent else None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder while a file in it is read, changed and replaced; others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    try:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_EX)  # a killed process loses its lock by itself
        yield
    finally:
        if held is not None:
            os.close(held)


def _flat(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row as strict JSON; anything but numbers and short strings is refused."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            found[str(name)] = {"float": str(value)}
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[str(name)] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(v, (bool, int, float, str)) for v in value):
            found[str(name)] = list(value)  # a setting may be a short list of sizes
        else:
            raise DtypeError(
                f"a row of {where} holds a {type(value).__name__} as {name!r}; rows are flat: numbers and short "
                f"strings. Take float(x) or x.item()."
            )
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    """A line as it was written, None if it is not whole."""
    try:
        found = json.loads(line, object_hook=lambda o: float(o["float"]) if o.keys() == {"float"} else o)
    except (ValueError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) and {"cell", "rows", "elapsed_s"} <= found.keys() else None


def environment() -> dict[str, Any]:
    """Where a number was made: versions, threads, the kind of machine (not its name)."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
