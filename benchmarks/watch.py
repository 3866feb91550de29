"""What does it cost to watch a training step, compiled or not? Two with, two without, in turns, on the same model.

The handle goes on and off each time, so that finishing the rows is paid for. The best of N would hide what happens only
now and then (a close look every eighth step), so the ratio is that of the time of all steps; the median of the ratios
of neighbours stands beside it, because a sum suffers from one slow step.
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import partita

from .harness import BEFORE_BAR, Options, Row, _Neighbours

BAR = 1.05
TOGETHER = 2
# exact by default; partita's kernel in place of the model's own; one step of eight; the model compiled by inductor
HOW: dict[str, dict[str, Any]] = {
    "": {},
    ", kernel='partita'": {"kernel": "partita"},
    ", every=8": {"every": 8},
    ", compiled": {},
    ", compiled, kernel='partita'": {"kernel": "partita"},
}


def cases(options: Options) -> Iterator[list[Row]]:
    layers, width, length = (2, 32, 64) if options.quick else (6, 256, 512)
    for name, make in (("TransformerEncoder", _encoder), ("BERT", _bert)):
        for how, given in HOW.items():
            case = f"watched step{how}, {name}, {layers} layers, {width} wide, 4x{length}"
            compiled = ("aot_eager" if options.quick else "inductor") if "compiled" in how else None
            if options.wants(case) and (made := make(layers, width, length, compiled)) is not None:
                yield _case(case, *made, options, given)


def _case(
    case: str, model: torch.nn.Module, loss: Callable[[], torch.Tensor], options: Options, given: dict[str, Any]
) -> list[Row]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def steps() -> float:
        start = time.perf_counter()
        for _ in range(TOGETHER):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        return (time.perf_counter() - start) / TOGETHER

    def watched(package: Any) -> Callable[[], float]:
        """By this package; an earlier one leaves out what it does not know: its only kernel was partita's own."""
        known = inspect.signature(package.watch).parameters
        handle = package.watch(model, **{name: x for name, x in given.items() if name in known})
        handle.detach()

        def run() -> float:
            start = time.perf_counter()
            with handle:
                steps()
            return (time.perf_counter() - start) / TOGETHER

        return run

    ways = {"the same step unwatched": steps, "partita": watched(partita)}
    if options.before is not None:
        ways["partita before"] = watched(options.before)
    for run in ways.values():
        run()
        run()
    names, times = list(ways), {name: list[float]() for name in ways}
    clock = _Neighbours()
    for turn in range(options.repeat * (1 if options.quick else 5)):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(ways[name]())
    ours, others = times.pop("partita"), round(clock.others(), 2)
    return [_row(case, peer, ours, theirs, options, others) for peer, theirs in times.items()]


def _row(case: str, peer: str, ours: list[float], theirs: list[float], options: Options, others: float) -> Row:
    pairs = statistics.median(b / a for a, b in zip(theirs, ours, strict=True))
    return Row(
        "watch",
        case,
        peer,
        statistics.mean(ours),
        statistics.mean(theirs),
        "s",
        bar=None if options.quick else BEFORE_BAR if peer == "partita before" else BAR,
        load=round(os.getloadavg()[0], 2),
        others=others,
        note=f"median of pairs {pairs:.3f}, best of each {min(ours) / min(theirs):.3f}",
        extra={"median_of_pairs": pairs, "steps": float(TOGETHER * len(ours))},
    )


def _encoder(
    layers: int, width: int, length: int, compiled: str | None = None
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).train()
    x = torch.randn(4, length, width)
    call = torch.compile(model, backend=compiled) if compiled else model
    return model, lambda: call(x).square().mean()


def _bert(
    layers: int, width: int, length: int, compiled: str | None = None
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]] | None:
    try:
        from transformers import BertConfig, BertModel
    except ImportError:
        return None
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertModel(config).train()
    ids = torch.randint(30000, (4, length))
    call = torch.compile(model, backend=compiled) if compiled else model
    return model, lambda: call(input_ids=ids).last_hidden_state.square().mean()
