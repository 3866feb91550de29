"""QK-clip: smaller query and key weights for heads with too large scores, after an optimizer step (MuonClip).

Subscribes to the softmaxes of the model (`partita.monitor.hooks`); with callbacks for Hugging Face and Lightning.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.hooks import RemovableHandle

from partita._checks import check_positive
from partita.control.layout import Layout, Rows, find
from partita.errors import ValueRangeError
from partita.monitor import compiled, hooks
from partita.monitor.callbacks import from_lightning
from partita.monitor.hooks import Call, Frame, FunctionMode, ModuleNames, SoftmaxCall, Subscriber
from partita.nn.qk_clip import holds

__all__ = ["PerLayer", "QKClip", "lightning_qk_clip_callback", "qk_clip_callback"]


class PerLayer(dict[Any, Tensor]):
    """One tensor (heads,) per layer, by the name of its module or by its number in order of first call."""

    def __missing__(self, layer: Any) -> Tensor:
        if isinstance(layer, int):
            return list(self.values())[layer]
        raise KeyError(layer)


class QKClip(Subscriber):
    """Limits the largest score of every head of a model's attention to a threshold, by its weights.

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

    All forwards in training mode since the last step count (gradient accumulation). Their attention is served by
    partita's kernel, equal to torch's within rounding, so that the largest score comes with the output.

    Only the rows of the head shrink: its queries and keys by the square root each, biases too; shared keys take what
    all their heads need and queries the rest. Under QK-norm the gains shrink, a shared one for all heads together.
    Latent attention (MLA) keeps the rotary keys that all heads share. Masks and position biases do not shrink; capped
    scores (softcap) shrink by less. `unclipped` names the layers that are not changed, and why: their weights could not
    be found, are frozen or quantised, or are no parameters of the layer (low-rank updates, parametrisations).

    threshold: None only reads.
    group: the ranks that share the weights (DDP, FSDP), whose largest score counts; all ranks of an initialised
        torch.distributed by default. All ranks call `step`.
    """

    def __init__(self, model: nn.Module, threshold: float | None = 100.0, *, group: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"QKClip takes a torch.nn.Module; got {type(model).__name__}.")
        if threshold is not None:
            check_positive("threshold", threshold)
        if any(compiled.code_of(inner) is not None for inner in model.modules()):
            raise ValueRangeError(
                "QKClip cannot see into the graphs of torch.compile: give it the model, and leave the model uncompiled."
            )
        self.model, self.threshold, self.group = model, threshold, group
        self.unclipped: dict[str, str] = {}  # layers that are not changed, and why
        self._inner = compiled.unwrap(model)
        self._layouts: dict[str, Layout] = {}
        self._open: dict[str, Tensor] = {}  # since the last step
        self._closed = PerLayer()  # of the last step
        self._warned: set[str] = set()
        self._steps = 0
        self._names = ModuleNames(self._inner)
        self._own = {id(module) for module in self._inner.modules()}
        self._local = threading.local()
        self.leaves = weakref.WeakSet()  # leaves are observed: their outputs show which weights made queries and keys
        self._following = hooks.follow(self)

    @property
    def max_scores(self) -> PerLayer:
        """The largest score per layer and head since the last `step`, or of that step if nothing ran since."""
        return PerLayer(self._open) if self._open else self._closed

    def detach(self) -> None:
        """Stop following the model; its own attention is restored."""
        self._following()

    def after(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Take a step after each step of the optimizer, until the handle is removed."""

        def hook(*_: Any) -> None:
            self.step()

        return optimizer.register_step_post_hook(hook)

    # ---- seen in the forward pass ------------------------------------------------------------------------------------

    kernel = "partita"  # with its statistics
    traces = True
    replays = True  # a recomputation takes the kernel that its forward took

    @property
    def stack(self) -> list[Frame]:  # type: ignore[override]
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.mode = [], FunctionMode(self)
        return self._local.stack  # type: ignore[no-any-return]

    def called(self, call: Call) -> Any:
        module = call.module
        if not module.training or id(module) not in self._own:
            return call()
        stack, name = self.stack, self._names.name(module)
        if name is None:  # a leaf of torch's
            out = call()
        else:
            stack.append(Frame(name, module))
            try:
                with self._local.mode.during() if len(stack) == 1 else contextlib.nullcontext():
                    out = call()
            finally:
                stack.pop()
        # a linear map, of torch's or another class (Conv1D of transformers)
        if stack and isinstance(out, Tensor) and holds(module, "weight") and self._unknown(stack[-1]):
            # only the newest few: queries and keys are made just before they are used
            stack[-1].linear = [*stack[-1].linear[-7:], (module, out.detach())]
        return out

    def _unknown(self, layer: Frame) -> bool:
        """Whether the layout of a layer is still to be found from its operands."""
        name = self._title(layer.name)
        return name not in self._layouts and (self._steps == 0 or name in self._closed)

    def _title(self, layer: str) -> str:
        return layer or type(self._inner).__name__

    def serve(self, call: dict[str, Any]) -> tuple[Tensor, Any] | None:
        return hooks.serve(call, plain=False)

    def softmax(self, make: Callable[[], SoftmaxCall | None]) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            call = make()
            if call is not None and (largest := _largest(call)) is not None:
                self._seen(call, largest)

    def _seen(self, call: SoftmaxCall, largest: Tensor) -> None:  # (batch, heads, n_query), or (heads, n_query)
        top, query, key = call.module, call.query, call.key
        if largest.dim() == 2:  # heads and batch in one dimension, where the module has its number of heads
            heads = hooks.heads_of(top.module)
            heads = heads if largest.shape[0] % heads == 0 else 1
            largest = largest.unflatten(0, (-1, heads))
            query, key = (None if t is None else _with_heads(t.detach(), heads) for t in (query, key))
        heads, name = largest.shape[-2], self._title(top.name)
        peak = largest.detach().movedim(-2, 0).reshape(heads, -1).amax(1)
        before = self._open.get(name)
        self._open[name] = peak if before is None else torch.maximum(before, peak)
        if name in self._layouts:
            return
        if not self._unknown(top):
            query = key = None
        linear = [pair for frame in self.stack[-2:] for pair in frame.linear]
        found = find(top.module, heads, query, key, linear)
        if isinstance(found, Layout) and (why := found.why_unfit(_is_flat(self.model))) is not None:
            found = why
        if isinstance(found, Layout):
            self._layouts[name] = found
            self.unclipped.pop(name, None)
        else:
            self.unclipped[name] = found

    # ---- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> PerLayer:
        """Shrink the heads above the threshold; returns each head's factor, (heads,) per layer."""
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
        top = torch.inf if self.threshold is None else self.threshold
        return peak.new_tensor([top / p if top < p < torch.inf else 1.0 for p in peak.tolist()])

    def _shrink(self, name: str, factors: PerLayer) -> None:
        layout = self._layouts.get(name)
        if layout is not None and (why := layout.why_unfit(flat=False)) is not None:  # it has become so since
            del self._layouts[name]
            layout, self.unclipped[name] = None, why
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
        """The maxima of all ranks, on the CPU: one message and one synchronisation."""
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


def _largest(call: SoftmaxCall) -> Tensor | None:  # (..., heads, n_query)
    if call.scores is not None:
        return call.scores.amax(-1)
    many = call.query is not None and call.query.dim() >= 3 and call.statistics is not None
    return call.statistics.max_score if many else None


def _with_heads(t: Tensor, heads: int) -> Tensor | None:
    return t.unflatten(0, (-1, heads)) if t.dim() == 3 and t.shape[0] % heads == 0 else None


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


def _is_flat(model: nn.Module) -> bool:
    return any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())


def _whole_parameters(model: nn.Module) -> Any:
    """The flat pieces of FullyShardedDataParallel made whole, and written back."""
    if not _is_flat(model):
        return contextlib.nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.summon_full_params(model, writeback=True)


# ---- in a Trainer ----------------------------------------------------------------------------------------------------


class QKClipCallback:
    """The hooks of both Trainers; derived from the callback of one when it is made."""

    clip: QKClip | None = None

    def __init__(self, threshold: float | None = 100.0, **options: Any) -> None:
        self.threshold, self.options, self._taken = threshold, options, 0

    def _largest(self) -> float | None:
        tops = [float(peak.max()) for peak in self.clip.max_scores.values()] if self.clip is not None else []
        return max(tops, default=None)

    # transformers

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.clip = QKClip(model, self.threshold, **self.options)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.clip is not None:
            self.clip.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        top = None if logs is None else self._largest()
        if top is not None:
            logs["qk_max_score"] = state.log_history[-1]["qk_max_score"] = top

    def on_train_end(self, *_: Any, **__: Any) -> None:  # of both
        if self.clip is not None:
            self.clip.detach()

    # Lightning

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # the strategy's model: FSDP's wrapper is needed to see whole parameters
        self.clip = QKClip(trainer.strategy.model, self.threshold, **self.options)
        self._taken = int(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        taken = int(trainer.global_step)  # of optimizers: accumulated batches do not change it
        if self.clip is not None and taken != self._taken:
            self._taken = taken
            self.clip.step()
            if (top := self._largest()) is not None:
                pl_module.log("qk_max_score", top)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end()


def qk_clip_callback(threshold: float | None = 100.0, **options: Any) -> Any:
    """A callback for the transformers Trainer: `Trainer(..., callbacks=[qk_clip_callback(100.0)])`.

    It clips after every optimizer step and logs `qk_max_score`; `callback.clip` is the QKClip. In a custom loop:
    `QKClip(model).after(optimizer)`.
    """
    from transformers import TrainerCallback

    return type("QKClipCallback", (QKClipCallback, TrainerCallback), {})(threshold, **options)


def lightning_qk_clip_callback(threshold: float | None = 100.0, **options: Any) -> Any:
    """A callback for Lightning's Trainer: `Trainer(..., callbacks=[lightning_qk_clip_callback(100.0)])`.

    As `qk_clip_callback`, after each batch with an optimizer step. Needs lightning or pytorch_lightning.
    """
    return from_lightning(QKClipCallback, threshold, **options)
