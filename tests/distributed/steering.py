"""QK-clip where the weights are replicated or sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from partita.control import QKClip


class Layer(nn.Module):
    """Grouped queries in one fused map with an odd number of rows per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, (3 + 1 + 1) * 8)
        self.out = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (5, 8)).transpose(1, 2).split([3, 1, 1], 1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def inputs(ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [(1 + rank) * torch.randn(2, 7, 24, generator=generator) for rank in range(ranks)]  # the last is loudest


def alone(ranks: int, threshold: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What one process that sees every rank's rows does."""
    model = build()
    clip = QKClip(model, threshold)
    clip.group = None
    for x in inputs(ranks):
        model(x)
    peaks = dict(clip.max_scores)
    clip.detach()
    for name, factor in {n: _factors(p, threshold) for n, p in peaks.items()}.items():
        layer: Any = model.get_submodule(name)
        with torch.no_grad():
            rows = torch.cat([factor / factor.max().sqrt(), factor.max().sqrt()[None], torch.ones(1)])
            layer.qkv.weight.mul_(rows.repeat_interleave(8)[:, None])
            layer.qkv.bias.mul_(rows.repeat_interleave(8))
    return peaks, model.state_dict()


def _factors(peak: Tensor, threshold: float) -> Tensor:
    return threshold / peak.clamp(min=threshold)


def clipping(group: Any, way: str) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    threshold = 5.0
    model: Any = build()
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "fully_shard":
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=way == "fsdp-original")
    clip = QKClip(model, threshold)
    model(inputs(ranks)[rank]).sum().backward()
    factors = clip.step()
    clip.detach()
    peaks, expected = alone(ranks, threshold)
    for name, peak in peaks.items():
        torch.testing.assert_close(clip.max_scores[name.removeprefix("module.")], peak)
        assert (factors[name] < 1).any()
    if way == "fully_shard":
        found = {n: p.full_tensor() for n, p in model.state_dict().items()}
    elif way == "ddp":
        found = model.module.state_dict()
    else:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=2e-6, atol=0)  # two products of three roundings each
