"""Fill the list of docs/guide/compile.md: every row, compiled each way.

    python -m tests.compile.table [--ways aot_eager-dynamic,inductor-fixed] [--only TEXT] [--missing] [--workers 2]

The cells are kept in table.json beside this file, written after each row, so that a run can be stopped and go on. A new
row needs nothing but a call in rows.py and a run with --missing. A cell takes some four seconds of a processor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import textwrap
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.compile.calls import compare
from tests.compile.rows import CALLS, CHANCE, NO_CALL, public_names, rows_of

CELLS = Path(__file__).with_name("table.json")
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "compile.md"
BEGIN, END = "<!-- the table: make compile-table -->\n", "<!-- end of the table -->\n"
WAYS = [f"{backend}-{sizes}" for backend in ("aot_eager", "inductor") for sizes in ("fixed", "dynamic")]
UNSEEN = "not run"


def load() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(CELLS.read_text()) if CELLS.exists() else {}
    return found


def save(found: dict[str, dict[str, str]]) -> None:
    """In the order of the rows and of the ways, so that a change of one cell is a change of one line."""
    kept = {title: {way: found[title][way] for way in WAYS if way in found[title]} for title in CALLS if title in found}
    CELLS.write_text(json.dumps(kept, indent=1) + "\n")


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
    """What the page shows: calls by what came out of all four ways; one whose ways differ has a line of its own."""
    groups: dict[str, list[str]] = {}
    for title in CALLS:
        said = [cells.get(title, {}).get(way, UNSEEN) for way in WAYS]
        alike = said[0] if len(set(said)) == 1 else ", ".join(f"{way}: {s}" for way, s in zip(WAYS, said, strict=True))
        groups.setdefault(alike, []).append(title)
    return "\n\n".join(
        textwrap.fill(f"**{said}** ({len(titles)}): {'; '.join(titles)}.", 120, break_on_hyphens=False)
        for said, titles in groups.items()
    ) + "\n"  # fmt: skip


def write() -> None:
    text = PAGE.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(head + BEGIN + "\n" + render(load()) + "\n" + END + tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--only", default="")
    parser.add_argument("--missing", action="store_true", help="leave alone what works already")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    given = parser.parse_args()
    cells, context = load(), multiprocessing.get_context("spawn")
    asked = [(title, way) for title in in_turn() for way in given.ways.split(",") if given.only in title]
    if given.missing:
        asked = [(title, way) for title, way in asked if cells.get(title, {}).get(way) not in ("works", "forward")]
    with ProcessPoolExecutor(given.workers, context, warnings.simplefilter, ("ignore",)) as pool:
        running = {pool.submit(fill, *cell): cell for cell in asked}
        for done in as_completed(running):
            title, way = running[done]
            cells.setdefault(title, {})[way] = done.result()
            save(cells)
            print(f"{title}  {way}  {done.result()}", flush=True)
    write()


if __name__ == "__main__":
    main()
