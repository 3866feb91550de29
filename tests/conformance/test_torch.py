"""Equal to the torch function that each docstring names, and at home in torch's transforms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import partita
from tests import reference
from tests.conformance.serving import serving
from tests.strategies import catalogue, problem
from tests.tolerances import assert_exact

# Equality with torch ------------------------------------------------------------


OF_TORCH = {
    "log_partition": lambda s, y: torch.logsumexp(s, -1),
    "probs": lambda s, y: torch.softmax(s, -1),
    "nll": lambda s, y: F.cross_entropy(s, y, reduction="none"),
    "entropy": lambda s, y: torch.distributions.Categorical(logits=s).entropy(),
}


@pytest.mark.parametrize("read", OF_TORCH)
def test_a_read_is_that_of_torch(backend, read):
    """M-GIB-7."""
    p = problem(7, 123)
    with serving(backend):
        found = getattr(p.gibbs(), read)(*[p.target] * (read == "nll"))
        assert_exact(found, OF_TORCH[read](p.query @ p.key.mT, p.target), magnitude=10)


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "grouped", "scale"])
def test_attention_is_scaled_dot_product_attention(backend, kind):
    heads = 1 if kind == "grouped" else 3
    shapes = (2, 3, 7, 8), (2, heads, 13, 8), (2, heads, 13, 8)
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    keep = torch.rand(7, 13) < 0.6
    keep[:, 0] = True
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": keep},
        "float": {"attn_mask": torch.randn(2, 1, 7, 13, dtype=torch.float64)},
        "grouped": {"is_causal": True, "enable_gqa": True},
        "scale": {"scale": 0.7},
    }[kind]
    with serving(backend):
        ours, theirs = partita.attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options)
        assert_exact(ours.detach(), theirs.detach())
        weight = torch.randn_like(ours)
        for a, b in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (ours, theirs)), strict=True):
            assert_exact(a, b)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_linear_cross_entropy_is_cross_entropy_of_linear(backend, reduction, label_smoothing, weighted):
    """M-LOSS-1, M-LOSS-7, M-LOSS-9, with ignored rows."""
    x = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(11, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 11, (3, 7))
    target[0, :3] = -100
    options = {
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "weight": torch.rand(11, dtype=torch.float64) if weighted else None,
    }
    with serving(backend):
        ours = partita.linear_cross_entropy(x, w, target, linear_bias=b, **options)
        theirs = F.cross_entropy(F.linear(x, w, b).movedim(-1, 1), target, **options)
        assert_exact(ours.detach(), theirs.detach(), magnitude=10)
        for a, c in zip(*(torch.autograd.grad(y.sum(), (x, w, b)) for y in (ours, theirs)), strict=True):
            assert_exact(a, c)


def test_info_nce_is_cross_entropy_of_similarities(backend):
    """M-GIB-7, M-INC-4."""
    q, k = (torch.randn(7, 5, dtype=torch.float64) for _ in range(2))
    with serving(backend):
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT / 0.07
        assert_exact(partita.info_nce_loss(q, k), F.cross_entropy(s, torch.arange(7)), magnitude=10)


# Transforms ------------------------------------------------------------


def loss(query, key, value):
    """Every kind of read at once, as a scalar."""
    gibbs = partita.Gibbs(query, key, scale=0.7, support=partita.support.causal())
    total = gibbs.log_partition().sum() + gibbs.entropy().square().sum() + gibbs.expectation(value).sin().sum()
    return total + gibbs.nll(torch.zeros(query.shape[-2], dtype=torch.long)).sum()


def plain(query, key, value):
    """The same by the oracle."""
    s = reference.score(query, key, scale=0.7, visible=torch.ones(query.shape[-2], key.shape[-2]).tril().bool())
    total = reference.log_partition(s).sum() + reference.entropy(s).square().sum()
    total = total + (reference.probs(s) @ value).sin().sum()
    return total + (reference.log_partition(s) - s[..., 0]).sum()


def inputs(*batch):
    return [torch.randn(*batch, n, d, dtype=torch.float64) for n, d in ((5, 3), (7, 3), (7, 2))]


def test_func_grad(backend):
    x = inputs()
    with serving(backend):
        for a, b in zip(*(torch.func.grad(f, argnums=(0, 1, 2))(*x) for f in (loss, plain)), strict=True):
            assert_exact(a, b)


def test_func_grad_of_grad(backend):
    x = inputs()
    with serving(backend):
        ours, theirs = (
            torch.func.grad(lambda q, f=f: torch.func.grad(f)(q, x[1], x[2]).square().sum())(x[0])
            for f in (loss, plain)
        )
        assert_exact(ours, theirs, magnitude=100)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)])
def test_vmap(backend, in_dims):
    x = [y if d == 0 else y[0] for y, d in zip(inputs(3), in_dims, strict=True)]
    with serving(backend):
        assert_exact(torch.vmap(loss, in_dims)(*x), torch.stack([loss(*entry(x, in_dims, i)) for i in range(3)]))


def entry(x, in_dims, i):
    return [y[i] if d == 0 else y for y, d in zip(x, in_dims, strict=True)]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0)])
def test_vmap_of_grad(backend, in_dims):
    x = [y if d == 0 else y[0] for y, d in zip(inputs(3), in_dims, strict=True)]
    with serving(backend):
        ours = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims)(*x)
        for i in range(3):
            for a, b in zip(ours, torch.func.grad(plain, argnums=(0, 1, 2))(*entry(x, in_dims, i)), strict=True):
                assert_exact(a[i], b)


def test_vmap_over_bias_scale_and_mask(backend):
    q, k, v = inputs()
    bias, scale, keep = torch.randn(3, 5, 7).double(), torch.rand(3, 5).double(), torch.rand(3, 5, 7) < 0.7

    def read(bias, scale, keep):
        gibbs = partita.Gibbs(q, k, bias=bias, scale=scale, support=partita.support.mask(keep))
        return gibbs.entropy(), gibbs.expectation(v)

    with serving(backend):
        ours = torch.vmap(read)(bias, scale, keep)
        for i in range(3):
            s = reference.score(q, k, bias=bias[i], scale=scale[i], visible=keep[i])
            assert_exact(ours[0][i], reference.entropy(s))
            assert_exact(ours[1][i], reference.expectation(s, v))


def test_jacobian_of_entropy_is_block_diagonal_in_the_rows(backend):
    """Row i's entropy depends on query i alone: jacrev shows it."""
    q, k, _ = inputs()
    with serving(backend):
        jacobian = torch.func.jacrev(lambda q: partita.Gibbs(q, k).entropy())(q)
    assert torch.equal(jacobian.abs().sum(-1) > 0, torch.eye(5, dtype=torch.bool))


def assert_compiles(function, x, **options):
    """No graph break, the same values, the same gradients."""
    torch._dynamo.reset()
    value, expected = torch.compile(function, fullgraph=True, **options)(*x), function(*x)
    assert_exact(value.detach(), expected.detach())
    if expected.requires_grad:
        for a, b in zip(*(torch.autograd.grad(y, x) for y in (value, expected)), strict=True):
            assert_exact(a, b)


@pytest.mark.parametrize("name", ["dense", "tiled"])
def test_compile_fullgraph_forward_and_backward(name):
    with serving(name):
        assert_compiles(loss, [y.requires_grad_() for y in inputs(2)], backend="aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
def test_compile_with_inductor_forward_and_backward():
    """The default compiler, which writes C++: slow on a cold cache."""
    assert_compiles(loss, [y.requires_grad_() for y in inputs(2)])


@pytest.mark.parametrize("mode", ["frozen", "no_grad"])
def test_compile_without_gradients(mode):
    """Evaluation: no input requires a gradient, or none is recorded."""
    with torch.set_grad_enabled(mode != "no_grad"):
        assert_compiles(loss, [y.requires_grad_(mode == "no_grad") for y in inputs()], backend="aot_eager")


def test_compile_of_the_faces():
    target = torch.randint(0, 11, (7,))

    def faces(q, k, v, w):
        out, stats = partita.attention(q, k, v, is_causal=True, return_stats=True)
        loss = partita.linear_cross_entropy(out, w, target, label_smoothing=0.1)
        return loss + stats.entropy.mean() + partita.info_nce_loss(q, out)

    x = [torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (7, 7, 7, 11)]
    assert_compiles(faces, x, backend="aot_eager")


def test_a_whole_stack_of_supports_compiles():
    support, _ = catalogue(5, 7)["(window | segments) & (mask | not-self)"]
    read = lambda q, k, v: partita.Gibbs(q, k, support=support).expectation(v)  # noqa: E731
    assert_compiles(read, inputs(), backend="aot_eager")


def test_compile_with_changing_sizes_does_not_recompile_forever():
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (5, 6, 9):
        x = [torch.randn(n, d, dtype=torch.float64, requires_grad=True) for d in (3, 3, 2)]
        assert_exact(compiled(*x).detach(), loss(*x).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_its_dtype_and_sums_in_float32(backend, dtype):
    q, k, v = (torch.randn(n, 8, requires_grad=True) for n in (5, 7, 7))
    with serving(backend), torch.autocast("cpu", dtype=dtype):
        gibbs = partita.Gibbs(q, k)
        entropy, out = gibbs.entropy(), gibbs.expectation(v)
    assert entropy.dtype == torch.float32
    assert out.dtype == dtype  # as torch's own attention returns it
    with serving(backend):
        low = partita.Gibbs(q.to(dtype), k.to(dtype)).entropy()
    assert torch.equal(entropy, low)  # only the operands were rounded
    for grad in torch.autograd.grad(entropy.sum() + out.float().sum(), (q, k, v)):
        assert grad.dtype == torch.float32
        assert grad.isfinite().all()
