"""Random models of every attention entry point, each with its scores written out in float64 by other means."""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from oracle import Softmaxes
from torch import Tensor, nn

import partita
from partita import scale as scales
from partita import support as supports


@dataclass
class Case:
    """A model, what it is called with, and what its softmax should be."""

    about: str
    model: nn.Module
    args: tuple[Any, ...]
    scores: Callable[[float], Tensor]  # factor of the scale -> (batch, heads, n_query, n_key) in float64, -inf hidden
    keep: Tensor | None = None  # (batch, n_query)
    kwargs: dict[str, Any] = field(default_factory=dict)
    block: Callable[[], AbstractContextManager[Any]] = nullcontext
    tolerance: float = 1e-4  # of statistics in float32, in units of the largest score or of 1


class Calls(nn.Module):
    """A module around one function of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Dice(random.Random):
    def maybe(self, chance: float = 0.5) -> bool:
        return self.random() < chance


def qkv(d: Dice, dtype: torch.dtype, self_attention: bool, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, n, dim = d.randint(1, 3), d.randint(1, 3) * groups, d.randint(2, 19), d.choice([2, 5, 8, 16])
    n_key = n if self_attention else d.randint(2, 19)
    sharp = d.choice([0.3, 1.0, 2.0])

    def make(h: int, length: int) -> Tensor:
        return (sharp * torch.randn(batch, length, h, dim)).transpose(1, 2).to(dtype)

    return make(heads, n), make(heads // groups, n_key), make(heads // groups, n_key)


def random_mask(d: Dice, q: Tensor, n_key: int) -> tuple[Tensor, Tensor | None]:
    """A mask, boolean or added, in one of the shapes torch takes, and which queries are real."""
    batch, heads, n, _ = q.shape
    if d.maybe(0.4):  # padded keys
        real = torch.arange(n_key) < torch.randint(1, n_key + 1, (batch, 1))
        seen, keep = real[:, None, None, :], real if n == n_key else None
        seen = seen if d.maybe() else seen.expand(batch, 1, n, n_key)
    else:
        lead = d.choice([(), (1, 1), (batch, 1), (batch, heads)])
        seen = torch.rand(*lead, n, n_key) < 0.6
        if n == n_key:
            seen = seen | torch.eye(n, dtype=torch.bool)  # a token that may not see itself would be padding
        keep = None
    if d.maybe(0.4):
        return seen, keep
    low = d.choice([-math.inf, torch.finfo(q.dtype).min, -1e9 if q.dtype != torch.float16 else -6e4])
    added = (0.5 * torch.randn(seen.shape)).to(q.dtype).masked_fill(~seen, low)
    return added, keep


def dense(
    q: Tensor,
    k: Tensor,
    factor: float,
    *,
    scale: Any = None,  # number, tensor (..., n_query), or a function of (visible, raw scores, seen) giving that
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    seen: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """softcap(scale <q, k>) + bias where a key is seen, with key heads repeated for their queries."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[-3] // k.shape[-3] if q.dim() > 2 else 1, -3 % q.dim())
    raw = q @ k.mT
    shown = torch.ones_like(raw, dtype=torch.bool)
    added = torch.zeros_like(raw)
    if mask is not None and mask.dtype == torch.bool:
        shown = shown & mask
    elif mask is not None:
        added = added + mask.double().masked_fill(mask <= -6e4, -math.inf)
    if bias is not None:
        added = added + bias.double()
    if seen is not None:
        shown = shown & seen
    if causal:
        shown = shown & torch.ones(raw.shape[-2:], dtype=torch.bool).tril()
    shown = shown & (added > -math.inf)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    elif callable(scale):
        scale = scale(shown.sum(-1).double(), raw, shown)
    scale = scale[..., None].double() if isinstance(scale, Tensor) and scale.dim() else scale
    s = factor * scale * raw
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    return torch.where(shown, s + torch.where(shown, added, 0.0), -math.inf)


def sdpa(d: Dice) -> Case:
    dtype = d.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16])
    groups = d.choice([1, 1, 2])
    q, k, v = qkv(d, dtype, d.maybe(0.7), groups)
    mask, keep, causal = None, None, d.maybe(0.4)
    if not causal and d.maybe(0.7):
        mask, keep = random_mask(d, q, k.shape[2])
    scale = d.choice([None, 0.3, 1.0])
    dropout = d.choice([0.0, 0.0, 0.3])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=groups > 1)

    def scores(factor: float) -> Tensor:
        return dense(q, k, factor, scale=scale, mask=mask, causal=causal)

    about = f"sdpa {dtype} mask {None if mask is None else (mask.dtype, tuple(mask.shape))} causal {causal}"
    return Case(about, Calls(call), (q, k, v), scores, keep)


def policy(d: Dice, dim: int, heads: int) -> tuple[Any, Any, float]:
    """A scale, the same by hand, and how exact it is."""
    root, ref = math.sqrt(dim), d.choice([4.0, 64.0])

    def solved(n: Tensor, raw: Tensor, seen: Tensor) -> Tensor:
        """Bisection on the scale at which the entropy is 0.6 log n."""
        goal, low, high = 0.6 * n.clamp(min=1).log(), torch.zeros_like(n), torch.full_like(n, 1e4)
        for _ in range(200):
            mid = (low + high) / 2
            s = torch.where(seen, mid[..., None] * raw, -math.inf)
            p = torch.softmax(torch.where(n[..., None] > 0, s, 0.0), -1)
            h = -torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0).sum(-1)
            low, high = torch.where(h > goal, mid, low), torch.where(h > goal, high, mid)
        return (low + high) / 2

    learned = scales.ScalableSoftmax(heads)
    with torch.no_grad():
        learned.s.uniform_(0.3, 1.0)
    table = [
        (None, None, 1e-4),
        (0.4, 0.4, 1e-4),
        (scales.LogLength(ref), lambda n, *_: n.clamp(min=4).log() / math.log(ref) / root, 1e-4),
        (scales.SqrtLogLength(ref), lambda n, *_: (n.clamp(min=4).log() / math.log(ref)).sqrt() / root, 1e-4),
        (scales.KappaLog(2.0), lambda n, *_: 2.0 * n.clamp(min=1).log() / dim, 1e-4),
        (scales.Mixed(1.0, 0.5), lambda n, *_: 1 / root + 0.5 * n.clamp(min=1).log() / dim, 1e-4),
        (learned, lambda n, *_: learned.s.detach().double()[:, None] * n.clamp(min=1).log() / root, 1e-4),
        (scales.TargetEntropy(fraction=0.6), solved, 5e-3),
    ]
    return d.choice(table)


def own(d: Dice) -> Case:
    """partita.attention, with all it takes."""
    groups = d.choice([1, 1, 2])
    q, k, v = qkv(d, torch.float32, d.maybe(0.7), groups)
    batch, heads, n, dim = q.shape
    m = k.shape[2]
    scale, by_hand, tolerance = policy(d, dim, heads)
    solved = isinstance(scale, scales.TargetEntropy)
    options: dict[str, Any] = {"scale": scale, "is_causal": d.maybe(), "enable_gqa": groups > 1}
    mask, seen, bias, softcap = None, None, None, None
    if d.maybe(0.3):
        mask, _ = random_mask(d, q, m)
        if solved and mask.is_floating_point():
            mask = mask > -6e4
        if not solved and mask.is_floating_point():
            mask = mask.masked_fill(mask <= -6e4, -math.inf)  # partita adds what it is given
    near = torch.arange(m) - torch.arange(n)[:, None]
    kind = d.choice(["none", "none", "window", "lengths", "segments", "not self"])
    if kind == "window":
        left, right = d.randint(0, 5), d.randint(0, 5)
        options["support"], seen = supports.window(left, right), (near >= -left) & (near <= right)
    elif kind == "lengths":
        lengths = torch.randint(1, m + 1, (batch,))
        options["support"] = supports.lengths(lengths)
        seen = (torch.arange(m) < lengths[:, None])[:, None, None, :]
    elif kind == "segments":
        a, b = torch.randint(0, 3, (batch, n)), torch.randint(0, 3, (batch, m))
        b = a if n == m else b
        options["support"], seen = supports.segments(a, b), (a[:, :, None] == b[:, None, :])[:, None]
    elif kind == "not self":
        options["support"], seen = supports.not_self(), near != 0
    if not solved and d.maybe(0.3):
        bias = torch.randn(d.choice([(n, m), (heads, n, m), (batch, 1, n, m)]))
        options["bias"] = bias
    elif not solved and d.maybe(0.2) and mask is None:
        slopes = torch.rand(heads)
        options["bias"], bias = partita.attn.ALiBi(slopes), -slopes[:, None, None] * near.abs()
    if not solved and d.maybe(0.3):
        softcap = options["softcap"] = d.choice([3.0, 20.0])
    if d.maybe(0.2):
        options["sink"] = torch.randn(heads)
    if d.maybe(0.2):
        options["dropout_p"] = 0.4
    options["return_stats"] = stats = d.maybe()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = partita.attention(q, k, v, mask, **options)
        return out[0] if stats else out

    def scores(factor: float) -> Tensor:
        return dense(
            q, k, factor, scale=by_hand, mask=mask, bias=bias, seen=seen, causal=options["is_causal"], softcap=softcap
        )

    keep = None
    if n == m:  # as documented: a token that may not see itself is padding, unless none may
        shown = scores(1.0)[:, 0].diagonal(dim1=-2, dim2=-1) > -math.inf
        keep = shown | ~shown.any(-1, keepdim=True)
    about = f"partita mask {None if mask is None else mask.dtype} {kind} {options}"
    return Case(about, Calls(call), (q, k, v), scores, keep, tolerance=tolerance)


def replaced(d: Dice) -> Case:
    """Foreign code on partita, under a policy."""
    q, k, v = qkv(d, torch.float32, True)
    causal = d.maybe()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def scores(factor: float) -> Tensor:
        root = math.sqrt(q.shape[-1])
        return dense(q, k, factor, scale=lambda n, *_: n.clamp(min=4).log() / math.log(64) / root, causal=causal)

    replace = lambda: partita.replace_sdpa(scale=scales.LogLength(64))  # noqa: E731
    return Case(f"replace_sdpa causal {causal}", Calls(call), (q, k, v), scores, block=replace)


class HandAttention(nn.Module):
    def __init__(self, call: Callable[[Tensor, Tensor], Tensor], heads: int) -> None:
        super().__init__()
        self.call, self.num_heads = call, heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(q, k) @ v


def by_hand(d: Dice) -> Case:
    q, k, v = qkv(d, torch.float32, d.maybe(0.7))
    mask, keep = random_mask(d, q, k.shape[2]) if d.maybe() else (None, None)
    mask = mask.masked_fill(mask <= -6e4, -math.inf) if mask is not None and mask.is_floating_point() else mask
    flat = d.maybe()

    def weights(q: Tensor, k: Tensor) -> Tensor:
        s = q @ k.mT * 0.5
        if mask is not None:
            s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
        return torch.softmax(s.flatten(0, 1), -1).view_as(s) if flat else F.softmax(s, dim=-1)

    def scores(factor: float) -> Tensor:  # finished scores: the factor multiplies all of them
        return torch.where(torch.isneginf(s := dense(q, k, 1.0, scale=0.5, mask=mask)), s, factor * s)

    return Case(f"softmax by hand, flat {flat}", HandAttention(weights, q.shape[1]), (q, k, v), scores, keep)


def project(module: Any, query: Tensor, key: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Query and key of a MultiheadAttention, (batch, heads, n, dim), in float64."""
    wq, wk, _ = module.in_proj_weight.detach().double().chunk(3)
    bq, bk, _ = module.in_proj_bias.detach().double().chunk(3)
    q, k = query.double() @ wq.T + bq, key.double() @ wk.T + bk
    if getattr(module, "bias_k", None) is not None:
        k = torch.cat([k, module.bias_k.detach().double().expand(k.shape[0], 1, -1)], 1)
    if getattr(module, "add_zero_attn", False):
        k = F.pad(k, (0, 0, 0, 1))
    q, k = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k))
    return q, k


def multihead(d: Dice) -> Case:
    """torch's module and partita's, with and without weights, self and cross, padded and masked."""
    heads, width, batch, n = d.choice([1, 2, 4]), 16, d.randint(1, 3), d.randint(2, 11)
    ours = d.maybe(0.4)
    more = {"add_bias_kv": d.maybe(0.2), "add_zero_attn": d.maybe(0.2)}
    made: Any
    scale: Any = None
    if ours and d.maybe():
        more, made = {}, partita.nn.EntropyInvariantAttention(width, heads, kappa=2.0)
        scale = lambda n, *_: 2.0 * n.clamp(min=1).log() / (width // heads)  # noqa: E731
    else:
        kind = partita.nn.MultiheadAttention if ours else nn.MultiheadAttention
        made = kind(width, heads, dropout=d.choice([0.0, 0.2]), batch_first=True, **more)
    with torch.no_grad():
        made.in_proj_weight.normal_(0, 0.6)
        made.in_proj_bias.normal_(0, 0.2)
    made.train(d.maybe())
    x = torch.randn(batch, n, width)
    cross = d.maybe(0.3)
    y = torch.randn(batch, d.choice([n, n + 3]), width) if cross else x
    m = y.shape[1]
    extra = sum(more.values())
    options: dict[str, Any] = {"need_weights": d.maybe()}
    seen, keep = torch.ones(batch, 1, n, m, dtype=torch.bool), None
    if d.maybe():
        real = torch.arange(m) < torch.randint(1, m + 1, (batch, 1))
        options["key_padding_mask"] = ~real
        seen = seen & real[:, None, None, :]
        keep = real if not cross and not extra else None
    if d.maybe(0.4):
        shown = (torch.rand(n, m) < 0.7) | (torch.arange(m) == torch.arange(n)[:, None])
        shown[:, 0] = True
        options["attn_mask"] = ~shown
        seen = seen & shown
    elif not extra and d.maybe(0.4):
        options["attn_mask"], options["is_causal"] = ~torch.ones(n, m, dtype=torch.bool).tril(), d.maybe()
        seen = seen & ~options["attn_mask"]
    seen = F.pad(seen, (0, extra), value=True)

    def call(x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = made(x, y, y, **options)[0]
        return out

    def scores(factor: float) -> Tensor:
        q, k = project(made, x, y, heads)
        return dense(q, k, factor, scale=scale, seen=seen)

    model = Calls(call)
    model.inner = made
    return Case(f"{type(made).__name__} ours {ours} {options}", model, (x, x if y is x else y), scores, keep)


def encoder_layer(d: Dice) -> Case:
    heads, batch, n, first = d.choice([1, 2, 4]), d.randint(1, 3), d.randint(2, 11), d.maybe()
    made = nn.TransformerEncoderLayer(16, heads, 24, d.choice([0.0, 0.2]), batch_first=True, norm_first=first)
    with torch.no_grad():
        made.self_attn.in_proj_weight.normal_(0, 0.6)
    made.train(d.maybe())
    x = torch.randn(batch, n, 16)
    options: dict[str, Any] = {}
    seen, keep = torch.ones(1, 1, n, n, dtype=torch.bool), None
    if d.maybe():
        keep = torch.arange(n) < torch.randint(1, n + 1, (batch, 1))
        options["src_key_padding_mask"] = ~keep
        seen = seen & keep[:, None, None, :]
    if d.maybe(0.4):
        options["src_mask"] = ~torch.ones(n, n, dtype=torch.bool).tril()
        seen = seen & ~options["src_mask"]

    def scores(factor: float) -> Tensor:
        given = made.norm1(x).detach() if first else x
        return dense(*project(made.self_attn, given, given, heads), factor, seen=seen)

    return Case(f"encoder layer train {made.training} {list(options)}", made, (x,), scores, keep, options)


def hugging_face(d: Dice) -> Case:
    """One layer of a model of transformers; the truth is what reaches the softmax of its eager attention."""
    import transformers

    from partita import hf

    how, name = d.choice(["sdpa", "eager", "partita"]), d.choice(["Llama", "GPT2", "Bert"])
    hf.register()
    sizes: dict[str, Any] = {"vocab_size": 30, "pad_token_id": 0}
    if name == "GPT2":
        sizes |= {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    else:
        sizes |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    if name == "Llama":
        sizes |= {"num_key_value_heads": d.choice([2, 4]), "bos_token_id": 1, "eos_token_id": 2}
    made = [
        getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(attn_implementation=kind, **sizes))
        for kind in (how, "eager")
    ]
    model, eager = (m.eval() for m in made)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.dim() == 2 and any(part in key for part in ("query", "key", "c_attn", "q_proj", "k_proj")):
                p.normal_(0, 0.5)
    eager.load_state_dict(model.state_dict())
    batch, n = d.randint(1, 3), d.randint(2, 12)
    inputs: dict[str, Any] = {"input_ids": torch.randint(3, 30, (batch, n))}
    keep = None
    if d.maybe():
        keep = torch.arange(n) < torch.randint(1, n + 1, (batch, 1))
        inputs["attention_mask"] = keep.long()
    with torch.no_grad(), Softmaxes() as seen:
        eager(**inputs)
    sharper = how == "partita" and d.maybe()
    if sharper:
        hf.set_scale(model, scales.LogLength(16))

    def scores(factor: float) -> Tensor:
        s = torch.where(seen[0] <= -1e8, -math.inf, seen[0].double())
        ratio = (s > -math.inf).sum(-1, keepdim=True).clamp(min=4).double().log() / math.log(16) if sharper else 1.0
        return torch.where(s > -math.inf, factor * ratio * torch.where(s > -math.inf, s, 0.0), -math.inf)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Tensor:
            out: Tensor = self.model(**inputs)[0]
            return out

    return Case(f"{name} {how} policy {sharper} padded {keep is not None}", First(), (), scores, keep, inputs)


KINDS: list[Callable[[Dice], Case]] = [sdpa] * 2 + [own] * 3 + [replaced, by_hand] + [multihead] * 2 + [encoder_layer]
if importlib.util.find_spec("transformers") is not None:
    KINDS.append(hugging_face)


def random_case(seed: int) -> Case:
    d = Dice(seed)
    torch.manual_seed(seed)
    return d.choice(KINDS)(d)
