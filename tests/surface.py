"""Every public call once, on tensors whose sizes are named: for tests of what holds for the whole surface.

Tensors name their device and dtype, so that they are the same whatever torch's defaults are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import partita
from partita import attn, contrastive, metrics, nn, scale, score, support

SIZES = {"batch": 2, "heads": 4, "few": 2, "n_query": 5, "n_key": 6, "dim": 4, "dim_value": 3, "rows": 5, "classes": 7}


class Given:
    """Tensors of these sizes, drawn anew for each call; what is float needs a gradient."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype = torch.float32):
        self.sizes, self.dtype = sizes, dtype
        self.source = torch.Generator("cpu").manual_seed(7)
        self.leaves: list[Tensor] = []

    def real(self, *names: str | int) -> Tensor:
        shape = [self.sizes[n] if isinstance(n, str) else n for n in names]
        drawn = torch.randn(shape, generator=self.source, dtype=torch.float64, device="cpu")
        self.leaves.append(drawn.to(self.dtype).requires_grad_())
        return self.leaves[-1]

    def plain(self, *names: str | int) -> Tensor:
        """Numbers that need no gradient."""
        return self.real(*names).detach()

    def index(self, below: str | int, *names: str | int) -> Tensor:
        high = self.sizes[below] if isinstance(below, str) else below
        shape = [self.sizes[n] if isinstance(n, str) else n for n in names]
        return torch.randint(max(high, 1), shape, generator=self.source, device="cpu", dtype=torch.int64)

    def tensor(self, *numbers: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(numbers, device="cpu", dtype=dtype)

    def qkv(self, *lead: str, self_attention: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        lead = lead or ("batch", "heads")
        rows = "n_key" if self_attention else "n_query"
        return (
            self.real(*lead, rows, "dim"),
            self.real(*lead, "n_key", "dim"),
            self.real(*lead, "n_key", "dim_value"),
        )

    def gibbs(self, **options: Any) -> partita.Gibbs:
        q, k, _ = self.qkv()
        return partita.Gibbs(q, k, scale=0.5, **options)

    def pairs(self) -> tuple[Tensor, Tensor]:
        return self.real("rows", "dim"), self.real("rows", "dim")

    def linear(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.real("rows", "dim"), self.real("classes", "dim"), self.index("classes", "rows")

    def logits(self) -> tuple[Tensor, Tensor]:
        return self.real("rows", "classes"), self.index("classes", "rows")

    def seed(self) -> torch.Generator | None:
        return torch.Generator("cpu").manual_seed(3)

    def fix_chance(self) -> None:
        torch.manual_seed(11)

    def module(self, kind: Callable[..., torch.nn.Module], *args: Any, **options: Any) -> Any:
        """A module of ordinary parameters; made once, at the first call, which a test makes under ordinary defaults."""
        return _made(kind, *args, **options)


@functools.cache
def _made(kind: Callable[..., torch.nn.Module], *args: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    return kind(*args, **options)


Call = Callable[[Given], Any]
CALLS: dict[str, Call] = {}


def call(name: str, function: Call) -> None:
    assert name not in CALLS
    CALLS[name] = function


# ---- the distribution ------------------------------------------------------------------------------------------------

ROWS = ("log_partition", "entropy", "mean_score", "score_variance", "max_score", "visible", "effective_width")
for read in (*ROWS, "stats", "probs", "state", "argmax", "received"):
    call(f"Gibbs.{read}", lambda g, read=read: getattr(g.gibbs(), read)())
call("Gibbs.expectation", lambda g: g.gibbs().expectation(g.real("batch", "heads", "n_key", "dim_value")))
for read in ("nll", "log_prob", "target_rank"):
    call(f"Gibbs.{read}", lambda g, read=read: getattr(g.gibbs(), read)(g.index("n_key", "batch", "heads", "n_query")))
call("Gibbs.weighted_nll", lambda g: partita.Gibbs(*g.linear()[:2]).weighted_nll(g.linear()[2], g.plain("rows")))
call("Gibbs.both_ways_nll", lambda g: partita.Gibbs(*g.pairs()).both_ways_nll())
for kind in ("forward", "reverse", "cross_entropy", "js", "hellinger"):
    call(f"divergence, {kind}", lambda g, kind=kind: partita.divergence(g.gibbs(), g.gibbs(), kind))
call("attention_divergence", lambda g: partita.attention_divergence(*g.qkv()[:2], *g.qkv()[:2]))
call("Gibbs.mean", lambda g: g.gibbs().mean(g.real("batch", "heads", "n_key", "dim_value"))[0])
call("Gibbs.sample", lambda g: g.gibbs().sample(g.seed()))
call("Gibbs.top_log_prob", lambda g: g.gibbs().top_log_prob(2))
call("Gibbs.gaps", lambda g: g.gibbs().gaps([0.0, 0.5, 2.0]))
call("Gibbs.top", lambda g: g.gibbs().top(2))
call("divergence", lambda g: partita.divergence(g.gibbs(), g.gibbs()))
call("divergence, js and a softcap", lambda g: partita.divergence(g.gibbs(softcap=2.0), g.gibbs(), "js", beta=0.3))
call("Gibbs, bias and softcap", lambda g: g.gibbs(bias=g.real("n_query", "n_key"), softcap=2.0).stats())
call("merge", lambda g: partita.merge(g.gibbs().state(), g.gibbs().state()).stats())
call(
    "solve_scale",
    lambda g: partita.solve_scale(g.real("heads", "n_query", "dim"), g.real("heads", "n_key", "dim"), entropy=0.7),
)
call("fit_temperature", lambda g: partita.fit_temperature(*g.linear()))
call("critical_scale", lambda g: scale.critical_scale(g.real("n_query", "n_key")))
call("measure_sigma", lambda g: scale.measure_sigma(*g.qkv()[:2], support.causal()))
call("from_temperature", lambda g: scale.from_temperature(g.plain("rows").exp()))


def bound(g: Given) -> Any:
    found = partita.mutual_information_bound(g.real().exp(), 16)
    return found.value, found.cap, found.slack, found.fraction


call("mutual_information_bound", bound)

# ---- supports and scales ---------------------------------------------------------------------------------------------

SUPPORTS: dict[str, Callable[[Given], support.Support]] = {
    "all": lambda g: support.all(),
    "causal": lambda g: support.causal(),
    "bottom": lambda g: support.causal("bottom-right"),
    "window": lambda g: support.window(1, 2),
    "lengths": lambda g: support.lengths(g.index(g.sizes["n_key"] + 1, "batch")),
    "segments": lambda g: support.segments(g.index(2, "batch", "n_query"), g.index(2, "batch", "n_key")),
    "not_self": lambda g: support.not_self(),
    "mask": lambda g: support.mask(g.index(2, "n_query", "n_key").bool()),
    "strided": lambda g: support.strided(2, 1),
    "dilated": lambda g: support.dilated(2, 1, None),
    "blocks": lambda g: support.blocks(2, g.index(2, -(-g.sizes["n_query"] // 2), -(-g.sizes["n_key"] // 2)).bool()),
    "global_tokens": lambda g: support.global_tokens([0, 3]) | support.window(1, 1),
    "either": lambda g: support.causal() | support.lengths(3 if g.sizes["n_key"] >= 3 else 0),
}
for name, made in SUPPORTS.items():
    call(f"support.{name}", lambda g, made=made: g.gibbs(support=made(g)).stats())
    call(
        f"support.{name}.visible",
        lambda g, made=made: made(g).visible(g.sizes["n_query"], g.sizes["n_key"], (g.sizes["batch"],), "cpu"),
    )
POLICIES: dict[str, Callable[[Given], scale.Policy]] = {
    "InverseSqrt": lambda g: scale.InverseSqrt(),
    "Constant": lambda g: scale.Constant(0.3),
    "KappaLog": lambda g: scale.KappaLog(2.0),
    "LogLength": lambda g: scale.LogLength(16),
    "SqrtLogLength": lambda g: scale.SqrtLogLength(16),
    "CriticalScale": lambda g: scale.CriticalScale(16, (0.5, 1.0, 2.0, 0.0)),
    "Llama4Temperature": lambda g: scale.Llama4Temperature(3),
    "YarnTemperature": lambda g: scale.YarnTemperature(4.0),
    "Mixed": lambda g: scale.Mixed(),
    "MaxLength": lambda g: scale.MaxLength(100),
    "CalibratedLog": lambda g: scale.CalibratedLog(64, 2.0),
    "GaussianEntropy": lambda g: scale.GaussianEntropy(0.5, 2.0),
    "BestFor": lambda g: scale.BestFor(share=0.25, margin=4.0, sigma=2.0),
    "ScalableSoftmax": lambda g: g.module(scale.ScalableSoftmax, SIZES["heads"]),
    "TargetEntropy": lambda g: scale.TargetEntropy(fraction=0.5),
}
for name, made in POLICIES.items():
    call(f"scale.{name}", lambda g, made=made: partita.attention(*g.qkv(), is_causal=True, scale=made(g)))
    if name != "TargetEntropy":
        call(f"scale.{name}, counts", lambda g, made=made: made(g)(g.index(9, "heads", "n_query"), 8))
        call(f"scale.{name}.fold", lambda g, made=made: made(g).fold(g.qkv()[0], g.index(9, "heads", "n_query")))

SCORES: dict[str, Callable[[Given], score.Score]] = {
    "Cosine": lambda g: score.Cosine(),
    "SquaredDistance": lambda g: score.SquaredDistance(),
    "Distance": lambda g: score.Distance(1.0),
    "Bilinear": lambda g: g.module(score.Bilinear, SIZES["dim"], SIZES["dim"]),
    "LogSigmoid": lambda g: g.module(score.LogSigmoid, 0.8, 0.5, heads=SIZES["heads"]),
    "Additive": lambda g: g.module(score.Additive, SIZES["dim"], SIZES["dim"], 5),
}
for name, made in SCORES.items():
    call(f"score.{name}", lambda g, made=made: g.gibbs(score=made(g)).stats())

# ---- attention -------------------------------------------------------------------------------------------------------

call("attention", lambda g: partita.attention(*g.qkv()))
call("attention, causal and statistics", lambda g: partita.attention(*g.qkv(), is_causal=True, return_stats=True))
call("attention, mask", lambda g: partita.attention(*g.qkv(), g.index(2, "n_query", "n_key").bool()))
call("attention, added", lambda g: partita.attention(*g.qkv(), g.real("n_key")))
call("attention, sink", lambda g: partita.attention(*g.qkv(), sink=g.real("heads"), return_stats=True))
call(
    "attention_divergence, reverse",
    lambda g: partita.attention_divergence(*g.qkv()[:2], *g.qkv()[:2], kind="reverse"),
)
call("attention, no graph", lambda g: partita.attention(*(x.detach() for x in g.qkv())))
call("attention, float64", lambda g: partita.attention(*(x.double() for x in g.qkv()), is_causal=True))
call("attention, bfloat16", lambda g: partita.attention(*(x.bfloat16() for x in g.qkv()), softcap=3.0))
call(
    "attention, grouped",
    lambda g: partita.attention(g.qkv()[0], *g.qkv("batch", "few")[1:], enable_gqa=True, return_stats=True),
)
call("attention, ALiBi", lambda g: partita.attention(*g.qkv(), bias=attn.ALiBi(g.real("heads"))))
call("attention, RelativeBias", lambda g: partita.attention(*g.qkv(), bias=attn.RelativeBias(g.real("heads", 5))))


def seeded(function: Call) -> Call:
    def run(g: Given) -> Any:
        g.fix_chance()
        return function(g)

    return run


call("attention, dropout", seeded(lambda g: partita.attention(*g.qkv(), dropout_p=0.3)))
call("blockwise_attention", lambda g: attn.blockwise_attention(*g.qkv(), 2, is_causal=True))
call(
    "hierarchical_attention",
    lambda g: attn.hierarchical_attention(*g.qkv(self_attention=True), 4, is_causal=True, return_stats=True),
)
call(
    "hierarchical_attention, float64",
    lambda g: attn.hierarchical_attention(*(x.double() for x in g.qkv(self_attention=True)), 4),
)
call("pair_attention", lambda g: attn.pair_attention(*g.qkv(), attn.ScaleInvariant(), return_stats=True))
call("pair_attention, float64", lambda g: attn.pair_attention(*(x.double() for x in g.qkv()), attn.ScaleInvariant()))
call("top_k_attention", lambda g: attn.top_k_attention(*g.qkv(), 2))
call("hard_attention", lambda g: attn.hard_attention(*g.qkv()))
call("gumbel_attention", lambda g: attn.gumbel_attention(*g.qkv(), generator=g.seed()))
call("l1_attention", lambda g: attn.l1_attention(*g.qkv(), is_causal=True))
call("l1_attention, statistics", lambda g: attn.l1_attention(*g.qkv(), return_stats=True))
call("sigmoid_attention", lambda g: attn.sigmoid_attention(*g.qkv(), is_causal=True, return_stats=True))
call("linear_attention", lambda g: attn.linear_attention(*g.qkv(), return_state=True))
call("linear_attention, causal", lambda g: attn.linear_attention(*g.qkv(self_attention=True), is_causal=True, chunk=4))
call("entropy_penalty", lambda g: attn.entropy_penalty(g.gibbs().stats(), [0.1, -0.2, 0.3, 0.0]))
call("mean_entropy", lambda g: attn.mean_entropy(g.gibbs().stats()))
call("rotary", lambda g: attn.rotary(g.qkv()[0]))
TURNS = {
    "Rotary": attn.Rotary(), "NTK": attn.NTK(4.0), "Interpolated": attn.Interpolated(4.0), "YaRN": attn.YaRN(4.0, 8),
    "PartialRotary": attn.PartialRotary(0.5), "NoPositions": attn.NoPositions(), "Clipped": attn.Clipped(2),
}  # fmt: skip
for name, turns in TURNS.items():
    call(
        f"rotary_attention, {name}",
        lambda g, turns=turns: attn.rotary_attention(*g.qkv(), turns, is_causal=True, return_stats=True),
    )

# ---- losses ----------------------------------------------------------------------------------------------------------

for reduction in ("mean", "sum", "none"):
    call(
        f"linear_cross_entropy, {reduction}",
        lambda g, r=reduction: partita.linear_cross_entropy(*g.linear(), reduction=r),
    )
    call(f"cross_entropy, {reduction}", lambda g, r=reduction: partita.cross_entropy(*g.logits(), reduction=r))
call(
    "linear_cross_entropy, everything",
    lambda g: partita.linear_cross_entropy(
        *g.linear(),
        linear_bias=g.real("classes"),
        weight=g.plain("classes").abs(),
        label_smoothing=0.1,
        softcap=5.0,
        z_loss=0.01,
        entropy_weight=0.1,
        sample_weight=g.plain("rows").abs(),
        return_stats=True,
    ),
)
call(
    "linear_cross_entropy, shift",
    lambda g: partita.linear_cross_entropy(
        g.real("batch", "n_query", "dim"), g.real("classes", "dim"), g.index("classes", "batch", "n_query"), shift=1
    ),
)
call(
    "linear_cross_entropy, several outputs",
    lambda g: partita.linear_cross_entropy(
        g.real("rows", "dim"), g.real("classes", 2, "dim"), g.index("classes", "rows", 2), return_stats=True
    ),
)
call(
    "linear_cross_entropy, probabilities",
    lambda g: partita.linear_cross_entropy(
        g.real("rows", "dim"), g.real("classes", "dim"), g.plain("rows", "classes").abs()
    ),
)
call(
    "cross_entropy, everything",
    lambda g: partita.cross_entropy(
        *g.logits(),
        weight=g.plain("classes").abs(),
        label_smoothing=0.1,
        z_loss=0.01,
        entropy_weight=0.1,
        return_stats=True,
    ),
)
call(
    "cross_entropy, probabilities",
    lambda g: partita.cross_entropy(g.real("rows", "classes"), g.plain("rows", "classes").abs(), return_stats=True),
)
call("focal_loss", lambda g: partita.focal_loss(*g.logits(), alpha=g.plain("classes").abs()))
for on in ("probabilities", "logits"):
    call(f"brier_loss, {on}", lambda g, on=on: partita.brier_loss(*g.logits(), on=on))
    call(f"mse_loss, {on}", lambda g, on=on: partita.mse_loss(*g.logits(), on=on))
    call(f"mae_loss, {on}", lambda g, on=on: partita.mae_loss(*g.logits(), on=on))
call("gaussian_nll_loss", lambda g: partita.gaussian_nll_loss(*g.pairs(), g.plain("rows", "dim").exp()))
call("laplace_nll_loss", lambda g: partita.laplace_nll_loss(*g.pairs(), 0.5, reduction="none"))
call(
    "nce_loss",
    lambda g: partita.nce_loss(g.real("rows"), g.real("rows", "few"), g.plain("rows"), g.plain("rows", "few")),
)
call("distillation_loss", lambda g: partita.distillation_loss(g.logits()[0], g.logits()[0], temperature=2.0))
call(
    "linear_distillation_loss",
    lambda g: partita.linear_distillation_loss(*g.linear()[:2], *g.linear()[:2], temperature=2.0),
)
call(
    "token_stats", lambda g: tuple(partita.token_stats(*g.linear(), want=("log_prob", "entropy", "rank", "log_sum_sq")))
)
call(
    "token_stats, ids",
    lambda g: tuple(partita.token_stats(*g.linear()[:2], g.index("classes", "rows", "few"), temperature=0.7)),
)
call("losses.kl_estimate", lambda g: partita.losses.kl_estimate(g.real("rows"), g.plain("rows")))
call("token_divergence", lambda g: partita.token_divergence(*g.linear()[:2], *g.linear()[:2], kind="reverse"))

# ---- contrast --------------------------------------------------------------------------------------------------------

call("info_nce_loss", lambda g: partita.info_nce_loss(*g.pairs()))
call("info_nce_loss, symmetric", lambda g: partita.info_nce_loss(*g.pairs(), symmetric=True))
call("info_nce_loss, statistics", lambda g: partita.info_nce_loss(*g.pairs(), return_stats=True))
call("info_nce_loss, unpaired", lambda g: partita.info_nce_loss(*g.pairs(), g.real("n_key", "dim"), return_stats=True))
call(
    "info_nce_loss, paired",
    lambda g: partita.info_nce_loss(*g.pairs(), g.real("rows", "n_key", "dim"), negative_mode="paired"),
)
call("info_nce_loss, labels", lambda g: partita.info_nce_loss(*g.pairs(), labels=g.index(3, "rows"), return_stats=True))
call("info_nce_loss, hard", lambda g: partita.info_nce_loss(*g.pairs(), hardness=0.5, decoupled=True))
call("info_nce_loss, rule", lambda g: partita.info_nce_loss(*g.pairs(), exclude=contrastive.AbovePositive(0.1)))
call(
    "info_nce_loss, guide",
    lambda g: partita.info_nce_loss(*g.pairs(), exclude=contrastive.Guide(*(x.detach() for x in g.pairs()))),
)
call(
    "sort_by_label",
    lambda g: partita.Gibbs(
        *g.pairs(), support=contrastive.sort_by_label(g.index(3, "rows"), g.index(3, "rows"))[1]
    ).stats(),
)


def queue(g: Given) -> Any:
    kept = contrastive.Queue(3, SIZES["dim"], dtype=torch.float32, device="cpu")
    kept.push(g.plain(2, SIZES["dim"]))
    return partita.info_nce_loss(*g.pairs(), queue=kept)


call("info_nce_loss, queue", queue)
call("info_nce_loss, learned", lambda g: partita.info_nce_loss(*g.pairs(), log_temperature=g.real()))
call("clip_loss", lambda g: partita.clip_loss(*g.pairs(), 10.0))
call("clip_loss, bias", lambda g: partita.clip_loss(*g.pairs(), g.real().exp(), -1.0, return_stats=True))
call("siglip_loss", lambda g: partita.siglip_loss(*g.pairs(), 10.0, -10.0))
call("nt_xent_loss", lambda g: partita.nt_xent_loss(*g.pairs(), return_stats=True))
call("supcon_loss", lambda g: partita.supcon_loss(g.pairs()[0], g.index(3, "rows"), return_stats=True))
call(
    "supcon_loss, reference",
    lambda g: partita.supcon_loss(
        g.pairs()[0], g.index(3, "rows"), ref_emb=g.real("n_key", "dim"), ref_labels=g.index(3, "n_key")
    ),
)
call("joint_loss", lambda g: partita.joint_loss(g.real("batch", "heads", "n_query"), g.gibbs().state()))
call("alignment", lambda g: contrastive.alignment(*g.pairs()))
call("uniformity", lambda g: contrastive.uniformity(g.pairs()[0]))

# ---- metrics ---------------------------------------------------------------------------------------------------------


def loss_stats(g: Given) -> partita.LossStats:
    return partita.linear_cross_entropy(*g.linear(), return_stats=True)[1]


call("top_k_accuracy", lambda g: metrics.top_k_accuracy(loss_stats(g), 2))
call("mean_reciprocal_rank", lambda g: metrics.mean_reciprocal_rank(loss_stats(g)))
call("perplexity", lambda g: metrics.perplexity(loss_stats(g)))
call("expected_calibration_error", lambda g: metrics.expected_calibration_error(loss_stats(g)))
call("brier_score", lambda g: metrics.brier_score(g.gibbs(), g.index("n_key", "batch", "heads", "n_query")))

# ---- modules: parameters follow torch's defaults when they are made, so these are made beforehand --------------------


def layer(g: Given, **options: Any) -> Any:
    x = g.real("batch", "n_key", 8)
    made = g.module(nn.MultiheadAttention, 8, 2, batch_first=True, **options)
    return made(x, x, x, is_causal=True)


call("nn.MultiheadAttention", layer)
call("nn.MultiheadAttention, options", lambda g: layer(g, rotary=True, qk_norm=True, sink=True, kv_heads=1))
call(
    "nn.EntropyInvariantAttention",
    lambda g: g.module(nn.EntropyInvariantAttention, 8, 2).calibrated(64, 2.0)(g.real("batch", "n_key", 8)),
)
call(
    "nn.TransformerEncoderLayer",
    lambda g: g.module(nn.TransformerEncoderLayer, 8, 2, 16, 0.0, batch_first=True)(g.real("batch", "n_key", 8)),
)
call(
    "nn.LinearCrossEntropyLoss",
    lambda g: g.module(nn.LinearCrossEntropyLoss, 4, 7)(g.real("rows", 4), g.index(7, "rows")),
)
call("nn.CrossEntropyLoss", lambda g: g.module(nn.CrossEntropyLoss, label_smoothing=0.1)(*g.logits()))
call("nn.FocalLoss", lambda g: g.module(nn.FocalLoss)(*g.logits()))
call("nn.BrierLoss", lambda g: g.module(nn.BrierLoss)(*g.logits()))
call("nn.MSELoss", lambda g: g.module(nn.MSELoss)(*g.logits()))
call("nn.MAELoss", lambda g: g.module(nn.MAELoss)(*g.logits()))
call(
    "nn.NCELoss",
    lambda g: g.module(nn.NCELoss)(g.real("rows"), g.real("rows", "few"), g.plain("rows"), g.plain("rows", "few")),
)
call("nn.DistillationLoss", lambda g: g.module(nn.DistillationLoss, 2.0)(g.logits()[0], g.logits()[0]))
call("nn.NTXentLoss", lambda g: g.module(nn.NTXentLoss)(*g.pairs()))
call("nn.SupConLoss", lambda g: g.module(nn.SupConLoss)(g.pairs()[0], g.index(3, "rows")))
call("nn.ScalableSoftmax", lambda g: g.module(nn.ScalableSoftmax, SIZES["heads"])(g.index(9, "heads", "n_query"), 8))
call(
    "nn.TransformerDecoderLayer",
    lambda g: g.module(nn.TransformerDecoderLayer, 8, 2, 16, 0.0, batch_first=True)(
        g.real("batch", "n_query", 8), g.real("batch", "n_key", 8)
    ),
)
call("nn.InfoNCELoss", lambda g: g.module(nn.InfoNCELoss, learnable=True)(*g.pairs()))
call("nn.ClipLoss", lambda g: g.module(nn.ClipLoss)(*g.pairs()))
call("nn.SigLipLoss", lambda g: g.module(nn.SigLipLoss)(*g.pairs()))
call(
    "nn.TemperatureController",
    lambda g: g.module(nn.TemperatureController, 4, entropy=0.5)(g.index(9, 4, "n_query"), 8),
)


def tensors(found: Any) -> Iterator[Tensor]:
    """Every tensor in a result."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, partita.State):
        yield from tensors([found.mass, *found.stats()])
    elif isinstance(found, (tuple, list)):
        for part in found:
            yield from tensors(part)


def run(name: str, sizes: dict[str, int] | None = None) -> list[Tensor]:
    """The results of a call, and the gradients of the sum of what is finite in them."""
    given = Given(SIZES if sizes is None else sizes)
    found = list(tensors(CALLS[name](given)))
    loud = [x for x in found if x.requires_grad]
    leaves = [x for x in given.leaves if x.requires_grad]
    if loud and leaves:
        total = torch.stack([torch.where(x.isfinite(), x, 0.0).sum().double() for x in loud]).sum()
        found += [g for g in torch.autograd.grad(total, leaves, allow_unused=True) if g is not None]
    return [x.detach() for x in found]
