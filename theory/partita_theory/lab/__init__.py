"""The softmax lab: one self-contained page to play with one partition function."""

from __future__ import annotations

from pathlib import Path

from partita.monitor.files import replace_file
from partita.monitor.report.html import asset, page

__all__ = ["render", "write"]

SHARED = ("base.js", "chart.js")
SCRIPTS = ("math.js", "knobs.js", "simplex.js", "stream.js", "attend.js", "faces.js", "pull.js", "noise.js", "start.js")


def render() -> str:
    """The page as text."""
    return page(
        title="softmax lab · partita",
        style=asset("partita.monitor.report", "base.css") + asset(__name__, "lab.css"),
        script=asset("partita.monitor.report", *SHARED) + "\n" + asset(__name__, *SCRIPTS),
        data={"page": "lab"},
        fallback="<h1>Softmax lab</h1><p>This page computes in the browser and needs scripts; it makes no request.</p>",
    )


def write(path: str | Path) -> Path:
    """Write the page; the folder is made."""
    return replace_file(path, render())
