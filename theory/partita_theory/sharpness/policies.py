"""How a scale grows with the length: growth laws, calibration, control, temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partita_theory._domain import Number, above_zero, bisect, count, number, require, together
from partita_theory.geometry.simplex import gibbs_kl
from partita_theory.information.shannon import entropy, score_cumulants, weight_scale_derivative
from partita_theory.sharpness.transition import condensed_index


def margin_entropy(n: Number, gap: Number) -> Tensor:
    """Entropy when one key leads n - 1 equal ones by this much (scale included).

        u = (n - 1) exp(-gap):      H = log(1 + u) + gap * u / (1 + u)        (M-SCL-15)

    >>> round(margin_entropy(5, 0.0).item(), 4)  # no lead: log 5
    1.6094
    """
    g = number(gap)
    u = (count(n) - 1) * torch.exp(-g)
    return torch.log1p(u) + g * u / (1 + u)


def margin_scale(n: Number, entropy: Number, margin: Number = 1.0, *, exact: bool = True) -> Tensor:
    """The scale that holds the entropy when one key leads by a fixed margin: the one case that grows like log n.

        scale * margin = log n + log log n - log entropy + o(1)        (exact True: solved)        (M-SCL-15)

    >>> round(margin_scale(256, 2.0).item(), 2), round(margin_scale(65536, 2.0).item(), 2)
    (6.6, 12.88)
    """
    size, target, d = together(n, entropy, margin)
    require((target > 0) & (target < size.log()), f"the entropy must lie strictly between 0 and log n; got {target}.")
    require(d > 0, f"margin must be positive; got {d}.")
    if not exact:
        return (size.log() + size.log().log() - target.log()) / d
    return bisect(lambda gap: margin_entropy(size, gap) > target, torch.zeros_like(size), size.log() + 60) / d


def margin_half_scale(n: Number, margin: Number = 1.0) -> Tensor:
    """The scale at which a key leading by a margin has half of the weight.

        scale * margin = log(n - 1)        (M-SCL-15)

    >>> margin_half_scale(2).item()
    0.0
    """
    return (number(n) - 1).log() / number(margin)


def uniform_entropy(n: Number, scale: Number, width: Number = 1.0) -> Tensor:
    """Entropy of scores uniform on an interval, for scale * width >> 1.

        H = log n + 1 - log(scale * width)        (M-SCL-15, M-SCL-11)

    >>> round(uniform_entropy(1e5, 8.0, 2.0).item(), 3)  # 11.513 + 1 - log 16
    9.74
    """
    return number(n).log() + 1 - (number(scale) * number(width)).log()


def uniform_scale(n: Number, entropy: Number, width: Number = 1.0) -> Tensor:
    """The scale that holds the entropy of bounded scores with density at the edge: proportional to n.

        scale = n * exp(1 - entropy) / width        (M-SCL-15)

    >>> uniform_scale(100, 1.0).item()
    100.0
    """
    return number(n) * torch.exp(1 - number(entropy)) / number(width)


def exponential_scale(entropy: Number, b: Number = 1.0) -> Tensor:
    """The scale that holds the entropy of scores with an exponential tail of width b: it does not grow at all.

        scale -> 1 / (m b),      psi(1) - psi(1 - m) = entropy        (M-SCL-15)

    >>> round(exponential_scale(1.3862943611).item(), 4)  # m = 1/2
    2.0
    """
    return 1 / (condensed_index(entropy) * number(b))


def spherical_scale(n: Number, entropy: Number, dim: Number) -> Tensor:
    """The scale for scores dim * cos(angle) of random directions.

        scale = t / (1 - t^2),    t^2 = 1 - exp(-2 (log n - entropy) / dim)        (M-SCL-15)

    sqrt(2 (log n - entropy) / dim) while log n << dim; n^(2/dim) beyond. 0 if the target is not below log n.

    >>> round(spherical_scale(torch.tensor(2.0).double().exp(), 1.0, 2e6).item() * 1e3, 4)  # sqrt(2 * 1 / 2e6)
    1.0
    """
    gap = (number(n).log() - number(entropy)).clamp(min=0)
    t2 = -torch.expm1(-2 * gap / number(dim))
    return t2.sqrt() / (1 - t2)


def tied_entropy_floor(n: Number, share: Number) -> Tensor:
    """The entropy no scale can go below when a share of all keys ties at the maximum.

        H >= log(share * n)        (M-SCL-15, M-GIB-3)

    >>> round(tied_entropy_floor(100, 0.02).item(), 4)
    0.6931
    """
    x = number(share)
    require((x > 0) & (x <= 1), f"share is a fraction of the keys, 0 < share <= 1; got {x}.")
    return (x * number(n)).log().clamp(min=0)


def growth_exponent(lengths: Tensor, scales: Tensor, *, of_log: bool = True) -> Tensor:
    """The power with which a scale grows, between the two ends of a range of lengths.

        d log(scale) / d log(log n)        (of_log False:  d log(scale) / d log n)        (M-SCL-14, M-SCL-15)

    >>> round(growth_exponent(torch.tensor([10.0, 1000.0]), torch.tensor([1.0, 3.0])).item(), 4)  # both times 3
    1.0
    """
    x = number(lengths).log().log() if of_log else number(lengths).log()
    y = number(scales).log()
    return (y[..., -1] - y[..., 0]) / (x[..., -1] - x[..., 0])


def score_variance(
    dim: int,
    query_variance: Number = 1.0,
    key_variance: Number = 1.0,
    query_mean: Number = 0.0,
    key_mean: Number = 0.0,
) -> Tensor:
    """Variance of <q, k> for independent entries; 1/sqrt(dim) makes it sd_q * sd_k when the means are 0.

        Var = dim * [ (vq + mq^2)(vk + mk^2) - mq^2 mk^2 ],       mean = dim * mq * mk        (M-SCL-1)

    Dividing scores by dim instead gives v^2 / dim, not a constant. Not for the diagonal of self-attention.

    >>> score_variance(64).item(), score_variance(1, 1.0, 1.0, 0.5, 0.5).item()
    (64.0, 1.5)
    """
    vq, vk, mq, mk = number(query_variance), number(key_variance), number(query_mean), number(key_mean)
    return dim * ((vq + mq**2) * (vk + mk**2) - mq**2 * mk**2)


def row_score_variance(query: Tensor, key_variance: Number = 1.0) -> Tensor:  # (..., dim) -> (...)
    """Variance of the scores of *one* query over its keys, which is what its softmax sees.

        |q|^2 * key_variance        (M-SCL-1)

    >>> row_score_variance(torch.tensor([3.0, 4.0]))
    tensor(25.)
    """
    return query.square().sum(-1) * number(key_variance).to(query.dtype)


def equivalent_kappa(n: Number, dim: Number) -> Tensor:
    """The kappa for which kappa log(n) / dim equals 1 / sqrt(dim) at this length. Infinite at n = 1.

        kappa = sqrt(dim) / log n        (M-SCL-9, M-SCL-7)

    >>> round(equivalent_kappa(512, 64).item(), 3)
    1.282
    """
    return number(dim).sqrt() / number(n).log()


def crossover_length(dim: Number) -> Tensor:
    """The length at which log(n) / dim equals 1 / sqrt(dim).

        n = exp(sqrt(dim)),     2981 for dim 64, 8.2e4 for 128, 6.7e9 for 512        (M-SCL-9)

    >>> round(crossover_length(64).item())
    2981
    """
    return number(dim).sqrt().exp()


def calibrate_kappa(n0: Number, dim: Number, sigma: Number | None = None, growth: Number = 1.0) -> Tensor:
    """The kappa that makes kappa log(n) / dim hold entropy constant to first order around the length n0.

        kappa = dim / sigma * sqrt(growth / log n0)        (M-SCL-16)

    sigma is the sd of raw scores, sqrt(dim) for unit-variance vectors (None). The sharpness is sqrt(log n0) there, and
    to leading order H = log(n0) / 2 for Gaussian scores without a bias. Finite rows keep more: at n0 = 4096 H is 4.63
    nats, not 4.16, and still grows by 0.15 nats per nat of log n (`gaussian_entropy(..., finite=True)`). Under an
    additive position bias, independent of the scores, H = H_bias(n) - sharpness^2 / 2, and `bias_growth` gives
    growth = dH_bias / d log n: 1 without a bias, 0 where the bias alone has already ended the dilution.

    >>> round(calibrate_kappa(4096, 64).item(), 2)  # sqrt(64 / 8.318)
    2.77
    """
    n0, dim = number(n0), number(dim)
    require(n0 > 1, f"n0 must exceed 1, as log 1 = 0; got {n0}.")
    sigma = dim.sqrt() if sigma is None else number(sigma)
    require(sigma > 0, f"sigma is the standard deviation of scores and must be positive; got {sigma}.")
    growth = number(growth)
    require(growth >= 0, f"growth is how fast the bias alone widens a row, and not negative; got {growth}.")
    return dim / sigma * (growth / n0.log()).sqrt()


def bias_growth(bias: Tensor, n0: int) -> Tensor:  # bias by distance, (..., more than n0)
    """How fast the entropy of a position bias alone grows with the length: dH_bias / d log n at n0.

        H_bias(n) = H(softmax(bias_0 ... bias_{n-1})),      bias_t what a key at distance t gets        (M-ATT-9)

    1 for no bias (H_bias = log n), 0 for one that has decayed: ALiBi with slope m widens no further beyond some 1 / m.

    >>> bias_growth(torch.zeros(2000), 1000)
    tensor(1.0000, dtype=torch.float64)
    >>> bool(bias_growth(-0.1 * torch.arange(2000), 1000) < 1e-6)
    True
    """
    require(bias.shape[-1] > n0 >= 2, f"bias must reach beyond n0 = {n0} >= 2; got {bias.shape[-1]} distances.")
    short, long = (entropy(bias[..., : n0 + d].double()) for d in (-1, 1))
    return (long - short) / math.log((n0 + 1) / (n0 - 1))


def stationary_length(kappa: Number, dim: Number, sigma: Number | None = None) -> Tensor:
    """The length around which kappa log(n) / dim holds entropy constant; its logarithm, as it is often astronomic.

        log n0 = (dim / (kappa * sigma))^2,     dim for kappa = 1 and unit-variance vectors        (M-SCL-16)

    >>> stationary_length(1.0, 64).item()
    64.0
    """
    dim = number(dim)
    sigma = dim.sqrt() if sigma is None else number(sigma)
    return (dim / (number(kappa) * sigma)) ** 2


def kappa_entropy(n: Number, kappa: Number, dim: Number, sigma: Number | None = None) -> Tensor:
    """Entropy of Gaussian scores under kappa log(n) / dim to leading order, below condensation.

        H = log n - (c log n)^2 / 2,       c = kappa * sigma / dim        (M-SCL-16)

    >>> kappa_entropy(torch.tensor(4.0).double().exp(), 1.0, 4.0).item()  # c = 1/2: 4 - 4/2
    2.0
    """
    log_n, dim = number(n).log(), number(dim)
    sigma = dim.sqrt() if sigma is None else number(sigma)
    return log_n - (number(kappa) * sigma / dim * log_n) ** 2 / 2


def reference_length_slope(n: Number, n_train: Number) -> Tensor:
    """dH / d log n under the scale (log n / log n_train) / sqrt(dim), for unit-variance Gaussian scores.

        1 - log n / (log n_train)^2,     1 - 1 / log n_train at n = n_train        (M-SCL-7)

    The factor log n is that of Chiang and Cholak (2022), Overcoming a theoretical limitation of self-attention.

    >>> round(reference_length_slope(512, 512).item(), 3)
    0.84
    """
    return 1 - number(n).log() / number(n_train).log() ** 2


def head_sharpness(heads: Number, dim_model: Number, n: Number, kappa: Number = 1.0) -> Tensor:
    """Sharpness under kappa log(n) / dim_head with unit-variance vectors: it grows like sqrt(heads) only.

        kappa * log(n) * sqrt(heads / dim_model)        (M-SCL-8)

    >>> round(head_sharpness(1, 512, 1024).item(), 3), round(head_sharpness(4, 512, 1024).item(), 3)
    (0.306, 0.613)
    """
    return number(kappa) * number(n).log() * (number(heads) / number(dim_model)).sqrt()


def length_slope(
    policy: Callable[[int], float],
    sampler: Callable[[int], Tensor],
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:  # slope, mean entropy per length
    """How much of the growth of log n shows in the entropy: 0 is invariance, 1 is no control.

        slope of the least-squares line of  mean H(softmax(policy(n) * scores))  against log n   (M-SCL-0, M-SCL-17)

    `sampler(n)` gives scores (rows, n). State the sampler and the range with the number.

    >>> slope, _ = length_slope(lambda n: 1.0, lambda n: torch.zeros(1, n, dtype=torch.float64), [4, 16, 64])
    >>> round(slope.item(), 6)  # equal scores: H = log n
    1.0
    """
    require(len(lengths) >= 2, "a slope needs at least two lengths.")
    means = torch.stack([entropy(policy(n) * sampler(n)).mean().double() for n in lengths])
    x = torch.tensor([float(n) for n in lengths], dtype=torch.float64, device=means.device).log()
    x = x - x.mean()
    return (x * means).sum() / x.square().sum(), means


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

        scale <- scale + (H - target) / (scale * Var_p(s)),    from sqrt(2 (log n - target) / Var_u(s))   (M-SCL-10)

    When a step leaves the bracket the geometric mean is taken. target >= log n gives 0; target <= log(number of
    maximisers) gives `cap`, not converged. Equal scores have no solution. `partita.solve_scale` streams.

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

        d scale / d s_j = -scale * p_j (s_j - E_p[s]) / Var_p(s)        (M-SCL-10)

    Scaling all scores by c divides the scale by c: sum_j s_j d scale / d s_j = -scale.

    >>> s, x = torch.tensor([2.0, 0.0]), torch.tensor(0.5)
    >>> round((s * entropy_scale_gradient(s, x)).sum().item(), 4)
    -0.5
    """
    variance = score_cumulants(scores, scale).variance
    return -(scale / variance)[..., None] * weight_scale_derivative(scores, scale)


def controller_step(scores: Tensor, scale: Tensor, target: Number, kind: str = "newton") -> Tensor:  # (...)
    """One step of a rule that steers the scale towards a target entropy.

        newton:      scale + (H - target) / (scale * Var)
        reciprocal:  scale * H / target
        printed:     scale * target / H        positive feedback: it runs away from the root        (M-SCL-10)

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

        newton 0,     reciprocal 1 - x,     printed 1 + x,       x = scale^2 Var_p(s) / H        (M-SCL-10)

    >>> controller_multiplier(torch.zeros(4), torch.tensor(1.0), "printed")  # equal scores: no feedback at all
    tensor(1.)
    """
    require(kind in _KINDS, f"kind must be one of {', '.join(_KINDS)}; got {kind!r}.")
    x = scale**2 * score_cumulants(scores, scale).variance / entropy(scale[..., None] * scores)
    return {"newton": torch.zeros_like(x), "reciprocal": 1 - x, "printed": 1 + x}[kind]


def scale_of_temperature(temperature: Number) -> Tensor:
    """The factor that multiplies scores when a temperature divides them; 1/sqrt(dim) is the temperature sqrt(dim).

        scale = 1 / temperature        (M-TMP-1)

    >>> scale_of_temperature(0.25).item()
    4.0
    """
    return 1 / above_zero("temperature", temperature)


def effective_temperature(n: Number, dim: Number, kappa: Number = 1.0) -> Tensor:
    """The temperature that the scale kappa log(n) / dim stands for.

        T = dim / (kappa * log n),     infinite at n = 1, where the scale is 0        (M-TMP-3)

    >>> effective_temperature(1, 64).item()
    inf
    """
    n = number(n)
    require(n >= 1, f"a row without keys has no temperature; got n = {n}.")
    return number(dim) / (number(kappa) * n.log())


def entropy_sweep(scores: Tensor, temperatures: Tensor) -> Tensor:  # (..., n), (m,) -> (m, ...)
    """Entropy of the same scores at several temperatures: without a bias it rises from log(ties at the top) to log n.

        H(softmax(scores / t))        (M-TMP-2, M-GIB-3)

    >>> entropy_sweep(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1e-3, 1e6]))  # log 2 and log 3
    tensor([0.6931, 1.0986])
    """
    return torch.stack([entropy(scores / t) for t in temperatures])


def distillation_loss(teacher: Tensor, student: Tensor, temperature: Number = 1.0) -> Tensor:  # (..., n) -> (...)
    """Divergence of a student's softened law from its teacher's; the square keeps gradients comparable across T.

        T^2 * KL(softmax(teacher / T) || softmax(student / T))        (M-TMP-4)

    From Hinton, Vinyals and Dean (2015), Distilling the knowledge in a neural network.

    >>> distillation_loss(torch.zeros(3), torch.zeros(3), 4.0).item()
    0.0
    """
    t = above_zero("temperature", temperature, student.dtype)
    return t**2 * gibbs_kl(teacher / t, student / t)


def distillation_gradient(teacher: Tensor, student: Tensor, temperature: Number = 1.0) -> Tensor:  # (..., n)
    """Its gradient by the student's logits, both laws at temperature T.

        T * (p_student - p_teacher)        (M-TMP-4)

    >>> distillation_gradient(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]), 2.0)
    tensor([0., 0.])
    """
    t = number(temperature).to(student.dtype)
    return t * (torch.softmax(student / t, -1) - torch.softmax(teacher / t, -1))
