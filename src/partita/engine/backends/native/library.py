"""Finding and loading the C++ library: from the package, or from where PARTITA_NATIVE_LIBRARY points.

It is built when the package is installed, where a compiler is there. Its OpenMP runtime is the one torch has loaded, so
torch is imported first. PARTITA_ISA (avx512, avx2, baseline), read by the library itself, asks for a lesser one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
from pathlib import Path
from typing import NamedTuple

import torch  # noqa: F401  (its OpenMP runtime must be there before the library asks for one)

_VERSION = 5
_NAME = "libpartita_native.so"
_FUNCTIONS = {
    "reduce": 2,
    "reduce_backward": 2,
    "rows": 1,
    "logits": 1,
    "tally": 1,
}  # and how many structures each takes


class Library(NamedTuple):
    """The loaded library, the instruction set it chose, and its file."""

    handle: ctypes.CDLL
    isa: str
    path: Path


@functools.cache
def _find() -> tuple[Library | None, str | None]:
    places = [Path(__file__).parent / _NAME]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        places.append(
            Path(str(importlib.metadata.distribution("partita").locate_file(f"partita/engine/backends/native/{_NAME}")))
        )
    if override := os.environ.get("PARTITA_NATIVE_LIBRARY"):
        places = [Path(override)]
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        return None, f"the native library is not there (looked for {', '.join(map(str, places))}); it was not built"
    try:
        handle = ctypes.CDLL(str(path))
        handle.partita_version.restype = ctypes.c_int32
        handle.partita_isa.restype = ctypes.c_char_p
        if (version := handle.partita_version()) != _VERSION:
            return None, f"{path} has interface version {version}, this package needs {_VERSION}; install again"
        for name, arguments in _FUNCTIONS.items():
            function = getattr(handle, f"partita_{name}")
            function.restype = ctypes.c_int32
            function.argtypes = [ctypes.c_char_p] * arguments
        return Library(handle, handle.partita_isa().decode(), path), None
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"


def load() -> Library | None:
    """The native library, or None where it is missing or unusable; never raises."""
    return _find()[0]


def why_not() -> str | None:
    """Why `load` gives None; None where it gives a library."""
    return _find()[1]
