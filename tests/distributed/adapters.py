"""Adapters whose candidates come from all ranks, next to the originals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from partita.adapters import open_clip
from partita.adapters.sentence_transformers import MultipleNegativesRankingLoss
from tests.losses.test_peers import GTE, Table, open_clip_losses


def own_rows(columns: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    return [torch.randn(5, 6, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(columns)]


def assert_same(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs)
    mine, peers = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs))
    for a, b in zip(mine, peers, strict=True):
        torch.testing.assert_close(a, b)


def ranking(group: Any, hardness: str | None) -> None:
    from sentence_transformers.sentence_transformer import losses

    options = {"gather_across_devices": True, "directions": GTE, "hardness_mode": hardness, "hardness_strength": 3.0}
    ours = MultipleNegativesRankingLoss(Table(), **options)  # type: ignore[arg-type]
    theirs = losses.MultipleNegativesRankingLoss(Table(), **options)
    given = own_rows(3)
    features = [{"x": x} for x in given]
    assert_same(ours(features, None), theirs(features, None), given)


class Weights(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4, dtype=torch.float64))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self[0](features["x"])}


def cached(group: Any) -> None:
    """Gradients of the encoder's weights, embedded in mini-batches, with the documents of both ranks."""
    from sentence_transformers.sentence_transformer import losses

    from partita.adapters.sentence_transformers import CachedMultipleNegativesRankingLoss

    torch.manual_seed(5)
    model = Weights()
    features = [{"x": x.detach()} for x in own_rows(3)]
    found = []
    for kind in (CachedMultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss):
        loss = kind(model, mini_batch_size=2, gather_across_devices=True)(features, None)
        model.zero_grad()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def clip(group: Any) -> None:
    options = {"gather_with_grad": True, "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    image, text = own_rows(2)
    scale = torch.tensor(3.0, dtype=torch.float64)
    kinds = (open_clip.ClipLoss, open_clip_losses().ClipLoss)
    ours, theirs = (kind(**options)(image, text, scale) for kind in kinds)
    assert_same(ours, theirs, [image, text])


def siglip(group: Any, dist_impl: str | None) -> None:
    options = {"dist_impl": dist_impl, "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    image, text = own_rows(2)
    scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (3.0, -2.0))
    kinds = (open_clip.SigLipLoss, open_clip_losses().SigLipLoss)
    ours, theirs = (kind(**options)(image, text, scale, bias, output_dict=True) for kind in kinds)
    assert_same(ours["contrastive_loss"], theirs["contrastive_loss"], [image, text, scale, bias])
