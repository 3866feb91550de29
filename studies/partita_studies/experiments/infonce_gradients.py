"""Is InfoNCE cross entropy, and which of the printed gradients of its keys are right?

    printed   d/dk_+ = (q - E[k]) P_+ / t          d/dk_m = (E[k] - q) P_m / t
    right     d/dk_+ = -(1 - P_+) q / t            d/dk_m = P_m q / t

Expected: the loss equals cross entropy over its candidates and the right gradients equal autograd's, both to rounding;
the printed ones are wrong by an amount of the order of the gradient itself at every temperature, and a descent step
along the printed gradient of the positive raises the loss.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import partita
from partita.lab.figure import Figure, Panel
from partita.theory.contrast import info_nce, info_nce_batch_gradients, info_nce_gradients
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by
from partita_studies.experiments._series import note, only, series

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


def run(settings: Settings, seed: int) -> Iterable[Row]:
    n, temperature, dim = int(settings["candidates"]), float(settings["temperature"]), 16
    source = torch.Generator().manual_seed(seed)
    draw = torch.randn(settings["draws"], n + 1, dim, generator=source, dtype=torch.float64)
    for item, vectors in enumerate(normalize(draw, dim=-1)):
        query = vectors[0].clone().requires_grad_()
        keys = torch.cat([normalize(vectors[1:2] + vectors[:1], dim=-1), vectors[2:]]).requires_grad_()
        loss = info_nce(query, keys, temperature=temperature)
        by_query, by_keys = torch.autograd.grad(loss, (query, keys))
        with torch.no_grad():
            right = info_nce_gradients(query, keys, temperature=temperature)
            wrong = printed(query, keys, temperature)
            face = torch.as_tensor(
                partita.info_nce_loss(query[None], keys[:1], keys[1:], temperature=temperature, normalize=False)
            )
            parity = cross_entropy((keys @ query / temperature)[None], torch.zeros(1, dtype=torch.int64))
            yield {
                **settings,
                "seed": seed,
                "item": item,
                "loss": float(loss),
                "parity": max(abs(float(face) - float(loss)), abs(float(parity) - float(loss))),
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
    off = {name: mean_by(rows, name, "candidates", "temperature") for name in ("printed_positive", "printed_negative")}
    least = {name: min(spread.mean for spread in found.values()) for name, found in off.items()}
    most = {name: max(spread.mean for spread in found.values()) for name, found in off.items()}
    rises = sum(row["printed_rises"] for row in rows) / len(rows)
    says = (
        f"InfoNCE against cross entropy {parity:.1e} nats, right gradients against autograd {worst:.1e} (relative, "
        f"worst of {len(rows)}). Printed: positive wrong by {least['printed_positive']:.2f} to "
        f"{most['printed_positive']:.2f} of the gradient, negatives by "
        f"{least['printed_negative']:.2f} to {most['printed_negative']:.2f} (means per "
        f"setting); a step along the printed pull raises the loss in {rises:.0%} of cases, along the right one in "
        f"{sum(row['right_rises'] for row in rows) / len(rows):.0%}."
    )
    if worst > ROUNDING or parity > ROUNDING or rises <= 0.5:
        return Verdict("does not hold", says)
    settings = off["printed_positive"]
    refuted = [key for key in settings if min(found[key].mean for found in off.values()) > WRONG]
    if len(refuted) == len(settings):
        return Verdict("holds", says)
    if not refuted:
        return Verdict("does not hold", says)
    return Verdict("holds within", says, f"{len(refuted)} of {len(settings)} settings; elsewhere a printed one is near")


def figure(rows: list[Row]) -> Figure:
    sizes = sorted({row["candidates"] for row in rows})[:5]
    panels = [
        Panel(
            title,
            "temperature",
            "relative error",
            [series(only(rows, candidates=n), f"{n} candidates", "temperature", name) for n in sizes],
            log_x=True,
            log_y=log_y,
        )
        for title, name, log_y in (
            ("Printed gradient of the positive", "printed_positive", True),
            ("Printed gradient of the negatives", "printed_negative", False),
            ("Right gradients of the keys", "right_keys", True),
        )
    ]
    panels.append(
        Panel(
            "Share of steps along the pull that raise the loss",
            "temperature",
            "share",
            [
                series(rows, "printed", "temperature", "printed_rises"),
                series(rows, "right", "temperature", "right_rises"),
            ],
            log_x=True,
        )
    )
    return Figure(EXPERIMENT.question, panels, note(rows, "draws and seeds"))


EXPERIMENT = Experiment(
    name="infonce_gradients",
    question="Is InfoNCE cross entropy, and are the printed gradients of its keys right?",
    expected="It is, to rounding; the gradients of the keys as printed in the notes are wrong by the order of the "
    "gradient itself at every temperature and raise the loss; those of the errata equal autograd.",
    ids=("M-INC-1", "M-INC-3", "M-INC-4", "M-GIB-7"),
    sizes={
        "tiny": Size(grid(candidates=[8], temperature=[0.1, 1.0], draws=[4]), seeds=2, seconds=0.1),
        "quick": Size(grid(candidates=[8, 64, 512], temperature=[0.05, 0.2, 1.0], draws=[20]), seeds=5, seconds=0.12),
        "full": Size(
            grid(candidates=[2, 8, 64, 512, 2048], temperature=[0.02, 0.05, 0.1, 0.2, 0.5, 1.0], draws=[40]),
            seeds=10,
            seconds=2.0,
        ),
    },
    run=run,
    judge=judge,
    figure=figure,
)
