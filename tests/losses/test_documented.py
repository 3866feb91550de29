"""The documented usage of other libraries, read from the installed packages, with only the import changed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from partita.adapters import metric_learning, open_clip, sentence_transformers
from tests.losses.test_peers import open_clip_losses, peer


def run(source: str, **names: object) -> dict[str, object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        exec(compile(source, "documented", "exec"), names)
    return names


# ---- sentence-transformers -------------------------------------------------------------------------------------------


def small_model(folder: Path) -> str:
    """In place of the model that the example would fetch: a BERT of one layer with a vocabulary of letters."""
    models, transformers = peer("sentence_transformers.sentence_transformer.modules"), peer("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.'"]
    words += [f"##{w}" for w in "abcdefghijklmnopqrstuvwxyz"]
    base = folder / "base"
    base.mkdir()
    (base / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(base / "vocab.txt")).save_pretrained(base)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(base)
    word = models.Transformer(str(base))
    model = peer("sentence_transformers").SentenceTransformer(modules=[word, models.Pooling(16)])
    model.save(str(folder / "model"))
    return str(folder / "model")


@pytest.mark.parametrize("name", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"])
def test_sentence_transformers(name, tmp_path, monkeypatch):
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed, which the Trainer of sentence-transformers needs: pip install datasets")
    theirs = getattr(peer("sentence_transformers.sentence_transformer.losses"), name)
    text = textwrap.dedent(inspect.getdoc(theirs.__init__).split("Example:")[1].split("::", 1)[1])
    assert f"losses.{name}(model" in text and "trainer.train()" in text
    text = text.replace("SentenceTransformerTrainer, losses", "SentenceTransformerTrainer")
    text = "from partita.adapters import sentence_transformers as losses\n" + text
    text = text.replace("microsoft/mpnet-base", small_model(tmp_path))
    monkeypatch.chdir(tmp_path)  # the Trainer writes where it is
    made = run(text)
    assert type(made["loss"]).__module__ == "partita.adapters.sentence_transformers"
    assert made["trainer"].state.global_step > 0
    assert made["loss"].last_stats.entropy.shape == (2,)


@pytest.mark.parametrize("name", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"])
def test_sentence_transformers_without_a_trainer(name, tmp_path):
    """`fit` as it was before there was a Trainer; it needs no datasets."""
    library = peer("sentence_transformers")
    from torch.utils.data import DataLoader

    model = library.SentenceTransformer(small_model(tmp_path), device="cpu")
    examples = [
        library.InputExample(texts=["it is nice", "so sunny"]),
        library.InputExample(texts=["a car", "he drove"]),
    ]
    loss = getattr(sentence_transformers, name)(model)
    before = [p.clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.old_fit(
            train_objectives=[(DataLoader(examples, batch_size=2), loss)],
            epochs=1,
            warmup_steps=0,
            show_progress_bar=False,
        )
    assert loss.last_stats.entropy.shape == (2,)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# ---- pytorch-metric-learning -----------------------------------------------------------------------------------------


def readme(package: str) -> list[str]:
    """The pieces of Python on the package's own front page."""
    try:
        # the file itself: what a parsed one gives depends on who has put a finder of his own on sys.meta_path
        text = importlib.metadata.distribution(package).read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install {package}")
    assert text is not None
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
def test_metric_learning(name):
    """Its training loop, its loop with a miner, its wrapper for two views; TripletMarginLoss stands for any loss."""
    peer("pytorch_metric_learning")
    pieces = readme("pytorch-metric-learning")
    loop = next(p for p in pieces if "loss_func(embeddings, labels)" in p)
    mined = next(p for p in pieces if "miner(embeddings, labels)" in p)
    views = next(p for p in pieces if "SelfSupervisedLoss(" in p)
    model = nn.Linear(5, 4)
    data = [(torch.randn(8, 5), torch.arange(8) % 3) for _ in range(2)]
    names = {"model": model, "dataloader": data, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    names["losses"] = SimpleNamespace(TripletMarginLoss=getattr(metric_learning, name))
    run(f"loss_func = losses.TripletMarginLoss()\n{loop}", **names)
    ours = re.sub(r"import miners, losses", "import miners", mined)
    assert ours != mined
    made = run(ours, **names)
    assert torch.isfinite(made["loss"])
    both = {"embeddings": torch.randn(6, 4), "augmented": torch.randn(6, 4), "your_data": torch.randn(6, 5)}
    wrapper = peer("pytorch_metric_learning.losses")
    assert "SelfSupervisedLoss(TripletMarginLoss())" in views
    found = [
        wrapper.SelfSupervisedLoss(getattr(kind, name)())(both["embeddings"], both["augmented"])
        for kind in (metric_learning, wrapper)
    ]
    torch.testing.assert_close(*found)


def test_metric_learning_arguments_that_need_a_matrix_are_refused():
    assert metric_learning.NTXentLoss(0.1, reducer=None).temperature == 0.1
    with pytest.raises(ValueError, match="distance, reducer would need the n x n matrix"):
        metric_learning.NTXentLoss(distance=object(), reducer=object())


# ---- open_clip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_open_clip(name):
    """As its trainer does: a model's dictionary goes in by names, the losses that come out are summed."""
    open_clip_losses()
    files = importlib.metadata.files("open_clip_torch") or []
    train = next((f for f in files if str(f) == "open_clip_train/train.py"), None)
    assert train is not None
    text = train.locate().read_text()
    lines = ["losses = loss(**model_out, output_dict=True)", "total_loss = sum(losses.values())"]
    assert all(line in text for line in lines)
    features = {k: nn.functional.normalize(torch.randn(5, 4), dim=-1) for k in ("image_features", "text_features")}
    model_out = features | {"logit_scale": torch.tensor(10.0), "logit_bias": torch.tensor(-10.0)}
    kinds = (open_clip, open_clip_losses())
    found = [run("\n".join(lines), loss=getattr(k, name)(), model_out=model_out)["total_loss"] for k in kinds]
    torch.testing.assert_close(*found)
