"""Global negatives: loss, gradients and statistics of every rank are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import World, Worlds

SPLITS = ["even", "uneven", "empty"]
CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "symmetric": {"symmetric": True},
    "symmetric rows": {"symmetric": True, "reduction": "none"},
    "statistics": {"return_stats": True, "symmetric": True},
    "unpaired": {"negatives": "unpaired", "return_stats": True},
    "paired": {"negatives": "paired", "return_stats": True},
    "labels": {"labels": True, "return_stats": True},
    "labels, symmetric": {"labels": True, "symmetric": True},
    "queue": {"queue": True, "return_stats": True},
    "hard negatives": {"hardness": 1.5},
    "decoupled": {"decoupled": True},
    "not normalised": {"normalize": False},
}


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("case", CASES)
def test_info_nce(world: World, how: str, case: str) -> None:
    world.run("contrast", "info_nce", how=how, **CASES[case])


def test_a_temperature_of_each_row(world: World) -> None:
    world.run("contrast", "temperature_of_each_row")


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("return_stats", [False, True])
def test_clip(world: World, how: str, bias: bool, return_stats: bool) -> None:
    world.run("contrast", "clip", how=how, bias=bias, return_stats=return_stats)


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}])
def test_siglip(world: World, how: str, options: dict[str, Any]) -> None:
    world.run("contrast", "siglip", how=how, **options)


def test_siglip_in_parts_and_in_half_precision(worlds: Worlds) -> None:
    worlds.of(2).run("contrast", "siglip", how="uneven", large=True)
    worlds.of(2).run("contrast", "siglip_halves")


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"return_stats": True}])
def test_nt_xent(world: World, how: str, options: dict[str, Any]) -> None:
    world.run("contrast", "nt_xent", how=how, **options)


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("labels", [3, 12])
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"return_stats": True}])
def test_supcon(world: World, how: str, reference: bool, labels: int, options: dict[str, Any]) -> None:
    world.run("contrast", "supcon", how=how, reference=reference, labels=labels, **options)
