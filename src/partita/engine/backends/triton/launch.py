"""From a request to the launch of a kernel: addresses, strides, switches, grid.

A `Launch` holds everything a kernel is called with and nothing of Triton, which is imported when one runs: it can be
compiled without a device.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.engine.axes import offsets
from partita.engine.backends.triton.tiles import INTERPRETER, Tile
from partita.engine.request import Request
from partita.engine.terms import Term

__all__ = ["Strided", "Launch", "Operands", "interpreted", "named", "padded", "target_of"]

_KERNELS = "partita.engine.backends.triton.kernels"
_INT32 = 2**31 - 1
_CPU = torch.device("cpu")  # named: a default device is not ours to follow
_CACHED = 4096  # batch entries of a table that is kept for the next call
_TAIL = {
    "query": 2, "key": 2, "value": 2, "scale": 1, "bias": 2, "target": 1, "start": 1, "stop": 1,
    "query_segment": 1, "key_segment": 1, "mask": 2, "moment": 2,
    "skip": 1,
}  # fmt: skip  # dimensions after those of the batch, in the order of the rows of `offsets`


def interpreted() -> bool:
    """Whether Triton's interpreter is on: kernels run in Python, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def target_of(device: torch.device) -> str:
    """What kernels are compiled for, as `tiles` names it."""
    if interpreted() or device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return name.split(":")[0] or f"sm_{properties.major}{properties.minor}"


def _allows_tf32() -> bool:
    """Whether products of float32 may be rounded to tf32, by the setting that this torch has: the older one
    raises in a newer torch where both were used."""
    matmul = torch.backends.cuda.matmul
    chosen = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if chosen is None else chosen == "tf32"


def padded(size: int) -> int:
    """The power of two, at least 16, that a dimension of a product is padded to."""
    return max(16, 1 << (size - 1).bit_length())


class Strided(NamedTuple):
    """A tensor: its memory, and the strides of its rows and columns; 0 where one serves all."""

    at: Tensor
    row: int
    col: int | None = None


_tuple_of = functools.cache(collections.namedtuple)


def named(**fields: Any) -> Any:
    """These in one tuple, by their names: what belongs together goes through a kernel's functions as one argument."""
    return _tuple_of("named", tuple(fields))(**fields)


@dataclass(frozen=True)
class Launch:
    """One call of a kernel."""

    kernel: str  # file and function
    programs: int
    arguments: dict[str, Any]  # tensors, numbers, None and named tuples of them
    switches: dict[str, Any]  # constexprs; dtypes by their names
    tile: Tile

    def function(self) -> Any:
        """The kernel; this is where Triton is imported."""
        module, name = self.kernel.split(".")
        return getattr(importlib.import_module(f"{_KERNELS}.{module}"), name)

    def constants(self) -> Any:
        """The switches as a kernel's functions hand them on: in one tuple, each a constexpr of its own."""
        tl = importlib.import_module("triton.language")
        found = {k: getattr(tl, v) if k in ("ACC", "DOT", "INDEX") else v for k, v in self.switches.items()}
        return named(**{k: tl.constexpr(v) for k, v in found.items()})

    def run(self, device: torch.device) -> None:
        """Call it: on a GPU, or in the interpreter, where numpy computes and would warn of every inf - inf."""
        here: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device.type == "cuda":
            here = torch.cuda.device(device)
        elif interpreted():
            here = importlib.import_module("numpy").errstate(all="ignore")
        with here:
            self.function()[(self.programs,)](
                **self.arguments, S=self.constants(), num_warps=self.tile.warps, num_stages=self.tile.stages
            )


@dataclass(frozen=True, eq=False)
class Operands:
    """A request's tensors as kernels take them: any strides in place, batch entries as a table of offsets."""

    request: Request
    term: Term | None
    batch: tuple[int, ...]
    tensors: dict[str, Tensor | None]  # by name, in the order of _TAIL

    @staticmethod
    def of(request: Request, term: Term | None, moment: Tensor | None = None) -> Operands:
        given = {name: getattr(request, name) for name in ("query", "key", "value", "scale", "bias", "target")}
        given |= {**(term or Term())._asdict(), "moment": moment}
        tensors = {name: None if (t := given[name]) is None else t.resolve_conj().resolve_neg() for name in _TAIL}
        mask = tensors["mask"]
        tensors["mask"] = None if mask is None else mask.view(torch.uint8)
        return Operands(request, term, request.batch, tensors)

    @property
    def n_batch(self) -> int:
        return math.prod(self.batch)

    def table(self) -> Tensor:
        """(operands, B) int64: where each batch entry of each operand begins, in elements; 0 for what is absent."""
        dims, all_of_them = len(self.batch), self.tensors.values()
        found = tuple(None if t is None else (tuple(t.shape[:dims]), tuple(t.stride()[:dims])) for t in all_of_them)
        return _table(self.batch, found, self.request.query.device)

    def arguments(self) -> Any:
        """Every operand, the table and the sizes, by the names that all kernels have for them."""
        found = {name: self._strided(name) for name in self.tensors if name != "moment"}
        n_query, n_key = self.request.n_query, self.request.n_key  # side by side behind an address: read as one
        return named(**found, offsets=self.table(), n_query=n_query, n_key=n_key, n_batch=self.n_batch)

    def _strided(self, name: str) -> Strided | None:
        t, tail = self.tensors[name], _TAIL[name]
        if t is None:
            return None
        return Strided(t, *(0 if n == 1 else s for n, s in zip(t.shape[-tail:], t.stride()[-tail:], strict=True)))

    def switches(self) -> dict[str, Any]:
        """What is constant in a kernel because of this request."""
        r, term = self.request, self.term or Term()
        bias = 0 if r.bias is None else 1 if r.bias.shape[-1] == 1 else 2 if r.bias.shape[-2] == 1 else 3
        acc, low = (str(dtype).removeprefix("torch.") for dtype in (r.dtype, r.query.dtype))
        dim, dim_value = r.query.shape[-1], 1 if r.value is None else r.value.shape[-1]
        return {
            "D": dim,
            "V": dim_value,
            "BLOCK_D": padded(dim),
            "BLOCK_V": padded(dim_value),
            "VALUE": r.value is not None,
            "BIAS": bias,
            "SOFTCAP": r.softcap or 0.0,
            "CAP_BIAS": r.cap_bias,
            "START": term.start is not None,
            "STOP": term.stop is not None,
            "SEGMENT": term.query_segment is not None,
            "MASK": term.mask is not None,
            "SKIP": term.skip is not None,
            "ACC": acc,
            # the interpreter keeps bfloat16 as whole numbers, and would multiply those
            "DOT": "float32" if low == "bfloat16" and interpreted() else low,
            "INDEX": "int64" if self._reach() > _INT32 else "int32",
            "ALIGN": self._alignment(),
            "PRECISION": "tf32" if low == "float32" and _allows_tf32() else "ieee",
        }

    def _alignment(self) -> int:
        """The largest power of two, at most 16, that divides where every entry of query, key and value begins."""
        dims = len(self.batch)
        large = [t for t in (self.tensors[name] for name in ("query", "key", "value")) if t is not None]
        steps = [s for t in large for n, s in zip(t.shape[:dims], t.stride()[:dims], strict=True) if n > 1]
        return math.gcd(16, *steps)

    def _reach(self) -> int:
        """The largest offset inside one batch entry."""
        return max(
            sum((n - 1) * abs(s) for n, s in zip(t.shape[-_TAIL[name] :], t.stride()[-_TAIL[name] :], strict=True))
            for name, t in self.tensors.items()
            if t is not None
        )

    def members(self, shared: tuple[int, ...]) -> Tensor:
        """(groups, members) int32: the batch entries that share an operand with these batch dimensions."""
        return _members(self.batch, shared, self.request.query.device)


def _kept(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same table again for the batches seen last, unless it is a long one."""
    cached = functools.lru_cache(maxsize=64)(make)

    @functools.wraps(make)
    def table(batch: tuple[int, ...], *rest: Any) -> Tensor:
        with torch.inference_mode(False):
            return (cached if math.prod(batch) <= _CACHED else make)(batch, *rest)

    return table


@_kept
def _table(batch: tuple[int, ...], laid: Sequence[Any], device: torch.device) -> Tensor:
    nowhere = torch.zeros(math.prod(batch), dtype=torch.int64, device=_CPU)
    return torch.stack([nowhere if x is None else offsets(batch, *x) for x in laid]).to(device)


@_kept
def _members(batch: tuple[int, ...], shared: tuple[int, ...], device: torch.device) -> Tensor:
    entries = torch.arange(math.prod(batch), dtype=torch.int32, device=_CPU).view(batch)
    inner = [i for i, n in enumerate(shared) if n == 1]
    outer = [i for i, n in enumerate(shared) if n != 1]
    return entries.permute([*outer, *inner]).reshape(math.prod(shared), -1).contiguous().to(device)
