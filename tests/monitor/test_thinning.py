"""The record of a long run stays small, keeps what was measured, and has the findings of the whole run."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partita.monitor import Record, load_record, watch
from partita.monitor.observer import Thinning
from partita.monitor.record import COLUMNS, Block, Site
from partita.monitor.sinks import json_lines

np = pytest.importorskip("numpy")
HEADS, LAYERS = 2, 2
DEFECTS = ("none", "collapsed", "uniform", "sink", "growth", "drop", "dilution", "nonfinite once", "nonfinite from")


def planted(defect: str, steps: int, frozen: bool, where: tuple[int, int], seed: int, stride: int) -> Record:
    """A run of made-up rows, one head of which has a defect; two lengths in turn, where the finding is about length."""
    noise = np.random.default_rng(seed)
    record = Record(sites=[Site(f"layers.{i}.attn", "sdpa", HEADS) for i in range(LAYERS)])
    sick_at = steps // 2
    for at in range(steps):
        part = at / steps
        length = (64, 512)[at % 2] if defect == "dilution" else 64
        for layer in range(LAYERS):
            values = array("d")
            for head in range(HEADS):
                sick = (layer, head) == where
                share = 0.6 + 0.02 * noise.standard_normal()
                row: dict[str, float] = dict.fromkeys(COLUMNS, 0.0)
                row |= {
                    "max_score": 5.0 + noise.random(),
                    "twin": math.nan,
                    "twin_similarity": 0.0,
                    "critical": math.nan,
                    "rivals": math.nan,
                }
                sink = 0.05
                if sick and defect == "collapsed" and part > 0.3:
                    share = 0.001
                if sick and defect == "uniform":
                    share = 0.9995
                if sick and defect == "sink":
                    sink = 0.9
                if sick and defect == "growth":
                    row["max_score"] += 150.0 * part
                if sick and defect == "drop" and part > 0.5:
                    share -= 0.5
                width = length**share if not (sick and defect == "dilution") else 0.9 * length
                bad = sick and (
                    (defect == "nonfinite once" and at == sick_at) or (defect == "nonfinite from" and at >= sick_at)
                )
                row |= {
                    "normalized_entropy": share, "normalized_entropy_p50": share, "entropy": share * math.log(length),
                    "effective_width": width, "sink_first": sink, "sink_top": sink, "visible": length,
                    "length": length, "rows": 100.0, "nonfinite": 3.0 if bad else 0.0, "scale": 0.125,
                }  # fmt: skip
                values.extend(row[name] for name in COLUMNS)
            record.blocks.append(Block(at * stride, layer, not frozen, values))
        record.losses.append({"step": at * stride, "name": "loss", "loss": 2.0 - part, "rows": 8, "nonfinite": 0})
    return record


def thinned(whole: Record, keep: int | None) -> Record:
    """The same, step by step."""
    small = Record(sites=whole.sites)
    adds = Thinning(small, keep)
    for step in whole.steps():
        blocks = [Block(b.step, b.layer, b.training, b.values[:], b.bands) for b in whole.blocks if b.step == step]
        adds.add(blocks, [dict(r) for r in whole.losses if r["step"] == step])
    return small


def total(record: Record) -> list[float]:
    return [sum(sum(b.column("nonfinite")) for b in record.blocks if b.layer == layer) for layer in range(LAYERS)]


@settings(max_examples=40)
@given(
    st.sampled_from(DEFECTS), st.integers(70, 400), st.booleans(), st.tuples(st.integers(0, 1), st.integers(0, 1)),
    st.integers(0, 2**31), st.sampled_from([1, 2, 7, 8, 50]), st.integers(32, 64),
)  # fmt: skip
def test_what_is_kept_finds_what_the_whole_run_shows(
    defect: str, steps: int, frozen: bool, where: tuple[int, int], seed: int, stride: int, keep: int
) -> None:
    whole = planted(defect, steps, frozen, where, seed, stride)
    small = thinned(whole, keep)
    assert len(small.steps()) <= keep + LAYERS + 1  # and the first step that was not finite, of each layer and loss
    assert len(small.steps()) >= keep // 3
    assert [(f.code, f.severity, f.heads) for f in small.findings()] == [
        (f.code, f.severity, f.heads) for f in whole.findings()
    ]
    assert total(small) == total(whole)
    if defect.startswith("nonfinite"):
        firsts = [min(b.step for b in r.blocks if any(b.column("nonfinite"))) for r in (small, whole)]
        assert firsts[0] == firsts[1]
    measured = {(b.step, b.layer): b for b in whole.blocks}
    at = list(COLUMNS).index("nonfinite")
    for block in small.blocks:
        was = measured[block.step, block.layer]
        same = [
            (a == b or (a != a and b != b)) for i, (a, b) in enumerate(zip(block.values, was.values, strict=True))
            if i % len(COLUMNS) != at
        ]  # fmt: skip
        assert all(same)
    gaps = np.diff(sorted({b.step // stride for b in small.blocks}))
    assert gaps.max() <= 8 * steps / keep  # spread over all of the run
    if defect == "dilution":  # lengths in turn keep their shares
        lengths = [b.column("length")[0] for b in small.blocks]
        assert 0.25 < lengths.count(64) / len(lengths) < 0.75


class One(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("keep", [None, 1, 10])
def test_a_watch_keeps_this_many_steps_and_its_sinks_receive_all(keep: int | None, tmp_path: Any) -> None:
    x, steps = torch.randn(1, 2, 5, 4), 100
    with watch(One(), keep=keep, sinks=[json_lines(tmp_path / "all.jsonl")]) as w:
        for _ in range(steps):
            w.model(x)
            nn.functional.cross_entropy(x[0, 0], torch.zeros(5, dtype=torch.long))
    kept = w.record.steps()
    assert kept == list(range(steps)) if keep is None else len(kept) <= keep
    assert {r["step"] for r in w.loss_frame(False)} == {r["step"] for r in w.frame(False)} == set(kept)
    assert load_record(tmp_path / "all.jsonl").steps() == list(range(steps))
    assert load_record(w.finished().save(tmp_path / "kept.jsonl")).steps() == kept


def test_a_record_is_bounded_unless_everything_is_kept() -> None:
    assert watch(One()).options.keep == 1000
    for wrong in (0, -1, 2.5, True, "all"):
        with pytest.raises(ValueError, match="keep must be None"):
            watch(One(), keep=wrong)  # type: ignore[arg-type]


WHOLE = [3, np.int64(3), np.uint8(3), np.int32(3)]
NOT_A_STEP = [
    True, np.bool_(True), torch.tensor(3), torch.tensor([3]), 3.0, np.float64(3), "3", -1, np.int64(-1), math.nan, [3],
]  # fmt: skip


@pytest.mark.parametrize("step", WHOLE, ids=lambda s: type(s).__name__)
def test_any_whole_number_names_a_step_and_can_be_saved(step: Any, tmp_path: Any) -> None:
    with watch(One()) as w:
        w.set_step(step)
        w.model(torch.randn(1, 2, 5, 4))
        nn.functional.cross_entropy(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
    assert w.step == 3 and type(w.step) is int
    assert load_record(w.finished().save(tmp_path / "run.jsonl")).steps() == [3]


@pytest.mark.parametrize("step", NOT_A_STEP, ids=repr)
def test_what_is_no_step_is_refused_at_once(step: Any) -> None:
    with watch(One()) as w:
        w.set_step(2)
        with pytest.raises(ValueError, match=r"whole number from 0.*got"):
            w.set_step(step)
        assert w.step == 2 and w.observing
