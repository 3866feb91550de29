"""Before anything is computed, the ranks tell each other what they are about to do.

Sizes may differ from rank to rank and have to be known; everything else must be the same. Both travel in one small
message per call, so that the check costs nothing more than the sizes do. Every rank sees the whole table and comes to
the same conclusion, so that all of them raise, or none.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from partita._checks import has_values
from partita.distributed.team import Team
from partita.errors import BackendError, PartitaError

__all__ = ["Fact", "joint_checks", "meet"]

Fact = bool | int | float | str | Sequence[int] | torch.dtype | Tensor | None
_LENGTH = 40  # of the message, whatever the call: two different calls that meet must still read each other
_TOLERANCE = 1e-6  # relative; a temperature that is learned in step on every rank may differ by rounding


def meet(team: Team, call: str, sizes: Sequence[int], facts: Mapping[str, Fact]) -> list[list[int]]:
    """The sizes of every rank; raises on all ranks if they disagree about any fact."""
    codes = [_code(fact) for fact in facts.values()]
    header = [_hash(call), 0, *sizes, *(number for code in codes for number in code)]
    table = _exchange(team, header)
    if team.size == 1:
        return [list(sizes)]
    _check_failed(table)
    if len({row[0] for row in table}) > 1:
        raise BackendError(
            f"the ranks of the group call different functions, or the same with different options; "
            f"rank {team.rank} calls {call}. All ranks must make the same calls in the same order."
        )
    place = 2 + len(sizes)
    for name, own in facts.items():
        seen = [(row[place], row[place + 1]) for row in table]
        place += 2
        for rank, other in enumerate(seen):
            if not _same(seen[0], other):
                raise BackendError(
                    f"{name} must be the same on every rank of the group: rank {rank} differs from rank 0 "
                    f"({_text(other)} and {_text(seen[0])}); rank {team.rank} has {_show(own)}. Make them equal."
                )
    return [row[2 : 2 + len(sizes)] for row in table]


@contextlib.contextmanager
def joint_checks(team: Team | None) -> Iterator[None]:
    """Checks of this rank's own arguments, before the ranks have met: if they fail here, the others hear of it."""
    try:
        yield
    except PartitaError:
        if team is not None and team.size > 1:
            _exchange(team, [0, 1])
        raise


def _exchange(team: Team, header: Sequence[int]) -> list[list[int]]:
    assert len(header) <= _LENGTH
    if team.size == 1:
        return [list(header)]
    own = torch.tensor([*header, *[0] * (_LENGTH - len(header))], dtype=torch.int64, device=team.device)
    return [row.tolist() for row in team.all_gather(own)]


def _check_failed(table: Sequence[Sequence[int]]) -> None:
    failed = [rank for rank, row in enumerate(table) if row[1]]
    if failed:
        raise BackendError(
            f"rank {failed[0]} of the group refused its own arguments and computes nothing; "
            f"its error says what is wrong there."
        )


def _hash(text: str) -> int:
    return zlib.crc32(text.encode()) + 1  # never 0, which is nobody's


def _code(fact: Fact) -> tuple[int, int]:
    """What kind of thing a fact is, and the thing in one integer."""
    if isinstance(fact, Tensor):
        if fact.numel() != 1 or not has_values(fact.detach()):
            return 4, fact.dim()
        fact = float(fact.detach())
    if isinstance(fact, bool) or fact is None:
        return 1, -1 if fact is None else int(fact)
    if isinstance(fact, int):
        return 2, fact
    if isinstance(fact, float):
        return 3, struct.unpack("<q", struct.pack("<d", fact))[0]
    return 5, _hash(str(tuple(fact)) if isinstance(fact, Sequence) and not isinstance(fact, str) else str(fact))


def _number(code: tuple[int, int]) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", code[1]))[0]
    return value


def _same(a: tuple[int, int], b: tuple[int, int]) -> bool:
    if a[0] == b[0] == 3:
        x, y = _number(a), _number(b)
        return x == y or abs(x - y) <= _TOLERANCE * max(abs(x), abs(y)) or (x != x and y != y)
    return a == b


def _text(code: tuple[int, int]) -> str:
    kind, value = code
    if kind == 1:
        return {-1: "None", 0: "False", 1: "True"}[value]
    if kind == 3:
        return f"{_number(code):g}"
    return {2: str(value), 4: f"a tensor of {value} dimensions"}.get(kind, "another value")


def _show(fact: Fact) -> str:
    if isinstance(fact, Tensor):
        return f"{float(fact.detach()):g}" if fact.numel() == 1 else f"a tensor {tuple(fact.shape)}"
    return str(tuple(fact)) if isinstance(fact, Sequence) and not isinstance(fact, str) else str(fact)
