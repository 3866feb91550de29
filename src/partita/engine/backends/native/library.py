"""The C++ library: its structures, and finding, loading and calling it.

It is built when the package is installed, where a compiler is there, next to this file. Its OpenMP runtime is the one
torch has loaded, so torch is imported first. PARTITA_ISA (avx512_bf16, avx512, avx2, baseline; on ARM neon_bf16, neon,
baseline), read by the library itself, selects a lesser instruction set. PARTITA_NATIVE_LIBRARY names another file to
load: its code runs in this process.

`native/interface.h` documents every field. The library reports the offset of each of its own (`partita_layout`), and is
refused where they differ from the lists here: no call can be made with fields that have moved. A field that begins with
an underscore is in the padding of earlier versions, and not reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch  # noqa: F401  (its OpenMP runtime must be there before the library needs one)

__all__ = ["Library", "Structure", "load", "run", "why_not"]

_FORMATS = {"i64": "q", "i32": "i", "f64": "d", "ptr": "q"}  # native sizes and alignment, as the compiler's
_OPERAND = (("data", "ptr"), ("offset", "ptr"), ("row", "i64"), ("col", "i64"))


class Structure:
    """One C structure: its fields in order, each after the name of its kind.

    >>> Structure("Pair", "i32 first second ptr data").offsets
    {'first': 0, 'second': 4, 'data': 8}
    """

    def __init__(self, name: str, fields: str) -> None:
        self.name = name
        kind, flat = "", []
        for word in fields.split():
            if word in _FORMATS or word == "operand":
                kind = word
            elif kind == "operand":
                flat += [(f"{word}.{part}", of) for part, of in _OPERAND]
            else:
                flat.append((word, kind))
        formats = "".join(_FORMATS[kind] for _, kind in flat)
        self.pack = struct.Struct(formats).pack
        self.size = struct.calcsize(formats)
        self.offsets = {
            field: struct.calcsize(formats[: i + 1]) - struct.calcsize(formats[i]) for i, (field, _) in enumerate(flat)
        }


PROBLEM = Structure(
    "PartitaProblem",
    "i64 B Q K D V  i32 dtype bias_dtype threads exact  f64 softcap "
    "operand query key value scale bias target start stop query_segment key_segment mask skip",
)
SUMS = Structure(
    "PartitaSums",
    "ptr peak mass first second moment target_score count rank col_peak col_mass stats  i32 mean forward_only "
    "ptr moment_offset  i64 moment_row  ptr argmax",
)
GRADIENTS = Structure(
    "PartitaGradients",
    "ptr group  i64 groups  ptr peak mass first second moment target query scale key value bias_row bias_col "
    "operand bias  i64 bias_is_shared  ptr col_peak col_mass  i64 rounded",
)
ATTENTION = Structure("PartitaAttention", "f64 scale  ptr query key value mean stats count first")
SOFTMAX_ROWS = Structure(
    "PartitaSoftmaxRows",
    "i64 rows cols row  i32 dtype threads gradient unused  ptr logits bias target weight peak mass target_score",
)
LOGITS = Structure(
    "PartitaLogits", "i64 rows classes dim weight_row logits_row  i32 dtype threads  ptr input weight logits"
)
COLUMNS = Structure("PartitaColumns", "ptr peak weight slot  i64 slots  ptr sums")
DIVERGENCE_ROWS = Structure(
    "PartitaDivergenceRows",
    "i64 rows cols p_row q_row record_row  i32 dtype threads kind p_gradient q_gradient unused  f64 beta "
    "ptr p q p_bias q_bias p_start p_stop q_start q_stop weight record",
)
TOP = Structure("PartitaTop", "i64 k  ptr score index")
GAPS = Structure("PartitaGaps", "i64 edges  ptr edge count")
STRUCTURES = (
    PROBLEM, SUMS, GRADIENTS, ATTENTION, SOFTMAX_ROWS, LOGITS, COLUMNS, DIVERGENCE_ROWS, TOP, GAPS,
)  # fmt: skip


def disagreement(reported: str) -> str | None:
    """How the library's own report ("PartitaProblem.B=0 ...") differs from the lists here; None where it does not."""
    theirs = {name: int(at) for name, _, at in (item.partition("=") for item in reported.split())}
    ours = {f"{s.name}.{field}": at for s in STRUCTURES for field, at in s.offsets.items()}
    ours |= {s.name: s.size for s in STRUCTURES}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            there, here = (x.get(name, "no place") for x in (theirs, ours))
            return f"{name} is at {there} in the library and at {here} here"
    return None


# ---- loading and calling -------------------------------------------------------------------------------------------

_VERSION = 11
_NAME = "libpartita_native.so"
_FUNCTIONS = {"forward": 2, "backward": 2, "attention": 3, "softmax_rows": 1, "logits": 1, "received": 2,
              "divergence_rows": 1, "top": 2, "gaps": 2, "input_gradient": 1, "weight_gradient": 1}  # fmt: skip
_MULTIPLIES_PAIRS = ("avx512_bf16", "neon_bf16")
_NOT_FINITE, _NO_MEMORY = 1, 2


class Library(NamedTuple):
    """The loaded library, the instruction set it chose, its file, and its functions by name."""

    handle: ctypes.CDLL
    isa: str
    path: Path
    functions: dict[str, Callable[..., Any]]

    @property
    def pairs(self) -> bool:
        """Whether bfloat16 numbers are multiplied in pairs; elsewhere they are widened."""
        return self.isa in _MULTIPLIES_PAIRS


@functools.cache
def _find() -> tuple[Library | None, str | None]:
    places = [Path(__file__).parent / _NAME]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        inside = f"partita/engine/backends/native/{_NAME}"  # where the sources shadow an installed package
        places.append(Path(str(importlib.metadata.distribution("partita").locate_file(inside))))
    if override := os.environ.get("PARTITA_NATIVE_LIBRARY"):
        places = [Path(override)]
    # absolute: the loader searches the system's folders for a name without a slash, and may find another file there
    path = next((p.absolute() for p in places if p.is_file()), None)
    if path is None:
        return None, f"the native library is not there (looked for {', '.join(map(str, places))}); it was not built"
    try:
        handle = ctypes.CDLL(str(path))
        handle.partita_version.restype = ctypes.c_int32
        handle.partita_isa.restype = ctypes.c_char_p
        if (version := handle.partita_version()) != _VERSION:
            return None, f"{path} has interface version {version}, this package needs {_VERSION}; install again"
        handle.partita_layout.restype = ctypes.c_char_p
        if wrong := disagreement(handle.partita_layout().decode()):
            return None, f"{path} was built from other sources ({wrong}); install again"
        isa = handle.partita_isa().decode()
        functions = {}
        for name, arguments in _FUNCTIONS.items():
            function = functions[name] = getattr(handle, f"partita_{name}")
            function.restype = ctypes.c_int32
            function.argtypes = [ctypes.c_char_p] * arguments
        return Library(handle, isa, path, functions), None
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
    outcome = library.functions[name](*structures)
    if outcome == _NO_MEMORY:
        raise MemoryError("the native backend could not allocate its workspace")
    return bool(outcome != _NOT_FINITE)
