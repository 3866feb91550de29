"""Modules hold settings and parameters; what they compute is what the functions compute."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from partita import contrastive, losses
from partita import nn as pnn
from tests.losses.checks import assert_equal_with_gradients, leaf


def test_linear_cross_entropy_loss_is_torchs_module():
    """Same constructor, same state dict, same value and gradient, several outputs too."""
    if not hasattr(torch.nn, "LinearCrossEntropyLoss"):
        pytest.skip("this torch has no such module")
    weight = torch.rand(10, dtype=torch.float64)
    options = {"out_features": (4, 3), "bias": True, "dtype": torch.float64, "weight": weight, "ignore_index": 2}
    theirs, ours = torch.nn.LinearCrossEntropyLoss(5, 10, **options), pnn.LinearCrossEntropyLoss(5, 10, **options)
    ours.load_state_dict(theirs.state_dict())
    x, target = leaf(2, 5), torch.randint(10, (2, 4, 3))
    assert_equal_with_gradients(ours(x, target), theirs(x, target), (x,))


def test_a_tied_language_model_head():
    """M-LOSS-11: the embedding is the class matrix, tokens are their own targets."""
    embedding = torch.nn.Embedding(11, 5)
    head = pnn.LinearCrossEntropyLoss(5, 11, shift=1, return_stats=True)
    head.linear.weight = embedding.weight
    tokens = torch.randint(11, (3, 8))
    hidden = embedding(tokens)
    loss, stats = head(hidden, tokens)
    theirs = F.cross_entropy((hidden @ embedding.weight.mT)[:, :-1].movedim(-1, 1), tokens[:, 1:])
    torch.testing.assert_close(loss, theirs)
    assert stats.nll.shape == (3, 7)


def test_the_other_classification_modules():
    z, y, p = torch.randn(9, 5), torch.randint(5, (9,)), torch.rand(9, 5).softmax(-1)
    alpha = torch.rand(5)
    pairs = [
        (pnn.CrossEntropyLoss(alpha, label_smoothing=0.1)(z, y), F.cross_entropy(z, y, alpha, label_smoothing=0.1)),
        (pnn.FocalLoss(1.5, alpha)(z, y), losses.focal_loss(z, y, gamma=1.5, alpha=alpha)),
        (pnn.FocalLoss(alpha=0.25)(z, y), losses.focal_loss(z, y, alpha=0.25)),
        (pnn.MSELoss(on="logits")(z, y), losses.mse_loss(z, y, on="logits")),
        (pnn.MAELoss()(z, p), losses.mae_loss(z, p)),
        (pnn.NCELoss()(z[:, 0], z, z[:, 1], -z), losses.nce_loss(z[:, 0], z, z[:, 1], -z)),
        (pnn.DistillationLoss(2.0)(z, -z), losses.distillation_loss(z, -z, temperature=2.0)),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)
    assert "alpha" in pnn.FocalLoss(1.5, alpha).state_dict()


def test_a_learned_temperature_is_kept_by_its_logarithm():
    a, b = torch.randn(9, 5), torch.randn(9, 5)
    module = pnn.InfoNCELoss(0.2, learnable=True, symmetric=True)
    loss = module(a, b)
    torch.testing.assert_close(loss, contrastive.info_nce_loss(a, b, temperature=0.2, symmetric=True))
    loss.backward()
    assert module.log_temperature.grad.abs() > 0
    assert pnn.InfoNCELoss(0.2).log_temperature is None


def test_a_module_feeds_its_queue_while_training():
    module = pnn.InfoNCELoss(0.2, queue=contrastive.Queue(6, 5))
    a, b = torch.randn(4, 5), torch.randn(4, 5)
    first = module(a, b)
    torch.testing.assert_close(first, contrastive.info_nce_loss(a, b, temperature=0.2))
    assert len(module.queue) == 4
    assert module(a, b) > first
    module.eval()(a, b)
    assert len(module.queue) == 6
    assert any(name.startswith("queue.") for name in module.state_dict())


def test_towers_learn_a_capped_scale():
    a, b = F.normalize(torch.randn(9, 5), dim=-1), F.normalize(torch.randn(9, 5), dim=-1)
    clip = pnn.ClipLoss(1 / 0.07)
    torch.testing.assert_close(clip(a, b), contrastive.clip_loss(a, b, 1 / 0.07))
    with torch.no_grad():
        clip.log_scale.fill_(math.log(1e4))
    assert math.isclose(clip.scale().item(), 100.0, rel_tol=1e-5)
    sigmoid = pnn.SigLipLoss()
    sigmoid(a, b).backward()
    assert sigmoid.log_scale.grad is not None and sigmoid.logit_bias.grad is not None
    torch.testing.assert_close(sigmoid(a, b), contrastive.siglip_loss(a, b, 10.0, -10.0))


def test_views_and_labels():
    a, b, labels = torch.randn(6, 5), torch.randn(6, 5), torch.tensor([0, 0, 1, 1, 2, 2])
    torch.testing.assert_close(pnn.NTXentLoss(0.3)(a, b), contrastive.nt_xent_loss(a, b, temperature=0.3))
    torch.testing.assert_close(pnn.SupConLoss(0.3)(a, labels), contrastive.supcon_loss(a, labels, temperature=0.3))
