"""Position encodings, and the entropy of the last rows of a causal sequence of n tokens, four heads.

Random content (unit variance, scale 1/sqrt(dim)), or with a direction that queries and keys share. Sinusoids and a
table of relative biases add variance to the scores. A head of ALiBi with slope m sees about e/m keys, however long the
row. A bias has no sign of its own: opposed to the content it raises the entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from partita import Gibbs, support
from partita.attn import ALiBi, RelativeBias, alibi_slopes, rotary, sinusoidal
from partita_theory.experiment import Size, experiment, geometric, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, distinct, lines, only, paired, series, slope_by_seed, theory
from partita_theory.verdict import Verdict, settle

HEADS, DIM, MODEL, ROWS, REACH = 4, 32, 128, 32, 32
ENCODINGS = ("none", "sinusoidal", "rotary", "ALiBi", "relative", "agreeing", "opposed")
GROWS, STOPS = (0.9, 1.1), 0.2


@torch.no_grad()
def measure(seed: int, content: str, longest: int) -> Iterable[Row]:
    source = torch.Generator().manual_seed(seed)
    words = torch.randn(longest, MODEL, generator=source)
    weight = torch.randn(2, HEADS, MODEL, DIM, generator=source) / math.sqrt(MODEL)
    table = torch.randn(HEADS, 2 * REACH + 1, generator=source)
    common = torch.randn(HEADS, 1, DIM, generator=source) * (1.0 if content == "shared" else 0.0)
    for n in geometric(64, longest):
        for encoding in ENCODINGS:
            law = _law(encoding, words[:n], weight, common, table)
            where = torch.arange(n, dtype=torch.float32)
            distance = where[n - ROWS :] - law.expectation(where[:, None].expand(HEADS, n, 1))[..., 0]
            entropy = law.entropy().double()
            yield {
                "encoding": encoding,
                "n": n,
                "entropy": float(entropy.mean()),
                "normalised": float(entropy.mean()) / math.log(n),
                "distance": float(distance.mean()),
                "predicted": float(alibi_entropy(alibi_slopes(HEADS).double()).mean()),
            }


def _law(encoding: str, words: Tensor, weight: Tensor, common: Tensor, table: Tensor) -> Gibbs:
    """The last rows of the sequence against all of it."""
    n = len(words)
    x = words + sinusoidal(n, MODEL) if encoding == "sinusoidal" else words
    query, key = x[n - ROWS :] @ weight[0] + common, x @ weight[1] + common
    if encoding == "rotary":
        query, key = rotary(query, torch.arange(n - ROWS, n)), rotary(key)
    scale, bias = DIM**-0.5, None
    rows, align = slice(0, ROWS), "bottom-right"
    if encoding == "ALiBi":
        bias = ALiBi(alibi_slopes(HEADS), align).rows(rows, ROWS, n, query)
    elif encoding == "relative":
        bias = RelativeBias(table, align).rows(rows, ROWS, n, query)
    elif encoding in ("agreeing", "opposed"):
        bias = (0.5 if encoding == "agreeing" else -0.5) * scale * query @ key.mT
    return Gibbs(query, key, scale=scale, bias=bias, support=support.causal(align))


def alibi_entropy(slope: Tensor) -> Tensor:
    """Entropy of weights proportional to exp(-slope * distance), distances 0, 1, 2, ... without end.

        H = -log(1 - r) + slope * r / (1 - r),     r = exp(-slope)           near 1 - log(slope)

    >>> round(alibi_entropy(torch.tensor(0.001).double()).item(), 3)  # 1 + log 1000
    7.908
    """
    rest = -torch.expm1(-slope)
    return -rest.log() + slope * torch.exp(-slope) / rest


def judge(rows: list[Row]) -> Verdict:
    contents = list(dict.fromkeys(row["content"] for row in rows))
    claims: dict[str, bool] = {}
    parts = []
    for content in contents:
        own = only(rows, content=content)
        shortest, longest = min(row["n"] for row in own), max(row["n"] for row in own)
        late = [row for row in own if row["n"] >= longest / 16]
        slopes = {e: slope_by_seed(only(late, encoding=e), "n", "entropy").mean for e in ENCODINGS}
        early, change = (
            {e: paired(only(own, n=n), "entropy", "encoding", e, "none").mean for e in ENCODINGS}
            for n in (shortest, longest)
        )
        for e in ("none", "sinusoidal", "rotary", "relative"):
            claims[f"{content}: {e} grows like log n"] = GROWS[0] <= slopes[e] <= GROWS[1]
        for e in ("sinusoidal", "relative"):  # a constant: as much at the longest as at the shortest, at least by half
            claims[f"{content}: {e} lowers H by a constant"] = change[e] < 0 and change[e] < early[e] / 2
        turned = change["rotary"]
        claims[f"{content}: rotary"] = abs(turned) < 0.05 if content == "independent" else turned < -0.05
        claims[f"{content}: ALiBi stops the growth"] = slopes["ALiBi"] < STOPS
        claims[f"{content}: the sign is the content's"] = change["opposed"] > 0 > change["agreeing"]
        parts.append(
            f"{content} content, n to {longest}: slopes "
            + ", ".join(f"{e} {slopes[e]:+.2f}" for e in ENCODINGS[:5])
            + "; change of H at the longest (shortest): "
            + ", ".join(f"{e} {change[e]:+.3f} ({early[e]:+.3f})" for e in ENCODINGS[1:])
            + f"; ALiBi's H {series(only(own, encoding='ALiBi'), '', 'n', 'entropy').y[-1]:.2f} "
            f"(geometric law without content {own[0]['predicted']:.2f})"
        )
    says = ". ".join(parts) + "."
    failed = [claim for claim, true in claims.items() if not true]
    holds = not any("ALiBi" in claim or "none" in claim or "sign" in claim for claim in failed)
    within = f"{len(claims) - len(failed)} of {len(claims)} claims, not: {'; '.join(failed)}"
    return settle(
        says if holds else f"Failed: {'; '.join(failed)}. {says}", holds=holds, whole=not failed, within=within
    )


def panels(rows: list[Row]) -> list[Panel]:
    found = []
    for content in dict.fromkeys(row["content"] for row in rows):
        own = only(rows, content=content)
        for name, label in (("entropy", "entropy (nats)"), ("distance", "mean distance looked back (tokens)")):
            drawn = lines(own, "n", name, "encoding", ENCODINGS[:5])
            drawn += lines(own, "n", name, "encoding", ENCODINGS[5:], kind="context")
            if name == "entropy":
                drawn.append(theory("log n", distinct(own, "n"), math.log))
            found.append(Panel(f"{content} content", "tokens n", label, drawn, log_x=True, log_y=name == "distance"))
    return found[:4]


EXPERIMENT = experiment(
    __name__,
    question="What do position encodings do to the entropy of a row, and to its growth with length?",
    expected="Sinusoids and random relative biases lower it by a constant; rotary leaves random content alone; only "
    "ALiBi stops its growth; a bias opposed to the content raises it.",
    ids=("M-ATT-9", "M-ATT-10", "M-ATT-5", "M-SCL-0"),
    tiny=Size(grid(content=["independent", "shared"], longest=256), seeds=2, seconds=0.1),
    quick=Size(grid(content=["independent", "shared"], longest=16384), seeds=5, seconds=0.4),
    full=Size(grid(content=["independent", "shared"], longest=65536), seeds=20, seconds=1.0),
)
