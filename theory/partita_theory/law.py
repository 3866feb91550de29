"""The Gibbs law itself, dense: weights, their logarithms, the log-partition; and how laws of blocks merge.

These are the definitions on an explicit score tensor, for analysis and small problems. `partita.Gibbs` streams.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita_theory._domain import Number, count, not_negative, number, per_row, public


class Law(NamedTuple):
    """Weights of one softmax row, with what was needed to make them."""

    probs: Tensor  # (..., n_key), 0 where not kept
    log_probs: Tensor  # (..., n_key), -inf where not kept
    log_partition: Tensor  # (...), -inf on an empty row


class BlockLaw(NamedTuple):
    """What one block of keys has to tell about itself."""

    log_partition: Tensor  # (..., n_block)
    mean: Tensor  # (..., n_block, dim_value)
    entropy: Tensor  # (..., n_block)


def logits_of(
    scores: Tensor,  # (..., n_key)
    scale: Number = 1.0,  # a number or (...)
    bias: Tensor | None = None,  # (..., n_key), not scaled
    keep: Tensor | None = None,  # (..., n_key) bool
) -> Tensor:
    """Scale, then bias, then mask: in this order, because 0 * -inf is NaN.

        z_j = scale * s_j + b_j     where kept, -inf elsewhere        (M-ATT-7, M-GIB-1)

    A bias of -inf also masks. What is masked is never multiplied, so it may hold anything.

    >>> logits_of(torch.tensor([2.0, 5.0]), 0.0, keep=torch.tensor([True, False]))
    tensor([0., -inf])
    """
    if bias is not None:
        keep = ~bias.isneginf() if keep is None else keep & ~bias.isneginf()
    if keep is None:
        return per_row(scale, scores) * scores
    z = per_row(scale, scores) * torch.where(keep, scores, 0.0)
    if bias is not None:
        z = z + torch.where(keep, bias, 0.0)
    return z.masked_fill(~keep, -torch.inf)


def gibbs_law(
    scores: Tensor,  # (..., n_key)
    *,
    scale: Number = 1.0,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> Law:
    """Weights, log-weights and log-partition of a row of scores.

        p_j = exp(z_j) / Z,    Z = sum_k exp(z_k),    z = scale * s + b        (M-GIB-1, M-ATT-6)

    A row without kept keys has weights 0 and log-partition -inf, and gradient 0.

    >>> gibbs_law(torch.tensor([0.0, 3.0]).log()).probs  # weights 0 and 3, normalised
    tensor([0., 1.])
    >>> gibbs_law(torch.tensor([1.0, 3.0]).log()).probs
    tensor([0.2500, 0.7500])
    """
    z = logits_of(scores, scale, bias, keep)
    empty = z.isneginf().all(-1, keepdim=True)
    # Before the softmax, not after: repairing its NaN afterwards leaves NaN gradients.
    log_z = torch.logsumexp(z.masked_fill(empty, 0.0), -1, keepdim=True)
    log_p = torch.where(empty, -torch.inf, z - log_z)
    return Law(log_p.exp(), log_p, torch.where(empty, -torch.inf, log_z).squeeze(-1))


def softmax_jacobian(probs: Tensor) -> Tensor:  # (..., n) -> (..., n, n)
    """The derivative of weights by logits, as a matrix: symmetric, positive semidefinite, rows summing to 0.

        J = diag(p) - p p^T        (M-DER-1, M-DER-2, M-GEO-3, M-LOSS-3)

    Also the Fisher information in logits, and the Hessian by logits of log Z and of cross entropy, whatever the target.
    For raw scores multiply by the scale.

    >>> softmax_jacobian(torch.tensor([0.5, 0.5]))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """
    return torch.diag_embed(probs) - probs[..., :, None] * probs[..., None, :]


def softmax_vjp(probs: Tensor, grad: Tensor) -> Tensor:  # (..., n)
    """The Jacobian times a vector, without the matrix; the same from the left and from the right.

        J g = p * (g - <p, g>)        (M-DER-1)

    >>> softmax_vjp(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
    tensor([ 0.2500, -0.2500])
    """
    return probs * (grad - (probs * grad).sum(-1, keepdim=True))


def log_odds(law: Law, i: int, j: int) -> Tensor:
    """The log of a ratio of two weights; no other key has a say in it.

        log(p_i / p_j) = z_i - z_j        (M-GIB-4)

    >>> log_odds(gibbs_law(torch.tensor([3.0, 1.0, 7.0])), 0, 1)
    tensor(2.)
    """
    return law.log_probs[..., i] - law.log_probs[..., j]


def one_hot_bound(n: Number, gap: Number, scale: Number = 1.0) -> Tensor:
    """The least the largest weight can be when it leads the second by `gap`: one-hot needs scale * gap >> log n.

        p_max >= 1 / (1 + (n - 1) exp(-scale * gap)),     equal where all the others are        (M-GIB-3)

    >>> round(one_hot_bound(1e5, 3.0).item(), 6)  # e^3 among 10^5: far from one-hot
    0.000201
    """
    lead = number(scale) * not_negative("gap is the best score minus the second best", gap)
    return 1.0 / (1.0 + (count(n) - 1.0) * torch.exp(-lead))


def variational_gap(guess: Tensor, logits: Tensor) -> Tensor:
    """What any other law loses in the principle of which softmax is the solution: a Kullback-Leibler divergence.

        log Z - (<q, z> + H(q)) = KL(q || softmax(z)) >= 0,     infinite where q has a masked key        (M-GIB-6)

    >>> variational_gap(torch.tensor([1.0, 0.0]), torch.zeros(2))  # log 2 - (0 + 0)
    tensor(0.6931)
    """
    energy = torch.where(guess > 0, guess * logits, 0.0).sum(-1)
    return torch.logsumexp(logits, -1) - energy + torch.xlogy(guess, guess).sum(-1)


def merge_laws(blocks: BlockLaw) -> BlockLaw:
    """The law over all keys from the laws over disjoint blocks of keys, exactly.

        P = softmax_B(log Z_B),   log Z = logsumexp log Z_B,   o = sum P_B o_B
        H = H(P) + sum P_B H_B        (M-GIB-9, M-ATT-14)

    The result has one block. Blocks without keys (log Z = -inf) change nothing.
    From Rabe and Staats (2021), Self-attention does not need O(n^2) memory.

    >>> one = BlockLaw(torch.zeros(2), torch.tensor([[0.0], [4.0]]), torch.zeros(2))  # two single keys, equal scores
    >>> [x.squeeze().item() for x in merge_laws(one)[:2]]  # log 2 and the mean value
    [0.6931471824645996, 2.0]
    """
    top = gibbs_law(blocks.log_partition)
    mean = (top.probs[..., None] * blocks.mean).sum(-2, keepdim=True)
    entropy = (top.probs * blocks.entropy).sum(-1) - torch.xlogy(top.probs, top.probs).sum(-1)
    return BlockLaw(top.log_partition[..., None], mean, entropy[..., None])


__all__ = public(globals())
