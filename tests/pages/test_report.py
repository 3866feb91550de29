"""The report, driven in a browser: it is quiet, it shows the record's numbers, its controls work."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.monitor.findings import Thresholds, find, verdicts
from partita.monitor.record import COLUMNS, Record
from partita.monitor.report import notebook, pack, render, write
from partita.monitor.report.verdict import sentence
from tests.pages import synthetic
from tests.pages.browser import table

RECORDS: dict[str, Callable[[], Record]] = {
    "healthy": synthetic.record,
    "sick": lambda: synthetic.record(sick=True),
    "one head": lambda: synthetic.record(1, 1, 5),
    "thousand heads": lambda: synthetic.record(25, 40, 6),
    "missing data": lambda: synthetic.record(missing=True),
    "one step": lambda: synthetic.record(3, 4, 1),
    "hostile names": synthetic.hostile,
    "nothing": Record,
    "losses only": lambda: Record(losses=synthetic.record(1, 1, 5).losses),
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_kind_of_record_opens_quietly(name: str, tmp_path: Path, visit: Any) -> None:
    path = write(RECORDS[name](), tmp_path / "r.html")
    for width, hash in ((390, "#theme=dark"), (1024, ""), (1600, "#theme=light")):
        page, seen = visit(path, width, 800, hash)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"scrolls sideways at {width}"
        assert page.locator("#sentence").inner_text()
        seen.assert_quiet()


def test_the_first_screen_holds_verdict_and_atlas(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(synthetic.record(sick=True), tmp_path / "r.html"))
    assert page.locator("#findings li").count() == 5
    assert page.locator("#cell-0-0").bounding_box()["y"] < 768
    assert f"warning {Thresholds().logit_warning:g}" in page.locator("#logits svg").text_content()


def test_cells_show_the_record(tmp_path: Path, visit: Any) -> None:
    record = synthetic.record(sick=True)
    page, _ = visit(write(record, tmp_path / "r.html"))
    steps = record.steps()
    last = {(b.layer, h): b.row(h) for b in record.blocks if b.step == steps[-1] for h in range(b.heads)}

    def cells() -> dict[tuple[int, int], float]:
        raw = page.evaluate("[...document.querySelectorAll('rect.cell')].map(c => [c.id, c.dataset.value])")
        return {tuple(int(n) for n in i.split("-")[1:]): float(v) for i, v in raw}  # type: ignore[misc]

    for metric in ("normalized_entropy", "max_score", "critical", "sink_first"):
        page.select_option("#metric", metric)
        shown = cells()
        assert len(shown) == 72
        for where, row in last.items():
            assert shown[where] == pytest.approx(row[metric], rel=1e-6)
    page.evaluate(
        "(() => { const s = document.getElementById('step'); s.value = 3; s.dispatchEvent(new Event('input')); })()"
    )
    assert page.locator("#step-value").inner_text() == f"step {steps[3]}"
    early = {(b.layer, h): b.row(h) for b in record.blocks if b.step == steps[3] for h in range(b.heads)}
    assert cells()[4, 0] == pytest.approx(early[4, 0]["sink_first"], rel=1e-6)


def test_the_critical_scale_is_offered_where_it_was_measured() -> None:
    record = synthetic.record(2, 3, 4)
    assert pack.pack(record)["metrics"]["critical"]["count"] == 2 * 3 * 4
    at = list(COLUMNS).index("critical")
    for block in record.blocks:
        for head in range(block.heads):
            block.values[head * len(COLUMNS) + at] = math.nan
    found = pack.pack(record)["metrics"]
    assert "critical" not in found and "top_mass" in found


def test_a_missing_value_is_no_zero(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(synthetic.record(missing=True), tmp_path / "r.html"))
    values = page.evaluate("[...document.querySelectorAll('rect.cell')].map(c => c.dataset.value)")
    assert "" in values and "NaN" not in "".join(page.locator("#raw, output, .picked").all_inner_texts())


def test_selection_follows_keys_and_lives_in_the_address(tmp_path: Path, visit: Any, wait_for: Any) -> None:
    path = write(synthetic.record(), tmp_path / "r.html")
    page, seen = visit(path)
    page.locator("#cell-0-0").click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#head-title").inner_text() == "Layer 1, head 1"
    page.select_option("#metric", "log_partition")
    wait_for(page, "location.hash.includes('metric=log_partition')")
    address = page.evaluate("location.hash")
    assert "head=L1H1" in address
    again, _ = visit(path, hash=address)
    assert (
        again.locator("#head-title").inner_text() == "Layer 1, head 1"
        and again.locator("#metric").input_value() == "log_partition"
    )
    seen.assert_quiet()


def test_findings_are_those_of_the_record(tmp_path: Path, visit: Any) -> None:
    record = synthetic.record(sick=True)
    page, _ = visit(write(record, tmp_path / "r.html"))
    shown = page.evaluate("[...document.querySelectorAll('[data-code]')].map(n => n.dataset.code)")
    assert shown == [f.code for f in find(record)]
    page.locator("[data-code=HEAD_UNIFORM] a").click()
    assert page.locator("#head-title").inner_text() == "Layer 2, head 0"
    assert "selects nothing" in page.locator("#reading").inner_text()
    page.locator("[data-code=HEAD_COLLAPSED] a").click()
    assert "half of its rows" in page.locator("#reading").inner_text()
    page.locator("#cell-5-5").click()
    assert "Healthy" in page.locator("#reading").inner_text()


def test_figures_read_out_pin_and_export(tmp_path: Path, visit: Any) -> None:
    record = synthetic.record()
    page, seen = visit(write(record, tmp_path / "r.html"))
    page.locator("#cell-2-3").click()
    page.locator("#head-time svg").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator("#head-time output").inner_text() and page.locator("#head-time .pins div").count() == 1
    rows = table(page, "#head-time")
    mine = [r for r in rows if r[0] == "layer 2 head 3"]
    want = [b.row(3)["normalized_entropy"] for b in record.blocks if b.layer == 2]
    assert [float(r[2]) for r in mine] == pytest.approx(want, rel=1e-6)
    with page.expect_download() as got:
        page.locator("#head-time .tools button", has_text="SVG").click()
    root = ElementTree.parse(got.value.path()).getroot()
    assert root.tag.endswith("svg") and "var(" not in ElementTree.tostring(root, "unicode")
    page.locator("#head-time .tools button", has_text="?").click()
    assert page.locator("#head-time .help").is_visible()
    seen.assert_quiet()


def test_the_advisor_answers_to_its_slider(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(synthetic.record(), tmp_path / "r.html"))

    def ask(value: int) -> float:
        find = "const s = document.getElementById('target-width')"
        move = f"(v) => {{ {find}; s.value = v; s.dispatchEvent(new Event('input')); }}"
        page.evaluate(move, value)
        words = page.locator("#advice").inner_text()
        return float(words.split(" by ")[1].split()[0].rstrip(":"))

    assert ask(20) > ask(60) > ask(95)  # a smaller width needs a larger scale


def test_the_table_filters_and_sorts(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(synthetic.record(), tmp_path / "r.html"))
    page.fill("#filter", "layer 3 head 1")
    assert page.locator("#raw tbody tr").count() == 3  # 1, 10, 11
    page.fill("#filter", "")
    page.locator("#raw th button", has_text="max_score").click()
    column = page.locator("#raw thead th").all_inner_texts().index("max_score")
    values = [float(r) for r in page.locator(f"#raw tbody td:nth-child({column + 1})").all_inner_texts()]
    assert values == sorted(values)


def test_two_runs_compare(tmp_path: Path, visit: Any) -> None:
    one, two = synthetic.record(seed=1), synthetic.record(seed=2)
    page, seen = visit(write(one, tmp_path / "r.html", other=two))
    page.locator("#difference").click()
    shown = float(page.locator("#cell-1-2").get_attribute("data-value"))

    def last(r: Record) -> float:
        return [b for b in r.blocks if b.layer == 1][-1].row(2)["normalized_entropy"]

    assert shown == pytest.approx(last(two) - last(one), abs=1e-6)
    assert page.locator("#compare tr").count() == 1 + len(pack.METRICS) + len(pack.OPTIONAL)  # the head, and a row each
    seen.assert_quiet()


def test_runs_are_called_by_their_titles(tmp_path: Path, visit: Any) -> None:
    one, two = synthetic.record(seed=1), synthetic.record(2, 4, sick=True)
    one.provenance["title"], two.provenance["title"] = "before the change", "after the change"
    page, seen = visit(write(one, tmp_path / "r.html", other=two))
    heads = page.locator("#compare th").all_inner_texts()
    assert heads[1:3] == ["before the change", "after the change"]
    assert page.locator("#difference").inner_text() == "difference to after the change"
    shown = page.evaluate("[...document.querySelectorAll('#comparison [data-code]')].map(n => n.dataset.code)")
    assert shown == [f.code for f in find(two)] and shown
    text = page.locator("body").inner_text()
    assert "other run" not in text and "this run" not in page.locator("#comparison").inner_text()
    seen.assert_quiet()


def test_hostile_names_stay_text(tmp_path: Path, visit: Any) -> None:
    page, seen = visit(write(synthetic.hostile(), tmp_path / "r.html"))
    assert page.locator("img").count() == 0 and page.evaluate("document.scripts.length") == 2
    assert "</script><img" in page.locator("body").inner_text()
    seen.assert_quiet()


def test_the_policy_forbids_everything_else(tmp_path: Path, visit: Any) -> None:
    text = render(synthetic.record(1, 1, 2))
    assert "default-src 'none'" in text and "unsafe" not in text.split("<style>")[0]
    page, _ = visit(write(synthetic.record(1, 1, 2), tmp_path / "r.html"))
    page.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.pwned = 1'; "
        "document.body.append(s); })()"
    )
    assert page.evaluate("window.pwned === undefined")
    assert page.evaluate("fetch('data:text/plain,x').then(() => 'went out', () => 'refused')") == "refused"


def test_without_scripts_the_findings_are_there(tmp_path: Path) -> None:
    text = render(synthetic.record(sick=True))
    fallback = text.split("<noscript>")[1].split("</noscript>")[0]
    assert "LOGIT_GROWTH" in fallback and "<table>" in fallback
    assert "<img" not in render(synthetic.hostile()).split("<noscript>")[1].split("</noscript>")[0]


def test_the_notebook_frame_draws(tmp_path: Path, browser: Any) -> None:
    path = tmp_path / "n.html"
    path.write_text("<!doctype html><meta charset=utf-8>" + notebook(synthetic.record(2, 3, 4)), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("body[data-ready=yes]").wait_for()
    assert frame.locator("rect.cell").count() == 6
    page.close()


def test_a_large_run_stays_under_two_megabytes() -> None:
    record = synthetic.record(24, 16, 256)
    size = len(render(record).encode())
    print(f"{size / 1e6:.2f} MB")
    assert size < 2_000_000, f"{size / 1e6:.2f} MB"


def test_packed_numbers_keep_their_digits(tmp_path: Path, visit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bits of the range: five digits, as the page states."""
    monkeypatch.setattr(pack, "EXACT", 100)
    record = synthetic.record(8, 16, 30)
    page, _ = visit(write(record, tmp_path / "r.html"))
    page.select_option("#metric", "effective_width")
    block = [b for b in record.blocks if b.layer == 7][-1]
    low, high = (f(b.row(h)["effective_width"] for b in record.blocks for h in range(b.heads)) for f in (min, max))
    for head in range(16):
        shown = float(page.locator(f"#cell-7-{head}").get_attribute("data-value"))
        assert abs(shown - block.row(head)["effective_width"]) < 2e-5 * (high - low)
    assert "16 bits" in page.locator("#robustness").inner_text()


def test_more_steps_than_pixels_keep_their_spikes() -> None:
    record = synthetic.record(1, 1, 900)
    record.blocks[450].values[list(record.blocks[450].row(0)).index("max_score")] = 99.0
    packed = pack.pack(record)
    assert len(packed["steps"]) <= 256 and packed["metrics"]["max_score"]["hi"] == 99.0
    assert math.isfinite(packed["metrics"]["max_score"]["lo"])


def test_the_bound_on_rounding_is_its_formula(tmp_path: Path, visit: Any) -> None:
    """|softmax(s + e) - softmax(s)|_1 <= 2 tanh(|e| / 2) with e half a unit in the last place of the largest score."""
    import torch

    record = synthetic.record(sick=True)
    page, _ = visit(write(record, tmp_path / "r.html"))
    rows = table(page, "#rounding")[1:]
    tops = {s: max(v for b in record.blocks if b.step == s for v in b.column("max_score")) for s in record.steps()}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        shown = {int(r[1]): float(r[2]) for r in rows if r[0] == name}
        for step, top in tops.items():
            unit = torch.finfo(dtype).eps * 2 ** math.floor(math.log2(top))
            assert shown[step] == pytest.approx(2 * math.tanh(unit / 4), rel=1e-6)


def test_the_advisor_draws_the_slope_of_the_theory(tmp_path: Path, visit: Any) -> None:
    """dH / d log(scale) = -Var(score): the dashed line leaves the present width with the recorded variance."""
    record = synthetic.record(2, 2, 5)
    page, _ = visit(write(record, tmp_path / "r.html"))
    rows = table(page, "#advisor")
    line = {float(r[1]): float(r[2]) for r in rows if r[0].startswith("theory") and r[2]}
    variance = [b for b in record.blocks if b.layer == 0][-1].row(0)["score_variance"]
    mean = record.curves[0]["mean"][0][record.curves[0]["factors"].index(1.0)]
    assert line[1.0] == pytest.approx(math.exp(mean), rel=1e-6)
    assert line[1.4142] == pytest.approx(math.exp(mean - variance * math.log(1.4142)), rel=1e-5)


def test_named_steps_are_called_by_their_names(tmp_path: Path, visit: Any) -> None:
    record = synthetic.record(2, 3, 4)
    record.provenance["step_names"] = {"0": "English", "10": synthetic.HOSTILE, "30": "512 tokens"}
    page, seen = visit(write(record, tmp_path / "r.html"))
    assert page.locator("#step-value").inner_text() == "step 30 (512 tokens)"
    rows = page.locator("#texts tbody tr")
    assert rows.count() == 3 and "English" in rows.first.inner_text()
    want = [v for b in record.blocks if b.step == 0 for v in b.column("sink_first")]
    page.select_option("#metric", "sink_first")
    assert float(rows.first.locator("td").nth(2).inner_text()) == pytest.approx(sum(want) / len(want), rel=5e-3)
    page, _ = visit(write(synthetic.record(1, 1, 2), tmp_path / "plain.html"))
    assert page.locator("#texts").count() == 0 and page.locator("#step-value").inner_text() == "step 10"
    seen.assert_quiet()


def test_contrastive_health_is_shown(tmp_path: Path, visit: Any) -> None:
    record = synthetic.record(1, 2, 8, sick=True)
    for row in record.losses:
        if row["type"] == "contrastive":
            row |= {"alignment": 0.3, "uniformity": -2.5, "accuracy": 0.9}
    page, seen = visit(write(record, tmp_path / "r.html"))
    text = page.locator("#loss").inner_text()
    for part in ("Do pairs meet", "positive ranked first", "0.9", "norm of the anchors", "bound over its ceiling"):
        assert part in text
    assert str(math.ceil(math.exp(5.5 + 0.5))) in text  # candidates that 5.5 nats need
    seen.assert_quiet()


def test_a_head_with_nan_is_not_called_healthy(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(synthetic.record(missing=True), tmp_path / "r.html"))
    text = page.locator("#reading").inner_text()
    assert text.startswith("Needs a look") and "NaN or infinite" in text


def test_what_was_not_seen_is_not_called_fine(tmp_path: Path, visit: Any) -> None:
    def marks(record: Record) -> list[str]:
        page, _ = visit(write(record, tmp_path / "r.html"))
        return [t for t in page.locator(".status span:has(svg)").all_inner_texts() if t]

    whole = ["attention", "scores", "sinks", "coverage"]
    assert marks(synthetic.record(1, 1, 3)) == whole
    assert marks(synthetic.record(1, 1, 3, sick=True)) == [*whole[:3], "contrast", "coverage"]
    assert marks(Record()) == []
    page, _ = visit(write(Record(), tmp_path / "r.html"))
    assert page.locator("#findings svg").get_attribute("aria-label") == "warning"


def test_a_head_has_one_verdict_everywhere(tmp_path: Path, visit: Any) -> None:
    """The sentence, the marks of the atlas and the head's own section agree, for every head."""
    record = synthetic.record(sick=True)
    look = verdicts(find(record))
    page, _ = visit(write(record, tmp_path / "r.html"))
    assert f"{len(look)} need a look" in page.locator("#sentence").inner_text()
    assert page.locator("#atlas svg.cells path[stroke='var(--error)']").count() == len(look)
    for layer in range(6):
        for head in range(0, 12, 2):
            page.locator(f"#cell-{layer}-{head}").click()
            reading = page.locator("#reading")
            assert reading.inner_text().startswith("Needs a look" if (layer, head) in look else "Healthy")
            label = look[layer, head][0].severity if (layer, head) in look else "fine"
            assert reading.locator("svg").get_attribute("aria-label") == label


def test_one_number_for_one_name(tmp_path: Path, visit: Any) -> None:
    record = synthetic.record(sick=True)
    names = list(COLUMNS)
    for block in [b for b in record.blocks if b.layer == 1][:12]:  # early: a mean over the run would have it
        for name in ("normalized_entropy", "normalized_entropy_p50"):
            block.values[names.index(name) :: len(names)] = array("d", [0.5] * block.heads)
    page, _ = visit(write(record, tmp_path / "r.html"))
    (found,) = [f for f in find(record) if f.code == "HEAD_COLLAPSED"]
    shown = re.search(r"head (\d+) have H / log n below ([\d.]+) \(mean over rows ([\d.]+)", found.evidence)
    assert shown is not None
    page.locator(f"#cell-1-{shown[1]}").click()
    said = page.locator("#reading").inner_text()
    below, mean = re.search(r"below (\d+\.\d+)", said), re.search(r"Mean H / log n (\d+\.\d+)", said)
    assert below is not None and mean is not None
    assert float(below[1]) == pytest.approx(float(shown[2]), abs=5e-4)
    assert float(mean[1]) == pytest.approx(float(shown[3]), abs=5e-4)
    assert "median over the last quarter" in said and "median over the last quarter" in found.evidence


@pytest.mark.parametrize("width", [390, 1024])
def test_meaning_and_remedy_are_in_plain_sight(width: int, tmp_path: Path, visit: Any) -> None:
    record = synthetic.record(sick=True)
    page, _ = visit(write(record, tmp_path / "r.html"), width, 768)
    for i, finding in enumerate(find(record)[:5]):
        item = page.locator("#findings li").nth(i)
        assert finding.meaning in item.inner_text() and f"Try: {finding.action}" in item.inner_text()
    cut = (
        "[...document.querySelectorAll('#findings *')].filter(n => n.scrollWidth > n.clientWidth + 1 && n.clientWidth)"
    )
    assert page.evaluate(cut + ".length") == 0
    assert all("Try:" not in t for t in page.locator("li:has(svg[aria-label=info])").all_inner_texts())


def test_the_words_of_the_page_are_defined_once(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(synthetic.record(), tmp_path / "r.html"))
    words = page.locator("#words dt").all_inner_texts()
    assert {"H", "H / log n", "width", "sink", "score", "log Z"} <= set(words) and len(words) == len(set(words))
    assert page.locator("dl.words").count() == 1


def frozen() -> Record:
    record = synthetic.record(3, 4, 8)
    for block in record.blocks:
        block.training = False
    record.losses = record.losses[:2]
    return record


def test_a_frozen_model_has_inputs_and_no_steps(tmp_path: Path, visit: Any) -> None:
    page, seen = visit(write(frozen(), tmp_path / "r.html"))
    text = page.locator("body").inner_text()
    assert not re.search(r"\bsteps?\b", re.sub(r"[a-z_]*_steps?[a-z_]*", "", text)), re.findall(r".*\bsteps?\b.*", text)
    assert "learning rate" not in text and page.locator("#step-value").inner_text() == "input 70"
    assert "no curve" in page.locator("#depth-loss").inner_text() and page.locator("#depth-loss .body svg").count() == 0
    assert page.locator("#output-0 .body svg").count() == 0
    seen.assert_quiet()


def test_a_damaged_map_does_not_empty_the_page(tmp_path: Path, visit: Any) -> None:
    for data in ("!!!", None, "AAAA", 7):
        record = synthetic.record(2, 2, 3)
        record.maps[0]["data"] = data
        page, seen = visit(write(record, tmp_path / "r.html"), hash="#head=L0H0")
        assert "damaged" in page.locator("#head-map").inner_text() and page.locator("rect.cell").count() == 4
        seen.assert_quiet()


def test_a_long_page_can_be_travelled_on_a_phone(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(synthetic.record(), tmp_path / "r.html"), 390, 800)
    link = page.locator(".index a", has_text="Method")
    assert page.locator(".index").is_visible()
    page.emulate_media(reduced_motion="reduce")  # jumps at once
    link.click()
    assert page.evaluate("document.getElementById('method').getBoundingClientRect().top") < 400
    page, _ = visit(write(synthetic.record(), tmp_path / "r.html"), 1024, 768)
    assert not page.locator(".index").is_visible()  # the first screen is for the answer
    page.evaluate("scrollTo(0, 600)")
    page.wait_for_selector(".index", state="visible")


def test_dots_of_every_layer_can_be_seen_in_the_dark(tmp_path: Path, visit: Any) -> None:
    page, _ = visit(write(synthetic.record(), tmp_path / "r.html"), hash="#theme=dark")
    edges = page.evaluate(
        "[...document.querySelectorAll('#sinks circle[r=\\'4\\']')].map(c => getComputedStyle(c).stroke)"
    )
    assert len(edges) == 72 and set(edges) == {"rgba(230, 232, 235, 0.64)"}


def test_the_advisor_names_the_scale_of_the_call(tmp_path: Path, visit: Any) -> None:
    for scale, said in ((0.125, "the scale of the call, 0.125, becomes"), (None, "from row to row"), (1.0, "folded")):
        record = synthetic.record(1, 2, 4)
        record.curves[0]["scale"] = scale
        page, _ = visit(write(record, tmp_path / "r.html"))
        assert said in page.locator("#advice").inner_text()


def test_nothing_recorded_is_not_called_fine() -> None:
    record = synthetic.record(2, 3, 4)
    record.blocks = []
    assert sentence(record, find(record)).startswith("None of 6 heads was recorded")
    part = synthetic.record(2, 3, 4)
    part.blocks = [b for b in part.blocks if b.layer == 0]
    assert sentence(part, find(part)).startswith("3 of 6 heads watched")


def test_the_positions_that_draw_the_mass_are_shown(tmp_path: Path, visit: Any) -> None:
    record = synthetic.record(2, 4, 5)
    page, seen = visit(write(record, tmp_path / "r.html"), hash="#head=L1H1")
    shown = page.locator("#head-received")
    assert "share of the mass of 512 rows, 128 keys in bins of 4, step 40" in shown.inner_text()
    assert "most: key 0 50 %" in shown.inner_text()
    assert {"now", "start", "alike"} <= set(shown.locator("svg text").all_text_contents())
    rows = table(page, "#head-received")
    mine = [(float(r[1]), float(r[2])) for r in rows if r[0] == "layer 1 head 1"]
    assert [x for x, _ in mine] == [4 * i for i in range(32)]
    assert [y for _, y in mine] == pytest.approx(record.received[-1]["bins"][1], rel=1e-3)
    page.locator("#cell-0-0").click()
    assert "most: key 0 0.78 %" in shown.inner_text()
    record.received[1]["bins"][0] = record.received[1]["top"][0] = None
    record.received[0]["bins"][0] = record.received[0]["top"][0] = None
    record.provenance["options"]["received"] = True
    page, _ = visit(write(record, tmp_path / "r.html"), hash="#head=L0H0")
    assert "Nothing finite was received" in page.locator("#head-received").inner_text()
    record.received, record.provenance["options"]["received"] = [], False
    page, _ = visit(write(record, tmp_path / "r.html"))
    assert "received=True" in page.locator("#head-received").inner_text()
    seen.assert_quiet()


def test_the_entropy_penalty_has_a_figure(tmp_path: Path, visit: Any) -> None:
    """A penalty is no distribution: its number over the steps, and no question about how sure the output is."""
    record = synthetic.record(1, 2, 5)
    row = {"name": "entropy_loss", "type": "penalty", "rows": 1, "nonfinite": 0}
    record.losses = [{**row, "step": step, "loss": -0.1 + 0.01 * step} for step in range(5)]
    page, seen = visit(write(record, tmp_path / "r.html"))
    figures = page.evaluate("[...document.querySelectorAll('[id^=penalty-]')].map(f => f.textContent)")
    assert len(figures) == 1 and "entropy_loss" in figures[0]
    assert not page.evaluate("document.querySelectorAll('[id^=output-], [id^=reliability-]').length")
    seen.assert_quiet()
