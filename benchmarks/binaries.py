"""What a compiled kernel needs and does, read from its binary: registers, spills, shared memory, instructions.

NVIDIA: `cuobjdump`, which triton brings, on the cubin. AMD: the assembly itself.
Counts are static: of the whole text, and of the loop over tiles, where each instruction runs once per tile and thread.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

TENSOR = re.compile(r"HMMA|HGMMA|UTC[A-Z]*MMA|DMMA|v_mfma_")
TENSOR_PTX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
EXPONENTIAL = re.compile(r"MUFU\.EX2|v_exp_f(32|16)")
FLOAT = re.compile(
    r"(FADD|FMUL|FFMA|FMNMX|FSEL|FSETP|FSET|F2FP|F2F|FCHK|HADD2|HMUL2|HFMA2|HMNMX2)"  # NVIDIA
    r"|v_(pk_)?(add|sub|subrev|mul|fma|fmac|mac|max|max3|min|med3|ldexp|cmp_\w+|cvt\w*|rcp|log|sqrt)\w*_(f32|f16|bf16)"
)
SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Counts:
    """Instructions of one thread."""

    tensor: int
    exponentials: int
    floats: int
    all: int

    @staticmethod
    def of(names: list[str]) -> Counts:
        def matching(pattern: re.Pattern[str]) -> int:
            return sum(bool(pattern.match(name)) for name in names)

        return Counts(matching(TENSOR), matching(EXPONENTIAL), matching(FLOAT), len(names))


@dataclass(frozen=True)
class Resources:
    registers: int  # per thread
    spilled: int  # bytes per thread, of memory that holds what registers do not
    shared_bytes: int
    warps: int
    stages: int
    tensor: str  # the instruction that does the products, "" where there is none
    whole: Counts
    loop: Counts | None  # the loop over tiles; None where it is not known

    def record(self) -> dict[str, Any]:
        return asdict(self)


def resources(kernel: Any) -> Resources:
    """Of a triton CompiledKernel."""
    meta = kernel.metadata
    common = (meta.shared, meta.num_warps, meta.num_stages)
    if meta.target.backend == "hip":
        return _amd(kernel.asm["amdgcn"], *common)
    found = re.findall(TENSOR_PTX, kernel.asm["ptx"])
    return _nvidia(kernel.asm["cubin"], found[0] if found else "", *common)


def _nvidia(cubin: bytes, tensor: str, shared: int, warps: int, stages: int) -> Resources:
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    match = USAGE.search(usage.stdout)
    if match is None:
        raise ValueError(f"no resource usage in what cuobjdump says: {usage.stdout!r}")
    registers, stack, local = map(int, match.groups())
    lines = [(int(at, 16), name, rest) for at, name, rest in SASS.findall(text)]
    names = [name for _, name, _ in lines if name != "NOP"]
    return Resources(registers, stack + local, shared, warps, stages, tensor, Counts.of(names), _loop(lines))


def _loop(lines: list[tuple[int, str, str]]) -> Counts | None:
    """The loop that streams: of the innermost loops with a tensor or exponential instruction, the lightest.

    Where masked tiles have a loop of their own, that is the longer one; full tiles are most of the work.
    """
    jumps = []
    for at, name, rest in lines:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if name.startswith("BRA") and target and int(target.group(1), 16) < at:
            jumps.append((int(target.group(1), 16), at))
    bodies = []
    for start, end in jumps:
        inner = any((a, b) != (start, end) and start <= a and b <= end for a, b in jumps)
        body = Counts.of([name for at, name, _ in lines if start <= at <= end and name != "NOP"])
        if not inner and (body.tensor or body.exponentials):
            bodies.append(body)
    with_products = [body for body in bodies if body.tensor] or bodies
    return min(with_products, key=lambda body: body.all, default=None)


def _amd(text: str, shared: int, warps: int, stages: int) -> Resources:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    names = re.findall(r"^\s+([vs]_\w+|ds_\w+|buffer_\w+|global_\w+)\b", text, re.MULTILINE)
    tensor = next((name for name in names if name.startswith("v_mfma_")), "")
    # the first counts the accumulation registers too: both are of one file
    registers, spilled = number("vgpr_count"), number("private_segment_fixed_size")
    return Resources(registers, spilled, shared, warps, stages, tensor, Counts.of(names), None)
