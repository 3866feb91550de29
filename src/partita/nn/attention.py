"""Multi-head attention with torch's constructor, parameters and forward, and partita's scale, statistics and sinks.

head_r = attention(x W_Q^r, y W_K^r, z W_V^r)          out = concat(head_1 ... head_h) W_O          (M-ATT-2, M-ATT-3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita import support as supports
from partita.attn import Bias, Positions, Rotary, attention, entropy_penalty
from partita.attn.entropy import check_entropy_weight, weighs
from partita.attn.problem import Options, Problem, both
from partita.attn.rotary_attention import rotary_attention, rotary_weights
from partita.engine import Stats
from partita.errors import ShapeError, ValueRangeError
from partita.nn.controller import TemperatureController
from partita.nn.masks import hidden_and_added, kept
from partita.scale import CalibratedLog, KappaLog, Policy
from partita.support import Support

__all__ = ["EntropyInvariantAttention", "MultiheadAttention"]


class MultiheadAttention(nn.Module):
    """torch.nn.MultiheadAttention on partita: same arguments, parameter names and results, in O(n) memory.

    State dicts load both ways as long as only torch's options are used. Beyond torch:

    scale: how sharp, a number or a policy of `partita.scale`; a policy counts the keys a row may *see*.
    kv_heads: fewer heads for keys and values than for queries.
    rotary: turn queries and keys by their position: True, the base of the frequencies, or a setting such as
        `attn.YaRN(4.0, 512)` or `attn.Clipped(511)`.
    qk_norm: root-mean-square norm of queries and keys, one gain per head dimension.
    sink: a learned score per head that takes part of the mass (starts at 0).
    attention_entropy_weight: while training, `entropy_loss` of the module is -weight * mean(H / log n), which
        `partita.nn.entropy_loss(model)` picks up for the loss; above 0 keeps attention broad, below 0 sharpens it. One
        number, or one per head.

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
        attention_entropy_weight: float | Sequence[float] | Tensor = 0.0,
    ):
        super().__init__()
        check_entropy_weight(attention_entropy_weight, num_heads)
        self.attention_entropy_weight = attention_entropy_weight
        self.entropy_loss: Tensor | None = None  # of the last forward, while training
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ShapeError(f"embed_dim must be a multiple of num_heads; got {embed_dim} and {num_heads}.")
        self.kv_heads = num_heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or num_heads % self.kv_heads:
            raise ShapeError(f"num_heads must be a multiple of kv_heads; got {num_heads} and {kv_heads}.")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.scale = scale
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
        if self.in_proj_weight is not None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                assert weight is not None
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
        """How queries and keys turn; `rotary` may be changed after training, to read further."""
        if isinstance(self.rotary, Positions):
            return self.rotary
        return Rotary(base=self.rotary) if self.rotary else None

    @property
    def _clipped(self) -> Positions | None:
        """A setting that turning queries and keys beforehand cannot serve."""
        return None if self.positions is None or self.positions.furthest is None else self.positions

    # ---- forward ---------------------------------------------------------------------------------------------------

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
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        n_query, n_key, batch = query.shape[1], key.shape[1], query.shape[0]
        q, k, v = self.project(query, key, value)
        hidden, added = hidden_and_added(
            attn_mask, key_padding_mask, (batch, self.num_heads, n_query, n_key), k.shape[2]
        )
        if hidden is not None:
            support = both(support, supports.mask(~hidden))
        if added is not None:
            if isinstance(attn_bias, Bias):
                attn_bias = attn_bias.dense(n_query, k.shape[2], q)
            attn_bias = added if attn_bias is None else added + attn_bias
        grouped = self.kv_heads != self.num_heads
        options: Options = {"scale": self.scale, "enable_gqa": grouped, "support": support, "bias": attn_bias}
        options["is_causal"] = is_causal
        dropout = self.dropout if self.training else 0.0
        if self._clipped is None:
            heads, stats = attention(q, k, v, dropout_p=dropout, sink=self.sink, return_stats=True, **options)
        elif dropout > 0:
            raise ValueRangeError("clipped distances take no dropout; set dropout=0 or call eval() first.")
        else:
            heads, stats = rotary_attention(q, k, v, self._clipped, sink=self.sink, return_stats=True, **options)
        if self.training and isinstance(self.scale, TemperatureController):
            self.scale.observe(stats)
        if self.training and weighs(self.attention_entropy_weight):
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

    def _weights(self, q: Tensor, k: Tensor, options: Options, stats: Stats, average: bool) -> Tensor:
        if self._clipped is None:
            weights = Problem.of(q, k, **options).gibbs().probs()  # writes out a rule
        else:
            weights = rotary_weights(q, k, self._clipped, **options)
        if self.sink is not None:
            share = torch.sigmoid(stats.log_partition - self.sink.to(stats.log_partition)[:, None])
            weights = weights * share[..., None].to(weights.dtype)
        return weights.mean(1) if average else weights

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, has no last forward."""
        return {**self.__dict__, "entropy_loss": None}

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}", f"heads={self.num_heads}"]
        parts += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.num_heads else []
        parts += [f"scale={self.scale}"] if self.scale is not None and not isinstance(self.scale, nn.Module) else []
        return ", ".join(parts)


class EntropyInvariantAttention(MultiheadAttention):
    """The module of the notes, done right: scale = kappa * log(n) / head_dim, n the keys each row may see.

    Key length in cross attention (M-SCL-6), visible length under masks (M-SCL-5), zeros for a row that sees nothing
    (M-ATT-6), no n x n weights unless asked for. With kappa = 1 the scale hardly acts: `calibrated` chooses it from
    the standard deviation of the scores (M-SCL-16). Weights are returned when asked for, and the notes' mask, which
    shows where it is 1, is `keep_mask`.

    >>> layer = EntropyInvariantAttention(8, 2, kappa=2.0)
    >>> layer(torch.zeros(1, 5, 8))[0].shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, kappa: float = 1.0, batch_first: bool = True, **options: Any):
        if "scale" in options:
            raise ValueRangeError("EntropyInvariantAttention has its own scale; use MultiheadAttention(scale=...).")
        super().__init__(embed_dim, num_heads, batch_first=batch_first, scale=KappaLog(kappa), **options)
        self.kappa = kappa

    def calibrated(self, reference: float, sigma: float, growth: float = 1.0) -> EntropyInvariantAttention:
        """This module with kappa = head_dim sqrt(growth) / (sigma sqrt(log reference)): entropy stationary there.

        sigma: standard deviation of the raw scores <query, key> of a row, as `partita.scale.measure_sigma` finds it.
        growth: of a position bias alone, as `partita.theory.sharpness.bias_growth` finds it; 1 without one.
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
        """As MultiheadAttention, after value in torch's order; key defaults to query, value to key, weights to None.

        need_weights=True, average_attn_weights=False gives the weights of every head, (batch, heads, n_query, n_key).

        Masks speak two languages. Torch's `key_padding_mask` and `attn_mask` hide where they are True; the notes' mask
        shows where it is not 0, and is called `keep_mask` here: (n_query, n_key), also with (batch,) or
        (batch, heads or 1) in front, boolean or of zeros and ones. A mask that could be either is refused.
        """
        key = query if key is None else key
        value = key if value is None else value
        named = dict(zip(_TORCHS, torchs, strict=False))
        if named.keys() & options.keys() or len(torchs) > len(_TORCHS):
            raise ValueRangeError(f"too many arguments: after value come {', '.join(_TORCHS)}, each once.")
        if options.pop("mask", None) is not None:
            raise ValueRangeError(f"mask= does not say what it means. {_LANGUAGES}")
        batch, n_query, n_key = self._sizes(query, key)
        pad = named.get("key_padding_mask")
        if pad is not None and (tuple(pad.shape) != (batch, n_key) or batch == n_query):
            raise ValueRangeError(f"a mask {tuple(pad.shape)} as the fourth argument could be either. {_LANGUAGES}")
        named = {"need_weights": False, **named, **options}
        if keep_mask is not None:
            hidden = ~kept(keep_mask, n_query, n_key)
            if named.get("attn_mask") is not None:
                raise ValueRangeError("give keep_mask or attn_mask, not both: join them with & of what they show.")
            named["attn_mask"] = hidden
        return super().forward(query, key, value, **named)

    def _sizes(self, query: Tensor, key: Tensor) -> tuple[int, int, int]:
        """Batch, queries and keys; a batch of 1 for inputs without one."""
        if query.dim() != 3:
            return 1, query.shape[0], key.shape[0]
        if self.batch_first:
            return query.shape[0], query.shape[1], key.shape[1]
        return query.shape[1], query.shape[0], key.shape[0]


_TORCHS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
_LANGUAGES = (
    "Name it: keep_mask= shows where it is not 0 (n_query, n_key), attn_mask= hides where it is True (n_query, n_key), "
    "key_padding_mask= hides keys where it is True (batch, n_key)."
)
