"""A mistake is an error in the caller's words, or the documented value."""

from __future__ import annotations

import pytest
import torch

from partita.contrastive import (
    AbovePositive,
    Guide,
    Queue,
    alignment,
    clip_loss,
    info_nce_loss,
    nt_xent_loss,
    siglip_loss,
    supcon_loss,
    uniformity,
)
from partita.errors import BackendError, DtypeError, ShapeError, TargetError, ValueRangeError
from partita.losses import (
    cross_entropy,
    distillation_loss,
    focal_loss,
    linear_cross_entropy,
    mse_loss,
    nce_loss,
)

X, W, Y = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 1, 4, 2])
A, B = torch.randn(4, 3), torch.randn(4, 3)
Z = torch.randn(4, 5)


def classes(**changed):
    return lambda: linear_cross_entropy(**({"input": X, "linear_weight": W, "target": Y} | changed))


def pairs(**changed):
    return lambda: info_nce_loss(A, B, **changed)


CASES = {
    "target too large": (classes(target=Y + 1), TargetError, "0 <= target < 5"),
    "target negative": (classes(target=Y - 1), TargetError, "0 <= target < 5"),
    "target of floats": (classes(target=Y.float()), ShapeError, r"\(4, 5\).*target.long"),
    "target of the wrong length": (classes(target=Y[:3]), ShapeError, r"\(4,\)"),
    "features that differ": (classes(linear_weight=W[:, :2]), ShapeError, "input and linear_weight"),
    "dtypes that differ": (classes(linear_weight=W.double()), DtypeError, "input and linear_weight"),
    "bias of the wrong length": (classes(linear_bias=W[0]), ShapeError, "linear_bias"),
    "weight of the wrong length": (classes(weight=W[0]), ShapeError, "one number per class"),
    "smoothing above 1": (classes(label_smoothing=1.5), ValueRangeError, "label_smoothing"),
    "an unknown reduction": (classes(reduction="avg"), ValueRangeError, "'none', 'mean'"),
    "a negative z-loss": (classes(z_loss=-1.0), ValueRangeError, "z_loss"),
    "an infinite entropy weight": (classes(entropy_weight=float("inf")), ValueRangeError, "entropy_weight"),
    "a softcap of 0": (classes(softcap=0.0), ValueRangeError, "softcap"),
    "a negative shift": (classes(shift=-1), ValueRangeError, "shift"),
    "a shift without positions": (lambda: linear_cross_entropy(X[0], W, Y[0], shift=1), ShapeError, "shift"),
    "sample weights that do not fit": (classes(sample_weight=W[0]), ShapeError, "rows"),
    "scales that do not fit": (classes(scale=W[0]), ShapeError, "scale"),
    "an index to ignore among probabilities": (
        classes(target=torch.rand(4, 5), ignore_index=1),
        ValueRangeError,
        "ignore_index",
    ),
    "a group without its package": (classes(group=1), BackendError, "distributed"),
    "logits, target too large": (lambda: cross_entropy(Z, Y + 1), TargetError, "0 <= target < 5"),
    "logits, probabilities of another shape": (lambda: cross_entropy(Z, Z[:, :4]), ShapeError, "shape of input"),
    "focal, gamma negative": (lambda: focal_loss(Z, Y, gamma=-1.0), ValueRangeError, "gamma"),
    "focal, alpha of the wrong length": (lambda: focal_loss(Z, Y, alpha=torch.ones(4)), ShapeError, "alpha"),
    "focal of probabilities": (lambda: focal_loss(Z, Z), DtypeError, "class indices"),
    "squared error of what": (lambda: mse_loss(Z, Y, on="scores"), ValueRangeError, "'probabilities' or 'logits'"),
    "a target of -1": (classes(target=Y - 1), TargetError, "ignore_index"),
    "a bad target and class weights": (classes(target=Y + 1, weight=torch.ones(5)), TargetError, "0 <= target < 5"),
    "a module for its weight": (classes(linear_weight=torch.nn.Linear(3, 5)), DtypeError, "module.weight"),
    "no noise": (lambda: nce_loss(X[:, 0], X[:, :0], X[:, 0], X[:, :0]), ShapeError, "at least one noise"),
    "noise of another length": (lambda: nce_loss(X[:, 0], X[:3], X[:, 0], X[:3]), ShapeError, "noise_score"),
    "distilling at no temperature": (lambda: distillation_loss(Z, Z, temperature=0.0), ValueRangeError, "temperature"),
    "temperature 0": (pairs(temperature=0.0), ValueRangeError, "temperature"),
    "temperature negative": (lambda: nt_xent_loss(A, B, temperature=-0.1), ValueRangeError, "temperature"),
    "temperature tensor with 0": (pairs(temperature=torch.tensor(0.0)), ValueRangeError, "temperature"),
    "temperatures of another length": (pairs(temperature=torch.ones(3)), ShapeError, "one per row"),
    "pairs of different lengths": (lambda: info_nce_loss(A, B[:3]), ShapeError, "row i"),
    "a single vector": (lambda: info_nce_loss(A[0], B[0]), ShapeError, "matrix"),
    "negatives of other features": (pairs(negative_keys=B[:, :2]), ShapeError, r"\(m, 3\)"),
    "paired negatives without pairs": (pairs(negative_keys=B, negative_mode="paired"), ShapeError, r"\(4, m, 3\)"),
    "an unknown mode": (pairs(negative_mode="both"), ValueRangeError, "negative_mode"),
    "symmetric with other negatives": (pairs(negative_keys=B, symmetric=True), ValueRangeError, "symmetric"),
    "symmetric with temperatures": (
        pairs(temperature=torch.ones(4), symmetric=True),
        ValueRangeError,
        "one temperature",
    ),
    "labels of another length": (pairs(labels=Y[:3]), ShapeError, "one entry per row"),
    "a rule that is none": (pairs(exclude=lambda s: s), DtypeError, "Exclusion"),
    "a guide of another size": (pairs(exclude=Guide(A[:3], B)), ShapeError, "guide"),
    "rule and queue": (pairs(exclude=AbovePositive(), queue=Queue(2, 3)), ValueRangeError, "exclude"),
    "a queue of other features": (pairs(queue=Queue(2, 5)), ShapeError, "queue"),
    "a queue without room": (lambda: Queue(0, 3), ValueRangeError, "size"),
    "a push of other features": (lambda: Queue(4, 3).push(torch.ones(2, 5)), ShapeError, "keys"),
    "a push without labels": (lambda: Queue(4, 3, labelled=True).push(A), ShapeError, "label"),
    "towers of different lengths": (lambda: clip_loss(A, B[:3], 1.0), ShapeError, "image_features"),
    "sigmoid towers of different lengths": (lambda: siglip_loss(A, B[:3], 1.0), ShapeError, "image_features"),
    "supcon labels of another length": (lambda: supcon_loss(A, Y[:3]), ShapeError, "labels"),
    "supcon references without labels": (lambda: supcon_loss(A, Y, ref_emb=B), ShapeError, "belong together"),
    "alignment off the sphere": (lambda: alignment(3 * A, B, normalize=False), ValueRangeError, "unit vectors"),
    "uniformity off the sphere": (lambda: uniformity(3 * A, normalize=False), ValueRangeError, "unit vectors"),
    "uniformity of one point": (lambda: uniformity(A[:1]), ShapeError, "two vectors"),
    "a contrastive group": (pairs(group=1), BackendError, "distributed"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named(name):
    call, kind, words = CASES[name]
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: info_nce_loss(a, b),
        lambda a, b: info_nce_loss(a, b, symmetric=True),
        lambda a, b: info_nce_loss(a, b, decoupled=True),
        lambda a, b: clip_loss(a, b, 2.0),
        lambda a, b: siglip_loss(a, b, 2.0),
        lambda a, b: nt_xent_loss(a, b),
        lambda a, b: supcon_loss(a, torch.zeros(0).long()),
        lambda a, b: linear_cross_entropy(a, W, torch.zeros(0).long()),
        lambda a, b: cross_entropy(a, torch.zeros(0).long()),
        lambda a, b: focal_loss(a, torch.zeros(0).long()),
    ],
)
def test_an_empty_batch_is_zero_and_connected(loss):
    a, b = torch.zeros(0, 3, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    value = loss(a, b)
    value.backward()
    assert value.item() == 0.0


def test_unit_vectors_are_accepted_as_they_are():
    u = torch.nn.functional.normalize(torch.randn(6, 4), dim=-1)
    torch.testing.assert_close(uniformity(u, normalize=False), uniformity(u))
    assert alignment(u, u, normalize=False).item() == 0.0
