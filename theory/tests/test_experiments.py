"""Every experiment at its tiny size: flat rows, the same rows for the same cell, a verdict and a figure from them.

Those that need another package are skipped without it; `make test-peers` has them all.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomllib
import torch

from partita_theory.experiment import SIZES, Cell, Experiment
from partita_theory.experiments import find, names
from partita_theory.figure import svg
from partita_theory.results import Row
from partita_theory.store import Store
from partita_theory.verdict import Verdict

IDS = set(tomllib.loads((Path(__file__).parents[2] / "theory" / "statements.toml").read_text(encoding="utf-8")))


def found(name: str) -> Experiment:
    experiment = find(name)
    absent = [need for need in experiment.needs if importlib.util.find_spec(need) is None]
    if absent:
        pytest.skip(f"{name} needs {', '.join(absent)}; make test-peers installs it")
    return experiment


def text(rows: Sequence[Row]) -> str:
    return json.dumps(rows)  # as text, because nan is not equal to itself


@pytest.mark.parametrize("name", names())
def test_at_tiny_size(name: str, tmp_path: Path) -> None:
    experiment = found(name)
    plan = experiment.cells("tiny")
    with Store(tmp_path, name, "tiny") as store:
        for k, cell in enumerate(plan):
            torch.manual_seed(k)  # whatever ran before
            rows = list(experiment.run(cell.settings, cell.seed))
            assert rows, cell
            for row in rows:
                # the record holds every setting; a row repeats those that it is judged and drawn by
                assert row["seed"] == cell.seed and cell.settings.keys() & row.keys()
            store.add(cell, rows, elapsed_s=0.0)  # refuses rows that are not flat
            assert text(store.rows([cell])) == text(rows)
    assert_same_again(experiment, plan[0], store)
    rows = store.rows(plan)
    before = text(rows)
    verdict = experiment.judge(rows)
    assert isinstance(verdict, Verdict) and re.search(r"\d", verdict.evidence), "evidence is numbers"
    figure = experiment.figure(rows)
    assert text(rows) == before, "judge and figure leave the rows as they are"
    assert 1 <= len(figure.panels) <= 4
    drawn = svg(figure)
    ElementTree.fromstring(drawn)
    assert "<path" in drawn and "nothing to show: no lines" not in drawn


def assert_same_again(experiment: Experiment, cell: Cell, store: Store) -> None:
    """The same cell after all the others, from another state of torch's global generator."""
    torch.manual_seed(20_240_229)
    torch.randn(3)
    assert text(list(experiment.run(cell.settings, cell.seed))) == text(store.rows([cell]))


QUICK = (
    "attention_entropy head_entropy initialisation linear_entropy normalisers optimal_entropy regression_noise "
    "relevant_keys trained_retrieval training_dynamics why_softmax"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK.split())
def test_at_quick_size(name: str) -> None:
    """Every cell runs, seeds differ, and the verdict rests on finite intervals; which one it is, is not asked."""
    experiment = found(name)
    rows = [row for cell in experiment.cells("quick") for row in experiment.run(cell.settings, cell.seed)]
    seeds = {row["seed"] for row in rows}
    assert len(seeds) > 1
    assert len({text([{**row, "seed": 0} for row in rows if row["seed"] == seed]) for seed in seeds}) == len(seeds)
    verdict = experiment.judge(rows)
    assert "inf" not in re.findall(r"[a-z]+", verdict.evidence) and "nan" not in re.findall(r"[a-z]+", verdict.evidence)
    assert "<path" in svg(experiment.figure(rows))


@pytest.mark.parametrize("name", names())
def test_says_what_it_asks(name: str) -> None:
    experiment = find(name)
    assert experiment.name == name and experiment.question.endswith("?") and len(experiment.expected) > 10
    assert experiment.ids and set(experiment.ids) <= IDS
    cells = {size: experiment.cells(size) for size in SIZES}
    for size, plan in cells.items():
        assert plan and len({cell.key for cell in plan}) == len(plan), size
    assert len(cells["quick"]) * experiment.sizes["quick"].seconds <= 60
    assert experiment.sizes["quick"].seeds > 1 or name == "errata", "several seeds"


def test_all_quick_sizes_together_stay_under_a_quarter_of_an_hour() -> None:
    planned = sum(len(e.cells("quick")) * e.sizes["quick"].seconds for e in map(find, names()))
    assert planned < 15 * 60
