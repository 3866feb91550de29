"""Adapters over two ranks: value and gradient are those of the libraries they stand in for."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from tests.distributed.world import Worlds


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="pip install sentence-transformers"
)
@pytest.mark.parametrize("hardness", [None, "in_batch_negatives", "hard_negatives", "all_negatives"])
def test_sentence_transformers_gathers_across_devices(worlds: Worlds, hardness: str | None) -> None:
    worlds.of(2).run("adapters", "ranking", hardness=hardness)


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="pip install sentence-transformers"
)
def test_sentence_transformers_cached_gathers_across_devices(worlds: Worlds) -> None:
    worlds.of(2).run("adapters", "cached")


def _needs_open_clip() -> None:
    try:
        importlib.metadata.version("open_clip_torch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install --no-deps open_clip_torch")


def test_open_clip_gathers_with_gradients(worlds: Worlds) -> None:
    _needs_open_clip()
    worlds.of(2).run("adapters", "clip")


@pytest.mark.parametrize("dist_impl", [None, "shift", "reduce", "gather"])
def test_open_clip_asks_the_texts_of_all_ranks(worlds: Worlds, dist_impl: str | None) -> None:
    _needs_open_clip()
    worlds.of(2).run("adapters", "siglip", dist_impl=dist_impl)
