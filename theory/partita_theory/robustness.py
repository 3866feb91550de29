"""Noise and adversaries on the scores: moments, what reaches the output, worst cases, certificates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from partita.gibbs import Gibbs
from partita.support import Support
from partita_theory._domain import Number, not_negative, number, public, require, where
from partita_theory.law import softmax_vjp


@dataclass(frozen=True)
class Noise:
    """Zero-mean noise added to every score of a row; a common mean would cancel and is left out."""

    def exponential_moment(self) -> Tensor:
        """E[exp(noise)]."""
        raise TypeError("Noise is abstract; use GaussianNoise, UniformNoise or LaplaceNoise.")

    def cv2(self) -> Tensor:
        """Squared coefficient of variation of exp(noise): Var(e^noise) / E[e^noise]^2."""
        raise TypeError("Noise is abstract; use GaussianNoise, UniformNoise or LaplaceNoise.")

    def sample(self, *shape: int, generator: Generator | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        """Independent draws."""
        raise TypeError("Noise is abstract; use GaussianNoise, UniformNoise or LaplaceNoise.")


@dataclass(frozen=True)
class GaussianNoise(Noise):
    """Normal noise.

        E[e^x] = exp(sigma^2 / 2),     cv^2 = exp(sigma^2) - 1        (M-ROB-3)

    >>> round(GaussianNoise(1.0).cv2().item(), 4)  # e - 1
    1.7183
    """

    sigma: float

    def __post_init__(self) -> None:
        not_negative("sigma is a standard deviation", self.sigma)

    def exponential_moment(self) -> Tensor:
        return torch.exp(number(self.sigma) ** 2 / 2)

    def cv2(self) -> Tensor:
        return torch.expm1(number(self.sigma) ** 2)

    def sample(self, *shape: int, generator: Generator | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        return self.sigma * torch.randn(*shape, generator=generator, dtype=dtype, device=where(generator))


@dataclass(frozen=True)
class UniformNoise(Noise):
    """Uniform noise on [-radius, radius].

        E[e^x] = sinh(a) / a,     cv^2 = a coth(a) - 1        (M-ROB-3)

    >>> round(UniformNoise(1.5).exponential_moment().item(), 4)  # 2.1293 / 1.5
    1.4195
    """

    radius: float

    def __post_init__(self) -> None:
        not_negative("radius is half a length", self.radius)

    def exponential_moment(self) -> Tensor:
        a = number(self.radius)
        return torch.where(a > 1e-4, torch.sinh(a) / a.clamp(min=1e-4), 1 + a**2 / 6)

    def cv2(self) -> Tensor:
        a = number(self.radius)
        # a coth a - 1 cancels near 0, where it is a^2 / 3 - a^4 / 45.
        return torch.where(a > 1e-2, a / torch.tanh(a.clamp(min=1e-2)) - 1, a**2 / 3 - a**4 / 45)

    def sample(self, *shape: int, generator: Generator | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        return self.radius * (2 * torch.rand(*shape, generator=generator, dtype=dtype, device=where(generator)) - 1)


@dataclass(frozen=True)
class LaplaceNoise(Noise):
    """Laplace noise with density exp(-|x| / b) / (2 b): its tail is as heavy as exp(x) can bear.

        E[e^x] = 1 / (1 - b^2)   for b < 1,      cv^2 = b^2 (2 + b^2) / (1 - 4 b^2)   for b < 1/2   (M-ROB-3, M-ROB-4)

    Beyond these the moments are infinite and asking for them is an error; sampling always works.

    >>> round(LaplaceNoise(0.3).exponential_moment().item(), 4)  # 1 / 0.91
    1.0989
    """

    b: float

    def __post_init__(self) -> None:
        not_negative("b is a width", self.b)

    def exponential_moment(self) -> Tensor:
        require(self.b < 1, f"E[exp(noise)] is infinite for Laplace noise with b >= 1; got b = {self.b}. Use b < 1.")
        return 1 / (1 - number(self.b) ** 2)

    def cv2(self) -> Tensor:
        require(
            self.b < 0.5,
            f"the variance of exp(noise) is infinite for Laplace noise with b >= 1/2; got b = {self.b}. "
            "Use b < 1/2, or laplace_error_exponent for the rate that is left.",
        )
        b2 = number(self.b) ** 2
        return b2 * (2 + b2) / (1 - 4 * b2)

    def sample(self, *shape: int, generator: Generator | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        u = torch.rand(*shape, generator=generator, dtype=dtype, device=where(generator)) - 0.5
        return -self.b * u.sign() * torch.log1p(-2 * u.abs())


def laplace_error_exponent(b: float) -> float:
    """The power of n with which the typical error of a spread-out row falls under Laplace noise.

        -1/2 for b < 1/2,      -(1 - b) for 1/2 < b < 1,      0 (no cancellation) for b >= 1        (M-ROB-4)

    At b = 1/2 and b = 1 there are logarithms on top.

    >>> round(laplace_error_exponent(0.7), 6)
    -0.3
    """
    not_negative("b is a width", b)
    return -0.5 if b <= 0.5 else min(0.0, b - 1.0)


def correlated_sigma(sigma: Number, rho: Number) -> Tensor:
    """The part of equicorrelated Gaussian noise that a softmax notices: what all keys share cancels.

        sigma_eff = sigma * sqrt(1 - rho)        (M-ROB-5, M-GIB-2)

    >>> correlated_sigma(2.0, 0.75).item()
    1.0
    """
    sigma, rho = number(sigma), number(rho)
    require((rho >= 0) & (rho <= 1), f"rho is a correlation shared by all keys, so 0 <= rho <= 1; got {rho}.")
    return sigma * (1 - rho).sqrt()


class NoiseEffect(NamedTuple):
    """Bias and standard deviation of an output under noisy scores, per coordinate of the value."""

    bias: Tensor
    sd: Tensor


def _centred(probs: Tensor, values: Tensor) -> Tensor:
    """Values minus their mean under the weights."""
    return values - (probs[..., None] * values).sum(-2, keepdim=True)


def noise_identity(
    probs: Tensor,  # (..., n)
    values: Tensor,  # (..., n, dim_value)
    noise: Tensor,  # (..., n)
    moment: Number = 1.0,
) -> Tensor:  # (..., dim_value)
    """The exact change of the output when these numbers are added to the scores; no factor n anywhere.

        out~ - out = sum_i p_i w_i (v_i - out) / (1 + sum_i p_i w_i),      w_i = exp(noise_i) / moment - 1   (M-ROB-1)

    True for every moment > 0: E[exp(noise)] makes w centred.

    >>> p, v = torch.tensor([0.5, 0.5]), torch.tensor([[0.0], [1.0]])
    >>> noise_identity(p, v, torch.tensor([1.0, 3.0]).log())  # weights 1 and 3: 3/4 - 1/2
    tensor([0.2500])
    """
    w = noise.exp() / number(moment).to(noise.dtype) - 1
    shift = ((probs * w)[..., None] * _centred(probs, values)).sum(-2)
    return shift / (1 + (probs * w).sum(-1))[..., None]


def noise_bias(probs: Tensor, values: Tensor, cv2: Number) -> Tensor:  # (..., n), (..., n, d) -> (..., d)
    """The mean error of an output under independent noise on the scores, to first order in 1 / n_eff.

        E[out~] - out = -cv^2 * sum_i p_i^2 (v_i - out),   O(1/n) for spread-out rows, 0 for uniform ones    (M-ROB-2)

    >>> noise_bias(torch.tensor([0.75, 0.25]), torch.tensor([[0.0], [1.0]]), 1.0)  # -(9/16 * -1/4 + 1/16 * 3/4)
    tensor([0.0938])
    """
    return -number(cv2).to(probs.dtype) * (probs.square()[..., None] * _centred(probs, values)).sum(-2)


def noise_covariance(probs: Tensor, values: Tensor, cv2: Number) -> Tensor:  # (..., n), (..., n, d) -> (..., d, d)
    """The covariance of an output under independent noise on the scores, to first order in 1 / n_eff.

        Cov = cv^2 * sum_i p_i^2 (v_i - out)(v_i - out)^T,   its root is O(1/sqrt(n)): larger than the bias    (M-ROB-2)

    >>> noise_covariance(torch.tensor([0.5, 0.5]), torch.tensor([[0.0], [1.0]]), 1.0)  # 2 * 1/4 * 1/4
    tensor([[0.1250]])
    """
    centred = _centred(probs, values)
    weighted = probs.square()[..., None] * centred
    return number(cv2).to(probs.dtype) * weighted.transpose(-1, -2) @ centred


def noise_sd_bound(probs: Tensor, values: Tensor, cv2: Number) -> Tensor:  # (..., dim_value)
    """A bound on the first-order standard deviation from the largest weight and the spread of the values.

        sd <= cv * sqrt(p_max * Var_p(v))        (M-ROB-2)

    >>> noise_sd_bound(torch.tensor([0.5, 0.5]), torch.tensor([[0.0], [1.0]]), 1.0)  # sqrt(1/2 * 1/4)
    tensor([0.3536])
    """
    centred = _centred(probs, values)
    variance = (probs[..., None] * centred.square()).sum(-2)
    return (number(cv2).to(probs.dtype) * probs.amax(-1)[..., None] * variance).sqrt()


def noise_effect(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    value: Tensor,  # (..., n_key, dim_value)
    cv2: Number,
    *,
    scale: Number = 1.0,
    bias: Tensor | None = None,
    support: Support | None = None,
) -> NoiseEffect:  # fields (..., n_query, dim_value)
    """Predicted bias and standard deviation of attention under noisy scores, streaming.

    Squared weights are a Gibbs law at twice the scale, E2 its expectation:

        sum_i p_i^2 f(v_i) = c * E2[f(v)],    c = sum p^2 = Z(2z) / Z(z)^2
        bias = -cv^2 c (E2[v] - out),      sd^2 = cv^2 c (E2[v^2] - 2 out E2[v] + out^2)        (M-ROB-2)

    Needs n_eff = 1/c large. 0 on empty rows.

    >>> e = noise_effect(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([[0.0], [1.0]]), 1.0)
    >>> round(e.sd.item() ** 2, 4), abs(e.bias.item())  # 2 * 1/4 * 1/4, and no bias for a uniform row
    (0.125, 0.0)
    """
    once = Gibbs(query, key, scale=scale, bias=bias, support=support)
    twice = Gibbs(query, key, scale=2 * scale, bias=None if bias is None else 2 * bias, support=support)
    log_z = once.log_partition()
    mass = torch.where(log_z.isneginf(), 0.0, torch.exp(twice.log_partition() - 2 * log_z))[..., None]
    out = once.expectation(value)
    first, second = twice.expectation(torch.cat([value, value.square()], -1)).chunk(2, -1)
    factor = number(cv2).to(mass.dtype) * mass
    variance = factor * (second - 2 * out * first + out.square())
    return NoiseEffect(-factor * (first - out), variance.clamp(min=0).sqrt())


def ratio_expansion(mean_x: Number, mean_y: Number, covariance: Number, variance_y: Number) -> Tensor:
    """The mean of a ratio of two fluctuating numbers, to second order.

        E[X/Y] = EX/EY - Cov(X,Y)/EY^2 + Var(Y) EX/EY^3        (M-ROB-2)

    >>> ratio_expansion(1.0, 2.0, 0.0, 0.4).item()  # 0.5 + 0.4 / 8
    0.55
    """
    x, y, c, v = number(mean_x), number(mean_y), number(covariance), number(variance_y)
    return x / y - c / y**2 + v * x / y**3


def monte_carlo_noise(
    scores: Tensor,  # (n,)
    values: Tensor,  # (n, dim_value)
    noise: Noise,
    *,
    draws: int = 1000,
    generator: Generator | None = None,
    chunk: int = 4096,
) -> tuple[NoiseEffect, NoiseEffect]:
    """Bias and standard deviation measured by adding noise many times, and the standard error of each.

        out~ = softmax(scores + noise) @ values        (M-ROB-2)

    The comparator of `noise_bias` and `noise_covariance`. The error of sd assumes near-normal outputs.

    >>> from partita_theory.robustness import GaussianNoise
    >>> effect, error = monte_carlo_noise(torch.zeros(4), torch.ones(4, 1), noise=GaussianNoise(1.0), draws=10)
    >>> effect.sd.item() < 1e-6  # equal values cannot move
    True
    """
    out = torch.softmax(scores, -1) @ values
    count, total, square = 0, torch.zeros_like(out), torch.zeros_like(out)
    while count < draws:
        m = min(draws - count, max(1, chunk * 256 // scores.shape[-1]))
        drawn = noise.sample(m, scores.shape[-1], generator=generator, dtype=scores.dtype)
        moved = torch.softmax(scores + drawn, -1) @ values
        total += (moved - out).sum(0)
        square += (moved - out).square().sum(0)
        count += m
    mean = total / count
    sd = (square / count - mean.square()).clamp(min=0).sqrt()
    return NoiseEffect(mean, sd), NoiseEffect(sd / count**0.5, sd / (2 * count) ** 0.5)


class Attack(NamedTuple):
    """A perturbation, what first order promises of it, and what it does."""

    perturbation: Tensor  # (..., n)
    predicted: Tensor  # (...)
    achieved: Tensor  # (...)


def output_sensitivity(
    scores: Tensor,  # (..., n), scaled
    values: Tensor,  # (..., n, dim_value)
) -> Tensor:  # (..., n, dim_value)
    """How the output moves with each score: a key far from the output and heavy matters.

        d out / d s_i = p_i (v_i - out) = p_i (1 - p_i) (v_i - out_without_i)        (M-ROB-8, M-DER-7)

    >>> output_sensitivity(torch.zeros(2), torch.tensor([[0.0], [1.0]]))
    tensor([[-0.2500],
            [ 0.2500]])
    """
    p = torch.softmax(scores, -1)
    return p[..., None] * _centred(p, values)


def output_sensitivity_norm(scores: Tensor, values: Tensor) -> Tensor:  # (...)
    """The largest first-order move of the output per unit of l2 perturbation of the scores.

        sigma_max of [p_i (v_i - out)]_i,     like 1/sqrt(n) for scores of unit variance        (M-DER-7, M-ROB-9)

    >>> output_sensitivity_norm(torch.zeros(2), torch.tensor([[0.0], [1.0]]))  # sqrt(2) / 4
    tensor(0.3536)
    """
    top: Tensor = torch.linalg.matrix_norm(output_sensitivity(scores, values), 2)
    return top


def attack_linf(
    scores: Tensor,  # (..., n), scaled
    values: Tensor,  # (..., n, dim_value)
    direction: Tensor,  # (..., dim_value)
    budget: Number,
) -> Attack:
    """The best small perturbation with every entry at most `budget`, to move the output along a direction.

        e_i = budget * sign<v_i - out, u>,      predicted gain = budget * sum_i p_i |<v_i - out, u>|        (M-ROB-9)

    First order in the budget; for a finite one use `attack_linf_exact`. u is normalised.
    From Goodfellow, Shlens and Szegedy (2015), Explaining and harnessing adversarial examples.

    >>> attack_linf(torch.zeros(2), torch.tensor([[0.0], [1.0]]), torch.tensor([1.0]), 0.1).predicted  # 0.1 * 1/2
    tensor(0.0500)
    """
    c, slope, size = _along(scores, values, direction, budget)
    e = size * slope.sign()
    return Attack(e, size * slope.abs().sum(-1), _mean(scores + e, c) - _mean(scores, c))


def attack_l2(
    scores: Tensor,  # (..., n), scaled
    values: Tensor,  # (..., n, dim_value)
    budget: Number,
    direction: Tensor | None = None,  # (..., dim_value)
) -> Attack:
    """The best small perturbation of Euclidean length `budget`; without a direction, the one that moves most.

        e = budget * g / |g|,   g_i = p_i <v_i - out, u>,      predicted gain = budget * |g|
        no direction:  along the top right singular vector of [p_i (v_i - out)]_i        (M-ROB-9)

    >>> round(attack_l2(torch.zeros(2), torch.tensor([[0.0], [1.0]]), 0.1).predicted.item(), 5)  # 0.1 * sqrt(2) / 4
    0.03536
    """
    if direction is None:
        direction = torch.linalg.svd(output_sensitivity(scores, values), full_matrices=False).Vh[..., 0, :]
    c, slope, size = _along(scores, values, direction, budget)
    length = slope.norm(dim=-1, keepdim=True)
    e = size * slope / length.clamp(min=torch.finfo(slope.dtype).tiny)
    return Attack(e, size * length.squeeze(-1), _mean(scores + e, c) - _mean(scores, c))


def attack_linf_exact(
    scores: Tensor,  # (..., n), scaled
    values: Tensor,  # (..., n, dim_value)
    direction: Tensor,  # (..., dim_value)
    budget: Number,
    *,
    steps: int = 50,
) -> Attack:
    """The best perturbation with every entry at most `budget`, for any finite budget: a fractional-linear programme.

        t <- sum_i w_i c_i,    w = softmax(s + budget * sign(c - t)),    c_i = <v_i, u>        (M-ROB-10)

    The threshold is the *final* value t, not the output; a few steps reach the global maximum.
    The iteration is that of Dinkelbach (1967), On nonlinear fractional programming.

    >>> v, u = torch.tensor([[0.0], [1.0]]), torch.tensor([1.0])
    >>> a = attack_linf_exact(torch.zeros(2), v, u, torch.tensor(3.0).log() / 2)
    >>> a.achieved  # odds 1 become 3: from 1/2 to 3/4
    tensor(0.2500)
    """
    c, slope, size = _along(scores, values, direction, budget)
    t = _mean(scores, c)[..., None]
    e = torch.zeros_like(c)
    for _ in range(steps):
        e = size * torch.where(c > t, 1.0, -1.0).to(c.dtype)
        better = _mean(scores + e, c)[..., None]
        if bool((better <= t).all()):
            break
        t = torch.maximum(t, better)
    return Attack(e, size * slope.abs().sum(-1), _mean(scores + e, c) - _mean(scores, c))


def _along(scores: Tensor, values: Tensor, direction: Tensor, budget: Number) -> tuple[Tensor, Tensor, float]:
    """c_i = <v_i, u>, how its mean moves with each score, and the budget."""
    size = float(not_negative("budget is a size", budget))
    unit = direction / direction.norm(dim=-1, keepdim=True)
    c = (values * unit[..., None, :]).sum(-1)
    return c, softmax_vjp(torch.softmax(scores, -1), c), size


def _mean(scores: Tensor, along: Tensor) -> Tensor:
    return (torch.softmax(scores, -1) * along).sum(-1)


def softmax_change_bound(
    perturbation: Tensor | None = None,  # (..., n)
    *,
    radius: Number | None = None,
) -> Tensor:  # (...)
    """The most the weights can change, in l1, when this is added to the (scaled) scores.

        |softmax(s + e) - softmax(s)|_1  <=  2 tanh(osc(e) / 4)  <=  2 tanh(|e|_inf / 2)  <=  |e|_inf        (M-ROB-6)

    with osc = max - min. Give the perturbation itself or its l_inf radius. Sharp: see `worst_two_point_law`.
    Masked keys are to be left out.

    >>> round(softmax_change_bound(radius=2.0).item(), 4)  # 2 tanh 1
    1.5232
    """
    require((perturbation is None) != (radius is None), "give exactly one of perturbation and radius.")
    if perturbation is not None:
        return 2 * torch.tanh((perturbation.amax(-1) - perturbation.amin(-1)) / 4)
    return 2 * torch.tanh(not_negative("radius is a size", 0.0 if radius is None else radius) / 2)


def worst_two_point_law(radius: Number) -> tuple[Tensor, Tensor]:
    """Two scores and a perturbation of this l_inf size for which the bound of softmax is attained.

        p = (1, e^r) / (1 + e^r),    e = (r, -r):      p~ is p reversed        (M-ROB-6)

    >>> s, e = worst_two_point_law(2.0)
    >>> round((torch.softmax(s + e, -1) - torch.softmax(s, -1)).abs().sum().item(), 4)
    1.5232
    """
    r = number(radius)
    return torch.stack([torch.zeros_like(r), r], -1), torch.stack([r, -r], -1)


def value_diameter(values: Tensor, *, exact: bool = True, rows: int = 1024) -> Tensor:  # (..., n, dim_value) -> (...)
    """The largest distance between two values; or, in O(n), a bound on it through the centre of their box.

        diam = max_ij |v_i - v_j|        (exact False:  2 max_i |v_i - centre|)        (M-ROB-7)

    Exact takes O(n^2) time and `rows` * n memory; the bound is at most sqrt(3) diam in practice.

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

        |out~ - out|  <=  diam(V) tanh(osc(e) / 4)  <=  diam(V) |e|_inf / 2  <=  max|v| * |e|_inf        (M-ROB-7)

    Does not change when all values are shifted. Values of masked keys are to be left out.

    >>> attention_change_bound(torch.tensor([[0.0], [4.0]]), torch.tensor([1.0, 1.0]))  # a common shift does nothing
    tensor(0.)
    """
    diameter = value_diameter(values, exact=exact)
    return diameter * softmax_change_bound(perturbation, radius=radius).to(values.dtype) / 2


def certified_radius(values: Tensor, tolerance: Number) -> Tensor:  # (...)
    """The largest l_inf perturbation of the scores that moves the output by no more than `tolerance`, guaranteed.

        r = 2 artanh(tolerance / diam(V)),      infinite when tolerance >= diam(V)        (M-ROB-7)

    >>> certified_radius(torch.tensor([[0.0], [1.0]]), 1.0)
    tensor(inf)
    """
    ratio = not_negative("tolerance is a distance", tolerance).to(values.dtype) / value_diameter(values)
    return torch.where(ratio >= 1, torch.inf, 2 * torch.atanh(ratio.clamp(max=1 - 1e-12)))


__all__ = public(globals())
