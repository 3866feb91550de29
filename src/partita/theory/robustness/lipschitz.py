"""Certificates: how far weights and outputs can move when scores move by a bounded amount."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import Number, number, require

__all__ = [
    "attention_change_bound",
    "certified_radius",
    "softmax_change_bound",
    "value_diameter",
    "worst_two_point_law",
]


def softmax_change_bound(
    perturbation: Tensor | None = None,  # (..., n)
    *,
    radius: Number | None = None,
) -> Tensor:  # (...)
    """The most the weights can change, in l1, when this is added to the (scaled) scores.

        |softmax(s + e) - softmax(s)|_1  <=  2 tanh(osc(e) / 4)  <=  2 tanh(|e|_inf / 2)  <=  |e|_inf

    with osc = max - min. Give the perturbation itself or its l_inf radius. Sharp: see `worst_two_point_law`.
    Masked keys are to be left out. Spec: M-ROB-6.

    >>> round(softmax_change_bound(radius=2.0).item(), 4)  # 2 tanh 1
    1.5232
    """
    require((perturbation is None) != (radius is None), "give exactly one of perturbation and radius.")
    if perturbation is not None:
        return 2 * torch.tanh((perturbation.amax(-1) - perturbation.amin(-1)) / 4)
    r = number(0.0 if radius is None else radius)
    require(r >= 0, f"radius is a size, so radius >= 0; got {r}.")
    return 2 * torch.tanh(r / 2)


def worst_two_point_law(radius: Number) -> tuple[Tensor, Tensor]:
    """Two scores and a perturbation of this l_inf size for which the bound of softmax is attained.

        p = (1, e^r) / (1 + e^r),    e = (r, -r):      p~ is p reversed

    Spec: M-ROB-6.

    >>> s, e = worst_two_point_law(2.0)
    >>> round((torch.softmax(s + e, -1) - torch.softmax(s, -1)).abs().sum().item(), 4)
    1.5232
    """
    r = number(radius)
    return torch.stack([torch.zeros_like(r), r], -1), torch.stack([r, -r], -1)


def value_diameter(
    values: Tensor,  # (..., n, dim_value)
    *,
    exact: bool = True,
    rows: int = 1024,
) -> Tensor:  # (...)
    """The largest distance between two values; or, in O(n), a bound on it through the centre of their box.

        diam = max_ij |v_i - v_j|        (exact False:  2 max_i |v_i - centre|, at most sqrt(3) diam in practice)

    Exact takes O(n^2) time and `rows` * n memory. Spec: M-ROB-7.

    >>> value_diameter(torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]]))
    tensor(5.)
    """
    if not exact:
        centre = (values.amax(-2, keepdim=True) + values.amin(-2, keepdim=True)) / 2
        return 2 * (values - centre).square().sum(-1).amax(-1).sqrt()
    # Norms of differences, not |v|^2 + |w|^2 - 2 <v, w>: the latter cancels for values with a common offset.
    parts = [
        torch.cdist(part, values, compute_mode="donot_use_mm_for_euclid_dist").amax((-1, -2))
        for part in torch.split(values, rows, -2)
    ]
    return torch.stack(parts).amax(0)


def attention_change_bound(
    values: Tensor,  # (..., n, dim_value)
    perturbation: Tensor | None = None,  # (..., n)
    *,
    radius: Number | None = None,
    exact: bool = True,
) -> Tensor:  # (...)
    """The most an output can move when the (scaled) scores move.

        |out~ - out|  <=  diam(V) tanh(osc(e) / 4)  <=  diam(V) |e|_inf / 2  <=  max|v| * |e|_inf

    Does not change when all values are shifted. Values of masked keys are to be left out. Spec: M-ROB-7.

    >>> attention_change_bound(torch.tensor([[0.0], [4.0]]), torch.tensor([1.0, 1.0]))  # a common shift does nothing
    tensor(0.)
    """
    diameter = value_diameter(values, exact=exact)
    return diameter * softmax_change_bound(perturbation, radius=radius).to(values.dtype) / 2


def certified_radius(values: Tensor, tolerance: Number) -> Tensor:  # (...)
    """The largest l_inf perturbation of the scores that moves the output by no more than `tolerance`, guaranteed.

        r = 2 artanh(tolerance / diam(V)),      infinite when tolerance >= diam(V)

    Spec: M-ROB-7.

    >>> certified_radius(torch.tensor([[0.0], [1.0]]), 1.0)
    tensor(inf)
    """
    t = number(tolerance).to(values.dtype)
    require(t >= 0, f"tolerance is a distance, so tolerance >= 0; got {t}.")
    ratio = t / value_diameter(values)
    return torch.where(ratio >= 1, torch.inf, 2 * torch.atanh(ratio.clamp(max=1 - 1e-12)))
