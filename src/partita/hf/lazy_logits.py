"""Logits that are materialised only where their values are used.

    logits = post * tanh(scale * <hidden, weight> + bias)        or without the cap:  scale * <hidden, weight> + bias

Between its logits and its loss a language model applies a cast, a factor, a bias, a softcap, a shift, a view, and a
cross entropy. `LazyLogits` follows these, and computes the cross entropy by `linear_cross_entropy`. Any other use
materialises the logits, with a warning.

A change in place (a method, an operator, an index, `out=`, or through a view) materialises them and takes effect; from
then on they are the materialised tensor, and so is their loss. Views keep to what torch does: what shares memory with
logits that are changed is changed too.
"""

from __future__ import annotations

import contextlib
import functools
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
from torch.utils._pytree import tree_map_only

from partita._checks import Reduction
from partita.errors import BackendError
from partita.losses import TokenStats, linear_cross_entropy, token_stats

__all__ = ["LazyLogits"]

Number = float  # `float` is also a method of a tensor


def _followed(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A method of tensors: the rule, while the logits are lazy and it gives a result; else torch's own."""

    @functools.wraps(rule)
    def method(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        found = rule(self, *args, **kwargs) if self._lazy() else NotImplemented
        return getattr(self.dense(), rule.__name__)(*args, **kwargs) if found is NotImplemented else found

    return method


@dataclass(eq=False)
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
    views: list[Callable[[], LazyLogits | None]] = field(default_factory=list)  # weak references
    tensor: Tensor | None = None  # the materialised logits
    mark: object = None  # of the tensor when it was made; None where a change would not show

    # ---- as a tensor -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        now = self.tensor  # resized, it may be
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

    # ---- what is followed --------------------------------------------------------------------------------------------

    def _other(self, **changes: Any) -> LazyLogits:
        """Logits of their own."""
        own: dict[str, Any] = {"grad": torch.is_grad_enabled(), "source": None, "views": [], "tensor": None}
        return replace(self, **{**own, **changes})

    def _view(self, how: Callable[[Tensor], Tensor], hidden: Tensor) -> LazyLogits:
        """What shares memory with these logits, or is a copy, as torch has it."""
        view = self._other(hidden=hidden, grad=self.grad, source=(self, how))
        self.views.append(weakref.ref(view))
        if self.tensor is not None:
            view._keep(self.tensor)
        return view

    def float(self) -> Any:
        return self.to(torch.float32)

    @_followed
    def to(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        dtypes = [x for x in given if isinstance(x, torch.dtype)]
        elsewhere = any(isinstance(x, str | torch.device | int) and torch.device(x) != self.device for x in given)
        if elsewhere or any(isinstance(x, Tensor) for x in given) or kwargs.get("copy"):
            return NotImplemented
        return self._other(as_dtype=dtypes[0]) if dtypes and dtypes[0] != self.dtype else self

    @_followed
    def contiguous(self) -> Any:
        return self._view(Tensor.contiguous, self.hidden)

    @_followed
    def view(self, *shape: Any) -> Any:
        return NotImplemented if torch.dtype in map(type, shape) else self.reshape(*shape)

    @_followed
    def reshape(self, *shape: Any) -> Any:
        """The rows reshaped; the classes stay the last dimension."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if not all(isinstance(n, int) for n in sizes) or not sizes or sizes[-1] not in (self.shape[-1], -1):
            return NotImplemented
        if sizes[-1] == -1 and torch.Size(sizes[:-1]).numel() != self.hidden.shape[:-1].numel():
            return NotImplemented
        return self._view(lambda x: x.reshape(*sizes), self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    @_followed
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        whole = end_dim in (-1, self.dim() - 1)
        return NotImplemented if whole else self.reshape(*self.hidden.flatten(start_dim, end_dim).shape[:-1], -1)

    @_followed
    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        spread = sum(1 for part in parts if part is Ellipsis)
        reaches = len(parts) - spread == self.dim() or (spread and parts[-1] is not Ellipsis)
        if any(isinstance(part, Tensor) or part is None for part in parts) or spread > 1:
            return NotImplemented
        if reaches and parts[-1] != slice(None):
            return NotImplemented
        return self._view(lambda x: x[index], self.hidden[index])

    @_followed
    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, numbers.Real):
            factor = Number(factor)
            return self._scaled(factor) if self.post is None else self._other(post=self.post * factor)
        single = isinstance(factor, Tensor) and factor.dim() == 0 and self.post is None
        return self._scaled(factor) if single else NotImplemented

    __rmul__ = __mul__

    @_followed
    def __truediv__(self, divisor: Any) -> Any:
        usable = isinstance(divisor, numbers.Real) or (isinstance(divisor, Tensor) and divisor.dim() == 0)
        return self * (1.0 / divisor) if usable else NotImplemented

    def _scaled(self, factor: Number | Tensor) -> LazyLogits:
        return self._other(scale=self.scale * factor, bias=None if self.bias is None else self.bias * factor)

    @_followed
    def __add__(self, other: Any) -> Any:
        if self.post is not None:
            return NotImplemented
        if isinstance(other, LazyLogits):
            same = other._lazy() and other.post is None and other.dim() == self.dim()
            return self._joined(other) if same else NotImplemented
        if isinstance(other, Tensor) and other.numel() == other.shape[-1:].numel() > 1:
            row = other.reshape(-1)
            return self._other(bias=row if self.bias is None else self.bias + row)
        return NotImplemented

    __radd__ = __add__

    def _joined(self, other: LazyLogits) -> LazyLogits:
        """The sum of two linear maps, a head and its low-rank update, as one of the concatenated inputs."""
        hidden = torch.cat([self.hidden * self.scale, other.hidden * other.scale], -1)
        biases = [b for b in (self.bias, other.bias) if b is not None]
        weight = torch.cat([self.weight, other.weight.to(self.weight.dtype)], 1)
        return self._other(hidden=hidden, weight=weight, bias=sum(biases) if biases else None, scale=1.0)

    @_followed
    def tanh(self) -> Any:
        return self._other(post=1.0) if self.post is None else NotImplemented

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
        if not self._lazy() or self.dim() != 2 or size_average is not None or reduce is not None:
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
        if not self._lazy():
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

    # ---- anything else: the tensor -----------------------------------------------------------------------------------

    def _lazy(self) -> bool:
        """Whether the product is still what these logits are: nothing may have changed the materialised tensor."""
        return self.tensor is None or self.mark == _mark(self.tensor) is not None

    def dense(self) -> Tensor:
        """The logits, materialised once; later changes of them in place count."""
        if self.tensor is None and self.source is not None:
            self.source[0].dense()  # and with it its views
        elif self.tensor is None:
            warnings.warn(
                "logits of a logit_free model were made after all: something other than its loss used them.",
                stacklevel=3,
            )
            with torch.set_grad_enabled(self.grad):
                out = F.linear(self.hidden, self.weight) * self.scale
                out = out if self.bias is None else out + self.bias
                out = out if self.post is None else self.post * out.tanh()
                self._keep(out if self.as_dtype is None else out.to(self.as_dtype))
        assert self.tensor is not None
        return self.tensor

    def _keep(self, tensor: Tensor) -> None:
        """Materialised, of this tensor (for a view: that of its source), with the views of it, before any change."""
        with torch.set_grad_enabled(self.grad):
            self.tensor = tensor if self.source is None else self.source[1](tensor)
        self.mark = _mark(self.tensor)
        for reference in self.views:
            if (view := reference()) is not None:
                view._keep(self.tensor)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        tensor, at = self.dense(), self
        while name in _MEMORY and at.mark is not None:
            at.mark = None
            at = at.source[0] if at.source is not None else at
        return getattr(tensor, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        known = None if kwargs.keys() & {"out", "alpha", "rounding_mode"} else _FOLLOWED.get(func)
        if known is not None:
            names = [name for name in ("input", "self") if name in kwargs]
            args = (kwargs.pop(names[0]), *args) if names else args
            args = (*args, kwargs.pop("other")) if "other" in kwargs else args
            if isinstance(args[0], LazyLogits):
                return known(*args, **kwargs)
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.dense, (args, kwargs))
        return func(*args, **kwargs)


def _mark(tensor: Tensor) -> object:
    """Other after a change in place, `detach_` too; None of an inference tensor, which has no version."""
    return None if tensor.is_inference() else (tensor._version, tensor.requires_grad)


_MEMORY = ("data", "numpy", "data_ptr", "storage", "untyped_storage")  # what is written there no version shows
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
_OTHERS = ["neg", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne", "len", "setitem", "delitem"]


def _of_tensor(name: str) -> Callable[..., Any]:
    """An operator of the materialised logits; Python looks for it on the class."""
    return lambda self, *args: LazyLogits.__torch_function__(getattr(Tensor, name), (), (self, *args))


for _name in [f"__{kind}{name}__" for name in _BINARY for kind in ("", "r", "i")] + [f"__{x}__" for x in _OTHERS]:
    if hasattr(Tensor, _name) and _name not in vars(LazyLogits):
        setattr(LazyLogits, _name, _of_tensor(_name))


LISTENERS: list[Callable[[Any], None]] = []  # called with the `LossStats` of a loss that needs gradients
_FOLLOWED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: LazyLogits.cross_entropy,
    torch.tanh: LazyLogits.tanh,
    F.tanh: LazyLogits.tanh,
    torch.mul: LazyLogits.__mul__,
    torch.div: LazyLogits.__truediv__,
    torch.add: LazyLogits.__add__,
    Tensor.add: lambda self, other: self.__add__(other),
    torch.reshape: LazyLogits.reshape,
    torch.flatten: LazyLogits.flatten,
}
