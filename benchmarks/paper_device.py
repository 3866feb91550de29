"""A GPU on paper: what would be launched on it is compiled for it and written down, and nothing runs.

Triton compiles for any target on any machine. Here a stand-in for its driver says which target is there, so that a
backend's own code chooses tiles, arguments and specialisation as it would on the device; each launch becomes a compiled
kernel. What the kernels would have written is left as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch


@dataclass(frozen=True)
class Device:
    """A target, and what one block may have there."""

    name: str
    backend: str
    arch: int | str
    warp: int  # threads
    shared_bytes: int  # a block may ask for
    example: str  # a device of this kind


DEVICES = {
    device.name: device
    for device in (
        Device("sm_80", "cuda", 80, 32, 166_912, "A100"),
        Device("sm_90", "cuda", 90, 32, 232_448, "H100"),
        Device("sm_100", "cuda", 100, 32, 232_448, "B200"),
        Device("gfx942", "hip", "gfx942", 64, 65_536, "MI300"),
    )
}


class Launch(NamedTuple):
    name: str  # of the function
    kernel: Any  # triton's CompiledKernel: asm, metadata
    constants: dict[str, Any]  # the constexpr arguments
    grid: tuple[int, ...]


class _Driver:
    """As much of a driver as is asked before a launch."""

    def __init__(self, device: Device):
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(device.backend, device.arch, device.warp)
        self._index = list(DEVICES).index(device.name)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._index  # kernels are remembered by it

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def on_paper(device: Device) -> Iterator[list[Launch]]:
    """Inside, every launch is compiled for this device and added to the list; not under TRITON_INTERPRET=1."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        constants = {p.name: given[p.name] for p in self.params if p.is_constexpr and p.name in given}
        if "S" in constants:  # the switches, which come as one tuple
            constants |= {name: switch.value for name, switch in constants.pop("S")._asdict().items()}
        size = grid({**given, **constants}) if callable(grid) else grid
        launches.append(Launch(self.fn.__name__, kernel, constants, tuple(size)))
        return kernel

    before = driver._active
    driver.set_active(_Driver(device))  # type: ignore[arg-type]
    try:
        with mock.patch.object(JITFunction, "run", compile_only):
            yield launches
    finally:
        driver.set_active(before)
