"""Finding, loading and calling the C++ library.

It is built when the package is installed, where a compiler is there, and lies beside this file. Its OpenMP runtime is
the one torch has loaded, so torch is imported first. PARTITA_ISA (avx512, avx2, baseline), read by the library itself,
asks for a lesser instruction set. PARTITA_NATIVE_LIBRARY names another file to load: its code runs in this process.
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

from partita.engine.backends.native import layout

__all__ = ["Library", "load", "run", "why_not"]

_VERSION = 9
_NAME = "libpartita_native.so"
_FUNCTIONS = {"forward": 2, "backward": 2, "attention": 3, "softmax_rows": 1, "logits": 1, "statistics": 1,
              "received": 2, "divergence_rows": 1, "top": 2, "gaps": 2}  # fmt: skip
_NOT_FINITE, _NO_MEMORY = 1, 2


class Library(NamedTuple):
    """The loaded library, the instruction set it chose, and its file."""

    handle: ctypes.CDLL
    isa: str
    path: Path


@functools.cache
def _find() -> tuple[Library | None, str | None]:
    places = [Path(__file__).parent / _NAME]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        inside = f"partita/engine/backends/native/{_NAME}"  # where the sources shadow an installed package
        places.append(Path(str(importlib.metadata.distribution("partita").locate_file(inside))))
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
        handle.partita_layout.restype = ctypes.c_char_p
        if wrong := layout.disagreement(handle.partita_layout().decode()):
            return None, f"{path} was built from other sources ({wrong}); install again"
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


def run(name: str, *structures: bytes) -> bool:
    """Call one of its functions on packed structures; False where a result is not finite."""
    library, reason = _find()
    if library is None:
        raise RuntimeError(f"no native backend: {reason}")
    outcome = getattr(library.handle, f"partita_{name}")(*structures)
    if outcome == _NO_MEMORY:
        raise MemoryError("the native backend could not allocate its workspace")
    return bool(outcome != _NOT_FINITE)
