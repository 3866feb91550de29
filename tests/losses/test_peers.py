"""Equal in value and gradient to the libraries people come from; each is optional."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from partita.adapters import metric_learning
from partita.adapters.sentence_transformers import MultipleNegativesRankingLoss
from partita.contrastive import nt_xent_loss, supcon_loss
from tests.losses.checks import assert_equal_with_gradients, leaf

INSTALL = "not installed: pip install sentence-transformers pytorch-metric-learning"


def peer(module: str):
    """The package, imported without its own warnings; skips with the way to get it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, reason=f"{module} is {INSTALL}")


class Table(nn.Module):
    """Stands for an encoder: gives each column its embeddings."""

    def forward(self, features):
        return {"sentence_embedding": features["x"]}


GTE = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


@pytest.mark.parametrize("columns", [2, 3, 5])
@pytest.mark.parametrize(
    ("directions", "mode"),
    [
        (("query_to_doc",), "joint"),
        (("query_to_doc", "doc_to_query"), "per_direction"),
        (("query_to_doc", "doc_to_query"), "joint"),
        (GTE, "joint"),
    ],
)
def test_sentence_transformers_ranking_loss(columns, directions, mode):
    losses = peer("sentence_transformers.sentence_transformer.losses")
    theirs = losses.MultipleNegativesRankingLoss(Table(), directions=directions, partition_mode=mode)
    ours = MultipleNegativesRankingLoss(Table(), directions=directions, partition_mode=mode)
    given = [leaf(7, 6) for _ in range(columns)]
    features = [{"x": x} for x in given]
    assert_equal_with_gradients(ours(features, None), theirs(features, None), given)
    assert ours.last_stats.entropy.shape == (7,)
    assert ours.get_config_dict()["scale"] == theirs.get_config_dict()["scale"]


def test_sentence_transformers_with_dot_products():
    losses = peer("sentence_transformers.sentence_transformer.losses")
    util = peer("sentence_transformers.util")
    given = [leaf(7, 6) for _ in range(3)]
    features = [{"x": x} for x in given]
    theirs = losses.MultipleNegativesRankingLoss(Table(), scale=1.0, similarity_fct=util.dot_score)
    ours = MultipleNegativesRankingLoss(Table(), scale=1.0, similarity="dot")
    assert_equal_with_gradients(ours(features, None), theirs(features, None), given)


LABELS = [
    torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]),  # two views each
    torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 9, 8]),  # uneven, two of them alone
]


@pytest.mark.parametrize("labels", LABELS, ids=["views", "uneven"])
@pytest.mark.parametrize("refs", [False, True])
def test_metric_learning_supcon(labels, refs):
    pml = peer("pytorch_metric_learning.losses")
    x, keys = leaf(12, 6), leaf(8, 6)
    given = {"ref_emb": keys, "ref_labels": torch.tensor([0, 0, 1, 2, 3, 3, 5, 7])} if refs else {}
    theirs = pml.SupConLoss()(x, labels, **given)
    leaves = (x, keys) if refs else (x,)
    assert_equal_with_gradients(metric_learning.SupConLoss()(x, labels, **given), theirs, leaves)
    assert_equal_with_gradients(supcon_loss(x, labels, **given), theirs, leaves)


@pytest.mark.parametrize("labels", LABELS, ids=["views", "uneven"])
@pytest.mark.parametrize("refs", [False, True])
def test_metric_learning_nt_xent(labels, refs):
    pml = peer("pytorch_metric_learning.losses")
    x, keys = leaf(12, 6), leaf(8, 6)
    given = {"ref_emb": keys, "ref_labels": torch.tensor([0, 0, 1, 2, 3, 3, 5, 7])} if refs else {}
    theirs = pml.NTXentLoss(temperature=0.2)(x, labels, **given)
    ours = metric_learning.NTXentLoss(temperature=0.2)(x, labels, **given)
    assert_equal_with_gradients(ours, theirs, (x, keys) if refs else (x,))


def test_metric_learning_on_two_views_is_nt_xent():
    pml = peer("pytorch_metric_learning.losses")
    a, b = leaf(6, 5), leaf(6, 5)
    labels = torch.arange(6).repeat(2)
    theirs = pml.NTXentLoss(temperature=0.5)(torch.cat([a, b]), labels)
    assert_equal_with_gradients(nt_xent_loss(a, b), theirs, (a, b))


def test_adapters_say_what_they_do_not_take():
    x, labels = leaf(4, 3), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="mined pairs"):
        metric_learning.SupConLoss()(x, labels, indices_tuple=(labels, labels, labels))
    with pytest.raises(ValueError, match="belong together"):
        metric_learning.NTXentLoss()(x, labels, ref_emb=x)
    with pytest.raises(ValueError, match="query_to_doc"):
        MultipleNegativesRankingLoss(Table(), directions=("doc_to_query",))
    with pytest.raises(ValueError, match="anchor and a positive"):
        MultipleNegativesRankingLoss(Table())([{"x": x}], None)
    assert metric_learning.NTXentLoss()(x, torch.arange(4)).item() == 0.0
