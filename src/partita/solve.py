"""The scale at which each row has a given entropy.

    find scale_i  with  H(scale_i * s_i) = target_i            dH / d log(scale) = -Var[scale * s]

Newton steps on log(scale) from streamed statistics, kept inside a bracket (M-SCL-10). Every row runs on its own; one
pass serves all rows. The derivative is that of the implicit function, so no iteration is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partita import _checks
from partita.engine import State
from partita.engine.disjoint import visible as visible_keys
from partita.engine.execute import execute
from partita.engine.request import build
from partita.errors import ShapeError, ValueRangeError
from partita.precision import product
from partita.support import Support, mask
from partita.support.base import check_support

__all__ = ["as_mask", "solve_scale"]

_STEPS = 80
_REACH = 1e4  # the cap: scores spread over this many nats are as one-hot as they get


def solve_scale(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    *,
    entropy: float | Tensor | None = None,
    width: float | Tensor | None = None,
    support: Support | None = None,
    bias: Tensor | None = None,
    grouped: bool = False,
) -> Tensor:  # (..., n_query)
    """The scale per row at which the entropy of Gibbs(query, key, scale=...) is `entropy`, or log(width).

        H(scale_i * <query_i, .>) = entropy_i          d scale / d s_j = -scale p_j (s_j - E[s]) / Var[s]

    A target above log(visible) gives scale 0; one below the entropy of the tied maxima gives a large finite cap; both
    without gradient. With a bias the entropy is not monotone in the scale, so a bias is refused unless it only hides
    keys (0 and -inf).

    >>> s = solve_scale(torch.ones(1, 1), torch.tensor([[1.0], [0.0]]), entropy=0.5623)  # p = (3/4, 1/4): log 3
    >>> round(s.item(), 2)
    1.1
    """
    if (entropy is None) == (width is None):
        raise ValueRangeError("give exactly one of entropy (nats) and width (keys).")
    check_support(support)
    if bias is not None:
        support = as_mask(bias, support)
    rows = build(query, key, support=support, grouped=grouped)
    count = visible_keys(rows.terms, rows.n_query, rows.n_key, rows.batch, query.device)
    n = rows.ungroup(count).to(rows.dtype)
    target = _target(entropy, width, n)

    def at(scale: Tensor) -> State:
        request = build(query, key, scale=scale, support=support, grouped=grouped)
        return execute(request).state

    with torch.no_grad():
        solved, reached = _search(at, target.detach(), n, _score_deviation(query, key, n, grouped))
    if not torch.is_grad_enabled() or not (query.requires_grad or key.requires_grad or target.requires_grad):
        return solved
    state = at(solved)
    slope = (state.score_variance() / solved.clamp(min=torch.finfo(solved.dtype).tiny)).detach()
    miss = state.entropy() - target
    step = (miss - miss.detach()) / torch.where(reached, slope, torch.ones_like(slope))
    return solved + torch.where(reached, step, torch.zeros_like(step))


def as_mask(bias: Tensor, support: Support | None) -> Support:
    """A bias that only hides keys, as a support."""
    if _checks.has_values(bias) and bool(((bias == 0) | (bias == -torch.inf)).all()):
        hidden = mask(bias == 0)
        return hidden if support is None else support & hidden
    raise ValueRangeError(
        "with a bias the entropy is not monotone in the scale, so no scale can be solved for; "
        "hide keys with a support, or fold the bias into query and key."
    )


def _target(entropy: float | Tensor | None, width: float | Tensor | None, n: Tensor) -> Tensor:
    given = torch.as_tensor(entropy if width is None else width, dtype=n.dtype, device=n.device)
    if _checks.has_values(given) and not bool((given >= (0 if width is None else 1)).all()):
        limit = "entropy must not be negative" if width is None else "width must be at least 1 key"
        raise ValueRangeError(f"{limit}; got a smallest value of {float(given.detach().min())}.")
    try:
        return (given if width is None else given.log()).expand_as(n)
    except RuntimeError:
        raise ShapeError(
            f"the target must broadcast to the rows {tuple(n.shape)}; got {_checks.shape_text(given)}."
        ) from None


def _score_deviation(query: Tensor, key: Tensor, n: Tensor, grouped: bool) -> Tensor:
    """Standard deviation of each row's scores over all keys, from the keys' covariance: only a starting point."""
    q, k = query.to(n.dtype), key.to(n.dtype).nan_to_num(0.0, 0.0, 0.0)
    if k.shape[-2] == 0:
        return torch.ones_like(n)
    k = k - k.mean(-2, keepdim=True)
    covariance = product(k.mT, k) / k.shape[-2]
    longest = k.norm(dim=-1).amax(-1, keepdim=True)
    if grouped:
        groups = q.shape[-3] // k.shape[-3]
        covariance, longest = covariance.repeat_interleave(groups, -3), longest.repeat_interleave(groups, -2)
    variance = (product(q, covariance) * q).sum(-1).clamp(min=0.0)
    sigma = variance.sqrt().nan_to_num(1.0, 1.0, 1.0)
    size = q.norm(dim=-1).nan_to_num(1.0, 1.0, 1.0) * longest
    tiny = torch.finfo(n.dtype).eps * size + torch.finfo(n.dtype).tiny
    return torch.where(sigma > tiny, sigma, torch.ones_like(sigma)).expand_as(n)


def _search(at: Callable[[Tensor], State], target: Tensor, n: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Safeguarded Newton on log(scale); returns the scale and whether the target is within reach."""
    ceiling = n.clamp(min=1).log()
    # a target within rounding of log n asks for no sharpness at all
    flat = target >= ceiling - 4 * torch.finfo(n.dtype).eps * ceiling
    tolerance = 1e-10 if n.dtype == torch.float64 else 2e-6
    cap = (_REACH / sigma).log()
    start = (2 * (ceiling - target).clamp(min=1e-12)).sqrt() / sigma
    x = start.log().clamp(max=cap)
    low = torch.full_like(x, -torch.inf)  # here the entropy is above the target
    high = torch.full_like(x, torch.inf)  # here it is below
    done = flat.clone()
    capped = torch.zeros_like(flat)
    best, least = x, torch.full_like(x, torch.inf)  # in float32 a row may reach its noise before the tolerance
    for _ in range(_STEPS):
        state = at(torch.where(flat, torch.zeros_like(x), x.exp()))
        miss = state.entropy() - target
        close = miss.abs() <= tolerance * (1 + target)
        nearer = miss.abs() < least
        best, least = torch.where(nearer, x, best), torch.where(nearer, miss.abs(), least)
        capped = capped | (~done & (miss > 0) & ~close & (x >= cap))
        done = done | close | capped | miss.isnan()
        if bool(done.all()):
            break
        low = torch.where(miss > 0, torch.maximum(low, x), low)
        high = torch.where(miss < 0, torch.minimum(high, x), high)
        step = x + (miss / state.score_variance()).clamp(-2.0, 2.0)
        middle = torch.where(low.isinf(), high - 1.5, torch.where(high.isinf(), low + 1.5, (low + high) / 2))
        inside = (step > low) & (step < high)  # false also where the step is nan
        following = torch.where(inside, step, middle).clamp(max=cap)
        x = torch.where(done, x, following)
    scale = torch.where(flat, torch.zeros_like(x), torch.where(capped, x, best).exp())
    return scale, ~flat & ~capped
