"""What watch may be asked for, checked before anything is touched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from partita.monitor.coverage import expected
from partita.monitor.findings import Thresholds

KERNELS = ("own", "partita")
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "num_decoder_layers")


@dataclass(frozen=True)
class Options:
    every: int
    rows: int | None
    layers: list[int | str] | None
    maps: list[tuple[int, int]]
    sinks: list[Any]
    thresholds: Thresholds
    kernel: str
    received: bool = False
    critical: bool = False

    def chosen(self, layer: int, name: str) -> bool:
        wanted = self.layers
        return wanted is None or any(layer == c if isinstance(c, int) else re.search(c, name) for c in wanted)

    def plain(self) -> dict[str, Any]:
        """For the record's provenance."""
        maps = [list(m) for m in self.maps]
        plain = {"every": self.every, "rows": self.rows, "layers": self.layers, "maps": maps, "kernel": self.kernel}
        return {**plain, "received": self.received, "critical": self.critical}


def options(
    model: nn.Module,
    names: Sequence[str],
    *,
    every: int = 1,
    rows: int | None = None,
    layers: Any = None,
    maps: Any = (),
    sinks: Any = (),
    thresholds: Thresholds | dict[str, float] | None = None,
    kernel: str = "own",
    received: bool = False,
    critical: bool = False,
) -> Options:
    """What `watch` was asked for, of whatever type it came, but the title; `names` are those of the model's modules."""
    if not _whole(every) or every < 1:
        raise ValueError(f"every must be a whole number of steps, at least 1; got {every!r}.")
    if rows is not None and (not _whole(rows) or rows < 1):
        raise ValueError(f"rows must be None (every row) or a number of rows, at least 1; got {rows!r}.")
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, KERNELS))}; got {kernel!r}.")
    if not isinstance(received, bool):
        raise ValueError(f"received must be True or False: whether to follow what each key receives; got {received!r}.")
    if not isinstance(critical, bool):
        raise ValueError(f"critical must be True or False: whether to measure the critical scale; got {critical!r}.")
    limits = thresholds if isinstance(thresholds, Thresholds) else Thresholds().with_(**(thresholds or {}))
    wanted = _layers(layers, model, names)
    return Options(every, rows, wanted, _maps(maps), _sinks(sinks), limits, kernel, received, critical)


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


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
    for sink in given:
        if not callable(sink):
            raise ValueError(
                "sinks takes functions, such as sinks=[partita.monitor.tensorboard(SummaryWriter())], "
                f"partita.monitor.json_lines(path) or partita.monitor.log_to(wandb.log); got {sink!r}."
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
                raise ValueError(
                    f"layers takes regular expressions on module names; {one!r} is none: {error}."
                ) from None
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
        return not _count(model) or one < _count(model)  # where none looks like attention, calls will tell
    called = [name or type(model).__name__ for name in names]
    return any(re.search(one, name) for name in called) or any(
        re.search(one, f"{name}[{call}]") for name in called for call in range(1, 100)
    )


def _count(model: nn.Module) -> int:
    """How many layers there may be: modules that look like attention, or what a config says where they are shared."""
    config = getattr(model, "config", None)
    said = [n for name in _COUNTS if isinstance(n := getattr(config, name, None), int)]
    return max(len(expected(model)), *said, 0)
