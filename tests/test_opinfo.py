"""The sample inputs that torch ships for its own operators, through the faces: values and gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import partita
from tests.tolerances import assert_exact, assert_no_worse_than_naive

DTYPES = (torch.float64, torch.float32)


def samples(name: str, dtype: torch.dtype, variant: str = "") -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it imports its test helpers, which takes seconds
        from torch.testing._internal.common_methods_invocations import op_db
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


def attention(sample):
    """Every sample without dropout: causal and not, a mask, broadcast batches."""
    if sample.kwargs.get("dropout_p", 0.0) > 0:
        return None
    both = (
        lambda q, k, v, f=f: f(q, k, v, **wide(sample.kwargs, q.dtype))
        for f in (partita.attention, F.scaled_dot_product_attention)
    )
    return *both, [sample.input, *sample.args]


def cross_entropy(sample):
    """The logits are the input, the identity is the classifier; classes are moved to the last dimension."""
    (target,) = sample.args
    if not is_index(target):
        return None

    def ours(logits):
        eye = torch.eye(logits.shape[1], dtype=logits.dtype)
        return partita.linear_cross_entropy(logits.movedim(1, -1), eye, target, **wide(sample.kwargs, logits.dtype))

    return ours, lambda x: F.cross_entropy(x, target, **wide(sample.kwargs, x.dtype)), [sample.input]


def linear_cross_entropy(sample):
    """Class indices and a matrix of classes; torch's chunking options choose how it computes, not what."""
    weight, target = sample.args
    if not is_index(target) or weight.ndim != 2:
        return None
    plain = {name: option for name, option in sample.kwargs.items() if name != "options"}
    return (
        lambda x, w: partita.linear_cross_entropy(x, w, target, **wide(plain, x.dtype)),
        lambda x, w: F.linear_cross_entropy(x, w, target, **wide(sample.kwargs, x.dtype)),
        [sample.input, weight],
    )


def is_index(target: torch.Tensor) -> bool:
    """Class indices; class probabilities as targets are not an option of the first version of this face."""
    return not target.is_floating_point()


@pytest.mark.parametrize(
    ("name", "variant", "pair", "at_least"),
    [
        ("scaled_dot_product_attention", "", attention, 13),
        ("cross_entropy", "", cross_entropy, 11),
        ("linear_cross_entropy", "", linear_cross_entropy, 20),
        ("linear_cross_entropy", "chunked", linear_cross_entropy, 20),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_samples_of_torchs_function_pass(name, variant, pair, at_least, dtype):
    if not hasattr(F, name):
        pytest.skip(f"this torch has no {name}")
    comparison = Comparison()
    for sample in samples(name, dtype, variant):
        if (both := pair(sample)) is not None:
            comparison.add(*both)
    comparison.assert_good(at_least)
