"""Rows in one block, or in blocks of a few, whose backward passes recompute them."""

from __future__ import annotations

import pytest

from partita import recompute


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(recompute, "_CELLS", 1)
    monkeypatch.setattr(recompute, "_FEWEST", 3)


@pytest.fixture(params=["one block", "many blocks"])
def blocked(request):
    if request.param == "many blocks":
        request.getfixturevalue("small_blocks")
