"""How far weights and outputs move when scores move by a bounded amount, and who moves them that far.

A perturbation of l_inf size r moves the weights by at most 2 tanh(r / 2) in l_1 (M-ROB-6) and the output by at most
diam(V) tanh(r / 2), which an offset of the values leaves alone while it spoils the usual bound max|v| r (M-ROB-7).
The exact l_inf attack gains at least as much as the sign rule at every r (M-ROB-9, M-ROB-10).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, columns, distinct, lines, mean_by, theory
from partita_theory.robustness import (
    attack_l2,
    attack_linf,
    attack_linf_exact,
    attention_change_bound,
    softmax_change_bound,
    worst_two_point_law,
)
from partita_theory.verdict import Verdict, settle

ROUNDING = 1e-9
NEAR = 0.1  # a gain so near to its first-order prediction counts as predicted
OFFSET = 3.0  # common to all values: outputs move with it, differences do not


def measure(seed: int, n: int, radius: float, cases: int) -> Iterable[Row]:
    r = radius
    source = torch.Generator().manual_seed(1000 * seed + n)  # the same rows at every radius

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    s, v, u = 2 * randn(cases, n), randn(cases, n, 3) + OFFSET, randn(cases, 3)
    p, out = torch.softmax(s, -1), (torch.softmax(s, -1)[..., None] * v).sum(-2)
    linf, exact, l2 = attack_linf(s, v, u, r), attack_linf_exact(s, v, u, r), attack_l2(s, v, r)
    tries = [r * randn(cases, n).sign(), r * (2 * randn(cases, n)).tanh(), linf.perturbation, exact.perturbation]
    weights, outputs, bound = 0.0, 0.0, attention_change_bound(v, radius=r)
    for e in tries:
        moved = torch.softmax(s + e, -1)
        weights = max(weights, float(((moved - p).abs().sum(-1) / softmax_change_bound(radius=r)).max()))
        change = ((moved[..., None] * v).sum(-2) - out).norm(dim=-1)
        outputs = max(outputs, float((change / bound).max()))
    pair, push = worst_two_point_law(r)
    attained = (torch.softmax(pair + push, -1) - torch.softmax(pair, -1)).abs().sum() / softmax_change_bound(radius=r)
    usual = v.norm(dim=-1).amax(-1) * r
    yield {
        "weights": weights,
        "outputs": outputs,
        "two_keys": float(attained),
        "usual": float((usual / bound).median()),
        "sign_rule": float((linf.achieved / linf.predicted).mean()),
        "exact": float((exact.achieved / exact.predicted).mean()),
        "l2": float((l2.achieved / l2.predicted).mean()),
        "sign_of_exact": float((linf.achieved / exact.achieved).mean()),
        "least": float(((exact.achieved - linf.achieved) / exact.achieved).min()),
    }


def judge(rows: list[Row]) -> Verdict:
    weights, outputs, usual = (max(row[y] for row in rows) for y in ("weights", "outputs", "usual"))
    sharp, worse = (min(row[y] for row in rows) for y in ("two_keys", "least"))
    radii = distinct(rows, "radius")
    sign, l2, share = (mean_by(rows, name, "radius") for name in ("sign_rule", "l2", "sign_of_exact"))
    reach = [r for r in radii if all(abs(g[q].mean - 1) <= NEAR for g in (sign, l2) for q in radii if q <= r)]
    small, large = radii[0], radii[-1]
    evidence = (
        f"weights reach at most {weights:.4f} of the bound over all tries, outputs {outputs:.4f}; two keys reach "
        f"{sharp:.6f}; the usual bound is {usual:.1f} times larger for values with an offset. Gained over predicted, "
        f"sign rule {sign[small]:.3f} at r = {small:g} and {sign[large]:.3f} at {large:g}, l2 {l2[large]:.3f} there; "
        f"the sign rule gains {share[large]:.3f} of the exact attack."
    )
    bounded = weights <= 1 + ROUNDING and outputs <= 1 + ROUNDING and abs(sharp - 1) <= 1e-6 and worse >= -ROUNDING
    within = f"r <= {reach[-1]:g} for first-order gains; the bounds at every r" if reach else ""
    return settle(evidence, holds=bounded, whole=reach == radii, within=within)


def panels(rows: list[Row]) -> list[Panel]:
    x, radii = "radius", distinct(rows, "radius")
    reached = lines(rows, x, "outputs", "n", distinct(rows, "n")[:3], "outputs, n = {}")
    reached += [*columns(rows, x, {"weights of two keys": "two_keys"}), theory("bound", radii, 1.0)]
    gains = columns(rows, x, {"sign rule, l_inf": "sign_rule", "exact, l_inf": "exact", "l_2": "l2"})
    gains.append(theory("first order", radii, 1.0))
    size, title = "size of the perturbation", "What an attack gains of its first-order prediction"
    return [
        Panel("How much of the bound is reached", f"l_inf {size}", "change / bound", reached, log_x=True),
        Panel(title, size, "gained / predicted", gains, log_x=True),
    ]


RADII = [0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0]
EXPERIMENT = experiment(
    __name__,
    question="How far can weights and outputs move when the scores move by a bounded amount?",
    expected="Never beyond 2 tanh(r/2) in l_1 and diam(V) tanh(r/2); two keys reach the first; attacks gain what first "
    "order predicts for small r only.",
    ids=("M-ROB-6", "M-ROB-7", "M-ROB-8", "M-ROB-9", "M-ROB-10", "M-DER-1"),
    tiny=Size(grid(n=[8, 64], radius=[0.01, 1.0], cases=20), seeds=2, seconds=0.02),
    quick=Size(grid(n=[8, 64, 512], radius=RADII, cases=40), seeds=4, seconds=0.06),
    full=Size(grid(n=[8, 64, 512], radius=RADII, cases=100), seeds=20, seconds=0.2),
)
