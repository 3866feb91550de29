"""Other positions for a trained rotary model, without touching a weight.

    partita.hf.set_positions(model, attn.YaRN(8.0, trained=512))
    partita.hf.set_positions(model, None)                              # as trained again

A model's frequencies are a buffer of its rotary modules, and are changed there. For clipped distances the model rotates
nothing and partita's attention does; its cache then holds unrotated keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partita import attn
from partita.attn.positions import RopeFrequencies
from partita.errors import ValueRangeError
from partita.hf.attention import MADE, NAMES, ROPE, called_by, configs_of, made_from, to_plain

__all__ = ["set_positions"]

_FIELD = "partita_positions"  # of a model's config, so that save_pretrained keeps it
_OWN = "partita_own_positions"  # of a rotary module: frequencies and amplitude as trained, by buffer
_PENDING = "partita_pending"  # of a model that was made with such a config, until its first call
_PROBE, _CLOSE = 12, 1e-3  # tokens that compare two ways of rotating, and the largest difference of results


def set_positions(model: nn.Module, positions: attn.Positions | None) -> None:
    """Change the positions of a rotary model; None restores its own.

        angle of pair k at position i = i w_k          w_k the model's own, changed by the setting

    Stored in the config as plain numbers, so `save_pretrained` and `from_pretrained` keep it if `partita.hf.register()`
    was called before loading. A cache filled with other positions is invalid. `attn.Clipped` needs partita's attention.
    """
    if positions is not None and not isinstance(positions, attn.Positions):
        raise ValueRangeError(f"positions must be a setting of partita.attn such as YaRN(8.0, 512); got {positions!r}.")
    found = list(_rotaries(model))
    if not found:
        raise ValueRangeError(
            f"{type(model).__name__} has no rotary positions (no inv_freq buffer), so there is nothing to set."
        )
    for rotary in found:
        rotary.check()
    clipped = positions is not None and positions.furthest is not None
    configs = configs_of(model)
    if clipped and not {getattr(config, "_attn_implementation", None) for config in configs} & NAMES:
        raise ValueRangeError(
            "clipped distances need partita's attention: first call partita.hf.register() and "
            "model.set_attn_implementation('partita')."
        )
    _drop_pending(model)
    _as_trained(model, found)
    if positions is not None and clipped:
        _clip(model, found, positions)
    elif positions is not None:
        for rotary in found:
            rotary.put(rotary.changed(positions), rotary.own()[1] * positions.amplitude)
    for config in configs:
        setattr(config, _FIELD, None if positions is None else to_plain(positions, "positions"))


def _wait_for_weights(model: Any) -> None:
    """A model whose config holds a setting takes it on at its first call, when its buffers are filled."""
    if getattr(model.config, _FIELD, None) is None:
        return

    def restore(module: Any, args: tuple[Any, ...]) -> None:
        plain = getattr(module.config, _FIELD, None)
        if plain is None or not list(_rotaries(module)):
            _drop_pending(module)
        else:
            set_positions(module, made_from(plain, "positions", attn))

    model.__dict__[_PENDING] = model.register_forward_pre_hook(restore)


def _drop_pending(model: nn.Module) -> None:
    for module in model.modules():
        handle = module.__dict__.pop(_PENDING, None)
        if handle is not None:
            handle.remove()


MADE.append(_wait_for_weights)


# ---- the rotary modules of a model -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Rotary:
    """One set of frequencies: the buffer of a rotary module, for all layers or for one type of them."""

    module: nn.Module
    name: str  # of the buffer
    layers: str  # the type of layers it is for, or nothing

    @property
    def amplitude_name(self) -> str:
        return f"{self.layers}_attention_scaling" if self.layers else "attention_scaling"

    def check(self) -> None:
        kind = getattr(self.module, "rope_type", "default")
        kind = kind.get(self.layers, "default") if isinstance(kind, Mapping) else kind
        if "dynamic" in kind or kind == "longrope":
            raise ValueRangeError(
                f"{type(self.module).__name__} changes its frequencies with the length (rope_type {kind!r}), "
                f"which would undo another setting."
            )

    def own(self) -> tuple[Tensor, float]:
        """Frequencies and amplitude as trained, remembered from the first call."""
        known: dict[str, tuple[Tensor, float]] = self.module.__dict__.setdefault(_OWN, {})
        if self.name not in known:
            buffer = getattr(self.module, self.name).detach()
            known[self.name] = buffer.clone(), float(getattr(self.module, self.amplitude_name, 1.0))
        return known[self.name]

    def changed(self, positions: attn.Positions) -> Tensor:
        given = getattr(getattr(self.module, "config", None), "rope_parameters", None) or {}
        given = given.get(self.layers, given) if self.layers else given
        base = float(given.get("rope_theta") or 10000.0) if positions.base is None else positions.base
        return positions.changed(self.own()[0].double(), base)

    def put(self, w: Tensor, amplitude: float) -> None:
        if hasattr(self.module, self.amplitude_name):
            setattr(self.module, self.amplitude_name, amplitude)
        elif amplitude != 1.0:
            raise ValueRangeError(
                f"{type(self.module).__name__} has no {self.amplitude_name}; use temperature=False and a scale policy."
            )
        with torch.no_grad():
            getattr(self.module, self.name).copy_(w)

    def pairs(self, x: Tensor) -> bool:
        """Whether neighbours are paired, by the layout of the cosines it gives; False for halves."""
        kwargs = {"layer_type": self.layers} if self.layers else {}
        cos = self.module(x, torch.ones(1, 1, dtype=torch.long, device=x.device), **kwargs)
        cos = cos[0] if isinstance(cos, tuple) else cos
        if cos.is_complex() or cos.shape[-1] != 2 * self.own()[0].shape[0]:
            return True
        half = cos.shape[-1] // 2
        return not torch.equal(cos[..., :half], cos[..., half:])


def _rotaries(model: nn.Module) -> Iterator[_Rotary]:
    for module in model.modules():
        for name, _ in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                yield _Rotary(module, name, name.removesuffix("inv_freq").removesuffix("_"))


def _as_trained(model: nn.Module, found: list[_Rotary]) -> None:
    for rotary in found:
        rotary.put(*rotary.own())
    for module in model.modules():
        module.__dict__.pop(ROPE, None)


# ---- clipped distances -----------------------------------------------------------------------------------------------


@torch.no_grad()
def _clip(model: nn.Module, found: list[_Rotary], positions: attn.Positions) -> None:
    """The model rotates nothing, its attention everything; compared first with the model's own positions."""
    x = next(p for p in model.parameters() if p.is_floating_point())
    training = model.training
    model.eval()
    try:
        with called_by() as layers:
            before = _probe(model)
        rope = {}  # as trained, and clipped
        for rotary in found:
            w, amplitude = rotary.own()
            own = RopeFrequencies(w.double(), amplitude, None, rotary.pairs(x))
            rope[rotary.layers] = (
                own,
                dataclasses.replace(
                    own,
                    w=rotary.changed(positions),
                    amplitude=amplitude * positions.amplitude,
                    reach=positions.furthest,
                ),
            )
            rotary.put(torch.zeros_like(w), 1.0)
        chosen = [_of_layer(layer, rope) for layer in layers]
        for layer, (own, _) in zip(layers, chosen, strict=True):
            layer.__dict__[ROPE] = own
        difference = float((_probe(model) - before).abs().max() / before.abs().max().clamp(min=1e-30))
        if not difference < _CLOSE:
            raise ValueRangeError(
                f"{type(model).__name__} rotates its queries and keys in a way that partita's attention does not know "
                f"(results differ by {difference:.2g}), so its distances cannot be clipped."
            )
        for layer, (_, clipped) in zip(layers, chosen, strict=True):
            layer.__dict__[ROPE] = clipped
    except Exception:
        _as_trained(model, found)
        raise
    finally:
        model.train(training)


def _of_layer(layer: nn.Module, rope: Mapping[str, Any]) -> Any:
    """What belongs to an attention module: by its type, if the model has rotary modules for several."""
    if len(rope) == 1:
        return next(iter(rope.values()))
    kind = getattr(layer, "layer_type", None) or getattr(layer, "attention_type", None)
    if kind is None:
        types = getattr(getattr(layer, "config", None), "layer_types", None)
        kind = types[layer.layer_idx] if types else None
    if kind is None or kind not in rope:
        raise ValueRangeError(
            f"{type(layer).__name__} does not name which of the rotary positions {sorted(rope)} are its own."
        )
    return rope[kind]


def _probe(model: nn.Module) -> Tensor:
    """The output of the model for a few tokens."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(_PROBE, device=embedding.weight.device) % embedding.weight.shape[0]
    out = model(input_ids=ids[None])
    first: Tensor = out[0] if not isinstance(out, Tensor) else out
    return first.float()
