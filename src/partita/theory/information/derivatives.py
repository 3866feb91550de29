"""How entropy, weights and log-partition move with the scores and with the scale."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.theory._domain import Number, number, require
from partita.theory.law import gibbs_law, logits_of

__all__ = [
    "Cumulants",
    "entropy_gradient",
    "entropy_scale_curvature",
    "entropy_scale_derivative",
    "entropy_scale_slope",
    "entropy_temperature_derivative",
    "score_cumulants",
    "weight_scale_derivative",
]


class Cumulants(NamedTuple):
    """Mean, variance and third central moment of the raw scores under the row's law."""

    mean: Tensor
    variance: Tensor
    third: Tensor


def score_cumulants(
    scores: Tensor,  # (..., n_key)
    scale: Number = 1.0,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> Cumulants:
    """The first three derivatives of log Z with respect to the scale.

        d log Z / d scale = E_p[s],    d2 = Var_p(s),    d3 = E_p[(s - E s)^3]

    0 on an empty row. log Z is convex in the scale because a variance is not negative. Spec: M-DER-2.

    >>> [x.item() for x in score_cumulants(torch.tensor([1.0, -1.0]), 0.0)]  # a fair sign
    [0.0, 1.0, 0.0]
    """
    p = gibbs_law(scores, scale=scale, bias=bias, keep=keep).probs
    s = torch.where(p > 0, scores, 0.0)
    mean = (p * s).sum(-1)
    centred = torch.where(p > 0, s - mean[..., None], 0.0)
    return Cumulants(mean, (p * centred**2).sum(-1), (p * centred**3).sum(-1))


def entropy_gradient(
    logits: Tensor,  # (..., n_key)
    keep: Tensor | None = None,
) -> Tensor:  # (..., n_key)
    """Derivative of the entropy of a row with respect to its logits; it sums to 0.

        dH / dz_j = -p_j (log p_j + H) = -p_j (z_j - E_p[z])

    0 at masked keys. Multiply by the scale for raw scores. Spec: M-DER-3.

    >>> entropy_gradient(torch.tensor([0.0, 0.0]))  # at its maximum, H does not move
    tensor([-0., -0.])
    """
    p = gibbs_law(logits, keep=keep).probs
    z = torch.where(p > 0, logits_of(logits, 1.0, None, keep), 0.0)
    return -p * (z - (p * z).sum(-1, keepdim=True))


def entropy_scale_derivative(
    scores: Tensor,  # (..., n_key)
    scale: Number = 1.0,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:  # (...)
    """Derivative of the entropy with respect to the scale.

        dH / d scale = -Cov_p(z, s) = -scale * Var_p(s) - Cov_p(b, s)

    Never positive for scale >= 0 without a bias; with a bias it can have either sign, so H is not monotone then.
    Spec: M-DER-4.

    >>> entropy_scale_derivative(torch.tensor([1.0, -1.0]), 0.0)  # scale 0 is the maximum
    tensor(-0.)
    """
    p = gibbs_law(scores, scale=scale, bias=bias, keep=keep).probs
    z = torch.where(p > 0, logits_of(scores, scale, bias, keep), 0.0)
    s = torch.where(p > 0, scores, 0.0)
    return -((p * z * s).sum(-1) - (p * z).sum(-1) * (p * s).sum(-1))


def entropy_scale_curvature(
    scores: Tensor,  # (..., n_key)
    scale: Number = 1.0,
    keep: Tensor | None = None,
) -> Tensor:  # (...)
    """Second derivative of the entropy with respect to the scale, without bias.

        d2H / d scale2 = -Var_p(s) - scale * E_p[(s - E s)^3]

    Spec: M-DER-4.

    >>> entropy_scale_curvature(torch.tensor([1.0, -1.0]), 0.0)  # minus the variance of a fair sign
    tensor(-1.)
    """
    _, variance, third = score_cumulants(scores, scale, None, keep)
    return -variance - scale * third


def entropy_temperature_derivative(
    scores: Tensor,  # (..., n_key)
    temperature: Number,
    keep: Tensor | None = None,
) -> Tensor:  # (...)
    """Derivative of the entropy with respect to the temperature (1 / scale), without bias.

        dH / d temperature = Var_p(s) / temperature^3 >= 0

    Spec: M-DER-4, M-TMP-2.

    >>> entropy_temperature_derivative(torch.zeros(3), 2.0)  # equal scores: H stays log 3
    tensor(0.)
    """
    scale = 1.0 / temperature
    return score_cumulants(scores, scale, None, keep).variance * scale**3


def weight_scale_derivative(
    scores: Tensor,  # (..., n_key)
    scale: Number = 1.0,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:  # (..., n_key)
    """Derivative of each weight with respect to the scale: keys above the mean score gain.

        dp_j / d scale = p_j (s_j - E_p[s])

    For the temperature multiply by -scale^2. Spec: M-DER-5.

    >>> weight_scale_derivative(torch.tensor([1.0, -1.0]), 0.0)
    tensor([ 0.5000, -0.5000])
    """
    p = gibbs_law(scores, scale=scale, bias=bias, keep=keep).probs
    s = torch.where(p > 0, scores, 0.0)
    return p * (s - (p * s).sum(-1, keepdim=True))


def entropy_scale_slope(gibbs: Gibbs) -> Tensor:  # (..., n_query)
    """Derivative of every row's entropy with respect to its scale, from the variance a streaming pass has anyway.

        dH / d scale = -Var_p(z) / scale,      z = scale * <query, key>

    Not for scale 0, where the slope is 0 and this 0/0; refused with a bias or a softcap, where it is not the slope.
    Spec: M-DER-4.

    >>> from partita import Gibbs
    >>> p = Gibbs(torch.ones(1, 1), torch.tensor([[1.0], [1.0]]))
    >>> entropy_scale_slope(p).abs().item()  # equal scores
    0.0
    """
    plain = gibbs.bias is None and gibbs.softcap is None
    require(plain, "the slope is -Var / scale only for plain scores: no bias and no softcap.")
    variance = gibbs.score_variance()
    return -variance / number(gibbs.scale).to(variance.dtype)
