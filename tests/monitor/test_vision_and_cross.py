"""Images, encoders with decoders, blocks that look at another sequence: their layers and their numbers."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.control import QKClip
from partita.monitor import load_record, watch

WIDE: dict[str, Any] = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
WIDE |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 60}
BERT: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IDS = torch.arange(12).reshape(2, 6) + 3


@pytest.fixture(scope="module")
def hf() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers", reason="transformers is not installed: pip install 'partita[hf]'")


def seen(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    model.eval()
    with watch(model) as w, torch.no_grad():
        model(*args, **kwargs)
    assert not w.coverage["missed"], w.coverage["text"]
    return w


def cross_layers(w: Any) -> dict[str, bool]:
    return {site.name: site.cross for site in w.record.sites}


def assert_entropies(w: Any, maps: list[Tensor], layers: list[int]) -> None:
    """The mean entropy of each head, from probabilities that the model itself gave."""
    table = {(r["layer"], r["head"]): r for r in w.frame(pandas=False)}
    for layer, p in zip(layers, maps, strict=True):  # (batch, heads, n, m)
        truth = torch.special.entr(p.double()).sum(-1)
        seen_two = (p > 0).sum(-1) > 1  # rows with one key are left out
        for head in range(p.shape[1]):
            rows = truth[:, head][seen_two[:, head]]
            assert table[layer, head]["rows"] == rows.numel()
            assert table[layer, head]["entropy"] == pytest.approx(rows.mean().item(), rel=1e-4)


def test_a_vision_transformer_of_hugging_face(hf: Any) -> None:
    config = hf.ViTConfig(**BERT, image_size=32, patch_size=8, attn_implementation="eager")
    model, pixels = hf.ViTModel(config), torch.randn(2, 3, 32, 32)
    w = seen(model, pixel_values=pixels)
    assert list(cross_layers(w).values()) == [False, False]
    assert [name.split(".")[-1] for name in cross_layers(w)] == ["attention"] * 2
    assert {r["visible"] for r in w.frame(pandas=False)} == {17.0}  # sixteen patches and the class token
    assert_entropies(w, list(model(pixels, output_attentions=True).attentions), [0, 1])


class _Name(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> Any:
        mine = name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@pytest.fixture
def timm() -> Iterator[Any]:
    """timm without torchvision, whose transforms of pictures it wants when it is imported: those are made up."""
    try:
        importlib.metadata.version("timm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    before = set(sys.modules)
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in set(sys.modules) - before if n.split(".")[0] in ("timm", "torchvision")]:
            del sys.modules[name]


@pytest.mark.parametrize("fused", [True, False])
def test_a_vision_transformer_of_timm(timm: Any, fused: bool) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_heads=2, embed_dim=16, num_classes=5
    )
    for block in model.blocks:
        block.attn.fused_attn = fused
    pixels = torch.randn(2, 3, 32, 32)
    maps: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        q, k, _ = module.qkv(given[0]).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        maps.append((q @ k.mT * 8**-0.5).softmax(-1))

    hooks = [block.attn.register_forward_pre_hook(keep) for block in model.blocks]
    with torch.no_grad():
        model.eval()(pixels)
    for hook in hooks:
        hook.remove()
    w = seen(model, pixels)
    assert cross_layers(w) == {"blocks.0.attn": False, "blocks.1.attn": False}
    assert_entropies(w, maps, [0, 1])
    clip = QKClip(model.train(), 1e-3)
    model(pixels)
    assert all((factor < 1).all() for factor in clip.step().values()) and not clip.unclipped
    clip.detach()


def test_t5(hf: Any) -> None:
    config = hf.T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = hf.T5ForConditionalGeneration(config)
    w = seen(model, input_ids=IDS, labels=IDS[:, :4].contiguous())
    assert [n for n, cross in cross_layers(w).items() if cross] == [
        f"decoder.block.{i}.layer.1.EncDecAttention" for i in range(2)
    ]
    out = model(input_ids=IDS, labels=IDS[:, :4].contiguous(), output_attentions=True)
    assert_entropies(w, list(out.encoder_attentions), [0, 1])
    assert_entropies(w, list(out.cross_attentions), [3, 5])


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_whisper(hf: Any, how: str) -> None:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(
        **WIDE, **special, num_mel_bins=8, max_source_positions=20, max_target_positions=20, attn_implementation=how
    )
    model, sound = hf.WhisperForConditionalGeneration(config), torch.randn(2, 8, 40)
    w = seen(model, input_features=sound, decoder_input_ids=IDS)
    names = cross_layers(w)
    assert [n.split(".")[1] for n in names] == ["encoder"] * 2 + ["decoder"] * 4
    assert [n for n, cross in names.items() if cross] == [f"model.decoder.layers.{i}.encoder_attn" for i in range(2)]
    model.set_attn_implementation("eager")
    out = model(input_features=sound, decoder_input_ids=IDS, output_attentions=True)
    assert_entropies(w, list(out.cross_attentions), [3, 5])
    cross = [r for r in w.frame(pandas=False) if r["cross"]]
    assert {r["visible"] for r in cross} == {20.0} and {r["layer"] for r in cross} == {3, 5}


@pytest.mark.parametrize("kind", ["gpt2", "bert", "bart"])
def test_self_attention_next_to_cross_attention_is_not_taken_for_it(hf: Any, kind: str) -> None:
    """A layer receives the encoder's states; of its two attentions only one uses them as keys."""
    memory = torch.randn(2, 9, 16)
    if kind == "gpt2":
        config = hf.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, add_cross_attention=True)
        w = seen(hf.GPT2Model(config), input_ids=IDS, encoder_hidden_states=memory)
    elif kind == "bert":
        config = hf.BertConfig(vocab_size=60, **BERT, is_decoder=True, add_cross_attention=True)
        w = seen(hf.BertModel(config), input_ids=IDS, encoder_hidden_states=memory)
    else:
        w = seen(hf.BartModel(hf.BartConfig(**WIDE)), input_ids=IDS, decoder_input_ids=IDS[:, :4])
    names = cross_layers(w)
    wanted = {name for name in names if "cross" in name.lower() or "encoder_attn" in name}
    assert len(wanted) == 2 and {n for n, cross in names.items() if cross} == wanted


class Attention(nn.Module):
    """As diffusion models have it: the keys are the tokens of a text, if there is one."""

    def __init__(self, width: int, context: int | None = None) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(w, width) for w in (width, context or width, context or width))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = self.to_q(hidden_states), self.to_k(source), self.to_v(source)
        heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.attn1, self.attn2, self.by_name = Attention(16), Attention(16, 12), by_name

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = hidden_states + self.attn1(hidden_states)
        more = {"encoder_hidden_states": encoder_hidden_states} if self.by_name else {}
        return x + self.attn2(x, *(() if self.by_name else (encoder_hidden_states,)), **more)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_block_of_a_diffusion_model(by_name: bool, tmp_path: Path) -> None:
    model = nn.Sequential(Block(by_name))
    block, picture, text = model[0], torch.randn(2, 25, 16), torch.randn(2, 7, 12)

    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mid = block

        def forward(self, sample: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            return self.mid(sample, encoder_hidden_states=encoder_hidden_states)

    w = seen(Unet(), picture, encoder_hidden_states=text)
    assert cross_layers(w) == {"mid.attn1": False, "mid.attn2": True}
    rows = w.frame(pandas=False)
    assert {(r["layer"], r["cross"], r["visible"]) for r in rows} == {(0, False, 25.0), (1, True, 7.0)}
    back = load_record(w.save(tmp_path / "run.jsonl"))
    assert back.sites == w.record.sites and [r["cross"] for r in back.rows()] == [r["cross"] for r in rows]
    page = w.report(tmp_path / "run.html").read_text()
    assert '"cross":true' in page.replace(" ", "") or json.dumps({"cross": True})[1:-1] in page


def test_a_residual_next_to_the_input_is_no_second_sequence(hf: Any) -> None:
    """Bloom's attention is given hidden states and a residual of the same shape."""
    config = hf.BloomConfig(vocab_size=60, hidden_size=16, n_layer=1, n_head=2)
    assert list(cross_layers(seen(hf.BloomModel(config), input_ids=IDS)).values()) == [False]


def test_a_name_tells_where_lengths_cannot() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn, self.cross_attn = Attention(16), Attention(16)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.cross_attn(self.self_attn(x), memory)

    w = seen(Layer(), torch.randn(2, 9, 16), torch.randn(2, 9, 16))
    assert cross_layers(w) == {"self_attn": False, "cross_attn": True}
