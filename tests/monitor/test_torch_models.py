"""Plain torch: MultiheadAttention, the TransformerEncoder stack, bare SDPA, autocast, inference mode, DDP."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import assert_equal, expected
from torch import Tensor, nn

import partita
from partita.monitor import COLUMNS, watch


class Bare(nn.Module):
    """Calls F.scaled_dot_product_attention itself, imported as a name."""

    def __init__(self, dim: int = 16, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        return tuple(t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))  # type: ignore[return-value]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        return (
            F.scaled_dot_product_attention(3 * q, k, v, attn_mask=mask, is_causal=self.causal)
            .transpose(1, 2)
            .flatten(2)
        )

    def scores(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, _ = self.split(x)
        s = 3 * q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        if mask is not None:
            s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
        return s.detach()


def bare(**options: Any) -> tuple[Bare, Tensor]:
    torch.manual_seed(0)
    return Bare(**options), torch.randn(3, 13, 16)


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    made = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True), 2)
    with torch.no_grad():
        for layer in made.layers:
            layer.self_attn.in_proj_weight.normal_(0, 0.6)
    return made


def weights_of(model: nn.TransformerEncoder, x: Tensor, pad: Tensor | None) -> list[Tensor]:
    """Scores of each layer, from the projections themselves."""
    scores = []
    for layer in model.layers:
        attention = layer.self_attn
        q, k, _ = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        q, k = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k))
        s = q @ k.mT / math.sqrt(4)
        scores.append(s if pad is None else s.masked_fill(pad[:, None, None, :], -math.inf))
        x = layer(x, src_key_padding_mask=pad)
    return scores


@pytest.mark.parametrize("mode", ["train", "eval", "eval no_grad"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_encoder(mode: str, padded: bool) -> None:
    model, x = encoder(), torch.randn(3, 9, 16)
    model.train(mode == "train")
    pad = None
    if padded:
        pad = torch.zeros(3, 9, dtype=torch.bool)
        pad[1, 6:] = True
    with torch.no_grad():
        want = [expected(s, None if pad is None else ~pad) for s in weights_of(model, x, pad)]
    with torch.set_grad_enabled(mode != "eval no_grad"):
        plain = model(x, src_key_padding_mask=pad)
        with watch(model) as w:
            out = model(x, src_key_padding_mask=pad)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
    frame = w.frame(pandas=False)
    for layer, values in enumerate(want):
        assert_equal(frame, layer, values)
    assert all("forward" not in m.__dict__ for m in model.modules())


LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 3, 70, 8),
    "heads inside": lambda: torch.randn(2, 70, 3, 8).transpose(1, 2),
    "one projection": lambda: torch.randn(2, 70, 72).chunk(3, -1)[1].unflatten(-1, (3, 8)).transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_one_pass_for_output_and_statistics(layout: str, causal: bool) -> None:
    """kernel="partita" makes the attention's own pass; nothing but rounding may change. The default changes nothing."""
    torch.manual_seed(0)
    query, key, value = (LAYOUTS[layout]().requires_grad_() for _ in range(3))

    class Attention(nn.Module):
        def forward(self, *parts: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*parts, is_causal=causal)

    model, upstream = Attention(), torch.randn(2, 3, 70, 8)
    plain = model(query, key, value)
    want = torch.autograd.grad(plain, (query, key, value), upstream)
    with watch(model, kernel="partita") as w:
        out = model(query, key, value)
    assert out.grad_fn is not None and "ScaledDotProduct" not in type(out.grad_fn).__name__
    assert out.stride() == plain.stride()
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=2e-6)
    for got, right in zip(torch.autograd.grad(out, (query, key, value), upstream), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=5e-6)
    with watch(model) as beside:
        assert torch.equal(model(query, key, value), plain)
    for a, b in zip(w.frame(pandas=False), beside.frame(pandas=False), strict=True):
        assert all(a[c] == pytest.approx(b[c], rel=1e-4, abs=1e-5, nan_ok=True) for c in COLUMNS)


def test_hooks_of_others_survive() -> None:
    model, x = bare()
    calls: list[str] = []
    handle = model.qkv.register_forward_hook(lambda *_: calls.append("theirs"))
    with watch(model):
        model(x).square().sum().backward()
    model(x)
    assert calls == ["theirs", "theirs"] and len(model.qkv._forward_hooks) == 1
    handle.remove()


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_rows_are_sampled(rows: int) -> None:
    model, x = bare(causal=True)
    with watch(model, rows=rows) as w:
        for _ in range(8):
            model(x)
    seen = [r["rows"] + r["single"] for r in w.frame(pandas=False)]
    assert set(seen) == {min(rows, 13) * 3}
    if rows == 4:  # the rows move with the step, so the mean over steps is near the mean over all rows
        full = expected(model.scores(x))["visible"][0].item()
        mean = sum(r["visible"] * r["rows"] for r in w.frame(pandas=False)) / sum(
            r["rows"] for r in w.frame(pandas=False)
        )
        assert abs(mean - full) < 1.0


def test_every_and_layers() -> None:
    model, x = encoder(), torch.randn(2, 5, 16)
    with watch(model, every=3, layers=[1]) as w:
        for _ in range(7):
            model(x)
    frame = w.frame(pandas=False)
    assert sorted({r["step"] for r in frame}) == [0, 3, 6] and {r["layer"] for r in frame} == {1}
    with watch(model, layers="layers.0") as w:
        model(x)
    assert {r["name"] for r in w.frame(pandas=False)} == {"layers.0.self_attn"}


def test_a_handle_without_a_with_block() -> None:
    model, x = bare()
    w = watch(model)
    model(x)
    w.detach()
    w.detach()
    model(x)
    assert len(w.frame(pandas=False)) == 4 and "forward" not in model.__dict__
    with w:
        model(x)
    assert sorted({r["step"] for r in w.frame(pandas=False)}) == [0, 1] and "forward" not in model.__dict__


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("how", ["autocast", "inference_mode", "bfloat16", "float64"])
def test_precisions_and_modes(how: str) -> None:
    model, x = bare()
    if how in ("bfloat16", "float64"):
        model, x = model.to(getattr(torch, how)), x.to(getattr(torch, how))
    # some virtual machines announce AMX and die on its first instruction: bfloat16 products without oneDNN here
    with torch.backends.mkldnn.flags(enabled=False), watch(model) as w:
        if how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            assert out.dtype == torch.bfloat16
        elif how == "inference_mode":
            with torch.inference_mode():
                model(x)
            model(x)
        else:
            model(x)
    rows = w.frame(pandas=False)
    assert not w.coverage.get("errors"), str(w.coverage)
    assert len(rows) == (8 if how == "inference_mode" else 4)
    entropy = expected(model.float().scores(x.float()))["entropy"]
    got = torch.tensor([r["entropy"] for r in rows[:4]], dtype=torch.float64)
    assert (got - entropy).abs().max() < (0.05 if how in ("autocast", "bfloat16") else 1e-4)


def test_nan_is_counted_and_kept_out_of_the_means() -> None:
    model, x = bare()
    good = x.clone()
    x[1, 4] = math.nan
    with watch(model) as w:
        model(good[[0, 2]])
        model(x)
    rows = w.frame(pandas=False)
    clean, sick = rows[0], rows[4]
    assert clean["nonfinite"] == 0 and sick["nonfinite"] == 13  # every query of that sequence sees the NaN key
    assert abs(clean["entropy"] - sick["entropy"]) < 1e-5


def test_a_call_over_a_group_is_left_alone(tmp_path):
    """A rank sees its own keys only: numbers made of them would be wrong, and other ranks may not be watched."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:

        class Model(torch.nn.Module):
            def forward(self, x):
                return partita.attention(x, x, x, group=dist.group.WORLD)

        x, model = torch.randn(2, 5, 4), Model()
        alone = partita.attention(x, x, x)
        with partita.watch(model) as watched:
            torch.testing.assert_close(model(x), alone)
            partita.info_nce_loss(x[0], x[1], group=dist.group.WORLD)
        assert len(watched.frame()) == 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["own", "number", "policy", "scores"])
def test_the_present_scale_is_that_of_the_call(kind: str) -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            if kind == "scores":
                return torch.softmax(0.3 * q @ q.mT, -1) @ q
            if kind == "policy":
                out = partita.attention(q, q, q, is_causal=True, scale=partita.scale.LogLength(reference=4, floor=2))
                assert isinstance(out, Tensor)
                return out
            return F.scaled_dot_product_attention(q, q, q, scale=0.3 if kind == "number" else None)

    with partita.watch(model := Attention()) as w:
        model(torch.randn(1, 2, 8, 16))
    shown = w.record.curves[0]["scale"]
    rows = torch.arange(1, 9).clamp(min=2).double().log() / math.log(4) / 4  # log(visible) / log(reference) / sqrt(dim)
    right = {"own": 0.25, "number": 0.3, "policy": float(rows.mean()), "scores": None}[kind]
    assert shown is None if right is None else shown == pytest.approx(right, rel=1e-5)
