"""The studies of reading longer: the same words at every length, a model left as it was, verdicts from planted rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from programs import program

from partita import scale, support
from partita_theory.experiments import reading_longer as longer
from partita_theory.experiments import recall_longer, scale_invariance
from partita_theory.experiments._language_model import HIDE, RARE, Plan, train
from partita_theory.results import Row, mean_by
from partita_theory.store import Store

PLAN = Plan("masked", "reference", 300, 16, 2, 1, 64, 2, 1, 1e-3)


def test_every_length_hides_the_same_words_in_the_middle() -> None:
    seen, truth = longer.hidden("reference", 300, 256, 6)
    asked = truth >= 0
    assert asked.sum(1).tolist() == [longer.HIDDEN] * 6
    assert not asked[:, :96].any() and not asked[:, 160:].any()  # the middle 64 of 256
    assert torch.equal(seen == HIDE, asked) and not (truth == RARE).any()


def test_a_reading_changes_the_reading_alone() -> None:
    model = train(PLAN, None, 0)[0]
    seen, truth = longer.hidden("reference", 300, 256, 2)
    first = longer.read(model, "rotary", None, seen, truth, 256)
    found = {name: longer.read(model, name, None, seen, truth, 256)["nll"] for name in longer.POSITIONS}
    assert len({round(x, 7) for x in found.values()}) == len(found)  # every setting acts
    assert longer.read(model, "rotary", scale.InverseSqrt(3.0), seen, truth, 256)["nll"] != first["nll"]
    assert longer.read(model, "rotary", None, seen, truth, 256) == first
    # at the length of training no distance is new, and nothing is clipped or stretched
    near = [longer.read(model, name, None, seen, truth, 64)["nll"] for name in ("rotary", "NTK", "YaRN", "clipped")]
    assert near == pytest.approx([near[0]] * 4, abs=1e-5)


@pytest.mark.parametrize("policy", [None, scale.LogLength(64), scale.KappaLog(1.0)])
@pytest.mark.parametrize("name", longer.POSITIONS)
def test_asking_for_the_middle_alone_gives_what_the_whole_model_gives(name: str, policy: scale.Policy | None) -> None:
    model = train(dataclasses.replace(PLAN, layers=2), None, 0)[0]
    seen, truth = longer.hidden("reference", 300, 256, 3)
    asked = truth[:, 64:192]
    for layer in model.layers:
        layer.self_attn.rotary, layer.self_attn.scale = longer.places(name, 128), policy  # type: ignore[union-attr]
    with torch.no_grad():
        hidden = model(seen[:, 64:192], support.window(32, 32) if name == "window" else None)
    logits = hidden @ model.embed.weight.mT
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), asked.flatten())
    found = longer.read(model, name, policy, seen, truth, 128)
    assert found["nll"] == pytest.approx(whole.item(), abs=1e-5)


def test_the_plan_crosses_every_position_with_every_scale_on_enough_words() -> None:
    settings = longer.EXPERIMENT.sizes["full"].settings
    met = {
        (s["positions"], way)
        for s in settings if s["arm"] == "fixed"
        for way, n in longer.readings(s["scales"], s["policy"], s["positions"], 1024, list(longer.policies(1.0)))
        if n == 1024
    }  # fmt: skip
    assert met == {(p, way) for p in longer.POSITIONS for way in longer.policies(1.0)}
    assert longer.EXPERIMENT.sizes["full"].seeds == 8
    assert all(s["passages"] * longer.HIDDEN >= 10_000 for s in settings)


def planted(rotary: float, clipped: float, lost: float = 1.0) -> list[Row]:
    """Losses at 64 and 1024, with the gains of LogLength as given; seeds differ by much more than the gains."""
    rows: list[Row] = []
    for seed in range(8):
        for positions in longer.POSITIONS:
            for n in (64, 512, 1024):
                far = 0.0 if n == 64 else {"rotary": lost, "clipped": 0.2, "window": 0.0}.get(positions, 0.5)
                gains = {"rotary": rotary, "clipped": clipped}
                for way in (longer.USUAL, longer.LOG):
                    less = gains.get(positions, 0.0) if way == longer.LOG and n > 64 else 0.0
                    nll = 5 + seed + far - less + 0.001 * ((seed * 7 + n) % 3)
                    rows.append(
                        {"arm": "fixed", "positions": positions, "scale": way, "n": n, "seed": seed, "nll": nll}
                    )
    return rows


def test_the_verdict_follows_the_interaction() -> None:
    assert longer.judge(planted(-0.1, 0.07)).answer == "holds"
    assert longer.judge(planted(0.07, 0.07)).answer == "does not hold"
    within = longer.judge(planted(0.02, 0.07))
    assert within.answer == "holds within" and "rotary gains nothing" in within.within
    assert "most is positions" in longer.judge(planted(-0.1, 0.07, lost=0.25)).within


def test_recall_and_invariance_are_judged_by_seed() -> None:
    def recall(gain: float) -> list[Row]:
        return [
            {"noise": 0.5, "scale": w, "n": n, "seed": s, "accuracy": 90 - n / 64,
             "nll": s + n / 64 - gain * (w == "LogLength")}
            for w in recall_longer.policies() for n in (64, 256) for s in range(4)
        ]  # fmt: skip

    assert recall_longer.judge(recall(0.1)).answer == "holds"
    assert recall_longer.judge(recall(-0.1)).answer == "holds within"  # accuracy falls all the same

    def invariance(gain: float) -> list[Row]:
        return [
            {"kind": k, "n": n, "seed": s, "nll": s - gain * (k == "invariant" and n > 64)}
            for k in scale_invariance.KINDS for n in (64, 1024) for s in range(4)
        ]  # fmt: skip

    assert scale_invariance.judge(invariance(0.5)).answer == "holds"
    assert scale_invariance.judge(invariance(-0.5)).answer == "does not hold"


def test_the_page_holds_what_the_rows_say_and_what_is_missing(tmp_path: Path) -> None:
    site = program("site/reading.py")
    cells = longer.EXPERIMENT.cells("tiny")
    with Store(tmp_path, "reading_longer", "tiny") as store:
        for cell in cells[:-1]:
            rows = [
                {**r, "targets": 44, "accuracy": 25.0} for r in planted(-0.1, 0.07)
                if r["positions"] == cell.settings["positions"] and r["seed"] == cell.seed and r["n"] != 512
            ]  # fmt: skip
            two = cell.settings["scales"] == "two"
            store.add(cell, [{**r, "arm": cell.settings["arm"]} for r in rows] if two else [], elapsed_s=0.1)
    text = site.page(tmp_path, "tiny")
    found = mean_by(store.rows(cells), "nll", "positions", "scale", "n")["rotary", longer.USUAL, 1024]
    text = text.replace("\u00a0", " ")
    assert f"| {found.mean:.3f}<br>± {found.half:.3f}<br>25.0 % |" in text
    assert "| clipped | +0.000<br>± 0.000 | **+0.070<br>± 0.000** |" in text  # what LogLength gains
    assert f"1 of {len(cells)} cells were not run" in text and "holds" not in text
    assert "Not run at this size yet: `partita study run recall_longer --size tiny`" in text
