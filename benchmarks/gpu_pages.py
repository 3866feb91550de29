"""Pages made from the resource table: docs/reference/gpu-resources.md whole, and the table of docs/explain/gpu.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .paper_device import DEVICES
from .roofline import bounds, table

ROOT = Path(__file__).parents[1]
RESOURCES = ROOT / "docs" / "reference" / "gpu-resources.md"
GPU = ROOT / "docs" / "explain" / "gpu.md"
MARKED = re.compile(r"(<!-- roofline -->\n).*?(<!-- end -->)", re.DOTALL)
LEVELS = ("output", "+ entropy", "+ variance")

HEAD = """# What the GPU kernels need

Made by `make gpu-resources` from `tests/triton/resources.json`, which holds every number below and the instruction
counts; do not edit. Triton {triton}, compiled ahead of time on a machine without a GPU; nothing was timed on a device.
[What that proves and what it does not](../explain/gpu.md).

A cell is: rows x keys of a tile, warps (w) and pipeline stages (s); registers per thread; shared memory of a block, in
KiB. `spills n` are bytes per thread that registers could not hold. Levels: the output and log Z; with entropy and
largest score; with the variance too. A backward pass has two kernels, one over rows and one over keys; its levels are
those of what flows back.
"""


def resources_page(found: dict[str, Any]) -> str:
    parts = [HEAD.format(triton=found["triton"])]
    for device in DEVICES.values():
        own = [r for r in found["kernels"] if r["device"] == device.name]
        parts.append(
            f"## {device.name} ({device.example})\n\nA block may have {device.shared_bytes:,} bytes of shared memory.\n"
        )
        parts.append(_by_dim([r for r in own if not r["asks"] and r["kind"] in ("forward", "backward")]))
        parts.append(_others([r for r in own if r["asks"] or r["kind"] not in ("forward", "backward")]))
    return "\n".join(parts)


def _cell(r: dict[str, Any]) -> str:
    spills = f" **spills {r['spilled']}**" if r["spilled"] else ""
    shape = "" if r["rows"] is None and r["keys"] is None else f"{r['rows'] or 1}x{r['keys']} "
    return f"{shape}{r['warps']}w{r['stages']}s, {r['registers']}, {r['shared_bytes'] / 1024:.0f}{spills}"


def _by_dim(records: list[dict[str, Any]]) -> str:
    dims = sorted({r["dim"] for r in records})
    lines: dict[tuple[str, str, str, tuple[str, ...]], list[str]] = {}
    for kernel in dict.fromkeys(r["kernel"] for r in records):
        for level, name in enumerate(LEVELS):
            for dtype in dict.fromkeys(r["dtype"] for r in records):
                own = {r["dim"]: r for r in records if (r["kernel"], r["level"], r["dtype"]) == (kernel, level, dtype)}
                if own:
                    cells = tuple(_cell(own[d]) if d in own else "" for d in dims)
                    tensor = ", ".join(dict.fromkeys(r["tensor"] or "no tensor cores" for r in own.values()))
                    lines.setdefault((kernel, name, tensor, cells), []).append(dtype)
    titles = " | ".join(f"D {d}" for d in dims)
    head = f"| kernel | level | dtype | products by | {titles} |\n|{'---|' * (4 + len(dims))}\n"
    rows = (f"| {k} | {n} | {', '.join(t)} | {x} | {' | '.join(c)} |\n" for (k, n, x, c), t in lines.items())
    return head + "".join(rows)


def _others(records: list[dict[str, Any]]) -> str:
    head = "| kernel | asked for | dtype | products by | needs |\n|---|---|---|---|---|\n"
    lines: dict[tuple[str, str, str, str], list[str]] = {}
    for r in records:
        asks = r["asks"] or f"{r['kind']}, {LEVELS[r['level']]}"
        key = (r["kernel"], asks, r["tensor"] or "none", _cell(r))
        lines.setdefault(key, []).append(r["dtype"])
    body = "".join(f"| {k} | {a} | {', '.join(dict.fromkeys(t))} | {x} | {c} |\n" for (k, a, x, c), t in lines.items())
    return "D 128; masks, biases and the rest with the variance.\n\n" + head + body


def with_roofline(page: str, found: dict[str, Any]) -> str:
    """The page with its marked table made anew."""
    made = table(bounds(found["kernels"]))
    return MARKED.sub(lambda m: m.group(1) + "\n" + made + "\n" + m.group(2), page)


def write(found: dict[str, Any]) -> None:
    RESOURCES.write_text(resources_page(found))
    if GPU.exists():
        GPU.write_text(with_roofline(GPU.read_text(), found))
