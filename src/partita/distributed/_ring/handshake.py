"""Before anything is computed, the ranks tell each other what they are about to do.

Sizes may differ from rank to rank and have to be known; everything else must be the same. Both travel in one small
message per call, so that the check costs nothing more than the sizes do. Every rank sees the whole table and comes to
the same conclusion, so that all of them raise, or none.

    with checks(group): ...         what fails on this rank, whatever it is, is told to the others
    handshake(group, call, ...)     where they hear of it, or that all is well

What can be checked only when the sizes of all ranks are known follows as `with checks(group): ...` and `confirm`.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from partita._checks import has_values
from partita.distributed._ring.group import Group
from partita.errors import BackendError
from partita.processes import Fact, PerRow

__all__ = ["checks", "confirm", "handshake"]

_LENGTH = 44  # of the message, whatever the call: two different calls that meet must still read each other
_TOLERANCE = 1e-6  # relative; a temperature that is learned in step on every rank may differ by rounding
_NOTHING, _NUMBER, _REAL, _TENSOR, _OTHER, _PER_ROW, _EITHER = range(1, 8)  # kinds of facts
_FAILED = 0  # the call of a rank that calls nothing


def handshake(group: Group, call: str, sizes: Sequence[int], facts: Mapping[str, Fact]) -> list[list[int]]:
    """The sizes of every rank; raises on all ranks if they disagree about any fact."""
    if group.size == 1:
        return [list(sizes)]
    codes = [_code(fact) for fact in facts.values()]
    table = _exchange(group, [_hash(call), *sizes, *(number for code in codes for number in code)])
    _check_calls(group, call, table)
    place = 1 + len(sizes)
    for name, own in facts.items():
        seen = [(row[place], row[place + 1]) for row in table]
        place += 2
        found: dict[tuple[int, int], int] = {}  # what is said, and who says it first
        for rank, other in enumerate(seen):
            against = None if other in found else next((code for code in found if not _same(code, other)), None)
            if against is not None:
                raise BackendError(
                    f"{name} must be the same on every rank of the group: rank {rank} differs from rank "
                    f"{found[against]} ({_text(other)} and {_text(against)}); rank {group.rank} has {_show(own)}. "
                    f"Make them equal."
                )
            found.setdefault(other, rank)
    return [row[1 : 1 + len(sizes)] for row in table]


def confirm(group: Group, call: str) -> None:
    """Every rank has got this far; raises on all ranks if one has not."""
    if group.size > 1:
        _check_calls(group, call, _exchange(group, [_hash(f"{call}, confirmed")]))


@contextlib.contextmanager
def checks(group: Group) -> Iterator[None]:
    """What fails in here, on this rank alone perhaps, the others hear of at their next handshake."""
    try:
        yield
    except Exception:
        if group.size > 1:
            _exchange(group, [_FAILED])
        raise


def _exchange(group: Group, header: Sequence[int]) -> list[list[int]]:
    assert len(header) <= _LENGTH
    own = torch.tensor([*header, *[0] * (_LENGTH - len(header))], dtype=torch.int64, device=group.device)
    return [row.tolist() for row in group.all_gather(own)]


def _check_calls(group: Group, call: str, table: Sequence[Sequence[int]]) -> None:
    failed = [rank for rank, row in enumerate(table) if row[0] == _FAILED]
    if failed:
        raise BackendError(
            f"rank {failed[0]} of the group refused its own arguments and computes nothing; "
            f"its error says what is wrong there."
        )
    if len({row[0] for row in table}) > 1:
        raise BackendError(
            f"the ranks of the group call different functions, or the same with different options; "
            f"rank {group.rank} calls {call}. All ranks must make the same calls in the same order."
        )


def _hash(text: str) -> int:
    return zlib.crc32(text.encode()) + 1  # never _FAILED


def _code(fact: Fact) -> tuple[int, int]:
    """What kind of thing a fact is, and the thing in one integer."""
    if isinstance(fact, PerRow):
        scale = fact.value
        if isinstance(scale, Tensor) and scale.numel() != 1:
            return _PER_ROW, 0
        if isinstance(scale, Tensor) and scale.dim() and fact.rows == 1:
            return _EITHER, _bits(float(scale.detach()))
        fact = scale
    if isinstance(fact, Tensor):
        if fact.numel() != 1 or not has_values(fact.detach()):
            return _TENSOR, fact.dim()
        fact = float(fact.detach())
    if isinstance(fact, bool) or fact is None:
        return _NOTHING, -1 if fact is None else int(fact)
    if isinstance(fact, int):
        return _NUMBER, fact
    if isinstance(fact, float):
        return _REAL, _bits(fact)
    return _OTHER, _hash(str(tuple(fact)) if isinstance(fact, Sequence) and not isinstance(fact, str) else str(fact))


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(code: tuple[int, int]) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", code[1]))[0]
    return value


def _same(a: tuple[int, int], b: tuple[int, int]) -> bool:
    kinds = {a[0], b[0]}
    if _EITHER in kinds and _PER_ROW in kinds:
        return True
    if kinds <= {_REAL, _EITHER}:
        x, y = _number(a), _number(b)
        close = x == y or abs(x - y) <= _TOLERANCE * max(abs(x), abs(y)) or (x != x and y != y)
        return close or kinds == {_EITHER}
    return a == b


def _text(code: tuple[int, int]) -> str:
    kind, value = code
    if kind == _NOTHING:
        return {-1: "None", 0: "False", 1: "True"}[value]
    if kind in (_REAL, _EITHER):
        return f"{_number(code):g}"
    return {_NUMBER: str(value), _TENSOR: f"a tensor of {value} dimensions", _PER_ROW: "one per row"}.get(
        kind, "another value"
    )


def _show(fact: Fact) -> str:
    if isinstance(fact, PerRow):
        fact = fact.value
    if isinstance(fact, Tensor):
        return f"{float(fact.detach()):g}" if fact.numel() == 1 else f"a tensor {tuple(fact.shape)}"
    return str(tuple(fact)) if isinstance(fact, Sequence) and not isinstance(fact, str) else str(fact)
