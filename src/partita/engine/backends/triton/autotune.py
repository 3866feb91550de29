"""Try other tiles on a device: PARTITA_TRITON_AUTOTUNE=1.

The table of `tiles` was chosen by what a compiler says a kernel needs; no device has been asked. With this, the first
call of each kind (direction, dimension, dtype, level, device) times the alternatives and the process keeps the fastest.
Another tile rounds otherwise: with it on, two processes may differ in their last bits.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from partita.engine.backends.triton import tiles
from partita.engine.request import Request

__all__ = ["asked", "autotuned"]

_Result = TypeVar("_Result")
_ROUNDS = 5  # of which the fastest counts; one before them compiles


def asked() -> bool:
    return os.environ.get("PARTITA_TRITON_AUTOTUNE", "0") == "1"


def autotuned(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """A pass, or its backward, that looks for the best tiles before it first runs, where that is asked."""

    @functools.wraps(function)
    def call(request: Request, *rest: Any) -> _Result:
        if asked():
            with tiles.tuning() as wanted:
                function(request, *rest)  # tells which tiles it would take
            for key in wanted:
                _tune(key, lambda: function(request, *rest), request.query.device)
        return function(request, *rest)

    return call


def _tune(key: tiles.Key, call: Callable[[], object], device: torch.device) -> None:
    """Keep the tile with which the call is fastest; one that does not compile, or does not fit, is no candidate."""
    found = {}
    for tile in tiles.candidates(key):
        tiles.keep(key, tile)
        try:
            found[tile] = _seconds(call, device)
        except Exception:  # triton has errors of its own for each: too much shared memory, a shape it cannot multiply
            continue
    tiles.keep(key, min(found, key=lambda tile: found[tile], default=tiles.tabled(key)))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    times: Sequence[float] = [_once(call, device) for _ in range(1 + _ROUNDS)]
    return min(times[1:])


def _once(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
