"""Fill the table of docs/compile.md: every row, compiled each way.

    python -m tests.compile.table [--ways aot_eager-dynamic,inductor-fixed] [--only TEXT] [--missing] [--workers 2]

The cells are kept in table.json beside this file, written after each row, so that a run can be stopped and go on. A new
row needs nothing but a call in rows.py and a run with --missing. A cell takes some four seconds of a processor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

from tests.compile.calls import compare
from tests.compile.rows import CALLS, CHANCE, NO_CALL, public_names, rows_of

CELLS = Path(__file__).with_name("table.json")
PAGE = Path(__file__).parents[2] / "docs" / "compile.md"
BEGIN, END = "<!-- the table: make compile-table -->\n", "<!-- end of the table -->\n"
WAYS = [f"{backend}-{sizes}" for backend in ("aot_eager", "inductor") for sizes in ("fixed", "dynamic")]
UNSEEN = "not run"


def load(cells: Path = CELLS) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(cells.read_text()) if cells.exists() else {}
    return found


def save(found: dict[str, dict[str, str]], cells: Path = CELLS) -> None:
    """In the order of the rows and of the ways, so that a change of one cell is a change of one line."""
    kept = {title: {way: found[title][way] for way in WAYS if way in found[title]} for title in CALLS if title in found}
    cells.write_text(json.dumps(kept, indent=1) + "\n")


def fill(title: str, way: str) -> str:
    """What happens: "works", "works forward" where nothing has a gradient, or the first line of the refusal."""
    backend, sizes = way.split("-")
    try:
        differentiated = compare(CALLS[title], backend, sizes == "dynamic", chance=title in CHANCE)
    except Exception as error:  # a table of what happens says so of everything
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return "works" if differentiated else "forward"


def in_turn() -> list[str]:
    """Of every public name one row, then all others: a run that is stopped has seen every name rather than a corner."""
    first = {rows_of(name)[0] for name in public_names() if name not in NO_CALL}
    return sorted(CALLS, key=lambda title: title not in first)


def render(cells: dict[str, dict[str, str]]) -> str:
    """The table as the page shows it."""
    lines = ["| call | " + " | ".join(WAYS) + " |", "|---" * (1 + len(WAYS)) + "|"]
    for title in CALLS:
        cell = cells.get(title, {})
        lines.append(f"| {title} | " + " | ".join(cell.get(way, UNSEEN) for way in WAYS) + " |")
    return "\n".join(lines) + "\n"


def write() -> None:
    text = PAGE.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(head + BEGIN + "\n" + render(load()) + "\n" + END + tail)


def merge(others: Iterable[Path]) -> None:
    """Bring the cells of other runs into the table."""
    cells = load()
    for other in others:
        for title, found in load(other).items():
            cells.setdefault(title, {}).update(found)
    save(cells)


def share_out(workers: int, given: list[str]) -> None:
    """The same run in several processes, each with its share of the rows; what they find is taken over as they go."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{k}.json" for k in range(workers)]
        for part in parts:
            part.write_text(CELLS.read_text() if CELLS.exists() else "{}")
        command = [sys.executable, "-m", "tests.compile.table", *given]
        runs = [
            subprocess.Popen([*command, "--share", f"{k}/{workers}", "--cells", str(part)])
            for k, part in enumerate(parts)
        ]
        try:
            while any(run.poll() is None for run in runs):
                time.sleep(10)
                merge(known for known in parts if whole(known))
        finally:
            for run in runs:
                run.terminate()
        merge(known for known in parts if whole(known))


def whole(cells: Path) -> bool:
    """Not just being written."""
    try:
        load(cells)
    except json.JSONDecodeError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--only", default="")
    parser.add_argument("--missing", action="store_true", help="leave alone what works already")
    parser.add_argument(
        "--share", default="0/1", help="every n-th row from the k-th, k/n: for several runs side by side"
    )
    parser.add_argument("--cells", type=Path, default=CELLS, help="where to write; --merge brings it into the table")
    parser.add_argument("--merge", type=Path, nargs="*", default=(), help="cells of other runs; runs nothing itself")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.workers > 1:
        share_out(given.workers, ["--ways", given.ways, "--only", given.only, *["--missing"] * given.missing])
    if given.merge:
        merge(given.merge)
    first, step = (int(x) for x in given.share.split("/"))
    for title in () if given.merge or given.workers > 1 else in_turn()[first::step]:
        for way in given.ways.split(","):
            known = load(given.cells).get(title, {}).get(way, "")
            if given.only not in title or (given.missing and known in ("works", "forward")):
                continue
            start = time.process_time()
            said = fill(title, way)
            cells = load(given.cells)
            cells.setdefault(title, {})[way] = said
            save(cells, given.cells)
            print(f"{time.process_time() - start:6.1f} s  {title}  {way}  {said}", flush=True)
    if given.cells == CELLS:
        write()


if __name__ == "__main__":
    main()
