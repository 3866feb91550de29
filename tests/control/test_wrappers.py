"""Layers whose weights are not their own to shrink: named with the reason, and left as they are to the last bit."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import partita
from partita.control import QKClip
from partita.errors import ValueRangeError
from tests.control.models import make

peft = pytest.importorskip("peft", reason="pip install peft to test wrapped layers")


class Layer(nn.Module):
    """Four heads of attention from separate projections."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Packed(nn.Module):
    def __init__(self, kind=nn.MultiheadAttention):
        super().__init__()
        self.attention = kind(32, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Normed(Layer):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def forward(self, x):
        q, k = (p(x).unflatten(-1, (4, 8)) for p in (self.q_proj, self.k_proj))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, k, k)


BUILD = {
    "separate": Layer,
    "packed": Packed,
    "partita": lambda: Packed(partita.nn.MultiheadAttention),
    "normed": Normed,
}
PLACES = {
    "separate": [("q_proj", "weight"), ("k_proj", "weight"), ("k_proj", "bias")],
    "packed": [("attention", "in_proj_weight"), ("attention", "in_proj_bias")],
    "partita": [("attention", "in_proj_weight"), ("attention", "in_proj_bias")],
    "normed": [("q_norm", "weight"), ("k_norm", "weight")],
}


class Twice(nn.Module):
    """A parametrisation that counts how often it is asked, as one with a state of its own would notice."""

    def __init__(self):
        super().__init__()
        self.register_buffer("asked", torch.zeros(()))

    def forward(self, weight):
        self.asked += 1
        return 2 * weight


class Quantised(torch.Tensor):
    pass


def fake_quantised(module, name):
    """As libraries of quantised layers have it: a class of tensor under a Parameter."""
    setattr(module, name, nn.Parameter(getattr(module, name).detach().as_subclass(Quantised)))


def from_outside(module, name):
    """A weight that another network made."""
    made = getattr(module, name).detach().clone()
    del module._parameters[name]
    setattr(module, name, made)


def old(function):
    def wrap(module, name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            function(module, name)

    return wrap


WRAPS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "one of one's own": lambda module, name: parametrize.register_parametrization(module, name, Twice()),
    "weight_norm of old": old(nn.utils.weight_norm),
    "spectral_norm of old": nn.utils.spectral_norm,
    "pruned": lambda module, name: prune.l1_unstructured(module, name, amount=0.1),
    "frozen": lambda module, name: getattr(module, name).requires_grad_(False),
    "quantised": fake_quantised,
    "from outside": from_outside,
}
MATRICES = ("orthogonal", "spectral_norm of old")  # need a matrix
CASES = [
    (kind, module, name, wrap)
    for kind, places in PLACES.items()
    for module, name in places
    for wrap in WRAPS
    if not (wrap in MATRICES and ("bias" in name or kind == "normed"))
]


def bits(model):
    plain = {name: t.detach().as_subclass(torch.Tensor) for name, t in model.state_dict(keep_vars=True).items()}
    return {name: t.clone() for name, t in plain.items()}


def steps(make_one):
    """Why layers were left alone. Two models of one seed after forwards in training, one without a clip, and one under
    a threshold that everything passes, are the same."""
    (twin, batch), (model, _) = make_one(), make_one()
    clip = QKClip(model, 1e-6)
    for _ in range(2):
        twin(**batch), model(**batch)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            factors = clip.step()
        assert all((factor == 1).all() for factor in factors.values())
    clip.detach()
    expected, found = bits(twin), bits(model)
    assert found.keys() == expected.keys()
    changed = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not changed, changed
    assert clip.unclipped.keys() == clip.max_scores.keys()
    assert not heard  # once is enough
    return set(clip.unclipped.values())


def layer(kind):
    torch.manual_seed(0)
    model = BUILD[kind]().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, {"x": torch.randn(2, 9, 32)}


@pytest.mark.parametrize("kind", BUILD)
def test_unwrapped_they_are_clipped(kind):
    model, batch = layer(kind)
    clip = QKClip(model, 1e-2)
    model(**batch)
    before, factor = clip.max_scores[0].clone(), clip.step()[0]
    model(**batch)
    assert (factor < 1).any() and not clip.unclipped
    torch.testing.assert_close(clip.max_scores[0], factor * before, rtol=1e-4, atol=1e-6)
    clip.detach()


@pytest.mark.parametrize(("kind", "module", "name", "wrap"), CASES)
def test_a_weight_that_is_not_the_layers_own_is_left_alone(kind, module, name, wrap):
    def make_one():
        model, batch = layer(kind)
        WRAPS[wrap](model.get_submodule(module), name)
        return model, batch

    (why,) = steps(make_one)
    if wrap in ("frozen", "quantised"):
        assert {"frozen": "is frozen", "quantised": "is stored as a Quantised"}[wrap] in why
    else:
        assert "no parameter of its own" in why
    assert name in why


def test_quantised_layers_of_torch_are_left_alone():
    model, batch = layer("separate")
    quantise = torch.ao.quantization.quantize_dynamic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = quantise(model.eval(), {nn.Linear}, torch.qint8).train()
    clip = QKClip(model, 1e-6)
    before = model(**batch)
    with pytest.warns(UserWarning, match="no parameter of its own"):
        assert (clip.step()[0] == 1).all()
    assert torch.equal(model(**batch), before) and clip.unclipped
    clip.detach()


def test_what_is_wrapped_or_frozen_later_is_left_alone_from_then_on():
    for wrap in WRAPS:
        model, batch = layer("separate")
        clip = QKClip(model, 1e-2)
        model(**batch)
        assert (clip.step()[0] < 1).all()
        WRAPS[wrap](model.q_proj, "weight")
        model(**batch)
        before = bits(model)
        with pytest.warns(UserWarning, match=r"was not clipped: the weight of a torch"):
            assert (clip.step()[0] == 1).all()
        assert all(torch.equal(before[name], t) for name, t in bits(model).items())
        clip.detach()


def test_the_function_refuses_weights_that_are_not_its_modules_own():
    module = partita.nn.MultiheadAttention(8, 2)
    parametrizations.weight_norm(module, "in_proj_weight")
    with pytest.raises(ValueRangeError, match=r"the in_proj_weight of a .* is no parameter of its own"):
        partita.nn.qk_clip_(module, torch.tensor([400.0, 400.0]))


# ---- PEFT ------------------------------------------------------------------------------------------------------------

KINDS = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
# these put nothing around a linear map (prompts, tokens, other models beside it), or need tasks of their own
OTHER = {"ADAPTION_PROMPT", "TRAINABLE_TOKENS", "SHADOW", "POLY", "XLORA"}
WRAPPING = sorted(
    kind.name
    for kind, config in KINDS.items()
    if kind.name not in OTHER and "target_modules" in {field.name for field in dataclasses.fields(config)}
)
OPTIONS = {
    "ADALORA": {"total_step": 10}, "IA3": {"feedforward_modules": []}, "OFT": {"r": 0, "oft_block_size": 4},
    "BOFT": {"boft_block_size": 4}, "C3A": {"block_size": 8}, "SHIRA": {"r": 2}, "ROAD": {"group_size": 8},
    "VBLORA": {"vector_length": 8}, "FOURIERFT": {"n_frequency": 10}, "WAVEFT": {"n_frequency": 10},
}  # fmt: skip


def adapted(kind, targets=("q_proj", "k_proj"), **options):
    model, batch = make("llama", torch.float32)
    config = KINDS[peft.PeftType[kind]](target_modules=list(targets), **OPTIONS.get(kind, {}), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config).train(), batch


def drop_in(model):
    """Adapters that do something, where many do nothing at first."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.requires_grad and parameter.dim() >= 2 else None


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's, to FRoD
@pytest.mark.parametrize("fresh", [True, False], ids=["as made", "trained"])
@pytest.mark.parametrize("kind", WRAPPING)
def test_no_adapter_is_clipped_and_no_base_layer(kind, fresh):
    def make_one():
        model, batch = adapted(kind)
        None if fresh else drop_in(model)
        return model, batch

    (why,) = steps(make_one)
    assert "no parameter of its own" in why


@pytest.mark.parametrize("state", ["one of two", "dora", "base trained too", "disabled", "merged", "unloaded"])
def test_low_rank_updates_in_every_state_are_left_alone(state):
    options = {"one of two": {"targets": ("k_proj",)}, "dora": {"use_dora": True}}.get(state, {})

    def make_one():
        model, batch = adapted("LORA", **options)
        model.requires_grad_(True) if state == "base trained too" else drop_in(model)
        if state == "disabled":
            model.base_model.disable_adapter_layers()
        if state == "merged":
            model.merge_adapter()
        return (model.merge_and_unload() if state == "unloaded" else model), batch

    (why,) = steps(make_one)
    # where only keys have one, the plain projection of the queries, which PEFT froze, comes first
    assert ("frozen" if state in ("unloaded", "one of two") else "no parameter of its own") in why


def test_once_merged_and_thawed_the_weights_are_clipped():
    model, batch = adapted("LORA")
    drop_in(model)
    model = model.merge_and_unload().requires_grad_(True)
    clip = QKClip(model, 1.0)
    model(**batch)
    before, factor = clip.max_scores[0].clone(), clip.step()[0]
    model(**batch)
    torch.testing.assert_close(clip.max_scores[0], factor * before, rtol=1e-4, atol=1e-6)
    assert (factor < 1).any() and not clip.unclipped
    clip.detach()


def test_a_low_rank_update_of_torchs_module_is_left_alone():
    def make_one():
        model, batch = layer("packed")
        model = peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=["attention"]), model).train()
        drop_in(model)
        return model, batch

    assert len(steps(make_one)) == 1
