"""A language model whose forward with labels gives the loss of linear_cross_entropy, and no logits."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from partita._checks import check_positive
from partita.errors import ValueRangeError
from partita.hf.deferred import Deferred

__all__ = ["logit_free", "logits_again"]

_ACTIVE = threading.local()  # the label smoothing of the forward with labels that is being run, if any


def logit_free(model: nn.Module, *, label_smoothing: float = 0.0) -> nn.Module:
    """Let a Hugging Face language model train without logits; gives the model back.

        model(**inputs, labels=labels).loss   =   linear_cross_entropy(hidden states, head, labels)

    Nothing of size batch x length x vocabulary is made when labels are given, and `logits` is None; without labels the
    model gives its logits as before. Causal, masked and sequence-to-sequence heads, tied weights, head biases, factors
    and softcaps are the model's own, and so is its loss with all it knows (ignored labels, `num_items_in_batch`).

    label_smoothing: as torch's. The Trainer's own `label_smoothing_factor` takes the labels away from the model, and
        asks for logits: use this instead.
    """
    check_positive("label_smoothing", label_smoothing, zero=True)
    inner: Any = _base(model)
    heads = list(_heads(inner))
    if not heads:
        raise ValueRangeError(
            f"logit_free takes a transformers model with a language head; {type(inner).__name__} has no linear output "
            f"embeddings (get_output_embeddings)."
        )
    logits_again(model)
    for head in heads:
        head.forward = types.MethodType(_deferring(type(head).forward), head)  # type: ignore[method-assign]
    inner.forward = types.MethodType(_with_labels(type(inner).forward, label_smoothing), inner)
    return model


def logits_again(model: nn.Module) -> nn.Module:
    """Undo `logit_free`; gives the model back."""
    inner: Any = _base(model)
    for module in (inner, *_heads(inner)):
        if hasattr(module.__dict__.get("forward"), "__func__") and hasattr(module.forward.__func__, "logit_free"):
            del module.forward
    return model


def _base(model: nn.Module) -> nn.Module:
    """The language model inside a PEFT model."""
    base: Any = getattr(model, "get_base_model", None)
    return model if base is None else base()


def _heads(model: Any) -> Iterator[nn.Linear]:
    """The linear maps that end in the vocabulary: the head, and the second half of its low-rank update."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = [m for m in head.modules() if isinstance(m, nn.Linear)] if isinstance(head, nn.Module) else []
    width = max((m.out_features for m in linear), default=0)
    yield from (m for m in linear if m.out_features == width)


def _deferring(forward: Any) -> Any:
    @functools.wraps(forward)
    def head(self: nn.Linear, input: Tensor) -> Any:
        if getattr(_ACTIVE, "smoothing", None) is None:
            return forward(self, input)
        return Deferred(input, self.weight, self.bias, label_smoothing=_ACTIVE.smoothing)

    head.logit_free = True  # type: ignore[attr-defined]
    return head


def _with_labels(forward: Any, label_smoothing: float) -> Any:
    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is None:
            return forward(self, *args, **kwargs)
        before = getattr(_ACTIVE, "smoothing", None)
        _ACTIVE.smoothing = label_smoothing
        try:
            return _without_logits(forward(self, *args, **kwargs))
        finally:
            _ACTIVE.smoothing = before

    call.logit_free = True  # type: ignore[attr-defined]
    return call


def _without_logits(outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return tuple(x for x in outputs if not isinstance(x, Deferred))
    kept = {name: value for name, value in outputs.items() if not isinstance(value, Deferred)}
    return type(outputs)(**kept)
