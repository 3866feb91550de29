"""What does a step of the Hugging Face Trainer cost without logits? Memory, each in a process of its own, and time,
with logits and without in turns in one process, on the same weights.

A Llama of two layers and width 256 with tied weights and 64 classes for every token: 2048 tokens, 131,072 classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator

import torch

import partita

from .harness import Options, Row, compare
from .peak import measure, memory_row


def step_of(n: int, free: bool) -> Callable[[], object]:
    """A step of the Trainer on n tokens with 64 n classes: loss, gradients, optimizer; it has stepped before."""
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64 * n, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model = partita.hf.logit_free(model) if free else model
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to="none", optim="adamw_torch_fused")
        trainer = transformers.Trainer(model=model, args=arguments)
    trainer.create_optimizer()
    model.train()

    def step(tokens: torch.Tensor) -> None:
        count = torch.tensor(tokens.numel() - len(tokens))
        trainer.training_step(model, {"input_ids": tokens, "labels": tokens}, count)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    step(torch.randint(64 * n, (1, 8)))
    tokens = torch.randint(64 * n, (max(1, n // 512), min(n, 512)))
    return lambda: step(tokens)


PROBES: dict[str, Callable[[int], Callable[[], object]]] = {
    "without logits": lambda n: step_of(n, True),
    "with logits": lambda n: step_of(n, False),
}


def cases(options: Options) -> Iterator[list[Row]]:
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
        return
    n = 32 if options.quick else 2048
    shape = f"Trainer step, {n} tokens, {64 * n} classes, width 256"
    if options.wants(name := f"memory {shape}"):
        ours, peer = (measure("trainer", probe, n, options)[0] for probe in PROBES)
        bar = None if options.quick else 0.2
        yield [memory_row(name, "the same with logits", ours, peer, "bytes", bar, question="trainer")]
    if options.wants(name := f"time {shape}"):
        spent = {"partita": 0.0, "the same with logits": 0.0}
        steps = {"partita": step_of(n, True), "the same with logits": step_of(n, False)}

        def counted(who: str) -> Callable[[], object]:
            def call() -> object:
                start = time.process_time()
                out = steps[who]()
                spent[who] += time.process_time() - start
                return out

            return call

        peers = {"the same with logits": counted("the same with logits")}
        rows = compare("trainer", name, counted("partita"), peers, options, bars=dict.fromkeys(peers, 1.0))
        busy = spent["partita"] / max(spent["the same with logits"], 1e-9)
        for row in rows:
            row.extra["processor_time_ratio"] = busy
        print(f"    processor time of all steps, ours / peer: {busy:.3f}")
        yield rows
