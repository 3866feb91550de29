"""What each key receives, from attention itself; and the divergence of two attentions as a loss."""

from __future__ import annotations

import pytest
import torch

import partita
from partita.attn import ALiBi, alibi_slopes
from partita.errors import ShapeError, ValueRangeError
from tests import reference
from tests.tolerances import assert_exact


def operands(heads=4, key_heads=4, n_query=7, n_key=9, dim=3):
    query = torch.randn(2, heads, n_query, dim, dtype=torch.float64)
    key, value = (torch.randn(2, key_heads, n_key, dim, dtype=torch.float64) for _ in range(2))
    return query, key, value


def weights(query, key, visible=None, bias=None):
    return reference.probs(reference.score(query, key, scale=query.shape[-1] ** -0.5, visible=visible, bias=bias))


def test_received_comes_last_and_changes_nothing_else():
    """M-COL-1, read off the attention that was asked for."""
    query, key, value = operands()
    seen = torch.ones(7, 9, dtype=torch.bool).tril()
    plain, stats = partita.attention(query, key, value, is_causal=True, return_stats=True)
    out, received = partita.attention(query, key, value, is_causal=True, return_received=True)
    both = partita.attention(query, key, value, is_causal=True, return_stats=True, return_received=True)
    assert_exact(received, weights(query, key, seen).sum(-2))
    assert_exact(out, plain)
    assert len(both) == 3
    assert_exact(both[0], plain)
    assert_exact(both[1].entropy, stats.entropy)
    assert_exact(both[2], received)


def test_grouped_queries_give_key_heads():
    query, key, value = operands(key_heads=2)
    _, received = partita.attention(query, key, value, enable_gqa=True, return_received=True)
    dense = weights(query, reference.repeat_heads(key, 4)).unflatten(1, (2, 2)).sum((2, 3))
    assert_exact(received, dense)


def test_a_sink_takes_its_share_and_has_a_gradient():
    query, key, value = operands()
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    _, received = partita.attention(query, key, value, sink=sink, return_received=True)
    s = reference.score(query, key, scale=3**-0.5)
    share = torch.sigmoid(reference.log_partition(s) - sink[:, None])
    dense = (share[..., None] * reference.probs(s)).sum(-2)
    assert_exact(received.detach(), dense.detach())
    g = torch.randn_like(received)
    assert_exact(torch.autograd.grad(received, sink, g)[0], torch.autograd.grad(dense, sink, g)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_rule_of_positions_and_dropout(dropout):
    """Weights before dropout, with a bias that is never written out whole."""
    query, key, value = operands()
    rule = ALiBi(alibi_slopes(4))
    _, received = partita.attention(query, key, value, bias=rule, dropout_p=dropout, return_received=True)
    bias = rule.rows(slice(0, 7), 7, 9, query)
    assert_exact(received, weights(query, key, bias=bias).sum(-2))


def test_the_gradient_reaches_query_and_key():
    query, key, value = (x.requires_grad_() for x in operands())
    out, received = partita.attention(query, key, value, return_received=True)
    p = weights(query, key)
    g, h = torch.randn_like(out), torch.randn_like(received)
    ours = torch.autograd.grad((out * g).sum() + (received * h).sum(), (query, key, value))
    dense = torch.autograd.grad(((p @ value) * g).sum() + (p.sum(-2) * h).sum(), (query, key, value))
    for a, b in zip(ours, dense, strict=True):
        assert_exact(a, b)


def test_a_group_is_refused():
    query, key, value = operands()
    with pytest.raises(ValueRangeError, match="return_received needs every row in one process"):
        partita.attention(query, key, value, return_received=True, group=object())


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


def test_attention_divergence_says_what_is_wrong():
    query, key, _ = operands()
    with pytest.raises(ShapeError, match="sample_weight must broadcast to the rows"):
        partita.attention_divergence(query, key, query, key, sample_weight=torch.ones(3))
    with pytest.raises(ShapeError, match="as many queries and as many keys"):
        partita.attention_divergence(query, key, query, key[..., :5, :])
    with pytest.raises(ValueRangeError, match="reduction must be"):
        partita.attention_divergence(query, key, query, key, reduction="average")
