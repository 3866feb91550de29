"""The sample inputs that torch ships for its own operators, through the faces: values and gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import partita
from tests.tolerances import assert_exact, assert_no_worse_than_naive

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it imports its test helpers
    from torch.testing._internal.common_methods_invocations import op_db

DTYPES = (torch.float64, torch.float32)


def samples(name: str, dtype: torch.dtype, variant: str = "") -> list:
    (op,) = [op for op in op_db if op.name == f"nn.functional.{name}" and op.variant_test_name == variant]
    torch.manual_seed(0)
    return list(op.sample_inputs("cpu", dtype, requires_grad=True))


class Comparison:
    """Results of ours and torch's function over many samples: values, and gradients of a fixed weighting of them.

    float64: each sample equal up to rounding. float32: the largest error over all samples at most twice torch's; the
    samples are tiny and their scores reach 270, so that in a single one luck decides whose rounding is smaller.
    """

    def __init__(self) -> None:
        self.count = 0
        self._columns: list[tuple[list[torch.Tensor], ...]] = []

    def add(self, ours, theirs, leaves: list[torch.Tensor]) -> None:
        dtype = leaves[0].dtype
        got, want = (self._results(function, leaves, dtype) for function in (ours, theirs))
        truth = self._results(theirs, leaves, torch.float64)
        self._columns = self._columns or [([], [], []) for _ in got]
        for column, a, b, exact in zip(self._columns, got, want, truth, strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            if dtype == torch.float64:
                assert_exact(a, b, magnitude=100)
            for kept, x in zip(column, (a, b, exact), strict=True):
                kept.append(x.flatten())
        self.count += 1

    @staticmethod
    def _results(function, leaves: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out = function(*inputs)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(dtype)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]

    def assert_good(self, at_least: int) -> None:
        assert self.count >= at_least
        for column in self._columns:
            if column[0][0].dtype == torch.float64:
                continue  # compared already, and torch's result is the truth itself
            assert_no_worse_than_naive(*(torch.cat(x) for x in column))


def wide(options: dict, dtype: torch.dtype) -> dict:
    """Options whose floating tensors have this dtype."""
    return {
        name: x.detach().to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in options.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_passes_the_samples_of_scaled_dot_product_attention(dtype):
    """Every sample without dropout: causal and not, a mask, broadcast batches."""
    comparison = Comparison()
    for sample in samples("scaled_dot_product_attention", dtype):
        if sample.kwargs.get("dropout_p", 0.0) > 0:
            continue
        options = sample.kwargs
        comparison.add(
            lambda q, k, v, options=options: partita.attention(q, k, v, **wide(options, q.dtype)),
            lambda q, k, v, options=options: F.scaled_dot_product_attention(q, k, v, **wide(options, q.dtype)),
            [sample.input, *sample.args],
        )
    comparison.assert_good(at_least=13)


def is_index(target: torch.Tensor) -> bool:
    """Class indices; class probabilities as targets are not an option of the first version of this face."""
    return not target.is_floating_point()


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_cross_entropy_passes_the_samples_of_cross_entropy(dtype):
    """The logits are the input, the identity is the classifier; classes are moved to the last dimension."""
    comparison = Comparison()
    for sample in samples("cross_entropy", dtype):
        (target,), options = sample.args, sample.kwargs
        if not is_index(target):
            continue

        def ours(logits, target=target, options=options):
            eye = torch.eye(logits.shape[1], dtype=logits.dtype)
            return partita.linear_cross_entropy(logits.movedim(1, -1), eye, target, **wide(options, logits.dtype))

        def theirs(logits, target=target, options=options):
            return F.cross_entropy(logits, target, **wide(options, logits.dtype))

        comparison.add(ours, theirs, [sample.input])
    comparison.assert_good(at_least=11)


@pytest.mark.parametrize("variant", ["", "chunked"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_cross_entropy_passes_torchs_own_samples(dtype, variant):
    """Class indices and a matrix of classes; torch's chunking options choose how it computes, not what."""
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    comparison = Comparison()
    for sample in samples("linear_cross_entropy", dtype, variant):
        (weight, target), options = sample.args, sample.kwargs
        if not is_index(target) or weight.ndim != 2:
            continue

        def ours(x, w, target=target, options=options):
            options = {name: option for name, option in options.items() if name != "options"}
            return partita.linear_cross_entropy(x, w, target, **wide(options, x.dtype))

        def theirs(x, w, target=target, options=options):
            return F.linear_cross_entropy(x, w, target, **wide(options, x.dtype))

        comparison.add(ours, theirs, [sample.input, weight])
    comparison.assert_good(at_least=20)
