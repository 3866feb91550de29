"""The command line: quick to answer, exit codes as promised, finished work survives an interruption."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import synthetic

from partita.lab.cli import main

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

WITHOUT_TORCH = """
import sys
from partita.lab.cli import main
code = main({})
assert "torch" not in sys.modules
sys.exit(code)
"""
FACTORY = """
import torch, torch.nn as nn, torch.nn.functional as F

class Attention(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.qkv, self.gain = nn.Linear(16, 48), gain

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(self.gain * q, k, v).transpose(1, 2).flatten(2)

class Model(nn.Module):
    def __init__(self, gain=4.0):
        super().__init__()
        self.embed, self.attention = nn.Embedding(100, 16), Attention(gain)
        self.place = nn.Parameter(torch.randn(600, 16))

    def forward(self, input_ids):
        return self.attention(self.embed(input_ids) + self.place[: input_ids.shape[1]])

def healthy():
    torch.manual_seed(0)
    return Model()

def collapsed():
    torch.manual_seed(0)
    return Model(4000.0)

def with_tokenizer():
    return healthy(), lambda text: [ord(c) % 100 for c in text]

def wrong():
    return "not a model"
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(FACTORY)
    return str(path)


def test_help_is_quick_and_imports_no_torch() -> None:
    code = WITHOUT_TORCH.format(["--help"])
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
        spent.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert all(c in done.stdout for c in ("demo", "inspect", "study", "report", "bench", "lab", "doctor"))
    assert min(spent) < 0.3, spent


def test_reports_need_no_torch(tmp_path: Path) -> None:
    path = synthetic.record(2, 2, 3).save(tmp_path / "run.jsonl")
    for arguments in (["report", str(path), "-o", str(tmp_path / "r.html")], ["lab", "-o", str(tmp_path / "lab.html")]):
        code = WITHOUT_TORCH.format(arguments)
        assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 0
    assert "synthetic run" in (tmp_path / "r.html").read_text()


def test_wrong_use_is_two(capsys: pytest.CaptureFixture[str], factory: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    folder = tmp_path / "folder"
    folder.mkdir()
    for arguments in (
        ["nothing"],
        ["inspect"],
        ["inspect", "no-such-model-anywhere"],
        ["inspect", f"{factory}:nothing"],
        ["inspect", f"{factory}:wrong"],
        ["inspect", f"{tmp_path}/none.py:f"],
        ["inspect", f"{factory}:healthy", "--text", f"{tmp_path}/none.txt"],
        ["inspect", f"{factory}:healthy", "--fail-on", "sometimes"],
        ["report", str(tmp_path / "none.jsonl")],
        ["report", str(empty)],
        ["report", str(folder)],
    ):
        assert main(arguments) == 2, arguments
        assert capsys.readouterr().err.strip(), arguments


def test_commands_of_other_parts_say_when_they_are_absent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n in ("partita.lab.study", "benchmarks") else real(n, *a)
    )
    monkeypatch.chdir(tmp_path)
    assert main(["study", "--anything"]) == 2 and "partita.lab.study" in capsys.readouterr().err
    assert main(["bench"]) == 2 and "benchmarks" in capsys.readouterr().err


def test_inspect_a_file(capsys: pytest.CaptureFixture[str], factory: str, tmp_path: Path) -> None:
    assert main(["inspect", f"{factory}:healthy"]) == 0
    assert "1 of 1 attention modules observed" in capsys.readouterr().out
    text = tmp_path / "text.txt"
    text.write_text("In the beginning was the word. " * 40)
    arguments = ["inspect", f"{factory}:collapsed", "--text", str(text), "--json", "--max-length", "128"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert "HEAD_COLLAPSED" in {f["code"] for f in found["findings"]} and found["layers"][0]["heads"] == 2
    assert main([*arguments, "--fail-on", "warning"]) == 1
    assert main(["inspect", f"{factory}:healthy", "--max-length", "16", "--fail-on", "error"]) == 0
    assert main(["inspect", f"{factory}:with_tokenizer", "--max-length", "32"]) == 0


def test_inspect_saves_and_report_compares(capsys: pytest.CaptureFixture[str], factory: str, tmp_path: Path) -> None:
    for name in ("healthy", "collapsed"):
        saved = str(tmp_path / f"{name}.jsonl")
        assert main(["inspect", f"{factory}:{name}", "--save", saved, "--max-length", "64"]) == 0
    out = tmp_path / "both.html"
    code = main(
        ["report", str(tmp_path / "healthy.jsonl"), str(tmp_path / "collapsed.jsonl"), "-o", str(out), "--json"]
    )
    assert code == 0 and out.stat().st_size < 2_000_000
    assert '"other":{' in out.read_text()
    assert main(["report", str(tmp_path / "collapsed.jsonl"), "-o", str(out), "--fail-on", "warning"]) == 1
    capsys.readouterr()


def test_doctor_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    names = {c["name"]: c["ok"] for c in json.loads(capsys.readouterr().out)}
    assert names["torch"] and names["a softmax over six equal scores"]


def test_no_colour_without_a_terminal(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    main(["inspect", f"{factory}:collapsed", "--max-length", "32"])
    assert "\033[" not in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ on Windows")
def test_an_interruption_is_130_and_keeps_finished_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = subprocess.Popen(
        [sys.executable, "-m", "partita", "demo", "-o", str(out)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    try:
        assert run.stderr is not None
        for line in run.stderr:
            if "text" in line:  # the demo is past its set-up
                break
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
    finally:
        run.kill()
        run.wait()
        run.stderr.close()
    assert (out / "lab.html").is_file() and (out / "report.html").is_file()


def test_the_demo_runs_in_small(tmp_path: Path, visit: Any) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "partita", "demo", "--quick", "-o", str(out)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["report", "training", "lab"]
    assert len(lines) == 6 and all(line.startswith("- ") for line in lines[3:]), done.stdout
    assert "\r" not in done.stderr  # quiet without a terminal
    for name in ("report.html", "lab.html", "training.html"):
        page, seen = visit(out / name)
        seen.assert_quiet()
        if name == "report.html":
            assert page.locator("#studies figure").count() == len(
                json.loads((out / "studies/verdicts.json").read_text())
            )
            assert page.locator("#studies svg.partita-figure").first.is_visible()
            assert "nats per byte" in page.locator("#study").inner_text()


def test_an_interruption_among_the_studies_keeps_the_finished_ones(
    tmp_path: Path, visit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from partita.lab import demo, study

    real, asked = study.main, []

    def stopped(arguments: list[str]) -> int:
        asked.append(arguments[1])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(arguments)

    monkeypatch.setattr(demo, "STUDIES", ("positions", "lipschitz"))
    monkeypatch.setattr(demo, "load_text", lambda progress: ("", []))
    monkeypatch.setattr(demo, "watch_encoder", lambda *args, **kwargs: synthetic.record(2, 2, 3))
    monkeypatch.setattr(demo, "train_policies", lambda *args, **kwargs: iter(()))
    monkeypatch.setattr(study, "main", stopped)
    assert demo.demo(tmp_path, quick=True) == 130
    assert "interrupted" in capsys.readouterr().err
    page, seen = visit(tmp_path / "report.html")
    assert page.locator("#studies figure").count() == 1
    seen.assert_quiet()
    monkeypatch.setattr(study, "main", real)
    before = (tmp_path / "studies/positions-tiny.jsonl").read_bytes()
    assert demo.demo(tmp_path, quick=True) == 0
    assert (tmp_path / "studies/positions-tiny.jsonl").read_bytes() == before  # not computed again
    page, _ = visit(tmp_path / "report.html")
    assert page.locator("#studies figure").count() == 2
