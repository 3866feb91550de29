"""Entropy of a softmax row: value, width, bounds, one-pass forms, floor, derivatives."""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import Tensor

from partita.errors import ShapeError
from partita.gibbs import Gibbs
from partita.support import Support
from partita_theory._domain import Number, above_zero, count, not_negative, number, require, together
from partita_theory.law import gibbs_law, logits_of, one_hot_bound, softmax_vjp

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Bounds(NamedTuple):
    """Two numbers between which a third one lies."""

    lower: Tensor
    upper: Tensor


def entropy(
    logits: Tensor,  # (..., n_key)
    keep: Tensor | None = None,  # (..., n_key) bool
    *,
    base: float | None = None,
) -> Tensor:  # (...)
    """Entropy of softmax(logits) in nats (or in the given base), from centred logits.

        H = log sum_j w_j - sum_j w_j c_j / sum_j w_j,     c = z - max z,  w = exp(c)        (M-ENT-1, M-ENT-3)

    Equal to ``torch.distributions.Categorical(logits=logits).entropy()`` where nothing is masked.
    The uncentred log Z - E[z] loses its digits to a common offset. A row without keys gives 0.

    >>> entropy(torch.zeros(8), base=2)  # one of 8: three bits
    tensor(3.)
    """
    z = logits_of(logits, 1.0, None, keep)
    seen = ~z.isneginf()
    peak = z.detach().amax(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    weight = torch.exp(z - peak)
    centred = torch.where(seen, z - peak, 0.0)
    mass = weight.sum(-1)
    safe = torch.where(seen.any(-1), mass, 1.0)
    return _in_base(safe.log() - (weight * centred).sum(-1) / safe, base)


def entropy_of(probs: Tensor, *, base: float | None = None) -> Tensor:  # (..., n) -> (...)
    """Entropy of weights that are already there, with 0 log 0 = 0.

        H = -sum_j p_j log p_j        (M-ENT-1)

    >>> entropy_of(torch.tensor([0.5, 0.5, 0.0]))  # log 2
    tensor(0.6931)
    """
    return _in_base(-torch.xlogy(probs, probs).sum(-1), base)


def kl(p: Tensor, q: Tensor) -> Tensor:  # (..., n) -> (...)
    """Kullback-Leibler divergence of q from p; not symmetric, infinite where q misses a key that p has.

        KL(p || q) = sum_j p_j log(p_j / q_j) >= 0        (M-GEO-2)

    From Kullback and Leibler (1951), On information and sufficiency.

    >>> kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))  # log 2
    tensor(0.6931)
    """
    cross = torch.where(p > 0, p * q.log(), 0.0)
    return (torch.xlogy(p, p) - cross).sum(-1)


def code_length(entropy_nats: Tensor) -> Bounds:
    """Mean bits per key of the best prefix code for keys drawn from the row.

        H / ln 2  <=  length  <  H / ln 2 + 1        (M-ENT-5, M-RMK-4)

    From Shannon (1948), A mathematical theory of communication.

    >>> code_length(entropy(torch.zeros(1024))).lower  # ten bits name one of 1024
    tensor(10.)
    """
    bits = entropy_nats / log(2.0)
    return Bounds(bits, bits + 1.0)


def kl_to_uniform(logits: Tensor, keep: Tensor | None = None) -> Tensor:  # (..., n_key) -> (...)
    """The information a row has already used: how far it is from the uniform law on its visible keys.

        D = log n - H = KL(p || uniform) >= 0,     0 for at most one key        (M-ENT-2)

    >>> kl_to_uniform(torch.tensor([9e9, 0.0, 0.0, 0.0]))  # one-hot among four: log 4
    tensor(1.3863)
    """
    return _visible(logits, keep).clamp(min=1).log() - entropy(logits, keep)


def normalized_entropy(logits: Tensor, keep: Tensor | None = None) -> Tensor:  # (..., n_key) -> (...)
    """Entropy as a fraction of the most it can be.

        H / log n,     NaN for fewer than two keys, where it has no meaning        (M-ENT-2, M-INF-8)

    >>> normalized_entropy(torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]]))
    tensor([1., nan])
    """
    n = _visible(logits, keep)
    return torch.where(n > 1, entropy(logits, keep) / n.clamp(min=2).log(), torch.nan)


def effective_width(logits: Tensor, keep: Tensor | None = None) -> Tensor:
    """How many equally weighted keys would have this entropy; not a rank (see `spectrum.effective_rank`).

        width = exp(H),     1 on an empty row        (M-ENT-4)

    >>> effective_width(torch.tensor([0.0, 0.0, 0.0, -50.0]))
    tensor(3.)
    """
    return entropy(logits, keep).exp()


def effective_sample_size(logits: Tensor, keep: Tensor | None = None) -> Tensor:
    """How many equally weighted keys would average noise as well as this row. 0 on an empty row.

        n_eff = 1 / sum_j p_j^2,     1 <= n_eff <= exp(H) <= n        (M-ENT-4, M-ROB-2)

    >>> effective_sample_size(torch.tensor([1.0, 3.0]).log())  # 1 / (1/16 + 9/16)
    tensor(1.6000)
    """
    z = logits_of(logits, 1.0, None, keep)
    empty = z.isneginf().all(-1)
    z = z.masked_fill(empty[..., None], 0.0)
    size = torch.exp(2.0 * torch.logsumexp(z, -1) - torch.logsumexp(2.0 * z, -1))
    return size.masked_fill(empty, 0.0)


def entropy_lower_bound(scores: Tensor, scale: Number = 1.0, keep: Tensor | None = None) -> Tensor:  # (..., n) -> (...)
    """A certificate from the mean and the maximum alone; never an estimate of H.

        H >= log n - scale * (max s - mean s)        (M-ENT-6)

    Vacuous (negative) once scale * (max - mean) > log n. No bias, scale >= 0.

    >>> entropy_lower_bound(torch.tensor([1.0, -1.0]), 0.5)  # log 2 - 0.5 * 1
    tensor(0.1931)
    """
    require(scale >= 0, f"the bound needs scale >= 0; got {scale}. Negate the scores instead.")
    z = logits_of(scores, 1.0, None, keep)
    n = _visible(scores, keep)
    mean = torch.where(z.isneginf(), 0.0, z).sum(-1) / n.clamp(min=1)
    spread = torch.where(n > 0, z.amax(-1) - mean, 0.0)
    return n.clamp(min=1).log() - scale * spread


def entropy_bounds(gibbs: Gibbs) -> Bounds:  # (..., n_query)
    """What the largest weight alone says about the entropy, streaming.

        -log p_max  <=  H  <=  h(p_max) + (1 - p_max) log(n - 1),        (M-ENT-1, M-SPA-2)

    log p_max = max_score - log_partition, h is the entropy of a coin. Both ends meet for a one-hot and for a uniform
    row. 0 on empty rows.

    >>> bounds = entropy_bounds(partita.Gibbs(torch.zeros(1, 2), torch.zeros(4, 2)))
    >>> [round(x.item(), 4) for x in bounds]  # uniform: log 4 twice
    [1.3863, 1.3863]
    """
    n = gibbs.visible()
    log_top = torch.where(n > 0, gibbs.max_score() - gibbs.log_partition(), 0.0).clamp(max=0.0)
    top = log_top.exp()
    coin = -torch.xlogy(top, top) - torch.xlogy(1.0 - top, 1.0 - top)
    return Bounds(-log_top, coin + (1.0 - top) * (n - 1.0).clamp(min=1.0).log())


def _visible(logits: Tensor, keep: Tensor | None) -> Tensor:
    return (~logits_of(logits, 1.0, None, keep).isneginf()).sum(-1).to(logits.dtype)


def _in_base(nats: Tensor, base: float | None) -> Tensor:
    if base is None:
        return nats
    require(base > 1.0, f"the base of a logarithm must exceed 1; got {base}.")
    return nats / log(base)


class _Ingredients(TypedDict, total=False):
    """What makes a distribution besides query and key."""

    scale: Number
    bias: Tensor | None
    support: Support | None


def streaming_entropy(chunks: Iterable[Tensor]) -> Tensor:  # (...)
    """Entropy of one long row given piece by piece, with the centred recurrence.

        m' = max(m, max z),   c = exp(m - m'),   w = exp(z - m')
        t <- c (t + (m - m') l) + sum w (z - m'),   l <- c l + sum w
        H  = log l - t / l        (M-ENT-3)

    The old l enters t before it is rescaled. Masked logits are -inf. No keys at all give 0.
    The running maximum and sum are those of Milakov and Gimelshein (2018), Online normalizer calculation for softmax.

    >>> streaming_entropy([torch.zeros(3), torch.zeros(5)])  # uniform over 8
    tensor(2.0794)
    """
    peak = mass = first = None
    for z in chunks:
        top = z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:-1], -torch.inf)
        if peak is None or mass is None or first is None:
            peak, mass, first = torch.full_like(top, -torch.inf), torch.zeros_like(top), torch.zeros_like(top)
        new = torch.maximum(peak, top)
        shift = torch.where(peak.isneginf(), 0.0, peak - new)
        ratio = torch.where(peak.isneginf(), 0.0, shift.exp())
        centred = torch.where(z.isneginf(), 0.0, z - new[..., None])
        weight = torch.where(z.isneginf(), 0.0, centred.exp())
        first = ratio * (first + shift * mass) + (weight * centred).sum(-1)
        mass = ratio * mass + weight.sum(-1)
        peak = new
    if mass is None or first is None:
        raise ShapeError("streaming_entropy needs at least one chunk to know the shape of the rows; got none.")
    safe = torch.where(mass > 0, mass, 1.0)
    return safe.log() - first / safe


def collision_log_mass(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    *,
    order: float = 2.0,
    scale: Number = 1.0,
    bias: Tensor | None = None,
    support: Support | None = None,
) -> Tensor:  # (..., n_query)
    """Log of the sum of powers of the weights, streaming: two log-partitions, one at `order` times the scale.

        log sum_j p_j^a = log Z(a z) - a log Z(z),     -inf on an empty row        (M-ENT-4)

    >>> collision_log_mass(torch.zeros(1, 2), torch.zeros(4, 2))  # 4 * (1/4)^2 = 1/4
    tensor([-1.3863])
    """
    once = Gibbs(query, key, scale=scale, bias=bias, support=support)
    more = Gibbs(query, key, scale=order * scale, bias=None if bias is None else order * bias, support=support)
    log_z, log_za = once.log_partition(), more.log_partition()
    return torch.where(log_z.isneginf(), -torch.inf, log_za - order * log_z)


def renyi_entropy(query: Tensor, key: Tensor, *, order: float = 2.0, **ingredients: Unpack[_Ingredients]) -> Tensor:
    """Renyi entropy of every row, streaming; exp of order 2 is the effective sample size.

        H_a = log sum_j p_j^a / (1 - a)        (M-ENT-4, M-SPE-4)

    Order 1 is Shannon's and belongs to `Gibbs.entropy`. 0 on an empty row.
    Shapes and ingredients (scale, bias, support) as for `collision_log_mass`.
    From Renyi (1961), On measures of entropy and information.

    >>> round(renyi_entropy(torch.zeros(1, 2), torch.zeros(4, 2)).exp().item(), 4)  # four equal weights
    4.0
    """
    require(order > 0 and order != 1, f"order must be positive and not 1 (that is Gibbs.entropy); got {order}.")
    log_mass = collision_log_mass(query, key, order=order, **ingredients)
    return torch.where(log_mass.isneginf(), 0.0, log_mass / (1.0 - order))


def floor_gap(width: Number) -> Tensor:
    """The most information a row can use when its logits lie in an interval of this width, whatever n.

        D*(w) = a - 1 - log a,     a = w / (1 - exp(-w))        (M-INF-2)

    So H >= log n - D*(w). w^2 / 8 for small w, w - 1 - log w for large. Cosine scores: w = 2 / temperature.

    >>> round(floor_gap(2.0).item(), 6)  # cosine at temperature 1
    0.474475
    """
    w = not_negative("width is a length", width)
    a = _stretch(w)
    # a - 1 - log a cancels for small w; its series is w^2/8 - w^4/576 (the next term is below 1e-12 at w = 1e-2).
    return torch.where(w < 1e-2, w**2 / 8 - w**4 / 576, a - 1 - a.log())


def entropy_floor_of_width(n: Number, width: Number) -> Tensor:
    """The least entropy of n logits in an interval of this width: k keys at the top, the others at the bottom.

        H_floor = min_k  log(k r + n - k) - w k r / (k r + n - k),     r = exp(w)        (M-INF-2)

    The best k is one of the two integers around n (a - 1) / (r - 1), at least 1. n = 1 gives 0.

    >>> round(entropy_floor_of_width(5, 2.0).item(), 6)
    1.135082
    """
    n, w = together(count(n), not_negative("width is a length", width))
    share = torch.where(w > 1e-6, (_stretch(w) - 1) / torch.expm1(w.clamp(min=1e-6)), 0.5)
    best = (n * share).floor()
    floors = [_two_level(n, w, (best + step).clamp(min=torch.ones_like(n), max=n)) for step in (0.0, 1.0)]
    return torch.minimum(floors[0], floors[1])


def entropy_floor(n: Number, temperature: Number) -> Tensor:
    """The least entropy of a softmax over n cosines at this temperature; close to log n - D*(2 / temperature).

        H_floor(n, w = 2 / temperature)        (M-INF-2, M-INC-6)

    Attainable in any dimension, by keys that are +query and -query. Only for bounded scores: Gaussian ones have 0.

    >>> round(entropy_floor(256, 1.0).item(), 4)  # log 256 - 0.4745
    5.0707
    >>> round(entropy_floor(256, 0.2).item(), 4)
    0.126
    """
    return entropy_floor_of_width(n, 2.0 / above_zero("temperature", temperature))


def max_weight(n: Number, width: Number) -> Tensor:
    """The most weight one of n keys can get when logits lie in an interval of this width.

        p_max = exp(w) / (exp(w) + n - 1)        (M-SCL-18)

    Normalised queries and keys of length sqrt(dim) with scale kappa log n / dim have w = 2 kappa log n: below
    kappa = 1/2 no key can dominate a long row.

    >>> round(max_weight(4096, torch.tensor(4096.0).log()).item(), 4)  # kappa = 1/2: n / (2n - 1)
    0.5001
    """
    return one_hot_bound(n, not_negative("width is a length", width))


def logit_width(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    scale: Number = 1.0,
) -> Tensor:  # (..., n_query)
    """An interval that holds every logit of a row, from lengths alone (Cauchy-Schwarz), in O(n).

        w_i = 2 * scale_i * |query_i| * max_j |key_j|        (M-INF-2, M-SCL-18)

    >>> logit_width(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0], [1.0, 0.0]]), 0.5)  # 2 * 0.5 * 5 * 2
    tensor([10.])
    """
    length_q, length_k = (x.square().sum(-1).sqrt() for x in (query, key))
    return 2.0 * number(scale).abs().to(length_q.dtype) * length_q * length_k.amax(-1, keepdim=True)


def _stretch(w: Tensor) -> Tensor:
    """w / (1 - exp(-w)), 1 at 0."""
    return torch.where(w > 0, w / -torch.expm1(-w.clamp(min=1e-300)), 1.0)


def _two_level(n: Tensor, w: Tensor, k: Tensor) -> Tensor:
    """Entropy of k keys at logit w and n - k at 0. For k = n all are equal: log n."""
    # Relative to the top, so that large w neither overflows nor cancels: u = (n - k) / (k r).
    # A floor of 1e-9 must come out as 1e-9, hence log1p.
    u = (n - k) / k * torch.exp(-w)
    return k.log() + torch.log1p(u) + w * u / (1.0 + u)


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

        d log Z / d scale = E_p[s],    d2 = Var_p(s) >= 0,    d3 = E_p[(s - E s)^3],   0 on an empty row    (M-DER-2)

    >>> [x.item() for x in score_cumulants(torch.tensor([1.0, -1.0]), 0.0)]  # a fair sign
    [0.0, 1.0, 0.0]
    """
    p = gibbs_law(scores, scale=scale, bias=bias, keep=keep).probs
    s = torch.where(p > 0, scores, 0.0)
    mean = (p * s).sum(-1)
    centred = torch.where(p > 0, s - mean[..., None], 0.0)
    return Cumulants(mean, (p * centred**2).sum(-1), (p * centred**3).sum(-1))


def entropy_gradient(logits: Tensor, keep: Tensor | None = None) -> Tensor:  # (..., n_key) -> (..., n_key)
    """Derivative of the entropy of a row with respect to its logits; it sums to 0.

        dH / dz_j = -p_j (log p_j + H) = -p_j (z_j - E_p[z]),     0 at masked keys        (M-DER-3)

    >>> entropy_gradient(torch.tensor([0.0, 0.0]))  # at its maximum, H does not move
    tensor([-0., -0.])
    """
    p = gibbs_law(logits, keep=keep).probs
    return -softmax_vjp(p, torch.where(p > 0, logits, 0.0))


def entropy_scale_derivative(
    scores: Tensor,  # (..., n_key)
    scale: Number = 1.0,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:  # (...)
    """Derivative of the entropy with respect to the scale.

        dH / d scale = -Cov_p(z, s) = -scale * Var_p(s) - Cov_p(b, s)        (M-DER-4)

    Never positive for scale >= 0 without a bias; with a bias it can have either sign, so H is not monotone then.

    >>> entropy_scale_derivative(torch.tensor([1.0, -1.0]), 0.0)  # scale 0 is the maximum
    tensor(-0.)
    """
    p = gibbs_law(scores, scale=scale, bias=bias, keep=keep).probs
    z = torch.where(p > 0, logits_of(scores, scale, bias, keep), 0.0)
    s = torch.where(p > 0, scores, 0.0)
    return -(softmax_vjp(p, z) * s).sum(-1)


def entropy_scale_curvature(
    scores: Tensor,  # (..., n_key)
    scale: Number = 1.0,
    keep: Tensor | None = None,
) -> Tensor:  # (...)
    """Second derivative of the entropy with respect to the scale, without bias.

        d2H / d scale2 = -Var_p(s) - scale * E_p[(s - E s)^3]        (M-DER-4)

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

        dH / d temperature = Var_p(s) / temperature^3 >= 0        (M-DER-4, M-TMP-2)

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

        dp_j / d scale = p_j (s_j - E_p[s]),     by the temperature -scale^2 times that        (M-DER-5)

    >>> weight_scale_derivative(torch.tensor([1.0, -1.0]), 0.0)
    tensor([ 0.5000, -0.5000])
    """
    p = gibbs_law(scores, scale=scale, bias=bias, keep=keep).probs
    return softmax_vjp(p, torch.where(p > 0, scores, 0.0))


def entropy_scale_slope(gibbs: Gibbs) -> Tensor:  # (..., n_query)
    """Derivative of every row's entropy with respect to its scale, from the variance a streaming pass has anyway.

        dH / d scale = -Var_p(z) / scale,      z = scale * <query, key>        (M-DER-4)

    Not for scale 0, where the slope is 0 and this 0/0; refused with a bias or a softcap, where it is not the slope.

    >>> p = partita.Gibbs(torch.ones(1, 1), torch.tensor([[1.0], [1.0]]))
    >>> entropy_scale_slope(p).abs().item()  # equal scores
    0.0
    """
    plain = gibbs.bias is None and gibbs.softcap is None
    require(plain, "the slope is -Var / scale only for plain scores: no bias and no softcap.")
    variance = gibbs.score_variance()
    return -variance / number(gibbs.scale).to(variance.dtype)
