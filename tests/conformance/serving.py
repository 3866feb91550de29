"""Which backends are tested, and how a test enters one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import partita
from partita.engine.backends import TABLE
from partita.engine.backends.tiled import tile_shape
from partita.errors import BackendError
from tests.conformance import toy

# A small problem fits into one tile of the usual size, which `dense` tests already: tiled is tested in tiles of a few
# keys that divide nothing, and where hundreds of those would only measure the merging, in larger ones.
if os.environ.get("PARTITA_BACKEND") == "toy":
    TABLE["toy"] = toy.BACKEND
TILES = {"tiled-5x3": (5, 3), "tiled-64x64": (64, 64)}


def names(tiles: str = "tiled-5x3") -> list[str]:
    """Every backend that can run here, or the one that PARTITA_BACKEND names; tiled in tiles of this size."""
    chosen = os.environ.get("PARTITA_BACKEND", "auto")
    found = [name for name in partita.backends() if chosen in ("auto", name) and _loads(name)]
    return [tiles if name == "tiled" else name for name in found]


def _loads(name: str) -> bool:
    """Entering a backend promises nothing; serving the smallest request does."""
    try:
        with partita.backend(name):
            partita.Gibbs(torch.zeros(1, 1), torch.zeros(1, 1)).log_partition()
        return True
    except BackendError:
        return False


@contextlib.contextmanager
def serving(name: str) -> Iterator[None]:
    """Everything inside is computed by this backend; what kernels cannot serve is skipped with the reason."""
    with contextlib.ExitStack() as stack:
        if name in TILES:
            stack.enter_context(tile_shape(*TILES[name]))
        stack.enter_context(partita.backend("tiled" if name in TILES else name))
        try:
            yield
        except BackendError as reason:
            if name not in ("native", "triton", "toy"):
                raise
            if hypothesis.currently_in_test_context():
                hypothesis.reject()
            pytest.skip(f"{name}: {reason}")
