"""Losses in the call form of pytorch-metric-learning: (embeddings, labels, indices_tuple, ref_emb, ref_labels)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from partita._checks import check_positive
from partita.contrastive import sort_by_label, supcon_loss
from partita.errors import ShapeError, ValueRangeError
from partita.gibbs import Gibbs

__all__ = ["NTXentLoss", "SupConLoss"]


class _Loss(nn.Module):
    def __init__(self, temperature: float):
        super().__init__()
        check_positive("temperature", temperature)
        self.temperature = temperature

    def forward(
        self,
        embeddings: Tensor,  # (n, dim)
        labels: Tensor | None = None,  # (n,)
        indices_tuple: object | None = None,
        ref_emb: Tensor | None = None,  # (m, dim)
        ref_labels: Tensor | None = None,  # (m,)
    ) -> Tensor:
        if indices_tuple is not None:
            raise ValueRangeError("mined pairs are a mask of the n x n matrix, which is not built; give labels alone.")
        if labels is None or embeddings.dim() != 2 or tuple(labels.shape) != (len(embeddings),):
            raise ShapeError("embeddings must be (n, dim) and labels (n,).")
        if (ref_emb is None) != (ref_labels is None):
            raise ShapeError("ref_emb and ref_labels belong together: give both or neither.")
        return self.loss(embeddings, labels, ref_emb, ref_labels)

    def loss(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None) -> Tensor:
        raise TypeError("abstract: use one of the losses below.")

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


class SupConLoss(_Loss):
    """Supervised contrast; equal to ``pytorch_metric_learning.losses.SupConLoss()`` with its defaults."""

    def __init__(self, temperature: float = 0.1):
        super().__init__(temperature)

    def loss(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None) -> Tensor:
        out = supcon_loss(embeddings, labels, temperature=self.temperature, ref_emb=ref_emb, ref_labels=ref_labels)
        assert isinstance(out, Tensor)
        return out


class NTXentLoss(_Loss):
    """Every positive pair against its anchor's negatives; equal to ``pytorch_metric_learning.losses.NTXentLoss()``.

        loss_ap = -log( exp(s_ap / t) / ( exp(s_ap / t) + sum_{n: other label} exp(s_an / t) ) ),     mean over pairs

    Negatives stream (keys sorted by label); only the positive pairs are listed.
    """

    def __init__(self, temperature: float = 0.07):
        super().__init__(temperature)

    def loss(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None) -> Tensor:
        x, scale = normalize(embeddings, dim=-1), 1.0 / self.temperature
        keys = x if ref_emb is None else normalize(ref_emb, dim=-1)
        key_labels = labels if ref_labels is None else ref_labels
        order, others = sort_by_label(labels, key_labels)
        keys = keys[order]
        count = others.last - others.first
        negatives = Gibbs(x, keys, scale=scale, support=others).reduce(statistics=False).state
        # anchor a has the keys first_a, ..., last_a - 1 of its own label
        anchor = torch.repeat_interleave(torch.arange(len(x), device=x.device), count)
        place = torch.arange(len(anchor), device=x.device) - torch.repeat_interleave(count.cumsum(0) - count, count)
        key = others.first[anchor] + place
        if ref_emb is None:
            apart = order[key] != anchor
            anchor, key = anchor[apart], key[apart]
        if not len(anchor) or bool((count == len(keys)).all()):
            return 0.0 * x.sum()
        score = scale * (x[anchor] * keys[key]).sum(-1)
        return -logsigmoid(score - negatives.log_partition()[anchor]).mean()
