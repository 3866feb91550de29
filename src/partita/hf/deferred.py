"""Logits that are not made unless somebody looks at them.

    logits = post * tanh(scale * <hidden, weight> + bias)        or without the cap:  scale * <hidden, weight> + bias

What a language model does with its logits on the way to its loss is little: a cast, a factor, a bias, a softcap, a
shift, a view, and a cross entropy. `Deferred` follows these, and gives the cross entropy by `linear_cross_entropy`.
Anything else gets the logits themselves, and a warning that they were made.
"""

from __future__ import annotations

import contextlib
import numbers
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from partita.losses import linear_cross_entropy

__all__ = ["Deferred"]

Number = float  # `float` is also what a tensor is asked to become


@dataclass(frozen=True, eq=False)
class Deferred:
    """In the place of a (..., n_class) tensor."""

    hidden: Tensor  # (..., dim)
    weight: Tensor  # (n_class, dim)
    bias: Tensor | None = None  # (n_class,), added after the scale
    scale: Number | Tensor = 1.0
    post: Number | None = None  # what multiplies tanh of all this; None where there is none
    as_dtype: torch.dtype | None = None
    label_smoothing: Number = 0.0
    modes: Sequence[Any] = field(default_factory=_get_current_function_mode_stack)

    # ---- what a tensor would say -------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self.as_dtype or self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Deferred:
        return self

    # ---- what is followed --------------------------------------------------------------------------------------------

    def float(self) -> Deferred:
        return replace(self, as_dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        devices = [torch.device(x) for x in (*args, *kwargs.values()) if isinstance(x, str | torch.device | int)]
        if any(device != self.device for device in devices) or any(isinstance(x, Tensor) for x in args):
            return self.dense().to(*args, **kwargs)
        return replace(self, as_dtype=dtypes[0]) if dtypes else self

    def view(self, *shape: Any) -> Any:
        """Rows in another arrangement; the classes stay the last dimension."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if not all(isinstance(n, int) for n in sizes) or not sizes or sizes[-1] not in (self.weight.shape[0], -1):
            return self.dense().view(*shape)
        if sizes[-1] == -1 and torch.Size(sizes[:-1]).numel() != self.hidden.shape[:-1].numel():
            return self.dense().view(*shape)
        return replace(self, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim in (-1, self.dim() - 1):
            return self.dense().flatten(start_dim, end_dim)
        return replace(self, hidden=self.hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        spread = sum(1 for part in parts if part is Ellipsis)
        if any(isinstance(part, Tensor) or part is None for part in parts) or spread > 1:
            return self.dense()[index]
        reaches = len(parts) - spread == self.dim() or (spread and parts[-1] is not Ellipsis)
        if reaches and parts[-1] != slice(None):
            return self.dense()[index]
        return replace(self, hidden=self.hidden[index])

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, Tensor) and factor.dim() == 0 and self.post is None:
            return self._scaled(factor)
        if not isinstance(factor, numbers.Real):
            return self.dense() * factor
        return self._scaled(Number(factor)) if self.post is None else replace(self, post=self.post * Number(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        usable = isinstance(divisor, numbers.Real) or (isinstance(divisor, Tensor) and divisor.dim() == 0)
        return self * (1.0 / divisor) if usable else self.dense() / divisor

    def _scaled(self, factor: Number | Tensor) -> Deferred:
        return replace(self, scale=self.scale * factor, bias=None if self.bias is None else self.bias * factor)

    def __add__(self, other: Any) -> Any:
        if self.post is None and isinstance(other, Tensor) and other.numel() == other.shape[-1:].numel() > 1:
            row = other.reshape(-1)
            return replace(self, bias=row if self.bias is None else self.bias + row)
        if self.post is None and isinstance(other, Deferred) and other.post is None and other.dim() == self.dim():
            return self._joined(other)
        return self.dense() + other

    __radd__ = __add__

    def _joined(self, other: Deferred) -> Deferred:
        """The sum of two linear maps is one of both inputs side by side: a head and its low-rank update."""
        hidden = torch.cat([self.hidden * self.scale, other.hidden * other.scale], -1)
        biases = [b for b in (self.bias, other.bias) if b is not None]
        weight = torch.cat([self.weight, other.weight.to(self.weight.dtype)], 1)
        return replace(self, hidden=hidden, weight=weight, bias=sum(biases) if biases else None, scale=1.0)  # type: ignore[arg-type]

    def tanh(self) -> Any:
        return replace(self, post=1.0) if self.post is None else self.dense().tanh()

    # ---- what comes of it --------------------------------------------------------------------------------------------

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: object = None,
        ignore_index: int = -100,
        reduce: object = None,
        reduction: str = "mean",
        label_smoothing: Number = 0.0,
    ) -> Tensor:
        smoothing = label_smoothing or self.label_smoothing
        if self.dim() != 2 or size_average is not None or reduce is not None:
            return F.cross_entropy(
                self.dense(), target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing
            )
        # tanh(s x + b) * p is p * tanh((p s x + p b) / p): a softcap of p
        factor = 1.0 if self.post is None else self.post
        half = self.hidden.dtype in (torch.float16, torch.bfloat16)
        cast = half and self.dtype == torch.float32  # operands stay half, sums and the loss are float32
        kind = self.device.type
        with self._seen(), torch.autocast(kind, self.hidden.dtype) if cast else contextlib.nullcontext():
            heard = list(LISTENERS) if torch.is_grad_enabled() else []
            loss = linear_cross_entropy(
                self.hidden, self.weight, target, linear_bias=None if self.bias is None else self.bias * factor,
                weight=weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=smoothing,
                scale=self.scale * factor, softcap=self.post, return_stats=bool(heard),
            )  # fmt: skip
        if isinstance(loss, tuple):
            loss, stats = loss
            for listener in heard:
                listener(stats)
        assert isinstance(loss, Tensor)
        return loss.to(self.dtype)

    def _seen(self) -> contextlib.ExitStack:
        """A function mode is off while it handles a call; those that saw the head shall see its loss too (a watch)."""
        stack, now = contextlib.ExitStack(), _get_current_function_mode_stack()
        for mode in self.modes:
            if not any(mode is other for other in now):
                stack.enter_context(mode)
        return stack

    def dense(self) -> Tensor:
        """The logits after all."""
        warnings.warn(
            "logits of a logit_free model were made after all: something other than its loss looked at them.",
            stacklevel=3,
        )
        out = F.linear(self.hidden, self.weight) * self.scale
        out = out if self.bias is None else out + self.bias
        out = out if self.post is None else self.post * out.tanh()
        return out if self.as_dtype is None else out.to(self.as_dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        known = _FOLLOWED.get(func)
        if known is not None:
            names = [name for name in ("input", "self") if name in kwargs]
            args = (kwargs.pop(names[0]), *args) if names else args
            if isinstance(args[0], Deferred):
                return known(*args, **kwargs)
        made = [x.dense() if isinstance(x, Deferred) else x for x in args]
        return func(*made, **{k: v.dense() if isinstance(v, Deferred) else v for k, v in kwargs.items()})


LISTENERS: list[Callable[[Any], None]] = []  # told the `LossStats` of a loss that is to be differentiated
_FOLLOWED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: Deferred.cross_entropy,
    torch.tanh: Deferred.tanh,
    F.tanh: Deferred.tanh,
    torch.mul: Deferred.__mul__,
    torch.div: Deferred.__truediv__,
    torch.add: Deferred.__add__,
    Tensor.add: lambda self, other: self.__add__(other),
    torch.reshape: Deferred.view,
    torch.flatten: Deferred.flatten,
}
