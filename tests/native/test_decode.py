"""One or two query rows, which read keys and values in place: the same numbers as any other way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import partita
from partita import support
from partita.engine.backends.native import passes as native
from partita.engine.request import Request
from tests.tolerances import assert_exact, assert_no_worse_than_naive

SHAPES = [
    (1, 1, 16, 16),
    (1, 17, 64, 64),
    (2, 513, 128, 32),
    (1, 1100, 256, 80),
    (2, 1031, 32, 5),
    (1, 640, 400, 16),
    (1, 640, 136, 16),
    (2, 64, 17, 16),
    (1, 70, 3, 3),
]


def _supports(n_query: int, n_key: int) -> list[support.Support | None]:
    torch.manual_seed(n_key)
    lengths = support.lengths(torch.tensor([n_key, max(1, n_key // 3), 0]).view(3, 1))
    return [
        None,
        support.causal(align="bottom-right"),
        support.window(n_key // 2, 0),
        support.mask(torch.rand(n_query, n_key) < 0.3),
        lengths,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_a_decoding_step(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    n_query, n_key, dim, width = shape
    query, key, value = (
        torch.randn(3, n, 4, d, dtype=dtype).transpose(1, 2)  # (batch, heads, n, d), not contiguous
        for n, d in ((n_query, dim), (n_key, dim), (n_key, width))
    )
    bias = torch.randn(n_query, n_key, dtype=dtype)
    for seen in _supports(n_query, n_key):
        for more in ({}, {"softcap": 3.0}, {"bias": bias}):

            def run(backend: str, *of: Tensor, seen: object = seen, more: dict[str, object] = more) -> list[Tensor]:
                extra = {k: v.to(of[0].dtype) if isinstance(v, Tensor) else v for k, v in more.items()}
                with partita.backend(backend):
                    out, stats = partita.attention(*of, support=seen, return_stats=True, **extra)
                return [out, *stats[:4]]

            given = (query, key, value)
            truth = run("dense", *(x.double() for x in given))
            naive = run("dense", *given)
            for mine, plain, true in zip(run("native", *given), naive, truth, strict=True):
                if dtype == torch.float64:
                    assert_exact(mine, true)
                else:
                    assert_no_worse_than_naive(mine, plain, true)


@pytest.mark.parametrize(("key_heads", "n_key", "near"), [(6, 700, 2e-6), (1, 5000, 1e-6)])
def test_heads_with_keys_of_their_own_and_keys_that_several_share(key_heads: int, n_key: int, near: float) -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, key_heads, n_key, 64), torch.randn(2, key_heads, n_key, 64)
    for group in (1, 2, 4):
        query = torch.randn(2, group * key_heads, 1, 64)
        out = partita.attention(query, key, value, enable_gqa=True)
        truth = torch.nn.functional.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), enable_gqa=True
        )
        torch.testing.assert_close(out.double(), truth, atol=near, rtol=1e-5)
        assert torch.equal(out, partita.attention(query, key, value, enable_gqa=True))


def test_a_row_that_may_go_backward_is_scored_as_it_will_be_there() -> None:
    """With other roundings forward than backward, sharp rows would not sum to one: 1e-4 in a gradient, and more."""
    torch.manual_seed(2)
    query, key, value = torch.randn(40, 64) * 30, torch.randn(900, 64), torch.randn(900, 8)

    def peak(rows: Tensor, last: bool) -> Tensor:
        sums = native.forward(Request(rows, key, value, torch.ones(1), None, None, (), None, last=last))
        assert sums is not None
        return sums.peak

    many = peak(query, last=False)
    one_by_one = torch.cat([peak(query[i : i + 1], last=False) for i in range(40)])
    assert torch.equal(one_by_one, many)
    assert not torch.equal(torch.cat([peak(query[i : i + 1], last=True) for i in range(40)]), many)
