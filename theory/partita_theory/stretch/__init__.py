"""partita stretch: which way of reading carries a trained model beyond the length it was trained at.

    loss(setting, n) = mean of -log p(token) over tokens that are the same for every setting and every n

The text around the scored tokens grows with n; the tokens do not change, so a difference is due to the reading.
Settings are chosen on half of the windows and judged on the other half. Nothing is trained.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from partita.attn import NTK, Clipped, Interpolated, Positions, YaRN
from partita.cli import UsageError
from partita.cli.inspect import encode, is_factory, load, read_text
from partita.monitor.options import positions as positions_of
from partita.monitor.record import clean
from partita.scale import InverseSqrt, LogLength, Policy, SqrtLogLength
from partita_theory.results import Interval, interval
from partita_theory.stretch.heads import growth, heads
from partita_theory.stretch.question import Cells, Question
from partita_theory.stretch.reader import OWN, Reader, Setting, reader

__all__ = ["Question", "stretch"]

_BEST = 2  # position settings that meet the scales
_CHOOSE, _JUDGE = slice(0, None, 2), slice(1, None, 2)  # windows that choose the setting, and those that judge it
_LEAST = 1e-4  # nats: two ways to compute the same reading part by rounding, and need not do so evenly


def stretch(
    target: str,
    *,
    text: Path | None,
    to: int,
    out: Path,
    trained: int | None = None,
    targets: int = 2048,
    mask: int | None = None,
    as_bytes: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure every setting at every length, and say which one reads best; what `stretch.json` holds."""
    words = read_text(text)
    model, tokenizer = load(target, head=True)
    if not as_bytes and tokenizer is None and not is_factory(target):
        raise UsageError(f"{target} has no tokenizer; put its files beside the model, or give --bytes.")
    tokenizer = None if as_bytes else tokenizer
    reads = reader(model, mask if mask is not None else getattr(tokenizer, "mask_token_id", None))
    trained = trained or getattr(model, "trained_length", None) or positions_of(model)
    if trained is None or trained < 4:
        raise UsageError("how long were the passages it was trained on? The model does not say: give --trained.")
    if to <= trained:
        raise UsageError(f"--to must be above the length of training, {trained}; got {to}.")
    limit = None if reads.turns else positions_of(model)
    if limit is not None and limit < to:
        raise UsageError(
            f"the positions of this model are a learned table of {limit} entries, so it cannot read {to} tokens in any "
            f"setting. If it was trained at less, give --trained and a --to of at most {limit}."
        )
    question = Question.of(encode(words, model, tokenizer), trained, to, targets, reads.causal)
    about = {
        "model": reads.fingerprint(), "text": hashlib.sha256(words.encode()).hexdigest()[:16], "trained": trained,
        "to": to, "windows": len(question.starts), "causal": reads.causal,
    }  # fmt: skip
    cells = Cells(out / "cells.jsonl", about)
    kind = "causal" if reads.causal else "masked"
    say(
        f"{type(model).__name__}, {kind}, trained at {trained}; {question.targets} tokens in {len(question.starts)} "
        f"windows, scored at {', '.join(map(str, question.lengths))}"
    )
    try:
        looked = heads(reads, question)
        tried = _search(reads, question, cells, _scales(trained, growth(looked, trained)), say)
    finally:
        reads.apply(OWN)
    found = _judged(reads, question, cells, tried)
    found.update(schema="partita.stretch/1", model=type(model).__name__, about=about, heads=looked)
    return clean(found)  # type: ignore[no-any-return]


# ---- which settings --------------------------------------------------------------------------------------------------


def _positions(question: Question) -> list[Positions]:
    factor, trained = question.longest / question.trained, question.trained
    return [NTK(factor), Interpolated(factor), YaRN(factor, trained), Clipped(trained - 1), Clipped(trained // 2)]


def _scales(trained: int, critical: Policy | None) -> list[Policy]:
    lengths = [LogLength(trained, floor=trained), SqrtLogLength(trained, floor=trained)]
    return [*([] if critical is None else [critical]), *lengths, *map(InverseSqrt, (0.85, 1.15, 1.3))]


def _search(
    reads: Reader, question: Question, cells: Cells, scales: list[Policy], say: Callable[[str], None]
) -> list[Setting]:
    """All positions as they are, then the best of them with every scale."""
    tried = [OWN, *(Setting(p) for p in (_positions(question) if reads.turns else []))]
    total = len(tried) + len(scales) * (_BEST if reads.turns else 1)

    def run(k: int, setting: Setting) -> None:
        for length in question.lengths:
            if (setting.name, length) in cells.known:
                continue
            start = time.perf_counter()
            reads.apply(setting)
            losses = [loss for at in question.batches(length) for loss in reads.nll(*question.asked(at, length))]
            cells.add(setting.name, length, losses)
            took = time.perf_counter() - start
            mean = sum(losses) / len(losses)
            say(f"[{k}/{total}] {setting.name} at {length}: {mean:.4f} nats ({took:.1f} s)")

    for k, setting in enumerate(tried, 1):
        run(k, setting)
    chosen = sorted(tried, key=lambda s: _mean(cells, question, s))[:_BEST]
    scaled = [Setting(s.positions, scale) for s in chosen for scale in scales]
    for k, setting in enumerate(scaled, len(tried) + 1):
        run(k, setting)
    return tried + scaled


def _mean(cells: Cells, question: Question, setting: Setting) -> float:
    """Of the windows that choose."""
    found = cells.known[setting.name, question.longest][_CHOOSE]
    mean = sum(found) / len(found)
    return mean if math.isfinite(mean) else math.inf


# ---- what it says ----------------------------------------------------------------------------------------------------


def _judged(reads: Reader, question: Question, cells: Cells, tried: list[Setting]) -> dict[str, Any]:
    best = min(tried, key=lambda s: _mean(cells, question, s))
    rows = []
    for setting in tried:
        at = []
        for n in question.lengths:
            own, other = cells.known[OWN.name, n], cells.known[setting.name, n]
            at.append({"length": n, "loss": _as_dict(interval(other[_JUDGE])), "gain": _as_dict(_gain(own, other))})
        rows.append({"name": setting.name, "code": reads.code(setting), "at": at})
    long, short = question.longest, question.trained
    own, read = cells.known[OWN.name, long], cells.known[best.name, long]
    gain = _gain(own, read)
    over_short = _gain(cells.known[OWN.name, short], read)
    helps = best != OWN and gain.low > 0 and gain.mean > _LEAST
    return {
        "kind": "causal" if reads.causal else "masked",
        "trained": short,
        "lengths": question.lengths,
        "targets": question.targets,
        "windows": len(question.starts),
        "settings": rows,
        "best": best.name,  # by the windows that choose, whether or not those that judge agree
        "recommended": best.name if helps else None,
        "code": reads.code(best) if helps else None,
        "gain": _as_dict(gain),
        "gain_over_short": _as_dict(over_short),
        "says": _says(question, best, gain, over_short, helps),
    }


def _gain(own: list[float], other: list[float]) -> Interval:
    """How much lower the loss is, window by window: what both share cancels."""
    return interval(a - b for a, b in zip(own[_JUDGE], other[_JUDGE], strict=True))


def _as_dict(found: Interval) -> dict[str, float]:
    return {"mean": found.mean, "half": found.half}


def _says(question: Question, best: Setting, gain: Interval, over_short: Interval, helps: bool) -> str:
    long, short = question.longest, question.trained
    if best == OWN:
        return (
            f"Nothing helps: of all settings that were tried, none reads better at {long} tokens than the model as it "
            f"is. Against its own reading of {short} tokens, {long} give {_nats(over_short)}."
        )
    if not helps:
        within = "" if gain.high < 0 else ", which is within the interval" if gain.low <= 0 else ", which is rounding"
        return (
            f"Nothing helps: {best.name} did best on the windows that choose, and on those that judge it reads {long} "
            f"tokens {_nats(gain)} than the unmodified model{within}."
        )
    first = f"{best.name} reads {long} tokens {_nats(gain)} than the unmodified model"
    if over_short.low > 0:
        return f"{first}, and {_nats(over_short)} than that model with the last {short} tokens alone: longer text pays."
    what = "worse" if over_short.high < 0 else "no better"
    return (
        f"{first}. It is {what} than that model with {short} tokens alone ({_nats(over_short)}): if the "
        f"rest of the text is not needed for itself, cutting it off costs nothing."
    )


def _nats(gain: Interval) -> str:
    size = f"{abs(gain.mean):.3f} +- {gain.half:.3f} nats"
    return f"{size} {'better' if gain.mean >= 0 else 'worse'}"
