"""Where a model's softmaxes pass: torch functions seen by a function mode. Nothing in torch is replaced for good.

`multi_head_attention_forward` runs with the mode off, so that its inner calls are caught by a spy that stands in
torch.nn.functional for the time of that one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import partita
from partita.monitor import fused, outputs
from partita.monitor.probes import Scores, invisible
from partita.monitor.sites import is_attention

if TYPE_CHECKING:
    from partita.monitor.handle import Watch

SDPA = F.scaled_dot_product_attention
SOFTMAX = F.softmax
LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": outputs.cross_entropy,
    "linear_cross_entropy": outputs.linear,
    "info_nce_loss": outputs.info_nce,
    "clip_loss": outputs.clip,
    "nt_xent_loss": outputs.nt_xent,
    "supcon_loss": outputs.supcon,
}


def in_backward() -> bool:
    """Inside autograd's backward: a forward there is a recomputation (checkpointing) and was counted before."""
    return int(torch._C._current_graph_task_id()) != -1


class Seams(TorchFunctionMode):
    """Calls the function asked for, then lets the watch look at its arguments."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.table: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._sdpa,
            F.multi_head_attention_forward: self._multi_head,
            F.softmax: self._softmax,
            torch.softmax: self._softmax,
            Tensor.softmax: self._softmax,
            F.cross_entropy: self._loss("cross_entropy", outputs.cross_entropy),
        }
        for name, probe in LOSSES.items():
            if (function := getattr(partita, name, None)) is not None:
                self.table[function] = self._loss(name, probe)
        self.table[partita.attention] = self._partita
        # a face that is not overridable still ends in the engine's operator
        self.table[torch.ops.partita.reduce.default] = self._reduce

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self.table.get(func)  # most calls, an optimizer's above all, end here
        if handler is None or torch.compiler.is_compiling() or not self.watch.observing or in_backward():
            return func(*args, **kwargs)
        return handler(func, args, kwargs)

    # ---- attention -------------------------------------------------------------------------------------------------

    def _sdpa(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run_sdpa(func, args, kwargs)

    def _run_sdpa(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str = "sdpa", cross: bool | None = None
    ) -> Any:
        served = self._fused(*args, **kwargs)
        out, stats = served if served is not None else (func(*args, **kwargs), None)
        look: Any = self._look_sdpa
        self.watch.guard(lambda: look(*args, **kwargs, kind=kind, cross=cross, stats=stats))
        return out

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The output and its statistics from one pass, where that is possible and every row is wanted."""
        if self.watch.rows is not None or self.watch.layers is not None or self.watch.outside():
            return None
        try:
            if not fused.can_serve(query, key, value, *args, **kwargs):
                return None
            call = dict(zip(("attn_mask", "dropout_p", "is_causal", "scale"), args, strict=False)) | kwargs
            return fused.attend(query, key, value, bool(call.get("is_causal", False)), call.get("scale"))
        except Exception:
            return None  # the user's kernel serves, or reports what is wrong with the call

    def _look_sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        kind: str = "sdpa",
        cross: bool | None = None,
        stats: Any = None,
    ) -> None:
        if self.watch.outside() or query.is_nested:
            return
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        self.watch.attend(kind, query.shape, lambda: sdpa_scores(query, key, attn_mask, is_causal, scale), cross, stats)

    def _multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """MultiheadAttention: spies see its SDPA call, or its softmax where weights are returned."""
        heads, cross = args[4], args[0] is not args[1]

        def sdpa(*a: Any, **k: Any) -> Any:
            return self._run_sdpa(SDPA, a, k, kind="MultiheadAttention", cross=cross)

        def softmax(scores: Tensor, *a: Any, **k: Any) -> Any:
            out = SOFTMAX(scores, *a, **k)
            self.watch.guard(lambda: self._look_scores(scores, heads, "MultiheadAttention", cross))
            return out

        functional: Any = F
        before = functional.scaled_dot_product_attention, functional.softmax
        functional.scaled_dot_product_attention, functional.softmax = sdpa, softmax
        try:
            return func(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention, functional.softmax = before

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
            self.watch.guard(lambda: self._look_softmax(scores))
        return out

    def _look_softmax(self, scores: Tensor) -> None:
        top = self.watch.top()
        if top is None or not is_attention(top.follow.name, top.follow.module):
            return  # a router, a gate, an output: not attention
        module = top.follow.module
        names = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
        heads = next((h for n in names if isinstance(h := getattr(module, n, None), int)), 1)
        self._look_scores(scores, heads, "softmax", None)

    def _look_scores(self, scores: Tensor, heads: int, kind: str, cross: bool | None) -> None:
        if self.watch.outside():
            return
        if scores.dim() == 3:
            heads = heads if scores.shape[0] % heads == 0 else 1
            scores = scores.unflatten(0, (-1, heads))
        final = scores.detach()
        self.watch.attend(kind, final.shape, lambda: Scores(None, None, scores=final), cross)

    def _partita(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """partita.attention knows its statistics: they are asked for, and handed on only if the caller did."""
        if kwargs.get("group") is not None:
            # its keys lie on other ranks too, which may not be watched: asking for more would leave them waiting
            return func(*args, **kwargs)
        out, stats = func(*args, **{**kwargs, "return_stats": True})
        whole = stats if self.watch.rows is None else None
        look: Any = self._look_partita
        self.watch.guard(lambda: look(*args, **kwargs, stats=whole))
        return (out, stats) if kwargs.get("return_stats") else out

    def _look_partita(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        enable_gqa: bool = False,
        *,
        support: Any = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        stats: Any = None,
        **_: Any,
    ) -> None:
        if self.watch.outside():
            return
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if support is not None and support == partita.support.causal():
            is_causal, support = True, None  # needs no mask

        def scores() -> Scores:
            gibbs = partita.Gibbs(
                query.detach(), key.detach(), scale=scale, bias=bias, support=support, grouped=enable_gqa
            )
            call = sdpa_scores(query, key, join_masks(attn_mask, bias, support, query, key), is_causal, gibbs.scale)
            return Scores(call.query, call.key, call.scale, call.mask, call.causal, softcap)

        self.watch.attend("partita", query.shape, scores, None, stats)

    def _reduce(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        query, key, value, scale, bias, target, support, _, softcap, *_ = args
        if value is not None and target is None and not support and query.dim() == 4:
            call = Scores(
                query.detach(), key.detach(), scale.detach(), None if bias is None else bias.detach(), False, softcap
            )
            self.watch.guard(
                lambda: None if self.watch.outside() else self.watch.attend("partita", query.shape, lambda: call, None)
            )
        return out

    # ---- losses ----------------------------------------------------------------------------------------------------

    def _loss(self, name: str, probe: Callable[..., Any]) -> Callable[..., Any]:
        def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = func(*args, **kwargs)
            if kwargs.get("group") is not None:
                return out
            still = [a.detach() if isinstance(a, Tensor) else a for a in args]
            named = {k: v.detach() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
            self.watch.guard(lambda: self.watch.lose(name, probe(*still, **named)))
            return out

        return handle


def sdpa_scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: Any) -> Scores:
    """Any shape SDPA takes, as (batch, heads, n, dim)."""
    query, key = query.detach(), key.detach()
    mask = None if mask is None else mask.detach()
    if isinstance(scale, Tensor):
        scale = scale.detach()
    rank = query.dim()
    if rank == 2:
        query, key = query[None, None], key[None, None]
    elif rank == 3:
        query, key = query[:, None], key[:, None]
        mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
    elif rank > 4:
        lead = query.shape[:-3]
        if mask is not None and mask.dim() > 3:
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, rank - 4)
        query, key = query.flatten(0, rank - 4), key.flatten(0, rank - 4)
    while mask is not None and mask.dim() < 4:
        mask = mask[None]
    return Scores(query, key, scale, mask, causal)


def join_masks(mask: Tensor | None, bias: Tensor | None, support: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """partita's mask, bias and support as one mask."""
    if support is not None:
        seen = support.dense(query.shape[-2], key.shape[-2], query.shape[:-2], query.device)
        if mask is None:
            mask = seen
        elif mask.dtype == torch.bool:
            mask = mask & seen
        else:
            mask = mask.masked_fill(~seen, -torch.inf)
    if bias is None:
        return mask
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def self_padding(call: Scores) -> Tensor | None:
    """Padded queries of self-attention, read off the mask: a token that may not see itself is padding.

    Where no token may see itself the mask means something else, and nothing is left out.
    """
    dense = call.mask if call.scores is None else call.scores
    if dense is None or call.n_query != call.n_key:
        return None
    if dense.shape[2] == 1:
        line = dense[:, 0, 0]
    else:
        line = dense[:, 0].diagonal(dim1=-2, dim2=-1)
    seen = line if line.dtype == torch.bool else line > invisible(line.dtype)
    seen = seen.expand(call.batch, call.n_query)
    nobody = ~seen.any(-1, keepdim=True)
    return seen | nobody
