"""A language model whose forward with labels returns the loss of linear_cross_entropy, without logits; and its log."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from partita._checks import check_positive
from partita.errors import ValueRangeError
from partita.hf.lazy_logits import LISTENERS, LazyLogits
from partita.rows import LossStats

__all__ = ["base_model", "language_heads", "lazy_logits", "logit_free", "logits_again", "token_log_callback"]

_ACTIVE = threading.local()  # the label smoothing of the forward with labels that is being run, if any


def logit_free(model: nn.Module, *, label_smoothing: float = 0.0) -> nn.Module:
    """Train a Hugging Face language model without logits; returns the model.

        model(**inputs, labels=labels).loss   =   linear_cross_entropy(hidden states, head, labels)

    With labels, nothing of size batch x length x vocabulary is made and `logits` is None; without, the model returns
    its logits. Causal, masked and sequence-to-sequence heads, tied weights, head biases, factors, softcaps and the loss
    itself (ignored labels, `num_items_in_batch`) are the model's own.

    label_smoothing: as torch's. The Trainer's `label_smoothing_factor` removes the labels from the model's inputs and
        needs logits: use this instead.

    Trainers of trl replace the forward themselves; there `partita.adapters.trl.install` is what to call.
    """
    check_positive("label_smoothing", label_smoothing, zero=True)
    inner: Any = base_model(model)
    heads = language_heads(inner, "logit_free")
    logits_again(model)
    _refuse_trl(inner)
    inner.register_forward_pre_hook(_warn_of_trl, with_kwargs=True)
    for head in heads:
        _replace_forward(head, _lazy_head)
    _replace_forward(inner, functools.partial(_with_labels, label_smoothing))
    return model


def logits_again(model: nn.Module) -> nn.Module:
    """Undo `logit_free`; returns the model."""
    inner: Any = base_model(model)
    for module in (inner, *_heads(inner)):
        if hasattr(module.__dict__.get("forward"), "__func__") and hasattr(module.forward.__func__, "logit_free"):
            del module.forward
    for number in [number for number, hook in inner._forward_pre_hooks.items() if hook is _warn_of_trl]:
        del inner._forward_pre_hooks[number]
    return model


@contextlib.contextmanager
def lazy_logits(heads: list[nn.Linear]) -> Iterator[None]:
    """In this block and thread these heads return `LazyLogits`, so that the model's `logits` are those."""
    own = [{name: x for name, x in vars(head).items() if name == "forward"} for head in heads]
    for head in heads:
        _replace_forward(head, _lazy_head)
    try:
        with _active(0.0):
            yield
    finally:
        for head, before in zip(heads, own, strict=True):
            del head.forward
            vars(head).update(before)


def base_model(model: nn.Module) -> nn.Module:
    """The language model inside a PEFT model."""
    base: Any = getattr(model, "get_base_model", None)
    return model if base is None else base()


def language_heads(inner: Any, caller: str) -> list[nn.Linear]:
    """The linear maps that make the logits; raises where there are none."""
    heads = list(_heads(inner))
    if not heads:
        raise ValueRangeError(
            f"{caller} takes a transformers model with a language head; {type(inner).__name__} has no linear output "
            f"embeddings (get_output_embeddings)."
        )
    return heads


def _heads(model: Any) -> Iterator[nn.Linear]:
    """The linear maps that end in the vocabulary: the head, and the second half of its low-rank update."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = [m for m in head.modules() if isinstance(m, nn.Linear)] if isinstance(head, nn.Module) else []
    width = max((m.out_features for m in linear), default=0)
    yield from (m for m in linear if m.out_features == width)


def _replace_forward(module: Any, wrapper: Callable[..., Any]) -> None:
    """Call wrapper(forward of the class, module, ...) as the forward of this module."""
    inner = type(module).forward

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(inner, self, *args, **kwargs)

    forward.logit_free = True  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)


@contextlib.contextmanager
def _active(label_smoothing: float) -> Iterator[None]:
    before = getattr(_ACTIVE, "smoothing", None)
    _ACTIVE.smoothing = label_smoothing
    try:
        yield
    finally:
        _ACTIVE.smoothing = before


def _lazy_head(forward: Any, head: nn.Linear, input: Tensor) -> Any:
    if getattr(_ACTIVE, "smoothing", None) is None:
        return forward(head, input)
    return LazyLogits(input, head.weight, head.bias, label_smoothing=_ACTIVE.smoothing)


def _with_labels(label_smoothing: float, forward: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("labels") is None:
        return forward(model, *args, **kwargs)
    with _active(label_smoothing):
        return _without_logits(forward(model, *args, **kwargs))


def _without_logits(outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return tuple(x for x in outputs if not isinstance(x, LazyLogits))
    kept = {name: value for name, value in outputs.items() if not isinstance(value, LazyLogits)}
    return type(outputs)(**kept)


# ---- in a trainer of trl -------------------------------------------------------------------------------------------


def _refuse_trl(inner: nn.Module) -> None:
    code = getattr(getattr(inner.__dict__.get("forward"), "__func__", None), "__code__", None)
    if code is not None and "fused_lm_head" in code.co_varnames:
        raise ValueRangeError(
            "a trainer of trl has replaced the forward of this model by one that makes no logits and that it needs; "
            "leave logit_free out. partita.adapters.trl.install() serves that forward from this library."
        )


def _warn_of_trl(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A pre-hook of the model: trl's forward, which its trainers call with `fused_lm_head=True`, passes ours by."""
    if not kwargs.get("fused_lm_head"):
        return
    serving = getattr(sys.modules.get("trl.trainer.utils"), "_ChunkedLogProbFunction", None)
    if getattr(getattr(serving, "apply", None), "__module__", None) != "partita.adapters.trl":
        warnings.warn(
            "a trainer of trl has replaced the forward of this model by one that makes no logits, so logit_free does "
            "nothing here. Call partita.adapters.trl.install() before training to serve it from this library.",
            stacklevel=2,
        )


# ---- in a Trainer's log ----------------------------------------------------------------------------------------------

_LOGGED = ("token_accuracy", "token_log_prob", "token_entropy")


def token_log_callback() -> Any:
    """A callback for the Trainer of a `logit_free` model: `Trainer(..., callbacks=[token_log_callback()])`.

    Adds `token_accuracy`, `token_log_prob` and `token_entropy` to the log and its history: means over the tokens of the
    logged step that are not ignored, from the pass of the loss.
    """
    from transformers import TrainerCallback

    class TokenLogCallback(TrainerCallback):  # type: ignore[misc]
        sums: Any = None  # over the tokens of the step that will be logged: their number, then each of _LOGGED

        def add(self, stats: LossStats) -> None:
            with torch.no_grad():
                kept = stats.visible > 0  # ignored labels see no class
                rows = torch.stack([kept, stats.correct, -stats.nll, stats.entropy]).double()
                self.sums = self.sums + torch.where(kept, rows, 0.0).flatten(1).sum(1)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.on_train_end(args, state, control)
            every = max(1, int(state.logging_steps or 1))
            first = state.global_step == 0 and args.logging_first_step
            if first or (state.global_step + 1) % every == 0:
                self.sums = torch.zeros((), dtype=torch.float64, device="cpu")
                LISTENERS.append(self.add)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if self.sums is not None and self.sums.any() and logs is not None and "loss" in logs:
                means = dict(zip(_LOGGED, (self.sums[1:] / self.sums[0]).tolist(), strict=True))
                logs.update(means)
                state.log_history[-1].update(means)
            self.on_train_end(args, state, control)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.sums = None
            if self.add in LISTENERS:
                LISTENERS.remove(self.add)

    return TokenLogCallback()
