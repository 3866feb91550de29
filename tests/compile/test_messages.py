"""What does not fit is named while a graph is traced, in the words of the uncompiled call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import partita
from partita import support

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler


def real(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


Q, K, V = real(2, 4, 5, 8), real(2, 4, 7, 8), real(2, 4, 7, 6)
X, W, Y = real(5, 8), real(9, 8), torch.arange(5)
WRONG: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "dims": (partita.attention, (Q, K[..., :5], V)),
    "values": (partita.attention, (Q, K, V[..., :4, :])),
    "heads": (partita.attention, (Q, K[:, :2], V[:, :2])),
    "batches": (partita.attention, (Q, real(3, 4, 7, 8), real(3, 4, 7, 6))),
    "dtypes": (partita.attention, (Q, K.double(), V.double())),
    "a vector": (partita.attention, (Q[0, 0, 0], K, V)),
    "a mask": (partita.attention, (Q, K, V, torch.ones(3, 3, dtype=torch.bool))),
    "a mask of integers": (partita.attention, (Q, K, V, torch.ones(5, 7, dtype=torch.int64))),
    "a bias": (lambda q, k, b: partita.Gibbs(q, k, bias=b).entropy(), (Q, K, real(4, 7))),
    "a scale": (lambda q, k, s: partita.Gibbs(q, k, scale=s).entropy(), (Q, K, real(3))),
    "a sink": (lambda q, k, v, s: partita.attention(q, k, v, sink=s), (Q, K, V, real(3))),
    "lengths": (lambda q, k, n: partita.Gibbs(q, k, support=support.lengths(n)).entropy(), (Q, K, torch.arange(3))),
    "targets": (lambda q, k, y: partita.Gibbs(q, k).nll(y), (Q, K, torch.arange(3))),
    "targets of another kind": (lambda x, w, y: partita.linear_cross_entropy(x, w, y), (X, W, real(5))),
    "rows": (lambda x, w, y: partita.linear_cross_entropy(x, w, y), (X, W, Y[:3])),
    "classes": (lambda x, w, y, b: partita.linear_cross_entropy(x, w, y, linear_bias=b), (X, W, Y, real(4))),
    "pairs": (partita.info_nce_loss, (X, W)),
    "labels": (partita.supcon_loss, (X, Y[:3])),
    "views": (partita.nt_xent_loss, (X, W)),
    "two distributions": (lambda a, b: partita.divergence(partita.Gibbs(a, b), partita.Gibbs(b, a)), (X, W)),
    "states": (lambda q, k, v: partita.merge(partita.Gibbs(q, k).state(v), partita.Gibbs(q, k).state()), (Q, K, V)),
    "edges": (lambda q, k, e: partita.Gibbs(q, k).gaps(e), (Q, K, real(2, 2))),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_the_words_are_those_of_the_call(name: str, dynamic: bool) -> None:
    call, given = WRONG[name]
    with pytest.raises(partita.errors.PartitaError) as plain:
        call(*given)
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    with pytest.raises(Exception, match=type(plain.value).__name__) as traced:
        compiled(*given)
    said = str(traced.value).split("from user code")[0]  # what follows quotes our sources, and with them our words
    assert str(plain.value).partition("; got")[0].partition("(")[0] in said, said
