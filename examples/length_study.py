"""Trained at one length, read at another: which scale keeps a small transformer working?

Masked-word prediction on real text. Each policy is trained at length 64 from the same seeds and evaluated at longer
lengths. The published pattern (accuracy in percent at 64, 128, 256, 512, 1024) is 43.27 36.53 23.02 15.12 11.54 for
1/sqrt(d) and 43.11 41.17 34.04 20.15 13.58 for log n. What comes out here is printed as it is: the mean over seeds
and a 95 % interval of it. The experiment is `partita_theory.experiments.length_generalisation`; `partita study run
length_generalisation --size full` also predicts next words, keeps every row and draws the figure.

    python examples/length_study.py            a quarter of an hour on two cores
    python examples/length_study.py --quick    seconds: shows that it runs, not what is true
"""

from __future__ import annotations

import sys

import torch

from partita_theory.experiments.length_generalisation import EXPERIMENT, POLICIES, PUBLISHED
from partita_theory.results import Row, mean_by


def table(rows: list[Row], value: str, title: str, indent: str = "") -> None:
    """One line for each policy, one column for each length."""
    found = mean_by(rows, value, "policy", "n")
    lengths = sorted({row["n"] for row in rows})
    print(f"\n{title:<24}" + "".join(f"{n:>16}" for n in lengths))
    for name in POLICIES:
        cells = "".join(f"{found[name, n].mean:>8.2f} +-{found[name, n].half:>6.2f}" for n in lengths)
        print(f"{indent + name:<24}{cells}")
        if value == "accuracy" and name in PUBLISHED:
            print(f"{'  published':<24}" + "".join(f"{PUBLISHED[name][n]:>8.2f}{'':>8}" for n in lengths))


def main() -> None:
    quick = "--quick" in sys.argv
    if quick:
        torch.set_num_threads(1)  # too small to share
    cells = [cell for cell in EXPERIMENT.cells("tiny" if quick else "full") if cell.settings["task"] == "masked"]
    first = cells[0].settings
    print(f"{EXPERIMENT.question}\nexpected: {EXPERIMENT.expected}")
    print(f"text: {first['text']}; {first['steps']} steps of {first['batch']} windows of 64 words; {len(cells)} models")
    rows: list[Row] = []
    for done, cell in enumerate(cells):
        rows += EXPERIMENT.run(cell.settings, cell.seed)
        if not quick:
            print(f"{done + 1}/{len(cells)} {cell.settings['policy']}, seed {cell.seed}", file=sys.stderr, flush=True)
    table(rows, "accuracy", "accuracy in percent")
    table(rows, "normalised_entropy", "entropy / log n", indent="  ")
    print(f"\n{EXPERIMENT.judge(rows)}")


if __name__ == "__main__":
    main()
