"""Peak memory of losses, in processes of their own: no matrix of scores, of labels or of exclusions is ever held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MB = 1 << 20
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc, which only Linux has")

SCRIPT = """
import gc, re, torch, partita
from partita.contrastive import *
from partita.losses import *
torch.set_num_threads(2)

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

def run(n, d):
    a, b = (torch.randn(n, d, requires_grad=True) for _ in range(2))
    labels = torch.arange(n) // 2
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    ({call}).backward()
    assert a.grad is not None and b.grad is not None
    return status("VmHWM") - before

run(256, {d})
print(run({n}, {d}))
"""


def peak_bytes(call: str, n: int, d: int, timeout_s: float = 1200, **environment: str) -> int:
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}  # a busy machine has no core for one that spins
    code = SCRIPT.replace("{n}", str(n)).replace("{d}", str(d)).replace("{call}", call)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **threads, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "info_nce_loss(a, b, exclude=AbovePositive(0.1))",
        "linear_cross_entropy(a, b, torch.arange(n), softcap=5.0, label_smoothing=0.1)",
        "info_nce_loss(a, b, symmetric=True)",
        "info_nce_loss(a, b, labels=labels)",
        "siglip_loss(a, b, 1.0)",
    ],
)
def test_no_matrix_is_held(call):
    """n = 4096: less than the matrix alone, 64 MB; a dense loss holds it several times."""
    # Blocks of a few MB go back to the system when they are freed: what is held is measured, not what malloc keeps.
    extra = peak_bytes(call, 4096, 16, MALLOC_MMAP_THRESHOLD_="1000000")
    assert extra < 60 * MB, f"{extra / MB:.0f} MB"


@pytest.mark.slow
def test_symmetric_info_nce_of_32768_pairs_stays_below_a_gigabyte():
    """d = 256, forward and backward, gradients included; the dense form needs over 12 GB."""
    extra = peak_bytes("info_nce_loss(a, b, symmetric=True)", 32768, 256, timeout_s=3600)
    assert extra < 1024 * MB, f"{extra / MB:.0f} MB"
