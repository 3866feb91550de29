"""The examples run as their first lines say, and agree with one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, processes: int) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*torchrun, f"examples/{name}.py", "--quick"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("distributed_contrastive", 2),
        pytest.param("distributed_contrastive", 3, marks=pytest.mark.slow),
        pytest.param("context_parallel", 2, marks=pytest.mark.slow),
        pytest.param("distributed_fsdp", 2, marks=pytest.mark.slow),
    ],
)
def test_example(name: str, processes: int) -> None:
    out = run(name, processes)
    found = re.search(r"differs from one process: loss (\S+), gradients (\S+)", out)
    assert found is not None, out
    assert float(found.group(1)) < 1e-5
    assert float(found.group(2)) < 1e-5
    assert not re.search(r"\bnan\b", out)
