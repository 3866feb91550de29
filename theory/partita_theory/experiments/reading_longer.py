"""A model reads further than it was trained: what is lost to positions, what to dilution, and what wins it back.

The loss of the same words at every length: some of the middle 64 words of passages are hidden, and what stands around
them grows from 64 to 1024 words. Two things change with the length: distances that the model has never seen, and the
number of keys that share the attention. Position settings take away the first, a scale with log n the second, so the
two are crossed: all positions with 1/sqrt(d) and LogLength at every length (`two`), then with every other scale at
the longest, rotary and clipped ones from 512 words on (`all`).

    fixed   one model per seed, trained at 64 words, where all policies are one model; only the reading changes
    mixed   windows of 16 to 128 words, so that the scale acts in training; one model per policy

Positions: rotary as trained, NTK and YaRN with the factor n / 64, distances clipped at 63, a window of 32 each way (no
new distances and no dilution: the ceiling), none.

The claim, written before the run, is the interaction: the gain with clipped distances minus the gain with rotary ones
is positive, seed by seed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from partita import scale, support
from partita.attn import NTK, Clipped, NoPositions, Positions, Rotary, YaRN, rotary_attention
from partita.losses import LossStats, linear_cross_entropy
from partita.nn import TransformerEncoderLayer
from partita_theory.experiment import Settings, Size, experiment, geometric, grid
from partita_theory.experiments._language_model import (
    HIDE,
    LARGE,
    RARE,
    SMALL,
    TEXT,
    TINY,
    Model,
    Plan,
    corpus,
    measured_sigma,
    train,
)
from partita_theory.figure import Kind, Panel
from partita_theory.results import Row, distinct, interval, lines, mean_by, only, paired, said, theory
from partita_theory.verdict import Verdict, settle

TRAINED, SPAN = 64, 64
MIXED = (16, 32, 64, 128)
USUAL, LOG = "1/sqrt(d)", "LogLength"
POSITIONS = ("rotary", "NTK", "YaRN", "clipped", "window", "none")
CROSSED = ("rotary", "clipped")  # what the claim is about
FAR = 8 * TRAINED  # words; from here on clipped distances should gain
POLICIES = (USUAL, LOG, "SqrtLogLength", "KappaLog(1)", "Mixed", "CalibratedLog")
FACTORS = (0.7, 1.5, 2.0, 3.0)  # of 1/sqrt(d), at the longest length alone
HIDDEN = 11  # words of each span, that is 17 %
_TOGETHER = 4096  # words read at once: what a layer makes of them stays in the cache


def places(name: str, n: int) -> Positions:
    """The position setting of a reading of n words."""
    factor = max(1.0, n / TRAINED)
    known = {
        "rotary": Rotary(), "NTK": NTK(factor), "YaRN": YaRN(factor, TRAINED), "clipped": Clipped(TRAINED - 1),
        "window": Rotary(), "none": NoPositions(),
    }  # fmt: skip
    return known[name]


def policies(sigma: float) -> dict[str, scale.Policy | None]:
    return {
        USUAL: None,
        LOG: scale.LogLength(TRAINED),
        "SqrtLogLength": scale.SqrtLogLength(TRAINED),
        "KappaLog(1)": scale.KappaLog(1.0),
        "Mixed": scale.Mixed(),
        "CalibratedLog": scale.CalibratedLog(TRAINED, sigma),
        **{f"{f:g} / sqrt(d)": scale.InverseSqrt(f) for f in FACTORS},
    }


@functools.lru_cache(maxsize=32)
def trained(plan: Plan, policy: str, seed: int) -> Model:
    """Trained at one length under 1/sqrt(d), or at several under a policy."""
    known = {"any": None, USUAL: None, LOG: scale.LogLength(TRAINED), "SqrtLogLength": scale.SqrtLogLength(TRAINED)}
    model: Model = train(plan, known[policy], seed, () if policy == "any" else MIXED)[0]
    return model


@functools.lru_cache(maxsize=2)
def hidden(text: str, words: int, longest: int, count: int) -> tuple[Tensor, Tensor]:  # (passages, longest), twice
    """Held-out passages as they are read, and the hidden words (-100 elsewhere), for every model and length alike."""
    blocks = corpus(text, words)[1]
    starts = range(0, blocks.shape[1] - longest + 1, SPAN)
    every = torch.stack([block[s : s + longest] for s in starts for block in blocks])[:count]
    source = torch.Generator().manual_seed(3)
    order = torch.rand(every.shape, generator=source)
    middle = torch.arange(longest)
    outside = (middle < (longest - SPAN) // 2) | (middle >= (longest + SPAN) // 2)
    order = order.masked_fill(outside | (every == RARE), 2.0)  # words too rare to guess are not asked for
    chosen = torch.zeros_like(every, dtype=torch.bool).scatter(1, order.argsort(-1)[:, :HIDDEN], True) & (order < 2)
    return every.masked_fill(chosen, HIDE), every.masked_fill(~chosen, -100)


@torch.inference_mode()
def read(model: Model, name: str, policy: scale.Policy | None, seen: Tensor, truth: Tensor, n: int) -> dict[str, float]:
    """Loss and accuracy of the hidden words with n words around them; what is not requested is not computed."""
    cut = slice((seen.shape[1] - n) // 2, (seen.shape[1] + n) // 2)
    middle = slice((n - SPAN) // 2, (n + SPAN) // 2)
    nll, right = [], []
    step = max(1, _TOGETHER // n)
    for k in range(0, len(seen), step):
        x = model.embed(seen[k : k + step, cut])
        for layer in model.layers:
            assert isinstance(layer, TransformerEncoderLayer)
            x = through(layer, x, middle if layer is model.layers[-1] else slice(0, n), name, policy)
        asked = truth[k : k + step, cut][:, middle]
        kept = asked >= 0
        _, stats = linear_cross_entropy(model.norm(x[kept]), model.embed.weight, asked[kept], return_stats=True)
        assert isinstance(stats, LossStats)
        nll.append(stats.nll)
        right.append(stats.correct.float())
    return {"nll": torch.cat(nll).mean().item(), "accuracy": 100 * torch.cat(right).mean().item()}


def through(layer: TransformerEncoderLayer, x: Tensor, rows: slice, name: str, policy: scale.Policy | None) -> Tensor:
    """What a layer makes of some places, each of which sees every place: its own forward, with other positions."""
    first, part, look = rows.start, x[:, rows], layer.self_attn
    weights, biases = look.projections()
    every = layer.norm1(x)  # type: ignore[operator]
    given = (every[:, rows], every, every)
    q, k, v = (torch.nn.functional.linear(h, w, b) for h, w, b in zip(given, weights, biases, strict=True))
    q, k, v = (h.unflatten(-1, (-1, look.head_dim)).transpose(1, 2) for h in (q, k, v))
    side = TRAINED // 2
    around = support.window(side - first, side + first) if name == "window" else None
    heads = rotary_attention(q, k, v, places(name, x.shape[1]), where=first, support=around, scale=policy)
    assert isinstance(heads, Tensor)
    part = part + look.out_proj(heads.transpose(1, 2).flatten(2))
    out: Tensor = part + layer.linear2(layer.activation(layer.linear1(layer.norm2(part))))  # type: ignore[operator]
    return out


def measure(
    seed: int, arm: str, scales: str, policy: str, positions: str, longest: int, passages: int, **shape: Any
) -> Iterable[Row]:
    plan = Plan(task="masked", length=TRAINED, **shape)
    model = trained(plan, policy, seed)
    seen, truth = hidden(plan.text, plan.words, longest, passages)
    known = policies(measured_sigma(model, plan))
    for way, n in readings(scales, policy, positions, longest, list(known)):
        found = read(model, positions, known[way], seen, truth, n)
        yield {"scale": way, "n": n, "targets": int((truth >= 0).sum()), **found}


def readings(scales: str, policy: str, positions: str, longest: int, known: list[str]) -> Iterator[tuple[str, int]]:
    """Which scales are read at which lengths in one cell."""
    lengths = geometric(TRAINED, longest, 2)
    if scales == "own":  # a model trained on several lengths is read as it was trained
        yield from ((policy, n) for n in lengths)
    elif scales == "two":
        yield from ((way, n) for way in (USUAL, LOG) for n in lengths)
    else:
        far = [n for n in lengths if n >= FAR and positions in CROSSED] or lengths[-1:]
        for way in (w for w in known if w not in (USUAL, LOG)):
            yield from ((way, n) for n in (far if way in POLICIES else lengths[-1:]))


def gain(rows: list[Row], positions: str, n: int, way: str = LOG) -> dict[int, float]:
    """By seed: how much lower the loss is than under 1/sqrt(d)."""
    own, other = ({r["seed"]: r["nll"] for r in only(rows, positions=positions, n=n, scale=s)} for s in (USUAL, way))
    return {seed: own[seed] - other[seed] for seed in own if seed in other}


def judge(rows: list[Row]) -> Verdict:
    fixed, mixed = only(rows, arm="fixed"), only(rows, arm="mixed")
    lengths = distinct(fixed, "n")
    last = lengths[-1]
    usual = only(fixed, scale=USUAL)
    far = [n for n in lengths if n >= FAR] or [last]
    rotary = interval(gain(fixed, "rotary", last).values())
    clipped = {n: interval(gain(fixed, "clipped", n).values()) for n in far}
    with_rotary, with_clipped = (gain(fixed, name, last) for name in CROSSED)
    both = interval(with_clipped[seed] - with_rotary[seed] for seed in with_clipped)
    positions, dilution = (
        paired(only(usual, n=last), "nll", "positions", a, b) for a, b in (("rotary", "clipped"), ("clipped", "window"))
    )
    claims = {
        "rotary gains nothing": rotary.low <= 0,
        "clipped gains at " + "/".join(map(str, far)): all(found.low > 0 for found in clipped.values()),
        "interaction": both.low > 0,
        "no more than the ceiling": clipped[last].mean <= dilution.high,
        "most is positions": positions.mean > dilution.mean,
    }
    mean = mean_by(usual, "nll", "positions", "n")
    says = (
        f"nats at {'/'.join(map(str, lengths))} under 1/sqrt(d): "
        + "; ".join(f"{p} {'/'.join(f'{mean[p, n]:.3f}' for n in lengths)}" for p in POSITIONS if (p, last) in mean)
        + f". At {last}, positions cost {positions} (rotary minus clipped) and dilution {dilution} (clipped minus "
        f"window, the ceiling). LogLength gains {rotary} with rotary, {said(clipped, '{1} with clipped at {0}')}; "
        f"interaction {both}."
    )
    for p in CROSSED:
        gains = {w: gain(fixed, p, last, w) for w in dict.fromkeys(row["scale"] for row in fixed) if w != USUAL}
        found = {w: f"{interval(by_seed.values()):+.3f}" if by_seed else "not read" for w, by_seed in gains.items()}
        says += f" Every way with {p} distances at {last} gains {said(found, '{0} {1}')}."
    if mixed:
        means = mean_by(only(mixed, n=last), "nll", "positions", "scale")
        says += f" Trained on 16 to 128 words, nats at {last}: {said(means, '{0[1]} with {0[0]} {1}')}"
        trained_with = {p: interval(gain(mixed, p, last).values()) for p in CROSSED}
        says += f"; LogLength gains {said(trained_with, '{1} with {0}')}."
    failed = [claim for claim, true in claims.items() if not true]
    holds = claims["interaction"]
    within = f"{len(claims) - len(failed)} of {len(claims)} claims, not: {', '.join(failed)}"
    return settle(
        says if holds else f"Failed: {', '.join(failed)}. {says}", holds=holds, whole=not failed, within=within
    )


def panels(rows: list[Row]) -> list[Panel]:
    fixed, mixed = only(rows, arm="fixed"), only(rows, arm="mixed")
    usual, lengths = only(fixed, scale=USUAL), distinct(fixed, "n")
    shown = [p for p in POSITIONS if only(fixed, positions=p)]
    x, y = "words read", "nats per hidden word"
    losses = [line for p in shown for line in lines(usual, "n", "nll", "positions", [p], kind=_kind(p))]
    gains = [
        {"positions": p, "n": n, "seed": seed, "gain": value}
        for p in shown
        for n in lengths
        for seed, value in gain(fixed, p, int(n)).items()
    ]
    won = [*lines(gains, "n", "gain", "positions", shown[:5]), theory("no difference", lengths, lambda _: 0.0)]
    found = [
        Panel("Under 1/sqrt(d), trained at 64", x, y, losses, log_x=True),
        Panel("What LogLength wins back", x, "nats gained", won, log_x=True),
    ]
    if mixed:
        both = [{**row, "both": f"{row['scale']}, {row['positions']}"} for row in mixed]
        last = lines(both, "n", "nll", "both", dict.fromkeys(row["both"] for row in both))
        found.append(Panel("Trained on 16 to 128 words", x, y, last[:5], log_x=True))
    return found


def _kind(positions: str) -> Kind:
    return "context" if positions == "none" else "data"


def _settings(longest: int, passages: int, mixed: bool, **shape: Any) -> list[Settings]:
    same = {**shape, "longest": longest, "passages": passages}
    found = grid(scales=["two", "all"], arm="fixed", policy="any", positions=POSITIONS, **same)
    if mixed:
        found += grid(scales="own", positions=CROSSED, arm="mixed", policy=[USUAL, LOG], **same)
    return [*found]


EXPERIMENT = experiment(
    __name__,
    question="Trained at 64 words and read at up to 1024: what is lost to positions, what to dilution, and who wins it "
    "back?",
    expected="With rotary positions as trained, a log n scale gains nothing; with clipped distances it gains in nats "
    "at 512 words and beyond, at most what clipped loses to a window; the interaction is positive seed by seed, and "
    "most of the loss is positions.",
    ids=("M-SCL-0", "M-SCL-1", "M-SCL-2", "M-SCL-3", "M-SCL-7", "M-SCL-14", "M-SCL-16", "M-ATT-10"),
    tiny=Size(_settings(128, 4, True, text="reference", steps=3, **TINY), seeds=2, seconds=0.3),
    quick=Size(_settings(256, 24, False, text=TEXT, steps=100, **SMALL), seeds=2, seconds=0.5),
    full=Size(_settings(1024, 912, True, text=TEXT, steps=1500, **LARGE), seeds=8, seconds=45.0),
)
