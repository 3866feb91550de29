"""torch.compile(fullgraph=True) of models that use the modules: compiles, matches, trains."""

from __future__ import annotations

import pytest
import torch

from partita import nn, scale


class Model(torch.nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(
            16, 4, 32, 0.0, batch_first=True, norm_first=True, scale=policy, kv_heads=2, rotary=True, qk_norm=True,
            sink=True,
        )  # fmt: skip
        self.head = torch.nn.Linear(16, 20)

    def forward(self, ids, padding):
        return self.head(self.layer(self.embed(ids), src_key_padding_mask=padding, is_causal=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["LogLength", "ScalableSoftmax"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
def test_a_model_compiles_whole_and_matches(policy, backend):
    torch.manual_seed(0)
    model = Model(scale.LogLength(reference=8) if policy == "LogLength" else scale.ScalableSoftmax(4))
    ids = torch.randint(20, (2, 11))
    padding = torch.arange(11) >= torch.tensor([11, 7])[:, None]
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(ids, padding)
        torch.nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
        results.append((out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
def test_statistics_and_dropout_inside_a_graph(backend):
    """Dropout inside a graph draws torch's own numbers; the statistics are those before it."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True, scale=scale.LogLength(reference=8)).train()
    x = torch.randn(2, 9, 16)

    def run(x):
        out, stats = layer(x, x, x, is_causal=True, return_stats=True)
        return out, stats.entropy

    dropped = torch.compile(run, fullgraph=True, backend=backend)
    out, entropy = dropped(x)
    torch.testing.assert_close(entropy, run(x)[1])
    assert not torch.equal(dropped(x)[0], out)
    out.sum().backward()
    assert layer.in_proj_weight.grad.isfinite().all()
