"""A trained model that can be read with other positions and another scale, and be scored on chosen tokens.

Two kinds are known: models of transformers, on partita's attention, and models whose attention is
`partita.nn.MultiheadAttention`. Nothing is trained, and every setting can be taken back.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partita import nn as layers
from partita.attn import Positions
from partita.cli import UsageError
from partita.cli.inspect import run
from partita.scale import Policy

__all__ = ["OWN", "Reader", "Setting", "reader"]


@dataclass(frozen=True)
class Setting:
    """How a model is read: None is its own way."""

    positions: Positions | None = None
    scale: Policy | None = None

    @property
    def name(self) -> str:
        parts = [repr(x) for x in (self.positions, self.scale) if x is not None]
        return " with ".join(parts) or "unmodified"


OWN = Setting()


class Reader:
    """Abstract: a model under a setting."""

    def __init__(self, model: nn.Module, mask: int | None):
        self.model = model.eval()
        self.causal = not _looks_ahead(model)
        self.mask = mask
        if not self.causal and mask is None:
            raise UsageError(
                "this model looks ahead, so its tokens are scored by hiding them, with an unknown mask token: "
                "let the factory return a tokenizer with mask_token_id, or give --mask-id."
            )

    turns = True  # whether its positions can be set
    written: tuple[str, str, str]  # how a program begins that does what `apply` does, sets positions, sets a scale

    def apply(self, setting: Setting) -> None:
        raise NotImplementedError

    def code(self, setting: Setting) -> str:
        """The lines that apply a setting."""
        first, positions, scale = self.written
        lines = [first]
        if setting.positions is not None:
            lines.append(positions.format(_typed(setting.positions)))
        if setting.scale is not None:
            lines.append(scale.format(f"partita.scale.{setting.scale!r}"))
        return "\n".join(lines)

    @torch.no_grad()
    def nll(self, passages: Tensor, places: Sequence[Sequence[int]]) -> list[float]:  # (windows, n)
        """Mean of -log p(token) over the chosen places of each passage, as many in each."""
        where = torch.tensor([list(at) for at in places])
        targets = passages.gather(1, where)
        if self.causal:
            first = int(where.min()) - 1
            logits = self._logits(passages[:, :-1], passages.shape[1] - 1 - first)
            where = where - 1 - first
        else:
            assert self.mask is not None
            logits = self._logits(passages.scatter(1, where, self.mask), passages.shape[1])
        chosen = logits.gather(1, where[..., None].expand(*where.shape, logits.shape[-1])).float()
        if int(targets.max()) >= chosen.shape[-1]:
            raise UsageError(
                f"the text holds token {int(targets.max())}, and the model knows {chosen.shape[-1]}: give a tokenizer "
                f"of its own, FILE.py:factory that returns (model, tokenizer)."
            )
        each = nn.functional.cross_entropy(chosen.transpose(1, 2), targets, reduction="none")
        return [float(x) for x in each.mean(1)]

    def _logits(self, ids: Tensor, last: int) -> Tensor:  # (windows, last, vocabulary)
        """Of the last places: a long passage times a vocabulary is not held where the model can avoid it."""
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            out = self.model(input_ids=ids, logits_to_keep=last)
        else:
            out = run(self.model, ids)
        return _of(out)[:, -last:]

    def fingerprint(self) -> str:
        """Of the weights: cells of another model are not to be mixed with these."""
        total = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            total.update(f"{name} {tuple(parameter.shape)} {float(parameter.detach().double().sum()):.12g}".encode())
        return total.hexdigest()[:16]


class _Transformers(Reader):
    def __init__(self, model: nn.Module, mask: int | None):
        import partita.hf

        partita.hf.register()
        model.set_attn_implementation("partita")  # type: ignore[operator]
        super().__init__(model, mask)
        self.turns = any(name.endswith("inv_freq") for name, _ in model.named_buffers())

    def apply(self, setting: Setting) -> None:
        import partita.hf

        if self.turns:
            partita.hf.set_positions(self.model, setting.positions)
        partita.hf.set_scale(self.model, setting.scale)

    written = (
        'partita.hf.register(); model.set_attn_implementation("partita")',
        "partita.hf.set_positions(model, {})",
        "partita.hf.set_scale(model, {})",
    )


class _Modules(Reader):
    def __init__(self, model: nn.Module, mask: int | None):
        super().__init__(model, mask)
        self.layers = [m for m in model.modules() if isinstance(m, layers.MultiheadAttention)]
        self.turns = all(m.positions is not None for m in self.layers)
        self.own = [(m.rotary, m.scale) for m in self.layers]

    def apply(self, setting: Setting) -> None:
        for layer, (rotary, scale) in zip(self.layers, self.own, strict=True):
            layer.rotary = rotary if setting.positions is None else setting.positions
            layer.scale = scale if setting.scale is None else setting.scale

    written = (
        "for layer in [m for m in model.modules() if isinstance(m, partita.nn.MultiheadAttention)]:",
        "    layer.rotary = {}",
        "    layer.scale = {}",
    )


def reader(model: nn.Module, mask: int | None) -> Reader:
    """The way to read this model, by what it is made of."""
    if hasattr(model, "config") and hasattr(model, "set_attn_implementation"):
        return _Transformers(model, mask)
    if any(isinstance(m, layers.MultiheadAttention) for m in model.modules()):
        return _Modules(model, mask)
    raise UsageError(
        f"{type(model).__name__} is neither a model of transformers nor made of partita.nn.MultiheadAttention: "
        f"its positions and its scale cannot be set from outside."
    )


def _typed(positions: Positions) -> str:
    """As one may type it after `import partita`."""
    text = f"partita.attn.{positions!r}"
    return text.replace("inner=", "inner=partita.attn.")


@torch.no_grad()
def _looks_ahead(model: nn.Module) -> bool:
    """Whether a later token changes what is said at an earlier place."""
    model.eval()
    ids = torch.arange(3, 11)[None]
    other = ids.clone()
    other[0, -1] += 1
    one, two = (_of(run(model, x))[0, :-1].float() for x in (ids, other))
    return bool((one - two).abs().max() > 1e-4 * one.abs().max().clamp(min=1e-30))


def _of(out: Any) -> Tensor:  # (1, n, vocabulary)
    logits = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise UsageError(
            "this model gives no logits for each token, so no loss can be taken: it must be a language model, "
            "causal or masked."
        )
    return logits
