"""Write src/partita/_signatures.pyi: what the faces return, for type checkers, by the value of `return_stats`.

    python release/signatures.py

A plain call gives a Tensor, `return_stats=True` a pair, and a bool that is not known beforehand either. Parameters are
those of the functions themselves; written out by hand they would be three copies of each signature.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import partita

FILE = Path(__file__).resolve().parents[1] / "src" / "partita" / "_signatures.pyi"
STATS = {
    "linear_cross_entropy": "LossStats",
    "cross_entropy": "LossStats",
    "info_nce_loss": "ContrastStats",
    "clip_loss": "ContrastStats",
    "nt_xent_loss": "ContrastStats",
    "supcon_loss": "LabelStats",
}
HEAD = '''\
"""The faces as type checkers see them; written by release/signatures.py, held to the functions by a test."""

from typing import Literal, overload

from torch import Tensor

from partita.contrastive import ContrastStats, Exclusion, LabelStats, Queue
from partita.losses import LossStats
'''


def overload(name: str, wants: str, gives: str) -> str:
    lines, starred = [], False
    for p in inspect.signature(getattr(partita, name)).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            starred = True
            lines.append("    *,")
        kind, default = str(p.annotation), "" if p.default is p.empty else " = ..."
        if p.name == "return_stats":
            kind, default = wants, " = ..." if wants == "Literal[False]" else ""
        lines.append(f"    {p.name}: {kind}{default},")
    return "\n".join(["@overload", f"def {name}(", *lines, f") -> {gives}: ..."])


def text() -> str:
    parts = [HEAD]
    for name, stats in STATS.items():
        pair = f"tuple[Tensor, {stats}]"
        for wants, gives in (("Literal[False]", "Tensor"), ("Literal[True]", pair), ("bool", f"Tensor | {pair}")):
            parts.append(overload(name, wants, gives))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
