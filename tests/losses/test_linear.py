"""What linear_cross_entropy has beyond torch's, against dense formulas."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

import partita
from partita.losses import LossStats, linear_cross_entropy
from tests.losses.checks import assert_equal_with_gradients, leaf


def capped(z, cap):
    return cap * torch.tanh(z / cap)


def test_scale_per_row_softcap_and_bias_inside_the_cap():
    x, w, b, scale = leaf(9, 5), leaf(7, 5), leaf(7), (torch.rand(9, dtype=torch.float64) + 0.5).requires_grad_()
    target = torch.randint(7, (9,))
    z = capped(scale[:, None] * (x @ w.mT) + b, 3.0)
    ours = linear_cross_entropy(x, w, target, linear_bias=b, scale=scale, softcap=3.0, reduction="none")
    assert_equal_with_gradients(ours, F.cross_entropy(z, target, reduction="none"), (x, w, b, scale))


@pytest.mark.parametrize("soft", [False, True])
def test_smoothing_under_a_softcap_looks_at_every_score(soft):
    x, w, b = leaf(9, 5), leaf(7, 5), leaf(7)
    target = torch.rand(9, 7).double() if soft else torch.randint(7, (9,))
    weight = torch.rand(7).double()
    z = capped(0.7 * (x @ w.mT) + b, 2.0)
    options = {"weight": weight, "label_smoothing": 0.2, "reduction": "none"}
    ours = linear_cross_entropy(x, w, target, linear_bias=b, scale=0.7, softcap=2.0, **options)
    assert_equal_with_gradients(ours, F.cross_entropy(z, target, **options), (x, w, b))


def test_smoothing_under_a_softcap_goes_a_few_rows_at_a_time(monkeypatch):
    from partita import recompute

    monkeypatch.setattr(recompute, "_SMALL", 1)
    monkeypatch.setattr(recompute, "_NUMBERS", 20)
    test_smoothing_under_a_softcap_looks_at_every_score(True)
    test_smoothing_under_a_softcap_looks_at_every_score(False)


def test_z_loss_and_entropy_weight_keep_their_sign():
    """M-INF-5: a positive entropy weight rewards entropy."""
    x, w, target = leaf(9, 5), leaf(7, 5), torch.randint(7, (9,))
    z = x @ w.mT
    p = z.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    dense = F.cross_entropy(z, target, reduction="none") + 0.1 * z.logsumexp(-1) ** 2 - 0.3 * entropy
    ours = linear_cross_entropy(x, w, target, z_loss=0.1, entropy_weight=0.3, reduction="none")
    assert_equal_with_gradients(ours, dense, (x, w))
    plain, bonus = (linear_cross_entropy(x, w, target, entropy_weight=e) for e in (0.0, 0.3))
    assert bonus < plain


def test_sample_weights_multiply_every_term_and_divide_the_mean():
    x, w, target = leaf(9, 5), leaf(7, 5), torch.randint(7, (9,))
    sample = torch.rand(9, dtype=torch.float64).requires_grad_()
    z = x @ w.mT
    rows = F.cross_entropy(z, target, reduction="none") + 0.1 * z.logsumexp(-1) ** 2
    ours = linear_cross_entropy(x, w, target, z_loss=0.1, sample_weight=sample)
    assert_equal_with_gradients(ours, (sample * rows).sum() / sample.sum(), (x, w, sample))


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("shift", [1, 2])
def test_shift_predicts_the_next_tokens(ignored, shift):
    """M-LOSS-11: position t predicts token t + shift, and equals the sliced call."""
    x, w, tokens = leaf(3, 8, 5), leaf(11, 5), torch.randint(11, (3, 8))
    if ignored:
        tokens[1, 4:] = -100
    scale = torch.rand(3, 8, dtype=torch.float64).requires_grad_()
    logits = (scale[..., None] * (x @ w.mT))[:, :-shift].movedim(-1, 1)
    for reduction in ("none", "mean", "sum"):
        theirs = F.cross_entropy(logits, tokens[:, shift:], reduction=reduction)
        ours = linear_cross_entropy(x, w, tokens, shift=shift, scale=scale, reduction=reduction)
        assert_equal_with_gradients(ours, theirs, (x, w, scale))


def test_a_shift_copies_no_hidden_states(monkeypatch):
    """The rows the engine sees share memory with the input."""
    x, w, tokens = torch.randn(3, 8, 5), torch.randn(11, 5), torch.randint(11, (3, 8))
    seen = []
    face = importlib.import_module("partita.losses.linear")
    original = face.build

    def spy(query, key, *given, **options):
        seen.append(query)
        return original(query, key, *given, **options)

    monkeypatch.setattr(face, "build", spy)
    linear_cross_entropy(x, w, tokens, shift=1)
    assert seen[0].data_ptr() == x.data_ptr()
    assert seen[0].shape == (3, 7, 5)


def test_a_masked_token_head_is_one_call():
    """M-LOSS-11: only the masked positions are computed, whatever lies at the others."""
    x, w, tokens = leaf(3, 8, 5), leaf(11, 5), torch.randint(11, (3, 8))
    masked = torch.rand(3, 8) < 0.4
    masked[0, 0] = True
    target = torch.where(masked, tokens, -100)
    with torch.no_grad():
        x[~masked] = torch.nan  # dropped before the pass: it cannot spoil anything
    loss = linear_cross_entropy(x, w, target)
    theirs = F.cross_entropy(x[masked] @ w.mT, tokens[masked])
    torch.testing.assert_close(loss, theirs)
    loss.backward()
    assert w.grad.isfinite().all()
    assert (x.grad[~masked] == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_left_gives_zero_and_keeps_the_graph(reduction, rows):
    x, w = leaf(rows, 5), leaf(7, 5)
    loss = linear_cross_entropy(x, w, torch.full((rows,), -100), reduction=reduction, label_smoothing=0.1)
    loss.sum().backward()
    assert (loss == 0).all()
    assert (x.grad == 0).all() and (w.grad == 0).all()


def test_statistics_are_those_of_the_dense_rows():
    x, w, target = leaf(4, 9, 5), leaf(7, 5), torch.randint(7, (4, 9))
    target[2, :5] = -100
    loss, stats = linear_cross_entropy(x, w, target, return_stats=True)
    assert isinstance(stats, partita.Stats) and isinstance(stats, LossStats)
    kept = target != -100
    z = (x @ w.mT)[kept]
    y = target[kept]
    p = z.softmax(-1)
    expected = {
        "log_partition": z.logsumexp(-1),
        "entropy": -(p * p.log()).sum(-1),
        "mean_score": (p * z).sum(-1),
        "score_variance": (p * z * z).sum(-1) - (p * z).sum(-1) ** 2,
        "max_score": z.amax(-1),
        "visible": torch.full_like(z[:, 0], 7),
        "target_rank": (z > z.gather(1, y[:, None])).sum(-1),
        "correct": z.argmax(-1) == y,
        "confidence": p.amax(-1),
        "nll": F.cross_entropy(z, y, reduction="none"),
    }
    for name, value in expected.items():
        field = getattr(stats, name)
        assert field.shape == target.shape
        torch.testing.assert_close(field[kept], value, check_dtype=False)
    assert (stats.visible[~kept] == 0).all() and (stats.target_rank[~kept] == -1).all()
    assert (stats.log_partition[~kept] == -torch.inf).all()
    torch.testing.assert_close(loss, F.cross_entropy(z, y))
    torch.autograd.grad(stats.entropy.sum(), (x, w))  # differentiable


def test_statistics_of_probability_targets_name_the_likeliest_class():
    x, w = leaf(9, 5), leaf(7, 5)
    target = torch.rand(9, 7).double()
    loss, stats = linear_cross_entropy(x, w, target, return_stats=True)
    torch.testing.assert_close(loss, F.cross_entropy(x @ w.mT, target))
    assert (stats.correct == ((x @ w.mT).argmax(-1) == target.argmax(-1))).all()


def test_several_output_dimensions_keep_their_statistics():
    x, w = leaf(9, 5), leaf(7, 2, 3, 5)
    target = torch.randint(7, (9, 2, 3))
    target[0, 1] = -100
    z = torch.einsum("ni,cabi->ncab", x, w)
    ours, stats = linear_cross_entropy(x, w, target, return_stats=True)
    assert_equal_with_gradients(ours, F.cross_entropy(z, target), (x, w))
    kept = target != -100
    torch.testing.assert_close(stats.log_partition, torch.where(kept, z.logsumexp(1), -torch.inf))


def test_compiles_as_one_graph():
    """Rows cannot be dropped while tracing: they count 0 instead."""
    x, w, target = leaf(9, 5), leaf(7, 5), torch.randint(7, (9,))
    target[3] = -100

    def loss(a, b):
        return linear_cross_entropy(a, b, target, label_smoothing=0.1, z_loss=0.01)

    run = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_equal_with_gradients(run(x, w), loss(x, w), (x, w))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_any_integers_name_classes(dtype):
    x, w, target = leaf(9, 5), leaf(7, 5), torch.randint(7, (9,))
    weight = torch.rand(7, dtype=torch.float64)
    theirs = F.cross_entropy(x @ w.mT, target, weight)
    torch.testing.assert_close(linear_cross_entropy(x, w, target.to(dtype), weight=weight), theirs)
