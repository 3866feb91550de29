"""The suite would notice: kernels with a broken mask, rescaling, moment or merge fail its tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import partita

SOURCE = Path(partita.__file__).parent
KERNELS = "engine/backends/triton/kernels"
SIZES = "test_kernels.py::test_sizes_that_straddle_the_border_of_a_tile[33-65-True]"
CAUSAL = "test_kernels.py::test_every_support_over_more_than_one_tile_of_rows_and_keys[causal]"
PARTS = "test_decode.py::test_parts_of_the_keys_merge_to_the_whole[all-True]"
POISON = "test_kernels.py::test_poison_behind_the_diagonal_reaches_exactly_the_rows_that_see_it[nan-value]"

MUTATIONS = {
    "nothing": ("common.py", "", "", CAUSAL),
    "mask: the end of an interval": (
        "common.py",
        "    if S.STOP:\n        seen =",
        "    if False:\n        seen =",
        CAUSAL,
    ),
    "rescale: the moment of the value": ("forward.py", "acc * shrink[:, None]", "acc", SIZES),
    "rescale: the first moment": ("forward.py", "shrink * (first + down * mass)", "shrink * first", SIZES),
    "moment: the spread between two tiles": ("forward.py", "away, 1) + between", "away, 1)", SIZES),
    "moment: its gradient": ("flow.py", "b += 2 * c", "b += c", SIZES),
    "merge: the first moment": ("decode.py", "(first_here + aside * here)", "first_here", PARTS),
    "repair: values that are not finite": ("forward.py", "v = tl.where(bad, 0.0, v).to(S.DOT)", "v = v", POISON),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: make test-triton")
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_broken_kernel_fails(what: str, tmp_path: Path) -> None:
    name, old, new, test = MUTATIONS[what]
    shutil.copytree(SOURCE, tmp_path / "partita", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "partita" / KERNELS / name
    text = file.read_text()
    assert old in text, "the kernel has changed: say anew how to break it"
    file.write_text(text.replace(old, new) if old else text)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1", "PARTITA_BACKEND": "triton"}
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).parent / test)]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert done.returncode == (0 if what == "nothing" else 1), done.stdout[-2000:] + done.stderr[-2000:]
    assert "1 passed" in done.stdout or "1 failed" in done.stdout
