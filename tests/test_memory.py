"""Peak memory, measured in a process of its own: the score matrix is never held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import serving

MB = 1 << 20

# The high-water mark of resident memory, less what was resident just before the call, after a small warm-up that loads
# every library. VmHWM is reset by writing 5 to clear_refs, so that imports do not hide the peak.
SCRIPT = """
import gc, re, torch, partita
torch.set_num_threads(2)

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

def run(n, d, K):
    query, key, other, others = (torch.randn(m, d, requires_grad=True) for m in (n, K, n, K))
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    {body}
    return status("VmHWM") - before

with partita.backend("{backend}"):
    run(64, 64, 512)
    print(run(*{size}))
"""
STATISTICS = """
    gibbs = partita.Gibbs(query, key, scale=d ** -0.5{support})
    loss = gibbs.log_partition().sum() + gibbs.entropy().sum() + gibbs.expectation(others).square().sum()
    loss.backward()
    assert query.grad is not None and key.grad is not None and others.grad is not None
"""


def peak_bytes(body: str, n: int, n_key: int | None = None, backend: str = "tiled", support: str = "") -> int:
    code = SCRIPT.replace("{body}", body.strip()).replace("{support}", f", support={support}" if support else "")
    return run_for_bytes(code.replace("{size}", str((n, 64, n_key or n))).replace("{backend}", backend))


def run_for_bytes(code: str) -> int:
    # Two threads have two workspaces. They sleep where they wait: on a busy machine one that spins keeps the other out.
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **threads}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc, which only Linux has")


@linux
def test_forward_and_backward_stay_below_96_megabytes():
    """log_partition + entropy + expectation at n = m = 16384, d = 64, float32, with gradients; the matrix is 1 GB."""
    extra = peak_bytes(STATISTICS, 16384)
    assert extra < 96 * MB, f"{extra / MB:.1f} MB"


@linux
@pytest.mark.slow
def test_memory_grows_with_n_not_with_its_square():
    """Twice the length: the gradients and row sums double; a matrix would grow by 192 MB."""
    small, large = peak_bytes(STATISTICS, 4096), peak_bytes(STATISTICS, 8192)
    assert large - small < 32 * MB, f"{small / MB:.1f} MB, then {large / MB:.1f} MB"


@linux
def test_the_dense_backend_is_seen_to_hold_the_matrix():
    """The measurement works: what does build the matrix is caught by it."""
    assert peak_bytes(STATISTICS, 3001, backend="dense") > 3001 * 3001 * 4


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "support", ["partita.support.causal()", "partita.support.window(128, 0) | partita.support.not_self()"]
)
def test_supports_build_no_matrix_either(support):
    extra = peak_bytes(STATISTICS, 16384, support=support)
    assert extra < 96 * MB, f"{extra / MB:.1f} MB"


RECEIVED = """
    p = partita.Gibbs(query, key, scale=0.1, support=partita.support.causal())
    p.received().square().sum().backward()
    p.argmax()
    assert query.grad is not None and key.grad is not None
"""
DIVERGENCE = """
    p, q = partita.Gibbs(query, key, scale=0.1), partita.Gibbs(other, others, scale=0.1)
    partita.divergence(p, q, "js").sum().backward()
    assert query.grad is not None and others.grad is not None
"""
DISTILLED = """
    partita.linear_distillation_loss(query, key, other, others, kind="reverse").backward()
    assert query.grad is not None and others.grad is None
"""


@linux
@pytest.mark.parametrize("backend", ["tiled", "native"])
@pytest.mark.parametrize(
    ("body", "size"),
    [
        # the matrix would take 256 MB; the gradients of the operands take 4
        pytest.param(RECEIVED, (8192, 8192), id="received"),
        # both matrices would take 256 MB; the gradients take 8.5, a chunk of both score matrices 16
        pytest.param(DIVERGENCE, (1024, 32768), id="divergence"),
        pytest.param(DISTILLED, (1024, 32768), id="distillation"),
    ],
)
def test_margins_hold_nothing_of_the_size_of_the_matrix(body, size, backend):
    if backend == "native" and "native" not in serving.names():
        pytest.skip("the native library is not there")
    extra = peak_bytes(body, *size, backend=backend)
    assert extra < 64 * MB, f"{extra / MB:.1f} MB"
