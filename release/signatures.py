"""Write src/partita/_signatures.pyi: what the faces return, for type checkers, by the value of their flags.

    python release/signatures.py

A plain call gives a Tensor, `return_stats=True` a pair, and a bool that is not known beforehand either. Parameters are
those of the functions themselves; written out by hand they would be two to four copies of each signature.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import partita

FILE = Path(__file__).resolve().parents[1] / "src" / "partita" / "_signatures.pyi"
FALSE, TRUE = "Literal[False]", "Literal[True]"


def by(flag: str, second: str) -> list[tuple[dict[str, str], str]]:
    """A Tensor, a pair, or either."""
    pair = f"tuple[Tensor, {second}]"
    return [({flag: FALSE}, "Tensor"), ({flag: TRUE}, pair), ({flag: "bool"}, f"Tensor | {pair}")]


STATS = {
    "linear_cross_entropy": "LossStats",
    "cross_entropy": "LossStats",
    "info_nce_loss": "ContrastStats",
    "clip_loss": "ContrastStats",
    "nt_xent_loss": "ContrastStats",
    "supcon_loss": "LabelStats",
}
# name -> what its flags may be, and what it then gives
FACES = {name: by("return_stats", stats) for name, stats in STATS.items()}
FACES["attention"] = [({"return_received": FALSE, **flags}, gives) for flags, gives in by("return_stats", "Stats")]
FACES["attention"].append(({"return_received": TRUE}, "tuple[Any, ...]"))
FACES["solve_scale"] = by("return_reached", "Tensor")
HEAD = '''\
"""The faces as type checkers see them; written by release/signatures.py, held to the functions by a test."""

from typing import Any, Literal, overload

from torch import Tensor

from partita.attn import Bias
from partita.contrastive import ContrastStats, Exclusion, LabelStats, Queue
from partita.engine import Stats
from partita.losses import LossStats
from partita.scale import Policy
from partita.score import Score
from partita.support import Support
'''


def overload(name: str, flags: dict[str, str], gives: str) -> str:
    lines, starred = [], False
    for p in inspect.signature(getattr(partita, name)).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            starred = True
            lines.append("    *,")
        kind, default = str(p.annotation), "" if p.default is p.empty else " = ..."
        if p.name in flags:
            kind, default = flags[p.name], " = ..." if flags[p.name] == FALSE else ""
        lines.append(f"    {p.name}: {kind}{default},")
    return "\n".join(["@overload", f"def {name}(", *lines, f") -> {gives}: ..."])


def text() -> str:
    parts = [HEAD]
    for name, ways in FACES.items():
        parts += [overload(name, flags, gives) for flags, gives in ways]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
