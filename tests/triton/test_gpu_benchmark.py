"""`make bench-gpu` runs as it is: the interpreter, or any backend, stands in for the device, and stubs for peers."""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import partita
from benchmarks import gpu, gpu_peers
from partita.engine.backends.triton.launch import interpreted

# On a device it is compiled.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
STAND_IN = "triton" if interpreted() else "tiled"


@pytest.fixture
def device(monkeypatch):
    """What the benchmark calls of torch.cuda, for a machine that has none; memory that a call is said to take."""
    for name, result in {
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 100,
        "max_memory_allocated": 350,
        "get_device_name": "a stand-in for an NVIDIA A100",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, result=result: result)


def _flash(q, k, v, *, causal):
    assert q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]  # (batch, n, heads, dim)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


class _Engine:
    def __init__(self, *, num_attention_heads, kv_channels, num_gqa_groups, qkv_format, attn_mask_type):
        assert qkv_format == "bshd"
        self.causal = attn_mask_type == "causal"

    def __call__(self, q, k, v):
        return _flash(q, k, v, causal=self.causal).flatten(2)


class _Liger:
    def __call__(self, weight, x, y):
        return F.cross_entropy(F.linear(x, weight).float(), y)


@pytest.fixture
def peers(monkeypatch):
    """Modules with the signatures of the real ones."""
    names = {
        "flash_attn": {"flash_attn_func": _flash},
        "flash_attn_interface": {"flash_attn_func": lambda q, k, v, *, causal: (_flash(q, k, v, causal=causal), None)},
        "transformer_engine": {},
        "transformer_engine.pytorch": {"DotProductAttention": _Engine},
        "liger_kernel": {},
        "liger_kernel.transformers": {"LigerFusedLinearCrossEntropyLoss": _Liger},
        "cut_cross_entropy": {"linear_cross_entropy": lambda e, c, y: F.cross_entropy(F.linear(e, c).float(), y)},
    }
    for name, members in names.items():
        module = ModuleType(name)
        for key, value in members.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)


def test_every_line_of_the_benchmark_runs(device, peers, tmp_path, capsys) -> None:
    out = tmp_path / "gpu.jsonl"
    rows = gpu.main(
        ["--device", "cpu", "--quick", "--repeat", "1", "--seconds", "0", "--backend", STAND_IN, "--json", str(out)]
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == len(rows)
    assert all(line["environment"]["gpu"].endswith("A100") for line in lines)
    assert len({row.case for row in rows}) == 4 + 1 + 1 + 1
    ran = {row.who for row in rows if row.best_s > 0}
    wanted = {"partita", "partita with statistics", "SDPA math", "flex attention with log Z", "flash-attn"}
    assert ran >= wanted | {"flash-attn 3", "Transformer Engine", "torch dense", "Liger", "CCE"}
    assert not [row for row in rows if row.who.startswith("partita") and row.best_s < 0]
    for row in rows:
        if row.best_s > 0:
            assert row.peak_bytes == 250 and row.of_sheet == pytest.approx(row.operations / row.best_s / 312e12)
        else:
            assert row.note and math.isnan(row.of_product)
    printed = capsys.readouterr().out
    assert "of the sheet" in printed and "cannot: " in printed  # SDPA has no cuDNN kernel on the CPU


def test_the_peers_compute_what_we_compute(peers) -> None:
    """Or the ratios compare nothing."""
    q, k = torch.randn(2, 4, 12, 16), torch.randn(2, 2, 12, 16)
    v = torch.randn(2, 2, 12, 16)
    for causal in (False, True):
        want = partita.attention(q, k, v, is_causal=causal, enable_gqa=True)
        for who, function in gpu_peers.attention(q, k, causal).items():
            if who not in ("SDPA cuDNN", "SDPA efficient"):  # no kernel on the CPU
                # sums of 16 and of 12 terms of size a few, rounded in another order
                torch.testing.assert_close(function(q, k, v), want, atol=1e-5, rtol=1e-5, msg=who)
    x, w, y = torch.randn(7, 16), torch.randn(9, 16), torch.randint(9, (7,))
    want = partita.linear_cross_entropy(x, w, y)
    for who, loss in gpu_peers.cross_entropy().items():
        torch.testing.assert_close(loss(x, w, y), want, atol=1e-5, rtol=1e-5, msg=who)
    pair = x, w[:7], 2.0
    torch.testing.assert_close(gpu_peers.contrast(*pair), partita.clip_loss(*pair), atol=1e-5, rtol=1e-5)


def test_only_what_is_asked_for_runs(device) -> None:
    quick = ["--device", "cpu", "--quick", "--repeat", "1", "--seconds", "0", "--backend", STAND_IN]
    rows = gpu.main([*quick, "--only", "contrast"])
    assert {row.who for row in rows} == {"partita", "torch dense"}


def test_a_broken_peer_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", ModuleType("cut_cross_entropy"))
    assert "CCE" not in gpu_peers.cross_entropy()
    assert "CCE is installed and cannot be used" in capsys.readouterr().out
