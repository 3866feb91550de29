"""The classes of a head spread over processes: every rank holds a slice of the class vectors, in rank order.

    log Z = log sum_r Z_r          score of the target: from the one rank that holds it          rank = sum_r rank_r
    predicted class: that of the first rank whose largest score is the largest

Inputs and targets are the same on every rank, targets name classes of the whole. Every rank gets the same loss. The
gradient of a slice is whole; that of the input comes in parts, what flows back through the rank's own classes, which
add up over ranks (`partita.distributed.replicate(input, group)` adds them up).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partita import _checks
from partita.engine.sums import Sums
from partita.errors import TargetError, ValueRangeError
from partita.gibbs import Gibbs
from partita.losses.head import Head
from partita.losses.objective import Options, Terms
from partita.processes import Fact, Processes

__all__ = ["Slice", "check_slice"]


def check_slice(processes: Processes, target: Tensor) -> None:
    """What has no form over slices."""
    if not processes.alone and isinstance(target, Tensor) and target.is_floating_point():
        raise ValueRangeError("class probabilities have no form over a group: give class indices, target.long().")


@dataclass(frozen=True, eq=False)
class Slice:
    """Which classes are on this rank, and which rows have their target here; in one process that is all of them."""

    processes: Processes
    n_class: int  # of the whole
    here: Tensor | None  # bool, per row; None says all
    index: Tensor  # the class of the row in this slice, 0 where it is elsewhere

    @staticmethod
    def agree(
        processes: Processes,
        head: Head,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        options: Options,
        softcap: float | None,
        rules: tuple[object, ...],
    ) -> Slice:
        """Ask the others for the sizes of their slices, and whether they have the same rows."""
        if processes.alone:
            _checks.check_classes(head.index, options.n_class, options.ignore_index)
            return Slice(processes, options.n_class, None, head.index)
        with processes.checks():
            scale, index, own = head.scale, head.index, linear_weight.shape[0]
            _checks.check_device(("input", "target"), (head.query, index))
            known = _checks.has_values(index) and index.numel()
            low, high = (int(edge) for edge in torch.aminmax(index)) if known else (0, -1)
            facts: dict[str, Fact] = {
                "the dtype of input": head.query.dtype,
                "the rows of input": tuple(head.rows),
                "the last dimension of input": head.query.shape[-1],
                "the dtype of linear_weight": linear_weight.dtype,
                "target (its checksum)": checksum(index),
                "scale": scale if isinstance(scale, Tensor) else float(scale),
                "softcap": softcap,
                "whether there is a linear_bias": linear_bias is not None,
                "whether there are class weights": options.weight is not None,
                "whether there are sample weights": head.sample is not None,
                "label_smoothing": float(options.label_smoothing),
                "z_loss": options.z_loss,
                "entropy_weight": options.entropy_weight,
            }
        processes = processes.agree(f"linear_cross_entropy {rules}", [own], facts)
        (sizes,) = processes.sizes
        total = sum(sizes)
        if low < 0 or high >= total:  # targets are the same everywhere, so this is an error everywhere
            raise TargetError(
                f"target must name a class of the whole, 0 <= target < {total} = {' + '.join(map(str, sizes))}; "
                f"got values from {low} to {high}."
            )
        first = sum(sizes[: processes.rank])
        here = (index >= first) & (index < first + own)
        return Slice(processes, total, here, torch.where(here, index - first, torch.zeros_like(index)))

    def sums(self, gibbs: Gibbs, *, rank: bool, statistics: bool) -> Sums:
        """The sums of every row over the classes of all ranks."""
        return self.processes.slices(gibbs, self.index, self.here, rank=rank, statistics=statistics)

    def terms(
        self,
        options: Options,
        linear: Tensor | None,
        sample: Tensor | None,
        kept: Tensor | None,
        dtype: torch.dtype,
    ) -> Terms:
        """Weights of every row; class weights and smoothing are sums over the slices.

        linear: sum_c weight_c s_c over the classes of this slice, where there is smoothing.
        """
        total, weight = self.processes.total, options.class_weight(dtype)
        like = torch.ones(self.index.shape, dtype=dtype, device=self.index.device)
        own = like
        if weight is not None:
            own = weight[self.index] if len(weight) else like * weight.sum()  # 0, with a gradient
            own = own if self.here is None else total(torch.where(self.here, own, torch.zeros_like(like)))
        sample = None if sample is None else self.processes.share(sample)
        if linear is None:
            return Terms(own, None, None, own, sample, kept)
        mass = float(self.n_class) if weight is None else total(weight.sum())
        smooth, each = options.label_smoothing, options.label_smoothing / self.n_class
        return Terms((1.0 - smooth) * own, like * (each * mass), each * total(linear), own, sample, kept)


def checksum(index: Tensor) -> int:
    """One integer for indices in their order: other indices, or the same in another order, give another one.

    Each index and its position are scattered over 64 bits (the finaliser of splitmix64) and added up, which takes
    integers only and is the same on every device. Two different targets agree by chance once in 2^64.
    """
    if not _checks.has_values(index):
        return 0
    flat = index.reshape(-1).long()
    bits = flat + (torch.arange(1, len(flat) + 1, device=flat.device) * -0x61C8864680B583EB)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ (bits >> shift)) * factor
    return int((bits ^ (bits >> 31)).sum())
