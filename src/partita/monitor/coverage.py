"""What was and was not seen of a model, with the reason, as data and as a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from partita.monitor.modules import is_attention

BY_HAND = (
    "a softmax of a matmul, written by hand: name its class or module so that 'attention' is in it, call "
    "F.scaled_dot_product_attention, or report it with observe(query, key)"
)


class Coverage(dict[str, Any]):
    """What was seen and what was not; its text is a sentence."""

    def __str__(self) -> str:
        return str(self["text"])


def expected(model: nn.Module) -> dict[str, str]:
    """Innermost modules that look like attention, by name, and what can be said of them before they are called."""
    found = {name: module for name, module in model.named_modules() if is_attention(name, module)}
    outer = {
        name for name in found if any(other != name and other.startswith(name + "." if name else "") for other in found)
    }
    return {name: _kind(module) for name, module in found.items() if name not in outer}


def _kind(module: nn.Module) -> str:
    return "" if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def coverage(
    wanted: Mapping[str, str], seen: Iterable[str], called: Mapping[str, int], by_hand: Mapping[str, str]
) -> Coverage:
    """wanted: as `expected` found it; seen: modules whose softmax was; by_hand: those whose softmax was passed over."""
    observed = sorted(seen)
    missed = []
    for name, kind in wanted.items():
        if name in by_hand or any(s == name or _inside(s, name) or _inside(name, s) for s in observed):
            continue
        if not kind:
            reason = "a scripted module cannot be followed"
        elif not called.get(name):
            reason = "never called while watched"
        else:
            reason = f"{kind} was called, but no scaled_dot_product_attention, softmax or partita call was seen in it"
        missed.append({"name": name or "(the model itself)", "reason": reason})
    missed += [{"name": name or kind, "reason": BY_HAND} for name, kind in by_hand.items() if name not in observed]
    total = len(observed) + len(missed)
    short = f"{len(observed)} of {total} attention modules observed"
    text = short if not missed else short + "; not seen: " + "; ".join(f"{m['name']} ({m['reason']})" for m in missed)
    return Coverage(observed=observed, missed=missed, total=total, short=short, text=text)


def _inside(name: str, outer: str) -> bool:
    return name.startswith(outer + ".")
