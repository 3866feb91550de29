"""How many Python frames of partita there are between a public function and its kernel: a call must stay short to read.

Each call is counted the third time, when what depends on shapes alone is remembered. A row is a goal; one tenth more is
room for a change that is worth it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import partita
from partita.engine.backends.native import library

ROOT = os.path.dirname(partita.__file__) + os.sep
PAGE = Path(__file__).parents[1] / "docs" / "explain" / "engine.md"
ROOM = 1.1


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


Q, K, V = (torch.randn(1, 2, 8, 16) for _ in range(3))
A, B, C = (leaf(1, 2, 8, 16) for _ in range(3))
LONG = [leaf(1, 2, 256, 16) for _ in range(3)]
H, W, T = leaf(16, 8), leaf(32, 8), torch.randint(32, (16,))
MANY, CLASSES, TARGETS = leaf(256, 8), leaf(128, 8), torch.randint(128, (256,))
X, Y = leaf(16, 8), leaf(16, 8)
BATCH, OTHER = leaf(256, 8), leaf(256, 8)


def with_backward() -> None:
    out, stats = partita.attention(A, B, C, is_causal=True, return_stats=True)
    (out.sum() + stats.entropy.sum()).backward()


CALLS: dict[str, tuple[int, Callable[[], object]]] = {
    "attention": (14, lambda: partita.attention(Q, K, V, is_causal=True)),
    "attention, recorded": (30, lambda: partita.attention(A, B, C, is_causal=True)),
    "attention, recorded, long": (60, lambda: partita.attention(*LONG, is_causal=True)),
    "attention, recorded, stats": (80, lambda: partita.attention(A, B, C, is_causal=True, return_stats=True)),
    "the same with backward": (140, with_backward),
    "linear_cross_entropy": (20, lambda: partita.linear_cross_entropy(H, W, T)),
    "linear_cross_entropy, more rows": (70, lambda: partita.linear_cross_entropy(MANY, CLASSES, TARGETS)),
    "info_nce symmetric": (40, lambda: partita.info_nce_loss(X, Y, symmetric=True)),
    "info_nce symmetric, more rows": (70, lambda: partita.info_nce_loss(BATCH, OTHER, symmetric=True)),
    "info_nce symmetric, stats": (200, lambda: partita.info_nce_loss(X, Y, symmetric=True, return_stats=True)),
}


def frames(run: Callable[[], object]) -> list[str]:
    for _ in range(2):
        run()
    found: list[str] = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.append(f"{frame.f_code.co_filename.removeprefix(ROOT)}: {frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_few_frames(name):
    goal, run = CALLS[name]
    found = frames(run)
    assert 0 < len(found) <= goal * ROOM, "\n".join(found)


def test_a_watched_layer_takes_few_frames():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    feed = torch.randn(2, 8, 16)
    with partita.watch(layer):
        found = frames(lambda: layer(feed))
    assert 0 < len(found) <= 150 * ROOM, "\n".join(found)


@pytest.mark.skipif(library.load() is None, reason="the page shows the way to the native kernel")
def test_the_page_shows_every_function_of_a_recorded_call():
    """Comprehensions are functions in some versions of Python only; the wrapper of the face comes before the first."""
    made = [tuple(x.split(": ")) for x in frames(CALLS["attention, recorded, stats"][1]) if "<" not in x][1:]
    walk = PAGE.read_text().split("```text\n")[1].split("```")[0].splitlines()
    shown = [(line.split()[0], line.split()[1].split(".")[-1]) for line in walk]
    assert shown == made
