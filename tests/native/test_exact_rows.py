"""The same bits: a row does not know who rides along, on every kernel of the native library."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita
from partita.engine.backends.native import library, passes
from partita.exactness import in_exact_rows
from tests.company import ALONE, companies, differing, numbers, rows

pytestmark = pytest.mark.skipif(library.load() is None, reason="the native library is not there")
EXAMPLES = int(os.environ.get("PARTITA_TEST_EXAMPLES", "60"))


def same_alone_and_in_company(row, company):
    with partita.exact_rows():
        return differing(numbers(row, ALONE), numbers(row, company))


@settings(max_examples=EXAMPLES, deadline=None)
@given(row=rows(), company=companies())
def test_a_row_does_not_know_its_company(row, company):
    assert same_alone_and_in_company(row, company) == []


@pytest.mark.parametrize("isa", ["avx512", "avx2", "baseline"])
def test_on_lesser_instruction_sets(isa):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "company or tokens"]
    run = subprocess.run(command, env={**os.environ, "PARTITA_ISA": isa}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:]


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(st.data())
def test_tokens_and_losses(data):
    """Rows of a classifier: token statistics, cross entropy, and the gradient of a row's own hidden state."""
    draw = data.draw
    n, classes = draw(st.sampled_from((1, 2, 15, 70))), draw(st.sampled_from((11, 130, 1100)))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))
    at, dim = draw(st.integers(0, n - 1)), draw(st.sampled_from((7, 16, 40)))
    bias = torch.randn(classes).to(dtype) if draw(st.booleans()) else None
    own = torch.Generator().manual_seed(1)
    weight, row = torch.randn(classes, dim, generator=own).to(dtype), torch.randn(dim, generator=own).to(dtype)

    def read(rows, at, threads):
        torch.set_num_threads(threads)
        hidden = torch.randn(rows, dim).to(dtype)
        hidden[at] = row
        hidden.requires_grad_()
        ids = torch.randint(classes, (rows,))
        ids[at] = 3
        want = (
            "log_prob",
            "entropy",
            "varentropy",
            "rank",
            "max_logit",
            "mean_logit",
            "logsumexp",
            "log_sum_sq",
            "top_k:3",
        )
        stats = partita.token_stats(hidden, weight, ids, bias=bias, want=want)
        found = {str(i): x for i, x in enumerate(stats)}
        (found["of stats"],) = torch.autograd.grad((stats.log_prob + stats.entropy).sum(), hidden)
        found["loss"] = partita.linear_cross_entropy(hidden, weight, ids, linear_bias=bias, reduction="none")
        total = partita.linear_cross_entropy(hidden, weight, ids, linear_bias=bias, reduction="sum")
        (found["of the loss"],) = torch.autograd.grad(total, hidden)
        return {name: x.detach()[at] for name, x in found.items()}

    threads = torch.get_num_threads()
    try:
        with partita.exact_rows():
            assert differing(read(1, 0, 1), read(n, at, draw(st.integers(1, 4)))) == []
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_decoding_is_the_last_row_of_a_prefill(data):
    """One query over a cache, with grouped heads or not, against the row of a causal pass; with padding on the left."""
    draw = data.draw
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))
    heads, groups, n, dim = (
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((1, 3))),
        draw(st.sampled_from((5, 290, 1300))),
        32,
    )
    new = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    q = torch.randn(2, heads * groups, n, dim, generator=new).to(dtype)
    k, v = (torch.randn(2, heads, n, dim, generator=new).to(dtype) for _ in range(2))
    at = draw(st.integers(0, n - 1))
    with partita.exact_rows(), torch.no_grad():
        whole, stats = partita.attention(q, k, v, is_causal=True, enable_gqa=True, return_stats=True)
        cache = (q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1])
        one, own = partita.attention(*cache, enable_gqa=True, return_stats=True)
        assert torch.equal(one[:, :, 0], whole[:, :, at])
        assert all(torch.equal(x[..., 0], y[..., at]) for x, y in zip(own, stats, strict=True))
        pad = draw(st.sampled_from((1, 40, 600)))
        wide = [torch.cat([torch.randn(*x.shape[:2], pad, dim).to(dtype), x], 2) for x in (q, k, v)]
        seen = (
            partita.support.causal()
            & partita.support.window(None, None)
            & partita.support.mask(torch.arange(pad + n) >= pad)
        )
        shifted = partita.attention(*wide, support=seen, enable_gqa=True)  # and no statistics
        assert torch.equal(shifted[:, :, pad + at], whole[:, :, at])


def test_every_split_of_keys_and_rows_in_the_backward_pass():
    """Segments of keys in turn and side by side, more rows than a chunk, few groups and many."""
    torch.manual_seed(0)
    own = torch.randn(16)
    for n_key in (300, 20000):
        key, up = torch.randn(n_key, 16), torch.randn(2)
        found = set()
        for heads, n, threads in ((1, 1, 1), (1, 3000 if n_key < 1000 else 40, 2), (3, 20, 4), (9, 7, 3)):
            torch.set_num_threads(threads)
            q = torch.randn(heads, n, 16)
            q[-1, n // 2] = own
            q.requires_grad_()
            k = torch.randn(heads, n_key, 16)
            k[-1] = key
            with partita.exact_rows():
                p = partita.Gibbs(q, k)
                (back,) = torch.autograd.grad((p.log_partition() * up[0] + p.entropy() * up[1]).sum(), q)
            found.add(bytes(back[-1, n // 2].view(torch.uint8).tolist()))
        assert len(found) == 1
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["key", "value", "query"])
def test_shared_gradients_do_not_know_the_threads(kind):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 700, 24).requires_grad_() for _ in range(3))
    found = set()
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        with partita.exact_rows():
            out = partita.attention(q, k, v, is_causal=True)
            back = dict(zip(("query", "key", "value"), torch.autograd.grad(out.square().sum(), (q, k, v)), strict=True))
        found.add(bytes(back[kind].reshape(-1).view(torch.uint8).tolist()))
    torch.set_num_threads(1)
    assert len(found) == 1


@settings(max_examples=20, deadline=None, database=None)
@given(row=rows(dtypes=(torch.float32,), keys=(300,)), company=companies(hidden=(0,)))
def unsupported_rows(row, company):
    """Plain rows with no support, of which the mutation below may take the keys apart."""
    plain = replace(company, support="all", causal=False, at=min(company.at, company.rows - 1))
    assert same_alone_and_in_company(replace(row, biased=False), plain) == []


def test_a_reduction_that_is_cut_by_the_number_of_rows_is_noticed(monkeypatch):
    """The mutation: keys in two parts for calls of several rows, merged afterwards."""
    unsupported_rows()
    whole = passes._forward

    def cut(r, columns=None):
        if r.n_query == 1 or r.terms or r.value is not None or r.target is not None or r.bias is not None:
            return whole(r, columns)
        parts = [whole(replace(r, key=r.key[..., some, :])) for some in (slice(0, 100), slice(100, None))]
        state = parts[0].state.merge(parts[1].state)
        return partita.engine.sums.Sums.of(state).answering(r)

    monkeypatch.setattr(passes, "_forward", cut)
    with pytest.raises(AssertionError):
        unsupported_rows()


@pytest.mark.parametrize("loss", ["scalar", "rows"])
def test_a_backward_pass_is_as_its_forward_pass(loss):
    """What was computed inside is differentiated outside; of rows by two segments of keys."""
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(30, 24).requires_grad_(), torch.randn(9000, 24), torch.arange(30)
    found = []
    for outside in (True, False):
        with partita.exact_rows():
            rows = partita.linear_cross_entropy(hidden, weight, ids, reduction="sum" if loss == "scalar" else "none")
            if not outside:
                found += torch.autograd.grad(rows.sum(), hidden)
        if outside:
            found += torch.autograd.grad(rows.sum(), hidden)
    assert torch.equal(*found)


def test_the_context_is_left_and_may_be_nested():
    one = partita.exact_rows()
    assert not in_exact_rows()
    with one, one:
        assert in_exact_rows()
    assert not in_exact_rows()


def test_the_environment_says_it_too():
    code = "from partita.exactness import in_exact_rows; print(in_exact_rows())"
    for value, answer in (("1", "True"), ("0", "False"), ("", "False")):
        env = {**os.environ, "PARTITA_EXACT_ROWS": value}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == answer
