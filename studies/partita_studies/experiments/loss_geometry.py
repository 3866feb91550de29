"""How do squared error and cross entropy curve, in the weights of the simplex and in the logits behind them?

Logits of n classes, one class ahead of the others by a margin: the wrong one or the right one.

Expected: in the weights p both are convex. In the logits cross entropy stays so (its Hessian diag(p) - pp^T is positive
semidefinite, with the one flat direction of shifts; the notes print "negative"), while squared error bends down when
the answer is wrong. There its gradient is smaller than that of cross entropy by a factor that falls like exp(-margin),
which is what stops learning; on right answers both gradients vanish.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from partita.lab.figure import Figure, Line, Panel
from partita.theory.geometry import (
    cross_entropy_hessian_logits,
    curvature_summary,
    gradient_attenuation,
    soft_cross_entropy,
    softmax_squared_error_gradient,
    softmax_squared_error_hessian,
)
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, interval, mean_by
from partita_studies.experiments._series import note, only, series, slope

SLACK = 1e-12
FALLS = (-1.15, -0.85)  # slope of log attenuation in the margin
LARGE = 4.0  # margins from here on count as confident


def run(settings: Settings, seed: int) -> Iterable[Row]:
    n, draws = int(settings["classes"]), int(settings["draws"])
    source = torch.Generator().manual_seed(seed)
    base = 0.5 * torch.randn(draws, n, generator=source, dtype=torch.float64)
    for answer in ("wrong", "right"):
        for margin in range(9):
            logits = base.clone()
            # ahead of all the others together: the margin is the log-odds of the leading class
            logits[:, 0] = torch.logsumexp(base[:, 1:], -1) + margin
            target = torch.zeros(n, dtype=torch.float64)
            target[0 if answer == "right" else 1] = 1.0
            p = torch.softmax(logits, -1)
            flat, bent = cross_entropy_hessian_logits(p), softmax_squared_error_hessian(logits, target)
            convex, other = curvature_summary(flat), curvature_summary(bent)
            yield {
                **settings,
                "answer": answer,
                "margin": margin,
                "seed": seed,
                "ce_smallest": float(convex.smallest.min()),
                "ce_largest": float(convex.largest.mean()),
                "ce_flat_directions": int(convex.null.max()),
                "mse_smallest": float(other.smallest.min()),
                "mse_bent": float((~other.convex).double().mean()),
                "ce_gradient": float((p - target).norm(dim=-1).mean()),
                "mse_gradient": float(softmax_squared_error_gradient(logits, target).norm(dim=-1).mean()),
                "attenuation": float(gradient_attenuation(logits, target).mean()),
                "autograd_off": max(_off(logits[0], target, flat[0], "ce"), _off(logits[0], target, bent[0], "mse")),
                "in_weights": _smallest_in_weights(p, target),
            }


def _off(logits: Tensor, target: Tensor, hessian: Tensor, loss: str) -> float:
    """The closed form against autograd's second derivative."""

    def value(z: Tensor) -> Tensor:
        if loss == "ce":
            return soft_cross_entropy(z, target)
        return (torch.softmax(z, -1) - target).square().sum()

    found = torch.autograd.functional.hessian(value, logits)
    assert isinstance(found, Tensor)
    return float((found - hessian).abs().max())


def _smallest_in_weights(p: Tensor, target: Tensor) -> float:
    """Least curvature along the simplex of the two losses as functions of p: diag(y / p^2) and 2 I."""
    n = p.shape[-1]
    tangent = torch.linalg.qr(torch.cat([torch.ones(n, 1, dtype=p.dtype), torch.eye(n, dtype=p.dtype)[:, 1:]], 1)).Q[
        :, 1:
    ]
    ce = tangent.T @ torch.diag_embed(target / p**2) @ tangent
    mse = 2 * tangent.T @ tangent
    scale = ce.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=1.0)
    return float(min((torch.linalg.eigvalsh(ce)[..., 0] / scale).min(), torch.linalg.eigvalsh(mse)[0]))


def judge(rows: list[Row]) -> Verdict:
    wrong, right = only(rows, answer="wrong"), only(rows, answer="right")
    off = max(row["autograd_off"] for row in rows)
    convex = min(row["ce_smallest"] for row in rows)
    weights = min(row["in_weights"] for row in rows)
    bent = mean_by(wrong, "mse_bent", "margin")
    confident = [row for row in wrong if row["margin"] >= LARGE]
    kept = min(row["ce_gradient"] for row in confident)
    classes = sorted({row["classes"] for row in rows})
    falls = {n: interval(_rates(only(confident, classes=n))) for n in classes}
    last = max(row["margin"] for row in rows)
    end = {name: mean_by(only(right, margin=last), name, "classes") for name in ("ce_gradient", "mse_gradient")}
    says = (
        f"Smallest eigenvalue of the Hessian of cross entropy by logits {convex:.1e}, of both losses along the simplex "
        f"{weights:.1e} (closed forms within {off:.1e} of autograd). Squared error is not convex in "
        f"{', '.join(f'{v.mean:.0%} at margin {key[0]}' for key, v in bent.items() if key[0] in (0, 2, 4, 8))} of "
        f"wrong answers. Its gradient over that of cross entropy falls like exp(c margin), c = "
        f"{', '.join(f'{falls[n].mean:.3f} for {n} classes' for n in classes)}, where cross entropy keeps {kept:.2f} "
        f"or more; right by margin {last}: {max(v.mean for v in end['ce_gradient'].values()):.1e} and "
        f"{max(v.mean for v in end['mse_gradient'].values()):.1e}."
    )
    if convex < -SLACK or weights < -SLACK or off > 1e-9 or max(v.mean for v in bent.values()) == 0:
        return Verdict("does not hold", says)
    vanish = max(v.mean for found in end.values() for v in found.values()) < 0.01
    held = [n for n in classes if FALLS[0] <= falls[n].mean <= FALLS[1]]
    if not held or kept < 0.9 or not vanish:
        return Verdict("does not hold", says)
    if len(held) == len(classes):
        return Verdict("holds", says)
    return Verdict("holds within", says, f"{', '.join(map(str, held))} classes for the rate of attenuation")


def _rates(rows: list[Row]) -> list[float]:
    seeds = sorted({row["seed"] for row in rows})
    own = {seed: only(rows, seed=seed) for seed in seeds}
    return [slope([r["margin"] for r in own[s]], [math.log(r["attenuation"]) for r in own[s]]) for s in seeds]


def figure(rows: list[Row]) -> Figure:
    wrong, right = only(rows, answer="wrong"), only(rows, answer="right")
    margins = sorted({float(row["margin"]) for row in rows})
    classes = sorted({row["classes"] for row in rows})[:5]
    middle = classes[len(classes) // 2]
    names = (("cross entropy", "ce_gradient"), ("squared error", "mse_gradient"))
    panels = [
        Panel(
            f"Gradient, {title}, {middle} classes",
            "margin (nats)",
            "length",
            [series(only(own, classes=middle), a, "margin", y) for a, y in names],
            log_y=True,
        )
        for title, own in (("wrong answer", wrong), ("right answer", right))
    ]
    lines = [series(only(wrong, classes=n), f"{n} classes", "margin", "attenuation") for n in classes]
    late = [m for m in margins if m >= 2]  # the leading order for two classes and for many: 4 and sqrt 2 times exp(-m)
    lines += [
        Line(label, late, [factor * math.exp(-m) for m in late], kind="theory")
        for label, factor in (("4 exp(-margin)", 4.0), ("1.41 exp(-margin)", math.sqrt(2.0)))
    ]
    panels.append(Panel("Squared error over cross entropy, wrong answer", "margin (nats)", "ratio", lines, log_y=True))
    panels.append(
        Panel(
            f"Where squared error is not convex, {middle} classes",
            "margin (nats)",
            "share of points",
            [
                series(only(wrong, classes=middle), "wrong answer", "margin", "mse_bent"),
                series(only(right, classes=middle), "right answer", "margin", "mse_bent"),
            ],
        )
    )
    return Figure(EXPERIMENT.question, panels, note(rows))


EXPERIMENT = Experiment(
    name="loss_geometry",
    question="How do squared error and cross entropy curve, in the weights of the simplex and in the logits behind it?",
    expected="Both convex in the weights; in the logits only cross entropy, squared error bends down on wrong answers "
    "and its gradient falls like exp(-margin) there.",
    ids=("M-LOSS-2", "M-LOSS-3", "M-LOSS-5", "M-LOSS-6", "M-DER-7", "M-GEO-1"),
    sizes={
        "tiny": Size(grid(classes=[3], draws=[8]), seeds=2, seconds=0.1),
        "quick": Size(grid(classes=[2, 3, 10, 50], draws=[100]), seeds=5, seconds=0.3),
        "full": Size(grid(classes=[2, 3, 10, 50, 200], draws=[200]), seeds=20, seconds=8.0),
    },
    run=run,
    judge=judge,
    figure=figure,
)
