"""Every kernel compiles for every device without one, and needs no more than what is committed.

The fast test compiles a fixed sample (`gpu_resources.sample`), the slow one everything. Compiling needs a process
without TRITON_INTERPRET, so it has one of its own; Triton keeps what it compiled, so a second run takes seconds.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_resources
from benchmarks.gpu_resources import DIMS, DTYPES, LEVELS, TABLE, cases, excess, fingerprint, fits, sample
from benchmarks.paper_device import DEVICES
from benchmarks.roofline import CHIPS, MARKED, PAGE, bound, bounds, with_roofline

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads(TABLE.read_text())
KERNELS = {record["name"]: record for record in COMMITTED["kernels"]}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def compiled_anew(which: str) -> list[dict]:
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PARTITA_BACKEND")}
    command = [sys.executable, "-m", "benchmarks.gpu_resources", which]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def same_triton() -> None:
    """Another version makes other code: the numbers are those of one."""
    from triton import __version__

    if __version__ != COMMITTED["triton"]:
        pytest.skip(f"the table was made with triton {COMMITTED['triton']}, this is {__version__}: make gpu-resources")


@needs_triton
def test_the_sample_compiles_within_the_budget() -> None:
    same_triton()
    found = compiled_anew("sample")
    assert len(found) >= len(list(sample()))
    assert [line for record in found for line in excess(record, KERNELS[record["name"]])] == []


@needs_triton
@pytest.mark.slow
def test_everything_compiles_within_the_budget() -> None:
    same_triton()
    found = compiled_anew("all")
    assert {record["name"] for record in found} == set(KERNELS)
    assert [line for record in found for line in excess(record, KERNELS[record["name"]])] == []


def test_the_table_covers_what_it_should() -> None:
    """Every device, kernel, dtype, dimension and level, and exactly the cases there are."""
    have = {(r["device"], r["kernel"], r["dtype"], r["dim"], r["level"]) for r in KERNELS.values() if not r["asks"]}
    kernels = ("forward", "backward_rows", "backward_keys")
    assert set(itertools.product(DEVICES, kernels, DTYPES, DIMS, LEVELS)) <= have
    cased = {case.name for case in cases()}
    assert {r["name"].removesuffix(f"-{r['kernel']}") for r in KERNELS.values()} == cased
    assert {case.name for case in sample()} <= cased


def test_the_table_is_of_this_code_and_these_tiles() -> None:
    """A changed kernel or tile is compiled again: `make gpu-resources` does what is missing."""
    assert COMMITTED["code"] == fingerprint(), "make gpu-resources"
    assert [name for name, record in KERNELS.items() if not fits(record)] == [], "make gpu-resources"


def test_no_committed_kernel_exceeds_its_device() -> None:
    """No spill up to D 128 on sm_80 and sm_90, shared memory that is there, products on tensor cores."""
    assert [line for record in KERNELS.values() for line in excess(record, record)] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spilled": 8}, "spills 8 bytes"),
        ({"shared_bytes": 200_000}, "more than the 166,912"),
        ({"tensor": ""}, "no tensor cores"),
        ({"registers": 256}, "registers: 256, committed"),
    ],
)
def test_what_exceeds_is_said(change, said) -> None:
    known = KERNELS["sm_80-forward-bfloat16-128-2-forward"]
    assert any(said in line for line in excess({**known, **change}, known))


def test_a_spill_is_no_better_for_being_committed() -> None:
    """On sm_80 and sm_90 up to 128 features, with whatever is asked; beyond that a committed one is the budget."""
    for name in ("sm_90-forward-float32-128-2-mask-forward", "sm_80-backward-float16-64-1-backward_keys"):
        spilling = {**KERNELS[name], "spilled": 8}
        assert excess(spilling, spilling)
    larger = {**KERNELS["sm_80-forward-bfloat16-256-2-forward"], "spilled": 8}
    assert not excess(larger, larger)


def test_code_is_told_from_comments(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_resources, "KERNELS", tmp_path)
    kernel = tmp_path / "kernel.py"
    found = []
    for text in ('"""Says."""\ndef f(x):\n    return x + 1\n', "# more\ndef f(x):\n    return x + 1\n", "f = 2\n"):
        kernel.write_text(text)
        found.append(fingerprint())
    assert found[0] == found[1] != found[2]


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    assert MARKED.search(page)
    assert page == with_roofline(page, COMMITTED["kernels"]), "make gpu-resources"


def test_a_roofline_by_hand() -> None:
    """128 x 64 scores of 64 features: 4 * 128 * 64 * 64 operations, 1024 multiply-adds a clock."""
    counts = {"tensor": 1, "exponentials": 32, "floats": 64, "all": 128}
    record = {
        "kernel": "forward",
        "rows": 128,
        "keys": 64,
        "warps": 8,
        "dim": 64,
        "itemsize": 2,
        "level": 0,
        "loop": counts,
    }
    found = bound(record, CHIPS[0])
    assert found.clocks["matrix"] == 1024
    assert found.clocks["exp"] == 32 * 256 / 16
    assert found.clocks["float"] == 64 * 256 / 64
    assert found.clocks["issue"] == 128 * 256 / 128
    assert found.uncached == pytest.approx(16384 / (2.039e12 / 108 / 1.41e9))  # keys and values of 8 KiB each
    assert found.bounding == "matrix" and found.side_by_side == 1.0
    assert found.one_by_one == 1024 / (1024 + 512)  # exponentials take the longest of the rest


def test_every_chip_has_a_roofline() -> None:
    found = bounds(KERNELS.values())
    for chip in CHIPS:
        assert {(b.kernel, b.dim, b.level) for b in found if b.chip == chip.name} >= {("forward", d, 2) for d in DIMS}
