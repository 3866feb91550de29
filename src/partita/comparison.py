"""Two distributions over the same keys, compared row by row without the scores of either."""

from __future__ import annotations

import torch
from torch import Tensor

from partita import _checks
from partita.engine.divergence import divergence as rows_of
from partita.engine.divergence import weighted_divergence as weighted_sum
from partita.engine.divergences import KINDS, Kind, Record, both_sides
from partita.engine.request import Request
from partita.engine.state import State, centre
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.gibbs import Gibbs

__all__ = ["check_kind", "divergence", "score_divergence", "weighted_divergence"]


def divergence(p: Gibbs, q: Gibbs, kind: Kind = "forward", *, beta: float = 0.5) -> Tensor:  # (..., n_query)
    """How far q is from p, for every row; both have the same numbers of queries and keys, of any dim, scale, support.

        forward         KL(p||q) = sum_j p_j (log p_j - log q_j)
        reverse         KL(q||p)
        cross_entropy   H(p, q) = -sum_j p_j log q_j
        js              beta KL(p||m) + (1 - beta) KL(q||m),  m = beta p + (1 - beta) q
        hellinger       1 - sum_j sqrt(p_j q_j)

    Equal to ``F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)`` for forward, in O(n) memory. A KL and
    a cross entropy are +inf where the first distribution has mass on a key that the second cannot see; js and hellinger
    stay finite. A row of p that sees nothing gives 0. Where the value is infinite the gradient is 0. First derivatives
    to both sides; batch dimensions broadcast (M-DIV-1 to M-DIV-5).

    >>> three_to_one = Gibbs(torch.ones(1, 1), torch.tensor([[3.0], [1.0]]).log())
    >>> even = Gibbs(torch.ones(1, 1), torch.zeros(2, 1))
    >>> divergence(three_to_one, even)  # log 2 - H(3/4, 1/4)
    tensor([0.1308])
    """
    return rows_of(*_pair(p, q), *check_kind(kind, beta))


def weighted_divergence(p: Gibbs, q: Gibbs, weight: Tensor, kind: Kind = "forward", *, beta: float = 0.5) -> Tensor:
    """sum_i weight_i divergence_i: a scalar, whose gradients a backend may make while it goes forward.

    >>> even = Gibbs(torch.zeros(2, 1), torch.zeros(4, 1))
    >>> weighted_divergence(even, even, torch.ones(2), "cross_entropy")  # 2 log 4
    tensor(2.7726)

    weight: (..., n_query), has no gradient.
    """
    one, other = _pair(p, q)
    named = check_kind(kind, beta)
    if one.groups > 1:
        return (weight * rows_of(one, other, *named)).sum()
    rows = (*_checks.broadcast(one.batch, other.batch), one.n_query)
    return weighted_sum(one, other, *named, weight.detach().to(one.dtype).expand(rows))


def score_divergence(s: Tensor, t: Tensor, kind: Kind = "forward", *, beta: float = 0.5) -> Tensor:  # (..., n)
    """The same of explicit scores (..., n, K), dense as they are; -inf hides a key. Ordinary autograd.

    >>> score_divergence(torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]]), "hellinger")  # 1 - sqrt(1/2)
    tensor([0.2929])
    """
    kind, beta = check_kind(kind, beta)
    one, other = State.of(s), State.of(t)
    a, b = (centre(x, state.peak)[0] - state.log_mass()[..., None] for x, state in ((s, one), (t, other)))
    first, second = both_sides(kind, beta, a, b)
    seen, unseen = (t, s) if kind == "reverse" else (s, t)
    outside = (~seen.isneginf() & unseen.isneginf()).any(-1) & (kind not in ("js", "hellinger"))
    more = torch.zeros_like(one.mass).masked_fill(outside, torch.inf)
    rows = Record(one.peak, one.mass, other.peak, other.mass, first.sum(-1) + more, second.sum(-1) + more)
    found = rows.divergence(kind)
    return torch.where(outside, found.detach(), found)


def check_kind(kind: Kind, beta: float) -> tuple[Kind, float]:
    """A kind that exists, and a beta strictly between 0 and 1."""
    if kind not in KINDS:
        raise ValueRangeError(f"unknown kind {kind!r} of divergence; known are {', '.join(KINDS)}.")
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0.0 < beta < 1.0:
        raise ValueRangeError(
            f"beta must be strictly between 0 and 1; got {beta!r}. At either end js is 0 for any p and q; its slopes "
            f"there are kind='forward' and kind='reverse'."
        )
    return kind, float(beta)


def _pair(p: Gibbs, q: Gibbs) -> tuple[Request, Request]:
    """Both requests with the same number of batch dimensions, checked against each other."""
    for name, given in (("p", p), ("q", q)):
        if not isinstance(given, Gibbs):
            raise DtypeError(f"{name} must be a Gibbs; got {type(given).__name__}. Make one: Gibbs(query, key).")
    one, other = p.request(), q.request()
    if one.groups != other.groups:  # heads are cut differently: keys of each query head, written out
        one, other = _ungrouped(p).request(), _ungrouped(q).request()
    if one.n_key != other.n_key or one.n_query != other.n_query:
        raise ShapeError(
            f"p and q must have the same numbers of queries and keys; got {one.n_query} and {other.n_query} queries, "
            f"{one.n_key} and {other.n_key} keys."
        )
    if one.dtype != other.dtype:
        raise DtypeError(
            f"p and q must be summed in one dtype; got {p.query.dtype} and {q.query.dtype}. Convert one with .to()."
        )
    _checks.check_device(("p", "q"), (one.query, other.query))
    _checks.broadcast_batch((("p", one.batch), ("q", other.batch)))
    n_batch = max(one.query.dim(), other.query.dim()) - 2
    return one.with_batch(n_batch), other.with_batch(n_batch)


def _ungrouped(p: Gibbs) -> Gibbs:
    groups = p.request().groups
    key = p.key.repeat_interleave(groups, -3) if groups > 1 else p.key
    options = {"support": p.support, "softcap": p.softcap, "cap_bias": p.cap_bias, "score": p.score}
    return Gibbs(p.query, key, scale=p.scale, bias=p.bias, **options)  # type: ignore[arg-type]
