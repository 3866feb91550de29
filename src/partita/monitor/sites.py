"""Where the distributions of a model are: a stack of the modules being called, and what was and was not seen.

Modules are followed by an instance attribute `forward` in front of the class's own, not by hooks: hooks of other tools
keep their order, the fast paths of torch.nn (which refuse modules with hooks) stay what they were, and taking the
attribute away leaves the module exactly as it was found.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION = re.compile(r"att(entio)?n", re.IGNORECASE)
NOT_ATTENTION = re.compile(r"norm|mask|router|drop|bias|linear|proj", re.IGNORECASE)
Call = Callable[["Follow", tuple[Any, ...], dict[str, Any]], Any]


class Follow:
    """Stands in front of one module's forward while it is watched."""

    def __init__(self, name: str, module: nn.Module, around: Call) -> None:
        self.name = name
        self.module = module
        self.around = around
        self.inner = module.forward
        self.calls = 0
        self.before = module.__dict__.get("forward")  # another tool may have put one there
        functools.update_wrapper(self, self.inner)  # inspect.signature keeps working

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)  # traced past the watch: nothing breaks the graph, nothing is seen
        return self.around(self, args, kwargs)

    def attach(self) -> None:
        self.module.__dict__["forward"] = self

    def detach(self) -> None:
        if self.module.__dict__.get("forward") is not self:
            return  # somebody wrapped it after us: their wrapper calls us, and we only pass on
        if self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model (an average of weights, say) is not watched: it gets its class's forward."""
        copy = memo.get(id(self.module))
        return _own_forward(copy) if copy is not None else self.inner

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self.module,)


def _own_forward(module: nn.Module) -> Any:
    return type(module).forward.__get__(module)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and DistributedDataParallel's shells."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            model = model.module  # type: ignore[assignment]
        else:
            return model


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
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return True
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or NOT_ATTENTION.search(kind):
        return False
    return bool(ATTENTION.search(kind) or ATTENTION.search(name.rpartition(".")[2]))


def expected(model: nn.Module) -> dict[str, nn.Module]:
    """Innermost modules that look like attention: what a full report would cover."""
    found = {name: module for name, module in model.named_modules() if is_attention(name, module)}
    outer = {
        name for name in found if any(other != name and other.startswith(name + "." if name else "") for other in found)
    }
    return {name: module for name, module in found.items() if name not in outer}


@dataclass(frozen=True)
class Frame:
    """A module being called, and what its caller said about padding."""

    follow: Follow
    mask: Tensor | None  # (batch, n), True or 1 where a token is real
    told: bool  # an attention_mask argument was given at all, also if None
    cross: bool
    seen: list[None]  # one entry for each softmax seen in this call


def frame(follow: Follow, kwargs: dict[str, Any]) -> Frame:
    told = "attention_mask" in kwargs
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        mask = None
    cross = any(
        isinstance(kwargs.get(k), Tensor) for k in ("key_value_states", "encoder_hidden_states", "cross_states")
    )
    return Frame(follow, mask, told, cross, [])


def padding(stack: list[Frame], batch: int, n_query: int) -> Tensor | None:
    """(batch, n_query) of real queries, from the nearest module that was told; None where nobody was."""
    for entry in reversed(stack):
        if entry.mask is not None and entry.mask.shape[0] == batch and entry.mask.shape[1] >= n_query:
            return entry.mask[:, -n_query:] != 0  # with a cache the new tokens are the last ones
        if entry.told and entry.mask is None and _stack_of_layers(entry.follow.module):
            return None  # a decoder called without a mask does not inherit the encoder's
    return None


def _stack_of_layers(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) for child in module.children())


def coverage(model: nn.Module | None, seen: dict[str, int], called: dict[str, int]) -> dict[str, Any]:
    """What was observed and what was not, with the reason, as data and as a sentence."""
    wanted = expected(model) if model is not None else {}
    # attention inside a module whose name does not say so counts as well
    observed = sorted(seen)
    missed = []
    for name, module in wanted.items():
        if any(s == name or s.startswith(name + ".") or name.startswith(s + ".") for s in map(_bare, seen)):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            reason = "a scripted module cannot be followed"
        elif not called.get(name):
            reason = "never called while watched"
        else:
            kind = type(module).__name__
            reason = f"{kind} was called, but no scaled_dot_product_attention, softmax or partita call was seen in it"
        missed.append({"name": name or "(the model itself)", "reason": reason})
    total = len({_bare(s) for s in observed}) + len(missed)
    short = f"{total - len(missed)} of {total} attention modules observed"
    text = short if not missed else short + "; not seen: " + "; ".join(f"{m['name']} ({m['reason']})" for m in missed)
    return {"observed": observed, "missed": missed, "total": total, "short": short, "text": text}


def _bare(site: str) -> str:
    return site.split("#")[0]
