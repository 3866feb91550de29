"""Who is compared with whom: banks of keys, scored by the engine and joined by merging their states.

    p(j|i) over the union of all banks        state of the union = merge(state of each bank)        (M-GIB-9)

Anchors are the rows, a bank is keys of a side, and which of them a row may see. The positive is kept separate: it is
one score per row.
What is no negative is left out

    by label    keys sorted by label: a row's own label is one interval, everything else two; O(n) numbers, no mask
    by score    an Exclusion gives a mask for a few rows against all keys; the backward pass computes it again
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from partita import _checks
from partita.collective import ALONE, Collective, Fact, View, per_row
from partita.engine import State
from partita.engine.terms import Term
from partita.errors import ShapeError, ValueRangeError
from partita.precision import check_same_dtype, no_autocast
from partita.score import Score
from partita.support import Support

__all__ = [
    "AbovePositive", "Anchors", "Bank", "Exclusion", "Guide", "InUse", "OtherLabel", "PartialScore", "agree",
    "check_pairs", "of_other_labels", "paired_scores", "positive_score", "prepare", "resolve_scale", "sort_by_label",
]  # fmt: skip

_LEAST = 1e-12  # the norm that a shorter vector is divided by
_SQUARE = 32  # rows whose scores with their partners are read off the diagonal of a square


@dataclass(frozen=True, eq=False)
class Bank:
    """Keys that are negatives of every row, or, paired, of one row each."""

    key: Tensor  # (m, dim), or paired (n, m, dim)
    support: Support | None = None
    kind: int = 0  # whose sizes these keys have
    view: View | None = None  # in place of a support
    used: Tensor | None = None  # (m,) of slots that may hold no key: which do; the others are zeros


@dataclass(frozen=True, eq=False)
class Anchors:
    """Rows that look for their positive, and how they are compared with keys."""

    query: Tensor  # (n, dim)
    scale: float | Tensor
    processes: Collective = ALONE  # whose keys a bank has, where they are not paired
    score: Score | None = None  # instead of the inner product; no hardness, and for a process alone
    hardness: float = 0.0

    def turned(self, key: Tensor) -> Anchors:
        """Keys that look for their query, which stays the first argument of a score."""
        return replace(self, query=key, score=None if self.score is None else PartialScore(self.score, turned=True))

    def positive(self, key: Tensor) -> Tensor:  # (n,)
        """The score of each row with its own key, before the scale."""
        return positive_score(self.query, key, self.score)

    def state(self, banks: Iterable[Bank], statistics: bool = True) -> State:
        """Sums over the keys that each row may see, of all banks."""
        return functools.reduce(State.merge, (self._sums(bank, statistics) for bank in banks))

    def _sums(self, bank: Bank, statistics: bool) -> State:
        rows, key, scale = self.query, bank.key, self.scale
        if self.hardness:
            # The second term of scale * s + hardness * s has no gradient: a weight exp(hardness * s) on each key. The
            # value is that of a larger scale; both factors let only the first term's share of the gradient by.
            share = scale.detach() if isinstance(scale, Tensor) else scale
            share = float(share) if not isinstance(share, Tensor) or share.is_cpu else share
            share = share / (share + self.hardness)
            rows, key = (x.detach() + share * (x - x.detach()) for x in (rows, key))
            scale = scale + self.hardness
        if key.dim() == 2:
            return self.processes.sums(
                rows, key, scale, support=bank.support, view=bank.view, kind=bank.kind, statistics=statistics,
                score=self.score,
            ).state  # fmt: skip
        # one score per given negative: smaller than the negatives themselves
        scores = paired_scores(rows, key, self.score)
        factor = scale[..., None] if isinstance(scale, Tensor) and scale.dim() else scale
        return State.of(factor * scores.to(torch.promote_types(scores.dtype, torch.float32)))


class PartialScore(nn.Module):
    """A score with its arguments exchanged, or with part of its gradient."""

    def __init__(self, score: Score, turned: bool = False, share: float = 1.0):
        super().__init__()
        self.score, self.turned, self.share = score, turned, share

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        s = self.score(key, query).mT if self.turned else self.score(query, key)
        return s if self.share == 1.0 else s.detach() + self.share * (s - s.detach())


def of_other_labels(
    key: Tensor, labels: Tensor, key_labels: Tensor, processes: Collective, kind: int, used: Tensor | None = None
) -> Bank:
    """Keys whose label is not the row's, sorted by label; `used` as in `Bank`."""
    order = key_labels.sort(stable=True)[1]
    shown = None if used is None else used[order]
    ordered = [known.sort(stable=True)[0] for known in processes.gather_rows(key_labels.long(), kind)]

    def view(source: int, n: int) -> list[tuple[slice, int, Support]]:
        seen: Support = OtherLabel.of(labels.long(), ordered[source])
        return [(slice(0, n), 0, seen if shown is None else seen & InUse(shown))]

    return Bank(key[order], None, kind, view, shown)


def agree(
    processes: Collective,
    call: str,
    tensors: Mapping[str, Tensor | None],
    scale: float | Tensor,
    options: Sequence[object] = (),
    sizes: Sequence[int] = (),
    others: Mapping[str, Fact] | None = None,
) -> Collective:
    """Ask the others whether they make the same call, and how many rows of each kind they bring.

    Sizes default to the rows of each tensor. The first of them are the rows that a scale may be given for one by one.
    """
    given = list(sizes) or [0 if t is None else t.shape[0] for t in tensors.values()]
    if processes.alone:
        return processes.check_same(call, given, {})
    grad = torch.is_grad_enabled()
    facts: dict[str, Fact] = {"the temperature or scale": per_row(scale, given[0]), **(others or {})}
    for name, tensor in tensors.items():
        facts[f"the dtype of {name}"] = None if tensor is None else tensor.dtype
        facts[f"the last dimension of {name}"] = None if tensor is None else tensor.shape[-1]
        facts[f"whether {name} needs a gradient"] = tensor is not None and grad and tensor.requires_grad
    return processes.check_same(f"{call} {tuple(options)}", given, facts)


def positive_score(query: Tensor, key: Tensor, score: Score | None = None) -> Tensor:  # (n,)
    """The score of each row with its own key, before the scale, in the precision of the sums."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(dtype), key.to(dtype)
    if score is None:
        return (query * key).sum(-1)
    with no_autocast(query):
        pieces = zip(query.split(_SQUARE), key.split(_SQUARE), strict=True)
        return torch.cat([score(a, b).diagonal() for a, b in pieces])


def paired_scores(query: Tensor, keys: Tensor, score: Score | None) -> Tensor:  # (n, m)
    """The score of each row with keys of its own, (n, m, dim)."""
    if score is None:
        return (query[:, None, :] * keys).sum(-1)
    return torch.stack([positive_score(query, one, score) for one in keys.unbind(1)], 1)


def prepare(name: str, vectors: Tensor, normalize: bool) -> Tensor:
    """Unit vectors, by the operations of F.normalize without its calls of calls; or the vectors as they are."""
    _checks.check_float(name, vectors)
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(_LEAST) if normalize else vectors


def check_pairs(query: Tensor, key: Tensor, names: tuple[str, str] = ("query", "positive_key")) -> None:
    """Two matrices whose rows belong together."""
    for name, tensor in zip(names, (query, key), strict=True):
        _checks.check_float(name, tensor)
        if tensor.dim() != 2:
            raise ShapeError(f"{name} must be a matrix (n, dim); got {_checks.shape_text(tensor)}.")
    if query.shape != key.shape:
        raise ShapeError(
            f"row i of {names[0]} belongs to row i of {names[1]}, so their shapes must be equal; "
            f"got {_checks.shape_text(query)} and {_checks.shape_text(key)}."
        )
    check_same_dtype(names, query, key)
    _checks.check_device(names, (query, key))


def resolve_scale(
    temperature: float | Tensor, log_temperature: Tensor | None, n: int, dtype: torch.dtype
) -> float | Tensor:
    """1 / temperature, checked; a tensor keeps its gradient."""
    name, given = ("temperature", temperature) if log_temperature is None else ("log_temperature", log_temperature)
    if log_temperature is not None:
        _checks.check_float(name, log_temperature)
    if not isinstance(given, Tensor):
        _checks.check_positive(name, given)
        return 1.0 / given
    if tuple(given.shape) not in ((), (1,), (n,)):
        raise ShapeError(f"{name} must be one number or one per row, shape ({n},); got {_checks.shape_text(given)}.")
    raised = given.to(torch.promote_types(dtype, torch.float32))
    if log_temperature is not None:
        return (-raised).exp()
    if _checks.has_values(given) and not bool(((given > 0) & given.isfinite()).all()):
        raise ValueRangeError("temperature must be positive and finite; the tensor given holds other values.")
    return 1.0 / raised


# ---- negatives that are none -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OtherLabel(Support):
    """Keys of another label than the row's, for keys sorted by label: j < first_i or j >= last_i."""

    first: Tensor  # (n,) where the row's label begins
    last: Tensor  # (n,) where it has ended

    @staticmethod
    def of(labels: Tensor, ordered: Tensor) -> OtherLabel:
        """Of each row's label, among key labels in order."""
        first, last = (torch.searchsorted(ordered, labels.contiguous(), right=right) for right in (False, True))
        return OtherLabel(first, last)

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        if self.first.shape[-1] != n_query:
            raise ShapeError(f"labels were given for {self.first.shape[-1]} rows; there are {n_query} queries.")
        lead = [1] * len(batch)
        first, last = (x.to(device=device, dtype=torch.int32).view(*lead, n_query) for x in (self.first, self.last))
        return Term(stop=first), Term(start=last)


@dataclass(frozen=True, eq=False)
class InUse(Support):
    """Slots that hold a key, of a bank that may have room left; a key after the last slot is seen too."""

    used: Tensor  # (m,) bool

    def bind(self, n_query: int, n_key: int, batch: Sequence[int], device: torch.device) -> tuple[Term, ...]:
        keep = torch.nn.functional.pad(self.used, (0, n_key - self.used.shape[0]), value=True)
        return (Term(mask=keep.view(*[1] * (len(batch) + 1), n_key)),)


def sort_by_label(labels: Tensor, key_labels: Tensor) -> tuple[Tensor, OtherLabel]:
    """An order of the keys, and the support of the keys in that order whose label differs from the row's."""
    for name, given in (("labels", labels), ("key_labels", key_labels)):
        _checks.check_index_dtype(name, given)
        if given.dim() != 1:
            raise ShapeError(f"{name} must be a vector, one label per row or key; got {_checks.shape_text(given)}.")
    ordered, order = key_labels.sort(stable=True)
    return order, OtherLabel.of(labels, ordered)


@dataclass(frozen=True, eq=False)
class Exclusion:
    """A rule that leaves negatives out by looking at scores; abstract."""

    def hidden(self, rows: Tensor, query: Tensor, key: Tensor, positive: Tensor) -> Tensor:
        """(r, m) True where a key is no negative of a row; `rows` are row numbers, `positive` their similarities."""
        raise TypeError("Exclusion is abstract; use AbovePositive or Guide.")

    def check(self, n_query: int, n_key: int) -> None:
        """Raise if the rule does not fit these sizes."""


@dataclass(frozen=True, eq=False)
class AbovePositive(Exclusion):
    """A negative more similar than the positive by more than a margin is taken for an unlabelled positive.

    hidden_ij  iff  <query_i, key_j> > <query_i, positive_i> + margin
    """

    margin: float = 0.0

    def __post_init__(self) -> None:
        _checks.check_number("margin", self.margin)

    def hidden(self, rows: Tensor, query: Tensor, key: Tensor, positive: Tensor) -> Tensor:
        return query @ key.mT > positive[:, None] + self.margin


@dataclass(frozen=True, eq=False)
class Guide(Exclusion):
    """Another encoder's vectors of the same rows and keys decide what is too similar (GISTEmbed).

    hidden_ij  iff  <guide_query_i, guide_key_j> > <guide_query_i, guide_positive_i> - margin
    """

    query: Tensor  # (n, dim_guide)
    key: Tensor  # (m, dim_guide); its first n rows are the positives
    margin: float = 0.0

    def __post_init__(self) -> None:
        _checks.check_pair(self.query, self.key)
        _checks.check_number("margin", self.margin)

    def check(self, n_query: int, n_key: int) -> None:
        if self.query.shape[0] != n_query or self.key.shape[0] != n_key:
            raise ShapeError(
                f"the guide needs a vector for each query and key, {n_query} and {n_key}; "
                f"got {_checks.shape_text(self.query)} and {_checks.shape_text(self.key)}."
            )

    def hidden(self, rows: Tensor, query: Tensor, key: Tensor, positive: Tensor) -> Tensor:
        own = self.query[rows]
        level = (own * self.key[rows]).sum(-1) - self.margin
        return own @ self.key.mT > level[:, None]
