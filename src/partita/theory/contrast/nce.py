"""Noise-contrastive estimation: telling data from noise with a model that need not be normalised."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from partita.theory._domain import Number, number, require

__all__ = [
    "generalized_kl_gradient",
    "nce_gradients",
    "nce_logits",
    "nce_population_gradient",
    "nce_population_loss",
    "nce_posterior",
    "nce_sample_loss",
]


def nce_logits(log_model: Tensor, log_noise: Tensor, ratio: Number = 1.0) -> Tensor:
    """The log-odds that a sample is data, when there are `ratio` noise samples for each datum.

        h = f(x) - log(ratio) - log p_noise(x)

    d h / d f = 1, d h / d log p_noise = -1, d h / d log ratio = -1. Spec: M-NCE-1, M-NCE-3.

    >>> nce_logits(torch.tensor(0.0), torch.tensor(0.5).log(), 2.0)  # model 1 against noise 2 * 1/2
    tensor(0.)
    """
    k = number(ratio).to(log_model.dtype)
    require(k > 0, f"ratio is noise samples per datum and must be positive; got {k}.")
    return log_model - k.log() - log_noise


def nce_posterior(log_model: Tensor, log_noise: Tensor, ratio: Number = 1.0) -> Tensor:
    """The probability that a sample is data.

        m / (m + ratio * p_noise) = sigmoid(h),      m = exp(f)

    Spec: M-NCE-1.
    From Gutmann and Hyvarinen (2010), Noise-contrastive estimation: a new estimation principle for unnormalized
    statistical models.

    >>> nce_posterior(torch.tensor(3.0).log(), torch.tensor(1.0).log(), 1.0)  # 3 / (3 + 1)
    tensor(0.7500)
    """
    return torch.sigmoid(nce_logits(log_model, log_noise, ratio))


def nce_sample_loss(data_logits: Tensor, noise_logits: Tensor) -> Tensor:  # (N,), (N, k) -> (N,)
    """Loss of each datum and its k noise samples, the noise summed.

        -log sigmoid(h_data) - sum_noise log(1 - sigmoid(h_noise))

    (1 + k) times the mean binary cross entropy of the k + 1 decisions. Spec: M-NCE-2.
    From Gutmann and Hyvarinen (2010), Noise-contrastive estimation: a new estimation principle for unnormalized
    statistical models.

    >>> nce_sample_loss(torch.zeros(1), torch.zeros(1, 3))  # 4 log 2
    tensor([2.7726])
    """
    return -logsigmoid(data_logits) - logsigmoid(-noise_logits).sum(-1)


def nce_gradients(data_logits: Tensor, noise_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of that loss by each of the log-odds.

        data: -(1 - sigmoid(h)),      noise: sigmoid(h)

    Spec: M-NCE-3.

    >>> nce_gradients(torch.zeros(1), torch.zeros(1, 1))
    (tensor([-0.5000]), tensor([[0.5000]]))
    """
    return -torch.sigmoid(-data_logits), torch.sigmoid(noise_logits)


def nce_population_loss(log_model: Tensor, data: Tensor, noise: Tensor, ratio: Number = 1.0) -> Tensor:
    """The expected loss over a finite set of outcomes; the value grows like log(ratio).

        -sum_x [ P(x) log sigmoid(h) + ratio * p_noise(x) log(1 - sigmoid(h)) ]

    Spec: M-NCE-2, M-NCE-4.

    >>> nce_population_loss(torch.tensor([1.0]).log(), torch.tensor([1.0]), torch.tensor([1.0]))  # 2 log 2
    tensor(1.3863)
    """
    h = nce_logits(log_model, noise.log(), ratio)
    return -(data * logsigmoid(h) + number(ratio).to(h.dtype) * noise * logsigmoid(-h)).sum(-1)


def nce_population_gradient(log_model: Tensor, data: Tensor, noise: Tensor, ratio: Number = 1.0) -> Tensor:
    """Derivative of the expected loss by f at each outcome: 0 exactly where the model equals the data, for any ratio.

        k p_n / (m + k p_n) * (m - P_data)

    So NCE is consistent for every ratio > 0; a large one buys efficiency. Spec: M-NCE-3, M-NCE-4.

    >>> nce_population_gradient(torch.tensor([3.0]).log(), torch.tensor([1.0]), torch.tensor([1.0]))  # 1/4 * 2
    tensor([0.5000])
    """
    h = nce_logits(log_model, noise.log(), ratio)
    return torch.sigmoid(-h) * (log_model.exp() - data)


def generalized_kl_gradient(log_model: Tensor, data: Tensor) -> Tensor:
    """What the NCE gradient tends to as the ratio grows: that of the generalised Kullback-Leibler divergence.

        d/df sum (P log(P/m) - P + m) = m - P

    Spec: M-NCE-4.

    >>> generalized_kl_gradient(torch.tensor([0.0]), torch.tensor([0.25]))
    tensor([0.7500])
    """
    return log_model.exp() - data
