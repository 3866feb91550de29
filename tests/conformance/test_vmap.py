"""What vmap maps is what the entries one by one give: every read, over any of its operands, also under a gradient."""

from __future__ import annotations

import pytest
import torch

import partita
from partita import Gibbs, support
from partita.errors import ValueRangeError
from partita.score import Additive, Cosine, Distance
from tests.conformance.serving import serving
from tests.tolerances import assert_exact

N, M, D, MANY = 5, 7, 3, 3
TARGET = torch.tensor([0, 3, 6, 1, 1])
SOLVED = partita.scale.TargetEntropy(entropy=1.2)
READS = {
    "log_partition": lambda g: g.log_partition(),
    "entropy": lambda g: g.entropy(),
    "nll": lambda g: g.nll(TARGET),
    "received": lambda g: g.received(torch.linspace(0.5, 1.5, N).double()),
    "forward": lambda g: partita.divergence(g, _other(), "forward"),
    "reverse": lambda g: partita.divergence(_other(), g, "reverse"),
    "js": lambda g: partita.divergence(g, _other(), "js", beta=0.3),
    "hellinger": lambda g: partita.divergence(_other(), g, "hellinger"),
}
# one operand, each of them, and all of them
MAPPED = [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)]


def operands(seed: int = 3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(MANY, *shape, generator=g, dtype=torch.float64) for shape in ((N, D), (M, D), (N, M))]


FIXED = [x[0] for x in operands(7)]


def _other() -> Gibbs:
    query, key, bias = FIXED
    return Gibbs(query, key, bias=bias, scale=0.7)


def assert_mapped(function, in_dims) -> None:
    """vmap(f) and vmap(grad(sum f^2)) against the entries one by one."""
    given = [x if d == 0 else x[0] for x, d in zip(operands(), in_dims, strict=True)]
    one_by_one = [[x[i] if d == 0 else x for x, d in zip(given, in_dims, strict=True)] for i in range(MANY)]
    assert_exact(torch.vmap(function, in_dims)(*given), torch.stack([function(*x) for x in one_by_one]))
    grad = torch.func.grad(lambda *x: function(*x).square().sum(), argnums=(0, 1, 2))
    found = torch.vmap(grad, in_dims)(*given)
    for i, entry in enumerate(one_by_one):
        leaves = [x.clone().requires_grad_() for x in entry]
        wanted = torch.autograd.grad(function(*leaves).square().sum(), leaves, allow_unused=True)
        for a, b in zip(found, wanted, strict=True):
            assert_exact(a[i], torch.zeros_like(a[i]) if b is None else b)


@pytest.mark.parametrize("in_dims", MAPPED)
@pytest.mark.parametrize("read", READS)
def test_a_read_under_vmap(backend, read, in_dims):
    seen = support.window(None, 4) | support.segments(torch.arange(N) % 2, torch.arange(M) % 2)
    with serving(backend):
        assert_mapped(lambda q, k, bias: READS[read](Gibbs(q, k, bias=bias, support=seen)), in_dims)


@pytest.mark.parametrize("in_dims", MAPPED[:2])
@pytest.mark.parametrize("score", [None, Cosine()])
def test_a_solved_scale_under_vmap(backend, score, in_dims):
    """Bias left out: with one no scale is solved for where its values cannot be looked at."""

    def read(q, k, _):
        return Gibbs(q, k, scale=SOLVED, support=support.lengths(M - 1), score=score).log_partition()

    with serving(backend):
        assert_mapped(read, in_dims)


@pytest.mark.parametrize("in_dims", MAPPED)
@pytest.mark.parametrize("read", ["log_partition", "received", "forward", "reverse"])
@pytest.mark.parametrize("score", [Distance(1.0), Additive(D, D, 4, dtype=torch.float64)])
def test_a_score_that_is_a_function_under_vmap(score, read, in_dims):
    assert_mapped(lambda q, k, bias: READS[read](Gibbs(q, k, bias=bias, score=score)), in_dims)


def test_grouped_heads_and_maps_within_maps(backend):
    """What keys receive and a divergence, two levels deep, the mapped dimension in any place."""
    g = torch.Generator().manual_seed(0)
    query = torch.randn(N, 2, 4, 3, D, generator=g, dtype=torch.float64)  # rows, inner, heads, outer, features
    key = torch.randn(3, 2, M, D, generator=g, dtype=torch.float64)

    def read(q, k):  # (N, heads, D), (heads, M, D)
        p = Gibbs(q.transpose(0, 1), k, grouped=True)
        return p.received(), partita.divergence(p, Gibbs(q.transpose(0, 1), 2 * k, grouped=True))

    with serving(backend):
        found = torch.vmap(torch.vmap(read, (1, None)), (3, 0))(query, key)
        for outer in range(3):
            for inner in range(2):
                for got, want in zip(found, read(query[:, inner, :, outer], key[outer]), strict=True):
                    assert_exact(got[outer, inner], want)


def test_what_cannot_be_mapped_says_so():
    query, key, bias = operands()
    with pytest.raises(ValueRangeError, match="under vmap a scale is solved for scores that are inner products"):
        torch.vmap(lambda k: Gibbs(query[0], k, scale=SOLVED, score=Distance()).entropy())(key)
    with pytest.raises(ValueRangeError, match="solve outside of"):
        torch.vmap(lambda b: Gibbs(query[0], key[0], scale=SOLVED, bias=b).entropy())(bias)
