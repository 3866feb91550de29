"""What the threads of a warp do together: products on tensor cores, shuffles, reductions, loads of matrices.

Arrays are (warps, 32). The places of a matrix's elements in the registers of the 32 lanes are those of the PTX manual:
with g = lane / 4 and t = lane % 4, a register of A holds row g or g + 8 and columns 2 t and 2 t + 1 (of 16 bits each).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.opcodes import Rounding, from_bfloat16

__all__ = ["matrices", "product", "reduced", "shuffled"]

_LANE = np.arange(32)
_G, _T = _LANE // 4, _LANE % 4


def _unpacked(registers: list[Any], kind: str) -> Any:
    """(warps, 32, registers, 2 or 1) numbers in float32."""
    words = np.ascontiguousarray(np.stack(registers, 2))
    if kind == "tf32":  # the lower 13 bits are not looked at
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    halves = words.view(np.uint16).reshape(*words.shape, 2)
    return from_bfloat16(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


def _places(shape: str, kind: str) -> tuple[Any, ...]:
    """Row and column of A, and of B, of each (lane, register, half)."""
    depth = int(shape.split("k")[1])
    if kind == "tf32":
        first, each = np.arange(depth // 4) * 4, np.zeros(1, int)
        t = _T
    else:
        first, each = np.arange(depth // 8) * 8, np.arange(2)
        t = 2 * _T
    near = t[:, None, None] + first[None, :, None] + each  # (lanes, depths, halves)
    row_a = np.broadcast_to(
        _G[:, None, None] + np.array([0, 8] * len(first))[None, :, None], (32, 2 * len(first), len(each))
    )
    return row_a, np.repeat(near, 2, 1), near, np.broadcast_to(_G[:, None, None], near.shape)


def product(shape: str, kind: str, a: list[Any], b: list[Any], c: list[Any], rounding: Rounding) -> list[Any]:
    """The four registers of D = A B + C."""
    row_a, col_a, row_b, col_b = _places(shape, kind)
    warps, depth = a[0].shape[0], int(shape.split("k")[1])
    left, right = np.empty((warps, 16, depth)), np.empty((warps, depth, 8))
    left[:, row_a, col_a] = _unpacked(a, kind)
    right[:, row_b, col_b] = _unpacked(b, kind)
    rows, cols = _G[:, None] + np.array([0, 0, 8, 8]), 2 * _T[:, None] + np.array([0, 1, 0, 1])
    start = np.empty((warps, 16, 8))
    start[:, rows, cols] = np.stack(c, 2).view(np.float32)
    if rounding.product == "nearest":
        total = (left @ right + start).astype(np.float32)
    else:
        total = start
        for k in range(0, depth, 8):
            parts = left[:, :, None, k : k + 8] * right[:, k : k + 8].transpose(0, 2, 1)[:, None]
            total = _truncated(np.concatenate([parts, total[..., None]], -1))
        total = total.astype(np.float32)
    found = np.ascontiguousarray(total[:, rows, cols].transpose(2, 0, 1))
    return list(found.view(np.uint32))


def _truncated(parts: Any) -> Any:
    """The sum over the last axis, of numbers that keep 24 bits of the largest one's, and itself so."""
    plain = np.isfinite(parts).all(-1)
    safe = np.where(plain[..., None], parts, 0.0)
    for _ in range(2):
        _, exponent = np.frexp(np.abs(safe).max(-1, keepdims=True))
        unit = np.ldexp(1.0, np.maximum(exponent, -125) - 24)
        safe = np.trunc(np.trunc(safe / unit).sum(-1, keepdims=True)) * unit
    return np.where(plain, safe[..., 0], parts.sum(-1))


def shuffled(mode: str, x: Any, lane_or_step: Any, c: Any) -> tuple[Any, Any]:
    """What each lane gets, and whether it is of another lane that there is."""
    clamp, segment = (c & np.uint32(31)).astype(np.int64), ((c >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
    b, lane = (lane_or_step & np.uint32(31)).astype(np.int64), _LANE[None, :]
    last, least = (lane & segment) | (clamp & ~segment), lane & segment
    if mode == "up":
        place, inside = lane - b, lane - b >= last
    elif mode == "down":
        place, inside = lane + b, lane + b <= last
    elif mode == "bfly":
        place, inside = lane ^ b, (lane ^ b) <= last
    else:
        place = least | (b & ~segment)
        inside = place <= last
    return np.take_along_axis(x, np.where(inside, place, lane), 1), inside


def reduced(name: str, x: Any) -> Any:
    """The same number in every lane."""
    how = {"max": np.max, "min": np.min, "add": np.sum, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce}[name]
    return np.broadcast_to(how(x, axis=1)[:, None].astype(x.dtype), x.shape)


def matrices(rows: Any, turned: bool) -> list[Any]:
    """ldmatrix: rows (warps, matrices, 8, 4 words), the register of each lane for each of them."""
    halves = rows.view(np.uint16)  # (warps, matrices, 8, 8)
    if turned:
        halves = np.ascontiguousarray(halves.swapaxes(-1, -2))
    words = halves.view(np.uint32)  # (warps, matrices, 8, 4): lane 4 r + c has word c of row r
    return [words[:, m].reshape(-1, 32) for m in range(rows.shape[1])]
