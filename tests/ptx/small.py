"""Small kernels of PTX by hand, on arrays of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx import machine, program
from tests.ptx.memory import WRITTEN, Global, Region, Space
from tests.ptx.opcodes import NEAREST, Rounding

__all__ = ["each_lane", "launch"]

_KIND = {1: ("rs", "b8"), 2: ("rs", "b16"), 4: ("r", "b32"), 8: ("rd", "b64")}


def launch(
    body: str, *arrays: Any, threads: int = 32, grid: tuple[int, ...] = (1,), shared: int = 0, empty: int = 0,
    rounding: Rounding = NEAREST,
) -> machine.Machine:  # fmt: skip
    """Run `body`, whose parameters are the addresses p0, p1, ... of these arrays; the last `empty` hold nothing yet."""
    params = ",\n".join(f".param .u64 p{i}" for i in range(len(arrays)))
    text = f".visible .entry small(\n{params}\n)\n.reqntid {threads}\n{{\n{body}\nret;\n}}\n"
    code, regions = program.read(text), []
    granule = code.narrowest("global")
    for i, a in enumerate(arrays):
        data = a.view(np.uint8).reshape(-1)
        state = np.full(len(data) // granule, WRITTEN if i < len(arrays) - empty else 1, np.uint8)
        regions.append(Region((i + 1) << 20, len(data), Space(data, granule, state)))
    return machine.run(code, grid, [r.base for r in regions], Global(regions), shared, rounding)


def each_lane(line: str, sources: list[Any], made: Any, rounding: Rounding = NEAREST) -> Any:
    """What an instruction makes of one number per lane: a, b, c are its sources and d what it writes."""
    out = np.zeros(32, made)
    lines = ["mov.u32 %r99, %tid.x;"]
    names = {}
    for i, (name, x) in enumerate([*zip("abc", sources, strict=False), ("d", out)]):
        size = x.dtype.itemsize
        names[name] = f"%{_KIND[size][0]}{i + 1}"
        lines += [f"ld.param.b64 %rd{90 + i}, [p{i}];", f"mad.wide.u32 %rd{90 + i}, %r99, {size}, %rd{90 + i};"]
        if name != "d":
            lines.append(f"ld.global.{_KIND[size][1]} {names[name]}, [%rd{90 + i}];")
    op, operands = line.split(" ", 1)
    for name, register in names.items():
        operands = operands.replace(f"${name}", register)
    lines.append(f"{op} {operands};")
    lines.append(f"st.global.{_KIND[out.dtype.itemsize][1]} [%rd{90 + len(sources)}], {names['d']};")
    launch("\n".join(lines), *sources, out, rounding=rounding)
    return out
