"""The runs of examples/qk_clip.py and entropy_band.py: they learn with their controller and stay a guess without."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = [("qk_clip", 20.0, torch.float32), ("entropy_band", (0.2, 1.0), None)]
BFLOAT16 = pytest.param("qk_clip", 20.0, torch.bfloat16, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def train(name, setting, dtype, steps):
    example = importlib.import_module(name)
    return example.train(setting, *(() if dtype is None else (dtype,)), steps)


@pytest.mark.parametrize(("name", "setting", "dtype"), [*CASES, BFLOAT16], ids=str)
def test_it_learns_with_its_controller_and_not_without(name, setting, dtype):
    """Scores explode without a clip; entropy collapses without a band."""
    example = importlib.import_module(name)
    guess = math.log(example.SYMBOLS)
    (lost, before), (learned, after) = (
        (example.smooth(x)[-1] for x in train(name, given, dtype, 300)) for given in (None, setting)
    )
    assert lost > 0.9 * guess and learned < 0.5 * guess
    assert (before > 1000 and after < 100) if name == "qk_clip" else (before < 0.01 and after > 0.15)


@pytest.mark.parametrize(
    ("name", "setting", "dtype"), [("qk_clip", 20.0, torch.float32), ("entropy_band", (0.2, 1.0), None)]
)
def test_it_draws(name, setting, dtype, tmp_path):
    runs = {str(given): train(name, given, dtype, 3) for given in (None, setting)}
    importlib.import_module(name).draw(runs, str(tmp_path / "figure.svg"))
    assert (tmp_path / "figure.svg").read_text().startswith("<svg")
