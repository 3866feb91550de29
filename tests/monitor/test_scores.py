"""One call, seen again for some rows, one head or several scales: what is broadcast in it counts for every row."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from partita import support
from partita.errors import ShapeError
from partita.monitor import measure, watch
from partita.monitor.scores import Scores, added

FACTORS = (0.5, 1.0, 3.0)


@st.composite
def calls(draw: st.DrawFn) -> Scores:
    """Any call, one query and one key among them, with masks and scales that are broadcast in any dimension."""
    batch, heads, n, m = (draw(st.integers(1, 3)) for _ in range(4))
    made = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    def some(*shape: int) -> list[int]:
        return [size if draw(st.booleans()) else 1 for size in shape]

    keep = random(batch, n) > -0.5 if draw(st.booleans()) else None
    if draw(st.integers(0, 3)) == 0:
        return Scores(None, None, scores=random(batch, heads, n, m), keep=keep)
    mask = None
    kind = draw(st.sampled_from(["none", "bool", "added"]))
    if kind != "none":
        mask = random(*some(batch, heads, n, m))
        mask = mask > -0.7 if kind == "bool" else torch.where(mask > 0.7, torch.finfo(torch.float64).min, mask)
    scale = random(*some(batch, heads, n)).exp() if draw(st.booleans()) else 0.7
    seen = support.window(1, 1) if draw(st.booleans()) else None
    softcap = draw(st.sampled_from([None, 2.0]))
    causal = draw(st.booleans())
    return Scores(
        random(batch, heads, n, 4), random(batch, heads, m, 4), scale, mask, causal, seen, softcap, None, keep
    )


def dense(call: Scores) -> Tensor:
    """Its scores, written out; -inf where a key is hidden."""
    if call.scores is not None:
        return added(call.scores)
    assert call.query is not None
    assert call.key is not None
    scale = torch.as_tensor(call.scale, dtype=torch.float64).expand(call.shape)
    s = call.query @ call.key.mT * scale[..., None]
    s = call.softcap * torch.tanh(s / call.softcap) if call.softcap else s
    if call.mask is not None:
        s = s.masked_fill(~call.mask, -torch.inf) if call.mask.dtype == torch.bool else s + added(call.mask)
    if call.causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if call.support is not None:
        s = s.masked_fill(~call.support.dense(call.n_query, call.n_key, s.shape[:2], s.device), -torch.inf)
    return s


def weights(s: Tensor) -> Tensor:
    return s.softmax(-1).nan_to_num(0.0)


def found(call: Scores) -> Tensor:
    return call.gibbs().probs().double().expand(*call.shape, call.n_key)


@given(calls(), st.data())
def test_a_part_of_a_call_has_the_weights_of_the_whole(call: Scores, data: st.DataObject) -> None:
    want = weights(dense(call))
    torch.testing.assert_close(found(call), want)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, call.n_query - 1), min_size=1, unique=True)))
    entries = torch.tensor(data.draw(st.lists(st.integers(0, call.batch - 1), min_size=1, unique=True)))
    part = call.take(entries, rows)
    torch.testing.assert_close(found(part), want[entries][:, :, rows])
    head = data.draw(st.integers(0, call.heads - 1))
    torch.testing.assert_close(found(call.head(head)), want[:, head : head + 1])
    log_z = dense(call).logsumexp(-1)
    there = log_z > -torch.inf
    torch.testing.assert_close(call.first_key(log_z)[there], want[..., 0][there])
    several = part.at_factors(FACTORS)
    given_scale = torch.as_tensor(part.scale, dtype=torch.float64)
    for factor, got in zip(FACTORS, found(several).split(part.n_query, 2), strict=True):
        if part.scores is not None:
            again = Scores(None, None, scores=added(part.scores) * factor)
        else:
            again = Scores(part.query, part.key, given_scale * factor, part.mask, False, None, part.softcap)
        torch.testing.assert_close(got, weights(dense(again)), rtol=1e-5, atol=1e-7)
    if part.keep is not None:
        assert several.keep is not None and torch.equal(several.keep, part.keep.repeat(1, len(FACTORS)))


@given(calls())
def test_a_temperature_curve_is_that_of_the_rows(call: Scores) -> None:
    """At factor 1 it is the mean entropy of the rows that see two keys."""
    p = weights(dense(call))
    seen = (dense(call) > -torch.inf).sum(-1) >= 2
    if call.keep is not None:
        seen = seen & call.keep[:, None]
    entropy = torch.special.entr(p).sum(-1)
    curve = measure.curve(call, 0, 0)
    at_one = measure.FACTORS.index(1.0)
    for head, mean in enumerate(curve["mean"]):
        rows = entropy[:, head][seen[:, head]]
        assert mean[at_one] == pytest.approx(float(rows.mean()), rel=1e-4, abs=1e-5, nan_ok=True)


# ---- messages about failures of our own ----------------------------------------------------------------------------


class One(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


PARTS = {"curve": "temperature curve", "look": "strongest keys", "receive": "received", "pooled_map": "map"}


@pytest.mark.parametrize("broken", ["measure", *PARTS])
def test_a_message_names_what_was_lost_and_gives_no_advice(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ShapeError("scale must broadcast to the rows. A scale per head is scale[:, None].")

    monkeypatch.setattr(measure, broken, fails)
    with caplog.at_level(logging.WARNING, "partita.watch"), watch(One(), received=True, maps=[(0, 0)]) as w:
        for _ in range(3):
            w.model(torch.randn(1, 2, 5, 4))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, said  # once, not at every call
    kept = broken != "measure"
    assert len(w.frame(pandas=False)) == (6 if kept else 0)
    for text in (*said, str(w.coverage)):
        assert "fault of partita" in text and "ShapeError" in text
        assert "scale" not in text  # the user gave none
        assert ("rows are recorded" in text) == kept and PARTS.get(broken, "a softmax") in text
    others = {"curve": w.record.curves, "receive": w.record.received, "pooled_map": w.record.maps}
    assert {name: bool(rows) for name, rows in others.items()} == {name: kept and name != broken for name in others}
