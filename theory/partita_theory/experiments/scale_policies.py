"""Scale policies and the entropy of a row as it grows.

Of policies that know n alone, or nothing, the law of Gaussian scores gives the slope dH / dlog n from n = 256 on: 1
minus that of (scale * sigma)^2 / 2. Laws calibrated with the measured standard deviation should be flat; these lengths
are too short for them. The scale solved for each row is flat by construction: a check of the solver, not a finding.

    gaussian    q, k ~ N(0, I), dim 64
    cosine      the same in dim 8, all of length sqrt(8): scores bounded by 8
    clustered   keys around 16 centres, queries near one of them: a sixteenth of the keys is as good as the best
    real        heads of the trained encoder's fourth layer; past 512 keys those of the following windows are added
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from partita import Gibbs, scale
from partita_theory.experiment import Settings, Size, experiment, geometric, grid
from partita_theory.experiments._encoder import HEADS, NEEDS, POSITIONS, heads_of, tokens
from partita_theory.figure import Panel
from partita_theory.results import Row, distinct, lines, mean_by, only, slope, slope_by_seed, theory
from partita_theory.verdict import Verdict, settle

TARGET = 4.0  # nats: 55 keys
FROM = 256  # shorter rows cannot hold the target, or barely
FLAT, NEAR, FREE = 0.05, 0.05, 0.6
LEFT = (0.1, 0.25)  # of the growth of log n, under calibrated laws
SOLVED, LAWS = "TargetEntropy", ("CalibratedLog", "GaussianEntropy")
BLIND = ("InverseSqrt", "KappaLog", "LogLength", "SqrtLogLength", "Mixed", "MaxLength")
LAYER = 3
ROWS = 32  # queries of a synthetic row set
REAL_ROWS, READERS = 8, 4  # tokens, each with all heads, of this many windows


def policies(sigma: float) -> dict[str, scale.Policy]:
    """Every policy of partita.scale that learns nothing, at the settings of the notes or of its own default."""
    return {
        "InverseSqrt": scale.InverseSqrt(),
        "KappaLog": scale.KappaLog(),
        "LogLength": scale.LogLength(512),
        "SqrtLogLength": scale.SqrtLogLength(512),
        "Mixed": scale.Mixed(),
        "MaxLength": scale.MaxLength(65536),
        "CalibratedLog": scale.CalibratedLog(4096, sigma),
        "GaussianEntropy": scale.GaussianEntropy(TARGET, sigma),
        "TargetEntropy": scale.TargetEntropy(entropy=TARGET),
    }


def vectors(scores: str, longest: int, seed: int) -> tuple[Tensor, Tensor]:  # (heads, rows, dim), (heads, n, dim)
    """Queries, and keys of which the first n serve as a row of length n."""
    if scores == "real":
        windows = -(-longest // POSITIONS)
        layer = heads_of(tokens(seed, windows, POSITIONS), (LAYER,))[0]
        keys = layer.key.transpose(0, 1).reshape(HEADS, windows * POSITIONS, -1)
        starts = range(0, windows, -(-windows // READERS))  # windows that are read from, each before the others
        query = torch.cat([layer.query[at, :, 1 : 1 + REAL_ROWS] for at in starts])
        return query, torch.cat([keys.roll(-at * POSITIONS, 1)[:, :longest] for at in starts])
    source = torch.Generator().manual_seed(seed)
    dim = 8 if scores == "cosine" else 64
    query, key = (torch.randn(m, dim, generator=source) for m in (ROWS, longest))
    if scores == "cosine":
        query, key = (x / x.norm(dim=-1, keepdim=True) * math.sqrt(dim) for x in (query, key))
    if scores == "clustered":
        centre = torch.randn(16, dim, generator=source)
        key = centre[torch.randint(16, (longest,), generator=source)] + 0.25 * key
        query = centre[torch.randint(16, (ROWS,), generator=source)] + 0.25 * query
    return query[None], key[None]


@torch.no_grad()
def measure(seed: int, scores: str, longest: int) -> Iterable[Row]:
    query, key = vectors(scores, longest, seed)
    sigma = scale.measure_sigma(query, key[:, : min(longest, 1024)])
    for n in geometric(16, longest):
        for name, policy in policies(sigma).items():
            law = Gibbs(query, key[:, :n], scale=policy)
            entropy, used = law.entropy().double(), float(torch.as_tensor(law.scale).double().mean())
            yield {
                "policy": name,
                "n": n,
                "sigma": sigma,
                "entropy": float(entropy.mean()),
                "normalised": float(entropy.mean()) / math.log(n),
                "width": float(entropy.exp().mean()),
                "scale": used,
                "sharpness": used * sigma,
            }


def judge(rows: list[Row]) -> Verdict:
    long = [row for row in rows if row["n"] >= FROM]
    kinds = list(dict.fromkeys(row["scores"] for row in rows))
    if len({row["n"] for row in long}) < 2:
        return Verdict("does not hold", f"no two lengths from {FROM} on were run, so no slope is known.")
    wrong: dict[str, list[str]] = {kind: [] for kind in kinds}
    parts = []
    for kind in kinds:
        own = only(long, scores=kind)
        at = {name: slope_by_seed(only(own, policy=name), "n", "entropy").mean for name in policies(1.0)}
        if abs(at[SOLVED]) > FLAT:
            wrong[kind].append("the solver misses its target")
        if min(at[name] for name in BLIND) < FREE:
            wrong[kind].append(f"a policy that knows n alone falls below {FREE}")
        if max(at[name] for name in LAWS) > LEFT[1]:
            wrong[kind].append(f"a calibrated law leaves more than {LEFT[1]}")
        off = {name: at[name] - _law(only(own, policy=name)) for name in BLIND}
        worst = max(off, key=lambda name: abs(off[name]))
        if kind == "gaussian":
            if min(at[name] for name in LAWS) < LEFT[0]:
                wrong[kind].append(f"a calibrated law leaves less than {LEFT[0]}")
            if abs(off[worst]) > NEAR:
                wrong[kind].append(f"{worst} is off the Gaussian law by more than {NEAR}")
        laws_text = ", ".join(f"{name} {at[name]:+.2f} (H {_range(only(own, policy=name))})" for name in LAWS)
        low, high = min(BLIND, key=lambda name: at[name]), max(BLIND, key=lambda name: at[name])
        parts.append(
            f"{kind} (to n = {max(r['n'] for r in own)}): {laws_text}, the rest from {at[low]:+.2f} ({low}) to "
            f"{at[high]:+.2f} ({high}), off the Gaussian law by up to {off[worst]:+.3f} ({worst}), solved "
            f"{at[SOLVED]:+.3f}"
        )
    says = f"Slopes dH/dlog n from n = {FROM}. " + "; ".join(parts) + "."
    failed = "; ".join(f"{kind}: {', '.join(what)}" for kind, what in wrong.items() if what)
    right, other = [k for k in kinds if not wrong[k]], [k for k in kinds if wrong[k]]
    says += f" Contradicted: {failed}." if failed else ""
    holds = not failed or "gaussian" in right
    return settle(says, holds=holds, whole=not failed, within=f"{', '.join(right)} scores, not {', '.join(other)}")


def _law(rows: list[Row]) -> float:
    """The slope that H = log n - (scale * sigma)^2 / 2 gives at the scales that were used."""
    means = mean_by(rows, "sharpness", "n")
    x = [math.log(n) for n in means]
    return slope(x, [log_n - float(s.mean) ** 2 / 2 for log_n, s in zip(x, means.values(), strict=True)])


def _range(rows: list[Row]) -> str:
    means = [spread.mean for spread in mean_by(rows, "entropy", "n").values()]
    return f"{min(means):.2f} to {max(means):.2f}"


def panels(rows: list[Row]) -> list[Panel]:
    found = []
    shown = ("InverseSqrt", "LogLength", "CalibratedLog", "GaussianEntropy", "TargetEntropy")
    for kind in list(dict.fromkeys(row["scores"] for row in rows))[:4]:
        own = only(rows, scores=kind)
        drawn = lines(own, "n", "entropy", "policy", shown)
        drawn += lines(own, "n", "entropy", "policy", [p for p in BLIND if p not in shown], kind="context")
        drawn.append(theory("log n", distinct(own, "n"), math.log))
        found.append(Panel(f"{kind} scores", "keys n", "entropy (nats)", drawn, log_x=True))
    return found


def _sizes(synthetic: int, real: int) -> list[Settings]:
    return [*grid(scores=["gaussian", "cosine", "clustered"], longest=synthetic), {"scores": "real", "longest": real}]


EXPERIMENT = experiment(
    __name__,
    question="Which scale policies keep entropy constant as a row grows, for which scores, over what lengths?",
    expected="Policies that know n alone let entropy grow almost like log n, for Gaussian scores as their law says; "
    "laws calibrated with the measured sigma leave 0.1 to 0.25 of the growth for Gaussian scores, no more for others.",
    ids=("M-SCL-0", "M-SCL-2", "M-SCL-3", "M-SCL-4", "M-SCL-7", "M-SCL-14", "M-SCL-15", "M-SCL-16", "M-SCL-17"),
    tiny=Size(_sizes(1024, 1024), seeds=1, seconds=0.3),
    quick=Size(_sizes(65536, 16384), seeds=3, seconds=2.0),
    full=Size(_sizes(65536, 65536), seeds=10, seconds=9.0),
    needs=NEEDS,
)
