"""Scores other than an inner product: values, statistics and gradients against the scores written out, everywhere."""

from __future__ import annotations

import pytest
import torch

import partita
from partita import support
from partita.engine.backends import TABLE
from partita.errors import BackendError, DtypeError, ShapeError, ValueRangeError
from partita.score import Additive, Bilinear, Cosine, Distance, InnerProduct, LogSigmoid, SquaredDistance
from tests import reference
from tests.conformance.serving import names, serving

D, N, M = 4, 7, 9
SEEN = torch.ones(N, M, dtype=torch.bool).tril()


class Network(torch.nn.Module):
    """A user's score: a network on pairs, with a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(a, b, dtype=dtype) for a, b in ((2 * D, 6), (6, 1)))
        self.register_buffer("shift", torch.tensor(0.3, dtype=dtype))

    def forward(self, query, key):
        shape = (*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2], D)
        pairs = torch.cat([query[..., :, None, :].expand(shape), key[..., None, :, :].expand(shape)], -1)
        return self.second(torch.tanh(self.first(pairs) + self.shift))[..., 0]


def manhattan(query, key):
    return -(query[..., :, None, :] - key[..., None, :, :]).abs().sum(-1)


def by_hand(name, q, k, score):
    """The definition, pair by pair."""
    own = {"bilinear": ("weight",), "additive": ("query_proj.weight", "key_proj.weight", "query_proj.bias", "weight")}
    if name == "log_sigmoid":
        return reference.log_sigmoid(q, k, 0.8, 0.5)
    if hasattr(reference, name):
        return getattr(reference, name)(q, k, *(score.get_parameter(part) for part in own.get(name, ())))
    return score(q, k)


KINDS = {
    "cosine": Cosine,
    "squared_distance": SquaredDistance,
    "bilinear": lambda: Bilinear(D, D, dtype=torch.float64),
    "distance": Distance,
    "additive": lambda: Additive(D, D, 5, dtype=torch.float64),
    "log_sigmoid": lambda: LogSigmoid(0.8, 0.5),
    "network": Network,
    "function": lambda: manhattan,
}


@pytest.fixture(params=KINDS)
def problem(request):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, n, d, dtype=torch.float64).requires_grad_() for n, d in ((N, D), (M, D), (M, 3)))
    score = KINDS[request.param]()
    own = tuple(score.parameters()) if isinstance(score, torch.nn.Module) else ()
    return request.param, q, k, v, score, own


@pytest.fixture(params=names())
def backend(request, problem):
    name = request.param
    if not isinstance(problem[4], InnerProduct) and not TABLE["tiled" if name.startswith("tiled") else name].pairs:
        pytest.skip("serves inner products; that it says so is tested below")
    return name


def assert_same_gradients(got, want, leaves):
    mine, theirs = (torch.autograd.grad(x, leaves, retain_graph=True, allow_unused=True) for x in (got, want))
    for a, b in zip(mine, theirs, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(zero.to(b) if a is None and b is not None else a, b)


def test_every_read_is_that_of_the_scores_written_out(problem, backend):
    name, q, k, v, score, own = problem
    policy = partita.scale.LogLength(16)
    scale = policy(torch.arange(1, N + 1), D, q)
    z = by_hand(name, q, k, score) * scale[:, None]
    hidden = torch.where(SEEN, z, -torch.inf)
    level = hidden.logsumexp(-1)
    p, log_p = hidden.softmax(-1), torch.where(SEEN, z - level[..., None], 0.0)
    entropy = -(p * log_p).sum(-1)
    target = torch.zeros(2, N, dtype=torch.int64)
    with serving(backend):
        g = partita.Gibbs(q, k, scale=policy, support=partita.support.causal(), score=score)
        reads = {
            "log_partition": (g.log_partition(), level),
            "entropy": (g.entropy(), entropy),
            "variance": (g.score_variance(), (p * log_p.square()).sum(-1) - entropy.square()),
            "expectation": (g.expectation(v), p @ v),
            "nll": (g.nll(target), level - z[..., 0]),
            "received": (g.received(), p.sum(-2)),
            "probs": (g.probs(), p),
        }
        for got, want in reads.values():
            torch.testing.assert_close(got, want)
            assert_same_gradients(got.square().sum(), want.square().sum(), (q, k, *own))
        scores, index = g.top(2)
        best = hidden.topk(2)
        assert torch.equal(index[..., 1:, :], best.indices[..., 1:, :])
        assert_same_gradients(scores[..., 1:, :].sum(), best.values[..., 1:, :].sum(), (q, k, *own))
        assert torch.equal(g.visible(), torch.arange(1.0, N + 1, dtype=torch.float64).expand(2, N))
        drawn = g.sample()
        assert bool((drawn <= torch.arange(N)).all())


def test_two_distributions_are_compared(problem, backend):
    name, q, k, _, score, own = problem
    log_p = by_hand(name, q, k, score).log_softmax(-1)
    log_q = (q.detach() @ k.detach().mT).log_softmax(-1)
    want = (log_p.exp() * (log_p - log_q)).sum(-1)
    with serving(backend):
        got = partita.divergence(partita.Gibbs(q, k, score=score), partita.Gibbs(q.detach(), k.detach()))
        torch.testing.assert_close(got, want)
        assert_same_gradients(got.sum(), want.sum(), (q, k, *own))
        other = partita.divergence(partita.Gibbs(q.detach(), k.detach()), partita.Gibbs(q, k, score=score), "reverse")
        torch.testing.assert_close(other, want)
        assert_same_gradients(other.sum(), want.sum(), (q, k, *own))


def test_a_bias_a_softcap_and_grouped_heads(problem, backend):
    name, _, k, v, score, own = problem
    many = torch.randn(4, N, D, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(N, M, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(4, N, dtype=torch.float64, requires_grad=True)
    raw = by_hand(name, many, k.repeat_interleave(2, 0), score)
    p = (2.0 * torch.tanh(raw * scale[..., None] / 2.0) + bias).softmax(-1)
    with serving(backend):
        g = partita.Gibbs(many, k, scale=scale, bias=bias, softcap=2.0, grouped=True, score=score)
        got, want = g.expectation(v), p @ v.repeat_interleave(2, 0)
        torch.testing.assert_close(got, want)
        assert_same_gradients(got.square().sum(), want.square().sum(), (many, k, v, bias, scale, *own))
        torch.testing.assert_close(g.received(), p.unflatten(0, (2, 2)).sum((1, 2)))


def test_a_scale_is_solved_for_its_entropy(problem):
    _, q, k, _, score, own = problem
    g = partita.Gibbs(q, k, scale=partita.scale.TargetEntropy(entropy=1.0), score=score)
    torch.testing.assert_close(g.entropy(), torch.ones(2, N, dtype=torch.float64), atol=1e-8, rtol=0)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(g.scale.sum(), (q, k, *own)))


def test_both_ways_and_attention(problem, backend):
    name, q, k, v, score, own = problem
    square = by_hand(name, q[0], k[0, :N], score)
    with serving(backend):
        rows, columns = partita.Gibbs(q[0], k[0, :N], score=score).both_ways_nll()
        torch.testing.assert_close(rows, square.logsumexp(1) - square.diagonal())
        torch.testing.assert_close(columns, square.logsumexp(0) - square.diagonal())
        out = partita.attention(q, k, v, score=score, is_causal=True)
    p = torch.where(SEEN, by_hand(name, q, k, score), -torch.inf).softmax(-1)
    torch.testing.assert_close(out, p @ v)  # no scale given: 1, since such a score has a size of its own
    assert_same_gradients(out.square().sum(), (p @ v).square().sum(), (q, k, v, *own))


def test_second_derivatives(problem):
    name, q, k, _, score, own = problem
    if name == "distance":
        pytest.skip("torch has no second derivative of cdist")
    z = by_hand(name, q, k, score)
    for read, want in (("entropy", -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)), ("log_partition", z.logsumexp(-1))):
        got = getattr(partita.Gibbs(q, k, score=score), read)()
        first, wanted = (torch.autograd.grad(x.sum(), q, create_graph=True)[0] for x in (got, want))
        torch.testing.assert_close(first, wanted)
        assert_same_gradients(first.square().sum(), wanted.square().sum(), (q, k, *own))


def test_under_vmap_and_func_grad(problem):
    name, q, k, _, score, _ = problem
    with torch.no_grad():
        want = by_hand(name, q, k, score).logsumexp(-1)
        got = torch.func.vmap(lambda a, b: partita.Gibbs(a, b, score=score).log_partition())(q, k)
    torch.testing.assert_close(got, want)
    grad = torch.func.grad(lambda a: partita.Gibbs(a, k.detach(), score=score).entropy().sum())(q.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(partita.Gibbs(q, k, score=score).entropy().sum(), q)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", names())
def test_squares_keep_their_digits_in_half(dtype, name):
    """Against float64 on the same numbers: products of half numbers are exact in float32, so only sums are rounded.

    An inner product of m + 2 p terms in float32, each rounded once: m eps |terms|; the pieces hold 22 bits or more.
    """
    torch.manual_seed(0)
    q, k = torch.randn(5, 16).to(dtype), (torch.randn(11, 16) + 2).to(dtype)
    exact = -(q.double()[:, None] - k.double()).square().sum(-1) / 2
    with serving(name):
        got = partita.Gibbs(q, k, score=SquaredDistance()).log_partition()
    size = float(q.double().square().sum(-1).max() + k.double().square().sum(-1).max())
    bound = (16 + 6) * 2.0**-22 * size
    assert float((got.double() - exact.logsumexp(-1)).abs().max()) <= bound


def test_a_score_in_half_computes_in_float32():
    torch.manual_seed(0)
    q, k, net = torch.randn(N, D), torch.randn(M, D), Network(torch.bfloat16)
    got = partita.Gibbs(q.bfloat16().requires_grad_(), k.bfloat16(), score=net).log_partition()
    same = Network(torch.float32)
    same.load_state_dict(net.state_dict())
    torch.testing.assert_close(got, same(q.bfloat16().float(), k.bfloat16().float()).logsumexp(-1))
    got.sum().backward()
    assert net.first.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_hidden_cannot_poison(problem, backend, poison):
    """A key that no row sees, of nan or inf: values and gradients, of parameters too, are those without it."""
    name, q, k, v, score, own = problem
    bad = k.detach().clone()
    bad[:, -1, 1:] = poison
    short = support.lengths(M - 1)
    g, want = partita.Gibbs(q, bad.requires_grad_(), support=short, score=score), None
    with serving(backend):
        want = partita.Gibbs(q, k[:, :-1], score=score)
        mean = g.expectation(v), want.expectation(v[:, :-1])
        pairs = [(g.entropy(), want.entropy()), mean, (g.received()[:, :-1], want.received())]
        for got, right in pairs:
            torch.testing.assert_close(got, right)
            mine = torch.autograd.grad(got.square().sum(), (q, bad, *own), retain_graph=True)
            theirs = torch.autograd.grad(right.square().sum(), (q, k, *own), retain_graph=True)
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b)
    if name != "distance":  # torch has no second derivative of cdist
        second = []
        for x, keys in ((g, bad), (want, k)):
            (first,) = torch.autograd.grad(x.entropy().sum(), q, create_graph=True)
            second.append(torch.autograd.grad(first.square().sum(), (q, keys, *own)))
        for a, b in zip(*second, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_hidden_cannot_poison_a_transform(problem, poison):
    _, q, k, _, score, _ = problem
    bad = k.detach().clone()
    bad[:, -1] = poison

    def read(a, b, *_):
        return partita.Gibbs(a, b, support=support.lengths(M - 1), score=score).entropy().square().sum()

    found = torch.func.vmap(torch.func.grad(read, argnums=(0, 1)))(q.detach(), bad)
    want = torch.autograd.grad(partita.Gibbs(q, k[:, :-1], score=score).entropy().square().sum(), (q, k))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", names())
def test_under_autocast_a_score_is_that_of_lowered_vectors(dtype, name):
    """Distances have the bits that tensors of autocast's dtype give; every kind runs, forward and backward."""
    torch.manual_seed(0)
    q, k = torch.randn(N, 16, requires_grad=True), torch.randn(M, 16, requires_grad=True)
    with serving(name):
        with torch.autocast("cpu", dtype=dtype):
            got = partita.Gibbs(q, k, score=SquaredDistance()).stats()
        want = partita.Gibbs(q.to(dtype), k.to(dtype), score=SquaredDistance()).stats()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_function_runs_outside_of_autocast(problem, dtype):
    """Its tiles come in float32, autocast or not: entropies and gradients are those of the lowered vectors."""
    name, q, k, v, score, _ = problem
    if isinstance(score, InnerProduct):
        pytest.skip("its features are lowered")
    if isinstance(score, torch.nn.Module):
        score = score.float()
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    own = tuple(score.parameters()) if isinstance(score, torch.nn.Module) else ()
    with torch.autocast("cpu", dtype=dtype):
        g = partita.Gibbs(q, k, score=score)
        got = g.entropy(), g.nll(torch.zeros(2, N, dtype=torch.int64)), g.expectation(v).float()
        pair = partita.divergence(g, partita.Gibbs(q, 2 * k, score=score))
    assert all(x.isfinite().all() for x in torch.autograd.grad(sum(x.sum() for x in (*got, pair)), (q, k, v, *own)))
    if name != "additive":  # whose two linear maps are taken under autocast
        low = partita.Gibbs(q.to(dtype), k.to(dtype), score=score)
        assert torch.equal(got[0], low.entropy())


def test_a_parameter_changed_in_place_is_noticed():
    score = Additive(D, D, 5)
    p = partita.Gibbs(torch.randn(N, D), torch.randn(M, D), score=score)
    before = p.entropy().detach()
    with torch.no_grad():
        score.weight.mul_(3.0)
    assert not torch.equal(p.entropy(), before)


def test_a_pass_may_be_read_again_after_its_backward():
    q = torch.randn(N, D, requires_grad=True)
    p = partita.Gibbs(q, torch.randn(M, D), score=Cosine())
    for read in (p.probs, p.entropy, lambda: p.top(2)[0]):
        read().sum().backward()
        read().sum().backward()


def test_tiles_bound_the_memory():
    """A tile of an additive score holds a number for each hidden unit and pair: tiles are smaller by so much."""
    from partita.engine.backends.tiled.grid import choose_tile

    q, k = torch.zeros(4096, 8), torch.zeros(4096, 8)
    plain = choose_tile(partita.Gibbs(q, k).request())
    wide = choose_tile(partita.Gibbs(q, k, score=Additive(8, 8, 64)).request())
    assert wide[0] * wide[1] * 64 <= plain[0] * plain[1]


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_kernels_of_inner_products_say_so():
    q, k = torch.zeros(2, 3), torch.zeros(4, 3)
    p = partita.Gibbs(q, k, score=Distance())
    assert "native: its kernels take inner products" in str(partita.explain(p))
    with partita.backend("native"), pytest.raises(BackendError, match="take inner products"):
        p.entropy()


def test_a_policy_without_scores_to_multiply_is_refused():
    scores = torch.randn(2, 5)
    with pytest.raises(ValueRangeError, match="would do nothing"):
        partita.Gibbs(torch.zeros(2, 0), torch.zeros(5, 0), bias=scores, scale=partita.scale.LogLength())
    with pytest.raises(ValueRangeError, match="would do nothing"):
        partita.attention(
            torch.zeros(2, 0), torch.zeros(5, 0), torch.zeros(5, 3), scores, scale=partita.scale.KappaLog()
        )
    partita.Gibbs(torch.zeros(2, 0), torch.zeros(5, 0), bias=scores)


def test_mistakes_are_named():
    q, k = torch.randn(N, D), torch.randn(M, D)
    loose = torch.randn(D, requires_grad=True)
    mistakes = [
        (3.0, DtypeError, "callable"),
        (lambda a, b: a.sum(), ShapeError, "one number per pair"),
        (lambda a, b: (a @ b.mT).double(), DtypeError, "keep the dtype"),
        (lambda a, b: (a * loose) @ b.mT, ValueRangeError, "nn.Module"),
        (lambda a, b: torch.rand(a.shape[-2], b.shape[-2]), ValueRangeError, "same numbers each time"),
        (lambda a, b: (a @ b.mT).softmax(-1), ValueRangeError, "each pair alone"),
        (Additive(D + 1, D, 3), ShapeError, "query of 5 features"),
        (Bilinear(D, D + 1), ShapeError, "key of 5 features"),
    ]
    for score, error, message in mistakes:
        with pytest.raises(error, match=message):
            partita.Gibbs(q, k, score=score)
    for score in (SquaredDistance(), Distance()):
        with pytest.raises(ShapeError, match="same number of features"):
            partita.Gibbs(q, torch.randn(M, D + 1), score=score)
    with pytest.raises(TypeError, match="abstract"):
        InnerProduct()(q, k)
    with pytest.raises(ValueRangeError, match="leave out group"):
        partita.attention(q, k, k, score=Cosine(), group=object())


# ---- a sigmoid divided by its sum ------------------------------------------------------------------------------------


def test_a_softmax_of_log_sigmoids_is_sigmoids_divided_by_their_sum():
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 7, 7))
    weight = torch.sigmoid(2.0 * q @ k.mT - 1.0)
    share = weight / weight.sum(-1, keepdim=True)
    out, stats = partita.attention(q, k, v, score=LogSigmoid(2.0, 1.0), return_stats=True)
    torch.testing.assert_close(out, share @ v)
    torch.testing.assert_close(stats.entropy, torch.special.entr(share).sum(-1))
    torch.testing.assert_close(stats.log_partition, weight.sum(-1).log())


def test_with_a_high_threshold_it_is_a_softmax_and_with_a_low_one_a_mean():
    q, k, v = (torch.randn(n, 4, dtype=torch.float64) for n in (5, 7, 7))
    soft = partita.attention(q, k, v, scale=2.0)
    torch.testing.assert_close(partita.attention(q, k, v, score=LogSigmoid(2.0, 60.0)), soft)
    torch.testing.assert_close(partita.attention(q, k, v, score=LogSigmoid(2.0, -60.0)), v.mean(0).expand(5, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_heads_learn_their_own_sharpness_and_threshold_with_keys_shared_or_not(dtype):
    """Values and gradients, of four heads that share two key heads too."""
    torch.manual_seed(5)
    score = LogSigmoid(0.7, 0.3, heads=4)
    with torch.no_grad():
        score.sharpness.copy_(torch.tensor([0.2, 0.5, 1.0, 2.0]))
        score.threshold.copy_(torch.tensor([-1.0, 0.0, 0.5, 2.0]))
    q, k, v = (torch.randn(2, h, n, 4, dtype=torch.float64).to(dtype) for h, n in ((4, 5), (2, 7), (2, 7)))
    for few in (False, True):
        key, value = (x if few else x.repeat_interleave(2, 1) for x in (k, v))
        got = partita.attention(q, key, value, score=score, enable_gqa=few).float()
        own = [p.detach().double().requires_grad_() for p in (score.sharpness, score.threshold)]
        wide = [x.double().repeat_interleave(2, 1) if x.shape[1] == 2 else x.double() for x in (key, value)]
        want = reference.log_sigmoid(q.double(), wide[0], *(x[:, None, None] for x in own)).softmax(-1) @ wide[1]
        rough = dict.fromkeys(("rtol", "atol"), 0.03 if dtype == torch.bfloat16 else 1e-5)
        torch.testing.assert_close(got.double(), want, **rough)
        mine = torch.autograd.grad(got.square().sum(), (score.sharpness, score.threshold))
        theirs = torch.autograd.grad(want.square().sum(), own)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.double(), b, **{name: 10 * room for name, room in rough.items()})


def test_what_no_sigmoid_has_is_refused():
    with pytest.raises(ValueRangeError, match="sharpness must"):
        LogSigmoid(-1.0)
    with pytest.raises(ValueRangeError, match="threshold must"):
        LogSigmoid(1.0, float("nan"))
    with pytest.raises(ShapeError, match="same number of features"):
        partita.Gibbs(torch.zeros(2, 3), torch.zeros(2, 4), score=LogSigmoid())
    with pytest.raises(ShapeError, match="this score has 3 heads"):
        partita.Gibbs(torch.zeros(2, 2, 3), torch.zeros(2, 2, 3), score=LogSigmoid(heads=3))
    assert repr(LogSigmoid(2.0, 1.0)) == "LogSigmoid(2.0, 1.0)" and repr(LogSigmoid(heads=3)) == "LogSigmoid(heads=3)"
