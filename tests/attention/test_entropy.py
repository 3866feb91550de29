"""The entropy penalty of attention layers: its value, its sign, its way into the loss (M-INF-5)."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import partita
from partita import nn
from partita.attn import entropy_penalty
from partita.errors import ValueRangeError
from partita.nn import entropy_loss


def penalty_by_hand(probs, keep, weight):
    """-mean of weight H / log n over rows with two keys or more, pair by pair."""
    total, rows = 0.0, 0
    for b in range(probs.shape[0]):
        for h in range(probs.shape[1]):
            for i in range(probs.shape[2]):
                p = probs[b, h, i][keep[i]]
                if len(p) >= 2:
                    total = total - weight[h] * torch.special.entr(p).sum() / torch.tensor(float(len(p))).log()
                    rows += 1
    return total / rows


def test_the_penalty_is_a_mean_of_normalised_entropies():
    q, k = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    weight = [0.3, -0.2, 0.0]
    stats = partita.Gibbs(q, k, support=partita.support.causal()).stats()
    got = entropy_penalty(stats, weight)
    want = penalty_by_hand((q @ k.mT).masked_fill(~keep, -torch.inf).softmax(-1), keep, weight)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(x, (q, k)) for x in (got, want)))
    alone = partita.Gibbs(q, k, support=partita.support.window(0, 0)).stats()  # no row has a choice
    assert entropy_penalty(alone, 1.0) == 0


@pytest.mark.parametrize(("weight", "grows"), [(5.0, True), (-5.0, False)])
def test_a_positive_weight_spreads_and_a_negative_one_sharpens(weight, grows):
    """Only the penalty is minimised: its sign decides where the entropy goes."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, attention_entropy_weight=weight)
    x = 2 * torch.randn(4, 9, 8)
    optimiser = torch.optim.SGD(layer.parameters(), 0.05)
    means = []
    for _ in range(6):
        _, stats = layer(x, x, x, return_stats=True)
        loss = entropy_loss(layer)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        means.append(stats.entropy.mean().item())
    assert (means[-1] > means[0]) == grows


def test_a_model_adds_up_its_layers():
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, attention_entropy_weight=0.1),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, attention_entropy_weight=[0.0, -0.3]),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
    )
    x, want = torch.randn(3, 7, 8), 0.0
    for layer, weight in zip(layers, (0.1, [0.0, -0.3], 0.0), strict=True):
        y = layer.norm1(x) if layer.norm_first else x
        want = want + entropy_penalty(layer.self_attn(y, y, y, return_stats=True)[1], weight)
        x = layer(x)
    torch.testing.assert_close(entropy_loss(layers), want)
    assert entropy_loss(layers) == 0  # picked up once
    assert layers[2].self_attn.entropy_loss is None
    layers.eval()
    layers(x)
    assert entropy_loss(layers) == 0  # nothing is laid aside where nothing is learned


def test_weights_may_be_a_tensor():
    x = torch.randn(2, 5, 8)
    for given in (torch.tensor([0.1, -0.2]), torch.tensor(0.1)):
        layer = nn.MultiheadAttention(8, 2, batch_first=True, attention_entropy_weight=given)
        _, stats = layer(x, x, x, return_stats=True)
        torch.testing.assert_close(entropy_loss(layer), entropy_penalty(stats, torch.as_tensor(given).tolist()))


def test_the_penalty_is_in_the_log(tmp_path):
    """A row of the losses for each step, as it was added to the loss; a tracker gets it too; nothing else changes."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, attention_entropy_weight=-0.3)
    x, added = torch.randn(3, 7, 8), []
    with partita.watch(layer) as seen:
        for step in range(3):
            seen.set_step(step)
            out = layer(x * (1 + step))
            penalty = entropy_loss(layer)
            (out.square().mean() + penalty).backward()
            added.append(penalty.item())
    rows = [row for row in seen.record.losses if row["name"] == "entropy_loss"]
    assert [row["step"] for row in rows] == [0, 1, 2] and {row["type"] for row in rows} == {"penalty"}
    assert [row["loss"] for row in rows] == pytest.approx(added, rel=1e-6)
    kept = tmp_path / "run.jsonl"
    seen.record.save(kept)
    assert [row["loss"] for row in partita.load_record(kept).losses] == pytest.approx(added, rel=1e-6)
    layer(x)
    assert entropy_loss(layer).requires_grad and len(rows) == 3  # unwatched, it is the number itself


def test_a_layer_that_has_run_can_be_copied_and_saved():
    layer = nn.EntropyInvariantAttention(8, 2, attention_entropy_weight=0.1)
    layer(torch.randn(1, 5, 8))
    assert layer.entropy_loss is not None
    assert copy.deepcopy(layer).entropy_loss is None
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    assert layer.entropy_loss is not None


def test_a_hugging_face_model_lays_it_aside():
    transformers = pytest.importorskip("transformers")
    name = partita.hf.register("partita_broad", attention_entropy_weight={1: [0.1, 0.2]})
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=30,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation=name,
    )  # fmt: skip
    model = transformers.BertModel(config).train()
    out = model(torch.arange(12).reshape(2, 6), output_attentions=True)
    want = entropy_penalty(out.attentions[1], [0.1, 0.2])
    got = entropy_loss(model)
    torch.testing.assert_close(got, want)
    got.backward()
    assert model.encoder.layer[1].attention.self.query.weight.grad.abs().sum() > 0
    assert entropy_loss(model) == 0


def test_a_weight_that_is_not_finite_is_refused():
    pytest.importorskip("transformers")
    with pytest.raises(ValueRangeError, match="attention_entropy_weight"):
        partita.hf.register("partita_wrong", attention_entropy_weight=float("inf"))
