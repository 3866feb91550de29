"""What rows have learned and could learn; mutual information, total correlation, the bottleneck.

A table is a tensor of probabilities with one axis per variable, small enough to hold.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.metrics import InformationBound as InformationBound
from partita.metrics import mutual_information_bound as mutual_information_bound
from partita_theory._domain import Number, above_zero, count, number, require, where
from partita_theory.information.shannon import entropy, entropy_floor_of_width, entropy_gradient, entropy_of, kl
from partita_theory.law import gibbs_law


class Budget(NamedTuple):
    """Where a row's entropy stands between the least and the most it can be."""

    entropy: Tensor
    floor: Tensor
    ceiling: Tensor
    used: Tensor
    remaining: Tensor


def information_budget(gibbs: Gibbs, width: Number | None = None) -> Budget:  # fields (..., n_query)
    """Entropy of every row with its floor and ceiling, streaming.

        ceiling = log n,    used = log n - H,    remaining = H - floor(n, width)        (M-INF-1, M-INF-2)

    `width` is the length of an interval that holds the logits (cosine: 2 / temperature; see `logit_width`);
    None means unbounded logits, with floor 0. At initialisation `remaining` is the learnable information.
    Empty rows are 0 throughout.

    >>> b = information_budget(partita.Gibbs(torch.zeros(1, 2), torch.zeros(256, 2)), width=2.0)
    >>> round(b.remaining.item(), 4)  # uniform rows of cosine scores at temperature 1 can still lose 0.4745 nats
    0.4745
    """
    n, h = gibbs.visible(), gibbs.entropy()
    ceiling = n.clamp(min=1).log()
    floor = torch.zeros_like(h) if width is None else entropy_floor_of_width(n.clamp(min=1), width).to(h.dtype)
    return Budget(h, floor, ceiling, ceiling - h, h - floor)


def expected_init_entropy(n: Number, sharpness: Number) -> Tensor:
    """Entropy to expect from independent Gaussian scores, as at initialisation.

        H = log n - sharpness^2 / 2,      sharpness = scale * (sd of the scores over a row's keys)   (M-INF-3, M-SCL-12)

    Good to a few per cent of the gap while sharpness < 0.6 sqrt(2 log n); refused at sqrt(2 log n) and above, where
    the row has condensed on a few keys and gradients are dead.

    >>> round(expected_init_entropy(1024, 1.0).item(), 4)  # 6.9315 - 0.5
    6.4315
    """
    n, x = count(n), number(sharpness)
    limit = (2 * n.log()).sqrt()
    require(
        (x < limit) | (x == 0),
        f"sharpness {x} is at or beyond sqrt(2 log n) = {limit}: the row has condensed; "
        "see sharpness.condensed_entropy.",
    )
    return n.log() - x**2 / 2


def sharpness_of_cosine(dim: int, temperature: Number) -> Tensor:
    """Sharpness of cosines between random directions: they have standard deviation 1 / sqrt(dim).

        sharpness = 1 / (temperature * sqrt(dim)),     log n - H = 1 / (2 temperature^2 dim)        (M-INF-3)

    >>> round((sharpness_of_cosine(128, 0.07) ** 2 / 2).item(), 3)  # gap to log n
    0.797
    """
    t = above_zero("temperature", temperature)
    require(dim >= 1, f"dim must be at least 1; got {dim}.")
    return 1.0 / (t * number(dim).sqrt())


def entropy_penalty_gradient(
    logits: Tensor,  # (..., n_key)
    weight: Number,
    target: Number | None = None,
) -> Tensor:  # (..., n_key)
    """Gradient on the logits of an entropy term that is added to a loss; descending -weight * H spreads rows.

        -weight * H              (target None)   ->   + weight * p (log p + H)
        weight * (H - target)^2                  ->   - 2 weight (H - target) p (log p + H)        (M-INF-5)

    >>> entropy_penalty_gradient(torch.tensor([1.0, 3.0]).log(), 1.0)  # descent raises the lighter key
    tensor([-0.2060,  0.2060])
    """
    slope = number(weight).to(logits.dtype) * entropy_gradient(logits)
    return -slope if target is None else 2.0 * (entropy(logits)[..., None] - target) * slope


def selectivity(
    entropy: Tensor,  # (...)
    visible: Tensor,  # (...)
    *,
    flat: float = 0.99,
    sharp: float = 0.01,
) -> Tensor:  # (...) int
    """Which rows choose nothing (+1), which have stopped choosing (-1), which are in between (0).

        +1 if H / log n > flat,    -1 if H / log n < sharp,    0 otherwise and for n <= 1        (M-INF-8)

    >>> selectivity(torch.tensor([1.386, 0.7, 0.001]), torch.tensor([4, 4, 4]))
    tensor([ 1,  0, -1])
    """
    n = visible.to(entropy.dtype)
    fraction = entropy / n.clamp(min=2).log()
    flags = (fraction > flat).to(torch.int64) - (fraction < sharp).to(torch.int64)
    return torch.where(n > 1, flags, 0)


def candidates_needed(information: Number, slack: float = 0.5) -> Tensor:
    """How many candidates a batch needs before the cap stops hiding this much information.

        n = ceil(exp(information + slack))        (M-INC-2)

    >>> candidates_needed(3.321).item()  # exp(3.821) = 45.65
    46.0
    """
    return torch.exp(number(information) + slack).ceil()


def gaussian_information(correlation: Number, dim: int = 1) -> Tensor:
    """Mutual information of two Gaussian vectors whose matching coordinates have this correlation.

        I = -dim/2 * log(1 - rho^2),     infinite at |rho| = 1        (M-INC-2)

    >>> round(gaussian_information(0.6).item(), 4)  # -log(0.8)
    0.2231
    """
    rho = number(correlation)
    require(rho.abs() <= 1, f"a correlation lies in [-1, 1]; got {rho}.")
    return -0.5 * dim * torch.log1p(-(rho**2))


def optimal_gaussian_critic(x: Tensor, y: Tensor, correlation: float) -> Tensor:  # (..., n_x, d), (..., n_y, d)
    """The log density ratio log p(x|y) / p(x) of correlated Gaussians: the critic with which InfoNCE is tight.

        f(x, y) = sum_d [ -log(1 - rho^2)/2 - (x - rho y)^2 / (2 (1 - rho^2)) + x^2 / 2 ]        (M-INC-2)

    Every x with every y, (..., n_x, n_y); leading dimensions broadcast.

    >>> optimal_gaussian_critic(torch.zeros(1, 1), torch.zeros(1, 1), 0.6)  # -log(0.8)
    tensor([[0.2231]])
    """
    rho2 = correlation**2
    require(rho2 < 1, f"the critic needs |correlation| < 1; got {correlation}.")
    gap = x[..., :, None, :] - correlation * y[..., None, :, :]
    constant = 0.5 * x.shape[-1] * math.log1p(-rho2)  # log(1 - rho^2), accurate near 0
    return -constant - gap.square().sum(-1) / (2 * (1 - rho2)) + x.square().sum(-1)[..., :, None] / 2


def token_information_gain(cross_entropy: Number, marginal_entropy: Number) -> Tensor:
    """What a language model's loss implies about the information between token and context.

        I(token; context) >= H(token) - cross_entropy        (M-LOSS-11)

    The whole vocabulary is enumerated and nothing is sampled from the marginal, so log(vocabulary) - cross_entropy is
    not a bound: for an independent context it reports log(vocabulary) - H(token) where there is nothing.

    >>> token_information_gain(2.0, 5.0).item()
    3.0
    """
    return number(marginal_entropy) - number(cross_entropy)


def marginals(table: Tensor) -> list[Tensor]:
    """The law of each variable on its own.

        P_t(x_t) = sum over all other axes        (M-GEO-6)

    >>> marginals(torch.tensor([[0.5, 0.0], [0.25, 0.25]]))
    [tensor([0.5000, 0.5000]), tensor([0.7500, 0.2500])]
    """
    axes = range(table.dim())
    return [table.sum([a for a in axes if a != t]) if table.dim() > 1 else table for t in axes]


def product_of_marginals(table: Tensor) -> Tensor:
    """The table of independent variables with the same marginals: positions resampled across sequences, not shuffled.

        Q(x) = prod_t P_t(x_t)        (M-GEO-6)

    >>> product_of_marginals(torch.tensor([[0.5, 0.0], [0.0, 0.5]]))
    tensor([[0.2500, 0.2500],
            [0.2500, 0.2500]])
    """
    out = torch.ones((), dtype=table.dtype, device=table.device)
    for m in marginals(table):
        out = out[..., None] * m
    return out


def total_correlation(table: Tensor) -> Tensor:
    """How far a table is from independence.

        TC = sum_t H(x_t) - H(x) = KL(P || product of marginals) = sum_{t>=2} I(x_t; x_<t)        (M-GEO-6)

    From Watanabe (1960), Information theoretical analysis of multivariate correlation.

    >>> xor = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]) / 4
    >>> total_correlation(xor)  # log 2
    tensor(0.6931)
    """
    _check(table)
    return torch.stack([entropy_of(m) for m in marginals(table)]).sum() - entropy_of(table.flatten())


def conditional_entropies(table: Tensor) -> Tensor:  # (variables,)
    """What is still unknown about each variable once all others are known.

        H(x_t | x_-t) = H(x) - H(x_-t)        (M-GEO-6)

    >>> conditional_entropies(torch.full((2, 2), 0.25))  # independent coins
    tensor([0.6931, 0.6931])
    """
    _check(table)
    joint = entropy_of(table.flatten())
    return torch.stack([joint - entropy_of(table.sum(t).flatten()) for t in range(table.dim())])


def dual_total_correlation(table: Tensor) -> Tensor:
    """The part of the joint entropy that is not private to any variable.

        DTC = H(x) - sum_t H(x_t | x_-t)        (M-GEO-6)

    From Han (1978), Nonnegative entropy measures of multivariate symmetric correlations.

    >>> xor = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]) / 4
    >>> dual_total_correlation(xor)  # 2 log 2: no variable is free given the two others
    tensor(1.3863)
    """
    return entropy_of(table.flatten()) - conditional_entropies(table).sum()


def mutual_information_sum(table: Tensor) -> Tensor:
    """What each variable shares with all others, summed: more than the total correlation.

        sum_t I(x_t; x_-t) = TC + DTC        (M-GEO-6)

    >>> xor = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]) / 4
    >>> mutual_information_sum(xor)  # 3 log 2
    tensor(2.0794)
    """
    single = torch.stack([entropy_of(m) for m in marginals(table)])
    return (single - conditional_entropies(table)).sum()


def prefix_information(table: Tensor) -> Tensor:
    """What each variable shares with those before it, summed: the chain rule of the total correlation.

        sum_{t>=2} I(x_t; x_<t) = TC        (M-GEO-6)

    >>> xor = torch.tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]) / 4
    >>> prefix_information(xor)
    tensor(0.6931)
    """
    _check(table)
    total = torch.zeros((), dtype=table.dtype, device=table.device)
    for t in range(1, table.dim()):
        head = table.sum(list(range(t + 1, table.dim()))) if t + 1 < table.dim() else table
        total = total + mutual_information_table(head.flatten(0, t - 1))
    return total


def mutual_information_table(joint: Tensor) -> Tensor:  # joint (n_x, n_y)
    """Mutual information of two discrete variables from their joint table.

        I(X; Y) = H(X) + H(Y) - H(X, Y)        (M-GEO-6, M-INF-7)

    >>> mutual_information_table(torch.eye(4) / 4)  # log 4
    tensor(1.3863)
    """
    return entropy_of(joint.sum(-1)) + entropy_of(joint.sum(-2)) - entropy_of(joint.flatten(-2))


def _check(table: Tensor) -> None:
    require(
        (table >= 0).all() & ((table.sum() - 1).abs() < 1e-5), "a table holds probabilities: >= 0 and summing to 1."
    )


class Bottleneck(NamedTuple):
    """What an encoder keeps, what of it is relevant, and the trade-off between the two."""

    objective: Tensor
    kept: Tensor
    relevant: Tensor


def bottleneck_objective(
    encoder: Tensor,  # (n_x, n_z), rows p(z|x)
    joint: Tensor,  # (n_x, n_y), p(x, y)
    beta: Number,
) -> Bottleneck:
    """The information-bottleneck objective of an encoder z of x that should tell about y.

        I(Z; X) - beta * I(Z; Y),     Z - X - Y a Markov chain,     0 if the encoder ignores x        (M-INF-7)

    >>> b = bottleneck_objective(torch.eye(2), torch.eye(2) / 2, beta=3.0)  # keep all: log 2 - 3 log 2
    >>> round(b.objective.item(), 4)
    -1.3863
    """
    require((encoder.sum(-1) - 1).abs().max() < 1e-5, "each row of encoder is a law p(z|x) and must sum to 1.")
    p_x = joint.sum(-1)
    kept = mutual_information_table(p_x[:, None] * encoder)
    relevant = mutual_information_table(encoder.T @ joint)
    return Bottleneck(kept - number(beta).to(kept.dtype) * relevant, kept, relevant)


def bottleneck_step(encoder: Tensor, joint: Tensor, beta: Number) -> Tensor:  # (n_x, n_z)
    """One self-consistent update of the encoder, itself a softmax with scale beta; it never raises the objective.

        p(z|x) = p(z) exp(-beta * KL(p(y|x) || p(y|z))) / Z(x)        (M-INF-7)

    From Tishby, Pereira and Bialek (1999), The information bottleneck method.

    >>> bottleneck_step(torch.full((2, 2), 0.5), torch.eye(2) / 2, 1.0)  # an encoder that ignores x is a fixed point
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    p_x = joint.sum(-1)
    p_z = p_x @ encoder
    y_of_x = joint / p_x[:, None]
    y_of_z = (encoder.T @ joint) / p_z[:, None].clamp(min=1e-300)
    divergence = kl(y_of_x[:, None], y_of_z[None])
    return gibbs_law(-divergence, scale=beta, bias=p_z.log()[None, :].expand_as(divergence)).probs


def solve_bottleneck(
    joint: Tensor,  # (n_x, n_y)
    n_z: int,
    beta: Number,
    *,
    steps: int = 500,
    generator: torch.Generator | None = None,
) -> Tensor:  # (n_x, n_z)
    """An encoder that the update leaves alone, from a random start: a local optimum, blind to x below a critical beta.

        encoder <- bottleneck_step(encoder)        `steps` times        (M-INF-7)

    >>> e = solve_bottleneck(torch.eye(2, dtype=torch.float64) / 2, 2, 8.0, generator=torch.Generator().manual_seed(0))
    >>> round(bottleneck_objective(e, torch.eye(2, dtype=torch.float64) / 2, 8.0).kept.item(), 4)  # all of it: log 2
    0.6931
    """
    require(n_z >= 1, f"n_z counts the values of the code, so n_z >= 1; got {n_z}.")
    start = torch.rand(joint.shape[0], n_z, generator=generator, dtype=joint.dtype, device=where(generator))
    start = start.to(joint.device) + 0.1
    encoder = start / start.sum(-1, keepdim=True)
    for _ in range(steps):
        encoder = bottleneck_step(encoder, joint, beta)
    return encoder


def attention_information(
    probs: Tensor,  # (..., n)
    value_variance: Number = 1.0,
    noise_variance: Number = 1.0,
) -> Tensor:  # (...)
    """What an output tells about independent Gaussian values, per coordinate, when noise is added to it.

        I(o; V) = log(1 + |p|^2 * value_variance / noise_variance) / 2        (M-INF-7)

    Spreading the weights *reduces* it: a uniform row averages the values away. Row entropy is another thing.

    >>> round(attention_information(torch.tensor([1.0, 0.0]), 1.0, 1.0).item(), 4)  # log(2) / 2
    0.3466
    """
    noise = number(noise_variance)
    require(noise > 0, f"noise_variance must be positive, else the information is infinite; got {noise}.")
    ratio = (number(value_variance) / noise).to(probs.dtype)
    return 0.5 * torch.log1p(probs.square().sum(-1) * ratio)
