"""The examples of partita that draw with the figures of partita-theory."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_an_example_writes_its_figure(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    command = [sys.executable, "examples/distillation.py", "--quick", "--figure", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert ElementTree.fromstring(path.read_text("utf-8")).tag.endswith("svg")


def test_a_provoked_finding_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import provoked_findings as example

    case = example.CASES["HEAD_COLLAPSED"]
    text = example.draw("HEAD_COLLAPSED", case.provoked(), case.cured(), tmp_path).read_text("utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert all(name in text for name in ("provoked", "cured", "threshold"))
