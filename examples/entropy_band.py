"""The run of qk_clip.py once more: entropy collapses, unless a controller holds each head's entropy in a band.

Run it with `python examples/entropy_band.py [--figure FILE.svg]`. The controller is a scale per head that is steered,
not trained: when the mean entropy of a head falls below a fifth of log n, its scale comes down until it is back.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from qk_clip import HEADS, LENGTH, SYMBOLS, Block, Model, smooth
from torch import Tensor

import partita
from partita.nn import TemperatureController


class SteeredBlock(Block):
    """The same block; its scale is a controller, or the usual one, and it remembers how sharp its heads were."""

    share: Tensor  # (HEADS,) mean H / log n

    def __init__(self, band: tuple[float, float] | None) -> None:
        super().__init__()
        self.control = None if band is None else TemperatureController(HEADS, fraction=band)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv)
        seen, stats = partita.attention(q, k, v, is_causal=True, scale=self.control, return_stats=True)
        if self.control is not None and self.training:
            self.control.observe(stats)
        ceiling = stats.visible[..., 1:].log()  # the first row has one key
        self.share = (stats.entropy[..., 1:] / ceiling).detach().mean((0, 2))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


def train(band: tuple[float, float] | None, steps: int) -> tuple[list[float], list[float]]:
    """The loss, and the mean over heads of H / log n, of each step."""
    torch.manual_seed(0)
    model, generator = Model(), torch.Generator().manual_seed(1)
    blocks = [SteeredBlock(band) for _ in model.blocks]
    for new, old in zip(blocks, model.blocks, strict=True):
        new.load_state_dict(old.state_dict(), strict=False)  # the same start
    model.blocks = torch.nn.ModuleList(blocks)
    fast = {name: p for name, p in model.named_parameters() if "qkv" in name}
    slow = [p for name, p in model.named_parameters() if name not in fast]
    groups = [{"params": slow, "lr": 0.01}, {"params": list(fast.values()), "lr": 0.3}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    losses, shares = [], []
    for _ in range(steps):
        word = torch.randint(SYMBOLS, (16, LENGTH), generator=generator)
        tokens = torch.cat([word, word], 1)
        logits = model(tokens[:, :-1])[:, LENGTH - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        shares.append(torch.stack([block.share for block in blocks]).mean().item())
    return losses, shares


def draw(runs: dict[str, tuple[list[float], list[float]]], path: str) -> None:
    from partita_theory.figure import Figure, Line, Panel, svg

    panels = []
    for which, label in enumerate(("loss", "H / log n")):
        curves = {name: smooth(run[which]) for name, run in runs.items()}
        lines = [Line(name, [10.0 * i for i in range(len(y))], y) for name, y in curves.items()]
        panels.append(Panel(label, "step", label, lines))
    note = "one run each, means of ten steps and of all heads; learning rate of the projections 0.3"
    with open(path, "w", encoding="utf-8") as out:
        out.write(svg(Figure("Does a run whose entropy collapses survive with a controller?", panels, note)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--figure", help="an SVG file to draw into")
    given = parser.parse_args()
    steps = 20 if given.quick else 300
    print(f"{steps} steps\n{'':<24}{'loss':>10}{'H / log n':>12}")
    runs = {}
    for name, band in (("plain", None), ("held above 0.2", (0.2, 1.0))):
        runs[name] = train(band, steps)
        loss, share = (smooth(values)[-1] for values in runs[name])
        print(f"{name:<24}{loss:>10.3f}{share:>12.4f}", flush=True)
    if given.figure:
        draw(runs, given.figure)


if __name__ == "__main__":
    main()
