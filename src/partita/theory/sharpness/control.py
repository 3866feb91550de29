"""Steering the scale to a target entropy: the safe root search, and what feedback rules do near the root."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require
from partita.theory.information.derivatives import score_cumulants
from partita.theory.information.entropy import entropy
from partita.theory.law import gibbs_law

__all__ = ["ScaleRoot", "controller_multiplier", "controller_step", "entropy_scale", "entropy_scale_gradient"]

_KINDS = ("newton", "reciprocal", "printed")


class ScaleRoot(NamedTuple):
    """A scale, whether its entropy is the target, and after how many steps."""

    scale: Tensor
    converged: Tensor
    steps: int


def entropy_scale(
    scores: Tensor,  # (..., n)
    target: Number,
    *,
    tolerance: float = 1e-10,
    steps: int = 60,
    cap: float = 1e12,
) -> ScaleRoot:
    """The scale at which a row has this entropy, by Newton inside a bracket, on explicit scores without bias.

        scale <- scale + (H - target) / (scale * Var_p(s)),    from sqrt(2 (log n - target) / Var_u(s))

    When a step leaves the bracket the geometric mean is taken. target >= log n gives 0; target <= log(number of
    maximisers) gives `cap`, not converged. Equal scores have no solution. `partita.solve_scale` streams.
    Spec: M-SCL-10.

    >>> r = entropy_scale(torch.tensor([0.0, 1.0], dtype=torch.float64), 0.5623351446)  # weights 1/4, 3/4
    >>> round(r.scale.item(), 6)  # log 3
    1.098612
    """
    s = scores - scores.amax(-1, keepdim=True)  # centred at the maximum: bounded scores stall otherwise
    n = scores.shape[-1]
    goal = number(target).to(s.dtype).expand(s.shape[:-1])
    most = number(n).log().to(s.dtype)
    least = (s == 0).sum(-1).to(s.dtype).log()
    spread = s.var(-1, unbiased=False).clamp(min=torch.finfo(s.dtype).tiny)
    x = (2 * (most - goal).clamp(min=1e-12) / spread).sqrt().clamp(max=cap)
    low, high = torch.zeros_like(x), torch.full_like(x, torch.inf)
    done = torch.zeros_like(x, dtype=torch.bool)
    taken = 0
    for taken in range(1, steps + 1):  # noqa: B007 (reported)
        h = entropy(x[..., None] * s)
        done = (h - goal).abs() <= tolerance
        if bool(done.all()):
            break
        low, high = torch.where(h > goal, x, low), torch.where(h > goal, high, x)
        variance = score_cumulants(s, x).variance
        step = x + (h - goal) / (x * variance).clamp(min=torch.finfo(s.dtype).tiny)
        middle = torch.where(high.isinf(), 2 * x, torch.where(low == 0, x / 2, (low * high.clamp(max=cap)).sqrt()))
        x = torch.where(done, x, torch.where((step > low) & (step < high), step, middle)).clamp(max=cap)
    x = torch.where(goal >= most, 0.0, torch.where(goal <= least, cap, x))
    return ScaleRoot(x, done & (goal < most) & (goal > least), taken)


def entropy_scale_gradient(scores: Tensor, scale: Tensor) -> Tensor:  # (..., n), (...) -> (..., n)
    """How the solved scale moves with each score, by the implicit function theorem.

        d scale / d s_j = -scale * p_j (s_j - E_p[s]) / Var_p(s)

    Scaling all scores by c divides the scale by c: sum_j s_j d scale / d s_j = -scale. Spec: M-SCL-10.

    >>> s, x = torch.tensor([2.0, 0.0]), torch.tensor(0.5)
    >>> round((s * entropy_scale_gradient(s, x)).sum().item(), 4)
    -0.5
    """
    p = gibbs_law(scores, scale=scale).probs
    centred = scores - (p * scores).sum(-1, keepdim=True)
    variance = (p * centred**2).sum(-1, keepdim=True)
    return -scale[..., None] * p * centred / variance


def controller_step(scores: Tensor, scale: Tensor, target: Number, kind: str = "newton") -> Tensor:  # (...)
    """One step of a rule that steers the scale towards a target entropy.

        newton:      scale + (H - target) / (scale * Var)
        reciprocal:  scale * H / target
        printed:     scale * target / H        positive feedback: it runs away from the root

    Spec: M-SCL-10.

    >>> s = torch.tensor([0.0, 0.0, 5.0])
    >>> h = entropy(0.5 * s)
    >>> torch.equal(controller_step(s, torch.tensor(0.5), h, "reciprocal"), torch.tensor(0.5))  # at the target: stays
    True
    """
    require(kind in _KINDS, f"kind must be one of {', '.join(_KINDS)}; got {kind!r}.")
    h = entropy(scale[..., None] * scores)
    goal = number(target).to(scores.dtype)
    if kind == "printed":
        return scale * goal / h
    if kind == "reciprocal":
        return scale * h / goal
    return scale + (h - goal) / (scale * score_cumulants(scores, scale).variance)


def controller_multiplier(scores: Tensor, scale: Tensor, kind: str = "newton") -> Tensor:  # (...)
    """By how much such a rule multiplies a small error at its root: below 1 in size it converges, above it diverges.

        newton 0,     reciprocal 1 - x,     printed 1 + x,       x = scale^2 Var_p(s) / H

    So the printed rule never converges, and the reciprocal one only if x < 2. Spec: M-SCL-10.

    >>> controller_multiplier(torch.zeros(4), torch.tensor(1.0), "printed")  # equal scores: no feedback at all
    tensor(1.)
    """
    require(kind in _KINDS, f"kind must be one of {', '.join(_KINDS)}; got {kind!r}.")
    x = scale**2 * score_cumulants(scores, scale).variance / entropy(scale[..., None] * scores)
    return {"newton": torch.zeros_like(x), "reciprocal": 1 - x, "printed": 1 + x}[kind]
