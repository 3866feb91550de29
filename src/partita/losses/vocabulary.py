"""Hidden states against a vocabulary: what token statistics, divergences and distillation read.

    logit_iv = softcap(<hidden_i, weight_v> + bias_v) / temperature_i        log p_i(v) = logit_iv - log Z_i

Over a group each rank holds a slice of the tokens, in rank order; ids are those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partita import _checks
from partita.collective import Collective
from partita.engine import State
from partita.engine.listed import Limits, Spread, likely_pairs, pair_scores
from partita.engine.sums import Sums
from partita.errors import ShapeError, TargetError, ValueRangeError
from partita.gibbs import Gibbs, sharper
from partita.precision import check_same_dtype, product

__all__ = [
    "Vocabulary", "check_head", "check_listed", "collision", "distribution", "local_ids", "row_temperature",
]  # fmt: skip


@dataclass(eq=False)
class Vocabulary:
    """The distribution of every row over the tokens of all ranks."""

    gibbs: Gibbs  # of this rank's slice
    processes: Collective
    parts: list[Gibbs] = field(init=False)  # this slice, or in exact rows over a group the leaves that it is cut into

    def __post_init__(self) -> None:
        p = self.gibbs
        found = self.processes.leaves((p.query, p.scale), p.key, p.bias)
        options: dict[str, Any] = {"softcap": p.softcap, "cap_bias": p.cap_bias, "score": p.score}
        self.parts = [p] if len(found) == 1 else [
            Gibbs(query, key, scale=scale, bias=bias, **options) for (query, scale), key, bias in found
        ]  # fmt: skip

    @property
    def size(self) -> int:
        return len(self.gibbs.key) if self.processes.alone else sum(self.processes.sizes[0])

    @property
    def first(self) -> int:
        """The id of the first token of this rank's slice."""
        return sum(self.processes.sizes[0][: self.processes.rank]) if self.processes.sizes else 0

    def state(self, *, statistics: bool = False) -> State:
        return self.processes.state(self.parts, statistics)

    def twice(self) -> State:
        """The state at twice the score."""
        return self.processes.state([sharper(part, 2.0) for part in self.parts], False)

    def sums(self, target: Tensor, here: Tensor | None, **reads: bool) -> Sums:
        """The sums of every row, with a target each; see `Collective.slices`."""
        return self.processes.slices([part.asking for part in self.parts], target, here, **reads)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """`local_ids` of these processes."""
        return local_ids(self.processes, ids)

    def scores(self, ids: Tensor) -> Tensor:  # (n, K)
        """The logits of these ids."""
        near, here = self.local(ids)
        row = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        if here is None:
            return pair_scores(self.gibbs.request(), row.reshape(-1), near.reshape(-1)).reshape(ids.shape)
        requests, first = [part.request() for part in self.parts], 0
        total = torch.zeros(ids.shape, dtype=requests[0].dtype, device=ids.device)
        for request in requests:
            mine = here & (near >= first) & (near < first + request.n_key)
            total = total.index_put((mine,), pair_scores(request, row[mine], near[mine] - first))
            first += request.n_key
        return self.processes.total(total)

    @torch.no_grad()
    def rank(self, ids: Tensor) -> Tensor:  # (n,)
        """How many tokens are likelier than the one of each row."""
        target, here = self.local(ids.contiguous())
        found = self.sums(target, here, rank=True, statistics=not self.processes.alone).rank
        assert found is not None
        return found

    def likely(self, limits: Limits) -> tuple[Tensor, Tensor]:  # (m,), (m,)
        """The pairs of a row and an id that limits keep, of the ids that are here."""
        alone, processes = self.processes.alone, self.processes
        spread = None if alone else Spread(
            max(processes.sizes[0]), processes.rank, lambda x: torch.cat(processes.all_gather(x), -1)
        )  # fmt: skip
        row, near = likely_pairs(self.gibbs.request(), limits, spread)
        return row, near + self.first

    def best_of_all(self, score: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:  # (n, k) each
        """The best ids of the whole and their logits, from the best of every rank, -1 where there is none."""
        if self.processes.alone:
            return score, ids
        best, at = torch.cat(self.processes.all_gather(score.detach()), -1).sort(dim=-1, descending=True, stable=True)
        best, at = (x[:, : score.shape[-1]] for x in (best, at))
        ids = torch.cat(self.processes.all_gather(ids), -1).gather(-1, at)
        found = self.scores(torch.where(best.isneginf(), 0, ids))
        return found.masked_fill(best.isneginf(), -torch.inf), ids.masked_fill(best.isneginf(), -1)


def local_ids(processes: Collective, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ids in this rank's slice, 0 where they are elsewhere, and which are here; None: all."""
    if processes.alone:
        return ids, None
    ids = ids - sum(processes.sizes[0][: processes.rank])
    here = (ids >= 0) & (ids < processes.sizes[0][processes.rank])
    return torch.where(here, ids, torch.zeros_like(ids)), here


def collision(state: State, twice: State) -> Tensor:
    """log sum p^2 = log Z(2 s) - 2 log Z(s), relative to the peaks."""
    gap = torch.where(state.empty(), torch.zeros_like(state.peak), twice.peak - 2 * state.peak)
    return twice.log_mass() + gap - 2 * state.log_mass()


# ---- what was given --------------------------------------------------------------------------------------------------


def distribution(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float | Tensor, softcap: float | None
) -> Gibbs:
    """softcap(<h, w> + b) / T: a number goes into scale, bias and softcap; one per row stands outside of the cap."""
    if not isinstance(temperature, Tensor):
        bias = None if bias is None else (bias if temperature == 1.0 else bias / temperature)[None]
        softcap = None if softcap is None else softcap / temperature
        return Gibbs(hidden, weight, scale=1.0 / temperature, bias=bias, softcap=softcap, cap_bias=softcap is not None)
    if bias is not None:  # one more feature
        hidden = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
        weight = torch.cat([weight, bias[:, None].to(weight.dtype)], 1)
    return Gibbs(hidden, weight, scale=temperature.reciprocal(), score=None if softcap is None else _Capped(softcap))


@dataclass(frozen=True)
class _Capped:
    """softcap(<q, k>) as a score, for a scale that stands outside of the cap."""

    softcap: float
    per_pair = 1

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.softcap * torch.tanh(product(query, key.mT) / self.softcap)


def row_temperature(temperature: float | Tensor, lead: tuple[int, ...]) -> float | Tensor:  # a number, or one per row
    if not isinstance(temperature, Tensor):
        _checks.check_positive("temperature", temperature)
        return float(temperature)
    _checks.check_float("temperature", temperature)
    if _checks.has_values(temperature) and not bool(((temperature > 0) & temperature.isfinite()).all()):
        raise ValueRangeError("temperature must be positive and finite in every row; greedy decoding is want='is_top'.")
    if not _checks.expands(temperature.shape, lead):
        raise ShapeError(
            f"temperature must be a number or broadcast to the rows {lead}; got {_checks.shape_text(temperature)}."
        )
    return temperature.to(torch.promote_types(temperature.dtype, torch.float32)).expand(lead)


def check_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    names: tuple[str, str, str] = ("hidden", "weight", "bias"),
    n_class: str = "vocabulary",
    outputs: bool = False,  # more dimensions between the classes and the features
) -> tuple[int, ...]:
    """The rows of hidden states that fit a head; errors have the names of the face."""
    for name, given in zip(names, (hidden, weight) if bias is None else (hidden, weight, bias), strict=False):
        _checks.check_float(name, given)
    if hidden.dim() < 1 or weight.dim() < 2 or (weight.dim() > 2 and not outputs):
        raise ShapeError(
            f"{names[0]} must be (..., dim) and {names[1]} ({n_class}, dim); got {_checks.shape_text(hidden)} and "
            f"{_checks.shape_text(weight)}."
        )
    if hidden.shape[-1] != weight.shape[-1]:
        raise ShapeError(
            f"{names[0]} and {names[1]} must share their last dim; got {_checks.shape_text(hidden)} and "
            f"{_checks.shape_text(weight)}. nn.Linear keeps its weight as ({n_class}, dim)."
        )
    check_same_dtype(names[:2], hidden, weight)
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ShapeError(
            f"{names[2]} must have one number per class, shape {tuple(weight.shape[:-1])}; "
            f"got {_checks.shape_text(bias)}."
        )
    _checks.check_device(names, (hidden, weight, bias))
    return tuple(hidden.shape[:-1])


def check_listed(name: str, index: Tensor, vocabulary: int, least: int = -1) -> None:
    if not _checks.has_values(index) or not index.numel():
        return
    low, high = torch.stack(torch.aminmax(index)).tolist()
    if low < least or high >= vocabulary:
        none = ", or -1 for none" if least < 0 else ""
        raise TargetError(f"{name} must name tokens, 0 <= id < {vocabulary}{none}; got values from {low} to {high}.")
