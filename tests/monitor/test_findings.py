"""Each finding on a model built to have that defect, and silence on a healthy one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita.monitor import CODES, Finding, Thresholds, Watch, watch
from partita.monitor.findings import Findings, verdicts


class Heads(nn.Module):
    """Attention on the queries and keys it is given, so that a defect can be planted exactly."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, is_causal=self.causal)


def healthy(n: int = 64, heads: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, n, 16, generator=g), torch.randn(2, heads, n, 16, generator=g)


def run(*steps: tuple[Tensor, Tensor], train: bool = True, causal: bool = False) -> Watch:
    model = Heads(causal).train(train)
    with watch(model) as w:
        for query, key in steps:
            model(query, key)
    return w


def codes(w: Watch, *levels: str) -> set[str]:
    return {f.code for f in w.findings() if not levels or f.severity in levels}


@pytest.mark.parametrize("causal", [False, True])
def test_a_healthy_model_is_left_in_peace(causal: bool) -> None:
    assert codes(run(*[healthy(seed=s) for s in range(12)], causal=causal)) == set()


def copy_head(query: Tensor, key: Tensor) -> None:
    query[:, 3], key[:, 3] = query[:, 0], key[:, 0]


PLANTED: dict[str, tuple[Any, tuple[tuple[int, int], ...]]] = {
    "HEAD_COLLAPSED": (lambda query, key: query[:, 2].mul_(50), ((0, 2),)),
    "HEAD_UNIFORM": (lambda query, key: query[:, 1].mul_(0.01), ((0, 1),)),
    "DUPLICATE_HEADS": (copy_head, ((0, 0), (0, 3))),
    "NONFINITE": (lambda query, key: query[0, 1, 5].fill_(math.inf), ((0, 1),)),
}


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_defect_is_found_in_its_heads(code: str) -> None:
    plant, heads = PLANTED[code]
    query, key = healthy()
    plant(query, key)
    w = run(healthy(), (query, key)) if code == "NONFINITE" else run((query, key))
    (found,) = [f for f in w.findings() if f.code == code]
    assert found.heads == heads and found.severity == ("error" if code == "NONFINITE" else "warning")
    assert codes(w) - {"LOGIT_GROWTH"} == {code} and found.meaning and found.action
    assert code != "HEAD_COLLAPSED" or "collapsed < 0.01" in str(found)


def test_sink_head_is_information_until_most_heads_are() -> None:
    query, key = healthy()
    query[..., 0] = 4.0
    key[..., 0] = 0.0
    key[:, 3, 0, 0] = 6.0
    w = run((query, key))
    assert codes(w) == {"SINK_HEAD"} and codes(w, "warning", "error") == set()
    key[:, :, 0, 0] = 6.0
    assert codes(run((query, key)), "warning") == {"SINK_HEAD"}


def test_sinks_are_one_finding_whatever_the_layers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one_attention, self.two_attention = Heads(), Heads()

        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return self.one_attention(query, key) + self.two_attention(query, key)

    query, key = healthy()
    query[..., 0] = 4.0
    key[..., 0] = 0.0
    key[:, 3, 0, 0] = 6.0
    model = Two()
    with watch(model) as w:
        model(query, key)
    (found,) = w.findings()
    assert found.code == "SINK_HEAD" and found.heads == ((0, 3), (1, 3)) and found.where == "2 of 8 heads in 2 layers"


def test_logits_that_grow() -> None:
    steps = []
    for t in range(12):
        query, key = healthy(seed=t)
        query[:, 0] *= 1 + 0.6 * t
        steps.append((query, key))
    w = run(*steps)
    found = [f for f in w.findings() if f.code == "LOGIT_GROWTH"]
    assert [f.heads for f in found] == [((0, 0),)]


def test_logits_far_too_large_are_an_error() -> None:
    query, key = healthy()
    assert "LOGIT_GROWTH" in codes(run((query * 40, key)), "error")


def test_sudden_entropy_drop_and_not_slow_learning() -> None:
    sudden = [(q * (1 if t < 10 else 6), k) for t in range(20) for q, k in [healthy(seed=t)]]
    slow = [(q * (1 + 0.04 * t), k) for t in range(40) for q, k in [healthy(seed=t)]]
    assert "ENTROPY_DROP" in codes(run(*sudden))
    assert "ENTROPY_DROP" not in codes(run(*slow))


def test_length_dilution() -> None:
    steps = [healthy(n) for n in (32, 64, 128, 256)]
    (found,) = run(*steps).findings()  # trained at all of these lengths
    assert found.code == "LENGTH_DILUTION" and "32" in found.evidence and "256" in found.evidence
    assert found.severity == "info" and not found.action
    frozen = run(*steps, train=False)
    assert [f.severity for f in frozen.findings()] == ["info"]  # its training length is unknown
    frozen.record.provenance["training_length"] = 256
    assert [f.severity for f in frozen.findings()] == ["info"]
    frozen.record.provenance["training_length"] = 128
    (found,) = frozen.findings()
    assert found.severity == "warning" and "trained at up to 128" in found.evidence
    assert "depends on the model" in found.action


def test_advice_on_the_scale_is_what_the_study_of_this_record_shows() -> None:
    w = run(*[healthy(n) for n in (32, 64, 128, 256)], train=False)
    w.record.provenance["training_length"] = 64
    for policy, loss in (("1/sqrt(d)", 2.0), ("log n", 2.4)):
        w.record.studies.append({"study": "scale-policy", "policy": policy, "length": 256, "loss": loss})
    (found,) = w.findings()
    assert "1/sqrt(d) has the lowest loss at 256 tokens" in found.action


def test_coverage_is_named() -> None:
    class OwnKernelAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.sum(-1, keepdim=True)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_a = Heads()
            self.attention_b = OwnKernelAttention()
            self.attention_c = Heads()

        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return self.attention_b(self.attention_a(query, key))

    model = Two()
    with watch(model) as w:
        model(*healthy())
    assert "COVERAGE" in codes(w)
    text = str(w.coverage)
    assert "1 of 3 attention modules observed" in text and "attention_b" in text and "never called" in text


def contrast(loss: Any, steps: int = 4) -> Watch:
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    with watch(model) as w:
        for _ in range(steps):
            loss(model(torch.randn(64, 32)))
    return w


def noisy(x: Tensor, level: float) -> Tensor:
    return x + level * torch.randn_like(x)


def test_a_healthy_contrastive_loss() -> None:
    w = contrast(lambda x: partita.info_nce_loss(x, noisy(x, 1.5), temperature=0.3))
    assert codes(w) == set(), w.findings()
    row = w.record.losses[-1]
    assert row["candidates"] == 64 and 10 < row["effective_negatives"] <= 63 and row["bound"] < row["cap"]


def test_contrastive_defects() -> None:
    raw = contrast(lambda x: partita.info_nce_loss(5 * x, 5 * noisy(x, 1.5), temperature=5.0, normalize=False))
    assert "NOT_NORMALISED" in codes(raw)
    cold = contrast(lambda x: partita.info_nce_loss(x, noisy(x, 2.0), temperature=0.005))
    assert "EFFECTIVE_NEGATIVES_LOW" in codes(cold)
    easy = contrast(lambda x: partita.info_nce_loss(x, noisy(x, 0.01), temperature=0.1))
    assert "MI_SATURATED" in codes(easy)
    capped = contrast(
        lambda x: partita.clip_loss(F.normalize(x, dim=-1), F.normalize(noisy(x, 1.0), dim=-1), torch.tensor(100.0))
    )
    assert "SCALE_AT_CAP" in codes(capped)


def test_plain_torch_contrast_is_recognised() -> None:
    def loss(x: Tensor) -> Tensor:
        a, b = F.normalize(x, dim=-1), F.normalize(noisy(x, 0.01), dim=-1)
        return F.cross_entropy(a @ b.T / 0.05, torch.arange(len(a)))

    w = contrast(loss)
    assert "MI_SATURATED" in codes(w)
    assert abs(w.record.losses[0]["cap"] - math.log(64)) < 1e-6


def test_cross_entropy_statistics() -> None:
    torch.manual_seed(0)
    model, target = nn.Linear(32, 32), torch.randint(0, 32, (50,))
    target[:7] = -100
    with watch(model) as w:
        logits = 3 * model(torch.randn(50, 32))
        loss = F.cross_entropy(logits, target)
        F.cross_entropy(logits.T[None], target[None])  # (N, C, d1)
    (row,) = w.record.losses
    p = logits[7:].softmax(-1)
    assert row["rows"] == 86 and row["classes"] == 32 and abs(row["loss"] - loss.item()) < 1e-4
    assert abs(row["confidence"] - p.amax(-1).mean().item()) < 1e-5
    assert abs(row["entropy"] + (p * p.log()).sum(-1).mean().item()) < 1e-5
    assert abs(row["accuracy"] - (p.argmax(-1) == target[7:]).float().mean().item()) < 1e-6


def test_thresholds_can_be_set_and_unknown_ones_are_refused() -> None:
    w = run(healthy())
    assert {f.code for f in w.findings({"uniform": 0.5})} == {"HEAD_UNIFORM"}
    assert {f.code for f in w.findings(Thresholds(collapsed=0.99))} == {"HEAD_COLLAPSED"}
    with pytest.raises(ValueError, match="the thresholds are"):
        w.findings({"unifrom": 0.5})


def test_codes_are_those_of_the_contract() -> None:
    heads = "HEAD_COLLAPSED HEAD_UNIFORM SINK_HEAD LOGIT_GROWTH ENTROPY_DROP LENGTH_DILUTION DUPLICATE_HEADS NONFINITE"
    losses = "NOT_NORMALISED EFFECTIVE_NEGATIVES_LOW MI_SATURATED SCALE_AT_CAP"
    assert set(CODES) == {*heads.split(), *losses.split(), "COVERAGE"}


def test_learning_from_scratch_is_news_and_no_fault() -> None:
    """Scores that grow from nothing and heads that leave the uniform distribution, far from any level that hurts."""
    scales = [0.1] * 7 + [2.2 + 0.07 * t for t in range(23)]
    steps = [(q * scale, k) for t, scale in enumerate(scales) for q, k in [healthy(seed=t)]]
    found = run(*steps).findings()
    assert {f.code for f in found} == {"LOGIT_GROWTH", "ENTROPY_DROP"}
    assert {f.severity for f in found} == {"info"}
    late = run(*steps[:7], *steps[:7], *steps[:7], *steps[7:])
    assert {f.severity for f in late.findings() if f.code == "ENTROPY_DROP"} == {"warning"}


def test_vectors_that_are_zero_or_nan_keep_their_loss_in_the_record() -> None:
    model = nn.Linear(4, 4)
    for bad in (0.0, math.nan):
        a, b = torch.randn(8, 4), torch.randn(8, 4)
        a[2] = bad
        with watch(model) as w:
            model(a)
            partita.info_nce_loss(a, b)
        (row,) = w.loss_frame(pandas=False)
        assert row["candidates"] == 8, w.coverage


def test_alignment_and_uniformity_are_recorded() -> None:
    from partita.contrastive import alignment, uniformity

    model, a, b = nn.Linear(4, 4), torch.randn(32, 4), torch.randn(32, 4)
    with watch(model) as w:
        model(a)
        partita.info_nce_loss(a, b, temperature=0.1)
    (row,) = w.loss_frame(pandas=False)
    assert row["alignment"] == pytest.approx(alignment(a, b).item(), rel=1e-5)
    assert row["uniformity"] == pytest.approx(uniformity(a).item(), rel=1e-5)


def test_information_comes_without_a_remedy() -> None:
    w = run(*[(q * (1 + 0.2 * t), k) for t in range(12) for q, k in [healthy(seed=t)]])
    informed = [f for f in w.findings() if f.severity == "info"]
    assert informed and not any(f.action or "Try" in str(f) for f in informed)


def test_runaway_scores_are_those_above_the_line_of_the_chart() -> None:
    grown = {}
    for most in (20, 30, 60):
        steps = [(q * (0.5 + most / 4 * t / 15), k) for t in range(16) for q, k in [healthy(seed=t)]]
        grown[most] = [f for f in run(*steps).findings() if f.code == "LOGIT_GROWTH"]
    for found in grown.values():
        for f in found:
            level = float(f.evidence.split("largest score ")[1].split()[0])
            assert (f.severity != "info") == (level >= Thresholds().logit_warning)
    levels = [float(f.evidence.split("largest score ")[1].split()[0]) for found in grown.values() for f in found]
    assert any(30 < level < 50 for level in levels)  # growth that is seen, and is no fault yet
    assert {f.severity for f in grown[20]} == {"info"} and {f.severity for f in grown[60]} & {"warning", "error"}


def test_a_frozen_model_has_no_findings_about_learning() -> None:
    """Inputs are no steps: no history, no learning rates, whatever their order."""
    query, key = healthy()
    query[:, 2] *= 80
    bad = healthy(seed=9)
    bad[0][0, 1, 5] = math.inf
    w = run(*[healthy(seed=s) for s in range(6)], *[(query, key)] * 12, bad, train=False)
    found = w.findings()
    assert {"HEAD_COLLAPSED", "LOGIT_GROWTH", "NONFINITE"} <= {f.code for f in found}
    assert "ENTROPY_DROP" not in {f.code for f in found}
    text = " ".join(map(str, found))
    assert not any(word in text for word in ("learning rate", "step", "gradient", "quarter of the run", "warm-up"))
    assert "ENTROPY_DROP" in codes(run(*[healthy(seed=s) for s in range(12)], *[(query, key)] * 12))
    assert "inputs" in repr(w.record) and "steps" not in repr(w.record)


def test_a_fall_with_a_falling_loss_is_learning() -> None:
    steps = [(q * (1 if t < 16 else 6), k) for t in range(24) for q, k in [healthy(seed=t)]]
    for slope, severity in ((-0.1, "info"), (0.1, "warning")):
        w = run(*steps)
        w.record.losses = [{"step": t, "name": "loss", "loss": 5 + slope * t} for t in range(24)]
        assert [f.severity for f in w.findings() if f.code == "ENTROPY_DROP"] == [severity]


def test_one_verdict_for_a_head() -> None:
    query, key = healthy()
    query[:, 2] *= 50
    found = run((query, key)).findings()
    assert {f.code for f in verdicts(found)[0, 2]} == {"HEAD_COLLAPSED", "LOGIT_GROWTH"} and set(verdicts(found)) == {
        (0, 2)
    }
    assert verdicts(found)[0, 2][0].severity == "error"  # worst first


def test_findings_show_themselves_as_a_short_table() -> None:
    query, key = healthy()
    query[:, 2] *= 50
    found = run((query, key)).findings()
    lines = repr(found).splitlines()
    assert len(lines) == len(found) and "HEAD_COLLAPSED" in repr(found) and max(map(len, lines)) < 200
    assert found._repr_html_().count("<tr>") == 1 + len(found)
    hostile = Findings([Finding("warning", "X", "<b>", "<i>", "<u>", "<s>", "low")])
    assert not any(tag in hostile._repr_html_() for tag in ("<b>", "<i>", "<u>", "<s>"))
    assert repr(run(healthy()).findings()) == "no findings"
