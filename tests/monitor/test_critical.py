"""The critical scale of watched heads: against float64 rows written out, on request only, and as a finding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import scale
from partita.monitor import load_record, measure, watch


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        out = partita.attention(query, key, key, **self.options)
        assert isinstance(out, Tensor)
        return out


def qk(n: int, heads: int = 4, key_heads: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, n, 8, generator=g), torch.randn(2, key_heads, n, 8, generator=g)


def truth(scores: Tensor) -> tuple[Tensor, Tensor]:  # (batch, heads, n, n) of scores, -inf hidden -> (heads,) twice
    """The definitions, row by row of the later half: the largest log(j) / gap_j; how many gaps are at most 1."""
    found: list[list[float]] = [[] for _ in range(scores.shape[1])]
    near: list[list[float]] = [[] for _ in range(scores.shape[1])]
    for batch in scores.double():
        for head, rows in enumerate(batch):
            for row in rows[len(rows) // 2 :].tolist():
                gaps = sorted(max(row) - s for s in row if s > -math.inf)
                found[head].append(max(math.log(j) / gap for j, gap in enumerate(gaps[1:], 2)))
                near[head].append(sum(gap <= 1 for gap in gaps))
    median = torch.tensor([torch.tensor(f, dtype=torch.float64).median() for f in found])
    return median, torch.tensor(near, dtype=torch.float64).mean(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("policy", [None, 0.5, scale.LogLength(8)])
def test_both_columns_are_those_of_the_rows_written_out(causal: bool, key_heads: int, policy: Any) -> None:
    query, key = qk(31, key_heads=key_heads)
    model = Attention(is_causal=causal, enable_gqa=key_heads < 4, scale=policy)
    with watch(model, critical=True) as w:
        model(query, key)
    raw = query.double() @ key.double().repeat_interleave(4 // key_heads, 1).mT
    raw = raw.masked_fill(torch.ones(31, 31).tril() == 0, -math.inf) if causal else raw
    seen = torch.arange(1.0, 32) if causal else torch.full((31,), 31.0)
    own = {None: lambda n: 8**-0.5, 0.5: lambda n: 0.5}.get(
        policy, lambda n: 8**-0.5 * math.log(max(n, 4)) / math.log(8)
    )
    used = torch.tensor([own(float(n)) for n in seen], dtype=torch.float64)
    right, rivals = truth(raw * used[:, None])
    for row in w.frame(pandas=False):
        assert row["critical"] == pytest.approx(right[row["head"]].item(), rel=1e-4)
        assert row["rivals"] == pytest.approx(rivals[row["head"]].item(), rel=1e-6)
        assert row["scale"] == pytest.approx(used[15:].mean().item(), rel=1e-6)


def test_it_is_measured_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "criticality", lambda *_: pytest.fail("not requested"))
    model = Attention()
    with watch(model) as w:
        model(*qk(9))
    columns = ("critical", "rivals", "scale")
    assert all(math.isnan(row[column]) for row in w.frame(pandas=False) for column in columns)
    assert not w.coverage.get("errors") and not [f for f in w.findings() if "critical" in f.evidence]
    with pytest.raises(ValueError, match="critical must be True or False"):
        watch(model, critical=1)  # type: ignore[arg-type]


def test_padded_rows_do_not_count_and_scores_without_a_scale_have_none() -> None:
    class SelfAttention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, attention_mask: Tensor) -> Tensor:
            return torch.softmax(query @ key.mT, -1) @ key

    query, key = qk(20)
    model, keep = SelfAttention(), torch.arange(20) < torch.tensor([[20], [13]])
    with watch(model, critical=True) as w:
        model(query, key, attention_mask=keep)
    values: list[list[float]] = [[], [], [], []]
    for b, last in enumerate((20, 13)):
        for h in range(4):
            for row in (query @ key.mT)[b, h, 10:last].double().tolist():
                gaps = sorted(max(row) - s for s in row)
                values[h].append(max(math.log(j) / g for j, g in enumerate(gaps[1:], 2)))
    rows = w.frame(pandas=False)
    assert len(rows) == 4
    for row in rows:
        right = torch.tensor(values[row["head"]], dtype=torch.float64).median().item()
        assert math.isnan(row["scale"]) and row["critical"] == pytest.approx(right, rel=1e-4)


def test_the_finding_names_which_heads_are_below_and_how_both_grow(tmp_path: Path) -> None:
    """One key leads all others by a margin: critical = log n / margin; head 0 has a scale above it, head 1 below."""

    def ask(n: int) -> tuple[Tensor, Tensor]:
        key = torch.zeros(1, 2, n, 2)
        key[:, 0, 0, 0], key[:, 1, 0, 0] = 20.0, 2.0
        query = torch.zeros(1, 2, n, 2)
        query[..., 0] = 1.0
        return query, key

    model = Attention(scale=scale.LogLength(8)).eval()
    with watch(model, critical=True) as w:
        for n in (8, 64):
            model(*ask(n))
    w.record.save(tmp_path / "run.jsonl")
    for record in (w.record, load_record(tmp_path / "run.jsonl")):
        (found,) = [f for f in record.findings() if "critical" in f.evidence]
        assert found.code == "LENGTH_DILUTION" and found.severity == "info" and found.where == "1 of 2 heads"
        assert found.heads == ((0, 1),)
        # log 64 / 2 against (log 64 / log 8) / sqrt(2); both grow twice from 8 to 64
        assert f"{2 / math.log(64) * math.log(64) / math.log(8) / 2**0.5:.2f} of it in layer 0 head 1" in found.evidence
        assert "grows 2.00 times (as log n to the 1.00) and the scale 2.00 times" in found.evidence
        # head 1 leads by 2 / sqrt(2) nats at 8 keys and twice that at 64: nothing is within one
        assert "keys within a nat of the best: 1.0 and 1.0 (as n to the 0.00)" in found.evidence
    above = Attention(scale=3.0).eval()
    with watch(above, critical=True) as w:
        above(*ask(16))
    (found,) = [f for f in w.findings() if "critical" in f.evidence]
    assert found.where == "0 of 2 heads" and "above" in found.evidence and not found.heads
