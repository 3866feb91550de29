"""Which positions draw the mass: column sums against float64, kept in a bounded record, and checked like any number."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.monitor import load_record, measure, watch
from partita.monitor.scores import Scores


class Causal(nn.Module):
    def forward(self, query: Tensor, key: Tensor, **options: Any) -> Tensor:
        out = partita.attention(query, key, key, is_causal=True, **options)
        assert isinstance(out, Tensor)
        return out


def qk(n: int, heads: int = 4, key_heads: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(2, heads, n, 8, generator=g), torch.randn(2, key_heads, n, 8, generator=g)


def shares(query: Tensor, key: Tensor, keep: Tensor | None = None) -> Tensor:  # (heads, n_key), sums to 1
    q, k = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    s = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(torch.ones(q.shape[2], k.shape[2]).tril() == 0, -math.inf)
    p = torch.softmax(s, -1) if keep is None else torch.softmax(s, -1) * keep[:, None, :, None]
    return p.sum((0, 2)) / p.sum((0, 2, 3))[:, None]


def pooled(x: Tensor, wide: int = 3) -> Tensor:  # 150 keys in 50 bins of 3
    return x.unflatten(-1, (-1, wide)).sum(-1)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_long_inputs_are_pooled_and_named_by_query_head(key_heads: int) -> None:
    query, key = qk(150, key_heads=key_heads)
    model = Causal()
    with watch(model, received=True) as w:
        model(query, key, enable_gqa=key_heads < 4)
    (row,) = w.record.received
    right = shares(query, key)
    assert row["n_key"] == 150 and row["rows"] == [300] * 4 and len(row["alike"]) == 50
    torch.testing.assert_close(torch.tensor(row["bins"]).double(), pooled(right), rtol=1e-4, atol=1e-6)
    best, index = right.topk(measure.TOP, -1)
    for head in range(4):
        assert [k for k, _ in row["top"][head]] == index[head].tolist()
        assert [v for _, v in row["top"][head]] == pytest.approx(best[head].tolist(), rel=1e-4)
    even = (1 / torch.arange(1, 151).double()).flip(0).cumsum(0).flip(0) / 150  # key j is seen by rows j to the last
    torch.testing.assert_close(torch.tensor(row["alike"]).double(), pooled(even), rtol=1e-4, atol=1e-6)


def test_it_costs_nothing_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.Received, "add", lambda *_: pytest.fail("not requested"))
    model = Causal()
    with watch(model) as w:
        model(*qk(9))
    assert not w.record.received and not w.coverage.get("errors")
    with pytest.raises(ValueError, match="received must be True or False"):
        watch(model, received=3)  # type: ignore[arg-type]


def test_calls_of_one_step_add_and_padded_rows_do_not_count() -> None:
    class Padded(nn.Module):
        def forward(self, query: Tensor, key: Tensor, attention_mask: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)

    model, keep = Padded(), torch.arange(20) < torch.tensor([[20], [11]])
    with watch(model, received=True, every=1) as w:
        w.set_step(8)
        model(*qk(20), attention_mask=keep)
    (row,) = w.record.received
    assert row["rows"] == [31] * 4
    torch.testing.assert_close(torch.tensor(row["bins"]).double(), shares(*qk(20), keep), rtol=1e-4, atol=1e-6)
    both, other = measure.Received(), measure.Received()
    for n in (20, 30):  # gradient accumulation over inputs of other lengths
        both.add(Scores(*qk(n), 8**-0.5, causal=True))
    other.add(Scores(*qk(30), 8**-0.5, causal=True))
    assert both.total is not None and other.total is not None
    first = 40 * shares(*qk(20))
    torch.testing.assert_close(both.total - other.total, torch.nn.functional.pad(first, (0, 10)), rtol=1e-4, atol=1e-4)


def test_the_record_is_bounded_and_comes_back(tmp_path: Path) -> None:
    model = Causal()
    with torch.no_grad(), watch(model, received=True) as w:
        for step in range(200):
            model(*qk(6, seed=step))
    rows = w.record.received
    steps = [r["step"] for r in rows]
    assert steps[0] == 0 and steps[-1] == 199 and 4 <= len(rows) <= measure.KEPT  # one look in eight
    assert len({b - a for a, b in pairwise(steps[1:-1])}) == 1
    assert load_record(w.save(tmp_path / "run.jsonl")).received == rows


def test_shares_that_do_not_add_up_are_our_fault_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    real = partita.Gibbs.received

    def twice(self: partita.Gibbs, weight: Tensor | None = None) -> Tensor:
        out = real(self, weight)
        out[:, 1:2] *= 2
        return out

    monkeypatch.setattr(partita.Gibbs, "received", twice)
    model = Causal()
    with watch(model, received=True) as w:
        model(*qk(9))
    (row,) = w.record.received
    assert [b is None for b in row["bins"]] == [False, True, False, False] == [t is None for t in row["top"]]
    assert "received of layer 0, head 1, step 0 came out as 2" in w.coverage["impossible"]


def test_a_head_with_nan_has_no_profile_and_is_no_fault_of_ours() -> None:
    query, key = qk(9)
    query[0, 2, 4] = math.nan
    model = Causal()
    with watch(model, received=True) as w:
        model(query, key)
    (row,) = w.record.received
    assert [b is None for b in row["bins"]] == [False, False, True, False] and not w.coverage.get("impossible")
