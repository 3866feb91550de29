"""A run built to blow up: too high a learning rate makes the scores of attention grow until every softmax is stuck.

Run it with `python examples/qk_clip.py [--figure FILE.svg]`. A two-layer model has to repeat sixteen symbols it has
just seen, which only attention can do. Its projections to queries, keys and values learn at a rate of 0.3, thirty times
the rest: scores pass ten thousand, each head looks at one place, no gradient tells it to look elsewhere, and the loss
stays at log 64, a guess. The same run with QKClip learns. Both in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita

SYMBOLS, LENGTH, WIDTH, HEADS = 64, 16, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.symbols(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def train(threshold: float | None, dtype: torch.dtype, steps: int) -> tuple[list[float], list[float]]:
    """The loss and the largest score of each step; a threshold of None only reads."""
    torch.manual_seed(0)
    model, generator = Model().to(dtype), torch.Generator().manual_seed(1)
    fast = {name: p for name, p in model.named_parameters() if "qkv" in name}
    slow = [p for name, p in model.named_parameters() if name not in fast]
    groups = [{"params": slow, "lr": 0.01}, {"params": list(fast.values()), "lr": 0.3}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    clip = partita.control.QKClip(model, threshold)
    losses, scores = [], []
    for _ in range(steps):
        word = torch.randint(SYMBOLS, (16, LENGTH), generator=generator)
        tokens = torch.cat([word, word], 1)
        logits = model(tokens[:, :-1])[:, LENGTH - 1 :].float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clip.step()
        losses.append(loss.item())
        scores.append(max(peak.max().item() for peak in clip.max_scores.values()))
    clip.detach()
    return losses, scores


def smooth(values: list[float], width: int = 10) -> list[float]:
    parts = [values[i : i + width] for i in range(0, len(values), width)]
    return [sum(part) / len(part) for part in parts]


def draw(runs: dict[str, tuple[list[float], list[float]]], path: str) -> None:
    from partita_theory.figure import Figure, Line, Panel, svg

    panels = []
    for which, label in enumerate(("loss", "largest score")):
        lines = [Line(name, [10.0 * i for i in range(len(smooth(run[which])))], smooth(run[which]))
                 for name, run in runs.items()]  # fmt: skip
        panels.append(Panel(label, "step", label, lines, log_y=which == 1))
    note = "one run each, means of ten steps; learning rate of the projections 0.3, threshold 20"
    with open(path, "w", encoding="utf-8") as out:
        out.write(svg(Figure("Does a run that blows up survive with QK-clip?", panels, note)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--figure", help="an SVG file to draw into")
    given = parser.parse_args()
    steps = 20 if given.quick else 300
    print(f"guessing: {math.log(SYMBOLS):.2f}   {steps} steps\n{'':<24}{'loss':>10}{'largest score':>16}")
    runs = {}
    for dtype in (torch.float32, torch.bfloat16):
        for threshold in (None, 20.0):
            name = f"{str(dtype).removeprefix('torch.')}, {'clipped' if threshold else 'plain'}"
            runs[name] = train(threshold, dtype, steps)
            loss, score = (smooth(values)[-1] for values in runs[name])
            print(f"{name:<24}{loss:>10.3f}{score:>16.1f}", flush=True)
    if given.figure:
        draw(runs, given.figure)


if __name__ == "__main__":
    main()
