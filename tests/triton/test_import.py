"""Nothing imports Triton until a kernel runs, and who is served says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import partita
from partita.engine.backends import TABLE, choose
from tests.triton.cases import INTERPRETED, needs_triton


def run(code: str, **env: str) -> str:
    """What a fresh process prints."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PARTITA_BACKEND")}
    done = subprocess.run([sys.executable, "-c", code], env={**kept, **env}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


USE = """
import sys, torch, partita
q = torch.randn(1, 2, 5, 4, requires_grad=True)
partita.attention(q, q, q, return_stats=True)[0].sum().backward()
partita.explain(partita.Gibbs(q, q))
print('triton' in sys.modules, partita.explain(partita.Gibbs(q, q)).splitlines()[0])
"""


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_importing_and_using_partita_on_a_cpu_does_not_import_triton(interpret: str) -> None:
    loaded, _, serving = run(USE, TRITON_INTERPRET=interpret).partition(" ")
    assert loaded == "False"
    assert "triton" not in serving  # auto on a CPU never takes the interpreter


def test_a_cpu_tensor_is_refused_with_the_reason_where_the_interpreter_is_off() -> None:
    code = """
import torch, partita
p = partita.Gibbs(torch.zeros(1, 2), torch.zeros(3, 2))
with partita.backend("triton"):
    try: p.entropy()
    except partita.errors.BackendError as error: print(error)
print([line for line in partita.explain(p).splitlines() if line.startswith("triton")])
"""
    said = run(code)
    assert said.count("TRITON_INTERPRET=1") == 2


@needs_triton
def test_explain_says_that_the_interpreter_must_be_named() -> None:
    if not INTERPRETED:
        pytest.skip("the interpreter is off")
    p = partita.Gibbs(torch.zeros(1, 2), torch.zeros(3, 2))
    with partita.backend("auto"):
        assert "only if it is named" in partita.explain(p)
        assert choose(p.request()).name != "triton"
    with partita.backend("triton"):
        assert partita.explain(p).startswith("triton serves (chosen)")


@needs_triton
def test_what_is_too_wide_for_a_tile_is_refused_before_anything_runs() -> None:
    wide = partita.Gibbs(torch.zeros(1, 257), torch.zeros(3, 257))
    assert "256" in str(TABLE["triton"].why_not(wide.request()))
    with partita.backend("triton"), pytest.raises(partita.errors.BackendError, match="up to 256 features"):
        wide.entropy()
