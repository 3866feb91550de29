"""What a support is, and how two of them join: (a & b) shows the keys of both, (a | b) those of either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from partita._checks import check_whole, concrete, shape_text
from partita._repr import escaped, matrix_html, small_matrix
from partita.engine.terms import Term, both, window_mask
from partita.engine.terms import visible as visible_keys
from partita.errors import DtypeError, ShapeError

__all__ = ["Both", "Either", "Support", "check_support", "text_of"]

_PRINTED = 32  # entries of a tensor that a repr writes out; a larger one is named by its kind and shape


@dataclass(frozen=True, eq=False)
class Support:
    """Which keys each query may see; `bind` turns it into terms for given sizes."""

    positional: ClassVar[bool] = False  # a rule on positions alone: equal ones bind to equal terms, which are cached

    def __and__(self, other: Support) -> Support:
        return Both(self, _support(other))

    def __or__(self, other: Support) -> Support:
        return Either(self, _support(other))

    def __bool__(self) -> bool:
        raise DtypeError(
            "a support is neither true nor false: `and`, `or` and `not` would drop one side of it. "
            "Join supports with & and |, and test for one with `support is not None`."
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it was made of, whose later changes a reader can detect."""
        return tuple(x for x in vars(self).values() if isinstance(x, Tensor))

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        raise TypeError("Support is abstract; use support.causal(), support.lengths(...) and their like.")

    def visible(
        self, n_query: int, n_key: int, batch: Sequence[int] = (), device: torch.device | str | None = None
    ) -> Tensor:  # (*batch, n_query)
        """Number of keys each query may see.

        >>> partita.support.causal().visible(3, 5)
        tensor([1, 2, 3])
        """
        where = _place(n_query, n_key, batch, device)
        return visible_keys(self.bind(n_query, n_key, batch, where), n_query, n_key, batch, where)

    def dense(
        self, n_query: int, n_key: int, batch: Sequence[int] = (), device: torch.device | str | None = None
    ) -> Tensor:  # (*batch, n_query, n_key)
        """The whole boolean matrix, for small sizes.

        >>> partita.support.window(1, 0).dense(3, 3).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
        """
        where = _place(n_query, n_key, batch, device)
        terms = self.bind(n_query, n_key, batch, where)
        out = window_mask(terms, slice(0, n_query), slice(0, n_key), where)
        if out is None:
            out = torch.ones((), dtype=torch.bool, device=where)
        return out.expand(*batch, n_query, n_key)

    def _repr_html_(self) -> str:
        """In a notebook: the matrix at the size of its tensors, or 12 x 12."""
        keep = small_matrix(lambda n, m, batch: self.dense(n, m, batch, "cpu"), self.tensors())
        return f"<code>{escaped(repr(self))}</code>" if keep is None else matrix_html(keep, repr(self))


def check_support(given: object) -> None:
    """Raise unless None or a Support, with a hint for common mistakes."""
    if given is None or isinstance(given, Support):
        return
    if isinstance(given, Tensor):
        hint = "A boolean tensor becomes one with support.mask(tensor), numbers to be added are a bias"
    elif callable(given):
        hint = f"Call it: support.{getattr(given, '__name__', 'causal')}(...)"
    else:
        hint = "Make one with support.causal(), support.mask(tensor) and their like"
    raise DtypeError(f"support must be a partita.support; got {type(given).__name__}. {hint}.")


def _support(other: object) -> Support:
    if other is None:
        raise DtypeError("a support joins only with a support; got None.")
    check_support(other)
    assert isinstance(other, Support)
    return other


def text_of(tensor: Tensor) -> str:
    """A small tensor as a constructor call, a large one by dtype and shape."""
    if not concrete(tensor) or tensor.numel() > _PRINTED:
        return f"<{str(tensor.dtype).removeprefix('torch.')} {shape_text(tensor)}>"
    kind = "" if tensor.dtype in (torch.bool, torch.int64) and tensor.numel() else f", dtype={tensor.dtype}"
    return f"torch.tensor({tensor.tolist()}{kind})"


def _place(n_query: int, n_key: int, batch: Sequence[int], device: torch.device | str | None) -> torch.device:
    """The device, after a check of the sizes."""
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise ShapeError(f"batch must be the sizes in front, such as (2, 8); got {batch!r}.")
    for name, size in (("n_query", n_query), ("n_key", n_key), *(("a batch size", size) for size in batch)):
        if not isinstance(size, torch.SymInt):
            check_whole(name, size, least=0)
    return torch.get_default_device() if device is None else torch.device(device)


@dataclass(frozen=True)
class _Joined(Support):
    a: Support
    b: Support

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.a.positional and self.b.positional

    def tensors(self) -> tuple[Tensor, ...]:
        return self.a.tensors() + self.b.tensors()


@dataclass(frozen=True, repr=False)
class Both(_Joined):
    def __repr__(self) -> str:
        return " & ".join(f"({x!r})" if isinstance(x, Either) else repr(x) for x in (self.a, self.b))

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        a = self.a.bind(n_query, n_key, batch, device)
        b = self.b.bind(n_query, n_key, batch, device)
        return tuple(term for x in a for y in b for term in both(x, y))


@dataclass(frozen=True, repr=False)
class Either(_Joined):
    def __repr__(self) -> str:
        return f"{self.a!r} | {self.b!r}"

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        terms = self.a.bind(n_query, n_key, batch, device) + self.b.bind(n_query, n_key, batch, device)
        trivial = [term for term in terms if term.trivial]
        return (trivial[0],) if trivial else terms
