"""Every public call of `surface`, repeated with one argument replaced by something wrong.

While a call of the surface runs, what it calls is recorded with its arguments; each argument, given or left to its
default, is then replaced by values of every wrong kind.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import partita
from partita import attn, contrastive, metrics, nn, scale, score, support
from tests import surface

MODULES = (partita, attn, contrastive, metrics, nn, scale, score, support)


class Recorded(NamedTuple):
    name: str
    function: Callable[..., Any]
    arguments: inspect.BoundArguments
    given: frozenset[str]


def record(name: str, patch: pytest.MonkeyPatch) -> list[Recorded]:
    """What the call of this name calls of the package, with the arguments."""
    found: list[Recorded] = []

    def recording(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if _from_surface(sys._getframe(1)):
                bound = signature.bind(*args, **kwargs)
                given = frozenset(bound.arguments)
                bound.apply_defaults()
                found.append(Recorded(label, function, bound, given))
            return function(*args, **kwargs)

        wrapper.records = True  # type: ignore[attr-defined]
        return wrapper

    for module in MODULES:
        for public in module.__all__:
            made = getattr(module, public)
            if isinstance(made, type):
                for method in _methods(made):
                    patch.setattr(made, method, recording(f"{public}.{method}", getattr(made, method)))
            if isinstance(made, (type, types.FunctionType)):
                patch.setattr(module, public, recording(public, made))
    for kind in {type(s) for s in (support.all(), support.causal(), support.lengths(1))}:
        for method in ("visible", "dense"):
            patch.setattr(kind, method, recording(f"Support.{method}", getattr(kind, method)))
    surface.CALLS[name](surface.Given(surface.SIZES))
    return found


@functools.cache
def recorded() -> dict[str, list[Recorded]]:
    """Of every call of the surface, what no call before it has recorded in the same form."""
    known: set[tuple[object, ...]] = set()
    found: dict[str, list[Recorded]] = {}
    for name in surface.CALLS:
        with pytest.MonkeyPatch.context() as patch:
            calls = record(name, patch)
        found[name] = []
        for call in calls:
            form = (call.name, call.given, *(type(x) for x in call.arguments.arguments.values()))
            if form not in known:
                known.add(form)
                found[name].append(call)
    return found


def _methods(kind: type) -> list[str]:
    own = [m for m in ("forward", "__call__", "fold", "push") if callable(getattr(kind, m, None))]
    if issubclass(kind, torch.nn.Module):
        own = [m for m in own if m != "__call__"]
    if kind in (partita.Gibbs, partita.State):
        own = [m for m in dir(kind) if not m.startswith("_") and isinstance(getattr(kind, m), types.FunctionType)]
    made = {m: getattr(kind, m) for m in own}
    return [m for m, f in made.items() if isinstance(f, types.FunctionType) and not hasattr(f, "records")]


def _from_surface(frame: types.FrameType | None) -> bool:
    while frame is not None and "torch/nn/modules/module.py" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == surface.__file__


def wrong(good: Any) -> dict[str, Any]:
    """Values of every kind that this argument is not, by what they are called."""
    given: dict[str, Any] = {
        "a text": "x", "None": None, "a class": dict if good is None else type(good), "half": 0.5, "three": 3,
        "nan": math.nan, "inf": math.inf, "negative": -1, "minus 1.5": -1.5, "true": True, "huge": 10**30,
        "a list": [1.0], "a dict": {}, "an object": object(), "a scalar tensor": torch.tensor(1.0),
        "two numbers": torch.zeros(2), "a matrix": torch.zeros(2, 3), "an index": torch.zeros(1, dtype=torch.long),
    }  # fmt: skip
    if not isinstance(good, Tensor):
        return given
    x = good.detach()
    given |= {
        "complex": x.to(torch.complex64), "integers": x.long(), "booleans": x.bool(),
        "another dtype": x.double() if x.is_floating_point() else x.float(), "one more in front": x[None],
        "three more in front": torch.stack([x] * 3),
    }  # fmt: skip
    if x.dim():
        given |= {
            "a column more": torch.cat([x, x[..., :1]], -1), "a row more": torch.cat([x, x[:1]], 0),
            "a column less": x[..., :-1], "one column": x[..., :1], "one row": x[0], "no rows": x[:0],
            "no columns": x[..., :0],
        }  # fmt: skip
    if not x.is_floating_point():
        given |= {"too large": x.long() + 1000, "too small": x.long() - 1000}
    return given


def mistaken(call: Recorded) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """An argument, what is wrong with it, and the call."""
    signature = call.arguments.signature
    for name, good in call.arguments.arguments.items():
        parameter = signature.parameters[name]
        if name in ("self", "device", "dtype") or parameter.kind is parameter.VAR_KEYWORD:
            continue  # torch's own to refuse
        several = parameter.kind is parameter.VAR_POSITIONAL
        if several and not good:
            continue
        flag = isinstance(good, bool)
        for label, value in wrong(good[0] if several else good).items():
            if (flag and isinstance(value, Tensor) and value.numel() != 1) or (good is None and value is None):
                continue  # a flag is whatever Python takes for true or false
            changed = {**call.arguments.arguments, name: (value, *good[1:]) if several else value}
            bound = inspect.BoundArguments(signature, OrderedDict(changed))
            yield name, label, lambda bound=bound: call.function(*bound.args, **bound.kwargs)


def never_right(good: Any, label: str) -> bool:
    """Whether success would mean that the value was not looked at."""
    number = isinstance(good, (int, float)) and not isinstance(good, bool)
    if isinstance(good, bool):
        return False
    return label in ("a text", "a class", "an object", "complex") or (number and label in ("nan", "a dict"))
