"""A GPU that is none: what would be launched on it is compiled for it, and its PTX is run here.

`executing()` stands in for Triton's driver, as `benchmarks.paper_device` does, so that the library's own code chooses
tiles, grids and arguments. Operands are the CPU's tensors in place; a kernel sees each at an address of its own, with
2^31 or 2^32 in its middle. What torch left empty is watched until a kernel has written it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.paper_device import DEVICES, on_paper
from partita.engine.backends import TABLE
from partita.engine.backends.protocol import BothWays
from tests.ptx import machine, program
from tests.ptx.memory import UNWRITTEN, WRITTEN, Fault, Global, Region, Space
from tests.ptx.opcodes import Rounding

__all__ = ["Device", "Launched", "executing"]

CACHE = Path(__file__).parents[2] / "build" / "ptx"  # what was compiled stays here


@dataclass
class Launched:
    name: str
    grid: tuple[int, ...]
    ptx: str
    instructions: int
    constants: dict[str, Any]
    tensors: list[Tensor]


@dataclass
class Device:
    """What was launched, and how to run what comes."""

    rounding: Rounding = field(default_factory=Rounding)
    mutate: Any = None  # (name, ptx) -> ptx
    launches: list[Launched] = field(default_factory=list)
    allocated: list[Tensor] = field(default_factory=list)  # left empty by the host
    host_reads: list[str] = field(default_factory=list)
    empty: dict[int, Any] = field(default_factory=dict)  # by storage: which of its bytes have no content yet
    runs: bool = True
    made: int = 0  # tensors that the backend made on the host, views left out

    def run(
        self, name: str, compiled: Any, grid: tuple[int, ...], arguments: list[Any], constants: dict[str, Any]
    ) -> None:
        text = compiled.asm["ptx"]
        text = text if self.mutate is None else self.mutate(name, text)
        instructions, tensors = 0, [x for x in arguments if isinstance(x, Tensor)]
        if self.runs:
            code = program.read(text)
            granule = code.narrowest("global")
            memory, address = self._mapped(tensors, granule)
            numbers = [address[_start(x)] if isinstance(x, Tensor) else int(x) for x in arguments]
            numbers += [0] * (len(code.params) - len(numbers))  # scratch, of which none is asked for
            done = machine.run(code, grid, numbers, memory, compiled.metadata.shared, self.rounding)
            instructions = done.done
            for region in memory.regions:
                self._written(region, granule)
        self.launches.append(Launched(name, grid, text, instructions, constants, tensors))

    def _mapped(self, tensors: list[Tensor], granule: int) -> tuple[Global, dict[int, int]]:
        """Operands that overlap are one region."""
        spans: list[list[Any]] = []
        for t in sorted(tensors, key=_start):
            if spans and _start(t) < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], _end(t))
                spans[-1][2].append(t)
            else:
                spans.append([_start(t), _end(t), [t]])
        regions, address = [], {}
        for i, (start, end, held) in enumerate(spans):
            low = start // 16 * 16
            size = end - low
            whole = -(-size // 16) * 16
            data = np.ctypeslib.as_array((ctypes.c_uint8 * whole).from_address(low))
            # each has an edge of 32 bits (signed for every other one) about its middle
            base = ((i + 1) << 36) + (1 << (31 + i % 2)) - size // 2 // 16 * 16
            state = np.zeros(whole // granule, np.uint8)
            for t in held:
                _mark(state, t, low, granule, WRITTEN)
            for t in held:
                self._mark_empty(state, t, low, granule)
            regions.append(Region(base, size, Space(data, granule, state)))
            regions[-1].low = low  # type: ignore[attr-defined]
            for t in held:
                address[_start(t)] = base + _start(t) - low
        return Global(regions), address

    # ---- bytes without content -------------------------------------------------------------------------------------

    def left_empty(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.allocated.append(t)
        if storage.nbytes():
            self.empty[storage.data_ptr()] = np.ones(storage.nbytes(), bool)

    def _mark_empty(self, state: Any, t: Tensor, low: int, granule: int) -> None:
        storage = t.untyped_storage()
        bare = self.empty.get(storage.data_ptr())
        if bare is None:
            return
        where = np.flatnonzero(bare) + storage.data_ptr() - low
        where = where[(where >= 0) & (where < len(state) * granule)] // granule
        state[where[state[where] == WRITTEN]] = UNWRITTEN

    def _written(self, region: Region, granule: int) -> None:
        low = region.low  # type: ignore[attr-defined]
        for storage, bare in self.empty.items():
            first = max(storage, low)
            last = min(storage + len(bare), low + region.size)
            if first < last:
                state = np.repeat(region.space.state, granule)[first - low : last - low]
                bare[first - storage : last - storage] &= state != WRITTEN

    def is_empty(self, t: Tensor) -> bool:
        """Whether a host's read of it would see bytes without content."""
        bare = self.empty.get(t.untyped_storage().data_ptr())
        if bare is None or not t.numel() or not bare.any():
            return False
        flags = torch.from_numpy(bare)
        strides = [s * t.itemsize for s in t.stride()]
        first = t.storage_offset() * t.itemsize
        return any(bool(torch.as_strided(flags[b:], t.shape, strides, first).any()) for b in range(t.itemsize))


def _start(t: Tensor) -> int:
    return t.data_ptr()


def _end(t: Tensor) -> int:
    return t.data_ptr() + (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.itemsize


def _mark(state: Any, t: Tensor, low: int, granule: int, value: int) -> None:
    """The granules of a tensor's elements, and none between them."""
    if t.is_contiguous():
        first, last = _start(t) - low, _end(t) - low
        state[first // granule : -(-last // granule)] = value
        return
    at = np.full((), _start(t) - low)
    for n, s in zip(t.shape, t.stride(), strict=True):
        if n > 1 and s != 0:
            at = at[..., None] + np.arange(n) * s * t.itemsize
    for byte in range(0, t.itemsize, min(granule, t.itemsize)):
        state[(at + byte) // granule] = value


class _Watched(TorchDispatchMode):
    """Sees what the backend does on the host: what it leaves empty, and whether it waits for a number of the device."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def around(self, function: Any) -> Any:
        """The same function, watched."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, name = self.device, function._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"):
            device.host_reads.append(name)
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        for argument, given in zip(function._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for t in (given,) if isinstance(given, Tensor) else given if isinstance(given, (list, tuple)) else ():
                if isinstance(t, Tensor) and t.layout == torch.strided:
                    looks = not writes and not views and "empty" not in name and not name.endswith("_like")
                    if looks and device.is_empty(t):
                        raise Fault("uninitialised", f"the host's {name} of what no kernel wrote")
                    if writes and name not in ("resize_", "set_"):
                        device.empty.pop(t.untyped_storage().data_ptr(), None)
        for argument in function._schema.arguments:
            given = (kwargs or {}).get(argument.name)
            if isinstance(given, Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                device.empty.pop(given.untyped_storage().data_ptr(), None)
        made = function(*args, **(kwargs or {}))
        device.made += isinstance(made, Tensor) and not views
        if isinstance(made, Tensor) and made.device.type == "cpu" and name.startswith(("empty", "new_empty")):
            device.left_empty(made)
        elif isinstance(made, Tensor) and not views and made.device.type == "cpu" and made.layout == torch.strided:
            written = any(r.alias_info is not None for r in function._schema.returns)
            if not written:
                device.empty.pop(made.untyped_storage().data_ptr(), None)
        return made


def flat(signature: Any, given: Any) -> Iterator[Any]:
    """The arguments that a compiled kernel still has, in order: tuples opened, constants left out."""
    if isinstance(signature, (tuple, list)):
        for s, x in zip(signature, given, strict=True):
            yield from flat(s, x)
    elif signature != "constexpr":
        yield given


@contextmanager
def executing(
    rounding: Rounding | None = None, target: str = "sm_80", mutate: Any = None, runs: bool = True
) -> Iterator[Device]:
    """Inside, the backend `triton` serves CPU tensors by running what was compiled for the target."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    import partita.engine.backends.triton as backend
    from partita.engine.backends.triton import launch, reduce

    device = Device(rounding or Rounding(), mutate, runs=runs)
    with ExitStack() as stack:
        stack.enter_context(on_paper(DEVICES[target]))
        # a binary is not needed; what is compiled without one has a cache of its own
        stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", return_value=b""))
        stack.enter_context(knobs.cache.scope())
        knobs.cache.dir = str(CACHE)
        compile_only = JITFunction.run

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            compiled = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
            given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
            signature = compiled.src.signature
            arguments = [x for name in signature for x in flat(signature[name], given[name])]
            constants = {p.name: given[p.name] for p in self.params if p.is_constexpr and p.name in given}
            if "S" in constants:
                constants |= {k: x.value for k, x in constants.pop("S")._asdict().items()}
            with _unwatched():
                device.run(self.fn.__name__, compiled, tuple(grid), arguments, constants)
            return compiled

        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        watch = _Watched(device).around
        entry = TABLE["triton"]
        watched = {n: watch(getattr(entry, n)) for n in ("forward", "backward", "weighted_nll")}
        assert entry.both_ways is not None
        both = BothWays(watch(entry.both_ways.forward), watch(entry.both_ways.backward))
        stack.enter_context(mock.patch.dict(TABLE, triton=replace(entry, both_ways=both, **watched)))
        stack.enter_context(mock.patch.object(backend, "interpreted", return_value=True))
        for module in (launch, reduce):
            stack.enter_context(mock.patch.object(module, "target_of", return_value=target))
        yield device


def _unwatched() -> Any:
    return torch.utils._python_dispatch._disable_current_modes()
