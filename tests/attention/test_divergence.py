"""The divergence of two attentions as a loss."""

from __future__ import annotations

import pytest
import torch

import partita
from tests import reference
from tests.tolerances import assert_exact


def operands(heads=4, key_heads=4, n_query=7, n_key=9, dim=3):
    query = torch.randn(2, heads, n_query, dim, dtype=torch.float64)
    key, value = (torch.randn(2, key_heads, n_key, dim, dtype=torch.float64) for _ in range(2))
    return query, key, value


def weights(query, key, visible=None, bias=None):
    return reference.probs(reference.score(query, key, scale=query.shape[-1] ** -0.5, visible=visible, bias=bias))


# ---- distilling attention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forward", "reverse", "js", "hellinger", "cross_entropy"])
def test_attention_divergence_is_that_of_its_weights(kind):
    query, key, _ = operands()
    teacher_query, teacher_key, _ = operands(dim=5)
    seen = torch.ones(7, 9, dtype=torch.bool).tril()
    weight = torch.rand(7, dtype=torch.float64)
    s = reference.score(query, key, scale=3**-0.5, visible=seen)
    t = reference.score(teacher_query, teacher_key, scale=0.3, visible=seen)
    rows = weight * reference.divergence(t, s, kind, 0.3)
    options = {"is_causal": True, "teacher_scale": 0.3, "kind": kind, "beta": 0.3, "sample_weight": weight}

    def loss(reduction):
        return partita.attention_divergence(query, key, teacher_query, teacher_key, reduction=reduction, **options)

    assert_exact(loss("none"), rows)
    assert_exact(loss("sum"), rows.sum())
    assert_exact(loss("mean"), rows.sum() / (8 * weight.sum()))


def test_attention_divergence_trains_the_student_alone():
    query, key, _ = (x.requires_grad_() for x in operands(key_heads=2))
    teacher = [x.requires_grad_() for x in operands(key_heads=2, dim=5)[:2]]
    loss = partita.attention_divergence(query, key, *teacher, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(loss, (query, key, *teacher), allow_unused=True)
    seen = torch.ones(7, 9, dtype=torch.bool).tril()
    s = reference.score(query, reference.repeat_heads(key, 4), scale=3**-0.5, visible=seen)
    t = reference.score(teacher[0], reference.repeat_heads(teacher[1], 4), scale=5**-0.5, visible=seen)
    dense = torch.autograd.grad(reference.divergence(t.detach(), s).mean(), (query, key))
    assert_exact(grads[0], dense[0])
    assert_exact(grads[1], dense[1])
    assert grads[2] is None and grads[3] is None
