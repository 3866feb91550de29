"""The quick form of the length study runs, and reports every policy at every length with an interval."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "examples" / "length_study.py"
POLICIES = ("1/sqrt(d)", "kappa log n / d", "LogLength", "SqrtLogLength", "Mixed", "CalibratedLog", "ScalableSoftmax",
            "TargetEntropy")  # fmt: skip


def test_the_quick_study_reports_every_policy_with_an_interval():
    pytest.importorskip("partita_studies", reason="the example needs the studies, which are not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(STUDY), "--quick"], capture_output=True, text=True, timeout=1200, env=environment
    )
    assert done.returncode == 0, done.stderr
    rows = {name: line for line in done.stdout.splitlines() for name in POLICIES if line.startswith(name + " ")}
    assert set(rows) == set(POLICIES)
    for line in rows.values():
        cells = re.findall(r"(\d+\.\d+) \+-\s*(\d+\.\d+)", line)
        assert len(cells) == 2 and all(0 <= float(mean) <= 100 for mean, _ in cells)
