"""Finished experiments -> rows that a record and its page can hold: question, expected answer, verdict, figure.

The folder is what `partita study run` leaves behind: verdicts.json, and a figure for each experiment.
Needs no torch, and runs nothing: an experiment that is not finished is not there.
"""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

__all__ = ["KIND", "gather", "packed", "readable"]

KIND = "experiment"  # rows of a record's `studies` that are of this kind; others are rows of numbers
SIZES = ("full", "quick", "tiny")  # the largest that was run is shown
LARGEST = 200_000  # characters of a figure that a page holds; a larger one stays on disk
MOST = 40  # experiments on one page
SVG = "{http://www.w3.org/2000/svg}"
TEXT = {"question": 300, "expected": 900, "within": 300, "evidence": 1500}


def gather(folder: str | Path, sizes: tuple[str, ...] = SIZES) -> list[dict[str, Any]]:
    """Every experiment with a verdict in `folder`, at the first of `sizes` that was run."""
    folder = Path(folder)
    try:
        verdicts = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    rows = []
    for name, by_size in sorted(verdicts.items()) if isinstance(verdicts, dict) else ():
        # a name is that of a file in this folder: nothing that could lead out of it
        if not re.fullmatch(r"\w+", name, re.ASCII) or not isinstance(by_size, dict):
            continue
        size = next((s for s in sizes if isinstance(by_size.get(s), dict)), None)
        if size is not None:
            path = folder / f"{name}-{size}.svg"
            there = path.is_file() and not path.is_symlink()
            figure = path.read_text(encoding="utf-8", errors="replace") if there else None
            rows.append({**by_size[size], "study": KIND, "name": name, "size": size, "figure": figure})
    return rows


def packed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page gets: text cut to a readable length, figures that fit; wrong types become text or nothing."""
    found = []
    for row in [r for r in rows if r.get("study") == KIND][:MOST]:
        one: dict[str, Any] = {k: _cut(row.get(k), most) for k, most in TEXT.items()}
        one.update({k: _cut(row.get(k), 80) for k in ("name", "size", "answer")})
        one["ids"] = [_cut(i, 24) for i in row.get("ids") or []][:12] if isinstance(row.get("ids"), list) else []
        one.update({k: row[k] if isinstance(row.get(k), int) else None for k in ("cells", "rows")})
        figure = row.get("figure")
        one["drawn"] = isinstance(figure, str) and len(figure) <= LARGEST
        one["figure"], one["points"] = readable(figure) if isinstance(figure, str) and one["drawn"] else (None, [])
        found.append(one)
    return found


def readable(text: str) -> tuple[str | None, list[list[str]]]:
    """The text if it is an SVG, and the points that its description lists as comma-separated values.

    The page shows it as an image, in which a browser runs no script and loads nothing.

    >>> readable('<svg xmlns="http://www.w3.org/2000/svg"><desc>line,x,y\\nmeasured,1,2</desc></svg>')[1]
    [['line', 'x', 'y'], ['measured', '1', '2']]
    >>> readable("<html/>")
    (None, [])
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        return None, []
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        return None, []
    if root.tag != SVG + "svg":
        return None, []
    return text, list(csv.reader((root.findtext(SVG + "desc") or "").splitlines()))


def _cut(value: Any, most: int) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= most else text[: most - 1] + "…"
