"""The quick form of the length study runs, and reports every policy at every length with an interval."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partita_theory.experiments import length_generalisation as lengths
from partita_theory.experiments._language_model import Plan, corpus, draw, measured_sigma, read_at, train

STUDY = Path(__file__).parents[2] / "examples" / "length_study.py"


def test_the_quick_study_reports_every_policy_with_an_interval():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(STUDY), "--quick"], capture_output=True, text=True, timeout=1200, env=environment
    )
    assert done.returncode == 0, done.stderr
    rows = {name: line for line in done.stdout.splitlines() for name in lengths.POLICIES if line.startswith(name + " ")}
    assert set(rows) == set(lengths.POLICIES)
    for line in rows.values():
        cells = re.findall(r"(\d+\.\d+) \+-\s*(\d+\.\d+)", line)
        assert len(cells) == 2 and all(0 <= float(mean) <= 100 for mean, _ in cells)


@pytest.mark.parametrize("task", ["masked", "next"])
def test_the_language_model_learns_what_it_is_asked(task):
    """The loss falls, lengths beyond the trained one are read, a hidden word is not seen, the next word comes next."""
    plan = Plan(task, "reference", 300, 16, 2, 1, 16, 8, 60, 1e-2)
    model, losses = train(plan, None, 0)
    assert sum(losses[-10:]) / 10 < losses[0] - 0.5
    assert {"accuracy", "perplexity", "entropy", "normalised_entropy"} == read_at(model, plan, 32, 256).keys()
    assert measured_sigma(model, plan) > 0
    seen, truth = draw(corpus("reference", 300)[0], 16, 8, task, torch.Generator().manual_seed(0))
    if task == "masked":
        assert (seen[truth >= 0] == 0).all() and (seen[truth < 0] != 0).all()
    else:
        assert (truth[:, :-1][truth[:, :-1] >= 0] == seen[:, 1:][truth[:, :-1] >= 0]).all()


def test_the_policies_that_share_a_model_would_have_trained_to_the_same_one():
    plan = Plan("masked", "reference", 300, 16, 2, 1, lengths.TRAINED, 4, 6, 1e-2)
    _, usual = train(plan, None, 0)
    _, other = train(plan, lengths.policy(lengths.LOG, plan, 0), 0)
    assert usual == pytest.approx(other, rel=1e-5)
    shared, losses = lengths.trained(lengths.LOG, plan, 0)
    assert losses == usual and shared.layers[0].self_attn.scale == lengths.policy(lengths.LOG, plan, 0)
    assert lengths.usual(plan, 0)[0].layers[0].self_attn.scale is None
