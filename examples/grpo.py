"""GRPO with trl on a task that checks itself, once with trl's own function and once with partita's: the same curves.

    python examples/grpo.py [--quick]

A small random Llama reads a digit and is rewarded for every token of its answer that is this digit again. The runs
differ by one line; reward, entropy and KL to the first model are logged at every step. It needs trl.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import tempfile
import warnings
from typing import Any

import torch

import partita.adapters.trl

DIGITS, LENGTH, GROUP, BATCH = 10, 4, 8, 64  # tokens of an answer, answers to a prompt, answers of a step
CURVES = ("reward", "entropy", "kl")


def tokenizer() -> Any:
    """One token per digit, and two that end and fill up."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", *map(str, range(DIGITS))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def save_model(folder: str) -> None:
    """A random model in float64, so that what differs between the runs is rounding of the two functions alone."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=DIGITS + 2, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        initializer_range=0.1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).double().save_pretrained(folder)


def copied(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of an answer's tokens that are the digit of the prompt."""
    return [answer.split().count(digit) / LENGTH for digit, answer in zip(prompts, completions, strict=True)]


def train(steps: int, ours: bool) -> list[list[float]]:
    """Reward, entropy and KL of every step."""
    import datasets
    import trl

    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        arguments = trl.GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, num_generations=GROUP,
            max_completion_length=LENGTH, learning_rate=3e-3, lr_scheduler_type="constant", beta=0.05, seed=0,
            adam_epsilon=1e-4,  # a gradient far below it is rounding, which Adam would make a whole step of
            model_init_kwargs={"dtype": "auto"}, bf16=False, gradient_checkpointing=False, use_cpu=True,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=folder, args=arguments, reward_funcs=copied, processing_class=tokenizer(),
            train_dataset=datasets.Dataset.from_list([{"prompt": str(i % DIGITS)} for i in range(40 * DIGITS)]),
        )  # fmt: skip
        with partita.adapters.trl.install() if ours else contextlib.nullcontext():  # the line that differs
            trainer.train()
    log = [row for row in trainer.state.log_history if "reward" in row]
    return [[row[name] for name in CURVES] for row in log]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps")
    steps = 4 if parser.parse_args().quick else 80
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)  # so small a model gains nothing by more
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the Trainer prints every step
        theirs, mine = train(steps, False), train(steps, True)
    print(f"{'step':>4}" + "".join(f"{name:>10}" for name in CURVES) + "   with partita.adapters.trl.install()")
    for step in sorted({*range(0, steps, max(1, steps // 12)), steps - 1}):
        print(f"{step + 1:>4}" + "".join(f"{value:>10.4f}" for value in mine[step]))
    a, b = (torch.tensor(curves, dtype=torch.float64) for curves in (theirs, mine))
    for name, gap in zip(CURVES, (a - b).abs().amax(0).tolist(), strict=True):
        print(f"largest difference of {name:<8} over {steps} steps: {gap:.1e}")


if __name__ == "__main__":
    main()
