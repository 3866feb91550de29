"""The short way to plain attention: the numbers of the long one, bit for bit, and its errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import partita
from partita import direct
from partita.engine.backends.native import library as native_library

pytestmark = pytest.mark.skipif(native_library.load() is None, reason="no native library")


def long_way(query: Tensor, key: Tensor, value: Tensor, causal: bool, grouped: bool) -> tuple[Tensor, partita.Stats]:
    seen = partita.support.causal() if causal else None
    gibbs = partita.Gibbs(query, key, scale=query.shape[-1] ** -0.5, support=seen, grouped=grouped)
    mean, state = gibbs.mean(value)
    return mean, state.stats()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 70), (33, 33), (20, 50), (50, 20)])
def test_both_ways_give_the_same_bits(
    causal: bool, key_heads: int, dtype: torch.dtype, n_query: int, n_key: int
) -> None:
    query = torch.randn(2, n_query, 6, 16, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(2, key_heads, n_key, 16, dtype=dtype) for _ in range(2))
    short = direct.attend(query, key, value, 0.25, causal, True, True)
    assert short is not None
    want, known = long_way(query, key, value, causal, True)
    assert torch.equal(short[0], want)
    assert short[1] is not None
    for name, a, b in zip(partita.Stats._fields, short[1], known, strict=True):
        assert torch.equal(a, b), name
    out, stats = partita.attention(query, key, value, is_causal=causal, enable_gqa=True, return_stats=True)
    assert torch.equal(out, want)
    assert torch.equal(stats.entropy, known.entropy)
    assert torch.equal(partita.attention(query, key, value, is_causal=causal, enable_gqa=True), want)


def test_what_is_not_usual_goes_the_long_way() -> None:
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))

    def taken(query: Tensor = q, key: Tensor = k, value: Tensor = v, scale: float = 0.5) -> bool:
        return direct.attend(query, key, value, scale, False, False, True) is not None

    assert taken()
    assert not taken(query=q.clone().requires_grad_())
    assert not taken(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert not taken(key=k.double())
    assert not taken(key=k[..., :5])
    assert not taken(value=v[:, :, :5])
    assert not taken(key=k[:, :3], value=v[:, :3])  # four heads are no multiple of three
    assert not taken(key=k[:1], value=v[:1])  # a batch that broadcasts
    assert not taken(q[:, :, :0])
    assert not taken(scale=float("inf"))
    assert not taken(value=torch.full_like(v, torch.nan))  # not finite: the careful backend looks
    with partita.backend("tiled"):
        assert not taken()
    with torch.autocast("cpu"):
        assert not taken()
    with torch.no_grad():
        assert taken(query=q.clone().requires_grad_())
    assert not taken(key=k[:, :2], value=v[:, :2])  # grouped heads were not asked for
    with pytest.raises(TypeError, match="key"):
        partita.attention(q, [1.0], v)  # type: ignore[call-overload]
    with pytest.raises(partita.errors.ShapeError, match="dim"):
        partita.attention(q, k[..., :5], v)


def test_transformed_calls_go_the_long_way_and_agree() -> None:
    q, k, v = (torch.randn(3, 4, 9, 8) for _ in range(3))
    want = partita.attention(q, k, v)
    torch.testing.assert_close(torch.func.vmap(partita.attention)(q, k, v), want)
    grad = torch.func.grad(lambda x: partita.attention(x, k, v).square().sum())(q)
    assert grad.shape == q.shape
    made = torch.compile(partita.attention, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(made, want)
