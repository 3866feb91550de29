"""The one interception: every softmax of a model, whatever computes it, becomes one event.

    SoftmaxCall(kind, module, query, key, mask, scale, output, statistics)

The monitor and QK-clip subscribe to it. Calls are seen where all calls pass, and nothing is put on a module: those of
modules in `nn.Module.__call__`, those of torch's functions and partita's faces in a function mode of one thread. So a
forward that another library wrapped is called as it is, hooks keep their order, and a copy of a watched model is a copy
and nothing more.

A function mode is off while it handles a call. `multi_head_attention_forward` is handled as a whole, so its inner calls
are caught by wrappers in torch.nn.functional, for this thread and for the time of that one call.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

import partita
from partita.interception import SDPA, SOFTMAX, Patch, named
from partita.monitor.losses import FACES, Face
from partita.monitor.scores import Scores, partita_scores, sdpa_scores

MODULE_CALL = Patch(nn.Module, "__call__")
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
ATTENTION = re.compile(r"att(entio)?n", re.IGNORECASE)
ENDS = re.compile(r"att(entio)?n\d*$", re.IGNORECASE)  # MaskedAttention is one, AttentionMask is not
NOT_ATTENTION = re.compile(r"norm|mask|router|drop|bias|linear|proj|embed|identity", re.IGNORECASE)
Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
OWN_CALLS = ("forward", "_compiled_call_impl")
FAST = {kind.forward for kind in (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)}
CACHES = ("past_key_values", "past_key_value", "past", "cache_params", "inference_params")
_SOURCES = ("key_value_states", "encoder_hidden_states", "cross_states", "context", "memory", "key_value", "kv")
_CROSS = re.compile(r"cross|enc(oder)?_?dec|(?<![a-z])(encoder|memory)_att", re.IGNORECASE)


# ---- modules ---------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a module, to be made once or several times."""

    inner: Function
    module: nn.Module
    args: Args
    kwargs: Kwargs

    def __call__(self) -> Any:
        return self.inner(self.module, *self.args, **self.kwargs)


class ModuleNames:
    """The modules of a model by identity: names of those that may hold a softmax, and `leaves`, which hold none.

    A module that is gone is not mistaken for a new one at its address.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self.leaves: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # torch's own: Linear, LayerNorm, Dropout, ...
        for name, module in model.named_modules():
            if name and type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children()):
                self.leaves.add(module)
            elif not isinstance(module, torch.jit.ScriptModule):
                self._found[id(module)] = (weakref.ref(module), name)

    def name(self, module: nn.Module) -> str | None:
        entry = self._found.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def names(self) -> list[str]:
        return [name for _, name in self._found.values()]


@dataclass(eq=False)
class Frame:
    """A module being called, and what its caller passed about padding."""

    name: str
    module: nn.Module
    mask: Tensor | None = None  # (batch, n), True or 1 where a token is real
    passed: bool = False  # an attention_mask argument was given at all, also if None
    cross: bool = False
    linear: list[tuple[nn.Module, Tensor]] = field(default_factory=list)  # the maps it has called, with their outputs
    product: tuple[Tensor, Tensor] | None = None  # queries and keys of its last product


def frame(name: str, module: nn.Module, call: Call) -> Frame:
    """Of a call whose code is that of this module, which is the one called, or inside its shell."""
    mask = call.kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        mask = None
    return Frame(name, module, mask, "attention_mask" in call.kwargs, _crosses(module, call.args, call.kwargs))


def phase_of(module: nn.Module, kwargs: Kwargs) -> str:
    """What a call of the model from outside is for: its mode, the gradient mode, and whether it was given a cache."""
    if module.training and torch.is_grad_enabled():
        return "train"
    if any(kwargs.get(name) is not None for name in CACHES):
        return "generate"
    return "other" if module.training else "eval"


def _crosses(module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Keys come from elsewhere: given by a name for such keys, or as a second sequence of another length."""
    own = args[0] if args else kwargs.get("hidden_states", kwargs.get("x", kwargs.get("query")))
    given = (kwargs.get(name) for name in _SOURCES)
    if kwargs and any(isinstance(x, Tensor) and x is not own for x in given):
        return True
    second = args[1] if len(args) > 1 else None
    if not isinstance(own, Tensor) or not isinstance(second, Tensor) or not is_attention("", type(module)):
        return False
    sequences = own.dim() == second.dim() == 3 and second.is_floating_point() and len(own) == len(second)
    return sequences and own.shape[1] != second.shape[1]


def is_attention(name: str, kind: type) -> bool:
    """Named or classed like attention; `attn_norm`, which may be an Identity, is a norm."""
    if issubclass(kind, nn.MultiheadAttention):
        return True
    if issubclass(kind, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    both = kind.__name__ + " " + name.rpartition(".")[2]
    return bool(ENDS.search(kind.__name__) or (ATTENTION.search(both) and not NOT_ATTENTION.search(both)))


def named_cross(name: str) -> bool:
    """A layer named for taking its keys from elsewhere: EncDecAttention, encoder_attn, crossattention."""
    return bool(_CROSS.search(".".join(name.split(".")[-2:])))


def padding(stack: list[Frame], batch: int, n_query: int) -> Tensor | None:
    """(batch, n_query) of real queries, from the nearest module that was passed a mask; None where none was."""
    for entry in reversed(stack):
        if entry.mask is not None and entry.mask.shape[0] == batch and entry.mask.shape[1] >= n_query:
            return entry.mask[:, -n_query:] != 0  # with a cache the new tokens are the last ones
        if entry.passed and entry.mask is None and stacks_layers(entry.module):
            return None  # a decoder called without a mask does not inherit the encoder's
    return None


def stacks_layers(module: nn.Module) -> bool:
    """An encoder or a decoder."""
    return any(isinstance(child, nn.ModuleList) for child in module.children())


def takes_fast_path(module: nn.Module) -> bool:
    """torch's own modules may compute in one kernel under no_grad; a function mode would prevent it."""
    plain = type(module).forward in FAST and "forward" not in module.__dict__
    if not plain or module.training or not torch.backends.mha.get_fastpath_enabled():
        return False
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        return False
    inside = [] if isinstance(module, nn.MultiheadAttention) else list(module.modules())[1:]
    return not any(m._forward_hooks or m._forward_pre_hooks for m in inside)


# ---- the event, and who receives it ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SoftmaxCall:
    """One softmax of a module of the model: its arguments as they were given, its output, its statistics."""

    kind: str  # sdpa, MultiheadAttention, partita, softmax, observe
    module: Frame  # the innermost one being called
    canonical: Callable[[], Scores]  # the call in canonical form, made where it is wanted
    # (..., heads, n, dim); None of scores written by hand, but for `Subscriber.traces`
    query: Tensor | None = None
    key: Tensor | None = None
    mask: Tensor | None = None
    scale: Any = None
    output: Tensor | None = None
    statistics: Any = None  # Stats where the call itself gave them
    scores: Tensor | None = None  # (batch, heads, n_query, n_key): final scores, where they exist
    cross: bool | None = None  # the keys are another sequence's; None where the call does not show it

    @property
    def heads(self) -> int:
        given = self.query if self.scores is None else self.scores
        return given.shape[-3] if given is not None and given.dim() > 3 else 1


class Subscriber:
    """Receives the events of a `FunctionMode`, and of modules with `follow`. These are the defaults."""

    leaves: weakref.WeakSet[nn.Module]  # modules that are passed by while `stack` is not empty
    stack: list[Frame]  # modules of the model being called, in this thread
    kernel = "own"  # "partita": partita.attention gives its statistics with its output
    grouped = True  # attention over several processes is an event too
    traces = False  # products are remembered, so that scores written by hand come with their queries and keys
    replays = False  # calls inside autograd's backward (checkpointing) are events too

    def called(self, call: Call) -> Any:
        """A call of any module."""
        return call()

    def begin(self) -> None:
        """A loss is about to be called."""

    def listening(self) -> bool:
        """Whether anything is looked at now."""
        return bool(self.stack)

    def outside(self) -> bool:
        """Not inside the model: no softmax is of interest."""
        return not self.stack

    def serve(self, call: Kwargs) -> tuple[Tensor, Any] | None:
        """(output, Stats) in place of torch's kernel; None leaves the call to torch."""
        return None

    def softmax(self, make: Callable[[], SoftmaxCall | None]) -> None:
        """An event, made where it is wanted."""

    def loss(self, face: Face, args: Args, kwargs: Kwargs) -> None:
        """A loss was called."""

    def passed_over(self) -> None:
        """The module being called holds attention that is no event."""


def follow(owner: Subscriber, *, kept: bool = False) -> weakref.finalize[..., Any]:
    """Pass every call of a module through `owner.called` until the result is called, or the owner is gone.

    The owner is not kept alive from here, unless `kept`.
    """
    weak, strong = weakref.ref(owner), owner if kept else None

    def around(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = strong or weak()
        # a leaf that is passed by has no forward of its own, nor one that torch.compile runs
        if found is None or (module in found.leaves and found.stack and module.__dict__.keys().isdisjoint(OWN_CALLS)):
            return inner(module, *args, **kwargs)
        return found.called(Call(inner, module, args, kwargs))

    return weakref.finalize(owner, MODULE_CALL.remove, MODULE_CALL.add(around, everywhere=True))


def in_backward() -> bool:
    """Inside autograd's backward: a forward there is a recomputation (checkpointing) and was counted before."""
    return int(torch._C._current_graph_task_id()) != -1


def serve(call: Kwargs, *, plain: bool) -> tuple[Tensor, Any] | None:
    """(output, Stats) of an F.scaled_dot_product_attention call by partita's kernel, in one pass.

    plain: None where more than query, key and value is given, or where partita refuses the call.
    """
    query = call["query"]
    if query.is_nested or query.dim() < 3:
        return None
    if plain and (call.get("attn_mask") is not None or call.get("dropout_p") or query.dim() != 4):
        return None
    try:
        out, stats = partita.attention(**call, return_stats=True)
    except Exception:
        if plain:
            return None  # the user's kernel serves, or reports what is wrong with the call
        raise
    # laid out as torch's kernel does it: in the query's order of dimensions, which `view` may rely on
    like = torch.empty_like(query.detach()[..., :1].expand(*query.shape[:-1], out.shape[-1]))
    return out if out.stride() == like.stride() else like.copy_(out), stats


# ---- functions -------------------------------------------------------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    """Calls the function that was called, then lets the subscriber look at its arguments."""

    def __init__(self, subscriber: Subscriber) -> None:
        super().__init__()
        self.subscriber = subscriber
        self._cross: bool | None = None  # of the MultiheadAttention being run, if one is
        self._by_hand: list[weakref.ref[Tensor]] = []  # softmaxes that may turn out to be attention
        self._heads = 1
        self._thread = 0
        self._hooks: tuple[Any, ...] = ()
        self.suspended: int | None = None  # modes above this one, while it is out of the stack for an optimizer

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        handler = SOFTMAXES.get(func)  # most calls, an optimizer's above all, end here
        if handler is None and (self._by_hand or self.subscriber.traces):
            handler = AFTER.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        kwargs, subscriber = kwargs or {}, self.subscriber
        if torch.compiler.is_compiling() or (in_backward() and not subscriber.replays):
            return func(*args, **kwargs)
        if func in FACES:
            subscriber.begin()
        if not subscriber.listening():
            return func(*args, **kwargs)
        return handler(self, func, args, kwargs)

    # ---- on and off, wherever it is in the stack of modes ------------------------------------------------------------

    def on(self, above: int = 0) -> None:
        """Put this mode into the thread's stack, below this many others."""
        later = [_pop_mode() for _ in range(above)]
        for mode in (self, *reversed(later)):
            _push_mode(mode)

    def off(self) -> int | None:
        """Take this mode out of the thread's stack: the number of modes above it, or None where it was not in it."""
        if not any(mode is self for mode in _get_current_function_mode_stack()):
            return None
        above = []
        while (top := _pop_mode()) is not self:
            above.append(top)
        for mode in reversed(above):
            _push_mode(mode)
        return len(above)

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        self.on()
        try:
            yield
        finally:
            self.off()

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """As if this mode were not there: torch's fast paths are off while any mode is on."""
        above = self.off()
        try:
            yield
        finally:
            if above is not None:
                self.on(above)

    # An optimizer calls thousands of functions, none of them a softmax or a loss: the mode is suspended during
    # `optimizer.step()`, in this thread. A step with a closure calls the model, and is left alone.

    def open(self) -> None:
        """On until `shut`, but for steps of an optimizer."""
        self._thread = threading.get_ident()
        self._hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        self.on()

    def shut(self) -> None:
        self.resume()
        for hook in self._hooks:
            hook.remove()
        self.off()

    def resume(self) -> None:
        """Put the mode back; also when a module is called, in a step or after one that raised."""
        above, self.suspended = self.suspended, None
        if above is not None:
            self.on(above)

    def _before(self, _: Any, args: Args, kwargs: Kwargs) -> None:
        if threading.get_ident() == self._thread and not any(callable(x) for x in (*args[1:], *kwargs.values())):
            self.resume()
            self.suspended = self.off()

    def _after(self, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self.resume()

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _sdpa(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        call = named(args, kwargs)
        served = self.subscriber.serve(call)
        out, stats = served if served is not None else (func(*args, **kwargs), None)
        kind = "sdpa" if self._cross is None else "MultiheadAttention"
        self.subscriber.softmax(functools.partial(self.sdpa_call, call, kind, self._cross, out, stats))
        return out

    def sdpa_call(self, call: Kwargs, kind: str, cross: bool | None, out: Any, stats: Any) -> SoftmaxCall | None:
        query, key, mask, scale = call["query"], call["key"], call.get("attn_mask"), call.get("scale")
        if query.is_nested:
            return None
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        build = functools.partial(sdpa_scores, query, key, mask, call.get("is_causal", False), scale)
        return SoftmaxCall(kind, self.subscriber.stack[-1], build, query, key, mask, scale, out, stats, cross=cross)

    def _multi_head(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """MultiheadAttention: wrappers see its SDPA call, or its softmax where weights are returned."""
        before = self._cross, self._heads
        self._cross, self._heads = args[0] is not args[1], args[4]
        try:
            with SDPA.around(self._inner_sdpa), SOFTMAX.around(self._inner_softmax):
                return func(*args, **kwargs)
        finally:
            self._cross, self._heads = before

    def _inner_sdpa(self, inner: Function, *args: Any, **kwargs: Any) -> Any:
        with self:  # whatever serves it, torch or partita, is seen as everywhere else
            return inner(*args, **kwargs)

    def _inner_softmax(self, inner: Function, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = inner(scores, *args, **kwargs)
        cross, heads = self._cross, self._heads
        self.subscriber.softmax(lambda: self.scores_call(scores, heads, "MultiheadAttention", cross, out))
        return out

    def _softmax(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        out = func(*args, **kwargs)
        scores = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if isinstance(scores, Tensor) and scores.is_floating_point() and over_keys(scores, dim):
            self.subscriber.softmax(lambda: self.softmax_call(scores, out))
        return out

    def softmax_call(self, scores: Tensor, out: Tensor | None, cross: bool | None = None) -> SoftmaxCall | None:
        """A softmax over keys, where its module is attention."""
        top = self.subscriber.stack[-1]
        if is_attention(top.name, type(top.module)):
            kind = "MultiheadAttention" if isinstance(top.module, nn.MultiheadAttention) else "softmax"
            return self.scores_call(scores, heads_of(top.module), kind, cross, out)
        # a router, a gate, an output; or attention with another name, which the next product will show
        if out is not None:
            self._by_hand = [ref for ref in self._by_hand[-7:] if ref() is not None] + [weakref.ref(out)]
        return None

    def scores_call(self, scores: Tensor, heads: int, kind: str, cross: bool | None, out: Any) -> SoftmaxCall:
        """Scores written by hand; heads and batch may share the first of three dimensions."""
        final, top = scores.detach(), self.subscriber.stack[-1]
        if final.dim() == 3:
            final = final.unflatten(0, (-1, heads if final.shape[0] % heads == 0 else 1))
        query, key = _operands(top.product, final)
        build = functools.partial(Scores, None, None, scores=final)
        return SoftmaxCall(kind, top, build, query, key, output=out, scores=final, cross=cross)

    def _dropout(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        out = func(*args, **kwargs)
        if args and any(ref() is args[0] for ref in self._by_hand):
            self._by_hand.append(weakref.ref(out))
        return out

    def _product(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """A softmax times something is attention, whatever its module is called."""
        if not self.subscriber.outside():
            if any(ref() is given for ref in self._by_hand for given in args):
                self.subscriber.passed_over()
            given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][-2:]
            if self.subscriber.traces and len(given) == 2 and all(t.dim() >= 3 for t in given):
                self.subscriber.stack[-1].product = (given[0].detach(), given[1].detach().mT)
        return func(*args, **kwargs)

    def _partita(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """partita.attention is called as it was; its statistics are a second pass, unless the caller wanted them.

        One pass would give both, and other bits: in float64, and in the gradients with a sink.
        """
        if kwargs.get("group") is not None and not self.subscriber.grouped:
            return func(*args, **kwargs)
        wanted = bool(kwargs.get("return_stats"))
        at_once = wanted or self.subscriber.kernel == "partita"
        out = func(*args, **{**kwargs, "return_stats": at_once})
        stats = out[1] if at_once else None
        self.subscriber.softmax(lambda: self.partita_call(named(args, kwargs), out[0] if at_once else out, stats))
        return out if wanted or not at_once else out[0]

    def partita_call(self, call: Kwargs, out: Tensor | None, stats: Any) -> SoftmaxCall:
        query, key, mask, scale = call["query"], call["key"], call.get("attn_mask"), call.get("scale")
        build, top = functools.partial(partita_scores, call), self.subscriber.stack[-1]
        return SoftmaxCall("partita", top, build, query, key, mask, scale, out, stats, cross=self._cross)

    def _reduce(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """A reader that is not overridable still ends in the engine's operator."""
        out = func(*args, **kwargs)
        self.subscriber.softmax(lambda: self._reduce_call(*args))
        return out

    def _reduce_call(self, *args: Any) -> SoftmaxCall | None:
        query, key, value, scale, bias, target, support, _, softcap, *_ = args
        if value is None or target is not None or support or query.dim() != 4:
            return None
        bias = None if bias is None else bias.detach()
        build = functools.partial(Scores, query.detach(), key.detach(), scale.detach(), bias, softcap=softcap)
        return SoftmaxCall("partita", self.subscriber.stack[-1], build, query, key, bias, scale)

    def _short(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Plain attention in an exported program: its arguments are those of the call."""
        out = func(*args, **kwargs)
        query, key, value, scale, causal, grouped, statistics = args
        call = {"query": query, "key": key, "value": value, "scale": scale, "is_causal": causal, "enable_gqa": grouped}
        stats = partita.Stats(*out[1]) if statistics else None
        self.subscriber.softmax(lambda: self.partita_call(call, out[0], stats))
        return out

    # ---- losses ------------------------------------------------------------------------------------------------------

    def _loss(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """The user's call as it is; then the loss itself is called for its statistics."""
        out = func(*args, **kwargs)
        if kwargs.get("group") is None:
            face = FACES[func]
            self.subscriber.loss(face, *(((out,), {}) if face.returned else (args, kwargs)))
        return out


_PRODUCTS: tuple[Any, ...] = (
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum),
    *(torch.baddbmm, Tensor.baddbmm),
)
SOFTMAXES: dict[Any, Callable[..., Any]] = {
    torch._C._nn.scaled_dot_product_attention: FunctionMode._sdpa,
    F.multi_head_attention_forward: FunctionMode._multi_head,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), FunctionMode._softmax),
    **dict.fromkeys(FACES, FunctionMode._loss),
    partita.attention: FunctionMode._partita,
    torch.ops.partita.reduce.default: FunctionMode._reduce,
    torch.ops.partita.attention.default: FunctionMode._short,
}
# looked at after a softmax only, or to remember what scores were made of
AFTER = {**dict.fromkeys(_PRODUCTS, FunctionMode._product), F.dropout: FunctionMode._dropout}


def over_keys(scores: Tensor, dim: Any) -> bool:
    """A softmax over the last of three or four dimensions."""
    return scores.dim() in (3, 4) and dim in (-1, scores.dim() - 1)


def heads_of(module: nn.Module) -> int:
    return next((heads for name in HEADS if isinstance(heads := getattr(module, name, None), int)), 1)


def _operands(product: tuple[Tensor, Tensor] | None, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Queries and keys of the last product, (batch, heads, n, dim), if it is the one that gave the scores."""
    if product is None:
        return None, None
    query, key = product
    if query.dim() == 3 and query.shape[0] == scores.shape[:2].numel() == key.shape[0]:
        query, key = (t.unflatten(0, scores.shape[:2]) for t in (query, key))
    return (query, key) if (*query.shape[:-1], key.shape[-2]) == scores.shape else (None, None)
