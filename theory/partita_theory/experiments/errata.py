"""The formulas of `partita_theory.errata`: printed, right, and measured.

Each row fixes its own random numbers, so a second seed would repeat them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from partita_theory import errata
from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Line, Panel
from partita_theory.results import Row, theory
from partita_theory.verdict import Verdict, settle

DOCUMENTS = tuple(dict.fromkeys(row.label.split()[0] for row in errata.ROWS))
LEAST = 1e-4  # a distance below it, in tolerances, is drawn as it


def measure(seed: int, document: str, every: int) -> Iterator[Row]:
    """The three numbers of each row of one document, or of every k-th."""
    chosen = [row for row in errata.ROWS if row.label.split()[0] == document]
    for row in chosen[::every]:
        verdict = row.check()
        yield {
            "label": row.label,
            "kind": row.kind,
            "spec": row.spec,
            "quantity": row.quantity,
            "printed": row.printed,
            "right": row.right,
            "printed_value": verdict.reading.printed,
            "right_value": verdict.reading.right,
            "measured": verdict.reading.measured,
            "tolerance": row.tolerance,
            "right_holds": verdict.right_holds,
            "printed_holds": verdict.printed_holds,
        }


def judge(rows: Sequence[Row]) -> Verdict:
    off = [row["label"] for row in rows if not row["right_holds"]]
    spared = [row["label"] for row in rows if row["printed_holds"]]
    kinds = {kind: sum(row["kind"] == kind for row in rows) for kind in errata.KINDS}
    counted = ", ".join(f"{count} {errata.KINDS[kind].partition(':')[0]}" for kind, count in kinds.items() if count)
    well = f"all {len(rows)} rows ({counted}): the right formula within its tolerance of the measurement, the printed "
    ill = (
        f"of {len(rows)} rows the right formula misses {len(off)} ({', '.join(off) or 'none'}) and the printed one "
        f"agrees in {len(spared)} ({', '.join(spared) or 'none'})."
    )
    return settle(ill if off or spared else well + "one outside it.", whole=not (off or spared))


def panels(rows: Sequence[Row]) -> list[Panel]:
    at = [float(k) for k in range(1, len(rows) + 1)]

    def distances(label: str) -> Line:
        off = [abs(row[f"{label}_value"] - row["measured"]) / row["tolerance"] for row in rows]
        return Line(label, at, [max(x, LEAST) for x in off], kind="points")

    y = f"distance in tolerances of the row (at most {LEAST:g}: drawn there)"
    lines = [distances("right"), distances("printed"), theory("tolerance", at, 1.0)]
    return [Panel("Each formula, and how far it is from what is measured", "row of the errata", y, lines, log_y=True)]


# ---- the table of the documentation --------------------------------------------------------------------------------

HEAD = """# Errata

Formulas that are in circulation and wrong, or true only under conditions that are not stated, next to the right ones.
Each row is one quantity three times: by the printed formula, by the right one, and measured (autograd, exact
enumeration, or simulation with a fixed seed). `partita_theory.errata` holds them, `partita study run errata`
recomputes them ([studies](studies.md)), and this page is written by

    python -m partita_theory.experiments.errata theory/docs/reference/errata.md

The statements (M-...) are those of [this list](statements.md).
"""


def errata_table(rows: Sequence[Row]) -> str:
    """The page of the documentation: a table for each document, and what the letters mean.

    >>> errata_table([]).startswith("# Errata")
    True
    """
    parts = [HEAD, *(f"- **{kind}** {meaning}" for kind, meaning in errata.KINDS.items())]
    parts += ["", "A dash stands for a formula that gives no number as it is printed. Numbers are rounded to 4 digits."]
    for document in dict.fromkeys(row["document"] for row in rows):
        parts += ["", f"## {document}", "", "| row | kind | printed | right | quantity | printed gives | right gives "]
        parts[-1] += "| measured | verdict | statement |"
        parts.append("|---|---|---|---|---|---|---|---|---|---|")
        for row in (row for row in rows if row["document"] == document):
            numbers = (_digits(row[k], row["tolerance"]) for k in ("printed_value", "right_value", "measured"))
            words = (row["label"].partition(" ")[2], row["kind"], row["printed"], row["right"], row["quantity"])
            stands = "confirmed" if row["right_holds"] and not row["printed_holds"] else "not confirmed"
            parts.append(f"| {' | '.join(map(_cell, (*words, *numbers, stands, row['spec'])))} |")
    return "\n".join(parts) + "\n"


def _digits(value: float, tolerance: float) -> str:
    """Four digits; what is rounding to the row is 0, and a formula without a number a dash."""
    if math.isnan(value):
        return "-"
    return "0" if abs(value) < 1e-3 * tolerance else f"{value:.4g}"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_")


EXPERIMENT = experiment(
    __name__,
    question="Which printed formulas does a measurement contradict?",
    expected="In every row the right formula agrees with the measurement and the printed one does not.",
    ids=tuple(dict.fromkeys(row.spec for row in errata.ROWS)),
    tiny=Size(grid(document=DOCUMENTS, every=9), seeds=1, seconds=0.2),
    quick=Size(grid(document=DOCUMENTS, every=1), seeds=1, seconds=1.0),
    full=Size(grid(document=DOCUMENTS, every=1), seeds=1, seconds=1.0),
    note=lambda rows: f"{len(rows)} rows; printed formulas that give no number are left out",
)

if __name__ == "__main__":
    import sys
    from pathlib import Path

    found = [row for cell in EXPERIMENT.cells("full") for row in EXPERIMENT.run(cell.settings, cell.seed)]
    Path(sys.argv[1]).write_text(errata_table(found), encoding="utf-8")
