"""InfoNCE as cross entropy over its candidates, and the gradients of its keys.

printed   d/dk_+ = (q - E[k]) P_+ / t          d/dk_m = (E[k] - q) P_m / t
right     d/dk_+ = -(1 - P_+) q / t            d/dk_m = P_m q / t
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import partita
from partita_theory.contrast import info_nce, info_nce_batch_gradients, info_nce_gradients
from partita_theory.experiment import Size, experiment, grid
from partita_theory.figure import Panel
from partita_theory.results import Row, columns, distinct, lines, mean_by, note
from partita_theory.verdict import Verdict, settle

ROUNDING = 1e-9  # float64, relative
WRONG = 0.1  # a gradient off by a tenth of its length is not that gradient
STEP = 1e-3


def printed(query: Tensor, keys: Tensor, temperature: float) -> Tensor:  # (n, dim)
    """Equations (4.4.15) and (4.4.16) as they stand in the notes."""
    p = torch.softmax(keys @ query / temperature, -1)
    mean = p @ keys
    out = p[:, None] * (mean - query)
    out[0] = p[0] * (query - mean)
    return out / temperature


def measure(seed: int, candidates: int, temperature: float, draws: int) -> Iterable[Row]:
    source = torch.Generator().manual_seed(seed)
    draw = torch.randn(draws, candidates + 1, 16, generator=source, dtype=torch.float64)
    for item, vectors in enumerate(normalize(draw, dim=-1)):
        query = vectors[0].clone().requires_grad_()
        keys = torch.cat([normalize(vectors[1:2] + vectors[:1], dim=-1), vectors[2:]]).requires_grad_()
        loss = info_nce(query, keys, temperature=temperature)
        by_query, by_keys = torch.autograd.grad(loss, (query, keys))
        with torch.no_grad():
            right = info_nce_gradients(query, keys, temperature=temperature)
            wrong = printed(query, keys, temperature)
            face = partita.info_nce_loss(query[None], keys[:1], keys[1:], temperature=temperature, normalize=False)
            parity = cross_entropy((keys @ query / temperature)[None], torch.zeros(1, dtype=torch.int64))
            yield {
                "item": item,
                "loss": float(loss),
                "parity": max(abs(float(torch.as_tensor(x)) - float(loss)) for x in (face, parity)),
                "right_query": _off(right.query, by_query),
                "right_keys": _off(right.keys, by_keys),
                "printed_positive": _off(wrong[0], by_keys[0]),
                "printed_negative": _off(wrong[1:], by_keys[1:]),
                "printed_rises": float(_after(query, keys, wrong[0], temperature) > float(loss)),
                "right_rises": float(_after(query, keys, right.keys[0], temperature) > float(loss)),
                "right_batch": _batch_off(vectors, temperature),
            }


def _off(given: Tensor, true: Tensor) -> float:
    return float((given - true).norm() / true.norm().clamp(min=1e-300))


def _after(query: Tensor, keys: Tensor, gradient: Tensor, temperature: float) -> float:
    """The loss after a short step of the positive against this gradient, the same length for both formulas."""
    moved = keys.clone()
    moved[0] -= STEP * gradient / gradient.norm().clamp(min=1e-300)
    return float(info_nce(query, moved, temperature=temperature))


def _batch_off(vectors: Tensor, temperature: float) -> float:
    """The in-batch form: each vector paired with a turned copy of itself."""
    with torch.enable_grad():
        q, k = vectors.clone().requires_grad_(), vectors.roll(1, -1).clone().requires_grad_()
        loss = torch.as_tensor(partita.info_nce_loss(q, k, temperature=temperature, normalize=False))
        by_q, by_k = torch.autograd.grad(loss, (q, k))
    right = info_nce_batch_gradients(q.detach(), k.detach(), temperature=temperature)
    return max(_off(right.queries, by_q), _off(right.keys, by_k))


def judge(rows: list[Row]) -> Verdict:
    worst = max(max(row["right_query"], row["right_keys"], row["right_batch"]) for row in rows)
    parity = max(row["parity"] for row in rows)
    off = [mean_by(rows, f"printed_{side}", "candidates", "temperature") for side in ("positive", "negative")]
    positive, negative = (sorted(spread.mean for spread in found.values()) for found in off)
    rises, falls = (sum(row[f"{name}_rises"] for row in rows) / len(rows) for name in ("printed", "right"))
    says = (
        f"InfoNCE against cross entropy {parity:.1e} nats, right gradients against autograd {worst:.1e} (relative, "
        f"worst of {len(rows)}). Printed: positive wrong by {positive[0]:.2f} to {positive[-1]:.2f} of the gradient, "
        f"negatives by {negative[0]:.2f} to {negative[-1]:.2f} (means per setting); a step along the printed pull "
        f"raises the loss in {rises:.0%} of cases, along the right one in {falls:.0%}."
    )
    refuted = [key for key in off[0] if min(found[key].mean for found in off) > WRONG]
    exact = worst <= ROUNDING and parity <= ROUNDING
    within = f"{len(refuted)} of {len(off[0])} settings; elsewhere a printed one is near"
    holds = exact and rises > 0.5 and bool(refuted)
    return settle(says, holds=holds, whole=len(refuted) == len(off[0]), within=within)


def panels(rows: list[Row]) -> list[Panel]:
    sizes = distinct(rows, "candidates")[:5]
    positive, negative, right = (
        lines(rows, "temperature", y, "candidates", sizes, "{} candidates")
        for y in ("printed_positive", "printed_negative", "right_keys")
    )
    rises = columns(rows, "temperature", {"printed": "printed_rises", "right": "right_rises"})
    x, y = "temperature", "relative error"
    return [
        Panel("Printed gradient of the positive", x, y, positive, log_x=True, log_y=True),
        Panel("Printed gradient of the negatives", x, y, negative, log_x=True),
        Panel("Right gradients of the keys", x, y, right, log_x=True, log_y=True),
        Panel("Share of steps along the pull that raise the loss", x, "share", rises, log_x=True),
    ]


FULL = grid(candidates=[2, 8, 64, 512, 2048], temperature=[0.02, 0.05, 0.1, 0.2, 0.5, 1.0], draws=40)
EXPERIMENT = experiment(
    __name__,
    question="Is InfoNCE cross entropy, and are the printed gradients of its keys right?",
    expected="It is, to rounding; the gradients of the keys as printed in the notes are wrong by the order of the "
    "gradient itself at every temperature and raise the loss; those of the errata equal autograd.",
    ids=("M-INC-1", "M-INC-3", "M-INC-4", "M-GIB-7"),
    tiny=Size(grid(candidates=8, temperature=[0.1, 1.0], draws=4), seeds=2, seconds=0.1),
    quick=Size(grid(candidates=[8, 64, 512], temperature=[0.05, 0.2, 1.0], draws=20), seeds=5, seconds=0.12),
    full=Size(FULL, seeds=10, seconds=2.0),
    note=lambda rows: note(rows, "draws and seeds"),
)
