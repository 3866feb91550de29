"""Compiled graphs in exact rows: a row does not know its company, and has the bits of the uncompiled call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import partita
from partita.engine.backends.native import library, passes
from partita.engine.sums import Sums

KEYS, CLASSES, DIM = 300, 1100, 24
COMPANIES = ((1, 0, 1, 0), (13, 7, 2, 1), (40, 33, 3, 2))  # rows, the row's place, batch entries, the row's
WANT = ("log_prob", "entropy", "varentropy", "rank", "logsumexp")


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out, stats = partita.attention(q, k, v, return_stats=True)
    return out, stats.log_partition, stats.entropy, stats.score_variance


def cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    rows = partita.linear_cross_entropy(hidden, weight, ids, reduction="none", z_loss=0.1)
    return rows, *partita.token_stats(hidden, weight, ids, want=WANT)


def read(compiled: bool, backend: str, dtype: torch.dtype, company: tuple[int, int, int, int]) -> dict[str, Tensor]:
    """What the row gets: results and the gradient of its own query or hidden state."""
    n, at, lead, entry = company
    own, others = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + n)
    q, k, v, weight = (torch.randn(*s, generator=own) for s in ((DIM,), (KEYS, DIM), (KEYS, 12), (CLASSES, DIM)))
    many = [torch.randn(lead, *s, generator=others) for s in ((n, DIM), (KEYS, DIM), (KEYS, 12))]
    for x, part in zip(many, ((entry, at), entry, entry), strict=True):
        x[part] = q if x is many[0] else k if x is many[1] else v
    ids = torch.randint(CLASSES, (n,), generator=others)
    ids[at] = 3
    cases = {
        attention: ([x.to(dtype) for x in many], (entry, at)),
        cross_entropy: ([many[0][entry].to(dtype), weight.to(dtype), ids], (at,)),
    }
    found = {}
    for call, (given, place) in cases.items():
        given[0] = given[0].clone().requires_grad_()
        with partita.exact_rows():
            out = (torch.compile(call, backend=backend, fullgraph=True) if compiled else call)(*given)
            total = sum(x.double().sum() for x in out if x.is_floating_point())
            (back,) = torch.autograd.grad(total, given[0])
        found |= {f"{call.__name__} {i}": x.detach()[place] for i, x in enumerate((*out, back))}
    return found


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aot_eager", torch.float32),
        ("aot_eager", torch.bfloat16),
        ("aot_eager", torch.float64),
        pytest.param("inductor", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_row_does_not_know_its_company(backend, dtype):
    alone = read(False, backend, dtype, COMPANIES[0])
    for company in COMPANIES:
        found = read(True, backend, dtype, company)
        assert [name for name, x in alone.items() if not torch.equal(x, found[name])] == []


@pytest.mark.skipif(library.load() is None, reason="the native library is not there")
def test_a_pass_that_is_cut_by_the_number_of_rows_is_noticed(monkeypatch):
    """The mutation: keys in two parts for calls of several rows, merged afterwards."""
    whole = passes._forward

    def cut(r, columns=None):
        if r.n_query == 1:
            return whole(r, columns)
        parts = [whole(replace(r, key=r.key[..., some, :])) for some in (slice(0, 100), slice(100, None))]
        return Sums.of(parts[0].state.merge(parts[1].state)).answering(r)

    compiled = torch.compile(lambda q, k: partita.Gibbs(q, k).entropy(), backend="aot_eager", fullgraph=True)
    q, k = (torch.randn(n, DIM, generator=torch.Generator().manual_seed(n)) for n in (9, KEYS))

    def differing():
        with partita.exact_rows(), torch.no_grad():
            together = compiled(q, k)
            return [i for i in range(len(q)) if not torch.equal(compiled(q[i : i + 1], k)[0], together[i])]

    assert differing() == []
    monkeypatch.setattr(passes, "_forward", cut)
    assert differing() != []
