"""Where a model's softmaxes pass: torch functions and partita's faces, seen by a function mode of one thread.

`multi_head_attention_forward` runs with the mode off, so that its inner calls are caught by wrappers in
torch.nn.functional, for this thread and for the time of that one call.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

import partita
from partita.interception import SDPA, SOFTMAX, named
from partita.monitor import kernel
from partita.monitor.losses import FACES, penalty
from partita.monitor.modules import is_attention
from partita.monitor.scores import Scores, partita_scores, sdpa_scores
from partita.nn.entropy import picked_up

if TYPE_CHECKING:
    from partita.monitor.handle import Watch

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


def in_backward() -> bool:
    """Inside autograd's backward: a forward there is a recomputation (checkpointing) and was counted before."""
    return int(torch._C._current_graph_task_id()) != -1


class FunctionMode(TorchFunctionMode):
    """Calls the function asked for, then lets the watch look at its arguments."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self._cross: bool | None = None  # of the MultiheadAttention being run, if one is
        self._by_hand: list[weakref.ref[Tensor]] = []  # softmaxes that may turn out to be attention
        products = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum)
        self.table: dict[Any, Callable[..., Any]] = {
            torch._C._nn.scaled_dot_product_attention: self._sdpa,
            F.multi_head_attention_forward: self._multi_head,
            **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), self._softmax),
            **dict.fromkeys(products, self._product),
            F.dropout: self._dropout,
            **dict.fromkeys(FACES, self._loss),
            picked_up: self._penalty,
            partita.attention: self._partita,
        }
        # a reader that is not overridable still ends in the engine's operator
        self.table[torch.ops.partita.reduce.default] = self._reduce
        self.table[torch.ops.partita.attention.default] = self._short

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self.table.get(func)  # most calls, an optimizer's above all, end here
        if handler is None or torch.compiler.is_compiling() or not self.watch.listening() or in_backward():
            return func(*args, **kwargs)
        return handler(func, args, kwargs)

    # ---- on and off, wherever it lies in the stack of modes ----------------------------------------------------------

    def on(self, above: int = 0) -> None:
        """Put this mode into the thread's stack, below so many others."""
        later = [_pop_mode() for _ in range(above)]
        for mode in (self, *reversed(later)):
            _push_mode(mode)

    def off(self) -> int | None:
        """Take this mode out of the thread's stack: how many lay above it, or None where it was not in it."""
        if not any(mode is self for mode in _get_current_function_mode_stack()):
            return None
        above = []
        while (top := _pop_mode()) is not self:
            above.append(top)
        for mode in reversed(above):
            _push_mode(mode)
        return len(above)

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """As if nobody watched: torch's fast paths ask whether any mode is on."""
        above = self.off()
        try:
            yield
        finally:
            if above is not None:
                self.on(above)

    # ---- attention -------------------------------------------------------------------------------------------------

    def _sdpa(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = "sdpa" if self._cross is None else "MultiheadAttention"
        every = self.watch.options.rows is None and self.watch.options.layers is None and not self.watch.outside()
        served = kernel.serve(args, kwargs) if every and self.watch.kernel == "partita" else None
        out, stats = served if served is not None else (func(*args, **kwargs), None)
        self.watch.guard_inside(lambda: self.look_sdpa(named(args, kwargs), kind, self._cross, stats))
        return out

    def look_sdpa(self, call: dict[str, Any], kind: str, cross: bool | None, stats: Any) -> None:
        query, key = call["query"], call["key"]
        if query.is_nested:
            return
        scale = 1.0 / math.sqrt(query.shape[-1]) if call.get("scale") is None else call["scale"]
        mask, causal = call.get("attn_mask"), call.get("is_causal", False)
        self.watch.observer.attend(
            kind, query.shape, lambda: sdpa_scores(query, key, mask, causal, scale), cross, stats
        )

    def _multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """MultiheadAttention: wrappers see its SDPA call, or its softmax where weights are returned."""
        heads, cross = args[4], args[0] is not args[1]

        def sdpa(inner: Callable[..., Any], *a: Any, **k: Any) -> Any:
            with self:  # whatever serves it, torch or partita, is seen as everywhere else
                return inner(*a, **k)

        def softmax(inner: Callable[..., Any], scores: Tensor, *a: Any, **k: Any) -> Any:
            out = inner(scores, *a, **k)
            self.watch.guard_inside(lambda: self.look_scores(scores, heads, "MultiheadAttention", cross))
            return out

        before, self._cross = self._cross, cross
        try:
            with SDPA.around(sdpa), SOFTMAX.around(softmax):
                return func(*args, **kwargs)
        finally:
            self._cross = before

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        scores = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if (
            isinstance(scores, Tensor)
            and scores.dim() in (3, 4)
            and dim in (-1, scores.dim() - 1)
            and scores.is_floating_point()
        ):
            self.watch.guard_inside(lambda: self.look_softmax(scores, out))
        return out

    def look_softmax(self, scores: Tensor, out: Tensor | None, cross: bool | None = None) -> None:
        top = self.watch.observer.stack[-1]
        if not is_attention(top.name, top.module):
            # a router, a gate, an output; or attention that does not say so, which the next product will tell
            if out is not None:
                self._by_hand = [ref for ref in self._by_hand[-7:] if ref() is not None] + [weakref.ref(out)]
            return
        heads = next((h for n in HEADS if isinstance(h := getattr(top.module, n, None), int)), 1)
        kind = "MultiheadAttention" if isinstance(top.module, nn.MultiheadAttention) else "softmax"
        self.look_scores(scores, heads, kind, cross)

    def _dropout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if self._by_hand and args and any(ref() is args[0] for ref in self._by_hand):
            self._by_hand.append(weakref.ref(out))
        return out

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A softmax times something is attention, whatever its module is called."""
        known = self._by_hand if not self.watch.outside() else ()
        if any(ref() is given for ref in known for given in args):
            self.watch.observer.passed_over()
        return func(*args, **kwargs)

    def look_scores(self, scores: Tensor, heads: int, kind: str, cross: bool | None) -> None:
        if scores.dim() == 3:
            heads = heads if scores.shape[0] % heads == 0 else 1
            scores = scores.unflatten(0, (-1, heads))
        final = scores.detach()
        self.watch.observer.attend(kind, final.shape, lambda: Scores(None, None, scores=final), cross)

    def _partita(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """partita.attention is called as it was; its statistics are asked for beside it, unless the caller did.

        One pass would give both, and other bits: in float64, and in the gradients with a sink.
        """
        if kwargs.get("group") is not None:  # its keys lie on other ranks too, which may not be watched
            return func(*args, **kwargs)
        asked = bool(kwargs.get("return_stats"))
        at_once = asked or self.watch.kernel == "partita"
        out = func(*args, **{**kwargs, "return_stats": at_once})
        stats = out[1] if at_once else None
        self.watch.guard_inside(lambda: self._look_partita(named(args, kwargs), stats))
        if asked or not at_once:
            return out
        return (out[0], *out[2:]) if out[2:] else out[0]

    def _look_partita(self, call: dict[str, Any], stats: Any) -> None:
        self.watch.observer.attend("partita", call["query"].shape, lambda: partita_scores(call), self._cross, stats)

    def _reduce(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self.watch.guard_inside(lambda: self._look_reduce(*args))
        return out

    def _look_reduce(self, *args: Any) -> None:
        query, key, value, scale, bias, target, support, _, softcap, *_ = args
        if value is None or target is not None or support or query.dim() != 4:
            return
        bias = None if bias is None else bias.detach()
        call = Scores(query.detach(), key.detach(), scale.detach(), bias, softcap=softcap)
        self.watch.observer.attend("partita", query.shape, lambda: call, None)

    def _short(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plain attention in an exported program: its arguments are those of the call."""
        out = func(*args, **kwargs)
        query, key, value, scale, causal, grouped, statistics = args
        call = {"query": query, "key": key, "value": value, "scale": scale, "is_causal": causal, "enable_gqa": grouped}
        self.watch.guard_inside(lambda: self._look_partita(call, partita.Stats(*out[1]) if statistics else None))
        return out

    # ---- losses ----------------------------------------------------------------------------------------------------

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's call as it is; then the loss itself is asked for its statistics."""
        out = func(*args, **kwargs)
        if kwargs.get("group") is None:
            name, ask = FACES[func]
            self.watch.guard(lambda: self.watch.observer.lose(name, ask(*args, **kwargs)))
        return out

    def _penalty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `nn.entropy_loss` has added up."""
        out = func(*args, **kwargs)
        self.watch.guard(lambda: self.watch.observer.lose("entropy_loss", penalty(out.detach())))
        return out
