"""QK-clip on real models: the right rows, by the exact factor, and nothing else."""

from __future__ import annotations

import copy
import importlib.util
import warnings

import pytest
import torch
from torch import nn

import partita
from partita.control import QKClip, qk_clip_callback
from partita.errors import ValueRangeError
from tests.control.models import ADDED, ALL, PER_HEAD, TOGETHER, make, transformers


def peaks(model, batch, threshold=None):
    """Largest scores of one forward, and the clip that read them."""
    clip = QKClip(model, threshold)
    model(**batch)
    return clip


def clipped(name, dtype, implementation=None):
    """Scores of the first layer before and after, the factors said, and the weights before and after."""
    model, batch = make(name, dtype, implementation)
    first = peaks(model, batch)
    before = first.max_scores[0].clone()
    first.detach()
    tau = float(before.sort().values[-2:].mean())  # one head is above
    untouched = {n: p.clone() for n, p in model.named_parameters()}
    clip = peaks(model, batch, tau)
    layer = next(iter(clip.max_scores))
    factor = clip.step()[0]
    model(**batch)
    after = clip.max_scores[0]
    clip.detach()
    assert not clip.unclipped
    return before, after, factor, tau, untouched, model, layer


# Weights, projections and scores are each rounded once more than before; two models turn by positions in float32, where
# the two parts of a query and of a key are rounded to 2^-24 each. In bfloat16 a weight is rounded to 2^-9 of itself, a
# query and a key again, and a score is a sum over such products: at worst all four roundings point the same way.
EXACT, SINGLE, HALF = 1e-11, 4 * 2**-24, 4 * 2**-8
RUNS = [
    *((name, torch.float64, None, SINGLE if name in ("modernbert", "deepseek-v2") else EXACT) for name in PER_HEAD),
    *((name, torch.float64, "eager", EXACT)
      for name in ("bert", "gpt2", "llama", "deepseek-v3", "falcon-grouped", "neox")),
    *((name, torch.float64, "partita", EXACT) for name in ("llama", "gpt2")),
    *((name, torch.bfloat16, None, HALF) for name in ("torch", "gpt2", "llama", "deepseek-v3")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "implementation", "rtol"), RUNS, ids=str)
def test_scores_shrink_by_the_exact_factor_and_other_heads_keep_their_bits(name, dtype, implementation, rtol):
    """Scores of torch's kernel, of eager code and of partita's own attention."""
    partita.hf.register()
    before, after, factor, tau, *_ = clipped(name, dtype, implementation)
    torch.testing.assert_close(after, (factor * before).to(after), rtol=rtol, atol=0)
    kept = factor == 1
    assert torch.equal(after[kept], before[kept])
    if implementation is None and dtype == torch.float64:
        torch.testing.assert_close(after.max(), torch.tensor(tau, dtype=torch.float64), rtol=rtol, atol=0)
        assert kept.sum() == 3


@pytest.mark.parametrize("name", TOGETHER)
def test_one_gain_for_all_heads_brings_all_down_together(name):
    before, after, factor, _tau, untouched, model, layer = clipped(name, torch.float64)
    assert factor.unique().numel() == 1 and factor[0] < 1
    torch.testing.assert_close(after, factor * before, rtol=1e-7, atol=0)  # norms of transformers compute in float32
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, untouched[n]) and n.startswith(layer)}
    assert changed and all("norm" in n for n in changed)


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_or_bounds_stays_and_the_product_shrinks(name):
    before, after, factor, _, _, _, _ = clipped(name, torch.float64, "eager")
    hit = factor < 1
    assert hit.sum() == 1 and (after[hit] < before[hit]).all()
    assert torch.equal(after[~hit], before[~hit])


@pytest.mark.parametrize("name", ["gpt2", "llama", "deepseek-v3", "falcon-grouped"])
def test_only_rows_of_the_clipped_heads_change(name):
    _, _, _factor, _, untouched, model, layer = clipped(name, torch.float64)
    head_share = {"gpt2": 2 / 12, "llama": 1 / 4, "deepseek-v3": 1 / 4, "falcon-grouped": 1 / 8}[name]
    for n, p in model.named_parameters():
        if not n.startswith(layer):
            continue
        moved = (p != untouched[n]).float().mean()
        assert moved <= head_share + 1e-9, n
    touched = {n.removeprefix(layer + ".") for n, p in model.named_parameters()
               if n.startswith(layer) and not torch.equal(p, untouched[n])}  # fmt: skip
    expected = {
        "gpt2": {"c_attn.weight", "c_attn.bias"},
        "llama": {"q_proj.weight"},  # the other head of the group keeps its keys
        "deepseek-v3": {"q_b_proj.weight", "kv_b_proj.weight"},
        "falcon-grouped": {"query_key_value.weight"},
    }
    assert touched == expected[name]


def test_where_every_head_of_a_group_is_clipped_its_keys_shrink_too():
    model, batch = make("llama")
    first = peaks(model, batch)
    tau = float(first.max_scores[0].min()) / 2
    first.detach()
    key = model.model.layers[0].self_attn.k_proj.weight.clone()
    clip = peaks(model, batch, tau)
    before, factor = clip.max_scores[0], clip.step()[0]
    model(**batch)
    torch.testing.assert_close(clip.max_scores[0], factor * before, rtol=1e-11, atol=0)
    smaller = model.model.layers[0].self_attn.k_proj.weight.norm() / key.norm()
    assert factor.min().sqrt() <= smaller <= factor.max().sqrt()
    clip.detach()


@pytest.mark.parametrize("name", ["torch", "gpt2", "llama"])
def test_only_reading_changes_no_weight(name):
    model, batch = make(name, torch.float32)
    weights = copy.deepcopy(model.state_dict())
    clip = peaks(model, batch, None)
    assert all((f == 1).all() for f in clip.step().values())
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert max(float(p.max()) for p in clip.max_scores.values()) > 1
    clip.detach()


def test_the_scores_read_are_those_of_the_model():
    """Against scores made in plain torch from the layer's own projections."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    parts = nn.functional.linear(x, layer.in_proj_weight).chunk(3, -1)
    q, k, _ = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in parts)
    clip = QKClip(layer, None)
    layer(x, x, x, need_weights=False)
    torch.testing.assert_close(clip.max_scores[0], (q @ k.mT / 2).amax((0, 2, 3)))
    layer(x, x, x, need_weights=True)  # torch writes the weights out
    torch.testing.assert_close(clip.max_scores[0], (q @ k.mT / 2).amax((0, 2, 3)))
    clip.detach()


def test_whatever_is_asked_of_partitas_attention_comes_back():
    class Layer(nn.Module):
        def forward(self, x, **options):
            return partita.attention(x, x, x, **options)

    layer, x = Layer(), torch.randn(2, 3, 5, 4)
    for options in ({}, {"return_stats": True}):
        plain = layer(x, **options)
        clip = QKClip(layer, None)
        torch.testing.assert_close(layer(x, **options), plain)
        assert clip.max_scores[0].shape == (3,)
        clip.detach()


def test_there_is_one_pass_and_its_gradients_are_the_models():
    model, batch = make("llama", torch.float64)
    model(**batch).logits.square().mean().backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    calls = []
    real = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = lambda *a, **k: calls.append(1) or real(*a, **k)
    try:
        clip = peaks(model, batch)
        assert len(calls) == 2  # transformers calls it once per layer, and not again
        model(**batch).logits.square().mean().backward()
    finally:
        nn.functional.scaled_dot_product_attention = real
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[n], rtol=1e-9, atol=1e-12)
    clip.detach()


def test_all_forwards_of_a_step_count_and_evaluation_does_not():
    model, batch = make("torch", torch.float32)
    clip = QKClip(model, None)
    tops = []
    for scale in (1.0, 3.0, 2.0):
        with torch.no_grad():
            model.embedding.weight.mul_(scale)
        model(**batch)
        tops.append(clip.max_scores[0].clone())
        with torch.no_grad():
            model.embedding.weight.div_(scale)
    assert (tops[1] > tops[0]).all() and torch.equal(tops[2], tops[1])
    clip.step()
    assert torch.equal(clip.max_scores[0], tops[1])
    model.eval()
    model(**batch)
    assert torch.equal(clip.max_scores[0], tops[1])
    clip.detach()


def test_checkpointed_layers_are_served_alike_both_times():
    model, batch = make("llama", torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    clip = QKClip(model, 1.0)
    model(**batch).logits.square().mean().backward()
    assert len(clip.max_scores) == 2
    clip.detach()


def test_after_an_optimizer_the_clip_takes_its_step():
    model, batch = make("gpt2", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = QKClip(model, 0.5)
    handle = clip.after(optimizer)
    for _ in range(2):
        model(**batch).logits.sum().backward()
        optimizer.step()
    assert max(float(p.max()) for p in clip.max_scores.values()) < 0.5 * 1.001
    handle.remove()
    clip.detach()


def test_detached_the_model_has_its_own_kernel_and_torch_its_own_functions():
    model, batch = make("gpt2", torch.float32)
    module_call, sdpa = nn.Module.__call__, nn.functional.scaled_dot_product_attention
    plain = model(**batch).logits
    clip = peaks(model, batch)
    clip.detach()
    assert nn.Module.__call__ is module_call and nn.functional.scaled_dot_product_attention is sdpa
    assert torch.equal(model(**batch).logits, plain)
    forgotten = QKClip(model, None)
    del forgotten  # its step is not called
    assert nn.Module.__call__ is module_call


def test_what_cannot_be_told_is_said_and_left_alone():
    class Scaled(nn.Module):
        """Each query is divided by its own largest feature: no weight can be found by its length."""

        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            q, k = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj))
            q = q * q.abs().amax(-1, keepdim=True)
            return nn.functional.scaled_dot_product_attention(q, k, k)

    layer = Scaled()
    before = copy.deepcopy(layer.state_dict())
    clip = QKClip(layer, 1e-3)
    layer(torch.randn(2, 9, 16))
    with pytest.warns(UserWarning, match="was not clipped: queries: no rows of a linear map"):
        factor = clip.step()
    assert (factor[0] == 1).all() and "Scaled" in clip.unclipped
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        layer(torch.randn(2, 9, 16))
        clip.step()
    clip.detach()


class Normed(nn.Module):
    """As timm's attention has it: a norm of queries and keys, or an Identity in its place."""

    def __init__(self, norm):
        super().__init__()
        self.qkv, self.q_norm, self.k_norm = nn.Linear(16, 48), norm(), norm()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)


def test_a_norm_without_a_gain_leaves_nothing_to_clip_and_no_norm_leaves_all():
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    bounded = Normed(lambda: nn.RMSNorm(8, elementwise_affine=False))
    clip = QKClip(bounded, 0.1)
    bounded(x)
    with pytest.warns(UserWarning, match="QK-norm without a gain: its scores cannot grow, and there is nothing to"):
        assert (clip.step()[0] == 1).all()
    clip.detach()
    plain = Normed(nn.Identity).double()
    clip = QKClip(plain, 0.1)
    plain(x.double())
    before, factor = clip.max_scores[0], clip.step()[0]
    plain(x.double())
    torch.testing.assert_close(clip.max_scores[0], factor * before, rtol=1e-11, atol=0)
    assert (factor < 1).all() and not clip.unclipped
    clip.detach()


def test_scores_that_are_not_finite_shrink_nothing():
    model, batch = make("torch", torch.float32)
    with torch.no_grad():
        model.embedding.weight[batch["input_ids"][0, 0]] = torch.inf
    clip = peaks(model, batch, 1.0)
    clip.step()
    assert all(p.isfinite().all() for p in model.layers.parameters())
    clip.detach()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, when it loads its compiler
def test_bad_arguments_are_refused_at_once():
    with pytest.raises(TypeError, match=r"torch.nn.Module; got int"):
        QKClip(3)
    with pytest.raises(ValueRangeError, match=r"threshold must be .* positive"):
        QKClip(nn.Linear(2, 2), -1.0)
    with pytest.raises(ValueRangeError, match=r"torch.compile"):
        QKClip(torch.compile(nn.Linear(2, 2)), 1.0)
    clip = QKClip(nn.Linear(2, 2), 1.0)
    with pytest.warns(UserWarning, match="saw no attention"):
        clip.step()
    clip.detach()


@pytest.mark.parametrize("name", ALL)
def test_every_model_is_understood(name):
    model, batch = make(name, torch.float32, "eager" if name in ADDED else None)
    clip = peaks(model, batch)
    assert clip.max_scores and not clip.unclipped, clip.unclipped
    clip.detach()


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate")
def test_the_trainer_clips_after_each_optimizer_step(tmp_path):
    model, batch = make("gpt2", torch.float32)
    rows = [{"input_ids": ids, "labels": ids} for ids in batch["input_ids"].repeat(4, 1)]
    callback = qk_clip_callback(0.5)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-9, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no", use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    tops = [row["qk_max_score"] for row in trainer.state.log_history if "loss" in row]
    assert len(tops) == 3 and tops[0] > 1 and tops[-1] < 0.5 * 1.01
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"
