"""Which modules are being called: a stack of them, and what their callers said about padding.

Nothing is put on a module: its calls are seen where all calls pass, in nn.Module.__call__. So a forward that somebody
else wrapped is called as it is, hooks keep their order, and a copy of a watched model is a copy and nothing more.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION = re.compile(r"att(entio)?n", re.IGNORECASE)
ENDS = re.compile(r"att(entio)?n\d*$", re.IGNORECASE)  # MaskedAttention is one, AttentionMask is not
NOT_ATTENTION = re.compile(r"norm|mask|router|drop|bias|linear|proj|embed|identity", re.IGNORECASE)
FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_SOURCES = ("key_value_states", "encoder_hidden_states", "cross_states", "context", "memory", "key_value", "kv")
_CROSS = re.compile(r"cross|enc(oder)?_?dec|(?<![a-z])(encoder|memory)_att", re.IGNORECASE)


class Roll:
    """The modules of a model by identity, and their names; a module that is gone is not mistaken for a new one."""

    def __init__(self, model: nn.Module) -> None:
        self._found = {id(module): (weakref.ref(module), name) for name, module in followed(model)}

    def name(self, module: nn.Module) -> str | None:
        entry = self._found.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def names(self) -> list[str]:
        return [name for _, name in self._found.values()]


def followed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that may hold a softmax: all but torch's own leaves (Linear, LayerNorm, ...) and scripted ones."""
    for name, module in model.named_modules():
        leaf = not any(True for _ in module.children())
        if leaf and name and type(module).__module__.startswith("torch.nn."):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            continue
        yield name, module


def is_attention(name: str, module: nn.Module) -> bool:
    """Named or classed like attention; `attn_norm`, which may be an Identity, is a norm."""
    return could_be_attention(name, type(module))


def could_be_attention(name: str, kind: type) -> bool:
    """The same of a module of which only its class is known."""
    if issubclass(kind, nn.MultiheadAttention):
        return True
    if issubclass(kind, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    both = kind.__name__ + " " + name.rpartition(".")[2]
    return bool(ENDS.search(kind.__name__) or (ATTENTION.search(both) and not NOT_ATTENTION.search(both)))


@dataclass(frozen=True)
class Frame:
    """A module being called, and what its caller said about padding."""

    name: str
    module: nn.Module
    mask: Tensor | None  # (batch, n), True or 1 where a token is real
    told: bool  # an attention_mask argument was given at all, also if None
    cross: bool

    @property
    def title(self) -> str:
        return self.name or type(self.module).__name__


def frame(name: str, module: nn.Module, kwargs: dict[str, Any], args: tuple[Any, ...] = ()) -> Frame:
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        mask = None
    return Frame(name, module, mask, "attention_mask" in kwargs, _crosses(module, args, kwargs))


def _crosses(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Keys come from elsewhere: given by a name that says so, or as a second sequence of another length."""
    given = [*args, *(kwargs[k] for k in ("hidden_states", "x", "query") if k in kwargs)]
    own = given[0] if given and isinstance(given[0], Tensor) else None
    if any(isinstance(kwargs.get(k), Tensor) and kwargs[k] is not own for k in _SOURCES):
        return True
    second = args[1] if len(args) > 1 else None
    if own is None or not isinstance(second, Tensor) or not could_be_attention("", type(module)):
        return False
    sequences = own.dim() == second.dim() == 3 and second.is_floating_point() and len(own) == len(second)
    return sequences and own.shape[1] != second.shape[1]


def named_cross(name: str) -> bool:
    """A layer whose name says that its keys are another's: EncDecAttention, encoder_attn, crossattention."""
    return bool(_CROSS.search(".".join(name.split(".")[-2:])))


def padding(stack: list[Frame], batch: int, n_query: int) -> Tensor | None:
    """(batch, n_query) of real queries, from the nearest module that was told; None where nobody was."""
    for entry in reversed(stack):
        if entry.mask is not None and entry.mask.shape[0] == batch and entry.mask.shape[1] >= n_query:
            return entry.mask[:, -n_query:] != 0  # with a cache the new tokens are the last ones
        if entry.told and entry.mask is None and stacks_layers(entry.module):
            return None  # a decoder called without a mask does not inherit the encoder's
    return None


def stacks_layers(module: nn.Module) -> bool:
    """An encoder or a decoder."""
    return any(isinstance(child, nn.ModuleList) for child in module.children())


def takes_fast_path(module: nn.Module) -> bool:
    """torch's own modules may compute in one kernel when nobody differentiates; a function mode would prevent it."""
    plain = any(type(module).forward is kind.forward for kind in FAST) and "forward" not in module.__dict__
    if not plain or module.training or not torch.backends.mha.get_fastpath_enabled():
        return False
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        return False
    inside = [] if isinstance(module, nn.MultiheadAttention) else list(module.modules())[1:]
    return not any(m._forward_hooks or m._forward_pre_hooks for m in inside)
