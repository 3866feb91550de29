"""The parts of an attention layer: backward pass, positions, normalisation, cost."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita_theory._domain import Number, number, per_row, public, require
from partita_theory.law import gibbs_law, softmax_vjp


class AttentionGradients(NamedTuple):
    """Gradients of a loss through out = softmax(scale * Q K^T + bias) V."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor  # (..., n_query, n_key)
    scale: Tensor  # (..., n_query)


def attention_backward(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    value: Tensor,  # (..., n_key, dim_value)
    grad: Tensor,  # (..., n_query, dim_value)
    *,
    scale: Number = 1.0,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> AttentionGradients:
    """Gradients with respect to everything attention is made of. Rows without keys contribute 0.

        dV = A^T G,   dA = G V^T,   dZ = A * (dA - rowsum(A * dA)),   db = dZ
        dS = scale dZ,   dscale_i = sum_j dZ_ij s_ij,   dQ = dS K,   dK = dS^T Q        (M-DER-6)

    >>> g = attention_backward(torch.ones(1, 1), torch.ones(2, 1), torch.ones(2, 1), torch.ones(1, 1))
    >>> g.query.item(), g.value.squeeze().tolist()  # equal values: the scores do not matter
    (0.0, [0.5, 0.5])
    """
    scores = query @ key.mT
    weights = gibbs_law(scores, scale=scale, bias=bias, keep=keep).probs
    dz = softmax_vjp(weights, grad @ value.mT)
    ds = per_row(scale, dz) * dz
    return AttentionGradients(ds @ key, ds.mT @ query, weights.mT @ grad, dz, (dz * scores).sum(-1))


def projection_gradients(inputs: Tensor, grad: Tensor) -> Tensor:  # (..., n, dim_model), (..., n, dim)
    """Gradient of a projection from that of what it produced; a product, not a chain of matrices.

        dW = X^T dQ        (M-DER-6)

    >>> projection_gradients(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]))
    tensor([[11.]])
    """
    return inputs.transpose(-1, -2) @ grad


def query_gradient(
    probs: Tensor,  # (..., n_key)
    key: Tensor,  # (n_key, dim)
    value: Tensor,  # (n_key, dim_value)
    grad: Tensor,  # (..., dim_value)
    scale: float = 1.0,
) -> Tensor:  # (..., dim)
    """Gradient of <grad, out> by one query: a covariance under its weights.

        scale * Cov_p(key, <grad, value>)        (M-DER-6)

    >>> sign = torch.tensor([[1.0], [-1.0]])
    >>> query_gradient(torch.tensor([0.5, 0.5]), sign, sign, torch.ones(1))  # variance of a fair sign
    tensor([1.])
    """
    return scale * softmax_vjp(probs, grad @ value.mT) @ key


class ScoreParts(NamedTuple):
    """The four terms of a score whose query and key carry positions."""

    content: Tensor
    content_position: Tensor
    position_content: Tensor
    position: Tensor

    @property
    def total(self) -> Tensor:
        """Their sum, the score."""
        return self.content + self.content_position + self.position_content + self.position


def sinusoidal_positions(n: int, dim: int, base: float = 10000.0) -> Tensor:  # (n, dim)
    """Absolute position vectors of length sqrt(dim / 2).

        p_{i,2k} = sin(i w_k),    p_{i,2k+1} = cos(i w_k),    w_k = base^(-2k/dim)        (M-ATT-10)

    From Vaswani et al. (2017), Attention is all you need.

    >>> sinusoidal_positions(1, 4)
    tensor([[0., 1., 0., 1.]], dtype=torch.float64)
    """
    angle = torch.arange(n, dtype=torch.float64, device="cpu")[:, None] * _frequencies(dim, base)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def sinusoidal_similarity(lag: Tensor, dim: int, base: float = 10000.0) -> Tensor:  # (...)
    """Inner product of two sinusoidal positions: a function of their distance, falling on average but oscillating.

        <p_i, p_j> = sum_k cos((i - j) w_k),     dim / 2 at lag 0        (M-ATT-10)

    >>> sinusoidal_similarity(torch.tensor(0), 64).item()
    32.0
    """
    return torch.cos(lag.double()[..., None] * _frequencies(dim, base)).sum(-1)


def score_parts(query: Tensor, key: Tensor, position_q: Tensor, position_k: Tensor) -> ScoreParts:
    """A score with positions added to query and key, term by term; the usual model adds them before the projections.

        <q + p_i, k + p_j> = q.k + q.p_j + p_i.k + p_i.p_j        (M-ATT-10)

    >>> score_parts(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([4.0])).total  # 4 * 6
    tensor(24.)
    """
    return ScoreParts(
        (query * key).sum(-1),
        (query * position_k).sum(-1),
        (position_q * key).sum(-1),
        (position_q * position_k).sum(-1),
    )


def distance_bias(n_query: int, n_key: int, slope: float) -> Tensor:  # (n_query, n_key)
    """A linear penalty on distance, to be added to scaled scores; its effect on entropy has no fixed sign.

        b_ij = -slope * |i - j|        (M-ATT-9)

    From Press, Smith and Lewis (2022), Train short, test long: attention with linear biases enables input length
    extrapolation.

    >>> distance_bias(1, 3, 0.5)
    tensor([[-0.0000, -0.5000, -1.0000]], dtype=torch.float64)
    """
    i, j = (torch.arange(n, dtype=torch.float64, device="cpu") for n in (n_query, n_key))
    return -slope * (i[:, None] - j[None, :]).abs()


def _frequencies(dim: int, base: float) -> Tensor:
    require(dim >= 2 and dim % 2 == 0, f"sinusoidal positions need an even dim of at least 2; got {dim}.")
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


def layer_norm(x: Tensor, eps: float = 1e-5) -> Tensor:  # (..., dim)
    """Subtract the mean, divide by the standard deviation; the result has length close to sqrt(dim).

        (x - mean) / sqrt(var + eps),       var divided by dim, not dim - 1        (M-RMK-2)

    Equal to ``F.layer_norm(x, x.shape[-1:], eps=eps)``. A constant vector gives 0.
    From Ba, Kiros and Hinton (2016), Layer normalization.

    >>> layer_norm(torch.full((4,), 3.0))
    tensor([0., 0., 0., 0.])
    """
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:  # (..., dim)
    """Divide by the root mean square.

        x / sqrt(mean(x^2) + eps)        (M-RMK-2)

    Equal to ``F.rms_norm(x, x.shape[-1:], eps=eps)``. The zero vector gives 0.
    From Zhang and Sennrich (2019), Root mean square layer normalization.

    >>> rms_norm(torch.zeros(3))
    tensor([0., 0., 0.])
    """
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def qk_norm_width(dim: Number, scale: Number) -> Tensor:
    """The interval in which logits lie when query and key are normalised to length sqrt(dim).

        |s| <= dim,    width = 2 * scale * dim        (M-RMK-2, M-SCL-18)

    From Henry, Dachapally, Pawar and Chen (2020), Query-key normalization for transformers.

    >>> qk_norm_width(64, 0.125).item()  # 1/sqrt(dim): 2 sqrt(dim)
    16.0
    """
    return 2 * number(scale) * number(dim)


class Cost(NamedTuple):
    """Multiply-adds of one sequence through one layer, and numbers stored if the weights are kept."""

    scores: int
    values: int
    projections: int
    stored_weights: int

    @property
    def attention(self) -> int:
        """Scores and values together."""
        return self.scores + self.values


def attention_cost(n: int, dim_model: int, heads: int = 1, *, n_key: int | None = None) -> Cost:
    """Multiply-adds of dense multi-head attention with dim = dim_model / heads.

        scores = values = n n_key dim_model,  projections = 4 n dim_model^2,  stored weights = n n_key heads  (M-ATT-13)

    Tiled evaluation stores O(n) instead. Sparse supports replace n * n_key by the number of visible pairs.

    >>> c = attention_cost(512, 512)
    >>> c.projections // 10**6, c.attention // 10**6
    (536, 268)
    """
    require(
        heads >= 1 and dim_model % heads == 0, f"heads must divide dim_model; got {heads} heads, dim_model {dim_model}."
    )
    keys = n if n_key is None else n_key
    product = n * keys * dim_model
    return Cost(product, product, 4 * n * dim_model**2, n * keys * heads)


def balance_length(dim_model: int) -> int:
    """The length at which attention costs as much as its projections; below it the projections dominate.

        n = 2 * dim_model        (M-ATT-13)

    >>> balance_length(512)
    1024
    """
    return 2 * dim_model


__all__ = public(globals())
