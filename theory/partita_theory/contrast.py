"""InfoNCE and noise-contrastive estimation: losses, gradients, curvature."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from partita_theory._domain import Number, above_zero, number, public, require
from partita_theory.law import softmax_jacobian


class InfoNCEGradients(NamedTuple):
    """Derivatives of one InfoNCE loss with respect to each of its arguments."""

    query: Tensor  # (..., dim)
    keys: Tensor  # (..., n, dim); the row of the positive is the pull, the others are pushes
    scores: Tensor  # (..., n), by similarity
    temperature: Tensor  # (...)
    scale: Tensor  # (...)


class BatchGradients(NamedTuple):
    """Derivatives of the mean loss of a batch of pairs."""

    queries: Tensor  # (B, dim)
    keys: Tensor  # (B, dim)


def info_nce(
    query: Tensor,  # (..., dim)
    keys: Tensor,  # (..., n, dim)
    positive: int = 0,
    *,
    temperature: Number = 1.0,
) -> Tensor:  # (...)
    """InfoNCE of one query: cross entropy over its n candidates, one of which is the positive.

        loss = -log( exp(s_+ / t) / sum_j exp(s_j / t) ),     s_j = <query, key_j>        (M-INC-1, M-GIB-7)

    The anchor itself is not a candidate. Between 0 and, for equal scores, log n.
    From van den Oord, Li and Vinyals (2018), Representation learning with contrastive predictive coding.

    >>> info_nce(torch.zeros(2), torch.zeros(8, 2))  # log 8
    tensor(2.0794)
    """
    z = _scores(query, keys) / above_zero("temperature", temperature, query.dtype)
    return torch.logsumexp(z, -1) - z[..., positive]


def candidates_in_batch(batch: int, *, views: int = 1) -> int:
    """How many candidates an anchor of a batch has, its positive included: the n of the mutual-information bound.

        two towers: B        two views of B items as 2B anchors: 2B - 1        (M-INC-1)

    >>> candidates_in_batch(8), candidates_in_batch(8, views=2)
    (8, 15)
    """
    require(views in (1, 2), f"views is 1 (two towers) or 2 (two views as anchors); got {views}.")
    require(batch >= 1, f"batch must be at least 1; got {batch}.")
    return batch if views == 1 else 2 * batch - 1


def info_nce_gradients(
    query: Tensor,  # (..., dim)
    keys: Tensor,  # (..., n, dim)
    positive: int = 0,
    *,
    temperature: Number = 1.0,
) -> InfoNCEGradients:
    """Every derivative of InfoNCE in closed form, with P = softmax(s / t).

        d/dq   = (E_P[k] - k_+) / t = (1 - P_+) (mean negative - k_+) / t
        d/dk_+ = -(1 - P_+) q / t,      d/dk_m = P_m q / t
        d/ds_j = (P_j - [j = +]) / t,   d/dt = (s_+ - E_P[s]) / t^2,    d/d(1/t) = E_P[s] - s_+        (M-INC-3)

    The pull on the positive is weighted by 1 - P_+, not by P_+. Query and keys are independent leaves.

    >>> g = info_nce_gradients(torch.tensor([1.0]), torch.tensor([[0.0], [0.0]]))
    >>> g.keys.squeeze()  # pull -1/2, push +1/2
    tensor([-0.5000,  0.5000])
    """
    t = above_zero("temperature", temperature, query.dtype)
    s = _scores(query, keys)
    p = torch.softmax(s / t, -1)
    residual = p.clone()
    residual[..., positive] = -(p.sum(-1) - p[..., positive])  # P_+ - 1, without cancelling
    residual = residual / t
    scale = (p * s).sum(-1) - s[..., positive]
    return InfoNCEGradients(
        (residual[..., None] * keys).sum(-2), residual[..., None] * query[..., None, :], residual, -scale / t**2, scale
    )


def info_nce_batch_gradients(
    queries: Tensor,  # (B, dim)
    keys: Tensor,  # (B, dim)
    *,
    temperature: Number = 1.0,
    symmetric: bool = False,
) -> BatchGradients:
    """Gradients of the mean in-batch loss: row i's positive is column i, all other columns are negatives.

        d/dQ = (P - I) K / (B t),      d/dK = (P - I)^T Q / (B t)        (M-INC-4)

    Symmetric averages rows and columns. Equal items in a batch are false negatives.

    >>> g = info_nce_batch_gradients(torch.ones(1, 1), torch.ones(1, 1))
    >>> g.queries.item()  # a single pair has nothing to contrast with
    0.0
    """
    t = above_zero("temperature", temperature, queries.dtype)
    z = queries @ keys.T / t
    residual = torch.softmax(z, -1) - torch.eye(len(z), dtype=z.dtype, device=z.device)
    if symmetric:
        residual = (residual + torch.softmax(z, 0) - torch.eye(len(z), dtype=z.dtype, device=z.device)) / 2
    residual = residual / (len(z) * t)
    return BatchGradients(residual @ keys, residual.T @ queries)


def normalized_gradient(vector: Tensor, gradient: Tensor, eps: float = 1e-12) -> Tensor:  # (..., dim)
    """Carry a gradient by the unit vector q = u / |u| back to u: only the part across u is left.

        d/du = (I - q q^T) (d/dq) / |u|        (M-INC-6)

    >>> normalized_gradient(torch.tensor([2.0, 0.0]), torch.tensor([5.0, 4.0]))
    tensor([0., 2.])
    """
    length = vector.square().sum(-1, keepdim=True).sqrt().clamp(min=eps)
    unit = vector / length
    return (gradient - unit * (unit * gradient).sum(-1, keepdim=True)) / length


def hardness_weights(
    query: Tensor,  # (..., dim)
    keys: Tensor,  # (..., n, dim)
    positive: int = 0,
    *,
    temperature: Number = 1.0,
) -> Tensor:  # (..., n)
    """How the push is shared among the negatives: at low temperature the hardest takes it all.

        P_m / (1 - P_+),     0 at the positive        (M-INC-7)

    The length of the gradient itself is *not* monotone in the temperature.
    From Wang and Liu (2021), Understanding the behaviour of contrastive loss.

    >>> hardness_weights(torch.tensor([1.0]), torch.tensor([[9.0], [0.0], [0.0]]))
    tensor([0.0000, 0.5000, 0.5000])
    """
    z = _scores(query, keys) / above_zero("temperature", temperature, query.dtype)
    z[..., positive] = -torch.inf
    return torch.softmax(z, -1)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    return (keys @ query[..., None]).squeeze(-1)


def info_nce_hessian_query(query: Tensor, keys: Tensor, temperature: Number = 1.0) -> Tensor:  # (dim, dim)
    """Second derivative by the query, positive semidefinite: the covariance of the candidates, whatever the positive.

        Cov_P(k) / t^2        (M-INC-5)

    >>> info_nce_hessian_query(torch.zeros(1), torch.tensor([[1.0], [-1.0]]))
    tensor([[1.]])
    """
    t, p = _law(query, keys, temperature)
    return keys.T @ softmax_jacobian(p) @ keys / t**2


def info_nce_hessian_keys(query: Tensor, keys: Tensor, temperature: Number = 1.0) -> Tensor:  # (n * dim, n * dim)
    """Second derivative by the flattened (row-major) keys. Positive semidefinite, of rank at most n - 1.

        J(P) kron q q^T / t^2        (M-INC-5)

    >>> info_nce_hessian_keys(torch.tensor([2.0]), torch.zeros(2, 1))  # 4 J
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    t, p = _law(query, keys, temperature)
    return torch.kron(softmax_jacobian(p), torch.outer(query, query)) / t**2


def info_nce_hessian_mixed(
    query: Tensor, keys: Tensor, positive: int = 0, temperature: Number = 1.0
) -> Tensor:  # (n, dim, dim)
    """Mixed derivative, first by key m, then by the query.

        (P_m - [m = +]) I / t + P_m q (k_m - E_P[k])^T / t^2        (M-INC-5)

    >>> info_nce_hessian_mixed(torch.zeros(1), torch.zeros(2, 1)).squeeze()
    tensor([-0.5000,  0.5000])
    """
    t, p = _law(query, keys, temperature)
    residual = p.clone()
    residual[positive] = residual[positive] - 1
    eye = torch.eye(len(query), dtype=query.dtype, device=query.device)
    centred = keys - p @ keys
    return residual[:, None, None] * eye / t + p[:, None, None] * query[:, None] * centred[:, None, :] / t**2


def info_nce_hessian_joint(query: Tensor, keys: Tensor, positive: int = 0, temperature: Number = 1.0) -> Tensor:
    """The whole second derivative by (query, flattened keys): indefinite in general.

        [[ H_qq, M^T ], [ M, H_kk ]]        (M-INC-5)

    >>> h = info_nce_hessian_joint(torch.zeros(1), torch.zeros(2, 1))
    >>> round(torch.linalg.eigvalsh(h)[0].item(), 4)  # -sqrt(1/2): a saddle
    -0.7071
    """
    mixed = info_nce_hessian_mixed(query, keys, positive, temperature).flatten(0, 1)  # (n * dim, dim)
    top = torch.cat([info_nce_hessian_query(query, keys, temperature), mixed.T], 1)
    return torch.cat([top, torch.cat([mixed, info_nce_hessian_keys(query, keys, temperature)], 1)], 0)


def _law(query: Tensor, keys: Tensor, temperature: Number) -> tuple[Tensor, Tensor]:
    t = number(temperature).to(query.dtype)
    return t, torch.softmax(keys @ query / t, -1)


def nce_logits(log_model: Tensor, log_noise: Tensor, ratio: Number = 1.0) -> Tensor:
    """The log-odds that a sample is data, when there are `ratio` noise samples for each datum.

        h = f(x) - log(ratio) - log p_noise(x)        (M-NCE-1, M-NCE-3)

    >>> nce_logits(torch.tensor(0.0), torch.tensor(0.5).log(), 2.0)  # model 1 against noise 2 * 1/2
    tensor(0.)
    """
    k = number(ratio).to(log_model.dtype)
    require(k > 0, f"ratio is noise samples per datum and must be positive; got {k}.")
    return log_model - k.log() - log_noise


def nce_posterior(log_model: Tensor, log_noise: Tensor, ratio: Number = 1.0) -> Tensor:
    """The probability that a sample is data.

        m / (m + ratio * p_noise) = sigmoid(h),      m = exp(f)        (M-NCE-1)

    From Gutmann and Hyvarinen (2010), Noise-contrastive estimation: a new estimation principle for unnormalized
    statistical models.

    >>> nce_posterior(torch.tensor(3.0).log(), torch.tensor(1.0).log(), 1.0)  # 3 / (3 + 1)
    tensor(0.7500)
    """
    return torch.sigmoid(nce_logits(log_model, log_noise, ratio))


def nce_sample_loss(data_logits: Tensor, noise_logits: Tensor) -> Tensor:  # (N,), (N, k) -> (N,)
    """Loss of each datum and its k noise samples, the noise summed.

        -log sigmoid(h_data) - sum_noise log(1 - sigmoid(h_noise))        (M-NCE-2)

    (1 + k) times the mean binary cross entropy of the k + 1 decisions.

    >>> nce_sample_loss(torch.zeros(1), torch.zeros(1, 3))  # 4 log 2
    tensor([2.7726])
    """
    return -logsigmoid(data_logits) - logsigmoid(-noise_logits).sum(-1)


def nce_gradients(data_logits: Tensor, noise_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of that loss by each of the log-odds.

        data: -(1 - sigmoid(h)),      noise: sigmoid(h)        (M-NCE-3)

    >>> nce_gradients(torch.zeros(1), torch.zeros(1, 1))
    (tensor([-0.5000]), tensor([[0.5000]]))
    """
    return -torch.sigmoid(-data_logits), torch.sigmoid(noise_logits)


def nce_population_loss(log_model: Tensor, data: Tensor, noise: Tensor, ratio: Number = 1.0) -> Tensor:
    """The expected loss over a finite set of outcomes; the value grows like log(ratio).

        -sum_x [ P(x) log sigmoid(h) + ratio * p_noise(x) log(1 - sigmoid(h)) ]        (M-NCE-2, M-NCE-4)

    >>> nce_population_loss(torch.tensor([1.0]).log(), torch.tensor([1.0]), torch.tensor([1.0]))  # 2 log 2
    tensor(1.3863)
    """
    h = nce_logits(log_model, noise.log(), ratio)
    return -(data * logsigmoid(h) + number(ratio).to(h.dtype) * noise * logsigmoid(-h)).sum(-1)


def nce_population_gradient(log_model: Tensor, data: Tensor, noise: Tensor, ratio: Number = 1.0) -> Tensor:
    """Derivative of the expected loss by f at each outcome: 0 exactly where the model equals the data, for any ratio.

        k p_n / (m + k p_n) * (m - P_data)        (M-NCE-3, M-NCE-4)

    >>> nce_population_gradient(torch.tensor([3.0]).log(), torch.tensor([1.0]), torch.tensor([1.0]))  # 1/4 * 2
    tensor([0.5000])
    """
    h = nce_logits(log_model, noise.log(), ratio)
    return torch.sigmoid(-h) * (log_model.exp() - data)


def generalized_kl_gradient(log_model: Tensor, data: Tensor) -> Tensor:
    """What the NCE gradient tends to as the ratio grows: that of the generalised Kullback-Leibler divergence.

        d/df sum (P log(P/m) - P + m) = m - P        (M-NCE-4)

    >>> generalized_kl_gradient(torch.tensor([0.0]), torch.tensor([0.25]))
    tensor([0.7500])
    """
    return log_model.exp() - data


__all__ = public(globals())
