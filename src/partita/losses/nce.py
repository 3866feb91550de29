"""Noise-contrastive estimation: a model learns its own normalisation by telling data from noise."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from partita import _checks
from partita._torch_function import overridable
from partita.errors import ShapeError
from partita.precision import log_of
from partita.rows import reduce_rows

__all__ = ["nce_loss"]


@overridable
def nce_loss(
    data_score: Tensor,  # (...), log of the unnormalised model at the data
    noise_score: Tensor,  # (..., k), the same at k noise samples of each datum
    data_log_noise: Tensor,  # (...), log noise probability of the data
    noise_log_noise: Tensor,  # (..., k), log noise probability of the noise samples
    *,
    reduction: _checks.Reduction = "mean",
) -> Tensor:
    """Binary noise-contrastive estimation with k noise samples per datum.

        h    = score - log k - log p_noise                 log-odds of being data
        loss = -log sigmoid(h_data) - sum_noise log(1 - sigmoid(h_noise))

    (1 + k) times the mean binary cross entropy of the decisions. Its minimum is the data distribution for every k; as k
    grows the gradient tends to that of maximum likelihood, while the value grows like log k. Spec: M-NCE-1 to M-NCE-4.

    >>> nce_loss(torch.zeros(1), torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 1))  # two coin flips: 2 log 2
    tensor(1.3863)
    """
    _checks.check_reduction(reduction)
    for name, tensor in (("data_score", data_score), ("noise_score", noise_score)):
        _checks.check_float(name, tensor)
    if noise_score.dim() != data_score.dim() + 1 or noise_score.shape[:-1] != data_score.shape:
        raise ShapeError(
            f"noise_score must be (..., k) for data_score (...); got {_checks.shape_text(noise_score)} for "
            f"{_checks.shape_text(data_score)}."
        )
    k = noise_score.shape[-1]
    if k == 0:
        raise ShapeError("noise_score must hold at least one noise sample per datum, k >= 1.")
    log_k = log_of(k, data_score.device)
    data = data_score - log_k - _like("data_log_noise", data_log_noise, data_score)
    noise = noise_score - log_k - _like("noise_log_noise", noise_log_noise, noise_score)
    return reduce_rows(-logsigmoid(data) - logsigmoid(-noise).sum(-1), reduction)


def _like(name: str, given: Tensor, scores: Tensor) -> Tensor:
    _checks.check_float(name, given)
    if not _checks.expands(given.shape, scores.shape):
        raise ShapeError(f"{name} must fit {_checks.shape_text(scores)}; got {_checks.shape_text(given)}.")
    return given.to(scores.dtype).expand_as(scores)
