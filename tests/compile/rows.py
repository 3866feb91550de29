"""A row of the table for every public name: the calls of `tests.surface`, and what that file has no use for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import partita
from partita import attn, contrastive, nn, scale, support
from tests import surface
from tests.surface import Given

CALLS = dict(surface.CALLS)


def row(name: str, function: Any) -> None:
    """One more call, or one in place of the surface's that suits a graph better."""
    CALLS[name] = function


def lowered(function: Callable[..., Any], *given: torch.Tensor) -> Any:
    """On float32 operands, which autocast lowers; it leaves float64 alone."""
    with torch.autocast("cpu", torch.bfloat16):
        return function(*(x.float() if x.is_floating_point() else x for x in given))


# ---- the distribution ------------------------------------------------------------------------------------------------

row("Gibbs.gaps, edges in a tensor", lambda g: g.gibbs().gaps(g.plain("few").abs()))
row("divergence", lambda g: partita.divergence(g.gibbs(), g.gibbs(), "js", beta=0.3))
row("attention_divergence", lambda g: partita.attention_divergence(*g.qkv()[:2], *g.qkv()[:2], is_causal=True))
row("Gibbs.received, of itself", lambda g: [partita.Gibbs(x, x).received() for x in g.pairs()[:1]])
row("divergence, one set of keys", lambda g: _two_queries(*g.pairs(), g.real("n_key", "dim")))


def _two_queries(one: torch.Tensor, other: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return partita.divergence(partita.Gibbs(one, key), partita.Gibbs(other, key))


row("Gibbs.received, weights", lambda g: g.gibbs().received(g.real("batch", "heads", "n_query")))
row("Gibbs.top, a support", lambda g: g.gibbs(support=support.causal() | support.window(0, 2)).top(2))
row("Gibbs.sample, a support", lambda g: g.gibbs(support=support.not_self()).sample())
row("Gibbs.stats, autocast", lambda g: lowered(lambda q, k: partita.Gibbs(q, k).stats(), *g.qkv()[:2]))
row("divergence, js and supports", lambda g: partita.divergence(
    g.gibbs(support=support.causal("bottom-right")), g.gibbs(support=support.lengths(5)), "js"
))  # fmt: skip
row("Gibbs.reduce", lambda g: g.gibbs().reduce(target=g.index("n_key", "batch", "heads", "n_query"), rank=True).nll())
row("Gibbs.scale", lambda g: partita.Gibbs(*g.qkv()[:2], scale=scale.LogLength(16), support=support.causal()).scale)
CALLS["measure_sigma"] = lambda g: torch.as_tensor(
    scale.measure_sigma(*g.qkv()[:2], support.causal()), dtype=torch.float64
)
row(
    "measure_sigma, policy",
    lambda g: scale.GaussianEntropy(0.5, scale.measure_sigma(*g.qkv()[:2]))(g.index(9, "rows"), 4),
)
row(
    "solve_scale, grouped",
    lambda g: partita.solve_scale(
        g.qkv()[0], g.qkv("batch", "few")[1], width=2.0, support=support.causal(), grouped=True
    ),
)
row("solve_scale, entropies of rows", lambda g: partita.solve_scale(
    *g.qkv()[:2], entropy=g.real("heads", "n_query").sigmoid(), return_reached=True
))  # fmt: skip
row("scale.TargetEntropy, everything", lambda g: partita.attention(
    g.qkv()[0], *g.qkv("batch", "few")[1:], is_causal=True, enable_gqa=True, scale=scale.TargetEntropy(width=2.0),
    sink=g.real("heads"), return_stats=True,
))  # fmt: skip
row("scale.ScalableSoftmax, everything", lambda g: partita.attention(
    *g.qkv(), scale=g.module(scale.ScalableSoftmax, surface.SIZES["heads"]), bias=attn.ALiBi(g.real("heads")),
    sink=g.real("heads"), softcap=4.0, support=support.lengths(g.index(9, "batch")), return_stats=True,
))  # fmt: skip
row(
    "scale.TargetEntropy, hiding bias",
    lambda g: partita.attention(*g.qkv(), g.index(2, "n_key").double().log(), scale=scale.TargetEntropy(entropy=0.5)),
)
row("support.joined", lambda g: g.gibbs(support=_joined(g)).stats())


def _joined(g: Given) -> support.Support:
    """Two pairs of segment ids, a length and a window, by & and |."""
    ids = [support.segments(g.index(2, "batch", "n_query"), g.index(2, "batch", "n_key")) for _ in range(2)]
    return (ids[0] & ids[1] & support.lengths(g.index("n_key", "batch"))) | support.window(0, 0)


row("support.dense", lambda g: support.window(1, 0).dense(g.sizes["n_query"], g.sizes["n_key"], (), "cpu"))

# ---- attention -------------------------------------------------------------------------------------------------------

row("attention, everything", lambda g: partita.attention(
    g.qkv()[0], *g.qkv("batch", "few")[1:], g.index(2, "n_query", "n_key").bool(), is_causal=True, enable_gqa=True,
    scale=scale.SqrtLogLength(16), bias=g.real("heads", "n_query", "n_key"), softcap=4.0, sink=g.real("heads"),
    support=support.window(3, None), return_stats=True,
))  # fmt: skip
row("attention, scale per row", lambda g: partita.attention(*g.qkv(), scale=g.real("heads", "n_query")))
row("attention, ALiBi and a policy", lambda g: partita.attention(
    *g.qkv(), bias=attn.ALiBi(g.real("heads"), "bottom-right"), is_causal=True, scale=scale.LogLength(16),
    return_stats=True,
))  # fmt: skip
row("attention, autocast", lambda g: lowered(
    lambda q, k, v: partita.attention(q, k, v, is_causal=True, return_stats=True), *g.qkv()
))  # fmt: skip
row("attention, checkpointed", lambda g: checkpoint(
    lambda q, k, v: partita.attention(q, k, v, is_causal=True, scale=scale.LogLength(16)), *g.qkv(), use_reentrant=False
))  # fmt: skip
row("attention, a rule and everything", lambda g: partita.attention(
    *g.qkv(), bias=attn.ALiBi(g.real("heads")), sink=g.real("heads", "n_query"), support=support.window(3, 2),
    return_stats=True,
))  # fmt: skip
row("attention, dropout and everything", lambda g: partita.attention(
    g.qkv()[0], *g.qkv("batch", "few")[1:], dropout_p=0.3, is_causal=True, enable_gqa=True,
    bias=attn.RelativeBias(g.real("heads", 5)), sink=g.real("heads"), scale=scale.LogLength(16), return_stats=True,
))  # fmt: skip
row("pair_attention, everything", lambda g: attn.pair_attention(
    g.qkv()[0], *g.qkv("batch", "few")[1:], attn.ScaleInvariant(), enable_gqa=True, scale=scale.LogLength(16),
    support=support.causal("bottom-right") | support.window(1, 1), sink=g.real("heads"), return_stats=True,
))  # fmt: skip
row("attention_divergence, everything", lambda g: partita.attention_divergence(
    *g.qkv()[:2], *g.qkv()[:2], is_causal=True, scale=scale.LogLength(16), kind="hellinger", reduction="none"
))  # fmt: skip
row("gumbel_attention, hard", lambda g: attn.gumbel_attention(*g.qkv(), hard=True))
row("top_k_attention, grouped", lambda g: attn.top_k_attention(
    g.qkv()[0], *g.qkv("batch", "few")[1:], 2, enable_gqa=True, is_causal=True
))  # fmt: skip
row("sinusoidal", lambda g: attn.sinusoidal(g.sizes["n_key"], 4))
row("alibi_slopes", lambda g: attn.alibi_slopes(6))
row("rotary, positions", lambda g: attn.rotary(g.qkv()[0], g.index(100, "n_query")))


# ---- losses and contrast ---------------------------------------------------------------------------------------------

for reduction in ("sum", "none"):
    row(
        f"linear_cross_entropy, everything, {reduction}",
        lambda g, r=reduction: partita.linear_cross_entropy(
            *g.linear(), linear_bias=g.real("classes"), weight=g.plain("classes").abs(), label_smoothing=0.1,
            z_loss=0.01, ignore_index=0, reduction=r, scale=g.real("rows").exp(),
        ),
    )  # fmt: skip
row("linear_cross_entropy, tokens", lambda g: partita.linear_cross_entropy(
    g.real("batch", "n_query", "dim"), g.real("classes", "dim"), g.index("classes", "batch", "n_query"), shift=1,
    ignore_index=0, return_stats=True,
))  # fmt: skip
row("linear_cross_entropy, autocast", lambda g: lowered(
    lambda x, w, y: partita.linear_cross_entropy(x, w, y, label_smoothing=0.1, return_stats=True), *g.linear()
))  # fmt: skip
row("linear_cross_entropy, checkpointed", lambda g: checkpoint(
    lambda x, w, y: partita.linear_cross_entropy(x, w, y, z_loss=0.01), *g.linear(), use_reentrant=False
))  # fmt: skip
row("linear_distillation_loss, everything", lambda g: partita.linear_distillation_loss(
    *g.linear()[:2], *g.linear()[:2], kind="js", linear_bias=g.real("classes"), teacher_bias=g.plain("classes"),
    target=g.linear()[2], ignore_index=0, sample_weight=g.plain("rows").abs(),
))  # fmt: skip
row("focal_loss, none", lambda g: partita.focal_loss(*g.logits(), ignore_index=0, reduction="none"))
row("info_nce_loss, autocast", lambda g: lowered(
    lambda q, k: partita.info_nce_loss(q, k, symmetric=True, return_stats=True), *g.pairs()
))  # fmt: skip
row("info_nce_loss, labels, none", lambda g: partita.info_nce_loss(
    *g.pairs(), labels=g.index(3, "rows"), reduction="none"
))  # fmt: skip
row("contrastive.Queue.push", lambda g: _pushed(g))
row("supcon_loss, none", lambda g: partita.supcon_loss(g.pairs()[0], g.index(3, "rows"), reduction="none"))
row("siglip_loss, none", lambda g: partita.siglip_loss(*g.pairs(), g.real().exp(), g.real(), reduction="none"))
row(
    "info_nce_loss, per row",
    lambda g: partita.info_nce_loss(*g.pairs(), temperature=g.plain("rows").exp(), reduction="none"),
)
# a queue that lives outside of the graph
CALLS["info_nce_loss, queue"] = lambda g: partita.info_nce_loss(*g.pairs(), queue=queue(g), return_stats=True)
row("info_nce_loss, labels and queue", lambda g: partita.info_nce_loss(
    *g.pairs(), labels=g.index(3, "rows"), queue=queue(g, labelled=True), return_stats=True
))  # fmt: skip
row("nt_xent_loss, none", lambda g: partita.nt_xent_loss(*g.pairs(), reduction="none"))
row("OtherLabel", lambda g: _other_label(g))


def queue(g: Given, labelled: bool = False) -> contrastive.Queue:
    """Half full; the same keys each time it is made."""
    made = g.module(_Filled, labelled)
    return made


def _pushed(g: Given) -> Any:
    """The same number of keys as slots: the queue is the same whatever it held."""
    made = g.module(_Filled, True)
    made.push(g.plain("rows", "dim"), g.index(3, "rows"))
    return partita.info_nce_loss(*g.pairs(), labels=g.index(3, "rows"), queue=made)


class _Filled(contrastive.Queue):
    def __init__(self, labelled: bool):
        super().__init__(6, 4, labelled=labelled, dtype=torch.float64)
        keys = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
        self.push(keys, torch.tensor([0, 1, 0]) if labelled else None)


def _other_label(g: Given) -> Any:
    order, seen = contrastive.sort_by_label(g.index(3, "rows"), g.index(3, "n_key"))
    return partita.Gibbs(g.real("rows", "dim"), g.real("n_key", "dim")[order], support=seen).stats()


# ---- modules ---------------------------------------------------------------------------------------------------------

row("nn.MultiheadAttention, weights", lambda g: surface.layer(g, add_zero_attn=True))
row(
    "nn.TemperatureController, observe",
    lambda g: g.module(nn.TemperatureController, 4, entropy=0.5).observe(g.gibbs().stats()),
)
row("nn.MultiheadAttention, masks", lambda g: _masked(g))
row(
    "nn.init_sharpness_",
    lambda g: nn.init_sharpness_(g.module(nn.MultiheadAttention, 8, 2), entropy=2.0, length=16).in_proj_weight,
)
row(
    "nn.init_sharpness_, norms",
    lambda g: nn.init_sharpness_(g.module(nn.MultiheadAttention, 8, 2, qk_norm=True), sigma=0.5).q_norm.weight,
)


def _masked(g: Given) -> Any:
    x, hidden = g.real("batch", "n_key", 8), g.index(2, "batch", "n_key").bool()
    made = g.module(nn.MultiheadAttention, 8, 2, batch_first=True, add_bias_kv=True, scale=scale.LogLength(16))
    return made(x, x, x, hidden, average_attn_weights=False), made(x, x, x, hidden, False, is_causal=True)


row("nn.qk_clip_", lambda g: nn.qk_clip_(g.module(nn.MultiheadAttention, 8, 2), g.plain(2).exp() * 300))

# Calls that draw random numbers: a graph draws others.
CHANCE = {
    "Gibbs.sample", "Gibbs.sample, a support", "attention, dropout", "attention, dropout and everything",
    "gumbel_attention", "gumbel_attention, hard",
}  # fmt: skip

# ---- which row shows which public name -------------------------------------------------------------------------------

MODULES = ("attn", "contrastive", "engine", "losses", "metrics", "nn", "scale", "score", "support")

# Shown by the row of another: they are arguments.
SHOWN_BY = {
    "contrastive.AbovePositive": "info_nce_loss, rule",
    "contrastive.Guide": "info_nce_loss, guide",
    "contrastive.Queue": "info_nce_loss, queue",
    "attn.ALiBi": "attention, ALiBi",
    "attn.RelativeBias": "attention, RelativeBias",
    "attn.ScaleInvariant": "pair_attention",
    **{f"attn.{name}": f"rotary_attention, {name}" for name in surface.TURNS},
}
# Names that are not called inside a graph, and why.
NO_CALL = {
    **dict.fromkeys(("ClassStats", "losses.ClassStats", "losses.TokenStats"), "what calls return"),
    **dict.fromkeys(("Stats", "State", "LossStats", "ContrastStats", "engine.State", "engine.Stats", "losses.LossStats",
                     "contrastive.ContrastStats", "contrastive.LabelStats", "attn.TopK", "attn.LinearState",
                     "attn.WeightStats", "metrics.InformationBound", "scale.BestScale"), "what calls return"),
    **dict.fromkeys(("attn.Bias", "attn.Positions", "contrastive.Exclusion", "scale.Policy"), "abstract"),
    "scale.best_for": "a search over numbers, no tensors; scale.BestFor has rows",
    "support.Support": "abstract",
    "attn.PairHook": "a type",
    "score.Score": "a type",
    "score.InnerProduct": "abstract",
    "nn.entropy_loss": "outside of the graph: it picks up what a forward has left; the penalty itself has a row",
    **dict.fromkeys(
        ("backend", "engine.backend", "exact_rows"), "around a call of the graph: the choice is read when it runs"
    ),
    "replace_sdpa": "around a call of the graph: tests/compile/test_models.py",
    "validate": "around a call of the graph: an operator checks values when it runs",
    **dict.fromkeys(("backends", "explain", "engine.explain"), "text about the machine"),
    **dict.fromkeys(("watch", "load_record", "monitor"), "around a model: see the monitor's own pages"),
    **dict.fromkeys(("adapters", "control", "distributed", "errors", "hf"), "left out: the page says why"),
}  # fmt: skip


def public_names() -> list[str]:
    """What partita lists, and what its modules list that it does not."""
    names = [name for name in partita.__all__ if name not in MODULES]
    for module in MODULES:
        names += [f"{module}.{name}" for name in getattr(partita, module).__all__]
    return names


def rows_of(name: str) -> list[str]:
    """The rows that show a public name."""
    last = name.split(".")[-1]
    found = [SHOWN_BY[name]] if name in SHOWN_BY else []
    for title in CALLS:
        called = title.split(", ")[0]
        if called in (name, last) or called.startswith((f"{name}.", f"{last}.")):
            found.append(title)
    return found
