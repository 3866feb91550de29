"""Distillation between two heads: every kind, the losses' options, and no logits."""

from __future__ import annotations

import math

import pytest
import torch

import partita
from partita.engine.divergences import KINDS
from partita.errors import ShapeError, ValueRangeError
from partita.losses import distillation_loss, linear_cross_entropy, linear_distillation_loss
from tests import reference
from tests.tolerances import assert_exact

N, K, D, E = 11, 37, 5, 8


def heads(lead=(N,)):
    x, w = torch.randn(*lead, D, dtype=torch.float64), torch.randn(K, D, dtype=torch.float64)
    y, v = torch.randn(*lead, E, dtype=torch.float64), torch.randn(K, E, dtype=torch.float64)
    return x.requires_grad_(), w.requires_grad_(), y, v


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_every_kind_is_its_dense_formula_with_the_teacher_first(kind, temperature):
    """M-DIV-1 to M-DIV-4 with T^2 (M-TMP-4), for explicit logits and for heads; gradients to the student."""
    x, w, y, v = heads()
    a, b = (torch.randn(K, dtype=torch.float64) for _ in range(2))
    a.requires_grad_()
    student, teacher = x @ w.T + a, y @ v.T + b
    rows = temperature**2 * reference.divergence(teacher / temperature, student / temperature, kind, 0.3)
    options = {"kind": kind, "beta": 0.3, "temperature": temperature}
    both = {**options, "linear_bias": a, "teacher_bias": b}
    assert_exact(distillation_loss(student, teacher, **options).detach(), rows.mean().detach(), magnitude=10)
    assert_exact(linear_distillation_loss(x, w, y, v, **both, reduction="none").detach(), rows.detach(), magnitude=10)
    for reduction in ("mean", "sum"):
        ours = linear_distillation_loss(x, w, y, v, **both, reduction=reduction)
        dense = rows.mean() if reduction == "mean" else rows.sum()
        for p, q in zip(
            torch.autograd.grad(ours, (x, w, a)), torch.autograd.grad(dense, (x, w, a), retain_graph=True), strict=True
        ):
            assert_exact(p, q, magnitude=10)
    explicit = torch.autograd.grad(
        distillation_loss(student, teacher, **options, reduction="sum"), x, retain_graph=True
    )
    assert_exact(explicit[0], torch.autograd.grad(rows.sum(), x)[0], magnitude=10)


def test_ignored_rows_and_sample_weights():
    x, w, y, v = heads((2, N))
    target = torch.randint(0, K, (2, N))
    target[0, 3:7] = -100
    weight = torch.rand(2, N, dtype=torch.float64)
    kept = target != -100
    with torch.no_grad():
        x[0, 4] = math.nan  # an ignored row is not looked at
    rows = torch.where(kept, weight * reference.divergence(y @ v.T, torch.nan_to_num(x) @ w.T, "reverse"), 0.0)
    options = {"kind": "reverse", "target": target, "sample_weight": weight}
    assert_exact(linear_distillation_loss(x, w, y, v, **options, reduction="none").detach(), rows.detach())
    mean = linear_distillation_loss(x, w, y, v, **options)
    assert_exact(mean.detach(), (rows.sum() / weight[kept].sum()).detach())
    assert torch.autograd.grad(mean, x)[0].isfinite().all()
    nothing = linear_distillation_loss(x, w, y, v, target=torch.full((2, N), -100))
    assert nothing == 0


def test_distillation_compiles_into_one_graph():
    x, w, y, v = heads()
    target = torch.randint(0, K, (N,))
    target[2] = -100

    def loss(x, w):
        return linear_distillation_loss(x, w, y, v, kind="js", target=target)

    torch._dynamo.reset()
    compiled = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(x, w), (x, w))
    for a, b in zip(compiled, torch.autograd.grad(loss(x, w), (x, w)), strict=True):
        assert_exact(a, b)


def test_what_cannot_be_distilled_is_refused():
    x, w, y, v = heads()
    with pytest.raises(ShapeError, match="both heads must have the same number of classes; got 37 and 36"):
        linear_distillation_loss(x, w, y, v[:-1])
    with pytest.raises(ShapeError, match="input and teacher_input must have the same rows"):
        linear_distillation_loss(x, w, y[:-1], v)
    with pytest.raises(ShapeError, match="target must have one index per row"):
        linear_distillation_loss(x, w, y, v, target=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueRangeError, match="unknown kind 'kl'"):
        linear_distillation_loss(x, w, y, v, kind="kl")


def test_the_predicted_class_comes_with_the_loss():
    """M-COL-4: the first of the largest scores, from the pass of the loss; -1 where a row was ignored."""
    x, w, _, _ = heads()
    with torch.no_grad():
        w[3] *= 2 * w.norm(dim=-1).max() / w[3].norm()  # so long that no other class can score more along it
        w[7] = w[3]  # a tie, which the lower index wins
        x[0] = 10 * w[3]
    target = torch.randint(8, K, (N,))
    target[4] = -100
    target[5] = reference.argmax((x @ w.T).detach())[5]
    loss, stats = linear_cross_entropy(x, w, target, return_stats=True)
    assert isinstance(stats, partita.ClassStats) and isinstance(stats, partita.LossStats)
    expected = reference.argmax((x @ w.T).detach())
    expected[4] = -1
    assert stats.predicted[0] == 3
    assert torch.equal(stats.predicted, expected)
    assert torch.equal(stats.correct & (target != -100), stats.predicted == target)
    loss.backward()
    logits, dense = partita.cross_entropy((x @ w.T).detach(), target, return_stats=True)
    assert torch.equal(dense.predicted, expected) and logits.isfinite()
