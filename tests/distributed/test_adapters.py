"""Adapters over two ranks: value and gradient are those of the libraries they stand in for."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.distributed.world import Worlds
from tests.losses.test_peers import open_clip_losses

MODES = [None, "in_batch_negatives", "hard_negatives", "all_negatives"]


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="pip install sentence-transformers"
)
@pytest.mark.parametrize(("check", "given"), [*(("ranking", {"hardness": mode}) for mode in MODES), ("cached", {})])
def test_sentence_transformers_gathers_across_devices(worlds: Worlds, check: str, given: dict[str, Any]) -> None:
    worlds.of(2).run("adapters", check, **given)


IMPLS = [None, "shift", "reduce", "gather"]


@pytest.mark.parametrize(("check", "given"), [("clip", {}), *(("siglip", {"dist_impl": how}) for how in IMPLS)])
def test_open_clip_uses_the_texts_of_all_ranks(worlds: Worlds, check: str, given: dict[str, Any]) -> None:
    open_clip_losses()  # skips where it is not installed
    worlds.of(2).run("adapters", check, **given)
