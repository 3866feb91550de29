"""What does seeing fewer keys do to a row: its entropy, the mass it loses, the error of its output?

Each row of 1024 keys may see k of them: the k best, a window, every (n/k)th, or k at random.

Expected: the ceiling log k always holds and the output never moves by more than (1 - mass kept) * diam(V). Keeping the
best never raises the entropy; the other patterns do in some rows (they drop the key that dominated), so "sparser means
lower entropy" is false row by row. The best k lose least, and nearly nothing once the row is sharp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from partita import Gibbs, support
from partita.attn.variants import top_k_attention
from partita.lab.figure import Figure, Line, Panel
from partita.theory.selection import top_k_loss
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by
from partita_studies.experiments._series import note, only, series

PATTERNS = ("best", "window", "strided", "random")
SLACK = 1e-9  # float64


@torch.no_grad()
def run(settings: Settings, seed: int) -> Iterable[Row]:
    n, sharpness, dim = int(settings["n"]), float(settings["sharpness"]), 16
    source = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n, dim, generator=source, dtype=torch.float64) for _ in range(3))
    scale = sharpness / math.sqrt(dim)
    full = Gibbs(query, key, scale=scale)
    whole, log_z, entropy = full.expectation(value), full.log_partition(), full.entropy()
    diameter = float(torch.cdist(value, value).max())
    k = 4
    while k <= n // 4:
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
                **settings,
                "seed": seed,
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
        k *= 4


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
    keeps = {p: mean_by(only(rows, pattern=p), "mass", "sharpness", "keep") for p in PATTERNS}
    first = all(keeps["best"][key].mean >= keeps[p][key].mean for key in keeps["best"] for p in PATTERNS)
    sharp = max(row["sharpness"] for row in rows)
    small = min(row["keep"] for row in rows)
    error = {p: mean_by(only(rows, pattern=p), "change", "sharpness", "keep")[sharp, small].mean for p in PATTERNS}
    says = (
        f"{len(rows)} settings: {over[0]} rows above log(visible), {over[1]} above (1 - mass) diam(V). Rows whose "
        f"entropy rose: best {raised_best:.0%} at most, other patterns "
        f"{', '.join(f'{v.mean:.0%} at sharpness {key[0]:g}' for key, v in raised.items())}. Mass kept by {small} keys "
        f"at sharpness {sharp:g}: {', '.join(f'{p} {keeps[p][sharp, small].mean:.3f}' for p in PATTERNS)}; change of "
        f"the output there {', '.join(f'{p} {error[p]:.2f}' for p in PATTERNS)}."
    )
    if over != (0, 0) or raised_best > 0 or not first:
        return Verdict("does not hold", says)
    raising = [key[0] for key, value in raised.items() if value.mean > 0]
    if len(raising) == len(raised):
        return Verdict("holds", says)
    if not raising:
        return Verdict("does not hold", says)
    return Verdict("holds within", says, f"sharpness {', '.join(f'{x:g}' for x in raising)}")


def figure(rows: list[Row]) -> Figure:
    sharps = sorted({row["sharpness"] for row in rows})
    sharp = only(rows, sharpness=sharps[-1])
    keeps = sorted({float(row["keep"]) for row in rows})
    ceiling = Line("log k", keeps, [math.log(k) for k in keeps], kind="theory")
    panels = [
        Panel(title, "keys seen k", label, [series(only(sharp, pattern=p), p, "keep", y) for p in PATTERNS], log_x=True)
        for title, y, label in (
            (f"Mass kept, sharpness {sharps[-1]:g}", "mass", "mass"),
            (f"Change of the output, sharpness {sharps[-1]:g}", "change", "length"),
            (f"Rows whose entropy rose, sharpness {sharps[-1]:g}", "raised", "share"),
        )
    ]
    lines = [series(only(sharp, pattern=p), p, "keep", "entropy") for p in PATTERNS]
    lines.append(series(only(sharp, pattern="best"), "all keys", "keep", "full_entropy", "context"))
    panels.append(Panel(f"Entropy, sharpness {sharps[-1]:g}", "keys seen k", "nats", [*lines, ceiling], log_x=True))
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="sparse_support",
    question="What does seeing fewer keys do to a row: its entropy, the mass it loses, the error of its output?",
    expected="Entropy never exceeds log(visible), the output never moves by more than (1 - mass) diam(V); keeping the "
    "best never raises the entropy, other patterns do in some rows.",
    ids=("M-SPA-1", "M-ATT-12", "M-ATT-14", "M-ENT-1"),
    sizes={
        "tiny": Size(grid(n=[64], sharpness=[1.0, 4.0]), seeds=2, seconds=0.1),
        "quick": Size(grid(n=[1024], sharpness=[0.5, 1.0, 2.0, 4.0]), seeds=3, seconds=0.5),
        "full": Size(grid(n=[2048], sharpness=[0.25, 0.5, 1.0, 2.0, 4.0, 8.0]), seeds=10, seconds=2.0),
    },
    run=run,
    judge=judge,
    figure=figure,
)
