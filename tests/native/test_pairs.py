"""bfloat16 operands on kernels that multiply pairs: errors against float64, and what rounding the weights does.

Below, u = 2^-8 is the distance of two bfloat16 numbers at 1: rounding one to nearest is off by at most u / 2 of it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from partita.engine.backends.native import library, losses, passes
from partita.engine.request import Request
from partita.engine.sums import SumGrads
from tests.tolerances import assert_no_worse_than_naive

FOUND = library.load()
pytestmark = pytest.mark.skipif(
    FOUND is None or not FOUND.pairs,
    reason=f"these kernels need avx512_bf16; {library.why_not() or f'served by {FOUND and FOUND.isa}'}",
)
BF16, EXACT = torch.bfloat16, torch.float64
U = torch.finfo(BF16).eps


@pytest.fixture(autouse=True)
def natively():
    torch.manual_seed(0)
    with partita.backend("native"):
        yield


def product(a: Tensor, b: Tensor) -> Tensor:
    """A product in the operands' dtype, at its best: summed in float32, rounded once."""
    return (a.float() @ b.float()).to(a.dtype) if a.dtype == BF16 else a @ b


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """E[v], entropy and log Z by the plain formula, all in the dtype of the operands."""
    s = product(q, k.mT) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    log_p = s.log_softmax(-1)
    finite = torch.where(log_p.isneginf(), 0, log_p)
    return product(s.softmax(-1), v), -(s.softmax(-1) * finite).sum(-1), s.logsumexp(-1)


def with_gradients(function, operands, dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in operands]
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out[0].shape[-2], dtype=EXACT)
    loss = (out[0].double() * weight[:, None]).sum() + sum((x.double() * weight).sum() for x in out[1:])
    return [*(x.detach() for x in out), *torch.autograd.grad(loss, leaves)]


# one of everything that is odd: features, keys, rows, value features; single rows and keys; several chains and blocks
SHAPES = [
    (1, 1, 1, 1),
    (3, 1, 5, 2),
    (1, 33, 64, 64),
    (29, 31, 17, 33),
    (77, 515, 33, 48),
    (143, 1030, 128, 80),
    (15, 70, 901, 16),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_its_gradients(shape: tuple[int, int, int, int], causal: bool) -> None:
    rows, keys, dim, width = shape
    operands = [torch.randn(2, 3, n, d).to(BF16) for n, d in ((rows, dim), (keys, dim), (keys, width))]
    causal = causal and rows <= keys

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, stats = partita.attention(q, k, v, is_causal=causal, return_stats=True)
        return out, stats.entropy, stats.log_partition

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return plain_attention(q, k, v, causal)

    found, naive, truth = (
        with_gradients(ours, operands, BF16),
        *(with_gradients(plain, operands, t) for t in (BF16, EXACT)),
    )
    again = with_gradients(ours, operands, BF16)
    for a, b, c, d in zip(found, naive, truth, again, strict=True):
        assert_no_worse_than_naive(a, b, c, ulps=1 if a.dtype == BF16 else 16)
        assert torch.equal(a, d)


@pytest.mark.parametrize("scale", [-0.3, 0.02, 1.0, 5.0])
def test_statistics_are_those_of_exact_products_summed_in_float32(scale: float) -> None:
    """A score is a float32 sum of D exact products, of size |q||k|; a statistic of weights that are not rounded."""
    q, k, v = (torch.randn(90, d).to(BF16) for d in (75, 75, 8))
    gibbs = partita.Gibbs(q, k, scale=scale)
    _, state = gibbs.mean(v)
    s = scale * (q.double() @ k.double().mT)
    log_p = s.log_softmax(-1)
    size = abs(scale) * float((q.double().abs() @ k.double().abs().mT).max())
    error = 75 * size * torch.finfo(torch.float32).eps  # of a score; log Z moves by no more than the scores
    stats = state.stats()
    entropy = -(log_p.exp() * log_p).sum(-1)
    spread = float((s.amax(-1) - s.amin(-1)).max())
    assert (stats.log_partition - s.logsumexp(-1)).abs().max() <= error + 1e-6
    assert (stats.max_score - s.amax(-1)).abs().max() <= error + 1e-6
    # dH = sum_j p_j (s_j - E[s]) ds_j
    assert (stats.entropy - entropy).abs().max() <= (error + 1e-6) * (1 + spread)


def test_equal_values_have_that_mean() -> None:
    """The weights that meet the values sum to one: of rounded weights and their own mass."""
    q, k = torch.randn(64, 32).to(BF16), torch.randn(700, 32).to(BF16)
    v = torch.tensor([1.0, -3.140625, 0.0078125]).to(BF16).expand(700, 3).contiguous()
    assert torch.equal(partita.Gibbs(q, k, scale=0.7).expectation(v), v[:64])


def test_rounded_weights_have_no_drift() -> None:
    """Ten thousand rows whose values are all of one sign: the mean error is far below the error of one row.

    An unbiased rounding has a mean error of the error of a row / sqrt(rows); ten times that would be a drift.
    """
    rows, keys, dim = 10_000, 512, 64
    q, k = torch.randn(rows, dim).to(BF16), torch.randn(keys, dim).to(BF16)
    v = (1 + torch.rand(keys, 1)).to(BF16)
    truth = (0.5 * q.double() @ k.double().mT).softmax(-1) @ v.double()
    sums = passes.forward(Request(q, k, v, torch.full((1,), 0.5), None, None, (), None, mean=True))
    assert sums is not None and sums.mean is not None and sums.mean.dtype == torch.float32  # before the last rounding
    error = sums.mean.double() - truth
    assert error.std() > 1e-6  # the weights are rounded here, or this shows nothing
    assert error.mean().abs() <= 10 * error.std() / rows**0.5
    assert error.std() <= U * float(v.double().max())


@pytest.mark.parametrize("sizes", [(1, 1, 1), (29, 19, 37), (64, 64, 1000), (131, 33, 3001), (40, 512, 5000)])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_entropy_and_its_gradients(sizes: tuple[int, int, int], bias: bool) -> None:
    rows, dim, classes = sizes
    operands = [
        torch.randn(rows, dim),
        2 * torch.randn(classes, dim) * dim**-0.5,
        *([torch.randn(classes)] if bias else []),
    ]
    operands = [x.to(BF16) for x in operands]
    target = torch.randint(classes, (rows,))

    def gradients(loss, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in operands]
        total = loss(leaves[0], leaves[1], target, leaves[2] if bias else None)
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    def ours(x: Tensor, w: Tensor, t: Tensor, b: Tensor | None) -> Tensor:
        return partita.linear_cross_entropy(x, w, t, linear_bias=b)

    def plain(x: Tensor, w: Tensor, t: Tensor, b: Tensor | None) -> Tensor:
        logits = product(x, w.mT)
        return F.cross_entropy(logits if b is None else logits + b, t)

    found, naive, truth = gradients(ours, BF16), gradients(plain, BF16), gradients(plain, EXACT)
    for a, b, c, d in zip(found, naive, truth, gradients(ours, BF16), strict=True):
        assert_no_worse_than_naive(a, b, c, ulps=1)
        assert torch.equal(a, d)


def test_chunks_of_a_cross_entropy_are_summed_in_float32() -> None:
    """Thirty chunks of rows of one sign, each of which would lose digits if the sum so far were bfloat16."""
    x, w = (torch.rand(300, 16) + 0.5).to(BF16), torch.randn(64, 16).to(BF16)
    target = torch.randint(64, (300,))
    request = Request(x, w, None, torch.ones(1), None, target, (), None)

    def gradient(chunk_bytes: int) -> Tensor:
        weight = torch.full((300,), 1 / 300)
        found = losses.weighted_nll(request, weight, (True, True, False, False, False), chunk_bytes=chunk_bytes)
        assert found is not None
        return found[1]["key"]

    whole, chunked = gradient(1 << 30), gradient(64 * 4 * 10)
    # p is the same; float32 sums in another order, then one rounding to bfloat16
    assert (whole.double() - chunked.double()).abs().max() <= U * float(whole.abs().max())
    assert (whole == chunked).double().mean() > 0.95


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dim"), [(1, 700, 33), (77, 1500, 512), (1100, 2100, 1040), (2100, 300, 16)]
)
def test_gradients_of_classes_are_summed_in_float32_and_rounded_once(rows: int, vocabulary: int, dim: int) -> None:
    """Rows in one chunk and in several, classes in one span and in several: equal to rounding what float32 gives."""
    x, w = torch.randn(rows, dim).to(BF16), (dim**-0.5 * torch.randn(vocabulary, dim)).to(BF16)
    request = Request(x, w, None, torch.ones(1), None, torch.randint(vocabulary, (rows,)), (), None)
    sums = passes.forward(request)
    assert sums is not None
    g = SumGrads(*(torch.randn(rows) / sums.mass for _ in range(3)), None, torch.randn(rows))
    needs = (True, True, False, False, False)
    whole, rounded = (passes.backward(request, sums.peak, g, needs, rounded=so) for so in (False, True))
    assert whole is not None
    assert rounded is not None
    assert whole["key"].dtype == torch.float32
    assert rounded["key"].dtype == BF16
    assert torch.equal(rounded["key"], whole["key"].to(BF16))
    assert torch.equal(rounded["query"], whole["query"])


def test_what_is_merged_is_not_rounded() -> None:
    """The moment of a state is float32, and so are the weights and values it is made of."""
    q, k, v = (torch.randn(n, 40).to(BF16) for n in (50, 700, 700))
    truth = (0.3 * q.double() @ k.double().mT).softmax(-1) @ v.double()
    one, other = (partita.Gibbs(q, k[cut], scale=0.3).state(v[cut]) for cut in (slice(0, 301), slice(301, None)))
    assert (partita.merge(one, other).expectation() - truth).abs().max() < 700**0.5 * torch.finfo(torch.float32).eps


def test_hidden_nan_stays_hidden_and_empty_rows_are_zero() -> None:
    q, k, v = (torch.randn(1, 2, 37, 24).to(BF16) for _ in range(3))
    lengths = torch.tensor([[31, 0]])
    k[:, :, 31:], v[:, :, 31:] = torch.nan, torch.nan
    seen = partita.support.lengths(lengths)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, stats = partita.attention(q, k, v, support=seen, return_stats=True)
    grads = torch.autograd.grad(out.double().sum() + stats.entropy.sum(), (q, k, v))
    assert out.isfinite().all() and not out[:, 1].any() and not stats.entropy[:, 1].any()
    assert grads[0].isfinite().all() and not grads[0][:, 1].any()
    for g in grads[1:]:
        assert g[:, :, :31].isfinite().all() and not g[:, 0, 31:].any() and not g[:, 1].any()


def test_symmetric_contrast() -> None:
    a, b = (F.normalize(torch.randn(150, 40), dim=1).to(BF16) for _ in range(2))

    def gradients(loss, dtype: torch.dtype) -> list[Tensor]:
        x, y = a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()
        total = loss(x, y)
        return [total.detach(), *torch.autograd.grad(total, (x, y))]

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return partita.info_nce_loss(x, y, temperature=0.07, normalize=False, symmetric=True)

    def plain(x: Tensor, y: Tensor) -> Tensor:
        logits, index = product(x, y.mT) / 0.07, torch.arange(len(x))
        return (F.cross_entropy(logits, index) + F.cross_entropy(logits.mT, index)) / 2

    found, naive, truth = gradients(ours, BF16), gradients(plain, BF16), gradients(plain, EXACT)
    for mine, other, true in zip(found, naive, truth, strict=True):
        assert_no_worse_than_naive(mine, other, true, ulps=1)


def test_float32_is_what_it_is_without_pairs() -> None:
    """The same kernels, compiled once more: to the last bit."""
    code = (
        "import torch, partita, hashlib; torch.manual_seed(0); torch.set_num_threads(1);"
        "q, k, v = (torch.randn(2, 90, 40).requires_grad_() for _ in range(3));"
        "out, stats = partita.attention(q, k, v, return_stats=True);"
        "grads = torch.autograd.grad(out.square().sum() + stats.entropy.sum(), (q, k, v));"
        "print(hashlib.sha256(b''.join(bytes(x.detach().contiguous().view(torch.uint8).flatten().tolist())"
        " for x in (out, *stats, *grads))).hexdigest())"
    )

    def digest(isa: str) -> str:
        env = {**os.environ, "PARTITA_ISA": isa, "PARTITA_BACKEND": "native"}
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    assert digest("avx512_bf16") == digest("avx512")
