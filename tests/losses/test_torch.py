"""Equal to torch in value and gradient, float64, 1e-10, on every sample its own tests use."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from partita.losses import cross_entropy, linear_cross_entropy
from tests.losses.checks import assert_equal_with_gradients, leaf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it imports its test helpers
    from torch.testing._internal.common_methods_invocations import op_db

needs_linear = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no such function")


def samples(name: str, variant: str = "") -> list:
    found = [op for op in op_db if op.name == f"nn.functional.{name}" and op.variant_test_name == variant]
    torch.manual_seed(0)
    return [s for op in found for s in op.sample_inputs("cpu", torch.float64, requires_grad=True)]


def leaves(*things: object) -> list[torch.Tensor]:
    return [x for x in things if isinstance(x, torch.Tensor) and x.requires_grad]


def test_cross_entropy_on_torchs_samples():
    """M-LOSS-1, M-LOSS-7: class indices and probabilities, weights, all reductions, any number of dimensions."""
    found = samples("cross_entropy")
    for sample in found:
        theirs = F.cross_entropy(sample.input, *sample.args, **sample.kwargs)
        ours = cross_entropy(sample.input, *sample.args, **sample.kwargs)
        assert_equal_with_gradients(ours, theirs, leaves(sample.input, *sample.args))
    assert len(found) >= 21


@needs_linear
@pytest.mark.parametrize("variant", ["", "chunked", "chunked_none"])
def test_linear_cross_entropy_on_torchs_samples(variant):
    """Class indices and probabilities, matrices and (n_class, d_1, ..., dim) weights; options choose how, not what."""
    found = samples("linear_cross_entropy", variant)
    for sample in found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the samples its chunks cannot do
            theirs = F.linear_cross_entropy(sample.input, *sample.args, **sample.kwargs)
        given = {name: x for name, x in sample.kwargs.items() if name != "options"}
        ours = linear_cross_entropy(sample.input, *sample.args, **given)
        assert_equal_with_gradients(ours, theirs, leaves(sample.input, *sample.args, *given.values()))
    assert len(found) >= 15


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
def test_label_smoothing_has_torchs_semantics(soft, weighted, reduction, bias):
    """M-LOSS-9, also with class weights, where torch leaves the samples out."""
    x, w = leaf(13, 5), leaf(7, 5)
    b = leaf(7) if bias else None
    target = torch.rand(13, 7, dtype=torch.float64).requires_grad_() if soft else torch.randint(7, (13,))
    if not soft:
        target[[2, 5]] = -100
    weight = torch.rand(7, dtype=torch.float64) + 0.1 if weighted else None
    options = {"weight": weight, "reduction": reduction, "label_smoothing": 0.3}
    logits = F.linear(x, w, b)
    theirs = F.cross_entropy(logits, target, **options)
    params = leaves(x, w, b, target)
    assert_equal_with_gradients(linear_cross_entropy(x, w, target, linear_bias=b, **options), theirs, params)
    assert_equal_with_gradients(cross_entropy(logits, target, **options), theirs, params)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ignored_rows_equal_torchs(reduction):
    x, w = leaf(3, 11, 5), leaf(7, 5)
    target = torch.randint(7, (3, 11))
    target[1, 2:9] = 4
    theirs = F.cross_entropy((x @ w.mT).movedim(-1, 1), target, ignore_index=4, reduction=reduction)
    ours = linear_cross_entropy(x, w, target, ignore_index=4, reduction=reduction)
    assert_equal_with_gradients(ours, theirs, (x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_torchs_and_the_error_no_larger(dtype):
    x, w, target = torch.randn(65, 33), torch.randn(129, 33), torch.randint(129, (65,))
    truth = F.cross_entropy(x.to(dtype).double() @ w.to(dtype).double().mT, target, reduction="none")
    ours = linear_cross_entropy(x.to(dtype), w.to(dtype), target, reduction="none")
    logits = (x.to(dtype).float() @ w.to(dtype).float().mT).to(dtype)  # a product torch can run everywhere
    naive = F.cross_entropy(logits, target, reduction="none")
    assert ours.dtype == dtype == naive.dtype
    error, theirs = ((y.double() - truth).abs().max() for y in (ours, naive))
    assert error <= 2 * theirs + 8 * torch.finfo(dtype).eps * truth.max()


def test_under_autocast_the_loss_is_float32():
    x, w, target = torch.randn(9, 5), torch.randn(7, 5), torch.randint(7, (9,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, stats = linear_cross_entropy(x, w, target, return_stats=True)
    assert loss.dtype == torch.float32
    assert stats.entropy.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(x @ w.mT, target), rtol=3e-2, atol=3e-2)


def test_transforms_reach_through_where_cores_chunks_fail():
    """torch.func, second derivatives and a graph used twice."""
    x, w, target = leaf(6, 4), leaf(5, 4), torch.randint(5, (6,))

    def ours(x, w):
        return linear_cross_entropy(x, w, target, label_smoothing=0.1, z_loss=0.01)

    def dense(x, w):
        z = x @ w.mT
        return F.cross_entropy(z, target, label_smoothing=0.1) + 0.01 * z.logsumexp(-1).square().mean()

    for a, b in zip(torch.func.grad(ours, (0, 1))(x, w), torch.func.grad(dense, (0, 1))(x, w), strict=True):
        torch.testing.assert_close(a, b)
    each = torch.func.vmap(lambda row, y: linear_cross_entropy(row[None], w, y[None]))(x, target)
    torch.testing.assert_close(each, F.cross_entropy(x @ w.mT, target, reduction="none"))
    assert torch.autograd.gradcheck(ours, (x, w))
    assert torch.autograd.gradgradcheck(ours, (x, w))
    loss = ours(x, w)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    torch.testing.assert_close(first, torch.autograd.grad(loss, x)[0])


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_a_frozen_operand_gets_no_gradient(frozen):
    x, w, target = leaf(6, 4), leaf(5, 4), torch.randint(5, (6,))
    (x if frozen == "input" else w).requires_grad_(False)
    linear_cross_entropy(x, w, target, label_smoothing=0.1).backward()
    assert (x.grad is None) == (frozen == "input")
    assert (w.grad is None) == (frozen == "weight")
