"""Other positions for a trained rotary model, without touching a weight.

    partita.hf.set_positions(model, attn.YaRN(8.0, trained=512))
    partita.hf.set_positions(model, None)                              # as trained again

A model's frequencies are a buffer of its rotary modules, and are changed there. Clipped distances cannot be had by
turning queries and keys: the model then turns nothing, and partita's attention does; its cache holds keys as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partita import attn
from partita.attn.rotary_attention import Turning
from partita.errors import ValueRangeError
from partita.hf.attention import MADE, NAMES, TURNING, called_by

__all__ = ["set_positions"]

_FIELD = "partita_positions"  # of a model's config, so that save_pretrained keeps it
_OWN = "partita_own_positions"  # of a rotary module: frequencies and amplitude as trained, by buffer
_PENDING = "partita_pending"  # of a model that was made with such a config, until its first call
_PROBE, _CLOSE = 12, 1e-3  # tokens that compare two ways of turning, and how far their results may lie apart


def set_positions(model: nn.Module, positions: attn.Positions | None) -> None:
    """Let a rotary model read with other positions; None gives it back its own.

        angle of pair k at position i = i w_k          w_k the model's own, changed as the setting says

    Kept in the config as plain numbers, so `save_pretrained` and `from_pretrained` carry it along where
    `partita.hf.register()` was called before loading. A cache that was filled with other positions must not be used
    any more. `attn.Clipped` needs partita's attention.
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
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    if clipped and not {getattr(config, "_attn_implementation", None) for config in configs.values()} & NAMES:
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
            rotary.write(positions)
    for config in configs.values():
        setattr(config, _FIELD, None if positions is None else _to_dict(positions))


def _wait_for_weights(model: Any) -> None:
    """A model made with a config that holds a setting takes it on at its first call, when its buffers are filled."""
    if getattr(model.config, _FIELD, None) is None:
        return

    def restore(module: Any, args: tuple[Any, ...]) -> None:
        plain = getattr(module.config, _FIELD, None)
        if plain is None or not list(_rotaries(module)):
            _drop_pending(module)
        else:
            set_positions(module, _from_dict(plain))

    model.__dict__[_PENDING] = model.register_forward_pre_hook(restore)


def _drop_pending(model: nn.Module) -> None:
    for module in model.modules():
        handle = module.__dict__.pop(_PENDING, None)
        if handle is not None:
            handle.remove()


MADE.append(_wait_for_weights)

# ---- as plain numbers ------------------------------------------------------------------------------------------------


def _to_dict(positions: attn.Positions) -> dict[str, Any]:
    fields = {f.name: getattr(positions, f.name) for f in dataclasses.fields(positions)}
    plain = {name: _to_dict(x) if isinstance(x, attn.Positions) else x for name, x in fields.items()}
    return {"positions": type(positions).__name__, **plain}


def _from_dict(plain: Mapping[str, Any]) -> attn.Positions:
    fields = {name: _from_dict(x) if isinstance(x, Mapping) else x for name, x in plain.items()}
    made = getattr(attn, str(fields.pop("positions")))(**fields)
    assert isinstance(made, attn.Positions)
    return made


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
                f"{type(self.module).__name__} chooses its frequencies anew with every length (rope_type {kind!r}), "
                f"which would undo another setting."
            )

    def own(self) -> tuple[Tensor, float]:
        """Frequencies and amplitude as trained, remembered from the first time."""
        known: dict[str, tuple[Tensor, float]] = self.module.__dict__.setdefault(_OWN, {})
        if self.name not in known:
            buffer = getattr(self.module, self.name).detach()
            known[self.name] = buffer.clone(), float(getattr(self.module, self.amplitude_name, 1.0))
        return known[self.name]

    def base(self) -> float:
        given = getattr(getattr(self.module, "config", None), "rope_parameters", None) or {}
        given = given.get(self.layers, given) if self.layers else given
        return float(given.get("rope_theta") or 10000.0)

    def changed(self, positions: attn.Positions) -> Tensor:
        own = self.own()[0].double()
        return positions.changed(own, self.base() if positions.base is None else positions.base)

    def put(self, w: Tensor, amplitude: float) -> None:
        if hasattr(self.module, self.amplitude_name):
            setattr(self.module, self.amplitude_name, amplitude)
        elif amplitude != 1.0:
            raise ValueRangeError(
                f"{type(self.module).__name__} has no {self.amplitude_name}; use temperature=False and a scale policy."
            )
        with torch.no_grad():
            getattr(self.module, self.name).copy_(w)

    def write(self, positions: attn.Positions) -> None:
        self.put(self.changed(positions), self.own()[1] * positions.amplitude)

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
        module.__dict__.pop(TURNING, None)


# ---- clipped distances -----------------------------------------------------------------------------------------------


def _clip(model: nn.Module, found: list[_Rotary], positions: attn.Positions) -> None:
    """Nothing turns in the model, everything in its attention: with its own positions first, to see that it is so."""
    x = next(p for p in model.parameters() if p.is_floating_point())
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), called_by() as layers:
            before = _probe(model)
        turning = {}
        for rotary in found:
            w, amplitude = rotary.own()
            turning[rotary.layers] = rotary, Turning(w.double(), amplitude, None, rotary.pairs(x.detach()))
            rotary.put(torch.zeros_like(w), 1.0)
        for layer in layers:
            layer.__dict__[TURNING] = _of_layer(layer, turning)[1]
        with torch.no_grad():
            after = _probe(model)
        apart = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
        if not apart < _CLOSE * (1 if before.dtype in (torch.float32, torch.float64) else 50):
            raise ValueRangeError(
                f"{type(model).__name__} turns its queries and keys in a way that partita's attention does not repeat "
                f"(results lie {apart:.2g} apart), so its distances cannot be clipped."
            )
        for layer in layers:
            rotary, own = _of_layer(layer, turning)
            layer.__dict__[TURNING] = dataclasses.replace(
                own,
                w=rotary.changed(positions),
                amplitude=own.amplitude * positions.amplitude,
                reach=positions.furthest,
            )
    except Exception:
        _as_trained(model, found)
        raise
    finally:
        model.train(training)


def _of_layer(layer: nn.Module, turning: Mapping[str, tuple[_Rotary, Turning]]) -> tuple[_Rotary, Turning]:
    """What turns in this attention module: by its type, where the model has several."""
    if len(turning) == 1:
        return next(iter(turning.values()))
    kind = getattr(layer, "layer_type", None) or getattr(layer, "attention_type", None)
    if kind is None:
        types = getattr(getattr(layer, "config", None), "layer_types", None)
        kind = types[layer.layer_idx] if types else None
    if kind is None or kind not in turning:
        raise ValueRangeError(
            f"{type(layer).__name__} does not tell which of the rotary positions {sorted(turning)} are its own."
        )
    return turning[kind]


def _probe(model: nn.Module) -> Tensor:
    """What the model makes of a few tokens."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(_PROBE, device=embedding.weight.device) % embedding.weight.shape[0]
    out = model(input_ids=ids[None])
    first: Tensor = out[0] if not isinstance(out, Tensor) else out
    return first.float()
