"""A model reads further than it was trained: how much is lost to positions, how much to dilution, and who wins it back?

The loss of the same words at every length: some of the middle 64 words of passages are hidden, and what stands around
them grows from 64 to 1024 words. Two things change with the length: distances that the model has never seen, and the
number of keys that share the attention. Position settings take away the first, a scale with log n the second, so the
two are crossed: all positions with 1/sqrt(d) and LogLength at every length (`two`), then with every other scale at
the longest, rotary and clipped ones from 512 words on (`all`).

    fixed   one model per seed, trained at 64 words, where all policies are one model; only the reading changes
    mixed   windows of 16 to 128 words, so that the scale acts in training; one model per policy

Positions: rotary as trained, NTK and YaRN with the factor n / 64, distances clipped at 63, a window of 32 each way (no
new distances and no dilution: the ceiling), none.

Expected, written before the run: with rotary positions as they are, LogLength gains nothing over 1/sqrt(d); with
clipped distances it gains in nats at 512 words and beyond; the most it can gain there is what clipped loses to the
window. The claim is the interaction: the gain with clipped distances minus the gain with rotary ones is positive, seed
by seed. Most of what rotary loses at 1024 is positions, not dilution.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from partita import scale, support
from partita.attn import NTK, Clipped, NoPositions, Positions, Rotary, YaRN, rotary_attention
from partita.lab.figure import Figure, Line, Panel
from partita.losses import LossStats, linear_cross_entropy
from partita.nn import TransformerEncoderLayer
from partita_studies.experiment import Experiment, Interval, Row, Settings, Size, Verdict, grid, interval, mean_by
from partita_studies.experiments._language_model import HIDE, RARE, TEXT, Model, Plan, corpus, measured_sigma, train
from partita_studies.experiments._series import note, only, series

TRAINED, SPAN = 64, 64
MIXED = (16, 32, 64, 128)
USUAL, LOG = "1/sqrt(d)", "LogLength"
POSITIONS = ("rotary", "NTK", "YaRN", "clipped", "window", "none")
CROSSED = ("rotary", "clipped")  # what the claim is about
FAR = 8 * TRAINED  # words; from here on clipped distances should gain
POLICIES = (USUAL, LOG, "SqrtLogLength", "KappaLog(1)", "Mixed", "CalibratedLog")
FACTORS = (0.7, 1.5, 2.0, 3.0)  # of 1/sqrt(d), at the longest length alone
HIDDEN = 11  # words of each span, that is 17 %
_PLAN = ("text", "words", "width", "heads", "layers", "batch", "steps", "rate")
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
    if policy == "any":
        return train(plan, None, seed)[0]
    known = {USUAL: None, LOG: scale.LogLength(TRAINED), "SqrtLogLength": scale.SqrtLogLength(TRAINED)}
    return train(plan, known[policy], seed, MIXED)[0]


@functools.lru_cache(maxsize=2)
def passages(text: str, words: int, longest: int, count: int) -> tuple[Tensor, Tensor]:  # (passages, longest), twice
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
    """Loss and accuracy of the hidden words with n words around them; what nobody asks for is not computed."""
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


def run(settings: Settings, seed: int) -> Iterable[Row]:
    plan = Plan(task="masked", length=TRAINED, **{name: settings[name] for name in _PLAN})
    model = trained(plan, str(settings["policy"]), seed)
    longest, name = int(settings["longest"]), str(settings["positions"])
    seen, truth = passages(plan.text, plan.words, longest, int(settings["passages"]))
    known = policies(measured_sigma(model, plan))
    for way, n in _readings(settings, list(known)):
        found = read(model, name, known[way], seen, truth, n)
        yield {
            "arm": settings["arm"], "positions": name, "scale": way, "n": n, "seed": seed,
            "targets": int((truth >= 0).sum()), **found,
        }  # fmt: skip


def _readings(settings: Settings, known: list[str]) -> Iterator[tuple[str, int]]:
    """Which scales are read at which lengths in one cell."""
    lengths = list(_lengths(int(settings["longest"])))
    if settings["scales"] == "own":  # a model trained on several lengths is read as it was trained
        yield from ((str(settings["policy"]), n) for n in lengths)
    elif settings["scales"] == "two":
        yield from ((way, n) for way in (USUAL, LOG) for n in lengths)
    else:
        far = [n for n in lengths if n >= FAR and settings["positions"] in CROSSED] or lengths[-1:]
        for way in (w for w in known if w not in (USUAL, LOG)):
            yield from ((way, n) for n in (far if way in POLICIES else lengths[-1:]))


def _lengths(longest: int) -> Iterator[int]:
    n = TRAINED
    while n <= longest:
        yield n
        n *= 2


def gain(rows: list[Row], positions: str, n: int, way: str = LOG) -> dict[int, float]:
    """By seed: how much lower the loss is than under 1/sqrt(d)."""
    own, other = ({r["seed"]: r["nll"] for r in only(rows, positions=positions, n=n, scale=s)} for s in (USUAL, way))
    return {seed: own[seed] - other[seed] for seed in own if seed in other}


def _apart(rows: list[Row], one: str, other: str, n: int) -> Interval:
    """How much more one position setting loses than another, by seed, under 1/sqrt(d)."""
    a, b = ({r["seed"]: r["nll"] for r in only(rows, positions=p, n=n, scale=USUAL)} for p in (one, other))
    return interval(a[seed] - b[seed] for seed in a)


def judge(rows: list[Row]) -> Verdict:
    fixed, mixed = only(rows, arm="fixed"), only(rows, arm="mixed")
    lengths = sorted({row["n"] for row in fixed})
    last = lengths[-1]
    far = [n for n in lengths if n >= FAR] or [last]
    rotary = interval(gain(fixed, "rotary", last).values())
    clipped = {n: interval(gain(fixed, "clipped", n).values()) for n in far}
    with_rotary, with_clipped = (gain(fixed, name, last) for name in CROSSED)
    both = interval(with_clipped[seed] - with_rotary[seed] for seed in with_clipped)
    positions, dilution = _apart(fixed, "rotary", "clipped", last), _apart(fixed, "clipped", "window", last)
    claims = {
        "rotary gains nothing": rotary.low <= 0,
        "clipped gains at " + "/".join(map(str, far)): all(found.low > 0 for found in clipped.values()),
        "interaction": both.low > 0,
        "no more than the ceiling": clipped[last].mean <= dilution.high,
        "most is positions": positions.mean > dilution.mean,
    }
    mean = mean_by(only(fixed, scale=USUAL), "nll", "positions", "n")
    says = (
        f"nats at {'/'.join(map(str, lengths))} under 1/sqrt(d): "
        + "; ".join(
            f"{p} {'/'.join(f'{mean[p, n].mean:.3f}' for n in lengths)}" for p in POSITIONS if (p, last) in mean
        )
        + f". At {last}, positions cost {positions} (rotary minus clipped) and dilution {dilution} (clipped minus "
        f"window, the ceiling). LogLength gains {rotary} with rotary, "
        + ", ".join(f"{found} with clipped at {n}" for n, found in clipped.items())
        + f"; interaction {both}."
    )
    for p in CROSSED:
        says += f" Every way with {p} distances at {last} gains "
        says += ", ".join(f"{w} {_of(gain(fixed, p, last, w))}" for w in _ways(fixed)) + "."
    if mixed:
        found = mean_by(only(mixed, n=last), "nll", "positions", "scale")
        says += f" Trained on 16 to 128 words, nats at {last}: "
        says += ", ".join(f"{way} with {p} {value}" for (p, way), value in found.items())
        trained_with = {p: interval(gain(mixed, p, last).values()) for p in CROSSED}
        says += f"; LogLength gains {', '.join(f'{value} with {p}' for p, value in trained_with.items())}."
    failed = [claim for claim, true in claims.items() if not true]
    if not failed:
        return Verdict("holds", says)
    if not claims["interaction"]:
        return Verdict("does not hold", f"Failed: {', '.join(failed)}. {says}")
    return Verdict(
        "holds within", says, f"{len(claims) - len(failed)} of {len(claims)} claims, not: {', '.join(failed)}"
    )


def _of(by_seed: dict[int, float]) -> str:
    return f"{interval(by_seed.values()).mean:+.3f}" if by_seed else "not read"


def _ways(rows: list[Row]) -> list[str]:
    return [way for way in dict.fromkeys(row["scale"] for row in rows) if way != USUAL]


def figure(rows: list[Row]) -> Figure:
    fixed, mixed = only(rows, arm="fixed"), only(rows, arm="mixed")
    lengths = sorted({float(row["n"]) for row in fixed})
    shown = [p for p in POSITIONS if only(fixed, positions=p)]
    usual = only(fixed, scale=USUAL)
    lines = [series(only(usual, positions=p), p, "n", "nll", "data" if p != "none" else "context") for p in shown]
    panels = [Panel("Under 1/sqrt(d), trained at 64", "words read", "nats per hidden word", lines, log_x=True)]
    gains = [
        {"positions": p, "n": n, "seed": seed, "gain": value}
        for p in shown
        for n in lengths
        for seed, value in gain(fixed, p, int(n)).items()
    ]
    lines = [series(only(gains, positions=p), p, "n", "gain") for p in shown[:5]]
    zero = Line("no difference", lengths, [0.0 for _ in lengths], kind="theory")
    panels.append(Panel("What LogLength wins back", "words read", "nats gained", [*lines, zero], log_x=True))
    if mixed:
        last = [
            series(only(mixed, positions=p, scale=way), f"{way}, {p}", "n", "nll")
            for p, way in dict.fromkeys((row["positions"], row["scale"]) for row in mixed)
        ]
        panels.append(Panel("Trained on 16 to 128 words", "words read", "nats per hidden word", last[:5], log_x=True))
    return Figure(EXPERIMENT.question, panels, note(rows))


def _settings(text: str, shape: tuple[int, ...], rate: float, longest: int, count: int, mixed: bool) -> list[Row]:
    words, width, heads, layers, batch, steps = shape
    fixed = {"text": text, "words": words, "width": width, "heads": heads, "layers": layers, "batch": batch}
    fixed |= {"steps": steps, "rate": rate, "longest": longest, "passages": count}
    same = {key: [value] for key, value in fixed.items()}
    found = grid(scales=["two", "all"], arm=["fixed"], policy=["any"], positions=list(POSITIONS), **same)
    if mixed:
        found += grid(scales=["own"], positions=list(CROSSED), arm=["mixed"], policy=[USUAL, LOG], **same)
    return found


EXPERIMENT = Experiment(
    name="reading_longer",
    question="Trained at 64 words and read at up to 1024: what is lost to positions, what to dilution, and who wins it "
    "back?",
    expected="With rotary positions as trained, a log n scale gains nothing; with clipped distances it gains in nats "
    "at 512 words and beyond, at most what clipped loses to a window; the interaction is positive seed by seed, and "
    "most of the loss is positions.",
    ids=("M-SCL-0", "M-SCL-1", "M-SCL-2", "M-SCL-3", "M-SCL-7", "M-SCL-14", "M-SCL-16", "M-ATT-10"),
    sizes={
        "tiny": Size(_settings("reference", (300, 16, 2, 1, 2, 3), 2e-3, 128, 4, True), seeds=2, seconds=0.3),
        "quick": Size(_settings(TEXT, (500, 32, 2, 1, 8, 100), 5e-3, 256, 24, False), seeds=2, seconds=0.5),
        "full": Size(_settings(TEXT, (2000, 96, 4, 2, 16, 1500), 2e-3, 1024, 912, True), seeds=8, seconds=45.0),
    },
    run=run,
    judge=judge,
    figure=figure,
)
