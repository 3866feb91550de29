"""The same bits on the backends that use torch's products: a row does not know who rides along."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

import partita
from tests.company import ALONE, Company, companies, differing, numbers, rows

NOT_PROMISED = {"top", "top's keys"}  # by the native backend alone


@pytest.mark.parametrize("backend", ["tiled", "dense"])
def test_a_row_does_not_know_its_company(backend):
    @settings(max_examples=20, deadline=None)
    @given(row=rows(keys=(1, 37, 300, 700)), company=companies(hidden=(0, 1, 31, 200), lead=((1,), (2,)), most=15))
    def check(row, company):
        with partita.backend(backend), partita.exact_rows():
            assert set(differing(numbers(row, ALONE), numbers(row, company))) <= NOT_PROMISED

    check()


def test_exact_tiles_give_what_tiles_give():
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, n, w, dtype=torch.float64, requires_grad=True) for n, w in ((70, 20), (90, 20), (90, 11))
    )
    bias, scale = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((70, 1), (3, 70)))
    for bound in (
        partita.support.causal(),
        partita.support.lengths(torch.tensor([50, 0])),
        partita.support.window(5, -1),
    ):
        found = []
        for context in (partita.backend("tiled"), partita.exact_rows()):
            with partita.backend("tiled"), context:
                p = partita.Gibbs(q, k, scale=scale, bias=bias, support=bound, softcap=5.0)
                target = torch.arange(70).expand(2, 3, 70)
                reads = [*p.stats(), p.nll(target), p.expectation(v)]
                total = sum(x.masked_fill(x.isinf(), 0.0).sin().sum() for x in reads)
                found.append(
                    [*reads, p.target_rank(target), p.argmax(), *torch.autograd.grad(total, (q, k, v, scale, bias))]
                )
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (0, 3, 4)], ids=str)
def test_no_rows(shape):
    with partita.backend("tiled"), partita.exact_rows():
        p = partita.Gibbs(torch.zeros(shape), torch.zeros(3, 4))
        assert p.entropy().shape == shape[:-1]
        assert p.expectation(torch.zeros(3, 2)).shape == (*shape[:-1], 2)


IN_TRITON = """
import torch, partita
from tests.company import ALONE, Company, Row, differing, numbers

row = Row({dtype}, 300, 16, 16, 1, None, False)
with partita.backend("triton"), partita.exact_rows():
    alone = numbers(row, ALONE)
    for given in {companies}:
        print(sorted(set(differing(alone, numbers(row, Company(*given)))) - {{"top", "top's keys"}}))
"""
FEW = [
    ((1,), 40, (0,), 33, 0, 0, "all", False, 0, 2, 1),
    ((3,), 1, (2,), 0, 0, 40, "lengths", False, 0, 1, 1),
    ((1,), 5, (0,), 4, 0, 0, "all", True, 0, 1, 1),
    ((1,), 9, (0,), 3, 0, 32, "mask", False, 2, 1, 1),
]


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
def test_triton_in_its_interpreter(dtype):
    """Fixed tiles and no split: other rows, batch entries, keys hidden behind, a causal pass, chunks of rows."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    code = IN_TRITON.format(dtype=dtype, companies=FEW)
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:-1] == ["[]"] * 4


def test_alone_is_a_company():
    assert Company((1,), 1, (0,), 0, 0, 0, "all", False, 0, 1, 0) == ALONE
