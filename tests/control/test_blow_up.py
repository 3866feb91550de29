"""The run of examples/qk_clip.py: built to blow up, it learns with QK-clip and stays a guess without."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "qk_clip.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("qk_clip_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_it_survives_with_the_clip_and_dies_without(example, dtype):
    guess = math.log(example.SYMBOLS)
    losses, scores = (example.smooth(x)[-1] for x in example.train(None, dtype, 300))
    assert losses > 0.9 * guess and scores > 1000
    losses, scores = (example.smooth(x)[-1] for x in example.train(20.0, dtype, 300))
    assert losses < 0.5 * guess and scores < 100


def test_it_draws(example, tmp_path):
    runs = {"plain": example.train(None, torch.float32, 3), "clipped": example.train(20.0, torch.float32, 3)}
    example.draw(runs, str(tmp_path / "figure.svg"))
    assert (tmp_path / "figure.svg").read_text().startswith("<svg")
