"""Runs a kernel: blocks side by side, warps together or apart, barriers, and lanes that part and meet again.

Lanes at different places of the program: those at the lowest go first, until they meet the others. A barrier lets a
block go on when all of its threads have come; blocks wait for those that are behind, so that they run side by side.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.ptx import warp
from tests.ptx.memory import Fault, Global, Shared, Stamps
from tests.ptx.opcodes import BITS, NEAREST, Rounding, arithmetic
from tests.ptx.program import Address, Instruction, Number, Program, Register, Special, Symbol

__all__ = ["Fault", "run"]

Step = Callable[["Lanes"], None]
_MOST = 200_000  # instructions and jumps of a launch: beyond, it will not end
_JUMPS = ("bra", "ret", "exit", "bar")


class Registers(dict[str, Any]):
    """By name; one that only a guarded instruction writes holds junk where that did not run."""

    def __init__(self, made: Callable[[str], Any], guarded: set[Register]):
        super().__init__()
        self.made, self.guarded = made, {x.name: x.kind for x in guarded}

    def __missing__(self, name: str) -> Any:
        if name not in self.guarded:
            raise KeyError(name)
        self[name] = found = self.made(self.guarded[name])
        return found


@dataclass
class Copy:
    """Asynchronous copies of some lanes by one instruction, on their way."""

    lanes: Any  # indices of those not yet waited for
    group: Any  # of each, the number of groups committed before
    at: Any  # bytes of shared memory
    values: Any  # (lanes, words)


@dataclass
class Lanes:
    """The threads of some warps of every block."""

    block: Any
    thread: Any
    registers: Registers
    mask: Any = None  # the lanes that run now; None where all do
    runnable: list[tuple[int, Any]] = field(default_factory=list)  # (place, mask)
    waiting: Any = None  # the place of the barrier that a lane is at, or -1
    gone: Any = None  # lanes that returned
    copies: list[Copy] = field(default_factory=list)
    committed: Any = None

    @property
    def n(self) -> int:
        return len(self.block)

    def active(self) -> Any:
        return np.arange(self.n) if self.mask is None else np.flatnonzero(self.mask)


class Machine:
    def __init__(
        self, program: Program, grid: Sequence[int], arguments: Sequence[int], memory: Global, shared: int,
        rounding: Rounding = NEAREST,
    ):  # fmt: skip
        self.program, self.rounding, self.memory = program, rounding, memory
        self.grid = (*grid, 1, 1)[:3]
        self.blocks = int(np.prod(self.grid))
        self.junk = np.random.default_rng(rounding.seed)
        self.shared = Shared(self.blocks, shared, program.narrowest("shared"), self.junk)
        self.arguments = {name: int(x) for (name, _), x in zip(program.params, arguments, strict=True)}
        self.epoch = np.zeros(self.blocks, np.int64)
        warps = program.threads // 32
        self.order = [[w] for w in range(warps)] if rounding.order == "apart" else [list(range(warps))]
        self.n = self.blocks * len(self.order[0]) * 32
        self.constants: dict[Any, Any] = {}
        self.steps: list[Any] = []
        for each in program.code:
            try:
                self.steps.append(self._guarded(each))
            except _Unknown as error:
                raise Fault("unknown opcode", f"{each.op} in line {each.line}: {each.text}") from error
        jumps = [i for i, x in enumerate(program.code) if x.parts[0] in _JUMPS] + [len(program.code)]
        self.next_jump = [jumps[bisect.bisect_left(jumps, i)] for i in range(len(program.code) + 1)]
        self.done = 0
        guarded = [x.operands[0] for x in program.code if x.guard and x.operands and not x.op.startswith("st")]
        self.guarded = {r for x in guarded for r in (x if isinstance(x, list) else [x]) if isinstance(r, Register)}

    # ---- operands --------------------------------------------------------------------------------------------------

    def _constant(self, value: Any, kind: Any) -> Any:
        key = (value, np.dtype(kind))
        if key not in self.constants:
            self.constants[key] = np.full(self.n, value, kind)
        return self.constants[key]

    def source(self, operand: Any, kind: Any) -> Callable[[Lanes], Any]:
        """The operand as this dtype."""
        kind = np.dtype(kind)
        if isinstance(operand, Register):
            name = operand.name
            if kind == np.bool_:
                return lambda t: t.registers[name]
            if np.dtype(BITS[operand.kind]).itemsize == kind.itemsize:
                return lambda t: t.registers[name].view(kind)
            return lambda t: t.registers[name].astype(f"u{kind.itemsize}").view(kind)
        if isinstance(operand, Number):
            bits = operand.bits % (1 << 8 * kind.itemsize)
            if kind == np.bool_:
                found = self._constant(operand.bits != 0, kind)
            else:
                found = self._constant(bits, f"u{kind.itemsize}").view(kind)
            return lambda t: found
        if isinstance(operand, Symbol) and operand.name == "global_smem":
            found = self._constant(Shared.BASE, f"u{kind.itemsize}").view(kind)
            return lambda t: found
        if isinstance(operand, Special):
            return self._special(operand.name, kind)
        raise _Unknown(operand)

    def _special(self, name: str, kind: Any) -> Callable[[Lanes], Any]:
        which, _, axis = name.partition(".")
        place = "xyz".find(axis or "x")
        if which == "tid":
            return lambda t: (t.thread if place == 0 else t.thread * 0).astype(kind)
        if which == "ctaid":
            below = int(np.prod(self.grid[:place]))
            return lambda t: (t.block // below % self.grid[place]).astype(kind)
        if which == "nctaid":
            return lambda t: self._constant(self.grid[place], kind)
        if which == "ntid":
            return lambda t: self._constant(self.program.threads if place == 0 else 1, kind)
        if which == "laneid":
            return lambda t: (t.thread % 32).astype(kind)
        raise _Unknown(name)

    def put(self, t: Lanes, name: str, kind: str, value: Any) -> None:
        """Into the lanes that run; the others keep what they have, or junk where they have nothing yet."""
        value = (
            value.view(BITS[kind]) if value.dtype.itemsize == np.dtype(BITS[kind]).itemsize else _resized(value, kind)
        )
        if t.mask is not None:
            value = np.where(t.mask, value, t.registers[name] if name in t.registers else self._anything(kind))
        t.registers[name] = value

    def _anything(self, kind: str) -> Any:
        if kind == "p":
            return self.junk.integers(0, 2, self.n).astype(bool)
        return self.junk.integers(0, np.iinfo(BITS[kind]).max, self.n, BITS[kind])

    def stamp(self, t: Lanes, lanes: Any) -> Any:
        block = t.block[lanes]
        return Stamps.of(block, self.epoch[block], t.thread[lanes] // 32)

    # ---- instructions ----------------------------------------------------------------------------------------------

    def _guarded(self, ins: Instruction) -> Any:
        if ins.parts[0] in _JUMPS:
            return None
        step = self._step(ins)
        if ins.guard is None:
            return step
        name, wanted = ins.guard[0].name, ins.guard[1]

        def guarded(t: Lanes) -> None:
            before, p = t.mask, t.registers[name]
            mask = p if wanted else ~p
            mask = mask if before is None else mask & before
            if mask.any():
                t.mask = None if mask.all() else mask
                step(t)
                t.mask = before

        return guarded

    def _step(self, ins: Instruction) -> Step:
        parts, ops = ins.parts, ins.operands
        name = parts[0]
        if name == "mov":
            return self._move(parts[-1], *ops)
        if name in ("ld", "st") and len(parts) > 2 and parts[1] in ("param", "global", "shared"):
            return self._access(name == "st", parts, ops)
        if name == "cp" and parts[1] == "async":
            return self._copy(parts, ops)
        if name == "mma" and parts[1] == "sync":
            return self._product(parts, ops)
        if name == "ldmatrix":
            return self._matrix(parts, ops)
        if name in ("shfl", "redux"):
            return self._exchange(name, parts, ops)
        made = arithmetic(parts, self.rounding)
        if made is None:
            raise _Unknown(ins.op)
        kinds, function = made
        sources = [self.source(x, kind) for x, kind in zip(ops[1:], kinds, strict=True)]
        put = self.put
        if isinstance(ops[0], list):
            first, second = ops[0]

            def two(t: Lanes) -> None:
                for register, value in zip((first, second), function(*(s(t) for s in sources)), strict=True):
                    put(t, register.name, register.kind, value)

            return two
        to, kind = ops[0].name, ops[0].kind
        if len(sources) == 1:
            (a,) = sources
            return lambda t: put(t, to, kind, function(a(t)))
        if len(sources) == 2:
            a, b = sources
            return lambda t: put(t, to, kind, function(a(t), b(t)))
        a, b, c = sources
        return lambda t: put(t, to, kind, function(a(t), b(t), c(t)))

    def _move(self, kind: str, to: Any, source: Any) -> Step:
        put = self.put
        if isinstance(to, list):  # one register into its parts, the lowest first
            part = {2: np.uint16, 4: np.uint32}[{"b32": 4, "b64": 8}[kind] // len(to)]
            whole = self.source(source, {"b32": np.uint32, "b64": np.uint64}[kind])

            def unpack(t: Lanes) -> None:
                pieces = whole(t).view(part).reshape(-1, len(to))
                for i, register in enumerate(to):
                    if register is not None:
                        put(t, register.name, register.kind, np.ascontiguousarray(pieces[:, i]))

            return unpack
        if isinstance(source, list):
            part = {2: np.uint16, 4: np.uint32}[{"b32": 4, "b64": 8}[kind] // len(source)]
            pieces = [self.source(x, part) for x in source]
            return lambda t: put(t, to.name, to.kind, np.stack([x(t) for x in pieces], 1).view(BITS[to.kind]).ravel())
        value = self.source(source, BITS[to.kind])
        return lambda t: put(t, to.name, to.kind, value(t))

    def _address(self, operand: Address, kind: Any) -> Callable[[Lanes], Any]:
        base, offset = self.source(operand.base, kind), kind(operand.offset % (1 << 8 * np.dtype(kind).itemsize))
        return base if offset == 0 else lambda t: base(t) + offset

    def _access(self, writes: bool, parts: list[str], ops: tuple[Any, ...]) -> Step:
        known = {"param", "global", "shared", "v2", "v4"}
        width = {"8": 1, "16": 2, "32": 4, "64": 8}.get(parts[-1][1:])
        if width is None or not set(parts[1:-1]) <= known:
            raise _Unknown(".".join(parts))
        where, registers = ops if writes else ops[::-1]
        registers = registers if isinstance(registers, list) else [registers]
        if parts[1] == "param":
            (to,) = registers
            value = self._constant(self.arguments[where.base.name] % (1 << 8 * width), f"u{width}")
            return lambda t: self.put(t, to.name, to.kind, value)
        shared = parts[1] == "shared"
        address = self._address(where, np.uint32 if shared else np.uint64)
        size = width * len(registers)
        sources = [self.source(x, f"u{width}") for x in registers] if writes else []

        def access(t: Lanes) -> None:
            lanes = t.active()
            stamp, at = self.stamp(t, lanes), address(t)[lanes]
            if shared:
                each = [(self.shared, slice(None), self.shared.place(at, size, t.block[lanes]))]
            else:
                each = self.memory.each(at, size)
            if writes:
                values = np.stack([s(t)[lanes] for s in sources], 1)
                for space, which, place in each:
                    space.store(place, width, values[which], stamp[which])
                return
            found = np.empty((len(lanes), len(registers)), f"u{width}")
            for space, which, place in each:
                found[which] = space.load(place, width, len(registers), stamp[which])
            for i, to in enumerate(registers):
                whole = np.empty(t.n, found.dtype)
                whole[lanes] = found[:, i]
                self.put(t, to.name, to.kind, whole)

        return access

    def _copy(self, parts: list[str], ops: tuple[Any, ...]) -> Step:
        if parts[2] == "commit_group":

            def commit(t: Lanes) -> None:
                t.committed = t.committed + (1 if t.mask is None else t.mask)

            return commit
        if parts[2] in ("wait_group", "wait_all"):
            left = ops[0].bits if parts[2] == "wait_group" else 0
            return lambda t: self._arrive(t, left, parts[2] == "wait_all")
        if parts[2] not in ("cg", "ca") or parts[3:] != ["shared", "global"]:
            raise _Unknown(".".join(parts))
        to, source, size = self._address(ops[0], np.uint32), self._address(ops[1], np.uint64), ops[2].bits
        given = self.source(ops[3] if len(ops) > 3 else Number(size), np.uint32)

        def copy(t: Lanes) -> None:
            lanes = t.active()
            stamp, read = self.stamp(t, lanes), given(t)[lanes]
            at = self.shared.place(to(t)[lanes], size, t.block[lanes])
            values = np.zeros((len(lanes), size // 4), np.uint32)
            for bytes_read in np.unique(read):
                some = np.flatnonzero(read == bytes_read)
                if bytes_read not in (0, size):
                    raise Fault("unknown opcode", f"cp.async of {bytes_read} bytes of {size}")
                if bytes_read:
                    for space, which, place in self.memory.each(source(t)[lanes[some]], size):
                        values[some[which]] = space.load(place, 4, size // 4, stamp[some[which]])
            self.shared.begin(at, size, stamp)
            t.copies.append(Copy(lanes, t.committed[lanes], at, values))

        return copy

    def _arrive(self, t: Lanes, left: int, everything: bool) -> None:
        """What the lanes that run have waited for becomes theirs to read; others need a barrier more."""
        running = np.ones(t.n, bool) if t.mask is None else t.mask
        for copy in t.copies:
            ready = running[copy.lanes] & (everything | (copy.group < t.committed[copy.lanes] - left))
            if ready.any():
                self.shared.arrive(copy.at[ready], copy.values[ready], self.stamp(t, copy.lanes[ready]))
                copy.lanes, copy.group = copy.lanes[~ready], copy.group[~ready]
                copy.at, copy.values = copy.at[~ready], copy.values[~ready]
        t.copies = [copy for copy in t.copies if len(copy.lanes)]

    # ---- warps -----------------------------------------------------------------------------------------------------

    def _whole_warps(self, t: Lanes, what: str) -> Any:
        """Which warps run; all lanes of each must."""
        if t.mask is None:
            return np.ones(t.n // 32, bool)
        by_warp = t.mask.reshape(-1, 32)
        if (by_warp.any(1) != by_warp.all(1)).any():
            raise Fault("divergence", f"{what} by a part of a warp")
        return by_warp.all(1)

    def _all_lanes(self, t: Lanes, warps: Any, values: Any, like: Any = np.uint32) -> Any:
        if warps.all():
            return np.ascontiguousarray(values).reshape(-1)
        whole = np.zeros((len(warps), 32), values.dtype)
        whole[warps] = values
        return whole.reshape(-1)

    def _product(self, parts: list[str], ops: tuple[Any, ...]) -> Step:
        shape, kinds = parts[3], parts[6:]
        inside = {"f16": "f16", "bf16": "bf16", "tf32": "tf32"}.get(kinds[1])
        known = {"f16": ("m16n8k16", "m16n8k8"), "bf16": ("m16n8k16", "m16n8k8"), "tf32": ("m16n8k8", "m16n8k4")}
        if parts[2] != "aligned" or parts[4:6] != ["row", "col"] or inside is None or shape not in known[inside] or (
            kinds != ["f32", inside, inside, "f32"]
        ):  # fmt: skip
            raise _Unknown(".".join(parts))
        d, *rest = ops
        a, b, c = ([self.source(x, np.uint32) for x in registers] for registers in rest)

        def multiply(t: Lanes) -> None:
            warps = self._whole_warps(t, "mma")
            left, right, start = ([s(t).reshape(-1, 32)[warps] for s in side] for side in (a, b, c))
            found = warp.product(shape, inside, left, right, start, self.rounding)
            for register, value in zip(d, found, strict=True):
                self.put(t, register.name, register.kind, self._all_lanes(t, warps, value))

        return multiply

    def _matrix(self, parts: list[str], ops: tuple[Any, ...]) -> Step:
        count, turned = int(parts[4][1:]), "trans" in parts
        if parts[1:4] != ["sync", "aligned", "m8n8"] or parts[-2:] != ["shared", "b16"]:
            raise _Unknown(".".join(parts))
        registers, address = ops[0], self._address(ops[1], np.uint32)

        def load(t: Lanes) -> None:
            warps = self._whole_warps(t, "ldmatrix")
            lanes = np.arange(t.n).reshape(-1, 32)[warps][:, : 8 * count].reshape(-1)
            at = self.shared.place(address(t)[lanes], 16, t.block[lanes])
            rows = self.shared.load(at, 4, 4, self.stamp(t, lanes)).reshape(-1, count, 8, 4)
            for register, value in zip(registers, warp.matrices(rows, turned), strict=True):
                self.put(t, register.name, register.kind, self._all_lanes(t, warps, value))

        return load

    def _exchange(self, name: str, parts: list[str], ops: tuple[Any, ...]) -> Step:
        to, beside = ops[0] if isinstance(ops[0], list) else (ops[0], None)
        if name == "redux":
            how, kind = parts[2], {"s32": np.int32, "u32": np.uint32, "b32": np.uint32}[parts[3]]
            x, members = self.source(ops[1], kind), self.source(ops[2], np.uint32)
        else:
            how, kind = parts[2], np.uint32
            x, b, c, members = (self.source(o, np.uint32) for o in ops[1:5])

        def exchange(t: Lanes) -> None:
            warps = self._whole_warps(t, name)
            if (members(t).reshape(-1, 32)[warps] != 0xFFFFFFFF).any():
                raise Fault("divergence", f"{name} with lanes left out")
            if name == "redux":
                found, inside = warp.reduced(how, x(t).reshape(-1, 32)[warps]), None
            else:
                found, inside = warp.shuffled(how, *(s(t).reshape(-1, 32)[warps] for s in (x, b, c)))
            self.put(t, to.name, to.kind, self._all_lanes(t, warps, found.astype(kind)))
            if beside is not None:
                self.put(t, beside.name, beside.kind, self._all_lanes(t, warps, inside))

        return exchange

    # ---- the order of things ---------------------------------------------------------------------------------------

    def launch(self) -> None:
        self.done = 0
        units = []
        for warps in self.order:
            shape = (self.blocks, len(warps), 32)
            thread = np.broadcast_to(np.array(warps)[:, None] * 32 + np.arange(32), shape).reshape(-1)
            block = np.broadcast_to(np.arange(self.blocks)[:, None, None], shape).reshape(-1)
            none = np.zeros(self.n, bool)
            registers = Registers(self._anything, self.guarded)
            units.append(
                Lanes(block, thread, registers, None, [(0, ~none)], none - 1, none, [], np.zeros(self.n, np.int64))
            )
        with np.errstate(all="ignore"):
            while True:
                for i in self.junk.permutation(len(units)):
                    while units[i].runnable:
                        self._run(units[i])
                if not self._release(units):
                    return

    def _run(self, t: Lanes) -> None:
        """The lowest lanes, until they meet others, part, wait or return."""
        t.runnable.sort(key=lambda x: x[0])
        pc, mask = t.runnable.pop(0)
        while t.runnable and t.runnable[0][0] == pc:
            mask = mask | t.runnable.pop(0)[1]
        limit = t.runnable[0][0] if t.runnable else len(self.steps)
        t.mask = None if mask.all() else mask
        stop = min(limit, self.next_jump[pc])
        self.done += stop - pc + 1
        if self.done > _MOST:
            raise Fault("no end", f"more than {_MOST:,} instructions")
        try:
            for place in range(pc, stop):
                self.steps[place](t)
        except KeyError as error:
            raise Fault("uninitialised", f"register {error} in line {self.program.code[place].line}") from error
        except Fault as fault:
            ins = self.program.code[place]
            raise Fault(fault.kind, f"{fault}; line {ins.line} of {self.program.name}: {ins.text}") from None
        if stop == limit:
            t.runnable.append((stop, mask))
            return
        self._jump(t, stop, mask)

    def _jump(self, t: Lanes, pc: int, mask: Any) -> None:
        ins = self.program.code[pc]
        taken = mask
        if ins.guard is not None:
            p = t.registers[ins.guard[0].name]
            taken = mask & (p if ins.guard[1] else ~p)
        left = mask & ~taken
        if left.any():
            t.runnable.append((pc + 1, left))
        if not taken.any():
            return
        name = ins.parts[0]
        if name == "bra":
            t.runnable.append((self.program.labels[ins.operands[0].name], taken))
        elif name == "bar":
            if ins.parts[1:] == ["warp", "sync"]:
                t.runnable.append((pc + 1, taken))
            elif ins.parts[1:] == ["sync"] and len(ins.operands) == 1:
                t.waiting = np.where(taken, pc, t.waiting)
            else:
                raise Fault("unknown opcode", ins.text)
        else:
            t.gone = t.gone | taken

    def _release(self, units: list[Lanes]) -> bool:
        """Let the blocks go on whose threads all wait at the same barrier: those that are furthest behind."""
        at = np.stack([t.waiting.reshape(self.blocks, -1) for t in units], 1).reshape(self.blocks, -1)
        gone = np.stack([t.gone.reshape(self.blocks, -1) for t in units], 1).reshape(self.blocks, -1)
        waits = (at >= 0).any(1)
        if not waits.any():
            return False
        if (gone.any(1) & waits).any() or (at.min(1) != at.max(1)).any():
            raise Fault("barrier", "threads of one block are at different barriers, or have returned")
        place = int(at[waits, 0].min())
        free = waits & (at[:, 0] == place)
        self.epoch += free
        for t in units:
            mask = free[t.block]
            t.waiting = np.where(mask, -1, t.waiting)
            t.runnable.append((place + 1, mask))
        return True


class _Unknown(Exception):
    """An operand or opcode that is not known here."""


def _resized(value: Any, kind: str) -> Any:
    """Zeros above, as loads of less than a register leave them."""
    size = value.dtype.itemsize
    return value.view(f"u{size}").astype(BITS[kind]) if value.dtype != np.bool_ else value


def run(
    program: Program, grid: Sequence[int], arguments: Sequence[int], memory: Global, shared: int,
    rounding: Rounding = NEAREST,
) -> Machine:  # fmt: skip
    """One launch, to its end; a Fault where the kernel does what it must not."""
    machine = Machine(program, grid, arguments, memory, shared, rounding)
    machine.launch()
    return machine
