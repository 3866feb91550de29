"""torch.compile and watching: a compiled model stays compiled, into graphs that report.

For the time of a watched call the user's backend is given to torch.compile behind one that rewrites the graph
(`graphs.Instrumented`). torch.compile keeps the graphs of two backends separate, so those the user had before stay
untouched, and serve again afterwards. Modules are followed this way, compiled by torch.compile(model), model.compile()
or part by part. Whether a compiled function calls the model cannot be known: inside a `with` block functions run
without torch.compile, and with a handle alone they are graphs that are not seen.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from partita import Stats
from partita._torch_function import TRACED
from partita.engine.terms import Term, unpack
from partita.interception import Patch, named
from partita.monitor import graphs
from partita.monitor.graphs import Instrumented, Site
from partita.monitor.hooks import MODULE_CALL, Frame, FunctionMode, ModuleNames, SoftmaxCall, stacks_layers
from partita.monitor.losses import FACES
from partita.monitor.options import Coverage
from partita.monitor.scores import NoCloseLook, Scores, sdpa_scores
from partita.support import Support

if TYPE_CHECKING:
    from partita.monitor.handle import Watch

NOT_SEEN = (
    "nothing was called while watched; the graphs of a compiled function are not seen: compile the model instead, or "
    "use a `with` block, in which functions run without torch.compile"
)
# Internals of torch.compile, which may be missing in another version: a compiled module then runs without it.
NEEDED = (
    *("torch._dynamo.eval_frame._callback_from_stance", "torch._dynamo.eval_frame.skip_code"),
    *("torch._dynamo.trace_rules.add", "torch._dynamo.trace_rules.check"),
)
SILENT = "graphs ran that do not report: the version of torch, or its stance, lets no backend be put before theirs"
SKIPPED = "compiled in place, which torch.compile does not do to a module of torch's own: run without it"
OURS = ("compiled", "handle", "hooks", "measure", "observer")  # files that are never compiled with a model
SHELLS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
BY_NAME = {face.__name__: entry for face, entry in FACES.items()}
_COMPILE = Patch(torch, "compile")


def loaded() -> bool:
    """torch.compile was used in this process: loading it takes seconds, which watching alone must not cost."""
    return "torch._dynamo" in sys.modules


class _Eager:
    """torch.compile is off while any watch needs it: the first sets the stance, the last to leave restores it.

    Where torch.compile was not used yet, it is wrapped until then, so that its first use turns it off.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wanted = 0
        self._changed = ExitStack()
        self.forced = False

    def on(self) -> None:
        with self._lock:
            self._wanted += 1
            if self._wanted == 1 and loaded():
                self._force()
            elif self._wanted == 1:
                self._changed.callback(_COMPILE.remove, _COMPILE.add(self._first, everywhere=True))

    def off(self) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                self.forced = False
                self._changed.close()

    def _first(self, compile_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not loaded():
            with MODULE_CALL.lifted():  # it remembers nn.Module.__call__ as it finds it
                importlib.import_module("torch._dynamo")
        with self._lock:
            if self._wanted and not self.forced:
                self._force()
        return compile_(*args, **kwargs)

    def _force(self) -> None:
        self._changed.enter_context(torch.compiler.set_stance("force_eager"))
        self.forced = True


EAGER = _Eager()


def code_of(module: nn.Module) -> nn.Module | None:
    """The module whose code torch.compile runs when this one is called; None where it was not compiled.

    The one in the shell that torch.compile(model) made, or the module itself after model.compile() or model.forward =
    torch.compile(model.forward).
    """
    kept = module.__dict__
    inner = kept.get("_modules", {}).get("_orig_mod")
    if isinstance(inner, nn.Module):
        return inner
    if kept.get("_compiled_call_impl") is not None or hasattr(kept.get("forward"), "_torchdynamo_orig_callable"):
        return module
    return None


def missing() -> str | None:
    """Why graphs cannot be made to report, with this version of torch; None where they can."""
    for place in NEEDED:
        module, _, name = place.rpartition(".")
        try:
            if hasattr(importlib.import_module(module), name):
                continue
        except ImportError:
            place = module
        version = f"torch {torch.__version__} has no {place}"
        return f"run without torch.compile, because {version}, which following graphs needs"
    return None


def skipped(module: nn.Module) -> bool:
    """Compiled in place, and of a class whose code torch.compile leaves alone then."""
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    return code_of(module) is module and bool(rules.check(type(module).forward))


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and DistributedDataParallel's shells."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__name__ in SHELLS:
            model = model.module  # type: ignore[assignment]
        else:
            return model


class _Graphs:
    """torch.compile in this thread, for the time of one call: with graphs that report, or as it is."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._calls = 0
        self._callback: Patch | None = None

    @contextmanager
    def reporting(self, kernel: str, listener: Graphs) -> Iterator[None]:
        """Graphs that run in this call report to the listener, which is `silent` where one cannot."""
        before = graphs.HERE.listeners
        with self._lock:
            self._calls += 1
            TRACED.around = graphs.around
        graphs.HERE.listeners = (*before, listener) if listener not in before else before
        try:
            with self._through(lambda callback: self._instrumented(callback, kernel, listener)):
                yield
        finally:
            graphs.HERE.listeners = before
            with self._lock:
                self._calls -= 1
                TRACED.around = graphs.around if self._calls else None

    def off(self) -> AbstractContextManager[None]:
        """As if nothing had been compiled."""
        return self._through(lambda callback: None)

    def as_they_are(self) -> AbstractContextManager[None]:
        """Of a module that is not the model's, inside a block too."""
        return self._through(lambda callback: callback)

    @contextmanager
    def _through(self, change: Callable[[Any], Any]) -> Iterator[None]:
        """torch.compile looks up here what is about to run in a frame."""
        place: Any = importlib.import_module("torch._dynamo.eval_frame")
        if self._callback is None:
            torch.compiler.allow_in_graph(graphs.mark)
            rules: Any = importlib.import_module("torch._dynamo.trace_rules")
            for name in OURS:
                rules.add(f"partita.monitor.{name}")
            self._callback = Patch(place, "_callback_from_stance")
        # between two graphs modules are called one by one: what is compiled then is their code, and not ours around it
        if (call := MODULE_CALL.installed) is not None:
            place.skip_code(call.__code__)

        def around(inner: Callable[[Any], Any], callback: Any) -> Any:
            found = callback if EAGER.forced else inner(callback)
            return found if found in (None, False) else change(found)

        with self._callback.around(around):
            yield

    def _instrumented(self, callback: Any, kernel: str, listener: Graphs) -> Any:
        """The same with the user's backend behind ours; the same one every time, or each call would compile anew."""
        convert: Any = getattr(callback, "_torchdynamo_orig_backend", None)
        backend = getattr(convert, "_torchdynamo_orig_backend", None)
        if backend is None or not hasattr(convert, "_clone_with_backend") or not hasattr(callback, "hooks"):
            listener.silent = True  # a stance that defers compiling, or another version of torch
            return callback
        if isinstance(backend, Instrumented):
            return callback  # another watch came first
        known = self._known.setdefault(callback, {})
        if kernel not in known:
            behind = convert._clone_with_backend(Instrumented(backend, kernel))
            known[kernel] = type(callback)(behind, callback.hooks)
        return known[kernel]


GRAPHS = _Graphs()


# ---- what a watch does with a report from a graph: it looks as it would have, had the call been seen -----------------


@dataclass(frozen=True, eq=False)
class Bound(Support):
    """A support whose terms are known."""

    terms: tuple[Term, ...]

    def bind(self, *_: Any) -> tuple[Term, ...]:
        return self.terms


class Graphs:
    """The graphs that reported to one watch, and what it makes of their reports."""

    def __init__(self, watch: Watch, mode: FunctionMode, names: ModuleNames, called: dict[str, int]) -> None:
        self.watch, self._mode, self._names, self._called = watch, mode, names, called
        self._seen: set[str] = set()  # modules whose softmax was
        self._unseen: dict[str, None] = {}  # losses whose arguments are no part of a graph
        self.silent = False  # a graph ran that does not report
        self._known: dict[tuple[int, int], tuple[Frame, ...] | None] = {}  # by site and compiled module

    def reported(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A graph reports one of its calls, while it runs: a graph of the code of the innermost module called."""
        stack = self.watch.stack
        root = stack[-1].module
        place = site.number, id(root)
        if place not in self._known:
            self._known[place] = self._frames(site, root)
            if site.kind == "graph":
                self._read(root, *args)
        frames = self._known[place]
        if frames is None or site.kind == "graph" or not self.watch.listening():
            return
        depth = len(stack)
        stack.extend(frames)
        try:
            self.watch.observer.guard(lambda: self._look(site, args, kwargs))
        finally:
            del stack[depth:]

    def remarks(self, found: Coverage, seen: set[str]) -> list[str]:
        """Text about graphs for the coverage, of all modules seen; those seen inside graphs are added to it."""
        more = [SILENT] if self.silent else []
        if inside := sorted(self._seen & seen):
            found["in_graphs"] = inside
            more.append(f"{len(inside)} of them inside graphs of torch.compile")
        if self._unseen:
            more.append(f"losses not seen, because objects are no part of a graph: {', '.join(self._unseen)}")
        return more

    def _read(self, root: nn.Module, modules: tuple[str, ...], by_hand: tuple[str, ...]) -> None:
        """What holds for a graph as a whole, once: whose code is in it, and whose attention is not recorded."""
        for path in {*modules, *by_hand}:
            with contextlib.suppress(AttributeError):
                module = root.get_submodule(path)
                if (name := self._names.name(module)) is not None:
                    self._called[name] = self._called.get(name, 0) + 1
                    if path in by_hand:
                        self.watch.observer.by_hand[name] = type(module).__name__

    def _frames(self, site: Site, root: nn.Module) -> tuple[Frame, ...] | None:
        """The modules around a call, below the compiled one; None where the call is not in the watched model."""
        path = site.path + (".self_attn" if site.kind == "encoder layer" else "")
        parts = path.split(".") if path else []
        # a decoder that is passed a mask of its own does not inherit that of the model
        two = bool(getattr(getattr(root, "config", None), "is_encoder_decoder", False))
        try:
            chain = [root.get_submodule(".".join(parts[:end])) for end in range(1, len(parts) + 1)]
        except AttributeError:
            return None
        if self._names.name(chain[-1] if chain else root) is None:
            return None
        known = [(self._names.name(module), module) for module in chain]
        return tuple(Frame(n, m, passed=two and stacks_layers(m)) for n, m in known if n is not None)

    def _look(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Inside the frames of the call."""
        observer = self.watch.observer
        face, given, more, plain = args if site.kind == "face" else (site.kind, args, kwargs, True)
        if face not in BY_NAME:
            observer.record_attention(self._event(site.kind, given, more, plain, site.cross))
            self._seen.add(self.watch.stack[-1].name)
        elif plain:
            observer.record_loss(BY_NAME[face], given, more)
        else:
            self._unseen[BY_NAME[face].name] = None

    def _event(self, kind: str, args: Any, kwargs: Any, plain: bool, cross: bool) -> SoftmaxCall | None:
        if kind == "softmax":
            return self._mode.softmax_call(args[0] if args else kwargs["input"], None, cross)
        if kind != "face" and kind not in FUSED:
            return self._mode.sdpa_call(named(args, kwargs), kind, cross, None, kwargs["stats"])
        if not plain:
            raise NoCloseLook("a score given by a callable, or a position bias too large for a close look")
        call, stats = _marked(*args, **kwargs) if kind == "face" else (_fused(FUSED[kind], args), None)
        if call is None:
            return None
        kind, operands = "partita" if stats else "MultiheadAttention", (call.query, call.key, call.mask, call.scale)
        top = self.watch.stack[-1]
        return SoftmaxCall(kind, top, lambda: call, *operands, statistics=stats, cross=cross)


def _marked(*operands: Any, softcap: Any, stats: Any, shown: Any, layout: Any) -> tuple[Scores, Stats]:
    """Attention of partita, as `graphs` has marked it."""
    support = None if layout is None else Bound(unpack(shown, layout))
    return replace(Scores(*operands), support=support, softcap=softcap), Stats(*stats)


# the arguments of torch's fused layers that their attention depends on, in order
FUSED = {
    "encoder layer": "x width heads weight bias _ _ _ norm_first eps norm_weight norm_bias _ _ _ _ _ _ mask kind",
    "fused attention": "x _ _ _ heads weight bias _ _ mask _ _ kind",
}


def _fused(names: str, args: tuple[Any, ...]) -> Scores | None:
    """kind: 0 for a mask (n, n), 1 for padded keys (batch, n), 2 for both, (batch, heads, n, n); True is hidden."""
    call = dict(zip(names.split(), args, strict=False))
    x, weight, bias, mask = call["x"], call["weight"], call["bias"], call.get("mask")
    if x.is_nested:
        return None
    if call.get("norm_first"):
        x = F.layer_norm(x, (call["width"],), call["norm_weight"], call["norm_bias"], call["eps"])
    rows = 2 * weight.shape[0] // 3
    both = F.linear(x, weight[:rows], bias[:rows]).chunk(2, -1)
    query, key = (t.unflatten(-1, (call["heads"], -1)).transpose(1, 2) for t in both)
    if mask is not None:
        mask = ~mask if mask.dtype == torch.bool else mask
        mask = mask[:, None, None, :] if call.get("kind") == 1 else mask
    return sdpa_scores(query, key, mask, False, query.shape[-1] ** -0.5)
