"""The lab page, driven in a browser: its numbers are the softmax's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from partita_theory.lab import write


@pytest.fixture
def lab(tmp_path: Path, visit: Any) -> tuple[Any, Any]:
    page, seen = visit(write(tmp_path / "lab.html"), hash="#z=2,1,0,-1&T=1")
    return page, seen


def slide(page: Any, name: str, value: float) -> None:
    page.evaluate(
        "([name, value]) => { const s = document.getElementById(name); s.value = value;"
        " s.dispatchEvent(new Event('input')); }",
        [name, value],
    )


def number(page: Any, name: str) -> float:
    return float(page.locator(f"#{name}").inner_text())


def softmax(z: list[float], temperature: float = 1.0) -> dict[str, float]:
    e = [math.exp(v / temperature) for v in z]
    p = [v / sum(e) for v in e]
    mean = sum(q * v for q, v in zip(p, z, strict=True))
    variance = sum(q * (v - mean) ** 2 for q, v in zip(p, z, strict=True))
    entropy = -sum(q * math.log(q) for q in p)
    slope = variance / temperature**3
    return {"H": entropy, "width": math.exp(entropy), "logZ": math.log(sum(e)), "slope": slope, "top": max(p)}


@pytest.mark.parametrize("width", [390, 1024, 1600])
def test_it_is_quiet_and_fits(width: int, tmp_path: Path, visit: Any) -> None:
    page, seen = visit(write(tmp_path / "lab.html"), width, 800, "#theme=dark")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    seen.assert_quiet()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_read_outs_are_the_softmax(lab: Any, temperature: float) -> None:
    page, seen = lab
    slide(page, "T", math.log(temperature))
    for name, want in softmax([2, 1, 0, -1], temperature).items():
        assert number(page, f"k-{name}") == pytest.approx(want, rel=2e-3), name
    seen.assert_quiet()


def test_scores_are_dragged_and_stepped(lab: Any, wait_for: Any) -> None:
    page, _ = lab
    before = number(page, "k-H")
    box = page.locator("#score-3").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] - 60)
    page.mouse.up()
    assert number(page, "k-H") > before  # the last key caught up
    page.locator("#score-0").focus()
    page.keyboard.press("ArrowUp")
    assert float(page.locator("#score-0").get_attribute("aria-valuenow")) == pytest.approx(2.1)
    wait_for(page, "decodeURIComponent(location.hash).includes('z=2.1')")


def test_the_simplex_tells_the_losses_apart(lab: Any) -> None:
    page, seen = lab
    page.locator("#s-target").scroll_into_view_if_needed()
    page.select_option("#s-target", "2")
    cross = number(page, "s-grad")
    slide(page, "s-T", math.log(0.1))  # confidently wrong
    assert number(page, "s-grad") > cross
    page.select_option("#s-kind", "square")
    assert number(page, "s-grad") < 0.05  # squared error has gone flat there
    trail = page.locator("#trail").get_attribute("d")
    page.locator("#simplex-point").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#trail").get_attribute("d") != trail
    seen.assert_quiet()


@pytest.mark.parametrize("block", [1, 3, 16])
def test_the_stream_ends_at_the_entropy(lab: Any, block: int) -> None:
    page, _ = lab
    slide(page, "t-block", block)
    steps = math.ceil(4 / block)
    for _ in range(steps):
        page.locator("#t-next").click()
    assert number(page, "t-H") == pytest.approx(softmax([2, 1, 0, -1])["H"], rel=1e-5)
    page.locator("#t-reset").click()
    assert page.locator("#t-H").inner_text() == "none yet"
    assert "overflow" in page.locator("#digits").inner_text()


def test_attention_dilutes_and_a_sink_takes_mass(lab: Any) -> None:
    page, seen = lab
    slide(page, "a-n", 32)
    short = number(page, "a-width")
    slide(page, "a-n", 128)
    assert number(page, "a-width") > 2 * short
    flat = number(page, "a-width")
    slide(page, "a-gain", math.log(6))
    assert number(page, "a-width") < flat
    slide(page, "a-sink-mass", 0.8)
    assert number(page, "a-sink") == pytest.approx(0.8, abs=0.02)
    scale = number(page, "a-scale")
    page.select_option("#a-policy", "log n / d")
    assert number(page, "a-scale") != scale
    seen.assert_quiet()


def test_three_readings_agree(lab: Any) -> None:
    page, _ = lab
    slide(page, "f-target", 1)
    loss = softmax([2, 1, 0, -1])["logZ"] - 1
    text = page.locator("#faces-table").inner_text()
    assert text.count(f"{loss:.4g}") == 2 and f"{math.log(4) - loss:.4g}"[:5] in text


def test_the_solver_reaches_its_target(lab: Any) -> None:
    page, _ = lab
    slide(page, "g-target", 0.5)
    assert number(page, "g-got") == pytest.approx(2.0, rel=1e-3)
    page.locator("#g-use").click()
    assert number(page, "k-width") == pytest.approx(2.0, rel=2e-3)
    slide(page, "g-target", 1.0)
    assert number(page, "g-scale") == 0


def test_noise_and_adversary(lab: Any) -> None:
    page, seen = lab
    slide(page, "n-sigma", 0.5)
    sd, predicted = number(page, "n-sd"), number(page, "n-predicted")
    assert 0.3 < sd / predicted < 1.5
    slide(page, "n-shared", 1.0)
    assert number(page, "n-sd") < 1e-6  # noise common to all keys cancels
    slide(page, "n-budget", 0)
    low, high = (float(v) for v in page.locator("#n-adv").inner_text().split(" to "))
    assert low == pytest.approx(high, abs=1e-3)
    slide(page, "n-budget", 2)
    low, high = (float(v) for v in page.locator("#n-adv").inner_text().split(" to "))
    assert high - low > 0.2
    page.select_option("#n-family", "laplace")
    seen.assert_quiet()


def test_own_scores_can_be_pasted(lab: Any) -> None:
    page, seen = lab
    page.fill("#paste", "[1.0, 2.0;\n 3.0]")
    page.locator("#paste-use").click()
    assert number(page, "k-H") == pytest.approx(softmax([1, 2, 3])["H"], rel=1e-3)
    before = number(page, "k-H")
    for bad in ("", "1", "1, two, 3", "1, NaN, 2", "<b>1</b>, 2"):
        page.fill("#paste", bad)
        page.locator("#paste-use").click()
        assert number(page, "k-H") == before and page.locator("#paste-said").inner_text()
    for extreme in ("1e308 -1e308 5", "10000 -10000 5", "0 0 0"):
        page.fill("#paste", extreme)
        page.locator("#paste-use").click()
    assert "NaN" not in page.locator("body").inner_text()
    seen.assert_quiet()


# Counts the exponentials and the new nodes of each of 20 changes, and the nodes of the page after it.
COUNT = """(() => {
  const exp = Math.exp, make = document.createElementNS.bind(document), el = document.createElement.bind(document);
  let exps = 0, nodes = 0;
  Math.exp = (x) => { exps++; return exp(x); };
  document.createElementNS = (...a) => { nodes++; return make(...a); };
  document.createElement = (...a) => { nodes++; return el(...a); };
  const score = document.getElementById('score-5'), rows = [];
  for (let i = 0; i < 20; i++) {
    exps = nodes = 0;
    score.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowUp'}));
    rows.push([exps, nodes, document.getElementsByTagName('*').length]);
  }
  Math.exp = exp; document.createElementNS = make; document.createElement = el;
  return rows;
})()"""


def test_a_change_does_the_work_of_a_frame_and_no_more(lab: Any) -> None:
    """A frame of 16 ms has room for about a million exponentials and ten thousand new nodes; a change takes a tenth of
    either at most, the last of 20 no more than the first, and none leaves anything behind."""
    page, _ = lab
    slide(page, "n", 64)
    rows = page.evaluate(COUNT)
    print(rows[0], rows[-1])
    assert all(exps <= 100_000 and nodes <= 1_000 for exps, nodes, _ in rows)
    assert all(exps > 64 for exps, _, _ in rows)  # each of them was a change
    assert max(nodes for _, nodes, _ in rows) <= 1.2 * rows[0][1] + 10
    assert rows[-1][2] <= rows[0][2] + 10


def test_the_positive_is_pulled_and_the_negatives_are_pushed(lab: Any) -> None:
    """Forces on the circle are those of autograd, and a step along them lowers the loss."""
    torch = pytest.importorskip("torch")
    page, seen = lab
    temperature = 0.3
    slide(page, "p-T", math.log(temperature))

    def forces() -> dict[str, float]:
        found = page.evaluate(
            "[...document.querySelectorAll('#pull-figure .handle')]"
            ".map(d => [d.id, Number(d.getAttribute('aria-valuenow')), d.getAttribute('aria-valuetext')])"
        )
        return {name: (angle, float(text.rpartition(" ")[2])) for name, angle, text in found}

    shown = forces()
    names = [f"p-k{j}" for j in range(8)]
    angles = torch.tensor([shown[n][0] for n in [*names, "p-q"]], dtype=torch.float64).deg2rad().requires_grad_()
    logits = torch.cos(angles[-1] - angles[:-1]) / temperature
    loss = torch.nn.functional.cross_entropy(logits[None], torch.tensor([0]))
    (grad,) = torch.autograd.grad(loss, angles)
    assert number(page, "p-loss") == pytest.approx(loss.item(), rel=2e-3)
    for k, name in enumerate([*names, "p-q"]):
        assert shown[name][1] == pytest.approx(-grad[k].item(), rel=1e-2, abs=1e-6), name
    assert number(page, "p-pull") == pytest.approx(number(page, "p-push"), rel=1e-3)
    for _ in range(5):
        before = number(page, "p-loss")
        page.locator("#p-step").click()
        assert number(page, "p-loss") < before
    page.locator("#p-reset").click()
    slide(page, "p-T", math.log(0.02))
    sharp = number(page, "p-effective")
    slide(page, "p-T", math.log(5.0))
    assert number(page, "p-effective") > 6.5 > 1.5 > sharp  # cold: the nearest alone; hot: all seven alike
    page.locator("#p-k0").focus()
    page.keyboard.press("ArrowUp")
    assert forces()["p-k0"][0] == pytest.approx(28.0)
    seen.assert_quiet()


def test_a_vector_is_dragged_round_the_circle(lab: Any) -> None:
    page, seen = lab
    page.locator("#p-q").scroll_into_view_if_needed()
    box, whole = page.locator("#p-k0").bounding_box(), page.locator("#pull-figure svg.drag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(whole["x"] + 2, whole["y"] + whole["height"] / 2, steps=4)
    page.mouse.up()
    assert float(page.locator("#p-k0").get_attribute("aria-valuenow")) == pytest.approx(180.0, abs=1.0)
    seen.assert_quiet()
