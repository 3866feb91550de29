"""The documented usage of other libraries, read from the installed packages, with only the import changed."""

from __future__ import annotations

import copy
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from partita.adapters import metric_learning, open_clip, sentence_transformers
from tests.losses import clip_training
from tests.losses.checks import assert_equal_with_gradients
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


def piece_with(text: str) -> str:
    peer("pytorch_metric_learning")
    return next(p for p in readme("pytorch-metric-learning") if text in p)


# Its front page shows every use with one loss, which we do not have and which stands for any: another's name is put in
# its place. What the wrapper's own piece wraps is left to the reader to import.
IMPORTS = {
    "from pytorch_metric_learning import losses": "from partita.adapters import metric_learning as losses",
    "from pytorch_metric_learning import miners, losses": (
        "from pytorch_metric_learning import miners\nfrom partita.adapters import metric_learning as losses"
    ),
    "from pytorch_metric_learning.losses import TripletMarginLoss": (
        "from partita.adapters.metric_learning import TripletMarginLoss"
    ),
}


def theirs_and_ours(text: str, name: str) -> tuple[str, str]:
    """The piece with this loss, and the same with the import changed."""
    line = next(line for line in IMPORTS if f"{line}\n" in text)
    changed = text.replace(line, IMPORTS[line], 1)
    return text.replace("TripletMarginLoss", name), changed.replace("TripletMarginLoss", name)


def metric_learning_pieces() -> dict[str, str]:
    plain = piece_with("import losses\nloss_func = losses.TripletMarginLoss()")
    views = piece_with("SelfSupervisedLoss(TripletMarginLoss())")
    return {
        "loop": plain + piece_with("loss_func(embeddings, labels)\n"),
        "miner": piece_with("miner(embeddings, labels)"),
        "views": f"from pytorch_metric_learning.losses import TripletMarginLoss\n{views}",
    }


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
@pytest.mark.parametrize("use", ["loop", "miner", "views"])
def test_metric_learning(name, use):
    """Its training loop, its loop with a miner, its loop over two views: the same parameters after three steps."""
    data = [(torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 3) for _ in range(3)]
    start = nn.Linear(5, 4).double()
    made = []
    for source in theirs_and_ours(metric_learning_pieces()[use], name):
        model = copy.deepcopy(start)
        names = {"model": model, "your_model": model, "your_augmentation": lambda x: x.roll(1, -1)}
        names["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
        made.append(run(source, dataloader=[x for x, _ in data] if use == "views" else data, **names))
    theirs, ours = made
    used = [getattr(m["loss_func"], "loss", m["loss_func"]) for m in made]
    assert [type(x).__module__.split(".")[0] for x in used] == ["pytorch_metric_learning", "partita"]
    assert theirs["loss"] > 0 and not torch.equal(theirs["model"].weight, start.weight)
    for a, b in ((ours["loss"], theirs["loss"]), (ours["model"].weight, theirs["model"].weight)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
def test_metric_learning_memory(name):
    """Its memory of past batches takes losses by their names, ours too, and mines pairs for them."""
    losses = peer("pytorch_metric_learning.losses")
    kinds = (metric_learning, losses)
    memories = [losses.CrossBatchMemory(getattr(k, name)(), embedding_size=4, memory_size=20) for k in kinds]
    for _ in range(4):  # the third goes round its end
        x, labels = torch.randn(8, 4, dtype=torch.float64, requires_grad=True), torch.arange(8) % 3
        assert_equal_with_gradients(*(m(x, labels) for m in memories), (x,))


def test_metric_learning_arguments_that_are_not_served_are_refused():
    """The piece of its front page that sets them, too: distance and reducer are taken, the regularizer is not."""
    assert metric_learning.NTXentLoss(0.1, reducer=None).temperature == 0.1
    with pytest.raises(ValueError, match="distance must be CosineSimilarity, DotProductSimilarity or LpDistance"):
        metric_learning.NTXentLoss(distance=object())
    with pytest.raises(ValueError, match="reducer must be one of"):
        metric_learning.NTXentLoss(reducer=object())
    distances = peer("pytorch_metric_learning.distances")
    with pytest.raises(ValueError, match="or None; got SNRDistance"):
        metric_learning.NTXentLoss(distance=distances.SNRDistance())
    theirs, ours = theirs_and_ours(piece_with("distance = CosineSimilarity()"), "NTXentLoss")
    run(theirs)
    with pytest.raises(ValueError, match="and not embedding_regularizer"):
        run(ours)


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


APART = Path(sys.prefix) / "open_clip"  # where the Makefile puts what open_clip needs and the others must not see
NEEDED = ("open_clip", "timm", "torchvision", "ftfy", "wcwidth", "webdataset", "braceexpand", "pandas", "tensorboard")


def assert_same_training(name: str, theirs: dict[str, object], ours: dict[str, object]) -> None:
    """Every loss on the way, and in double every parameter and running mean at the end.

    Adam divides a gradient by its size plus 1e-8, so that with a rate of 1e-3 a rounding of 1e-16 moves a parameter
    whose gradient is 0 by 1e-11, and eight steps by 1e-10: 1e-8 is left. Where the rounding is 1e-7 such a parameter
    (the bias of keys) goes anywhere, and only the losses are compared. In mixed precision theirs are made of logits of
    up to 15 with 11 bits, two roundings each, and a logarithm of probability has twice the error of its logits:
    4 * 15 / 2048.
    """
    within = {"single": 1e-4, "mixed": 0.03}.get(name.partition(", ")[2], 1e-8)
    near = {"rtol": within, "atol": within, "msg": lambda text: f"{name}: {text}"}
    torch.testing.assert_close(ours["losses"].double(), theirs["losses"].double(), **near)
    assert ours["parameters"].keys() == theirs["parameters"].keys(), name
    if within == 1e-8:
        torch.testing.assert_close(ours["parameters"], theirs["parameters"], **near)


def test_open_clip_trains_as_documented(tmp_path):
    """Its program, with the command of its front page, whole: model, pictures, texts, loss, optimizer, checkpoint."""
    path = [*filter(None, sys.path), str(APART)]
    for name in NEEDED:
        if importlib.machinery.PathFinder.find_spec(name, path) is None:
            pytest.skip(f"{name} is not installed: make test-peers installs it, into {APART.name} of the environment")
    environment = {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", clip_training.__name__, str(tmp_path)],
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "runs.pt")
    for name in clip_training.RUNS:
        kind = name.partition(", ")[0]
        theirs, ours = found[name]["theirs"], found[name]["ours"]
        assert theirs["homes"] == {f"open_clip.loss.{kind}"}, name
        assert ours["homes"] == {f"partita.adapters.open_clip.{kind}"}, name
        assert len(theirs["losses"]) == 8, name
        assert_same_training(name, theirs, ours)
