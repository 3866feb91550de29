"""The options of watch, checked before anything is touched; how a record was made, and what was seen."""

from __future__ import annotations

import operator
import platform
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from importlib import metadata
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from partita.monitor.findings import Thresholds
from partita.monitor.hooks import is_attention

KERNELS = ("own", "partita")
BUDGET_ROWS = 256  # of a call, where a budget is set and no number of rows
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "num_decoder_layers")


@dataclass
class Options:
    """What `watch` was given, checked for this model and the names of its modules."""

    model: InitVar[nn.Module]
    names: InitVar[Sequence[str]]
    every: int = 1
    rows: int | None = None
    layers: Any = None
    maps: Any = ()
    sinks: Any = ()
    thresholds: Any = None
    kernel: str = "own"
    received: bool = False
    critical: bool = False
    keep: int | None = 1000
    budget: float | None = None

    def __post_init__(self, model: nn.Module, names: Sequence[str]) -> None:
        if not _whole(self.every) or self.every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1; got {self.every!r}.")
        for name, whole, of in (("rows", "every row", "rows"), ("keep", "every step", "steps")):
            given = getattr(self, name)
            if given is not None and (not _whole(given) or given < 1):
                raise ValueError(f"{name} must be None ({whole}) or a number of {of}, at least 1; got {given!r}.")
        if self.budget is not None:
            number = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool)
            if not number or not 0 < self.budget < 1:
                raise ValueError(f"budget must be None or a share of the time, such as 0.01; got {self.budget!r}.")
            self.rows = self.rows or BUDGET_ROWS
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(map(repr, KERNELS))}; got {self.kernel!r}.")
        for name, what in (("received", "follow what each key receives"), ("critical", "measure the critical scale")):
            if not isinstance(given := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False: whether to {what}; got {given!r}.")
        if not isinstance(self.thresholds, Thresholds):
            self.thresholds = Thresholds().with_(**(self.thresholds or {}))
        self.layers, self.maps, self.sinks = _layers(self.layers, model, names), _maps(self.maps), _sinks(self.sinks)

    def chosen(self, layer: int, name: str) -> bool:
        wanted = self.layers
        return wanted is None or any(layer == c if isinstance(c, int) else re.search(c, name) for c in wanted)

    def plain(self) -> dict[str, Any]:
        """For the record's provenance."""
        names = ("every", "rows", "layers", "maps", "kernel", "received", "critical", "keep", "budget")
        return {name: getattr(self, name) for name in names} | {"maps": [list(pair) for pair in self.maps]}


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def whole_step(step: Any) -> int:
    """The number of a step, of whatever kind of whole number: a record holds Python's alone."""
    if not isinstance(step, (bool, Tensor)) and hasattr(step, "__index__") and (number := operator.index(step)) >= 0:
        return number
    advice = " Of a tensor that counts steps use step.item()." if isinstance(step, Tensor) else ""
    raise ValueError(f"set_step takes a whole number from 0, or None between steps; got {step!r}.{advice}")


def _maps(maps: Any) -> list[tuple[int, int]]:
    advice = f"maps takes pairs (layer, head), such as maps=[(0, 1)] for head 1 of layer 0; got {maps!r}."
    if not isinstance(maps, (list, tuple, set, frozenset)):
        raise ValueError(advice)
    out = []
    for pair in maps:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(_whole(x) and x >= 0 for x in pair):
            raise ValueError(advice)
        out.append((int(pair[0]), int(pair[1])))
    return out


def _sinks(sinks: Any) -> list[Any]:
    given = list(sinks) if isinstance(sinks, (list, tuple)) else [sinks]
    if wrong := [sink for sink in given if not callable(sink)]:
        raise ValueError(
            "sinks takes functions, such as sinks=[partita.monitor.tensorboard(SummaryWriter())], "
            f"partita.monitor.json_lines(path) or partita.monitor.log_to(wandb.log); got {wrong[0]!r}."
        )
    return given


def _layers(given: Any, model: nn.Module, names: Sequence[str]) -> list[int | str] | None:
    if given is None:
        return None
    wanted = [given] if isinstance(given, (int, str)) else list(given)
    for one in wanted:
        if not isinstance(one, str) and (not _whole(one) or one < 0):
            raise ValueError(f"layers takes numbers from 0, or regular expressions on module names; got {one!r}.")
        if isinstance(one, str):
            try:
                re.compile(one)
            except re.error as error:
                advice = f"layers takes regular expressions on module names; {one!r} is none: {error}."
                raise ValueError(advice) from None
    if not any(_can_match(one, model, names) for one in wanted):
        count, seen = _count(model), ", ".join(repr(n) for n in list(expected(model))[:3] if n)
        raise ValueError(
            f"layers={wanted!r} matches nothing: this model has {count} attention modules, layers 0 to {count - 1}"
            + (f", named {seen}" if seen else "")
            + ". One call of a module that is called several times is named by a pattern, such as r'attention\\[3\\]'."
        )
    return wanted


def _can_match(one: int | str, model: nn.Module, names: Sequence[str]) -> bool:
    if isinstance(one, int):
        return not _count(model) or one < _count(model)  # where none looks like attention, calls will show
    called = [name or type(model).__name__ for name in names]
    again = (f"{name}[{call}]" for name in called for call in range(1, 100))
    return any(re.search(one, name) for name in chain(called, again))


def _count(model: nn.Module) -> int:
    """How many layers there may be: modules that look like attention, or what a config has for shared ones."""
    config = getattr(model, "config", None)
    listed = [n for name in _COUNTS if isinstance(n := getattr(config, name, None), int)]
    return max(len(expected(model)), *listed, 0)


# ---- what was seen ---------------------------------------------------------------------------------------------------

BY_HAND = (
    "a softmax of a matmul, written by hand: name its class or module so that 'attention' is in it, call "
    "F.scaled_dot_product_attention, or report it with observe(query, key)"
)


class Coverage(dict[str, Any]):
    """What was seen and what was not; its text is a sentence."""

    def __str__(self) -> str:
        return str(self["text"])


def expected(model: nn.Module) -> dict[str, str]:
    """Innermost modules that look like attention, by name, and their kind; "" of a scripted one."""
    found = {name: module for name, module in model.named_modules() if is_attention(name, type(module))}
    outer = {name for name in found if any(other != name and (not name or _inside(other, name)) for other in found)}
    kinds = {n: "" if isinstance(m, torch.jit.ScriptModule) else type(m).__name__ for n, m in found.items()}
    return {name: kind for name, kind in kinds.items() if name not in outer}


def coverage(
    wanted: Mapping[str, str], seen: Iterable[str], called: Mapping[str, int], by_hand: Mapping[str, str]
) -> Coverage:
    """wanted: as `expected` found it; seen: modules whose softmax was; by_hand: those whose softmax was passed over."""
    observed = sorted(seen)
    missed = []
    for name, kind in wanted.items():
        reason = f"{kind} was called, but no scaled_dot_product_attention, softmax or partita call was seen in it"
        if not kind:
            reason = "a scripted module cannot be followed"
        elif not called.get(name):
            reason = "never called while watched"
        if name not in by_hand and not any(s == name or _inside(s, name) or _inside(name, s) for s in observed):
            missed.append({"name": name or "(the model itself)", "reason": reason})
    missed += [{"name": name or kind, "reason": BY_HAND} for name, kind in by_hand.items() if name not in observed]
    total = len(observed) + len(missed)
    short = f"{len(observed)} of {total} attention modules observed"
    text = short if not missed else short + "; not seen: " + "; ".join(f"{m['name']} ({m['reason']})" for m in missed)
    return Coverage(observed=observed, missed=missed, total=total, short=short, text=text)


def _inside(name: str, outer: str) -> bool:
    return name.startswith(outer + ".")


# ---- where and how a record was made ---------------------------------------------------------------------------------


def provenance(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Version, machine kind, model class and size, options. No host names, no paths, no environment variables."""
    parameters = list(model.parameters())
    about: dict[str, Any] = {
        "partita": _version("partita"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "options": options,
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})) or "none",
        "device": ", ".join(sorted({p.device.type for p in parameters})) or "none",
    }
    if "transformers" in sys.modules:
        about["transformers"] = _version("transformers")
    if implementation := getattr(getattr(model, "config", None), "_attn_implementation", None):
        about["attention"] = str(implementation)
    if (longest := positions(model)) is not None:
        about["positions"] = longest
    return about


def positions(model: nn.Module) -> int | None:
    """The longest input that the model's config allows."""
    config = getattr(model, "config", None)
    found = [getattr(config, n, None) for n in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return next((int(n) for n in found if isinstance(n, int) and n > 0), None)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
