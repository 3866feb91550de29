"""Any Hugging Face model runs on partita with attn_implementation="partita".

    partita.hf.register()
    model = AutoModel.from_pretrained(..., attn_implementation="partita")
    model(**inputs, output_attentions=True).attentions[layer].entropy        # (batch, heads, n_query), differentiable

Attention *and* mask function are registered: transformers passes no mask to a name that has only the first. A policy
multiplies the model's own scaling by policy(n, dim) * sqrt(dim), so `InverseSqrt` changes nothing, also in models that
scale their queries beforehand (Whisper) or not at all (T5).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from partita import scale as scales
from partita import support as supports
from partita.attn import attention, entropy_penalty
from partita.attn.entropy import check_entropy_weight, weighs
from partita.attn.positions import RopeFrequencies
from partita.attn.problem import Options, Problem
from partita.attn.rotary_attention import rope_attention
from partita.attn.sdpa import finish
from partita.engine import Stats
from partita.engine.state import sink_share
from partita.errors import ValueRangeError
from partita.interception import Patch
from partita.scale import Policy, TargetEntropy

__all__ = [
    "MADE",
    "NAMES",
    "OBSERVERS",
    "ROPE",
    "called_by",
    "configs_of",
    "made_from",
    "register",
    "set_scale",
    "to_plain",
]

EntropyWeight = float | Sequence[float] | Tensor | Mapping[int, float | Sequence[float] | Tensor]
LayerScale = Policy | Mapping[int, Policy] | Callable[[nn.Module], Policy | None]
_FIELD = "partita_scale"  # of a model's config, so that save_pretrained keeps it
NAMES: set[str] = set()  # names under which transformers knows partita's attention
# by tensor of keys, a function that receives their column sums; the attention that reads the keys removes it
OBSERVERS = WeakIdKeyDictionary()
ROPE = "partita_rope"  # attribute of an attention module whose queries and keys partita rotates
MADE: list[Callable[[Any], None]] = []  # called with each model of transformers that is made
_CALLED: list[list[nn.Module]] = []  # lists of attention modules as they are called, one per active `called_by`
_TAKEN = ("sdpa", "flex_attention", "flash", "eager", "paged")  # transformers looks for these inside names


def register(
    name: str = "partita",
    scale: LayerScale | None = None,
    *,
    attention_entropy_weight: EntropyWeight = 0.0,
) -> str:
    """Register attn_implementation=name with transformers; returns the name.

    scale: None keeps each model's own; a policy for all layers; a mapping from layer index to policy; or a function of
        the attention module that returns a policy or None. `set_scale` changes one model afterwards.
    attention_entropy_weight: a number, one per head, or a mapping from layer index to either. In training each layer
        stores -weight * mean(H / log n); add `partita.nn.entropy_loss(model)` to its loss. Above 0 keeps attention
        broad, below 0 sharpens it. A mapping leaves out layers without a `layer_idx`, as in many vision models.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError("partita.hf needs transformers 5 or later: pip install transformers") from error
    taken = [part for part in _TAKEN if part in name]
    if taken:
        raise ValueRangeError(f"transformers treats names with {taken[0]!r} in them specially; got {name!r}.")
    _check_scale(scale)
    weights = attention_entropy_weight
    for weight in weights.values() if isinstance(weights, Mapping) else (weights,):
        check_entropy_weight(weight)

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        out, stats = _forward(module, query, key, value, mask, scale, **kwargs)
        weight = weights.get(getattr(module, "layer_idx", -1), 0.0) if isinstance(weights, Mapping) else weights
        if module.training and weighs(weight):
            module.__dict__["entropy_loss"] = entropy_penalty(stats, weight)
        return out, stats

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    if not NAMES:
        Patch(PreTrainedModel, "post_init").add(_warn_of_lost_scale, everywhere=True, traced=True)
    NAMES.add(name)
    return name


def _warn_of_lost_scale(post_init: Callable[..., None], model: Any) -> None:
    """Warn of a model whose config holds a policy that its attention ignores."""
    post_init(model)
    for look in MADE:
        look(model)
    own = getattr(model.config, "_attn_implementation", None)
    if getattr(model.config, _FIELD, None) is not None and own not in NAMES:
        warnings.warn(
            f"the config of this {type(model).__name__} holds a scale policy of partita, and its attention is {own!r}, "
            f"which ignores it. Load it with from_pretrained(..., attn_implementation='partita'), call "
            f"model.set_attn_implementation('partita'), or drop the policy with partita.hf.set_scale(model, None).",
            stacklevel=3,
        )


def set_scale(model: nn.Module, scale: Policy | Mapping[int, Policy] | None) -> None:
    """Set a scale policy of one model, for all layers or per layer index; None restores its own scale.

    It is stored in the model's config as plain numbers, so `save_pretrained` and `from_pretrained` keep it. The model's
    attention must be partita's.
    """
    _check_scale(scale)
    if isinstance(scale, Mapping):
        plain: Any = {str(layer): to_plain(policy, "policy") for layer, policy in scale.items()}
    else:
        plain = None if scale is None else to_plain(scale, "policy")
    configs = configs_of(model)
    if not configs:
        raise ValueRangeError("set_scale needs a transformers model; this one has no config.")
    others = {getattr(config, "_attn_implementation", None) for config in configs} - NAMES
    if scale is not None and len(others) == len(configs):
        raise ValueRangeError(
            f"the attention of this model is {', '.join(sorted(map(repr, others)))}, which ignores a scale policy. "
            f"First call partita.hf.register() and model.set_attn_implementation('partita')."
        )
    for config in configs:
        setattr(config, _FIELD, plain)


def configs_of(model: nn.Module) -> list[Any]:
    """The configs inside a model, each once."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


def _check_scale(scale: object) -> None:
    fine = scale is None or isinstance(scale, Policy) or callable(scale)
    if isinstance(scale, Mapping):
        fine = all(isinstance(layer, int) and isinstance(policy, Policy) for layer, policy in scale.items())
    if not fine:
        raise ValueRangeError(f"scale must be a policy of partita.scale, or one per layer index; got {scale!r}.")


def to_plain(setting: Any, name: str) -> dict[str, Any]:
    """A policy or a position setting as numbers for a config; `name` is the entry with its class."""
    if not dataclasses.is_dataclass(setting):
        raise ValueRangeError(
            f"{type(setting).__name__} learns, so a config cannot hold it; give it to register(scale=...) instead."
        )
    found = {field.name: getattr(setting, field.name) for field in dataclasses.fields(setting)}
    plain = {field: to_plain(x, name) if dataclasses.is_dataclass(x) else x for field, x in found.items()}
    return {name: type(setting).__name__, **plain}


def made_from(plain: Mapping[str, Any], name: str, home: object) -> Any:
    """The inverse of `to_plain`, with the classes of `home`."""
    given = {field: made_from(x, name, home) if isinstance(x, Mapping) else x for field, x in plain.items()}
    return getattr(home, str(given.pop(name)))(**given)


def _policy(module: nn.Module, registered: LayerScale | None) -> Policy | None:
    """The policy of a layer: the model's own setting, else the registered one."""
    layer = getattr(module, "layer_idx", None)
    plain = getattr(getattr(module, "config", None), _FIELD, None)
    if plain is not None:
        plain = plain if "policy" in plain else plain.get(str(layer))
        return None if plain is None else made_from(plain, "policy", scales)
    if isinstance(registered, Mapping):
        return None if layer is None else registered.get(layer)
    return registered if registered is None or isinstance(registered, Policy) else registered(module)


@contextlib.contextmanager
def called_by() -> Iterator[list[nn.Module]]:
    """The attention modules that call partita's attention inside the context, each once, in order."""
    found: list[nn.Module] = []
    _CALLED.append(found)
    try:
        yield found
    finally:
        _CALLED.remove(found)


@dataclasses.dataclass(frozen=True)
class _Relative(Policy):
    """A policy times a factor: the model's own scaling in units of 1/sqrt(dim)."""

    inner: Policy
    factor: float

    def __call__(self, visible: Tensor | int, dim: int, query: Tensor | None = None) -> Tensor:
        return self.inner(visible, dim, query) * self.factor

    def number(self, n: int, dim: int) -> float | None:
        found = self.inner.number(n, dim)
        return None if found is None else found * self.factor


def _sharpness(policy: Policy | None, own: float | None, dim: int) -> float | Policy:
    own = dim**-0.5 if own is None else float(own)
    if policy is None:
        return own
    # a solved scale depends on the scores, not on what scaled them before
    return policy if isinstance(policy, TargetEntropy) else _Relative(policy, own * math.sqrt(dim))


def _place(mask: Tensor | None, n_query: int, n_key: int) -> int | Tensor:
    """The positions of the queries: at the end of a growing cache, or at each row's last visible key.

    A cache of fixed size has empty slots after the queries, which only the mask shows.
    """
    if mask is None or n_key == n_query:
        return n_key - n_query
    seen = mask if mask.dtype == torch.bool else ~mask.isneginf()
    return n_key - 1 - seen.flip(-1).int().argmax(-1)


def _forward(
    module: nn.Module,
    query: Tensor,  # (batch, heads, n_query, dim)
    key: Tensor,  # (batch, key heads, n_key, dim)
    value: Tensor,
    mask: Tensor | None,
    registered: LayerScale | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Stats]:
    if cache is not None and hasattr(cache, "update"):  # continuous batching keeps its keys in pages
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=getattr(module, "layer_idx", None), kwargs=kwargs
        )
    observe = None if torch.compiler.is_compiling() else OBSERVERS.pop(key, None)  # no graph has such a cache
    n_query = query.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and mask is None and n_query > 1
    bias, support = position_bias, None
    if causal and key.shape[2] > n_query:  # the first call on a static cache: the rest of it is still empty
        key, value = key[:, :, :n_query], value[:, :, :n_query]
        bias = None if bias is None else bias[..., :n_query]
    if causal and sliding_window is not None:
        support = supports.window(sliding_window - 1, 0)
    if mask is not None:
        mask = mask[..., : key.shape[2]]
        # the dtype's minimum hides a key, so that a row without keys gives zero
        floats = mask.is_floating_point()
        mask = torch.where(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf, mask) if floats else mask.bool()
    policy = _policy(module, registered)
    options: Options = {
        "attn_mask": mask,
        "is_causal": causal,
        "scale": _sharpness(policy, scaling, query.shape[-1]),
        "enable_gqa": key.shape[1] != query.shape[1],
        "support": support,
        "bias": bias,
        "softcap": softcap,
    }
    for found in _CALLED:
        found += [module] if not any(module is other for other in found) else []
    rope: RopeFrequencies | None = module.__dict__.get(ROPE)
    p = None if observe is None else Problem.of(query, key, **options).gibbs()
    if rope is not None:
        if dropout > 0 or p is not None:
            raise ValueRangeError("clipped distances take no dropout, and give no attention received per key.")
        where, rope = _place(mask, query.shape[2], key.shape[2]), rope.to(query.device)
        out, stats = rope_attention(query, key, value, rope, where=where, sink=s_aux, return_stats=True, **options)
    elif p is None or dropout > 0:
        out, stats = attention(query, key, value, dropout_p=dropout, sink=s_aux, return_stats=True, **options)
    else:  # the sums over keys and over queries share a pass
        mean, state = p.mean(value)
        out, stats = finish(state, value, s_aux, True, mean)
    if p is not None and observe is not None:
        taken = None if s_aux is None else sink_share(s_aux.to(stats.entropy)[:, None], stats.log_partition)
        observe(p.received(None if taken is None else 1 - taken))
    steer = getattr(policy, "observe", None)  # of a TemperatureController
    if module.training and steer is not None:
        steer(stats)
    return out.transpose(1, 2).contiguous(), stats
