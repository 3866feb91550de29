"""A policy's log-probabilities while it generates are those of one teacher-forced pass, to the bit.

partita's part is attention and the head. torch's `Linear` picks its kernel by the number of rows, so here the model's
own linear layers run row by row: what is promised is that equal hidden states give equal bits.
"""

from __future__ import annotations

import pytest
import torch

import partita
from partita import hf
from tests.hf.models import llama

transformers = pytest.importorskip("transformers", reason="pip install transformers to test it")


@pytest.fixture
def row_by_row(monkeypatch):
    plain = torch.nn.functional.linear

    def forward(self, x):
        rows = [plain(row[None], self.weight, self.bias) for row in x.reshape(-1, x.shape[-1])]
        return torch.cat(rows).reshape(*x.shape[:-1], -1)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)


def policy():
    hf.register()
    torch.manual_seed(0)
    model = llama().eval()
    model.set_attn_implementation("partita")
    return model


def generate(model, prompt, mask, steps, sampled):
    """Tokens, and their log p and entropy as each was decoded over the cache."""
    generator = torch.Generator().manual_seed(3)
    cache, given, tokens, found = None, prompt, prompt, []
    for _ in range(steps):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
        out = model.model(given, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        hidden, cache = out.last_hidden_state[:, -1], out.past_key_values
        p = partita.Gibbs(hidden, model.lm_head.weight)
        given = p.sample(generator)[:, None] if sampled else p.argmax()[:, None]
        stats = partita.token_stats(hidden, model.lm_head.weight, given[:, 0])
        found.append((stats.log_prob, stats.entropy))
        tokens, mask = torch.cat([tokens, given], 1), torch.cat([mask, torch.ones_like(given)], 1)
    return tokens, *(torch.stack(x, 1) for x in zip(*found, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_decoding_and_one_teacher_forced_pass(row_by_row, sampled):
    model, steps = policy(), 20
    prompt = torch.randint(3, 99, (2, 7))
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0  # padding on the left
    with partita.exact_rows():
        tokens, log_prob, entropy = generate(model, prompt, mask, steps, sampled)
        for row in range(2):  # each alone, without its padding, all at once
            own = tokens[row : row + 1, 3 * row :]
            hidden = model.model(own).last_hidden_state
            forced = partita.token_stats(hidden, model.lm_head.weight, own, shift=1)
            assert torch.equal(forced.log_prob[0, -steps:], log_prob[row])
            assert torch.equal(forced.entropy[0, -steps:], entropy[row])
