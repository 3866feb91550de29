"""Random calls of the native kernels against dense float64: values, gradients, equal bits on a second call."""

from __future__ import annotations

import random

import pytest
import torch

from partita.engine.backends.native import library
from partita.engine.backends.native import passes as native
from partita.engine.sums import OPERANDS, SumGrads

from . import dense
from .cases import random_case

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native library: {library.why_not()}")

# Relative to the size of the exact result; scores here are a few units, sums over up to 700 keys.
TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-12, torch.bfloat16: 3e-5, torch.float16: 3e-5}
# Gradients of half inputs are rounded to half at the end.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Of pairs of bfloat16 numbers, the upstream gradient of the moment is rounded to bfloat16 too.
OF_ROUNDED = ("scale", "bias")


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float, name: str) -> None:
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    want = want.detach()
    if not want.numel():
        return
    infinite = want.isinf()
    assert torch.equal(infinite, got.double().isinf()), f"{name}: infinities differ"
    error = torch.where(infinite, 0.0, got.double() - want).abs().max().item()
    size = max(1.0, torch.where(infinite, 0.0, want).abs().max().item())
    assert error <= tolerance * size, f"{name}: error {error:.3g} for numbers up to {size:.3g}"


def check(seed: int) -> None:
    rng = random.Random(seed + 1)
    case = random_case(seed)
    dtype = case.query.dtype
    moments, rank = rng.random() < 0.7, case.target is not None and rng.random() < 0.7
    request = case.request(statistics=moments, rank=rank)
    sums = native.forward(request)
    assert sums is not None
    exact = case.exact()
    want = dense.reduce(exact, sums.peak)
    near, loaded = TOLERANCE[dtype], library.load()
    rounded = ROUNDING[dtype] if dtype == torch.bfloat16 and loaded is not None and loaded.pairs else 0.0
    assert_near(sums.peak, want.peak, near, "peak")
    assert_near(sums.mass, want.mass, near, "mass")
    assert torch.equal(sums.count, want.count), "count"
    for name in ("first", "spread", "moment", "target_score"):
        got = getattr(sums, name)
        if got is not None:
            assert_near(got, getattr(want, name), near, name)
    if sums.rank is not None:
        seen = dense.scores(exact).detach()
        peaks = want.peak[~want.peak.isinf()].abs()
        margin = near * max(1.0, peaks.max().item() if peaks.numel() else 1.0)
        mark = want.target_score.detach()[..., None]
        low, high = (seen > mark + margin).sum(-1), (seen > mark - margin).sum(-1)
        assert bool(((sums.rank >= low) & (sums.rank <= high)).all()), "rank"

    acc = sums.mass.dtype
    make = lambda like: None if like is None or rng.random() < 0.25 else torch.randn(like.shape, dtype=acc)  # noqa: E731
    upstream = [make(sums.mass), make(want.first), make(want.second), make(want.moment), make(want.target_score)]
    needs = tuple(rng.random() < 0.8 for _ in range(5))
    if upstream[0] is None:
        upstream[0] = torch.zeros_like(sums.mass)
    grads = native.backward(request, sums.peak, SumGrads(*upstream), needs)
    assert grads is not None
    dense.total(want, upstream).backward()
    for name, needed in zip(OPERANDS, needs, strict=True):
        operand = getattr(exact, name)
        got = grads.get(name)
        if operand is None or not needed:
            assert got is None, f"an unneeded gradient of {name}"
            continue
        expected = operand.grad if operand.grad is not None else torch.zeros_like(operand)
        low = dtype if name in ("query", "key", "value") else acc
        at_most = max(ROUNDING[low], 10 * near, rounded if name in OF_ROUNDED else 0.0)
        assert_near(got, expected, at_most, f"gradient of {name}")

    again, twice = native.forward(request), native.backward(request, sums.peak, SumGrads(*upstream), needs)
    assert again is not None and twice is not None and twice.keys() == grads.keys()
    for a, b in zip((*sums, *grads.values()), (*again, *twice.values()), strict=True):
        assert (a is None and b is None) or torch.equal(a, b), "the same call gave other bits"


FAST = [range(start, start + 40) for start in range(0, 320, 40)]
SLOW = [pytest.param(range(start, start + 100), marks=pytest.mark.slow) for start in range(1000, 3500, 100)]


@pytest.mark.parametrize("seeds", [*FAST, *SLOW], ids=str)
def test_random_calls_agree_with_dense_float64(seeds: range) -> None:
    for seed in seeds:
        try:
            check(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
