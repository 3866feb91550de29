"""The classes of a linear head spread over processes: every rank holds a slice of the class vectors, in rank order.

    log Z = log sum_r Z_r          score of the target: from the one rank that holds it          rank = sum_r rank_r

Inputs and targets are the same on every rank, targets name classes of the whole. Every rank gets the same loss. The
gradient of a slice is whole; that of the input comes in parts, what flows back through the rank's own classes, which
add up over ranks (`partita.distributed.replicate(input, group)` adds them up).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partita import _checks
from partita.distributed import Fact, Sums, Team, count_above, meet, merge_scores, merge_states
from partita.errors import TargetError, ValueRangeError
from partita.gibbs import Gibbs
from partita.losses.head import Head, weighted_scores
from partita.losses.objective import Options, Terms

__all__ = ["Slice", "agree", "check_slice", "read_slices", "terms_of_slices"]


@dataclass(frozen=True, eq=False)
class Slice:
    """Which classes are on this rank, and which rows have their target here."""

    team: Team
    n_class: int  # of the whole
    here: Tensor  # bool, per row
    index: Tensor  # the class of the row in this slice, 0 where it is elsewhere


def check_slice(target: Tensor) -> None:
    """What has no form over slices."""
    if isinstance(target, Tensor) and target.is_floating_point():
        raise ValueRangeError("class probabilities have no form over a group: give class indices, target.long().")


def agree(
    team: Team,
    head: Head,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    options: Options,
    softcap: float | None,
    rules: tuple[object, ...],
) -> Slice:
    """Ask the others for the sizes of their slices, and whether they have the same rows."""
    scale = head.scale
    target_sum = int(head.index.sum()) if _checks.has_values(head.index) else 0
    facts: dict[str, Fact] = {
        "the dtype of input": head.query.dtype,
        "the rows of input": tuple(head.rows),
        "the last dimension of input": head.query.shape[-1],
        "the dtype of linear_weight": linear_weight.dtype,
        "target (the sum of its indices)": target_sum,
        "scale": scale if isinstance(scale, Tensor) else float(scale),
        "softcap": softcap,
        "whether there is a linear_bias": linear_bias is not None,
        "whether there are class weights": options.weight is not None,
        "whether there are sample weights": head.sample is not None,
        "label_smoothing": float(options.label_smoothing),
        "z_loss": options.z_loss,
        "entropy_weight": options.entropy_weight,
    }
    own = linear_weight.shape[0]
    sizes = [row[0] for row in meet(team, f"linear_cross_entropy {rules}", [own], facts)]
    total, first = sum(sizes), sum(sizes[: team.rank])
    index = head.index
    if _checks.has_values(index) and index.numel():
        low, high = (int(edge) for edge in torch.aminmax(index))
        if low < 0 or high >= total:
            raise TargetError(
                f"target must name a class of the whole, 0 <= target < {total} = {' + '.join(map(str, sizes))}; "
                f"got values from {low} to {high}."
            )
    here = (index >= first) & (index < first + own)
    return Slice(team, total, here, torch.where(here, index - first, torch.zeros_like(index)))


def read_slices(gibbs: Gibbs, own: Slice, *, rank: bool, statistics: bool) -> Sums:
    """The sums of every row over the classes of all ranks."""
    team = own.team
    if gibbs.key.shape[-2] == 0:
        state = gibbs.reduce(statistics=statistics).state
        score, ranks = torch.zeros_like(state.mass), own.index
    else:
        sums = gibbs.reduce(target=own.index, rank=rank, statistics=statistics)
        assert sums.target_score is not None
        state, score, ranks = sums.state, sums.target_score, own.index if sums.rank is None else sums.rank
    whole = merge_states(state, team, statistics)
    score = merge_scores(score, own.here, team)
    if not rank:
        return Sums.of(whole, score)
    if gibbs.key.shape[-2] and not bool(own.here.all()):
        ranks = torch.where(own.here, ranks, count_above(gibbs.request(), score.detach()))
    return Sums.of(whole, score, team.all_reduce(ranks.clone()))


def terms_of_slices(head: Head, own: Slice, options: Options, softcap: float | None) -> Terms:
    """Weights of every row; class weights and smoothing are sums over the slices."""
    team = own.team
    weight = options.class_weight(head.dtype)
    like = torch.ones(head.rows, dtype=head.dtype, device=head.query.device)
    on_target = like
    if weight is not None:
        chosen = weight[own.index] if len(weight) else like * weight.sum()  # 0, with a gradient
        on_target = team.total(torch.where(own.here, chosen, torch.zeros_like(like)))
    sample = None if head.sample is None else team.share(head.sample)
    smooth = options.label_smoothing
    if smooth == 0.0:
        return Terms(on_target, None, None, on_target, sample, head.mask)
    linear = team.total(weighted_scores(head, weight, softcap))
    mass = float(own.n_class) if weight is None else team.total(weight.sum())
    each = smooth / own.n_class
    return Terms((1.0 - smooth) * on_target, like * (each * mass), each * linear, on_target, sample, head.mask)
