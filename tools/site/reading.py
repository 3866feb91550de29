"""The page "Reading longer than trained", from the rows of its three studies.

python tools/site/reading.py FOLDER     writes theory/docs/guide/reading-longer.md from `partita study run
                                        reading_longer recall_longer scale_invariance --size full --out FOLDER`; where a
                                        study is not whole, it says so
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from partita_theory.experiments import find, reading_longer, recall_longer, scale_invariance
from partita_theory.results import Interval, Row, interval, mean_by, only, paired
from partita_theory.store import Store

__all__ = ["page"]

PAGE = Path(__file__).resolve().parents[2] / "theory" / "docs" / "guide" / "reading-longer.md"
USUAL, LOG = reading_longer.USUAL, reading_longer.LOG
OPENING = """# Reading longer than trained

A model trained at 64 words reads 1024. Two things are new to it: distances it has never seen, and sixteen times as many
keys that share its attention. Which of the two hurts, and what a scale that grows with log n wins back, is put to three
studies. Nothing on this page is trained at the longer lengths. Numbers are means over seeds with 95 % intervals; gains
are differences of the same seed (positive: fewer nats), in bold where the interval leaves out 0."""


def page(folder: Path, size: str = "full") -> str:
    """All of it, from the rows in a folder."""
    parts = [OPENING]
    for name, tables in (
        ("reading_longer", _reading), ("recall_longer", _recall), ("scale_invariance", _invariance)
    ):  # fmt: skip
        study = find(name)
        store, plan = Store(folder, name, size), study.cells(size)
        rows, left = store.rows(plan), len(store.missing(plan))
        parts += [f"## {study.question}", f"Expected before the run: {study.expected}"]
        if not rows:
            parts.append(f"Not run at this size yet: `partita study run {name} --size {size}`.")
            continue
        seeds = len({row["seed"] for row in rows})
        missing = f" {left} of {len(plan)} cells were not run; the verdict waits for them." if left else ""
        parts.append(f"{len(rows)} rows, {seeds} seeds.{missing}")
        parts += list(tables(rows))
        if not left:
            verdict = study.judge(rows)
            within = f" ({verdict.within})" if verdict.within else ""
            parts += [f"**{verdict.answer}**{within}.", f"![{study.question}](../../../docs/figures/{name}.svg)"]
    return "\n\n".join(parts).replace(" +- ", " ± ") + "\n"


def _reading(rows: list[Row]) -> Iterator[str]:
    fixed, mixed = only(rows, arm="fixed"), only(rows, arm="mixed")
    usual = only(fixed, scale=USUAL)
    lengths = sorted({row["n"] for row in usual})
    shown = [p for p in reading_longer.POSITIONS if only(usual, positions=p)]
    targets = max(row["targets"] for row in fixed)
    yield f"The same {targets:,} hidden words at every length, read with 1/sqrt(d). Nats, and accuracy in percent:"
    nll, right = (mean_by(usual, column, "positions", "n") for column in ("nll", "accuracy"))
    body = [
        [p, *(f"{_nats(nll[p, n])}<br>{right[p, n].mean:.1f} %" if (p, n) in nll else "" for n in lengths)]
        for p in shown
    ]
    yield _table(["positions", *map(str, lengths)], body)
    last = lengths[-1]
    if all(only(usual, positions=p, n=last) for p in ("rotary", "clipped", "window")):
        yield "Where the loss goes: positions are rotary minus clipped, dilution is clipped minus window (the ceiling)."
        kinds = {"positions": ("rotary", "clipped"), "dilution": ("clipped", "window"), "both": ("rotary", "window")}
        body = [
            [kind, *(_nats(paired(only(usual, n=n), "nll", "positions", a, b)) for n in lengths)]
            for kind, (a, b) in kinds.items()
        ]
        yield _table(["nats lost to", *map(str, lengths)], body)
    yield "What LogLength gains over 1/sqrt(d), by positions:"
    yield _table(
        ["positions", *map(str, lengths)],
        [[p, *(_gain(reading_longer.gain(fixed, p, n)) for n in lengths)] for p in shown],
    )
    ways = [w for w in dict.fromkeys(row["scale"] for row in fixed) if w != USUAL]
    yield f"What every scale gains at {last} words:"
    yield _table(
        ["scale", *shown], [[w, *(_gain(reading_longer.gain(fixed, p, last, w)) for p in shown)] for w in ways]
    )
    if mixed:
        yield "Trained on 16 to 128 words, where the scale acts in training: what LogLength gains."
        own = [p for p in shown if only(mixed, positions=p)]
        yield _table(
            ["positions", *map(str, lengths)],
            [[p, *(_gain(reading_longer.gain(mixed, p, n)) for n in lengths)] for p in own],
        )


def _recall(rows: list[Row]) -> Iterator[str]:
    lengths = sorted({row["n"] for row in rows})
    for noise in sorted({row["noise"] for row in rows}):
        own = only(rows, noise=noise)
        nll, right = (mean_by(own, column, "scale", "n") for column in ("nll", "accuracy"))
        ways = list(dict.fromkeys(row["scale"] for row in own))
        yield f"Noise {noise:g}: nats, and accuracy in percent, by the number of pairs."
        body = [
            [w, *(f"{nll[w, n]}<br>{right[w, n].mean:.1f} %" if (w, n) in nll else "" for n in lengths)] for w in ways
        ]
        yield _table(["scale", *map(str, lengths)], body)
        lead = [str(paired(only(own, n=n), "nll", "scale", USUAL, recall_longer.LOG)) for n in lengths]
        yield "LogLength gains " + ", ".join(f"{found} at {n}" for found, n in zip(lead, lengths, strict=True)) + "."


def _invariance(rows: list[Row]) -> Iterator[str]:
    lengths = sorted({row["n"] for row in rows})
    mean = mean_by(rows, "nll", "kind", "n")
    kinds = [k for k in scale_invariance.KINDS if only(rows, kind=k)]
    yield "Nats of the next word, one model for each kind and seed:"
    yield _table(
        ["trained with", *map(str, lengths)],
        [[k, *(_nats(mean[k, n]) if (k, n) in mean else "" for n in lengths)] for k in kinds],
    )


def _nats(found: Interval) -> str:
    return f"{found.mean:.3f} ± {found.half:.3f}"


def _gain(by_seed: dict[int, float]) -> str:
    if not by_seed:
        return ""
    found: Interval = interval(by_seed.values())
    text = f"{found.mean:+.3f} ± {found.half:.3f}"
    apart = abs(found.mean) >= 0.0005 and (found.low > 0 or found.high < 0)  # a difference that the digits show
    return f"**{text}**" if apart else text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---", *("---:" for _ in head[1:])], *map(list, rows)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace(" +- ", " ± ")
    return text.replace(" ± ", "<br>±\u00a0").replace(" %", "\u00a0%")  # columns are narrow: no number is broken


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), encoding="utf-8")
