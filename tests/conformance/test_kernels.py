"""Kernels of a backend's own give what the ordinary pass gives: the same questions for each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import partita
from partita.engine import autograd, backends, execute
from tests.differences import gradcheck, gradgradcheck
from tests.tolerances import assert_exact


def _offering(kernel: str):
    """A fixture: the backends that offer this kernel and can serve here, one after the other, entered."""
    offered = [name for name, entry in backends.TABLE.items() if getattr(entry, kernel) is not None]

    @pytest.fixture(params=offered)
    def enter(request):
        name = request.param
        if backends.TABLE[name].why_not(partita.Gibbs(torch.zeros(1, 1), torch.zeros(1, 1)).request()) is not None:
            pytest.skip(f"{name} cannot serve here")
        with partita.backend(name):
            yield backends.TABLE[name]

    return enter


attention_of = _offering("attention")
accumulate_attention_of = _offering("accumulate_attention")
weighted_nll_of = _offering("weighted_nll")
both_ways_of = _offering("both_ways")


def ordinarily(monkeypatch) -> None:
    """From now on, no kernel of a backend's own is taken."""
    for name, entry in list(backends.TABLE.items()):
        plain = backends.Backend(name, entry.place, entry.why_not, entry.forward, entry.backward)
        monkeypatch.setitem(backends.TABLE, name, plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 70), (33, 33), (20, 50), (50, 20)])
def test_attention_gives_the_bits_of_the_pass(attention_of, causal, key_heads, dtype, n_query, n_key) -> None:
    query = torch.randn(2, n_query, 6, 16, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(2, key_heads, n_key, 16, dtype=dtype) for _ in range(2))
    found = execute.attention(query, key, value, 0.25, causal, True, True)
    assert found is not None
    seen = partita.support.causal() if causal else None
    want, state = partita.Gibbs(query, key, scale=0.25, support=seen, grouped=True).mean(value)
    assert torch.equal(found[0], want)
    assert found[1] is not None
    for name, a, b in zip(partita.Stats._fields, found[1], state.stats(), strict=True):
        assert torch.equal(a, b), name
    out, stats = partita.attention(query, key, value, is_causal=causal, enable_gqa=True, return_stats=True)
    assert torch.equal(out, want)
    assert torch.equal(stats.entropy, state.stats().entropy)
    assert torch.equal(partita.attention(query, key, value, is_causal=causal, enable_gqa=True), want)


def _totals(heads: int) -> tuple[torch.Tensor, ...]:
    shapes = (11, heads), (heads,), (heads,), (heads, 64), (5, heads, 24)
    return tuple(torch.zeros(shape, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 1070), (33, 33), (20, 600), (50, 20)])
@pytest.mark.parametrize("kept", [False, True])
def test_attention_adds_up_what_the_pass_gives(
    accumulate_attention_of, causal, key_heads, dtype, n_query, n_key, kept
) -> None:
    query = torch.randn(2, n_query, 6, 16, dtype=dtype).transpose(1, 2)
    key = torch.randn(2, key_heads, n_key, 16, dtype=dtype)
    keep = torch.rand(2, n_query) < 0.7 if kept else None
    found, want = _totals(6), _totals(6)
    assert execute.accumulate_attention(found, query, key, 0.25, causal, keep)
    seen = partita.support.causal() if causal else None
    gibbs = partita.Gibbs(query, key, scale=0.25, support=seen, grouped=True)
    s = gibbs.stats()
    sink = (-gibbs.nll(torch.zeros(2, 6, n_query, dtype=torch.long))).exp()
    rows = s.entropy, s.log_partition, s.score_variance, s.max_score, s.visible
    assert execute.accumulate(want, *rows, sink, keep)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # the mass on key 0: another exponential
    want[0][8], want[4][4] = found[0][8], found[4][4]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_attention_that_is_followed_or_unusual_is_not_added_up(accumulate_attention_of) -> None:
    q, k = (torch.randn(2, 4, 9, 8) for _ in range(2))

    def taken(query=q, key=k, scale=0.5, keep=None) -> bool:
        totals = _totals(4)
        added = execute.accumulate_attention(totals, query, key, scale, False, keep)
        assert added == any(t.any() for t in totals)  # otherwise nothing was done
        return added

    assert taken()
    assert taken(key=k[:, :2])
    assert not taken(query=q.clone().requires_grad_())
    assert not taken(q.double(), k.double())
    assert not taken(key=k.double())
    assert not taken(key=k[..., :5])
    assert not taken(key=k[:, :3])  # four heads are no multiple of three
    assert not taken(key=k[:1])  # a batch that broadcasts
    assert not taken(q[:, :, :0])
    assert not taken(q.mT.contiguous().mT)
    assert not taken(scale=float("inf"))
    assert not taken(key=torch.full_like(k, torch.nan))
    assert not taken(keep=torch.ones(2, 9))
    with torch.profiler.profile():
        assert not taken()
    with partita.backend("tiled"):
        assert not taken()


def test_attention_that_somebody_follows_or_that_is_unusual_goes_the_long_way(attention_of) -> None:
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))

    def taken(query=q, key=k, value=v, scale=0.5, grouped=False) -> bool:
        return execute.attention(query, key, value, scale, False, grouped, True) is not None

    assert taken()
    assert not taken(query=q.clone().requires_grad_())
    assert not taken(key=k.double())
    assert not taken(key=k[..., :5])
    assert not taken(value=v[:, :, :5])
    assert not taken(key=k[:, :3], value=v[:, :3])  # four heads are no multiple of three
    assert not taken(key=k[:1], value=v[:1])  # a batch that broadcasts
    assert not taken(q[:, :, :0])
    assert not taken(scale=float("inf"))
    assert not taken(value=torch.full_like(v, torch.nan))  # only a careful backend can say whom that concerns
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not taken()
    with torch.profiler.profile():
        assert not taken()
    with partita.backend("tiled"):
        assert not taken()
    with torch.no_grad():
        assert taken(query=q.clone().requires_grad_())
    assert not taken(key=k[:, :2], value=v[:, :2])  # grouped heads were not asked for
    assert taken(key=k[:, :2], value=v[:, :2], grouped=True)


def test_transformed_attention_agrees(attention_of) -> None:
    q, k, v = (torch.randn(3, 4, 9, 8) for _ in range(3))
    want = partita.attention(q, k, v)
    torch.testing.assert_close(torch.func.vmap(partita.attention)(q, k, v), want)
    assert torch.func.grad(lambda x: partita.attention(x, k, v).square().sum())(q).shape == q.shape
    made = torch.compile(partita.attention, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(made, want)


def test_plain_attention_says_what_is_wrong_with_its_arguments(attention_of) -> None:
    q = torch.randn(2, 4, 9, 8)
    with pytest.raises(partita.errors.PartitaError, match=r"heads|batch"):
        partita.attention(q, q[:, :2], q[:, :2])
    with pytest.raises(TypeError, match="key"):
        partita.attention(q, [1.0], q)
    with pytest.raises(partita.errors.ShapeError, match="dim"):
        partita.attention(q, q[..., :5], q)
    with pytest.raises(partita.errors.ValueRangeError, match="scale"):
        partita.attention(q, q, q, scale=float("nan"))


def classifier(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[list[Tensor], Tensor, Tensor]:
    """Operands (query, key, scale, bias) of a classifier of 37 classes, its targets, and a weight per row."""
    operands = [torch.randn(29, 11, dtype=dtype), torch.randn(37, 11, dtype=dtype), torch.rand(29, dtype=dtype) + 0.5]
    operands += [torch.randn(1, 37, dtype=dtype)] if bias else []
    return [t.requires_grad_() for t in operands], torch.randint(37, (29,)), torch.rand(29, dtype=dtype)


def total(operands: list[Tensor], target: Tensor, weight: Tensor) -> Tensor:
    query, key, scale, *bias = operands
    return partita.Gibbs(query, key, scale=scale, bias=bias[0] if bias else None).weighted_nll(target, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_the_weighted_nll_and_its_gradients_are_those_of_the_pass(weighted_nll_of, monkeypatch, bias, dtype) -> None:
    operands, target, weight = classifier(dtype, bias)
    calls = []

    def counted(*given):
        calls.append(weighted_nll_of.weighted_nll(*given))
        return calls[-1]

    monkeypatch.setitem(backends.TABLE, weighted_nll_of.name, replace(weighted_nll_of, weighted_nll=counted))
    one = total(operands, target, weight)
    assert type(one.grad_fn).__name__ == "WeightedNllBackward"
    assert len(calls) == 1 and calls[0] is not None  # it served, and did not give up
    found = torch.autograd.grad(3 * one, operands, retain_graph=True)
    again = torch.autograd.grad(3 * one, operands)  # a retained graph: computed once more
    ordinarily(monkeypatch)
    other = total(operands, target, weight)
    # sums of 29 rows of nlls of up to 16, and products of 37 more terms of size one: as many roundings of each
    slack = 37 * torch.finfo(dtype).eps
    torch.testing.assert_close(one, other, rtol=slack, atol=slack)
    for a, b, c in zip(found, again, torch.autograd.grad(3 * other, operands), strict=True):
        torch.testing.assert_close(a, c, rtol=slack, atol=37 * slack)
        torch.testing.assert_close(b, c, rtol=slack, atol=37 * slack)


def test_the_weighted_nll_has_second_derivatives(weighted_nll_of) -> None:
    (query, key, scale, bias), target, weight = classifier()
    small = [query.detach()[:5, :3], key.detach()[:7, :3], scale.detach()[:5], bias.detach()[:, :7]]
    inputs = [t.clone().requires_grad_() for t in small]
    # the first backward gives what was made going forward, a second one recomputes: a few roundings apart
    apart = 1e-13
    assert gradcheck(lambda *x: total(list(x), target[:5] % 7, weight[:5]), inputs, nondet_tol=apart)
    assert gradgradcheck(lambda *x: total(list(x), target[:5] % 7, weight[:5]), inputs)


def test_what_is_not_finite_is_left_to_the_pass(weighted_nll_of, monkeypatch) -> None:
    """A nan in one row: that row's gradient is nan, and the value is; other rows keep theirs."""
    operands, target, weight = classifier(bias=False)
    with torch.no_grad():
        operands[0][3, 0] = torch.nan
    found = torch.autograd.grad(total(operands, target, weight), operands[0])[0]
    ordinarily(monkeypatch)
    want = torch.autograd.grad(total(operands, target, weight), operands[0])[0]
    assert torch.equal(found.isnan(), want.isnan())
    assert_exact(found[4:], want[4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ways_are_two_passes(both_ways_of, monkeypatch, dtype) -> None:
    query, key = (torch.randn(41, 9, dtype=dtype).requires_grad_() for _ in range(2))
    scale = torch.tensor(0.7, dtype=dtype).requires_grad_()

    def both() -> tuple[Tensor, ...]:
        rows, columns = partita.Gibbs(query, key, scale=scale).both_ways_nll()
        weight = torch.linspace(0.1, 1.0, 41, dtype=dtype)
        made = (rows * weight).sum() + (columns * weight.flip(0)).sum()
        return rows, columns, *torch.autograd.grad(made, (query, key, scale))

    rows, _ = partita.Gibbs(query, key, scale=scale).both_ways_nll()
    assert type(rows.grad_fn).__name__ == "BothWaysNllBackward"
    found = both()
    ordinarily(monkeypatch)
    # sums of 41 terms of size one, and their gradients' products of 41 more: 41 roundings of each
    slack = 41 * torch.finfo(dtype).eps
    for a, b in zip(found, both(), strict=True):
        torch.testing.assert_close(a, b, rtol=slack, atol=41 * slack)


def test_both_ways_refuse_what_a_column_has_not() -> None:
    query, key = torch.randn(5, 3), torch.randn(5, 3)
    with pytest.raises(partita.errors.ValueRangeError, match="one scale"):
        partita.Gibbs(query, key, scale=torch.rand(5)).both_ways_nll()
    with pytest.raises(partita.errors.ValueRangeError, match="no support"):
        partita.Gibbs(query, key, support=partita.support.causal()).both_ways_nll()


def test_statistics_of_a_kernel_are_not_made_again(attention_of) -> None:
    """With a graph too, what `stats` gives are the very numbers of the backend."""
    query, key = torch.randn(2, 19, 8), torch.randn(2, 23, 8)
    request = partita.Gibbs(query, key).request()
    made = autograd.forward(request).statistics
    stats = partita.Gibbs(query.clone().requires_grad_(), key).stats()
    assert made is not None
    for a, b in zip(made, stats, strict=False):
        assert torch.equal(a, b.detach())
    assert stats.entropy.requires_grad


def test_both_ways_of_several_batches_of_pairs() -> None:
    query, key = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    rows, columns = partita.Gibbs(query, key).both_ways_nll()
    scores = query @ key.mT
    assert_exact(rows, -scores.log_softmax(-1).diagonal(dim1=-2, dim2=-1))
    assert_exact(columns, -scores.log_softmax(-2).diagonal(dim1=-2, dim2=-1))
