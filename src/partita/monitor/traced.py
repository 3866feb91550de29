"""partita's faces in a graph: torch.compile traces them here, and leaves marks that the graph's rewriting finds.

Attention is marked in canonical form, because a mark holds tensors and numbers and no objects: its policy asked, its
support bound to terms, its statistics from the pass that gives the output. A loss is marked with its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from partita.engine.terms import pack
from partita.interception import named
from partita.monitor.scores import partita_scores

PLAIN = (Tensor, int, float, str, type(None))


def mark(*args: Any, **kwargs: Any) -> None:
    """A call in a graph that does nothing; `partita.monitor.graphs` puts a report in its place."""


def around(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Traced in place of a face while a model is watched."""
    if kwargs.get("group") is not None:  # its keys lie on other ranks too, which may not be watched
        return function(*args, **kwargs)
    if function.__name__ == "attention":
        return _attention(function, args, kwargs)
    out = function(*args, **kwargs)
    plain = all(isinstance(x, PLAIN) for x in (*args, *kwargs.values()))
    mark(function.__name__, args if plain else (), kwargs if plain else {}, plain)
    return out


def _attention(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = named(args, kwargs)
    asked = given.pop("return_stats", False)
    out, stats, *more = function(**given, return_stats=True)
    _mark_attention(given, stats)
    if asked:
        return out, stats, *more
    return (out, *more) if more else out


def _mark_attention(given: dict[str, Any], stats: Any) -> None:
    try:
        call = partita_scores(given)
    except ValueError:  # what has no close look without a graph has none here, and breaks no graph
        mark("attention", (), {}, False)
        return
    query = given["query"]
    shown: list[Tensor] = []
    layout: list[int] | None = None
    if call.support is not None:
        terms = call.support.bind(call.n_query, call.n_key, (call.batch, call.heads), query.device)
        shown, layout = pack(terms)
    operands = call.query, call.key, call.scale, call.mask, call.causal, call.softcap
    seen = {"stats": tuple(stats), "shown": shown, "layout": layout, "shape": tuple(query.shape)}
    mark("attention", operands, seen, True)
