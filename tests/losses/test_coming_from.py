"""The losses of Liger-Kernel and cut-cross-entropy under their own names, beside their formulas and the packages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from partita.adapters import cut_cross_entropy, liger
from partita.errors import ValueRangeError
from tests.losses.checks import assert_equal_with_gradients

LIGER = [
    {},
    {"reduction": "sum", "softcap": 2.0},
    {"reduction": "none", "lse_square_scale": 0.1},
    {"label_smoothing": 0.2, "lse_square_scale": 0.1, "return_z_loss": True},
    {"ce_weight": True, "label_smoothing": 0.2, "lse_square_scale": 0.1},
    {"ce_weight": True, "reduction": "sum", "lse_square_scale": 0.1, "return_z_loss": True},
    {"use_token_scaling": True, "lse_square_scale": 0.1, "return_z_loss": True},
    {"use_token_scaling": True, "label_smoothing": 0.1, "softcap": 3.0},
    {"return_token_accuracy": True, "return_predicted_tokens": True, "accum_dtype": torch.float32},
    {"reduction": "none", "return_token_accuracy": True, "chunk_mem_const": 2},
]


def head(dtype=torch.float64, lead=(9,)):
    torch.manual_seed(3)
    hidden, weight = torch.randn(*lead, 8, dtype=dtype), torch.randn(20, 8, dtype=dtype)
    target = torch.randint(20, lead)
    target[..., 3] = -100
    target[..., -1] = (hidden[..., -1, :] @ weight.T).argmax(-1)
    return hidden.requires_grad_(), weight.requires_grad_(), target, torch.randn(20, dtype=dtype).requires_grad_()


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def liger_formula(
    hidden, weight, target, bias, ce_weight=None, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
    softcap=None, use_token_scaling=False, **_,
):  # fmt: skip
    """As its kernel documents it: (loss, z_loss, right or not, argmax) of every row, then reduced."""
    logits = capped(hidden @ weight.T + bias, softcap)
    counts = target != -100
    ce = F.cross_entropy(logits, target, ce_weight, label_smoothing=label_smoothing, reduction="none")
    z = torch.where(counts, lse_square_scale * logits.logsumexp(-1).square(), 0.0)
    if use_token_scaling:
        p = logits.detach().softmax(-1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
        ce, z = ce * p, z * p
    best = torch.where(counts, logits.argmax(-1), -1)
    right = (best == target).float()
    if reduction != "none":
        n = counts.sum() if reduction == "mean" else 1
        total = n if ce_weight is None or reduction == "sum" else ce_weight[target[counts]].sum()
        ce, z, right = ce.sum() / total, z.sum() / n, right.sum() / counts.sum()
    return ce + z, z, right, best


def fields(found):
    return found if isinstance(found, tuple) else (found, None, None, None)


@pytest.mark.parametrize("options", LIGER, ids=str)
def test_liger_is_its_formula(options):
    hidden, weight, target, bias = head()
    options = options | ({"ce_weight": torch.rand(20, dtype=torch.float64) + 0.5} if "ce_weight" in options else {})
    found = fields(liger.liger_fused_linear_cross_entropy(hidden, weight, target, bias, **options))
    known = liger_formula(hidden, weight, target, bias, **options)
    assert_equal_with_gradients(found[0], known[0], [hidden, weight, bias])
    wanted = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
    for field, right, name in zip(found[1:], known[1:], wanted, strict=True):
        assert (field is not None) == options.get(name, False)
        if field is not None:
            torch.testing.assert_close(field, right.detach(), check_dtype=False)
    same = fields(liger.LigerFusedLinearCrossEntropyLoss(**options)(weight, hidden, target, bias))
    assert torch.equal(same[0], found[0])


def test_liger_takes_options_in_its_order_and_refuses_others():
    hidden, weight, target, bias = head()
    module = liger.LigerFusedLinearCrossEntropyLoss(None, -100, 0.1, 0.2, "sum", 3.0)
    known = liger_formula(hidden, weight, target, bias, None, 0.1, 0.2, "sum", 3.0)[0]
    torch.testing.assert_close(module(weight, hidden, target, bias), known)
    with pytest.raises(TypeError, match="smoothing"):
        liger.LigerFusedLinearCrossEntropyLoss(smoothing=0.1)


def test_liger_is_the_package_in_an_interpreter_of_its_own():
    """Triton reads whether it is interpreted when it is first imported, which another test may have done."""
    pytest.importorskip("liger_kernel", reason="not installed: pip install liger-kernel")
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "kernels_of_liger"]
    done = subprocess.run(call, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " skipped" not in done.stdout, done.stdout


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="in a process of its own, by the test above")
@pytest.mark.parametrize("options", [o for o in LIGER if not {"softcap", "ce_weight"} & o.keys()], ids=str)
def test_the_kernels_of_liger(options):
    """Its kernels in Triton's interpreter, on a CPU; with a softcap or class weights they do not run there."""
    real = pytest.importorskip("liger_kernel.transformers.functional", reason="not installed: pip install liger-kernel")
    hidden, weight, target, bias = head(torch.float32)
    ours = fields(liger.liger_fused_linear_cross_entropy(hidden, weight, target, bias, **options))
    found = real.liger_fused_linear_cross_entropy(hidden, weight, target, bias, **options)
    if not isinstance(found, torch.Tensor):
        found = (found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens)
    theirs = fields(found)
    upstream = torch.rand_like(theirs[0])
    for mine, right in zip(
        torch.autograd.grad(ours[0], (hidden, weight, bias), upstream),
        torch.autograd.grad(theirs[0], (hidden, weight, bias), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    for mine, right in zip(ours, theirs, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            torch.testing.assert_close(mine, right.detach(), rtol=1e-4, atol=1e-5, check_dtype=False)


CCE = [
    {},
    {"reduction": "sum", "softcap": 2.0},
    {"reduction": "none"},
    {"shift": True},
    {"shift": 1, "reduction": "none", "softcap": 3.0},
]


@pytest.mark.parametrize("lead", [(9,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", CCE, ids=str)
def test_cut_cross_entropy_is_its_formula(options, biased, lead):
    hidden, weight, target, bias = head(lead=lead)
    bias = bias if biased else None
    moved = int(options.get("shift", 0))
    x, t = (hidden[..., :-1, :], target[..., 1:]) if moved else (hidden, target)
    logits = capped(F.linear(x, weight, bias), options.get("softcap"))
    known = F.cross_entropy(logits.flatten(0, -2), t.flatten(), reduction=options.get("reduction", "mean"))
    known = known.view(t.shape) if known.dim() else known
    given = [x for x in (hidden, weight, bias) if x is not None]
    loss, lse = cut_cross_entropy.linear_cross_entropy(
        hidden, weight, target, bias, return_lse=True, impl="cce", filter_eps="high", use_kahan=False, **options
    )
    assert_equal_with_gradients(loss, known, given)
    torch.testing.assert_close(lse, torch.where(t != -100, logits.logsumexp(-1), 0.0))
    same = cut_cross_entropy.LinearCrossEntropy(**options, filter_eps=None)(hidden, weight, target, bias)
    assert torch.equal(same, loss)


def test_cut_cross_entropy_refuses_what_it_would_misread():
    hidden, weight, target, _ = head()
    with pytest.raises(ValueRangeError, match="by name"):
        cut_cross_entropy.linear_cross_entropy(hidden, weight, target, -100)  # as the release 25.1 orders them
    with pytest.raises(ValueRangeError, match="group="):
        cut_cross_entropy.linear_cross_entropy(hidden, weight, target, vocab_parallel_options=object())
    with pytest.raises(TypeError, match="no argument softcaps"):
        cut_cross_entropy.linear_cross_entropy(hidden, weight, target, softcaps=1.0)


@pytest.mark.parametrize("options", CCE, ids=str)
def test_cut_cross_entropy_is_the_package(options):
    """Its form for a CPU; run as written, since its compiler adds no arithmetic of its own."""
    real = pytest.importorskip("cut_cross_entropy", reason="not installed: pip install cut-cross-entropy")
    hidden, weight, target, _ = head(torch.float32, (2, 3, 5))
    mine = cut_cross_entropy.linear_cross_entropy(hidden, weight, target, impl="torch_compile", **options)
    with torch.compiler.set_stance("force_eager"):
        known = real.linear_cross_entropy(hidden, weight, target, impl="torch_compile", **options)
    assert_equal_with_gradients(mine, known, [hidden, weight], tolerance=1e-5)
