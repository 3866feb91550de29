"""How far a policy is from a reference, per token: exactly, from a teacher's list, or estimated from a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from partita import _checks
from partita._torch_function import overridable
from partita.collective import Collective, collective_of
from partita.comparison import check_kind, divergence
from partita.engine import State
from partita.engine.dispatch import scores
from partita.engine.divergences import Kind, both_sides
from partita.engine.listed import of_rows
from partita.engine.request import Request
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.exactness import in_exact_rows
from partita.gibbs import Gibbs
from partita.losses.vocabulary import Vocabulary, check_head, check_listed, distribution, row_temperature
from partita.recompute import by_rows, row_blocks

__all__ = ["kl_estimate", "token_divergence"]

_ROWS = 64  # in a block of exact rows


@overridable
def token_divergence(
    hidden: Tensor,  # (..., dim)
    weight: Tensor,  # (vocabulary, dim)
    ref_hidden: Tensor | None = None,  # (..., dim of the reference)
    ref_weight: Tensor | None = None,  # (vocabulary, dim of the reference)
    *,
    kind: Kind = "forward",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    ref_temperature: float | Tensor | None = None,
    teacher_index: Tensor | None = None,  # (..., k) int64, -1 fills up
    teacher_log_prob: Tensor | None = None,  # (..., k)
    tail: Literal["ignore", "bucket"] = "ignore",
    ref_ids: Tensor | None = None,  # (vocabulary,) int64: the reference's names of the policy's tokens
    group: object | None = None,
) -> Tensor:  # (...)
    """How far a policy is from a reference, exactly, per token; neither's logits are held.

        forward   KL(policy || reference)        reverse   KL(reference || policy)        js, hellinger, cross_entropy

    kinds as in `partita.divergence`, which this is for two heads. A teacher known by its likeliest ids and their log p
    alone is given by `teacher_index` and `teacher_log_prob` (forward and reverse):

        reverse   sum_j t_j (log t_j - log p_j) over the listed ids

    >>> token_divergence(torch.ones(1, 1), torch.tensor([[3.0], [1.0]]).log(), torch.ones(1, 1), torch.zeros(2, 1))
    tensor([0.1308])

    A policy that knows a part of the reference's tokens (the draft vocabulary of EAGLE) says which by `ref_ids`: the
    reference keeps the log Z of its whole vocabulary, and sums are over the part,

        reverse   sum_v q(ref_ids_v) (log q(ref_ids_v) - log p_v)        q = softmax over all of ref_weight

    ref_temperature: that of the reference; the policy's unless given.
    tail: "ignore" leaves out what the teacher did not list, "bucket" compares the rest as one more token.
    group: as in `token_stats`, DDP included: each rank passes its slice of weight and of ref_weight, and listed ids of
        the whole.
    """
    processes = collective_of(group)
    with processes.validate():
        lead = check_head(hidden, weight)
        check_kind(kind, beta)
        if tail not in ("ignore", "bucket"):
            raise ValueRangeError(f"tail must be 'ignore' or 'bucket'; got {tail!r}.")
        if (teacher_index is None) != (teacher_log_prob is None):
            raise ValueRangeError(
                "teacher_index and teacher_log_prob come together: ids (..., k) and their log p (..., k)."
            )
        if (ref_hidden is None) == (teacher_index is None):
            raise ValueRangeError(
                "give a reference, ref_hidden and ref_weight, or a teacher, teacher_index and teacher_log_prob."
            )
        if ref_ids is not None and (ref_hidden is None or not processes.alone):
            raise ValueRangeError(
                "ref_ids name tokens of a reference in one process: give ref_hidden and ref_weight, and no group. A "
                "list of a teacher, teacher_index, names the policy's tokens."
            )
        policy = _flat(hidden, weight, temperature, lead)
        given: dict[str, Any] = {"the dtype of hidden": hidden.dtype, "the rows of hidden": lead}
        if ref_hidden is not None:
            ref_weight = _check_reference(lead, len(weight), ref_hidden, ref_weight, ref_ids)
            warmth = temperature if ref_temperature is None else ref_temperature
            reference = _flat(ref_hidden, ref_weight, warmth, lead)
            given["the tokens of ref_weight in a slice less those of weight"] = len(ref_weight) - len(weight)
        else:
            index, log_prob = _checked_list(teacher_index, teacher_log_prob, kind, lead)
            if processes.alone:
                check_listed("teacher_index", index, len(weight))
            else:
                given["the ids of the teacher (their sum)"] = int(index.sum())
    if not processes.alone:
        processes = processes.check_same(f"token_divergence {kind}, {beta}, {tail}", [len(weight)], given)
    if ref_hidden is None:
        found = _to_listed(Vocabulary(policy, processes), index, log_prob, kind, tail)
    elif processes.alone and ref_ids is None:
        found = divergence(policy, reference, kind, beta=beta)
    else:
        found = _to_slice(policy, reference, ref_ids, kind, beta, processes)
    return found.reshape(lead)


def _check_reference(
    lead: tuple[int, ...], n_token: int, ref_hidden: Tensor, ref_weight: Tensor | None, ref_ids: Tensor | None
) -> Tensor:
    """The reference's head."""
    if ref_weight is None:
        raise ValueRangeError("ref_hidden needs its ref_weight, (vocabulary, dim of the reference).")
    ref_lead = check_head(ref_hidden, ref_weight, names=("ref_hidden", "ref_weight", ""))
    if ref_lead != lead:
        raise ShapeError(f"hidden and ref_hidden must have the same rows; got {lead} and {ref_lead}.")
    if ref_ids is not None:
        _checks.check_index_dtype("ref_ids", ref_ids)
        if tuple(ref_ids.shape) != (n_token,):
            raise ShapeError(
                f"ref_ids must be one per token of weight, {(n_token,)}; got {_checks.shape_text(ref_ids)}."
            )
        check_listed("ref_ids", ref_ids, len(ref_weight), least=0)
    elif n_token != len(ref_weight):
        raise ShapeError(
            f"weight and ref_weight must have the same tokens; got {n_token} and {len(ref_weight)}. If the policy "
            f"knows some of the reference's, name them: ref_ids=, ({n_token},)."
        )
    return ref_weight


def _flat(hidden: Tensor, weight: Tensor, temperature: float | Tensor, lead: tuple[int, ...]) -> Gibbs:
    warmth = row_temperature(temperature, lead)
    warmth = warmth.reshape(-1) if isinstance(warmth, Tensor) else warmth
    return distribution(hidden.reshape(math.prod(lead), hidden.shape[-1]), weight, None, warmth, None)


def _to_slice(
    policy: Gibbs, reference: Gibbs, ref_ids: Tensor | None, kind: Kind, beta: float, processes: Collective
) -> Tensor:  # (n,)
    """The divergence as a sum over this rank's tokens, or those the policy knows, with the log Z of the whole.

    Scores of some rows at a time, recomputed in the backward pass.
    """
    n, exact = len(policy.query), not processes.alone and in_exact_rows()
    own = [Vocabulary(_filled(p) if exact else p, processes) for p in (policy, reference)]
    levels = [tokens.state().log_partition() for tokens in own]
    if not processes.alone:  # every rank uses them with its own scores
        levels = [processes.sum_gradient(x) for x in levels]

    def of_leaf(one: Request, other: Request, levels: Sequence[Tensor]) -> Tensor:
        if ref_ids is not None:
            other = replace(other, key=other.key[ref_ids.long()])

        def sums(rows: slice) -> tuple[Tensor]:
            a, b = (scores(of_rows(x, rows)) - level[rows, None] for x, level in zip((one, other), levels, strict=True))
            first, second = both_sides(kind, beta, a, b)
            total = second if kind == "reverse" else first + second if kind in ("js", "hellinger") else first
            found = total.sum(-1)
            if kind == "js" and ref_ids is not None:  # where p is 0, q log(q / m) = -q log(1 - beta)
                found = found - (1 - beta) * math.log(1 - beta) * (1 - b.exp().sum(-1))
            return (found,)

        rows, width = one.n_query, max(one.n_key, 1)
        blocks = [slice(i, i + _ROWS) for i in range(0, rows, _ROWS)] if exact else row_blocks(rows, width, ())
        return by_rows(sums, blocks, (0,))[0]

    requests = [[part.request() for part in tokens.parts] for tokens in own]
    of_rows_alone = [given for given, _, _ in processes.leaves(levels, own[0].gibbs.key, None)]
    found = processes.joined([of_leaf(*x) for x in zip(*requests, of_rows_alone, strict=True)], torch.add)[:n]
    found = processes.total(found)
    return 1 + found if kind == "hellinger" else found


def _filled(p: Gibbs) -> Gibbs:
    """Rows of zeros added up to a whole number of blocks: torch's products know their shapes."""
    more = -len(p.query) % _ROWS if len(p.query) else _ROWS
    scale = pad(p.scale, (0, more), value=1.0) if isinstance(p.scale, Tensor) and p.scale.dim() else p.scale
    return Gibbs(pad(p.query, (0, 0, 0, more)), p.key, scale=scale)


def _checked_list(
    index: Tensor | None, log_prob: Tensor | None, kind: str, lead: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """A teacher's list, (n, k) each."""
    if kind not in ("forward", "reverse"):
        raise ValueRangeError(f"a teacher's list has kind 'forward' or 'reverse'; got {kind!r}.")
    if not isinstance(index, Tensor) or not isinstance(log_prob, Tensor):
        raise DtypeError("teacher_index and teacher_log_prob must both be tensors, (..., k).")
    _checks.check_index_dtype("teacher_index", index)
    _checks.check_float("teacher_log_prob", log_prob)
    if index.shape != log_prob.shape or tuple(index.shape[:-1]) != lead:
        raise ShapeError(
            f"teacher_index and teacher_log_prob must be {(*lead, 'k')}; got {_checks.shape_text(index)} and "
            f"{_checks.shape_text(log_prob)}."
        )
    shape = (math.prod(lead), index.shape[-1])
    return index.reshape(shape).long(), log_prob.reshape(shape)


def _to_listed(policy: Vocabulary, index: Tensor, log_prob: Tensor, kind: str, tail: str) -> Tensor:  # (n,)
    if not policy.processes.alone:
        check_listed("teacher_index", index, policy.size)
    valid = index >= 0
    score, level = policy.scores(index.clamp(min=0)), policy.state().log_partition()
    own = torch.where(valid, score - level[:, None], -torch.inf)
    given = torch.where(valid, log_prob.to(own.dtype), -torch.inf)
    if tail == "bucket":
        own, given = (torch.cat([x, _log_rest(x)[:, None]], 1) for x in (own, given))
    first, second = (own, given) if kind == "forward" else (given, own)
    p = first.exp()
    gap = torch.where(p > 0, first, 0.0) - torch.where(p > 0, second, 0.0)
    return (p * gap).sum(-1)


def _log_rest(log_p: Tensor) -> Tensor:
    """log(1 - sum exp(log_p)); -inf where nothing is left."""
    total = State.of(log_p).log_partition()
    left = total < 0
    inner = torch.where(left, total, -1.0)
    return torch.where(left, torch.where(inner > -0.7, (-inner.expm1()).log(), torch.log1p(-inner.exp())), -torch.inf)


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """An estimate of KL(policy || reference) from the log p of sampled tokens, with r = log p_ref - log p.

        k1 = -r        k2 = r^2 / 2        k3 = e^r - 1 - r

    k1 and k3 are unbiased, k3 is never negative; k2 is biased and has the gradient of the KL.

    >>> kl_estimate(torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), "k3")  # 1/2 - 1 + log 2
    tensor([0.1931])
    """
    _checks.check_float("log_prob", log_prob)
    _checks.check_float("ref_log_prob", ref_log_prob)
    r = ref_log_prob - log_prob
    estimates = {"k1": lambda: -r, "k2": lambda: r.square() / 2, "k3": lambda: r.expm1() - r}
    if kind not in estimates:
        raise ValueRangeError(f"kind must be one of k1, k2, k3; got {kind!r}.")
    return estimates[kind]()
