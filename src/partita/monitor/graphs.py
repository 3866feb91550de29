"""A graph that torch.compile made of a model, rewritten so that its softmaxes and losses report themselves.

Every call of interest is replaced by the same call and a report of its arguments; outputs are what they were. The
rewritten graph goes to the user's own backend. Names come from torch.compile, which notes in which module each call was
traced. A report is an operator, `partita::report(ticket, tensors, sizes, numbers, site)`: it gives nothing back and has
an effect. The ticket, a counter that it advances, is what makes torch.compile keep it and keep its order; what is
measured stays outside the graph. Whether a step is looked at is decided when the operator runs, so that `every=` is no
new graph.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, fx, library, nn

from partita.engine.terms import pack
from partita.interception import SDPA, SOFTMAX, named
from partita.monitor.hooks import in_backward, is_attention, over_keys, serve
from partita.monitor.losses import FACES
from partita.monitor.scores import NoCloseLook, partita_scores

PRODUCTS = (torch.matmul, torch.bmm, torch.einsum, "matmul", "bmm", "__matmul__")
WRAPPED = ("tag_activation_checkpoint", "wrap")  # a body and its operands
TICKET = "partita_ticket"
RETURNED = frozenset(function.__name__ for function, face in FACES.items() if face.returned)
PLAIN = (Tensor, int, float, str, type(None))


class Instrumented:
    """The user's backend behind a graph that reports; `kernel` as `watch` takes it."""

    def __init__(self, backend: Callable[..., Any], kernel: str) -> None:
        self.backend, self.kernel = backend, kernel
        self.__name__ = getattr(backend, "__name__", type(backend).__name__)

        innermost: Any = backend
        while hasattr(innermost, "_torchdynamo_orig_backend"):
            innermost = innermost._torchdynamo_orig_backend
        self._innermost = innermost

    def __eq__(self, other: object) -> bool:
        """torch.compile lets modules of one class share a graph where their backends are equal."""
        if not isinstance(other, Instrumented) or self.kernel != other.kernel:
            return False
        return bool(self._innermost == other._innermost)

    def __hash__(self) -> int:
        return hash(Instrumented)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        ticket = torch.zeros((), dtype=torch.int64)
        changed = rewritten(graph, ticket, self.kernel)
        if changed is None:
            return self.backend(graph, inputs, **options)
        made = self.backend(changed, [*inputs, ticket], **options)
        return lambda *args: made(*args, ticket)


def rewritten(module: fx.GraphModule, ticket: Tensor, kernel: str = "own") -> fx.GraphModule | None:
    """The same graph, in which softmaxes and losses report, with one more input, the last; None where it has none."""
    modules: set[str] = set()  # whose code is in it
    by_hand: set[str] = set()  # that hold attention of which nothing is recorded
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, known))
    made = fx.GraphModule(module, graph, type(module).__name__)
    made.__dict__ |= {name: x for name, x in vars(module).items() if name not in vars(made)}
    made.meta = module.meta
    token = _one_more_input(graph)
    token.meta["example_value"] = ticket
    # torch.compile looks up where every input comes from; this one is not the user's
    for node, copy in {**known, token: token}.items():
        if node.op == "placeholder":
            copy._dynamo_source = getattr(node, "_dynamo_source", None)
    if not _rewrite(made, token, kernel, modules, by_hand):
        return None
    with graph.inserting_after(token):
        graph.call_function(
            _reporting(_nothing, Site("graph", "")), (token, tuple(sorted(modules)), tuple(sorted(by_hand)))
        )
    made.recompile()
    return made


def _one_more_input(graph: fx.Graph) -> fx.Node:
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        return graph.placeholder(TICKET)


def _rewrite(module: fx.GraphModule, token: fx.Node, kernel: str, modules: set[str], by_hand: set[str]) -> bool:
    """Rewrites the nodes; whether there was anything to report."""
    found = False
    for node in list(module.graph.nodes):
        where = stack(node)
        modules |= {path for path, _ in where}
        path, kind = where[-1] if where else ("", None)
        if node.op not in ("call_function", "call_method"):
            continue
        if (inner := _body(module, node)) is not None:
            carried = _one_more_input(inner.graph)
            if _rewrite(inner, carried, kernel, modules, by_hand):
                node.args, found = (*node.args, token), True
                inner.recompile()
            else:
                inner.graph.erase_node(carried)
            continue
        call = node.target
        made: Callable[..., Any] | None = None
        if call is SDPA_ITSELF:
            title = "MultiheadAttention" if issubclass(kind or object, nn.MultiheadAttention) else "sdpa"
            made = _sdpa(Site(title, path, crosses(node, path)), kernel)
        elif call is F.multi_head_attention_forward:
            cross = node.args[0] is not node.args[1]
            fused, written = (Site(title, path, cross) for title in ("MultiheadAttention", "softmax"))
            made = _open_multi_head(_sdpa(fused, kernel), written)
        elif call in FUSED_LAYERS:
            made = _reporting(call, Site(FUSED_LAYERS[call], path))
        elif call is mark:
            made = _reporting(_nothing, Site("face", path, crosses(node, path)))
        elif call in FACES:
            made = _reporting(call, Site(FACES[call].name, path))
        elif call in SOFTMAXES and _over_keys(node):
            if kind is not None and not is_attention(path, kind):
                if multiplies(node):
                    by_hand.add(path)
                    found = True
                continue
            made = _reporting(SOFTMAXES[call], Site("softmax", path, crosses(node, path)))
        if made is not None:
            node.op, node.target, node.args, found = "call_function", made, (token, *node.args), True
    return found


# ---- what replaces a call -------------------------------------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _reporting(call: Callable[..., Any], site: Site) -> Callable[..., Any]:
    def reported(ticket: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        report(ticket, site, args, kwargs)
        return out

    return reported


def _sdpa(site: Site, kernel: str) -> Callable[..., Any]:
    """torch's attention and a report; or partita's with its statistics, where it may and can serve."""

    def reported(ticket: Tensor, *args: Any, **kwargs: Any) -> Any:
        served = serve(named(args, kwargs), plain=True) if kernel == "partita" else None
        out, stats = (SDPA_ITSELF(*args, **kwargs), None) if served is None else served
        report(ticket, site, args, {**kwargs, "stats": stats})
        return out

    return reported


def _open_multi_head(fused: Callable[..., Any], written: Site) -> Callable[..., Any]:
    """MultiheadAttention is one call in a graph; its SDPA, or its softmax where weights are returned, report."""

    def reported(ticket: Tensor, *args: Any, **kwargs: Any) -> Any:
        def sdpa(inner: Callable[..., Any], *a: Any, **k: Any) -> Any:
            # whatever else serves it may have a scale of its own
            return fused(ticket, *a, **k) if inner is SDPA_ITSELF else inner(*a, **k)

        def softmax(inner: Callable[..., Any], scores: Tensor, *a: Any, **k: Any) -> Any:
            report(ticket, written, (scores,), {})
            return inner(scores, *a, **k)

        with SDPA.around(sdpa, traced=True), SOFTMAX.around(softmax, traced=True):
            return F.multi_head_attention_forward(*args, **kwargs)

    return reported


# ---- reading a graph ------------------------------------------------------------------------------------------------

SDPA_ITSELF = torch._C._nn.scaled_dot_product_attention
SOFTMAXES: dict[Any, Any] = {F.softmax: F.softmax, torch.softmax: torch.softmax, "softmax": torch.softmax}
FUSED_LAYERS: dict[Any, str] = {
    torch._transformer_encoder_layer_fwd: "encoder layer",
    torch._native_multi_head_attention: "fused attention",
}


def stack(node: fx.Node) -> list[tuple[str, type]]:
    """The modules a call was traced in, outermost first: (path inside the compiled module, class)."""
    return [(inside(source), kind) for source, kind in node.meta.get("nn_module_stack", {}).values()]


def inside(source: str) -> str:
    """A path such as get_submodule takes, from what torch.compile calls a module.

    >>> inside("L['self'].layers.0.attn"), inside("L['args'][0].layers[0].attn"), inside("L['self']")
    ('layers.0.attn', 'layers.0.attn', '')
    """
    # what was compiled while a watch is attached begins with our own wrapper, whose arguments begin with the module
    rest = re.sub(r"^\w+\['args'\]\[0\]|^\w+\[[^\]]*\]", "", source)
    return ".".join(x.strip("'\"") for x in re.findall(r"[^.\[\]]+", rest) if x != "_modules")


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph inside a checkpointed call."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or first.op != "get_attr" or getattr(node.target, "_name", "") not in WRAPPED:
        return None
    found = module.get_submodule(str(first.target))
    return found if isinstance(found, fx.GraphModule) else None


def _over_keys(node: fx.Node) -> bool:
    scores = node.args[0] if node.args else node.kwargs.get("input")
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    value = scores.meta.get("example_value") if isinstance(scores, fx.Node) else None
    return isinstance(value, Tensor) and over_keys(value, dim)


def multiplies(node: fx.Node) -> bool:
    """A softmax times something is attention, whatever its module is called."""
    for user in node.users:
        if user.target in PRODUCTS or str(user.target) == "<built-in function matmul>":
            return True
        if user.target in (F.dropout, "to", "type_as", "contiguous") and multiplies(user):
            return True
    return False


def crosses(node: fx.Node, path: str) -> bool:
    """Query and key are made of different inputs of the module they are made in: the innermost with weights for it."""
    given: Any = node.args[1] if node.target is mark else node.args
    query, key = [*given, None, None][:2]
    if not isinstance(query, fx.Node) or not isinstance(key, fx.Node):
        return False
    while True:
        found = [set(_sources(x, path, set())) for x in (query, key)]
        weights = {n for n in found[0] | found[1] if isinstance(n.meta["example_value"], nn.Parameter)}
        if weights or not path:
            break
        path = path.rpartition(".")[0]  # a core that is given its queries and keys: they were made further out
    a, b = (x - weights for x in found)
    return bool(weights) and bool(a) and bool(b) and not a & b


def _sources(node: fx.Node, path: str, seen: set[fx.Node]) -> Iterator[fx.Node]:
    """The tensors that come into the module, parameters among them."""
    if node in seen:
        return
    seen.add(node)
    where = stack(node)
    here = where[-1][0] if where else ""
    if node.op == "placeholder" or not (here == path or here.startswith(path + "." if path else "")):
        if isinstance(node.meta.get("example_value"), Tensor):
            yield node
        return
    for source in node.all_input_nodes:
        yield from _sources(source, path, seen)


# ---- the operator that reports ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Site:
    """A call in a graph: what it is, and in which module, as it is named inside the module that was compiled."""

    kind: str
    path: str
    cross: bool = False
    structure: Any = None  # of its arguments
    leaves: list[tuple[int | None, Any]] = field(default_factory=list)  # a place among `_TRACED`, or what was traced

    def __post_init__(self) -> None:
        SITES.append(self)
        self.number = len(SITES) - 1

    def arguments(self, *traced: Sequence[Any]) -> Any:
        """The (args, kwargs) of the call that reported."""
        given = [iter(values) for values in traced]
        leaves = [x if kind is None else next(given[kind]) for kind, x in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)


SITES: list[Site] = []


class _Here(threading.local):
    listeners: tuple[Any, ...] = ()  # what watches a call of a compiled module in this thread


HERE = _Here()
_TRACED: tuple[Any, ...] = (Tensor, torch.SymInt, torch.SymFloat)  # what an operator of a graph takes, each in a list


def report(ticket: Tensor, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put the operator into the graph that is being traced, with all tensors of the call; or run it."""
    leaves, site.structure = pytree.tree_flatten((args, kwargs))
    tensors, sizes, numbers = ([x for x in leaves if isinstance(x, kind)] for kind in _TRACED)
    kinds = [next((at for at, kind in enumerate(_TRACED) if isinstance(x, kind)), None) for x in leaves]
    site.leaves = [(kind, x if kind is None else None) for kind, x in zip(kinds, leaves, strict=True)]
    torch.ops.partita.report(ticket, [x.detach() for x in tensors], sizes, numbers, site.number)


library.define(
    "partita::report",
    "(Tensor(a!) ticket, Tensor[] tensors, SymInt[] sizes, float[] numbers, int site) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else (),
)


@library.impl("partita::report", "CompositeExplicitAutograd")
def _(ticket: Tensor, tensors: list[Tensor], sizes: list[int], numbers: list[float], site: int) -> None:
    ticket.add_(1)
    if in_backward():
        return  # a recomputation in the backward pass: the call was seen before
    for listener in HERE.listeners:
        args, kwargs = SITES[site].arguments(tensors, sizes, numbers)
        listener.reported(SITES[site], args, kwargs)


@library.register_fake("partita::report")  # type: ignore[untyped-decorator]
def _(*_: Any) -> None:
    return None


# ---- partita's faces, traced while a model is watched ----------------------------------------------------------------


def mark(*args: Any, **kwargs: Any) -> None:
    """A call in a graph that does nothing; `rewritten` puts a report in its place.

    Attention is marked in canonical form, because a mark holds tensors and numbers and no objects: its policy called,
    its support bound to terms, its statistics from the pass that gives the output. A loss is marked with its arguments.
    """


def around(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Traced in place of a face while a model is watched."""
    if kwargs.get("group") is not None:  # keys of other ranks, which may not be watched
        return function(*args, **kwargs)
    if function.__name__ == "attention":
        return _attention(function, args, kwargs)
    out = function(*args, **kwargs)
    if function.__name__ in RETURNED:
        mark(function.__name__, (out,), {}, True)
        return out
    plain = all(isinstance(x, PLAIN) for x in (*args, *kwargs.values()))
    mark(function.__name__, args if plain else (), kwargs if plain else {}, plain)
    return out


def _attention(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = named(args, kwargs)
    wanted = given.pop("return_stats", False)
    out, stats = function(**given, return_stats=True)
    try:
        call = partita_scores(given)
    except NoCloseLook:  # what has no close look without a graph has none here, and breaks no graph
        mark("attention", (), {}, False)
        return (out, stats) if wanted else out
    shown: list[Tensor] = []
    layout: list[int] | None = None
    if call.support is not None:
        terms = call.support.bind(call.n_query, call.n_key, (call.batch, call.heads), given["query"].device)
        shown, layout = pack(terms)
    operands = call.query, call.key, call.scale, call.mask, call.causal
    mark(
        "attention", operands, {"softcap": call.softcap, "stats": tuple(stats), "shown": shown, "layout": layout}, True
    )
    return (out, stats) if wanted else out
