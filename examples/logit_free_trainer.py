"""The Hugging Face Trainer with logits and without: the same losses, a fraction of the memory.

Run it with `python examples/logit_free_trainer.py [--figure FILE.svg]`; it needs transformers and accelerate. A Llama
of two layers reads texts that repeat themselves, with a vocabulary of 32,768 of which 64 words are in use: that much it
learns in these steps. The runs differ by one line.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import warnings

import torch

VOCABULARY, BATCH, LENGTH = 32768, 8, 64


def train(free: bool, steps: int, vocabulary: int = VOCABULARY) -> tuple[list[float], list[float], float]:
    """The loss of each step, the token accuracy where it is known, and the peak of memory during training in MB."""
    import transformers

    import partita

    words = torch.randint(vocabulary, (BATCH * steps, LENGTH // 2), generator=torch.Generator().manual_seed(1))
    words = words % 64  # sixty-four of the words are in use
    rows = [{"input_ids": row, "labels": row} for row in torch.cat([words, words], 1)]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model, callbacks = transformers.LlamaForCausalLM(config), []
    if free:
        partita.hf.logit_free(model)  # the line that differs
        callbacks = [partita.hf.token_log_callback()]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=3e-3, report_to="none",
            logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True, warmup_steps=10, seed=0,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.train()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    log = [row for row in trainer.state.log_history if "loss" in row]
    return [row["loss"] for row in log], [row["token_accuracy"] for row in log if "token_accuracy" in row], peak


def smooth(values: list[float], width: int = 10) -> list[float]:
    pieces = [values[i : i + width] for i in range(0, len(values), width)]
    return [sum(piece) / len(piece) for piece in pieces]


def draw(runs: dict[str, tuple[list[float], list[float], float]], path: str) -> None:
    from partita_theory.figure import Figure, Line, Panel, svg

    def line(name: str, values: list[float]) -> Line:
        return Line(name, [10.0 * i for i in range(len(smooth(values)))], smooth(values))

    losses = Panel("loss", "step", "loss", [line(name, run[0]) for name, run in runs.items()])
    right = [line(name, run[1]) for name, run in runs.items() if run[1]]
    panels = [losses, Panel("what its log says besides", "step", "token accuracy", right)]
    memory = ", ".join(f"{name} {run[2]:.0f} MB" for name, run in runs.items())
    note = f"one run each, means of ten steps; memory beyond what was there before the first step: {memory}"
    with open(path, "w", encoding="utf-8") as out:
        out.write(svg(Figure("Does the Trainer learn the same without logits?", panels, note)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--figure", help="an SVG file to draw into")
    parser.add_argument("--one", choices=("with logits", "without"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    steps = 5 if given.quick else 150
    if given.one:
        print(json.dumps(train(given.one == "without", steps)))
        return
    print(f"{steps} steps\n{'':<16}{'loss':>10}{'memory, MB':>14}")
    runs = {}
    for name in ("with logits", "without"):  # a process each: a peak of memory is never forgotten
        command = [sys.executable, __file__, "--one", name, *(["--quick"] if given.quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        losses, accuracy, peak = json.loads(done.stdout.splitlines()[-1])
        runs[name] = (losses, accuracy, peak)
        print(f"{name:<16}{smooth(losses)[-1]:>10.4f}{peak:>14.0f}", flush=True)
    if given.figure:
        draw(runs, given.figure)


if __name__ == "__main__":
    main()
