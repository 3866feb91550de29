"""Train a small language model whose head never makes logits, and read what each token's distribution looks like.

Run it with `python examples/language_model_head.py`. It needs nothing but partita: the text is the language reference
that ships inside Python. Next-token prediction is one call with shift=1, masked-token prediction one with ignored rows.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from partita import metrics
from partita.losses import LossStats, linear_cross_entropy

WIDTH, LENGTH, STEPS = 48, 32, 20 if "--quick" in sys.argv else 200


def row(label: str, value: float, note: str = "") -> None:
    print(f"  {label:<44}{value:>9.4f}   {note}".rstrip())


def text() -> tuple[Tensor, list[str]]:
    words = [w for name in sorted(topics) for w in re.findall(r"[a-z_]+|[^\sa-z_]", topics[name].lower())]
    vocabulary = [w for w, count in Counter(words).most_common() if count > 1]
    index = {w: i for i, w in enumerate(vocabulary)}
    return torch.tensor([index[w] for w in words if w in index]), vocabulary


class Model(nn.Module):
    """A recurrent layer over word vectors; the vectors are the classes, too."""

    def __init__(self, n_word: int, both_ways: bool):
        super().__init__()
        self.embedding = nn.Embedding(n_word + 1, WIDTH)  # the last one stands for a hidden word
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=both_ways)
        self.project = nn.Linear(WIDTH * (2 if both_ways else 1), WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.project(self.recurrent(self.embedding(tokens))[0])  # type: ignore[no-any-return]

    @property
    def classes(self) -> Tensor:
        return self.embedding.weight[:-1]


def batch(stream: Tensor, size: int, generator: torch.Generator) -> Tensor:
    at = torch.randint(len(stream) - LENGTH, (size,), generator=generator)
    return stream[at[:, None] + torch.arange(LENGTH)]


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    stream, vocabulary = text()
    cut = len(stream) * 9 // 10
    train, held_out = stream[:cut], stream[cut:]
    print(f"{len(stream)} words of Python's reference, {len(vocabulary)} different ones")

    print("\nNext word: position t predicts word t + 1, the hidden states are not copied")
    model, start = Model(len(vocabulary), both_ways=False), time.perf_counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        tokens = batch(train, 16, generator)
        loss = linear_cross_entropy(model(tokens), model.classes, tokens, shift=1, z_loss=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        tokens = batch(held_out, 32, generator)
        _, stats = linear_cross_entropy(model(tokens), model.classes, tokens, shift=1, return_stats=True)
    assert isinstance(stats, LossStats)
    row("seconds", time.perf_counter() - start)
    row("perplexity", metrics.perplexity(stats).item(), f"of {len(vocabulary)} words")
    row("the next word is the best guess", metrics.top_k_accuracy(stats).item())
    row("the next word is among the best ten", metrics.top_k_accuracy(stats, 10).item())
    row("expected surprise, the mean entropy", stats.entropy.mean().item(), f"measured {stats.nll.mean():.4f}")
    row("calibration error", metrics.expected_calibration_error(stats).item())
    row("mean log Z", stats.log_partition.mean().item(), "the z-loss pulls it towards 0, gently")
    worst = divmod(int(stats.nll.argmax()), LENGTH - 1)
    seen = " ".join(vocabulary[int(t)] for t in tokens[worst[0], max(0, worst[1] - 4) : worst[1] + 2])
    row("the most surprising word", stats.nll[worst].item(), f"... {seen}")

    print("\nHidden word: 15 % of the words are hidden and only those are computed")
    model = Model(len(vocabulary), both_ways=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS + 1):
        tokens = batch(train if step < STEPS else held_out, 32, generator)
        hidden = torch.rand(tokens.shape, generator=generator) < 0.15
        target = torch.where(hidden, tokens, -100)
        states = model(torch.where(hidden, len(vocabulary), tokens))
        loss, stats = linear_cross_entropy(states, model.classes, target, return_stats=True)
        if step < STEPS:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert isinstance(stats, LossStats)
    row("perplexity of the hidden words", metrics.perplexity(stats).item())
    row("best guess right", metrics.top_k_accuracy(stats).item())
    row("rows computed, of all", (stats.visible > 0).float().mean().item())


if __name__ == "__main__":
    main()
