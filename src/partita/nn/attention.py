"""Multi-head attention with torch's constructor, parameters and forward, and partita's scale, statistics and sinks.

head_r = attention(x W_Q^r, y W_K^r, z W_V^r)          out = concat(head_1 ... head_h) W_O          (M-ATT-2, M-ATT-3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from partita import support as supports
from partita._checks import check_bool, check_float, check_positive, check_whole, has_values, shape_text
from partita.attn import Bias, Positions, Rotary, attention, entropy_penalty
from partita.attn.entropy import check_entropy_weight, weighs
from partita.attn.problem import Options, Problem, both
from partita.attn.rotary_attention import rotary_attention, rotary_weights
from partita.engine import Stats
from partita.engine.callable_score import Pairs
from partita.engine.state import sink_share
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.nn.controller import TemperatureController
from partita.precision import autocasts
from partita.scale import CalibratedLog, KappaLog, Policy
from partita.score import Score
from partita.support import Support

__all__ = ["EntropyInvariantAttention", "MultiheadAttention", "entropy_loss", "picked_up"]


class MultiheadAttention(nn.Module):
    """torch.nn.MultiheadAttention on partita: same arguments, parameter names and results, in O(n) memory.

    State dicts load both ways as long as only torch's options are used. Beyond torch:

    scale: how sharp, a number or a policy of `partita.scale`; a policy counts the keys a row may *see*.
    kv_heads: fewer heads for keys and values than for queries.
    rotary: rotate queries and keys by their position: True, the base of the frequencies, or a setting such as
        `attn.YaRN(4.0, 512)` or `attn.Clipped(511)`.
    qk_norm: root-mean-square norm of queries and keys, one gain per head dimension.
    sink: a learned score per head that takes part of the mass (initially 0).
    score: replaces <query, key> of a head, as for `partita.attention`; `scale` None then means 1. A module's parameters
        are this one's, and the same for all heads.
    attention_entropy_weight: in training the module's penalty is -weight * mean(H / log n), which
        `partita.nn.entropy_loss(model)` adds up; above 0 keeps attention broad, below 0 sharpens it. One number, or one
        per head.

    Masks are torch's: True hides. A row that sees nothing gives 0 before the output projection, never nan.

    >>> layer = MultiheadAttention(8, 2, batch_first=True)
    >>> out, weights = layer(torch.zeros(1, 3, 8), torch.zeros(1, 5, 8), torch.zeros(1, 5, 8))
    >>> out.shape, weights.shape
    (torch.Size([1, 3, 8]), torch.Size([1, 3, 5]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale: float | Policy | None = None,
        kv_heads: int | None = None,
        rotary: bool | float | Positions = False,
        qk_norm: bool = False,
        sink: bool = False,
        score: Score | None = None,
        attention_entropy_weight: float | Sequence[float] | Tensor = 0.0,
    ):
        super().__init__()
        check_entropy_weight(attention_entropy_weight, num_heads)
        self.attention_entropy_weight = attention_entropy_weight
        self.entropy_loss: Tensor | None = None  # of the last forward, while training
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kv_heads": kv_heads, "kdim": kdim, "vdim": vdim}
        for name, size in sizes.items():
            if size is not None or name in ("embed_dim", "num_heads"):
                check_whole(name, size, least=1)
        if embed_dim % num_heads:
            raise ShapeError(f"embed_dim must be a multiple of num_heads; got {embed_dim} and {num_heads}.")
        self.kv_heads = num_heads if kv_heads is None else kv_heads
        if num_heads % self.kv_heads:
            raise ShapeError(f"num_heads must be a multiple of kv_heads; got {num_heads} and {kv_heads}.")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        if score is not None:
            Pairs.of(score)
        self.scale, self.score = scale, score
        if not isinstance(rotary, (Positions, bool)):
            check_positive("rotary", rotary, zero=True)
        self.rotary = rotary if isinstance(rotary, Positions) else 10000.0 if rotary is True else float(rotary)
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        small = self.kv_heads * self.head_dim
        if self.kdim == embed_dim and self.vdim == embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty(embed_dim + 2 * small, embed_dim, **make))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim, **make))
            self.k_proj_weight = nn.Parameter(torch.empty(small, self.kdim, **make))
            self.v_proj_weight = nn.Parameter(torch.empty(small, self.vdim, **make))
            self.register_parameter("in_proj_weight", None)
        self.in_proj_bias = nn.Parameter(torch.empty(embed_dim + 2 * small, **make)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **make)
        self.bias_k = nn.Parameter(torch.empty(1, 1, small, **make)) if add_bias_kv else None
        self.bias_v = nn.Parameter(torch.empty(1, 1, small, **make)) if add_bias_kv else None
        self.q_norm = nn.RMSNorm(self.head_dim, **make) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, **make) if qk_norm else None
        self.sink = nn.Parameter(torch.zeros(num_heads, **make)) if sink else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch's initialisation, in torch's order: the same seed gives the same weights."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    # ---- projections -----------------------------------------------------------------------------------------------

    def projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Weights and biases of query, key and value."""
        small = self.kv_heads * self.head_dim
        sizes = [self.embed_dim, small, small]
        if self.in_proj_weight is not None:
            weights = tuple(self.in_proj_weight.split(sizes))
        else:
            given = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = tuple(weight for weight in given if weight is not None)
        return weights, (None, None, None) if self.in_proj_bias is None else tuple(self.in_proj_bias.split(sizes))

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, heads, n, head_dim) each, with torch's extra key and value appended."""
        weights, biases = self.projections()
        q, k, v = (nn.functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1)], 1)
        if self.add_zero_attn:
            k, v = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.positions is not None and self._clipped is None:
            q, k = self.positions.turn(q), self.positions.turn(k)
        return q, k, v

    @property
    def positions(self) -> Positions | None:
        """How queries and keys are rotated; `rotary` may be changed after training, for longer inputs."""
        if isinstance(self.rotary, Positions):
            return self.rotary
        return Rotary(base=self.rotary) if self.rotary else None

    @property
    def _clipped(self) -> Positions | None:
        """A setting that rotating queries and keys beforehand cannot serve."""
        return None if self.positions is None or self.positions.furthest is None else self.positions

    # ---- forward ---------------------------------------------------------------------------------------------------

    def _check(self, *inputs: Tensor) -> None:
        """Three tensors with or without a batch, of the features that the projections take."""
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        assert weight is not None
        sizes = (self.embed_dim, self.kdim, self.vdim)
        for name, given, size in zip(("query", "key", "value"), inputs, sizes, strict=True):
            if not isinstance(given, Tensor) or not given.is_floating_point():
                check_float(name, given)
            if given.dim() not in (2, 3) or given.dim() != inputs[0].dim() or given.shape[-1] != size:
                raise ShapeError(
                    f"{name} must be (..., n, {size}), all three with a batch dimension or all without; "
                    f"got {shape_text(given)}, query {shape_text(inputs[0])}."
                )
            if given.dtype != weight.dtype and not autocasts(given.device.type):
                raise DtypeError(
                    f"{name} must have the dtype of the weights, {weight.dtype}; got {given.dtype}. Convert with .to()."
                )

    def forward(
        self,
        query: Tensor,  # (n_query, batch, embed_dim), (batch, n_query, embed_dim) with batch_first, or unbatched
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,  # (batch, n_key): True hides a key, a number is added
        need_weights: bool = True,
        attn_mask: Tensor | None = None,  # (n_query, n_key), or with (batch,) or (batch * heads,) in front
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        support: Support | None = None,
        attn_bias: Tensor | Bias | None = None,
        return_stats: bool = False,
    ) -> tuple[Tensor, Any]:
        """The output, and the weights (dense, before dropout), Stats with return_stats=True, or None.

        is_causal hides the future, also without an attn_mask. support and attn_bias are those of `partita.attention`.
        """
        self._check(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            if isinstance(key_padding_mask, Tensor):
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self.project(query, key, value)
        sizes = (query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        added: Tensor | None = None
        for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if mask is not None:  # it shows the keys that add_bias_kv and add_zero_attn append
                mask = nn.functional.pad(_with_heads(name, mask, sizes), (0, k.shape[2] - key.shape[1]))
                if mask.dtype == torch.bool:
                    support = both(support, supports.mask(~mask))
                else:
                    added = mask if added is None else added + mask
        if added is not None:
            if isinstance(attn_bias, Bias):
                attn_bias = attn_bias.dense(q.shape[2], k.shape[2], q)
            attn_bias = added if attn_bias is None else added + attn_bias
        options: Options = {
            "scale": self.scale, "enable_gqa": self.kv_heads != self.num_heads, "support": support, "bias": attn_bias,
            "is_causal": is_causal, "score": self.score,
        }  # fmt: skip
        dropout = self.dropout if self.training else 0.0
        steered = self.scale if self.training and isinstance(self.scale, TemperatureController) else None
        penalised = self.training and weighs(self.attention_entropy_weight)
        counted = return_stats or steered is not None or penalised or (need_weights and self.sink is not None)
        found: Any
        stats: Any = None
        if self._clipped is None:
            found = attention(q, k, v, dropout_p=dropout, sink=self.sink, return_stats=counted, **options)
        elif dropout > 0:
            raise ValueRangeError("clipped distances take no dropout; set dropout=0 or call eval() first.")
        else:
            found = rotary_attention(q, k, v, self._clipped, sink=self.sink, return_stats=counted, **options)
        heads, stats = found if counted else (found, None)
        if steered is not None:
            steered.observe(stats)
        if penalised:
            self.entropy_loss = entropy_penalty(stats, self.attention_entropy_weight)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        second: Any = None
        if return_stats:
            second = stats if batched else Stats(*(field[0] for field in stats))
        elif need_weights:
            second = self._weights(q, k, options, stats, average_attn_weights)
            second = second if batched else second[0]
        if not batched:
            return out[0], second
        return (out if self.batch_first else out.transpose(0, 1)), second

    def _weights(self, q: Tensor, k: Tensor, options: Options, stats: Stats | None, average: bool) -> Tensor:
        if self._clipped is None:
            weights = Problem.of(q, k, **options).gibbs().probs()  # writes out a rule
        else:
            weights = rotary_weights(q, k, self._clipped, **options)
        if self.sink is not None and stats is not None:
            share = 1 - sink_share(self.sink.to(stats.log_partition)[:, None], stats.log_partition)
            weights = weights * share[..., None].to(weights.dtype)
        return weights.mean(1) if average else weights

    def __getstate__(self) -> dict[str, Any]:
        """Without the penalty of the last forward."""
        return {**self.__dict__, "entropy_loss": None}

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}", f"heads={self.num_heads}"]
        parts += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.num_heads else []
        parts += [f"scale={self.scale}"] if self.scale is not None and not isinstance(self.scale, nn.Module) else []
        return ", ".join(parts)


class EntropyInvariantAttention(MultiheadAttention):
    """The module of the notes, corrected: scale = kappa * log(n) / head_dim, n the keys each row may see.

    n is the key length in cross attention (M-SCL-6) and the visible length under masks (M-SCL-5); a row without keys
    gives 0 (M-ATT-6). With kappa = 1 the scale has hardly any effect: `calibrated` chooses kappa from the standard
    deviation of the scores (M-SCL-16). The notes' arguments, call and state dict (W_Q, W_K, W_V, W_O) are understood;
    their mask is `keep_mask`, their d_model is `embed_dim`.

    >>> attn = EntropyInvariantAttention(8, 2, kappa=1.0)
    >>> X = torch.zeros(1, 5, 8)
    >>> output, weights = attn(X, X, X)  # as the notes print it; attn(X) makes no weights
    >>> output.shape, weights.shape
    (torch.Size([1, 5, 8]), torch.Size([1, 2, 5, 5]))
    """

    def __init__(
        self,
        embed_dim: int | None = None,
        num_heads: int | None = None,
        kappa: float = 1.0,
        *,
        d_model: int | None = None,
        batch_first: bool = True,
        **options: Any,
    ):
        if "scale" in options:
            raise ValueRangeError("EntropyInvariantAttention has its own scale; use MultiheadAttention(scale=...).")
        if (embed_dim is None) == (d_model is None):
            raise ValueRangeError(f"give embed_dim or d_model, which are the same; got {embed_dim} and {d_model}.")
        size: Any = d_model if embed_dim is None else embed_dim
        heads: Any = num_heads
        super().__init__(size, heads, batch_first=batch_first, scale=KappaLog(kappa), **options)
        self.kappa = kappa

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """torch's names, or those of the notes: W_Q, W_K, W_V and W_O, linear maps one by one."""
        for part in ("weight", "bias"):
            theirs = [f"{prefix}W_{letter}.{part}" for letter in "QKVO"]
            if all(name in state_dict for name in theirs):
                *inner, outer = (state_dict.pop(name) for name in theirs)
                state_dict[f"{prefix}in_proj_{part}"] = torch.cat(inner)
                state_dict[f"{prefix}out_proj.{part}"] = outer
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def calibrated(self, reference: float, sigma: float, growth: float = 1.0) -> EntropyInvariantAttention:
        """This module with kappa = head_dim sqrt(growth) / (sigma sqrt(log reference)): entropy stationary there.

        sigma: standard deviation of the raw scores <query, key> of a row, as `partita.scale.measure_sigma` finds it.
        growth: of a position bias alone, as `partita_theory.sharpness.bias_growth` finds it; 1 without one.
        """
        self.kappa = float(CalibratedLog(reference, sigma, growth).kappa(self.head_dim))
        self.scale = KappaLog(self.kappa)
        return self

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *torchs: Any,
        keep_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """As MultiheadAttention, after value in torch's order; key defaults to query, value to key.

        The weights: those of every head, (batch, heads, n_query, n_key), of a call with key and value as in the notes;
        None of a call with the query alone. `need_weights` and `average_attn_weights` choose, and are then torch's.

        keep_mask: shows where it is not 0, while torch's `key_padding_mask` and `attn_mask` hide where they are True:
            (n_query, n_key), also with (batch,) or (batch, heads or 1) in front, boolean or of zeros and ones. A
            positional mask that could be either is refused.
        """
        as_printed = key is not None and value is not None
        key = query if key is None else key
        value = key if value is None else value
        named = dict(zip(_TORCHS, torchs, strict=False))
        if named.keys() & options.keys() or len(torchs) > len(_TORCHS):
            raise ValueRangeError(f"too many arguments: after value come {', '.join(_TORCHS)}, each once.")
        if options.pop("mask", None) is not None:
            raise ValueRangeError(f"mask= is ambiguous. {_LANGUAGES}")
        self._check(query, key, value)
        rows = int(self.batch_first and query.dim() == 3)
        batch, n_query, n_key = query.shape[1 - rows] if query.dim() == 3 else 1, query.shape[rows], key.shape[rows]
        pad = named.get("key_padding_mask")
        if isinstance(pad, Tensor) and (tuple(pad.shape) != (batch, n_key) or batch == n_query):
            raise ValueRangeError(f"a mask {tuple(pad.shape)} as the fourth argument could be either. {_LANGUAGES}")
        named |= options
        if "need_weights" not in named:
            named["need_weights"] = as_printed and not named.get("return_stats", False)
            named.setdefault("average_attn_weights", False)
        if keep_mask is not None:
            if named.get("attn_mask") is not None:
                raise ValueRangeError("give keep_mask or attn_mask, not both: join them with & of what they show.")
            named["attn_mask"] = ~_kept(keep_mask, n_query, n_key)
        return super().forward(query, key, value, **named)


_TORCHS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
_LANGUAGES = (
    "Name it: keep_mask= shows where it is not 0 (n_query, n_key), attn_mask= hides where it is True (n_query, n_key), "
    "key_padding_mask= hides keys where it is True (batch, n_key)."
)


# ---- masks: torch's hide, the notes' show ----------------------------------------------------------------------------


def _with_heads(name: str, mask: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """torch's mask as (batch, heads, n_query, n_key), up to broadcasting."""
    if not isinstance(mask, Tensor):
        check_float(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DtypeError(f"{name} must be boolean (True hides) or floating (added); got {mask.dtype}.")
    batch, heads, n_query, n_key = sizes
    if name == "key_padding_mask":
        if mask.shape != (batch, n_key):
            raise ShapeError(f"key_padding_mask must be (batch, n_key) = {(batch, n_key)}; got {tuple(mask.shape)}.")
        return mask[:, None, None, :]
    if mask.shape[-2:] == (n_query, n_key):
        if mask.dim() in (2, 4):
            return mask
        if mask.dim() == 3 and mask.shape[0] == batch * heads:
            return mask.view(sizes)
        if mask.dim() == 3 and mask.shape[0] == batch:  # one per batch entry: it gains a head axis
            return mask[:, None]
    raise ShapeError(
        f"attn_mask must be {(n_query, n_key)}, with {batch} or {batch * heads} in front; got {tuple(mask.shape)}."
    )


def _kept(mask: Tensor, n_query: int, n_key: int) -> Tensor:
    """A keep-mask as booleans over (..., n_query, n_key)."""
    if not isinstance(mask, Tensor):
        check_bool("keep_mask", mask)
    if mask.dtype != torch.bool:
        if has_values(mask) and not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueRangeError("keep_mask must be boolean, or hold 0 and 1; numbers to be added are attn_mask=.")
        mask = mask != 0
    rows = tuple(mask.shape[-2:])
    if mask.dim() < 2 or rows not in ((n_query, n_key), (1, n_key)):
        raise ShapeError(
            f"keep_mask must be {(n_query, n_key)}, also with batch and heads in front; got {tuple(mask.shape)}. "
            f"Of keys alone it is mask[:, None, :]."
        )
    return mask.expand(*mask.shape[:-2], n_query, n_key)


# ---- entropy in the loss ---------------------------------------------------------------------------------------------


def entropy_loss(model: nn.Module) -> Tensor:
    """The sum of the entropy penalties of a model's attention layers in its last forward; 0 without any.

        loss = task + entropy_loss(model)          penalty of a layer = -mean_i weight_i H_i / log n_i        (M-INF-5)

    Layers with an `attention_entropy_weight` (of `partita.nn`, or of `partita.hf.register`) store the penalty of their
    last call in training; here the penalties are added up and removed, so that no graph outlives its step. Inside
    `with partita.watch(model)` the sum is a row of `losses` in the record.

    >>> layer = partita.nn.MultiheadAttention(8, 2, attention_entropy_weight=0.1)
    >>> _ = layer(torch.zeros(5, 1, 8), torch.zeros(5, 1, 8), torch.zeros(5, 1, 8))
    >>> entropy_loss(layer).item()  # equal scores are as broad as can be: -0.1 * 1
    -0.1...
    """
    found = []
    for module in model.modules():
        penalty = module.__dict__.get("entropy_loss")
        if isinstance(penalty, Tensor):
            found.append(penalty)
            module.__dict__["entropy_loss"] = None
    if found:
        return picked_up(torch.stack([x.to(found[0].device) for x in found]).sum())
    first = next(model.parameters(), None)
    return torch.zeros((), device=None if first is None else first.device)


def picked_up(penalty: Tensor) -> Tensor:
    """The penalty, passed through a TorchFunctionMode such as a watch's. A graph has no modes."""
    if not torch.compiler.is_compiling() and torch._C._is_torch_function_mode_enabled():
        seen: Tensor = handle_torch_function(picked_up, (), penalty)
        return seen
    return penalty
