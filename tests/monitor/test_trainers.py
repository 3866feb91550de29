"""The watch inside the Trainers of transformers and sentence-transformers: what they call a step is one step."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.monitor.callbacks import trainer_callback

pytestmark = pytest.mark.filterwarnings("ignore")  # the trainers' own


def package(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"pip install {name}")


QUIET = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "max_steps": 3, "seed": 1}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accumulated_batches_are_one_step_and_evaluation_is_none(tmp_path: Path, accumulate: int) -> None:
    hf, _ = package("transformers"), package("accelerate")
    config = hf.LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    rows = [[{"input_ids": row, "labels": row} for row in torch.randint(60, shape)] for shape in ((12, 9), (4, 5))]
    callback = trainer_callback()
    arguments = hf.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=accumulate, eval_strategy="steps",
        eval_steps=1, logging_steps=1, **QUIET,
    )  # fmt: skip
    trainer = hf.Trainer(
        model=hf.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=rows[0],
        eval_dataset=rows[1],
        callbacks=[callback],
    )
    trainer.train()
    frame, losses = callback.watch.frame(pandas=False), callback.watch.record.losses
    assert sorted({row["step"] for row in frame}) == [row["step"] for row in losses] == [0, 1, 2]
    # the first place of each sequence has one key and no choice; the last has no next word
    assert {row["rows"] for row in frame} == {row["rows"] for row in losses} == {2 * accumulate * 8}
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert [row["loss"] for row in losses] == pytest.approx(logged, abs=1e-3)


@pytest.mark.parametrize("name", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"])
def test_the_loss_of_sentence_transformers_is_seen_in_its_trainer(name: str, tmp_path: Path) -> None:
    """It is a module that holds the model, and calls it once for each column."""
    library = package("sentence_transformers")
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed, which the Trainer of sentence-transformers needs: pip install datasets")
    from datasets import Dataset

    from partita.adapters import sentence_transformers as losses
    from tests.losses.test_documented import small_model

    model = library.SentenceTransformer(small_model(tmp_path), device="cpu")
    pairs = {"anchor": ["so nice", "he drove", "a car", "red"], "positive": ["sunny", "to work", "fast", "blue"]}
    callback, loss = trainer_callback(), getattr(losses, name)(model)
    arguments = library.SentenceTransformerTrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, logging_steps=1, **QUIET
    )
    trainer = library.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(pairs), loss=loss, callbacks=[callback]
    )
    trainer.train()
    assert callback.watch.record.steps() == [0, 1, 2]
    seen = callback.watch.record.losses
    assert [(row["step"], row["name"], row["rows"]) for row in seen] == [
        (step, "MultipleNegativesRankingLoss", 4) for step in range(3)
    ]
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert [row["loss"] for row in seen] == pytest.approx(logged, abs=1e-3)
