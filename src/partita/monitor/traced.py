"""partita's faces in a graph: torch.compile traces them here, and leaves marks that the graph's rewriting finds.

Attention is marked in canonical form, because a mark holds tensors and numbers and no objects: its policy asked, its
support bound to terms, its statistics from the pass that gives the output. A loss is marked with its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from partita.engine.terms import pack
from partita.monitor.scores import partita_scores

PLAIN = (Tensor, int, float, str, type(None))


def mark(*args: Any, **kwargs: Any) -> None:
    """A call in a graph that does nothing; `partita.monitor.graphs` puts a report in its place."""


def around(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Traced in place of a face while a model is watched."""
    if kwargs.get("group") is not None:  # its keys lie on other ranks too, which may not be watched
        return function(*args, **kwargs)
    if function.__name__ == "attention":
        return _attention(function, *args, **kwargs)
    out = function(*args, **kwargs)
    plain = all(isinstance(x, PLAIN) for x in (*args, *kwargs.values()))
    mark(function.__name__, args if plain else (), kwargs if plain else {}, plain)
    return out


def _attention(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    *,
    return_stats: bool = False,
    support: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    **_: Any,
) -> Any:
    out, stats = function(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, support=support, bias=bias,
        softcap=softcap, sink=sink, return_stats=True,
    )  # fmt: skip
    call = partita_scores(
        query, key, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, support=support,
        bias=bias, softcap=softcap,
    )  # fmt: skip
    shown: list[Tensor] = []
    layout: list[int] | None = None
    if call.support is not None:
        terms = call.support.bind(call.n_query, call.n_key, (call.batch, call.heads), query.device)
        shown, layout = pack(terms)
    given = call.query, call.key, call.scale, call.mask, call.causal, call.softcap
    more = {"stats": tuple(stats), "shown": shown, "layout": layout, "shape": tuple(query.shape)}
    mark("attention", given, more, True)
    return (out, stats) if return_stats else out
