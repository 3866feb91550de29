"""The curvature of squared error and cross entropy, in the weights of the simplex and in the logits behind them.

Logits of n classes, one class ahead of the others by a margin: the wrong one or the right one. By logits the Hessian of
cross entropy is diag(p) - pp^T, positive semidefinite with the one flat direction of shifts (the notes print
"negative").
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from partita_theory import geometry
from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, columns, distinct, lines, mean_by, only, said, slope_by_seed, theory
from partita_theory.verdict import Verdict, settle

SLACK = 1e-12
FALLS = (-1.15, -0.85)  # slope of log attenuation in the margin
LARGE = 4.0  # margins from here on count as confident


def measure(seed: int, classes: int, draws: int) -> Iterable[Row]:
    n = classes
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
            flat = geometry.cross_entropy_hessian_logits(p)
            bent = geometry.softmax_squared_error_hessian(logits, target)
            convex, other = geometry.curvature_summary(flat), geometry.curvature_summary(bent)
            gradient = geometry.softmax_squared_error_gradient(logits, target)
            yield {
                "answer": answer,
                "margin": margin,
                "ce_smallest": float(convex.smallest.min()),
                "ce_largest": float(convex.largest.mean()),
                "ce_flat_directions": int(convex.null.max()),
                "mse_smallest": float(other.smallest.min()),
                "mse_bent": float((~other.convex).double().mean()),
                "ce_gradient": float((p - target).norm(dim=-1).mean()),
                "mse_gradient": float(gradient.norm(dim=-1).mean()),
                "attenuation": float(geometry.gradient_attenuation(logits, target).mean()),
                "autograd_off": max(_off(logits[0], target, flat[0], "ce"), _off(logits[0], target, bent[0], "mse")),
                "in_weights": _smallest_in_weights(p, target),
            }


def _off(logits: Tensor, target: Tensor, hessian: Tensor, loss: str) -> float:
    """The closed form against autograd's second derivative."""

    def value(z: Tensor) -> Tensor:
        if loss == "ce":
            return geometry.soft_cross_entropy(z, target)
        return (torch.softmax(z, -1) - target).square().sum()

    found = torch.autograd.functional.hessian(value, logits)
    assert isinstance(found, Tensor)
    return float((found - hessian).abs().max())


def _smallest_in_weights(p: Tensor, target: Tensor) -> float:
    """Least curvature along the simplex of the two losses as functions of p: diag(y / p^2) and 2 I."""
    n = p.shape[-1]
    whole = torch.cat([torch.ones(n, 1, dtype=p.dtype), torch.eye(n, dtype=p.dtype)[:, 1:]], 1)
    tangent = torch.linalg.qr(whole).Q[:, 1:]
    ce = tangent.T @ torch.diag_embed(target / p**2) @ tangent
    mse = 2 * tangent.T @ tangent
    scale = ce.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=1.0)
    return float(min((torch.linalg.eigvalsh(ce)[..., 0] / scale).min(), torch.linalg.eigvalsh(mse)[0]))


def judge(rows: list[Row]) -> Verdict:
    wrong, right = only(rows, answer="wrong"), only(rows, answer="right")
    off = max(row["autograd_off"] for row in rows)
    convex, weights = (min(row[y] for row in rows) for y in ("ce_smallest", "in_weights"))
    bent = mean_by(wrong, "mse_bent", "margin")
    confident = [row for row in wrong if row["margin"] >= LARGE]
    kept = min(row["ce_gradient"] for row in confident)
    falls = {
        n: slope_by_seed(only(confident, classes=n), "margin", "attenuation", log_x=False, log_y=True)
        for n in distinct(rows, "classes")
    }
    last = max(row["margin"] for row in rows)
    end = only(right, margin=last)
    ce, mse = (max(v.mean for v in mean_by(end, f"{y}_gradient", "classes").values()) for y in ("ce", "mse"))
    some = {margin: bent[margin] for margin in bent if margin in (0, 2, 4, 8)}
    says = (
        f"Smallest eigenvalue of the Hessian of cross entropy by logits {convex:.1e}, of both losses along the simplex "
        f"{weights:.1e} (closed forms within {off:.1e} of autograd). Squared error is not convex in "
        f"{said(some, '{1:.0%} at margin {0}')} of wrong answers. Its gradient over that of cross entropy falls like "
        f"exp(c margin), c = {said(falls, '{1:.3f} for {0} classes')}, where cross entropy keeps {kept:.2f} or more; "
        f"right by margin {last}: {ce:.1e} and {mse:.1e}."
    )
    shape = convex >= -SLACK and weights >= -SLACK and off <= 1e-9 and max(v.mean for v in bent.values()) > 0
    held = [n for n in falls if FALLS[0] <= falls[n].mean <= FALLS[1]]
    holds = shape and bool(held) and kept >= 0.9 and max(ce, mse) < 0.01
    within = f"{', '.join(map(str, held))} classes for the rate of attenuation"
    return settle(says, holds=holds, whole=len(held) == len(falls), within=within)


def panels(rows: list[Row]) -> list[Panel]:
    classes = distinct(rows, "classes")[:5]
    middle = classes[len(classes) // 2]
    x = "margin (nats)"
    both = {"cross entropy": "ce_gradient", "squared error": "mse_gradient"}
    found, bent = [], []
    for answer in ("wrong", "right"):
        own = only(rows, answer=answer, classes=middle)
        gradients = columns(own, "margin", both)
        found.append(Panel(f"Gradient, {answer} answer, {middle} classes", x, "length", gradients, log_y=True))
        bent += columns(own, "margin", {f"{answer} answer": "mse_bent"})
    ratio = lines(only(rows, answer="wrong"), "margin", "attenuation", "classes", classes, "{} classes")
    late = [m for m in distinct(rows, "margin") if m >= 2]
    # the leading order for two classes and for many
    ratio.append(theory("4 exp(-margin)", late, lambda m: 4.0 * math.exp(-m)))
    ratio.append(theory("1.41 exp(-margin)", late, lambda m: math.sqrt(2.0) * math.exp(-m)))
    return [
        *found,
        Panel("Squared error over cross entropy, wrong answer", x, "ratio", ratio, log_y=True),
        Panel(f"Where squared error is not convex, {middle} classes", x, "share of points", bent),
    ]


EXPERIMENT = experiment(
    __name__,
    question="How do squared error and cross entropy curve, in the weights of the simplex and in the logits behind it?",
    expected="Both convex in the weights; in the logits only cross entropy, squared error bends down on wrong answers "
    "and its gradient falls like exp(-margin) there.",
    ids=("M-LOSS-2", "M-LOSS-3", "M-LOSS-5", "M-LOSS-6", "M-DER-7", "M-GEO-1"),
    tiny=Size(grid(classes=3, draws=8), seeds=2, seconds=0.1),
    quick=Size(grid(classes=[2, 3, 10, 50], draws=100), seeds=5, seconds=0.3),
    full=Size(grid(classes=[2, 3, 10, 50, 200], draws=200), seeds=20, seconds=8.0),
)
