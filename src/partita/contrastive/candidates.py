"""Who is compared with whom: banks of keys, scored by the engine and joined by merging their states.

    p(j|i) over the union of all banks        state of the union = merge(state of each bank)        (M-GIB-9)

A bank is keys of a side, and which of them a row may see. Its positive is kept apart: it is one score per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import normalize as to_unit

from partita import _checks
from partita.contrastive.exclude import other_labels
from partita.engine import State
from partita.errors import ShapeError, ValueRangeError
from partita.processes import ALONE, Fact, PerRow, Processes, View
from partita.support import Support

__all__ = ["Bank", "agree", "check_pairs", "of_other_labels", "positive_score", "prepare", "resolve_scale", "tilted"]


@dataclass(frozen=True, eq=False)
class Bank:
    """Keys that are negatives of every row, or, paired, of one row each."""

    key: Tensor  # (m, dim), or paired (n, m, dim)
    support: Support | None = None
    hardness: float = 0.0
    query: Tensor | None = field(default=None)  # rows of this bank, if they are not the loss's own
    processes: Processes = ALONE  # whose keys they are, where they are not paired
    kind: int = 0  # whose sizes these keys have
    view: View | None = None  # in place of a support
    used: Tensor | None = None  # (m,) of slots that may hold no key: which do; the others are zeros

    def state(self, query: Tensor, scale: float | Tensor, statistics: bool = True) -> State:
        """Sums over the keys each row may see."""
        rows = query if self.query is None else self.query
        rows, key, scale = tilted(rows, self.key, scale, self.hardness)
        if key.dim() == 2:
            return self.processes.sums(
                rows, key, scale, support=self.support, view=self.view, kind=self.kind, statistics=statistics
            ).state
        # one score per given negative: smaller than the negatives themselves
        scores = (rows[:, None, :] * key).sum(-1)
        factor = scale[..., None] if isinstance(scale, Tensor) and scale.dim() else scale
        return State.of(factor * scores.to(torch.promote_types(scores.dtype, torch.float32)))


def of_other_labels(
    key: Tensor,
    labels: Tensor,
    key_labels: Tensor,
    hardness: float,
    processes: Processes,
    kind: int,
    used: Tensor | None = None,
) -> Bank:
    """Keys whose label is not the row's, sorted by label; `used` as in `Bank`."""
    order = key_labels.sort(stable=True)[1]
    shown = None if used is None else used[order]
    view = other_labels(labels, processes.gather_rows(key_labels.long(), kind), shown)
    return Bank(key[order], None, hardness, processes=processes, kind=kind, view=view, used=shown)


def agree(
    processes: Processes,
    call: str,
    tensors: Mapping[str, Tensor | None],
    scale: float | Tensor,
    options: Sequence[object] = (),
    sizes: Sequence[int] = (),
    others: Mapping[str, Fact] | None = None,
) -> Processes:
    """Ask the others whether they make the same call, and how many rows of each kind they bring.

    Sizes default to the rows of each tensor. The first of them are the rows that a scale may be given for one by one.
    """
    given = list(sizes) or [0 if t is None else t.shape[0] for t in tensors.values()]
    if processes.alone:
        return processes.agree(call, given, {})
    grad = torch.is_grad_enabled()
    facts: dict[str, Fact] = {"the temperature or scale": PerRow(scale, given[0]), **(others or {})}
    for name, tensor in tensors.items():
        facts[f"the dtype of {name}"] = None if tensor is None else tensor.dtype
        facts[f"the last dimension of {name}"] = None if tensor is None else tensor.shape[-1]
        facts[f"whether {name} needs a gradient"] = tensor is not None and grad and tensor.requires_grad
    return processes.agree(f"{call} {tuple(options)}", given, facts)


def tilted(query: Tensor, key: Tensor, scale: float | Tensor, hardness: float) -> tuple[Tensor, Tensor, float | Tensor]:
    """Scores scale * s + hardness * s, where the second term has no gradient: a weight exp(hardness * s) on each key.

    The value is that of a larger scale; both factors of the product let only the first term's share of the gradient by.
    """
    if hardness == 0.0:
        return query, key, scale
    share = float(scale.detach() if isinstance(scale, Tensor) else scale)
    share = share / (share + hardness)
    # value x, gradient share * x
    query = query.detach() + share * (query - query.detach())
    key = key.detach() + share * (key - key.detach())
    return query, key, scale + hardness


def positive_score(query: Tensor, key: Tensor, scale: float | Tensor) -> Tensor:  # (n,)
    """scale * <query_i, key_i>, in the precision of the sums."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    return scale * (query.to(dtype) * key.to(dtype)).sum(-1)


def prepare(name: str, vectors: Tensor, normalize: bool) -> Tensor:
    _checks.check_float(name, vectors)
    return to_unit(vectors, dim=-1) if normalize else vectors


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
    _checks.check_device(names, (query, key))


def resolve_scale(
    temperature: float | Tensor, log_temperature: Tensor | None, n: int, dtype: torch.dtype
) -> float | Tensor:
    """1 / temperature, checked; a tensor keeps its gradient."""
    if log_temperature is not None:
        return (-log_temperature.to(torch.promote_types(dtype, torch.float32))).exp()
    if not isinstance(temperature, Tensor):
        _checks.check_positive("temperature", temperature)
        return 1.0 / temperature
    if temperature.dim() and tuple(temperature.shape) not in ((1,), (n,)):
        raise ShapeError(
            f"temperature must be one number or one per row, shape ({n},); got {_checks.shape_text(temperature)}."
        )
    if _checks.has_values(temperature) and not bool(((temperature > 0) & temperature.isfinite()).all()):
        raise ValueRangeError("temperature must be positive and finite; the tensor given holds other values.")
    return 1.0 / temperature.to(torch.promote_types(dtype, torch.float32))
