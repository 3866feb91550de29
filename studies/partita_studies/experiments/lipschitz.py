"""How far can weights and outputs move when scores move by a bounded amount, and who moves them that far?

Expected: no perturbation of l_inf size r moves the weights by more than 2 tanh(r / 2) in l_1, and two keys reach it
(M-ROB-6); no output moves by more than diam(V) tanh(r / 2), which an offset of the values leaves alone while it spoils
the usual bound max|v| r (M-ROB-7). First-order attacks gain what they predict only while r is small; the exact l_inf
attack gains at least as much as the sign rule at every r (M-ROB-9, M-ROB-10).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from partita.lab.figure import Figure, Line, Panel
from partita.theory.robustness import (
    attack_l2,
    attack_linf,
    attack_linf_exact,
    attention_change_bound,
    softmax_change_bound,
    worst_two_point_law,
)
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by
from partita_studies.experiments._series import note, only, series

ROUNDING = 1e-9
NEAR = 0.1  # a gain so near to its first-order prediction counts as predicted
OFFSET = 3.0  # common to all values: outputs move with it, differences do not


def run(settings: Settings, seed: int) -> Iterable[Row]:
    n, r, cases = int(settings["n"]), float(settings["radius"]), int(settings["cases"])
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
        "n": n,
        "radius": r,
        "seed": seed,
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
    weights, outputs = max(r["weights"] for r in rows), max(r["outputs"] for r in rows)
    sharp = min(r["two_keys"] for r in rows)
    worse = min(r["least"] for r in rows)
    radii = sorted({r["radius"] for r in rows})
    gains = {name: mean_by(rows, name, "radius") for name in ("sign_rule", "l2")}
    reach = [r for r in radii if all(abs(g[q,].mean - 1) <= NEAR for g in gains.values() for q in radii if q <= r)]
    share = mean_by(rows, "sign_of_exact", "radius")
    evidence = (
        f"weights reach at most {weights:.4f} of the bound over all tries, outputs {outputs:.4f}; two keys reach "
        f"{sharp:.6f}; the usual bound is {max(r['usual'] for r in rows):.1f} times larger for values with an offset. "
        f"Gained over predicted, sign rule {gains['sign_rule'][radii[0],].mean:.3f} at r = {radii[0]:g} and "
        f"{gains['sign_rule'][radii[-1],].mean:.3f} at {radii[-1]:g}, l2 {gains['l2'][radii[-1],].mean:.3f} there; the "
        f"sign rule gains {share[radii[-1],].mean:.3f} of the exact attack."
    )
    bounded = weights <= 1 + ROUNDING and outputs <= 1 + ROUNDING and abs(sharp - 1) <= 1e-6 and worse >= -ROUNDING
    if not bounded or not reach:
        return Verdict("does not hold", evidence)
    if reach[-1] == radii[-1]:
        return Verdict("holds", evidence)
    return Verdict("holds within", evidence, f"r <= {reach[-1]:g} for first-order gains; the bounds at every r")


def figure(rows: list[Row]) -> Figure:
    radii = sorted({row["radius"] for row in rows})
    lengths = sorted({row["n"] for row in rows})
    top = Line("bound", [radii[0], radii[-1]], [1.0, 1.0], kind="theory")
    reached = [series(only(rows, n=n), f"outputs, n = {n}", "radius", "outputs") for n in lengths[:3]]
    panels = [
        Panel(
            "How much of the bound is reached",
            "l_inf size of the perturbation",
            "change / bound",
            [*reached, series(rows, "weights of two keys", "radius", "two_keys"), top],
            log_x=True,
        ),
        Panel(
            "What an attack gains of its first-order prediction",
            "size of the perturbation",
            "gained / predicted",
            [
                series(rows, "sign rule, l_inf", "radius", "sign_rule"),
                series(rows, "exact, l_inf", "radius", "exact"),
                series(rows, "l_2", "radius", "l2"),
                Line("first order", [radii[0], radii[-1]], [1.0, 1.0], kind="theory"),
            ],
            log_x=True,
        ),
    ]
    return Figure(EXPERIMENT.question, panels, note(rows))


RADII = [0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0]
EXPERIMENT = Experiment(
    name="lipschitz",
    question="How far can weights and outputs move when the scores move by a bounded amount?",
    expected="Never beyond 2 tanh(r/2) in l_1 and diam(V) tanh(r/2); two keys reach the first; attacks gain what first "
    "order predicts for small r only.",
    ids=("M-ROB-6", "M-ROB-7", "M-ROB-8", "M-ROB-9", "M-ROB-10", "M-DER-1"),
    sizes={
        "tiny": Size(grid(n=[8, 64], radius=[0.01, 1.0], cases=[20]), seeds=2, seconds=0.02),
        "quick": Size(grid(n=[8, 64, 512], radius=RADII, cases=[40]), seeds=4, seconds=0.06),
        "full": Size(grid(n=[8, 64, 512], radius=RADII, cases=[100]), seeds=20, seconds=0.2),
    },
    run=run,
    judge=judge,
    figure=figure,
)
