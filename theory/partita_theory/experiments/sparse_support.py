"""Seeing fewer keys: each row of n keys may see k of them, the k best, a window, every (n/k)th, or k at random."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from partita import Gibbs, support
from partita.attn.variants import top_k_attention
from partita_theory.experiment import Size, experiment, geometric, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, columns, distinct, lines, mean_by, only, said, theory
from partita_theory.selection import top_k_loss
from partita_theory.verdict import Verdict, settle

PATTERNS = ("best", "window", "strided", "random")
SLACK = 1e-9  # float64


@torch.no_grad()
def measure(seed: int, n: int, sharpness: float) -> Iterable[Row]:
    dim = 16
    source = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n, dim, generator=source, dtype=torch.float64) for _ in range(3))
    scale = sharpness / math.sqrt(dim)
    full = Gibbs(query, key, scale=scale)
    whole, log_z, entropy = full.expectation(value), full.log_partition(), full.entropy()
    diameter = float(torch.cdist(value, value).max())
    for k in geometric(4, n // 4):
        for pattern in PATTERNS:
            if pattern == "best":
                kept = top_k_attention(query, key, value, k, scale=scale)
                out, log_kept, narrow, seen = kept.output, kept.log_kept, kept.stats.entropy, kept.stats.visible
            else:
                law = Gibbs(query, key, scale=scale, support=_support(pattern, n, k, source))
                out, log_kept = law.expectation(value), law.log_partition() - log_z
                narrow, seen = law.entropy(), law.visible()
            mass = log_kept.exp()
            change, bound = (out - whole).norm(dim=-1), top_k_loss(mass, diameter).output
            yield {
                "keep": k,
                "pattern": pattern,
                "entropy": float(narrow.mean()),
                "full_entropy": float(entropy.mean()),
                "mass": float(mass.mean()),
                "change": float(change.mean()),
                "bound": float(bound.mean()),
                "raised": float((narrow > entropy + SLACK).double().mean()),
                "over_ceiling": int((narrow > seen.log() + SLACK).sum()),
                "over_bound": int((change > bound + SLACK).sum()),
            }


def _support(pattern: str, n: int, k: int, source: torch.Generator) -> support.Support:
    if pattern == "window":
        return support.window(k // 2, k - k // 2 - 1)
    i = torch.arange(n)
    if pattern == "strided":
        return support.mask((i[None, :] - i[:, None]) % (n // k) == 0)
    chosen = torch.rand(n, n, generator=source).argsort(-1)[:, :k]
    return support.mask(torch.zeros(n, n, dtype=torch.bool).scatter(1, chosen, True))


def judge(rows: list[Row]) -> Verdict:
    over = sum(row["over_ceiling"] for row in rows), sum(row["over_bound"] for row in rows)
    best, others = only(rows, pattern="best"), [row for row in rows if row["pattern"] != "best"]
    raised_best = max(row["raised"] for row in best)
    raised = mean_by(others, "raised", "sharpness")
    kept, moved = (mean_by(rows, y, "pattern", "sharpness", "keep") for y in ("mass", "change"))
    first = all(kept["best", s, k].mean >= value.mean for (_, s, k), value in kept.items())
    sharp, small = max(row["sharpness"] for row in rows), min(row["keep"] for row in rows)
    says = (
        f"{len(rows)} settings: {over[0]} rows above log(visible), {over[1]} above (1 - mass) diam(V). Rows whose "
        f"entropy rose: best {raised_best:.0%} at most, other patterns "
        f"{said(raised, '{1:.0%} at sharpness {0:g}')}. Mass kept by {small} keys at sharpness {sharp:g}: "
        f"{', '.join(f'{p} {kept[p, sharp, small]:.3f}' for p in PATTERNS)}; change of the output there "
        f"{', '.join(f'{p} {moved[p, sharp, small]:.2f}' for p in PATTERNS)}."
    )
    raising = [f"{s:g}" for s, value in raised.items() if value.mean > 0]
    holds = over == (0, 0) and raised_best <= 0 and first and bool(raising)
    return settle(says, holds=holds, whole=len(raising) == len(raised), within=f"sharpness {', '.join(raising)}")


def panels(rows: list[Row]) -> list[Panel]:
    most = max(row["sharpness"] for row in rows)
    sharp, x, at = only(rows, sharpness=most), "keys seen k", f"sharpness {most:g}"
    mass, change, raised, entropy = (
        lines(sharp, "keep", y, "pattern", PATTERNS) for y in ("mass", "change", "raised", "entropy")
    )
    entropy += columns(only(sharp, pattern="best"), "keep", {"all keys": "full_entropy"}, "context")
    entropy.append(theory("log k", distinct(rows, "keep"), math.log))
    return [
        Panel(f"Mass kept, {at}", x, "mass", mass, log_x=True),
        Panel(f"Change of the output, {at}", x, "length", change, log_x=True),
        Panel(f"Rows whose entropy rose, {at}", x, "share", raised, log_x=True),
        Panel(f"Entropy, {at}", x, "nats", entropy, log_x=True),
    ]


EXPERIMENT = experiment(
    __name__,
    question="What does seeing fewer keys do to a row: its entropy, the mass it loses, the error of its output?",
    expected="Entropy never exceeds log(visible), the output never moves by more than (1 - mass) diam(V); keeping the "
    "best never raises the entropy, other patterns do in some rows.",
    ids=("M-SPA-1", "M-ATT-12", "M-ATT-14", "M-ENT-1"),
    tiny=Size(grid(n=64, sharpness=[1.0, 4.0]), seeds=2, seconds=0.1),
    quick=Size(grid(n=1024, sharpness=[0.5, 1.0, 2.0, 4.0]), seeds=3, seconds=0.5),
    full=Size(grid(n=2048, sharpness=[0.25, 0.5, 1.0, 2.0, 4.0, 8.0]), seeds=10, seconds=2.0),
)
