"""A model's attention, served so that its output and its statistics come from one pass.

While a module of the model runs, F.scaled_dot_product_attention and `partita.attention` are partita's kernel with its
statistics; a softmax written out by hand inside an attention module has its scores at hand, and only their maximum is
taken. Nothing is put on modules, and torch is as it was when the outermost one returns.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import partita
from partita.interception import SDPA, SOFTMAX, named
from partita.monitor.compiled import MODULE_CALL
from partita.monitor.functions import HEADS
from partita.monitor.kernel import laid_out
from partita.monitor.modules import followed, is_attention

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm)


@dataclass
class Frame:
    """A module being called, and the linear maps it has called so far."""

    name: str
    module: nn.Module
    linear: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    product: tuple[Tensor, Tensor] | None = None  # queries and keys of the last product, where scores are by hand


@dataclass(frozen=True)
class Attended:
    """One softmax of a layer: its largest score per head, and what its queries and keys were made of."""

    layer: str
    module: nn.Module
    peak: Tensor  # (heads,)
    query: Tensor | None  # (batch, heads, n_query, dim)
    key: Tensor | None  # (batch, key heads, n_key, dim)
    linear: list[tuple[nn.Module, Tensor]]  # the innermost last


class Serving:
    """Follows a model from construction until `stop`; `seen` is called with each softmax, `curious(layer)` says whether
    the operands of a layer are wanted too."""

    def __init__(self, model: nn.Module, seen: Callable[[Attended], None], curious: Callable[[str], bool]) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._holders = {id(module) for _, module in followed(model)}
        # methods of the owner, who may be let go: it is not kept alive from here
        self._seen, self._curious = weakref.WeakMethod(seen), weakref.WeakMethod(curious)
        self._local = threading.local()
        self.stop = weakref.finalize(self, MODULE_CALL.remove, MODULE_CALL.add(_weakly(self), everywhere=True))

    def stack(self) -> list[Frame]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack  # type: ignore[no-any-return]

    def called(self, inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = self._names.get(id(module))
        if name is None or not module.training:
            return inner(module, *args, **kwargs)
        stack = self.stack()
        if id(module) not in self._holders:  # a leaf of torch's
            out = inner(module, *args, **kwargs)
            self._remember(stack, module, out)
            return out
        stack.append(Frame(name, module))
        try:
            with _Mode(self) if len(stack) == 1 else contextlib.nullcontext():
                out = inner(module, *args, **kwargs)
        finally:
            stack.pop()
        self._remember(stack, module, out)  # a linear map of somebody's own class (Conv1D of transformers)
        return out

    def _remember(self, stack: list[Frame], module: nn.Module, out: Any) -> None:
        weight = getattr(module, "weight", None)  # of a flat FSDP it is no parameter
        if stack and isinstance(weight, Tensor) and isinstance(out, Tensor) and self._wants(stack[-1].name):
            # only the newest few: queries and keys are made just before they are used
            stack[-1].linear = [*stack[-1].linear[-7:], (module, out.detach())]

    def curious(self) -> bool:
        return self._wants(self.stack()[-1].name)

    def _wants(self, layer: str) -> bool:
        curious = self._curious()
        return curious is not None and curious(layer)

    def attended(self, peak: Tensor, query: Tensor | None, key: Tensor | None) -> None:
        stack = self.stack()
        top = stack[-1]
        if not self._wants(top.name):
            query, key = None, None
        linear = [pair for frame in stack[-2:] for pair in frame.linear]
        seen = self._seen()
        if seen is not None:
            seen(Attended(top.name, top.module, peak, query, key, linear))


def _weakly(serving: Serving) -> Callable[..., Any]:
    """Its way into every call, which does not keep it alive."""
    own = weakref.ref(serving)

    def around(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = own()
        return inner(module, *args, **kwargs) if found is None else found.called(inner, module, *args, **kwargs)

    return around


class _Mode(TorchFunctionMode):
    def __init__(self, serving: Serving) -> None:
        super().__init__()
        self.serving = serving
        self.table: dict[Any, Callable[..., Any]] = {
            torch._C._nn.scaled_dot_product_attention: self._sdpa,
            F.multi_head_attention_forward: self._multi_head,
            partita.attention: self._partita,
            **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), self._softmax),
            **dict.fromkeys(_PRODUCTS, self._product),
        }

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        handler = self.table.get(func)
        if handler is None or torch.compiler.is_compiling() or not self.serving.stack():
            return func(*args, **(kwargs or {}))
        return handler(func, args, kwargs or {})

    def _sdpa(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = named(args, kwargs)
        query = call["query"]
        if query.is_nested or query.dim() < 3:
            return func(*args, **kwargs)
        out, stats = partita.attention(**call, return_stats=True)
        self._report(stats.max_score, query, call["key"])
        return laid_out(out, query)

    def _partita(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, stats, *more = func(*args, **{**kwargs, "return_stats": True})
        call = named(args, kwargs)
        if call["query"].dim() >= 3:
            self._report(stats.max_score, call["query"], call["key"])
        given = (out, stats, *more) if kwargs.get("return_stats") else (out, *more)
        return given if len(given) > 1 else out

    def _multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's own module runs with the mode off; what it calls is caught on the way."""

        def caught(handler: Callable[..., Any]) -> Callable[..., Any]:
            return lambda inner, *a, **k: handler(inner, a, k)

        with SDPA.around(caught(self._sdpa)), SOFTMAX.around(caught(self._softmax)):
            return func(*args, **kwargs)

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        frame = self.serving.stack()[-1]
        if (
            isinstance(scores, Tensor)
            and scores.dim() in (3, 4)
            and dim in (-1, scores.dim() - 1)
            and is_attention(frame.name, frame.module)
        ):
            self._report(scores.detach().amax(-1), *_operands(frame.product, scores))
        return func(*args, **kwargs)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][-2:]
        if len(given) == 2 and given[0].dim() >= 3 and given[1].dim() >= 3 and self.serving.curious():
            self.serving.stack()[-1].product = (given[0].detach(), given[1].detach().mT)
        return func(*args, **kwargs)

    def _report(self, largest: Tensor, query: Tensor | None, key: Tensor | None) -> None:  # (..., n_query)
        heads = largest.shape[-2]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if largest.dim() == 2:  # heads and batch in one dimension, where the module says how many heads it has
                module = self.serving.stack()[-1].module
                heads = next((h for n in HEADS if isinstance(h := getattr(module, n, None), int)), 1)
                heads = heads if largest.shape[0] % heads == 0 else 1
                largest = largest.unflatten(0, (-1, heads))
                query, key = (None if t is None else _with_heads(t.detach(), heads) for t in (query, key))
            peak = largest.detach().movedim(-2, 0).reshape(heads, -1).amax(1)
            self.serving.attended(peak, query, key)


def _operands(product: tuple[Tensor, Tensor] | None, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Queries and keys of the last product, if it is the one that gave the scores, with as many dimensions."""
    if product is None:
        return None, None
    query, key = product
    if scores.dim() == 4 and query.dim() == 3 and query.shape[0] == scores.shape[:2].numel() == key.shape[0]:
        query, key = (t.unflatten(0, scores.shape[:2]) for t in (query, key))
    return (query, key) if (*query.shape[:-1], key.shape[-2]) == scores.shape else (None, None)


def _with_heads(t: Tensor, heads: int) -> Tensor | None:
    return t.unflatten(0, (-1, heads)) if t.dim() == 3 and t.shape[0] % heads == 0 else None
