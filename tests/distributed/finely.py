"""The checks of the other files with blocks cut as finely as can be: sizes of tests would not be cut at all."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch

from partita.distributed import blocks


def _fine() -> Any:
    return mock.patch.multiple(blocks, _SMALLEST=64, _FEW=2, _FEW_ROWS=3)


def again(group: Any, file: str, check: str, **arguments: Any) -> Any:
    """Another check, cut finely."""
    with _fine():
        return getattr(importlib.import_module(f"tests.distributed.{file}"), check)(group, **arguments)


def cuts(group: Any) -> tuple[int, int, int]:
    """How many parts a block of 40 keys has with 8 features, with 6 heads, and with 6 heads that share a value."""
    with _fine():
        one, heads = torch.zeros(40, 8), torch.zeros(6, 40, 8)
        return (
            len(blocks.Cut.of([one], 40)),
            len(blocks.Cut.of([heads, heads], 40)),
            len(blocks.Cut.of([heads, heads[:1]], 40)),
        )
