"""QK-clip: after an optimizer step, heads whose scores grew too large get smaller query and key weights (MuonClip)."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.hooks import RemovableHandle

from partita._checks import check_positive
from partita.control.layout import Layout, Rows, find
from partita.control.serving import Attended, Serving
from partita.errors import ValueRangeError
from partita.monitor import compiled

__all__ = ["PerLayer", "QKClip"]


class PerLayer(dict[Any, Tensor]):
    """One tensor (heads,) per layer, by the name of its module or by its number in order of first call."""

    def __missing__(self, layer: Any) -> Tensor:
        if isinstance(layer, int):
            return list(self.values())[layer]
        raise KeyError(layer)


class QKClip:
    """Keeps the largest score of every head of a model's attention near a threshold, by its weights.

        factor_h = min(1, threshold / max score of head h since the last step)
        scores of head h  <-  factor_h * scores of head h

    >>> layer = torch.nn.MultiheadAttention(2, 1, bias=False, batch_first=True)
    >>> with torch.no_grad():
    ...     layer.in_proj_weight.copy_(torch.eye(2).repeat(3, 1))    # query = key = value = input
    Parameter containing: ...
    >>> clip, x = QKClip(layer, threshold=1.0), torch.tensor([[[2.0, 0.0]]])
    >>> layer(x, x, x, need_weights=False)[0].shape    # its only score is 2 * 2 / sqrt(2) = 2.83
    torch.Size([1, 1, 2])
    >>> clip.step()["MultiheadAttention"], clip.max_scores[0]    # the factor is 1 / 2.83
    (tensor([0.3536]), tensor([2.8284]))
    >>> _ = layer(x, x, x, need_weights=False); clip.step(); clip.max_scores[0]
    {'MultiheadAttention': tensor([1.])}
    tensor([1.0000])
    >>> clip.detach()

    Forwards in training mode count, and all of them since the last step (gradient accumulation). Attention is served by
    partita's kernel meanwhile, equal to torch's within rounding, so that the largest score comes with the output.

    Exactly the rows of the head shrink: its queries and its keys by the square root each; where heads share keys, keys
    take what all of them need and queries the rest; biases too. Under QK-norm the gains shrink, for all heads together
    where they share one. Latent attention (MLA) keeps the rotary keys that all heads share. Masks and position biases
    are added after the product and do not shrink; capped scores (softcap) shrink by less. `unclipped` names the layers
    whose weights could not be told, and why.

    threshold: None only reads, and changes nothing.
    group: whose ranks share the weights (DDP, FSDP); the largest score is the largest of all. Without it that is every
        rank, where torch.distributed is initialised. All ranks call `step`.
    """

    def __init__(self, model: nn.Module, threshold: float | None = 100.0, *, group: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"QKClip takes a torch.nn.Module; got {type(model).__name__}.")
        if threshold is not None:
            check_positive("threshold", threshold)
        if [1 for inner in model.modules() if compiled.code_of(inner) is not None]:
            raise ValueRangeError(
                "QKClip cannot see into the graphs of torch.compile: give it the model, and leave the model uncompiled."
            )
        self.model, self.threshold, self.group = model, threshold, group
        self.unclipped: dict[str, str] = {}  # layers whose weights could not be told, and why
        self._inner = compiled.unwrap(model)
        self._layouts: dict[str, Layout] = {}
        self._open: dict[str, Tensor] = {}  # since the last step
        self._closed = PerLayer()  # of the last step
        self._warned: set[str] = set()
        self._steps = 0
        self._serving = Serving(self._inner, self._seen, self._curious)

    @property
    def max_scores(self) -> PerLayer:
        """The largest score per layer and head: since the last `step`, or of that step where nothing ran since."""
        return PerLayer(self._open) if self._open else self._closed

    def detach(self) -> None:
        """Stop following the model, whose attention is its own again."""
        self._serving.stop()

    def after(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Take a step after each step of the optimizer, until the handle is removed."""

        def hook(*_: Any) -> None:
            self.step()

        return optimizer.register_step_post_hook(hook)

    # ---- seen in the forward pass ------------------------------------------------------------------------------------

    def _title(self, layer: str) -> str:
        return layer or type(self._inner).__name__

    def _curious(self, layer: str) -> bool:
        name = self._title(layer)
        return name not in self._layouts and (self._steps == 0 or name in self._closed)

    def _seen(self, call: Attended) -> None:
        name = self._title(call.layer)
        before = self._open.get(name)
        self._open[name] = call.peak if before is None else torch.maximum(before, call.peak)
        if name in self._layouts:
            return
        found = find(call.module, call.peak.shape[0], call.query, call.key, call.linear)
        if isinstance(found, Layout):
            self._layouts[name] = found
            self.unclipped.pop(name, None)
        else:
            self.unclipped[name] = found

    # ---- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> PerLayer:
        """Shrink what passed the threshold; gives each head's factor, (heads,) per layer."""
        self._closed, self._open = self._over_ranks(self._open), {}
        self._steps += 1
        if not self._closed and "nothing" not in self._warned:
            self._warned.add("nothing")
            warnings.warn(
                "QKClip saw no attention since the last step. It follows modules in training mode whose attention is "
                "F.scaled_dot_product_attention, partita.attention or a softmax in an attention module.",
                stacklevel=2,
            )
        factors = PerLayer({name: self._factor(peak) for name, peak in self._closed.items()})
        wanted = [name for name, factor in factors.items() if bool((factor < 1).any())]
        if wanted:
            with _whole_parameters(self.model):
                for name in wanted:
                    self._shrink(name, factors)
        return factors

    def _factor(self, peak: Tensor) -> Tensor:
        # one division, rounded once: torch takes number / tensor as a product with the reciprocal
        top = self.threshold if self.threshold is not None else torch.inf
        return peak.new_tensor([top / p if top < p < torch.inf else 1.0 for p in peak.tolist()])

    def _shrink(self, name: str, factors: PerLayer) -> None:
        layout = self._layouts.get(name)
        if layout is None:
            factors[name] = torch.ones_like(factors[name])
            if name not in self._warned:
                self._warned.add(name)
                why, top = self.unclipped[name], float(self._closed[name].max())
                warnings.warn(f"{name} reached a score of {top:.4g} and was not clipped: {why}.", stacklevel=3)
            return
        agreed = layout.agreed(factors[name].tolist())
        factors[name] = factors[name].new_tensor(agreed)
        for rows, share in layout.shares(agreed):
            if share != 1.0:
                _multiply(rows, share)

    def _over_ranks(self, mine: dict[str, Tensor]) -> PerLayer:
        """The maxima of all ranks, on the CPU: one message, and one wait for the device."""
        if not mine:
            return PerLayer()
        flat = torch.cat([peak.to(torch.promote_types(peak.dtype, torch.float32)) for peak in mine.values()])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=self.group)
        parts = flat.cpu().split([peak.numel() for peak in mine.values()])
        return PerLayer(zip(mine, parts, strict=True))

    def __repr__(self) -> str:
        left = f", {len(self.unclipped)} not" if self.unclipped else ""
        return f"<QKClip at {self.threshold}: {len(self._layouts)} layers understood{left}, {self._steps} steps>"


def _multiply(rows: Rows, share: float) -> None:
    for name in rows.names:
        parameter: Tensor = getattr(rows.module, name)
        dim = 0 if parameter.dim() == 1 else rows.dim
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        factor = torch.ones(parameter.shape[dim], dtype=dtype, device=parameter.device)
        factor[rows.start : rows.start + rows.size] = share
        factor = factor.reshape([-1 if d == dim else 1 for d in range(parameter.dim())])
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is not None:  # a DTensor: each rank multiplies its own shard
            from torch.distributed.tensor import DTensor, Replicate

            factor = DTensor.from_local(factor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if rows.offset:
            parameter.add_(rows.offset).mul_(factor).sub_(rows.offset)
        else:
            parameter.mul_(factor)


def _whole_parameters(model: nn.Module) -> Any:
    """FullyShardedDataParallel keeps its parameters in flat pieces; for a moment they are whole, and written back."""
    if not any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        return contextlib.nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.summon_full_params(model, writeback=True)
