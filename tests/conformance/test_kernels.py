"""Kernels of a backend's own give what the ordinary pass gives: the same questions for each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import partita
from partita.engine import autograd, backends, dispatch
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
row_statistics_of = _offering("row_statistics")
weighted_nll_of = _offering("weighted_nll")
both_ways_of = _offering("both_ways")


def ordinarily(monkeypatch) -> None:
    """From now on, no kernel of a backend's own is taken."""
    for name, entry in list(backends.TABLE.items()):
        plain = backends.Backend(name, entry.why_not, entry.forward, entry.backward)
        monkeypatch.setitem(backends.TABLE, name, plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 70), (33, 33), (20, 50), (50, 20)])
def test_attention_gives_the_bits_of_the_pass(attention_of, causal, key_heads, dtype, n_query, n_key) -> None:
    query = torch.randn(2, n_query, 6, 16).to(dtype).transpose(1, 2)
    key, value = (torch.randn(2, key_heads, n_key, width).to(dtype) for width in (16, 24))
    seen = partita.support.causal() if causal else None
    for scale in (-3.0, 0.25):  # the scale is no part of what is kept
        found = dispatch.attention(query, key, value, scale, causal, True, True)
        assert found is not None and found[1] is not None
        want, state = partita.Gibbs(query, key, scale=scale, support=seen, grouped=True).mean(value)
        assert found[0].dtype == dtype and torch.equal(found[0], want.to(dtype))
        for name, a, b in zip(partita.Stats._fields, found[1], state.stats(), strict=True):
            assert torch.equal(a, b), name
    out, stats = partita.attention(query, key, value, is_causal=causal, enable_gqa=True, return_stats=True)
    assert torch.equal(out, want.to(dtype))
    assert torch.equal(stats.entropy, state.stats().entropy)
    assert torch.equal(partita.attention(query, key, value, is_causal=causal, enable_gqa=True), out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 1070), (33, 33), (20, 600), (50, 20)])
def test_row_statistics_have_the_bits_of_the_pass(row_statistics_of, causal, key_heads, dtype, n_query, n_key) -> None:
    query = torch.randn(2, n_query, 6, 16, dtype=dtype).transpose(1, 2)
    key = torch.randn(2, key_heads, n_key, 16, dtype=dtype)
    found = dispatch.row_statistics(query, key, 0.25, causal)
    assert found is not None
    gibbs = partita.Gibbs(query, key, scale=0.25, support=partita.support.causal() if causal else None, grouped=True)
    for name, a, b in zip(partita.Stats._fields, found, gibbs.stats(), strict=False):
        assert torch.equal(a, b), name
    sink = (-gibbs.nll(torch.zeros(2, 6, n_query, dtype=torch.long))).exp()
    torch.testing.assert_close((found[6] - found[0]).exp(), sink, rtol=1e-6, atol=1e-7)  # another exponential


@pytest.mark.parametrize("statistics_alone", [False, True])
def test_what_is_recorded_or_unusual_takes_the_general_path(attention_of, statistics_alone) -> None:
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))

    def taken(query=q, key=k, value=v, scale=0.5, grouped=False) -> bool:
        if statistics_alone:
            return dispatch.row_statistics(query, key, scale, False) is not None
        return dispatch.attention(query, key, value, scale, False, grouped, True) is not None

    if statistics_alone and attention_of.row_statistics is None:
        pytest.skip("no kernel of the statistics alone")
    assert taken()
    assert taken(key=k[:, :2], value=v[:, :2], grouped=True)
    assert not taken(query=q.clone().requires_grad_())
    assert not taken(key=k.double())
    assert not taken(q.int(), k.int(), v.int())
    assert not taken(q[0, 0], k[0, 0], v[0, 0])
    assert not taken(key=k[..., :5])
    assert not taken(key=k[:, :3], value=v[:, :3])  # four heads are no multiple of three
    assert not taken(key=k[:1], value=v[:1])  # a batch that broadcasts
    assert not taken(q[:, :, :0])
    assert not taken(q.mT.contiguous().mT)
    assert not taken(key=k.mT.contiguous().mT)
    assert not taken(query=q.to("meta"))
    for scale in (float("inf"), float("nan")):
        assert not taken(scale=scale)
    assert not taken(key=torch.full_like(k, torch.nan))  # only a careful backend can tell which rows that concerns
    with torch.profiler.profile():
        assert not taken()
    with partita.backend("tiled"):
        assert not taken()
    with torch.no_grad():
        assert taken(query=q.clone().requires_grad_())
    if statistics_alone:
        return
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not taken()
    assert not taken(key=k[:, :2], value=v[:, :2])  # grouped heads were not asked for
    for value in (v[:, :, :5], torch.full_like(v, torch.nan)):
        assert not taken(value=value)


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
    assert type(one.grad_fn).__name__ == "FastPathBackward"
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
    assert type(rows.grad_fn).__name__ == "FastPathBackward"
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
