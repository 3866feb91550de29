"""Logits that are materialised only where their values are used.

    logits = post * tanh(scale * <hidden, weight> + bias)        or without the cap:  scale * <hidden, weight> + bias

Between its logits and its loss a language model applies a cast, a factor, a bias, a softcap, a shift, a view, and a
cross entropy. `LazyLogits` follows these, and computes the cross entropy by `linear_cross_entropy`. Any other use
materialises the logits, with a warning.

A change in place (a method, an operator, an index, `out=`, or through a view) materialises them and takes effect; from
then on they are the materialised tensor, and so is their loss. Views keep to what torch does: what shares memory with
logits that are changed is changed too. In a compiled graph a change in place raises.
"""

from __future__ import annotations

import contextlib
import numbers
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from partita._checks import Reduction
from partita.errors import BackendError
from partita.losses import TokenStats, linear_cross_entropy, token_stats

__all__ = ["LazyLogits"]

Number = float  # `float` is also a method of a tensor


@dataclass(frozen=True, eq=False)
class LazyLogits:
    """Replaces a (..., n_class) tensor."""

    hidden: Tensor  # (..., dim)
    weight: Tensor  # (n_class, dim)
    bias: Tensor | None = None  # (n_class,), added after the scale
    scale: Number | Tensor = 1.0
    post: Number | None = None  # factor of the tanh; None without one
    as_dtype: torch.dtype | None = None
    label_smoothing: Number = 0.0
    modes: Sequence[Any] = field(default_factory=_get_current_function_mode_stack)
    grad: bool = field(default_factory=torch.is_grad_enabled)  # where these logits were made
    source: tuple[LazyLogits, Callable[[Tensor], Tensor]] | None = None  # of a view: of what, and how
    views: list[weakref.ref[LazyLogits]] = field(default_factory=list)  # that are not materialised
    made: dict[str, Any] = field(default_factory=dict)  # the materialised tensor, its version then, if it was changed

    # ---- as a tensor -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        now = self._changed()
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0])) if now is None else now.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.as_dtype or self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Any:
        return self._view(Tensor.contiguous)

    def _view(self, how: Callable[[Tensor], Tensor], **changes: Any) -> Any:
        """What shares memory with these logits, or is a copy, as torch has it."""
        now = self._changed()
        if now is not None:
            return how(now)
        view = replace(self, source=(self, how), views=[], made={}, **changes)
        if torch.compiler.is_compiling():
            return view
        self.views.append(weakref.ref(view))
        if self.made:  # a copy is made now, before the logits are changed
            self._follow_views()
        return view

    def _other(self, **changes: Any) -> LazyLogits:
        """Logits of their own."""
        return replace(self, grad=torch.is_grad_enabled(), source=None, views=[], made={}, **changes)

    # ---- what is followed --------------------------------------------------------------------------------------------

    def float(self) -> Any:
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        now = self._changed()
        dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        devices = [torch.device(x) for x in (*args, *kwargs.values()) if isinstance(x, str | torch.device | int)]
        elsewhere = any(device != self.device for device in devices) or any(isinstance(x, Tensor) for x in args)
        if now is not None or elsewhere or kwargs.get("copy"):
            return self.dense().to(*args, **kwargs)
        return self._other(as_dtype=dtypes[0]) if dtypes and dtypes[0] != self.dtype else self

    def view(self, *shape: Any) -> Any:
        """The rows reshaped; the classes stay the last dimension."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if not all(isinstance(n, int) for n in sizes) or not sizes or sizes[-1] not in (self.shape[-1], -1):
            return self.dense().view(*shape)
        if self._changed() is not None or (
            sizes[-1] == -1 and torch.Size(sizes[:-1]).numel() != self.hidden.shape[:-1].numel()
        ):
            return self.dense().view(*shape)
        hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
        return self._view(lambda x: x.reshape(*sizes), hidden=hidden)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim in (-1, self.dim() - 1) or self._changed() is not None:
            return self.dense().flatten(start_dim, end_dim)
        return self._view(lambda x: x.flatten(start_dim, end_dim), hidden=self.hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        spread = sum(1 for part in parts if part is Ellipsis)
        if any(isinstance(part, Tensor) or part is None for part in parts) or spread > 1:
            return self.dense()[index]
        reaches = len(parts) - spread == self.dim() or (spread and parts[-1] is not Ellipsis)
        if (reaches and parts[-1] != slice(None)) or self._changed() is not None:
            return self.dense()[index]
        return self._view(lambda x: x[index], hidden=self.hidden[index])

    def __mul__(self, factor: Any) -> Any:
        if self._changed() is not None:
            return self.dense() * factor
        if isinstance(factor, Tensor) and factor.dim() == 0 and self.post is None:
            return self._scaled(factor)
        if not isinstance(factor, numbers.Real):
            return self.dense() * factor
        return self._scaled(Number(factor)) if self.post is None else self._other(post=self.post * Number(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        usable = isinstance(divisor, numbers.Real) or (isinstance(divisor, Tensor) and divisor.dim() == 0)
        return self * (1.0 / divisor) if usable else self.dense() / divisor

    def _scaled(self, factor: Number | Tensor) -> LazyLogits:
        return self._other(scale=self.scale * factor, bias=None if self.bias is None else self.bias * factor)

    def __add__(self, other: Any) -> Any:
        if self._changed() is not None or (isinstance(other, LazyLogits) and other._changed() is not None):
            return self.dense() + (other.dense() if isinstance(other, LazyLogits) else other)
        if self.post is None and isinstance(other, Tensor) and other.numel() == other.shape[-1:].numel() > 1:
            row = other.reshape(-1)
            return self._other(bias=row if self.bias is None else self.bias + row)
        if self.post is None and isinstance(other, LazyLogits) and other.post is None and other.dim() == self.dim():
            return self._joined(other)
        return self.dense() + other

    __radd__ = __add__

    def _joined(self, other: LazyLogits) -> LazyLogits:
        """The sum of two linear maps, a head and its low-rank update, as one of the concatenated inputs."""
        hidden = torch.cat([self.hidden * self.scale, other.hidden * other.scale], -1)
        biases = [b for b in (self.bias, other.bias) if b is not None]
        weight = torch.cat([self.weight, other.weight.to(self.weight.dtype)], 1)
        return self._other(hidden=hidden, weight=weight, bias=sum(biases) if biases else None, scale=1.0)

    def tanh(self) -> Any:
        return self._other(post=1.0) if self.post is None and self._changed() is None else self.dense().tanh()

    # ---- what comes of it --------------------------------------------------------------------------------------------

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: object = None,
        ignore_index: int = -100,
        reduce: object = None,
        reduction: Reduction = "mean",
        label_smoothing: Number = 0.0,
    ) -> Tensor:
        smoothing = label_smoothing or self.label_smoothing
        if self._changed() is not None or self.dim() != 2 or size_average is not None or reduce is not None:
            return F.cross_entropy(
                self.dense(), target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing
            )
        # tanh(s x + b) * p is p * tanh((p s x + p b) / p): a softcap of p
        factor = 1.0 if self.post is None else self.post
        half = self.hidden.dtype in (torch.float16, torch.bfloat16)
        cast = half and self.dtype == torch.float32  # operands stay half, sums and the loss are float32
        kind = self.device.type
        with self._seen(), torch.autocast(kind, self.hidden.dtype) if cast else contextlib.nullcontext():
            listeners = list(LISTENERS) if torch.is_grad_enabled() else []
            loss = linear_cross_entropy(
                self.hidden, self.weight, target, linear_bias=None if self.bias is None else self.bias * factor,
                weight=weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=smoothing,
                scale=self.scale * factor, softcap=self.post, return_stats=bool(listeners),
            )  # fmt: skip
        if isinstance(loss, tuple):
            loss, stats = loss
            for listener in listeners:
                listener(stats)
        assert isinstance(loss, Tensor)
        return loss.to(self.dtype)

    def token_stats(self, ids: Tensor, **options: Any) -> TokenStats:
        """`partita.token_stats` of these logits; the options are its own."""
        if self._changed() is not None:
            raise BackendError(
                "token_stats reads hidden states and a head, and these logits were changed in place after them: read "
                "F.log_softmax of the model's own logits."
            )
        factor = self.scale if self.post is None else self.scale * self.post
        plain = isinstance(factor, Number) and factor == 1.0
        hidden = self.hidden if plain else self.hidden * factor
        bias = self.bias if self.bias is None or self.post is None else self.bias * self.post
        with self._seen():
            return token_stats(hidden, self.weight, ids, bias=bias, softcap=self.post, **options)

    def _seen(self) -> contextlib.ExitStack:
        """A function mode is off while it handles a call; a watch that saw the head must see its loss too."""
        stack, now = contextlib.ExitStack(), _get_current_function_mode_stack()
        for mode in self.modes:
            if not any(mode is other for other in now):
                stack.enter_context(mode)
        return stack

    def dense(self) -> Tensor:
        """The logits, materialised once; later changes of them in place count."""
        if self.made:
            return self.made["tensor"]  # type: ignore[no-any-return]
        if self.source is not None:
            whole, how = self.source
            tensor = whole.dense()
            return self.made["tensor"] if self.made else how(tensor)
        warnings.warn(
            "logits of a logit_free model were made after all: something other than its loss used them.",
            stacklevel=3,
        )
        if torch.compiler.is_compiling():
            return self._computed()
        with torch.set_grad_enabled(self.grad):
            self._keep(self._computed())
        return self.made["tensor"]  # type: ignore[no-any-return]

    def _computed(self) -> Tensor:
        out = F.linear(self.hidden, self.weight) * self.scale
        out = out if self.bias is None else out + self.bias
        out = out if self.post is None else self.post * out.tanh()
        return out if self.as_dtype is None else out.to(self.as_dtype)

    def _keep(self, tensor: Tensor) -> None:
        self.made.update(tensor=tensor, version=None if tensor.is_inference() else tensor._version)
        self._follow_views()

    def _follow_views(self) -> None:
        """Materialise the views: they share memory with the tensor, or are copies of what it is now."""
        for kept in self.views:
            if (view := kept()) is not None and view.source is not None:
                with torch.set_grad_enabled(self.grad):
                    view._keep(view.source[1](self.made["tensor"]))
        self.views.clear()

    def _changed(self) -> Tensor | None:
        """The tensor that these logits are now, if something may have changed it in place."""
        if not self.made:
            return None
        tensor: Tensor = self.made["tensor"]
        same = self.made["version"] is not None and self.made["version"] == tensor._version
        return None if same and "changed" not in self.made else tensor

    def _to_change(self, name: str) -> Tensor:
        """The materialised tensor, for a change that its version may not show."""
        if torch.compiler.is_compiling():
            raise BackendError(
                f"logits of a logit_free model cannot be changed in place ({name}) in a compiled graph. Give the "
                f"result a name instead of changing what there is, or train with logits (partita.hf.logits_again)."
            )
        tensor, at = self.dense(), self
        at.made["changed"] = True
        while at.source is not None:
            at = at.source[0]
            at.made["changed"] = True
        return tensor

    @property
    def data(self) -> Tensor:
        return self._to_change("data").data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if name.endswith("_"):
            return lambda *args, **kwargs: self._change(name, args, kwargs)
        # memory that is written to without torch
        return getattr(self._to_change(name) if name in _MEMORY else self.dense(), name)

    def _change(self, name: str, args: Any, kwargs: Any) -> LazyLogits:
        tensor = self._to_change(name)
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.dense, (args, kwargs))
        getattr(tensor, name)(*args, **kwargs)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        known = None if kwargs.keys() & {"out", "alpha", "rounding_mode", "inplace"} else _FOLLOWED.get(func)
        if known is None:
            for x in tree_leaves(_written(func, args, kwargs)):
                if isinstance(x, LazyLogits):
                    x._to_change(func.__name__)
        if known is not None:
            names = [name for name in ("input", "self") if name in kwargs]
            args = (kwargs.pop(names[0]), *args) if names else args
            args = (*args, kwargs.pop("other")) if "other" in kwargs else args
            if isinstance(args[0], LazyLogits):
                return known(*args, **kwargs)
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.dense, (args, kwargs))
        return func(*args, **kwargs)


_MEMORY = ("numpy", "data_ptr", "storage", "untyped_storage", "__array__", "__dlpack__")
_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_READING = (
    *(f"__{kind}{name}__" for name in _OPERATORS for kind in ("", "r")),
    *(f"__{name}__" for name in ("neg", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne", "len")),
)
_CHANGING = ("__setitem__", "__delitem__", *(f"__i{name}__" for name in _OPERATORS))


def _delegated(name: str) -> Callable[..., Any]:
    """An operator of the materialised logits; Python looks for it on the class."""

    def read(self: LazyLogits, *args: Any) -> Any:
        return getattr(self.dense(), name)(*args)

    def change(self: LazyLogits, *args: Any) -> Any:
        return self._change(name, args, {})

    return change if name in _CHANGING else read


for _name in (*_READING, *_CHANGING):
    if hasattr(Tensor, _name) and _name not in vars(LazyLogits):
        setattr(LazyLogits, _name, _delegated(_name))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments that a function of torch would change."""
    name = getattr(func, "__name__", "").split(".")[0]
    own = name == "__setitem__" or (name.startswith("__i") and name[3:-2] in _OPERATORS)
    own = own or (name.endswith("_") and not name.startswith("__")) or bool(kwargs.get("inplace"))
    return [kwargs.get("out"), (args[:1] or list(kwargs.values())) if own else None]


LISTENERS: list[Callable[[Any], None]] = []  # called with the `LossStats` of a loss that needs gradients
_FOLLOWED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: LazyLogits.cross_entropy,
    torch.tanh: LazyLogits.tanh,
    F.tanh: LazyLogits.tanh,
    torch.mul: LazyLogits.__mul__,
    torch.div: LazyLogits.__truediv__,
    torch.add: LazyLogits.__add__,
    Tensor.add: lambda self, other: self.__add__(other),
    torch.reshape: LazyLogits.view,
    torch.flatten: LazyLogits.flatten,
}
