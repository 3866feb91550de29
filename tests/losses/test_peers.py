"""Equal in value and gradient to the libraries people come from; each is optional."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import warnings

import pytest
import torch
from torch import nn

import partita
from partita.adapters import metric_learning, open_clip
from partita.adapters.sentence_transformers import MultipleNegativesRankingLoss
from partita.contrastive import nt_xent_loss, supcon_loss
from partita.errors import ValueRangeError
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


@pytest.mark.parametrize("columns", [2, 3, 5])
@pytest.mark.parametrize("mode", ["in_batch_negatives", "hard_negatives", "all_negatives"])
@pytest.mark.parametrize("directions", [("query_to_doc",), GTE])
def test_sentence_transformers_hardness(columns, mode, directions):
    losses = peer("sentence_transformers.sentence_transformer.losses")
    options = {"directions": directions, "hardness_mode": mode, "hardness_strength": 7.0}
    theirs = losses.MultipleNegativesRankingLoss(Table(), **options)
    ours = MultipleNegativesRankingLoss(Table(), **options)
    given = [leaf(7, 6) for _ in range(columns)]
    features = [{"x": x} for x in given]
    assert_equal_with_gradients(ours(features, None), theirs(features, None), given)


def test_sentence_transformers_arguments_are_all_there_in_the_same_order():
    losses, util = peer("sentence_transformers.sentence_transformer.losses"), peer("sentence_transformers.util")
    theirs = list(inspect.signature(losses.MultipleNegativesRankingLoss.__init__).parameters)
    mine = list(inspect.signature(MultipleNegativesRankingLoss.__init__).parameters)
    assert mine[: len(theirs)] == theirs
    given = (
        Table(),
        5.0,
        util.dot_score,
        False,
        ("query_to_doc", "doc_to_query"),
        "per_direction",
        "all_negatives",
        2.0,
    )
    one, other = losses.MultipleNegativesRankingLoss(*given), MultipleNegativesRankingLoss(*given)
    assert one.get_config_dict() == other.get_config_dict() and one.temperature == other.temperature
    with pytest.raises(ValueRangeError, match="make a matrix that this loss does without"):
        MultipleNegativesRankingLoss(Table(), similarity_fct=util.euclidean_sim)
    with pytest.raises(ValueRangeError, match="hardness_mode must be None or one of"):
        MultipleNegativesRankingLoss(Table(), hardness_mode="all")


class Sentences(nn.Sequential):
    """A model whose dropout differs from call to call: what is embedded a second time must be what was embedded."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6, dtype=torch.float64), nn.Dropout(0.3))

    def forward(self, features):
        return {"sentence_embedding": super().forward(features["input_ids"])}


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mini_batch_size": 3, "directions": GTE, "scale": 5.0},
        {"mini_batch_size": 2, "directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
        {"mini_batch_size": 4, "hardness_mode": "all_negatives", "hardness_strength": 3.0},
        {"mini_batch_num_tokens": 12},
    ],
)
def test_sentence_transformers_cached(columns, options):
    losses = peer("sentence_transformers.sentence_transformer.losses")
    from partita.adapters.sentence_transformers import CachedMultipleNegativesRankingLoss

    model = Sentences()
    features = [
        {"input_ids": torch.randn(7, 6, dtype=torch.float64), "attention_mask": torch.ones(7, 6).long()}
        for _ in range(columns)
    ]
    found = []
    for kind in (CachedMultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss):
        torch.manual_seed(3)
        loss = kind(model, **options)
        out = loss(features, None)
        model.zero_grad()
        (2 * out).backward()  # a scaler, or accumulation, reaches every mini-batch
        found.append((out.detach(), *(p.grad.clone() for p in model.parameters())))
        with torch.no_grad():
            torch.manual_seed(3)
            torch.testing.assert_close(loss(features, None), out.detach())
        assert loss.get_config_dict()["mini_batch_size"] == options.get("mini_batch_size", 32)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    mine, theirs = (
        inspect.signature(kind.__init__)
        for kind in (CachedMultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss)
    )
    assert mine == theirs


def test_sentence_transformers_cached_keeps_statistics_and_its_settings():
    util = peer("sentence_transformers.util")
    from partita.adapters.sentence_transformers import CachedMultipleNegativesRankingLoss

    loss = CachedMultipleNegativesRankingLoss(Sentences(), mini_batch_size=2)
    features = [{"input_ids": torch.randn(5, 6, dtype=torch.float64)} for _ in range(2)]
    loss(features, None)
    assert loss.last_stats.entropy.shape == (5,)
    loss.scale = 1.0  # goes on to the loss that computes
    assert loss.loss.scale == 1.0 and loss.temperature == 1.0
    with pytest.raises(ValueRangeError, match="make a matrix that this loss does without"):
        CachedMultipleNegativesRankingLoss(Sentences(), similarity_fct=util.euclidean_sim)


def open_clip_losses():
    """open_clip's file of losses alone: the package itself wants torchvision."""
    try:
        files = importlib.metadata.files("open_clip_torch") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("open_clip_torch is not installed: pip install --no-deps open_clip_torch")
    path = next(f.locate() for f in files if str(f) == "open_clip/loss.py")
    spec = importlib.util.spec_from_file_location("open_clip_loss", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["ClipLoss", "SigLipLoss"])
@pytest.mark.parametrize("bias", [None, -3.0])
def test_open_clip(kind, bias):
    theirs = getattr(open_clip_losses(), kind)
    mine = getattr(open_clip, kind)
    for one, other in ((theirs.__init__, mine.__init__), (theirs.forward, mine.forward)):
        assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters)
    image, text, scale = leaf(7, 6), leaf(7, 6), torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    shift = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    given = (image, text, scale, shift)
    ours, peers = (made(*given, output_dict=True) for made in (mine(), theirs()))
    assert ours.keys() == peers.keys()
    assert_equal_with_gradients(ours["contrastive_loss"], peers["contrastive_loss"], (image, text, scale))
    torch.testing.assert_close(mine()(*given), ours["contrastive_loss"])


def test_open_clip_refuses_what_it_would_do_differently():
    with pytest.raises(ValueRangeError, match="gather_with_grad=True"):
        open_clip.ClipLoss(world_size=2)
    with pytest.raises(ValueRangeError, match="horovod"):
        open_clip.ClipLoss(use_horovod=True)
    with pytest.raises(ValueRangeError, match="dist_impl must be None or one of bidir"):
        open_clip.SigLipLoss(world_size=2, dist_impl="ring")


def test_contrast_statistics_carry_the_information_bound_and_its_cap():
    x, y = leaf(9, 4), leaf(9, 4)
    loss, stats = partita.info_nce_loss(x, y, return_stats=True)
    bound = partita.mutual_information_bound(loss.detach(), 9)
    torch.testing.assert_close(stats.information_bound, bound.value)
    torch.testing.assert_close(stats.information_cap, bound.cap)


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


MINERS = {
    "triplets": lambda miners: miners.TripletMarginMiner(margin=0.5),
    "pairs": lambda miners: miners.MultiSimilarityMiner(epsilon=0.3),
    "hardest": lambda miners: miners.BatchHardMiner(),
    "easy and hard": lambda miners: miners.BatchEasyHardMiner(),
}


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("refs", [False, True])
def test_metric_learning_mined_tuples(name, miner, refs):
    pml, miners = peer("pytorch_metric_learning.losses"), peer("pytorch_metric_learning.miners")
    x, keys, labels = leaf(12, 6), leaf(8, 6), LABELS[1]
    given = {"ref_emb": keys, "ref_labels": torch.tensor([0, 0, 1, 2, 3, 3, 5, 7])} if refs else {}
    tuples = MINERS[miner](miners)(x, labels, **given)
    assert len(tuples[0])
    theirs = getattr(pml, name)(temperature=0.2)(x, labels, tuples, **given)
    ours = getattr(metric_learning, name)(temperature=0.2)(x, labels, tuples, **given)
    assert_equal_with_gradients(ours, theirs, (x, keys) if refs else (x,))


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
def test_metric_learning_mined_lists_of_their_own(name, monkeypatch):
    """Pairs that come twice, an anchor with a positive alone, no labels at all, nothing mined; in blocks too."""
    pml = peer("pytorch_metric_learning.losses")
    ours, theirs = getattr(metric_learning, name)(), getattr(pml, name)()
    x = leaf(6, 5)
    tuples = tuple(torch.tensor(t) for t in ([0, 0, 1, 4, 5], [1, 1, 0, 3, 2], [0, 0, 1, 2], [2, 2, 3, 5]))
    assert_equal_with_gradients(ours(x, None, tuples), theirs(x, None, tuples), (x,))
    monkeypatch.setattr("partita.rows._SMALL", 0)
    monkeypatch.setattr("partita.rows._AT_ONCE", 10)
    assert_equal_with_gradients(ours(x, None, tuples), theirs(x, None, tuples), (x,))
    none = (torch.tensor([], dtype=torch.int64),) * 4
    assert ours(x, None, none).item() == 0.0
    with pytest.raises(ValueError, match="anchors below 6 and partners below 6"):
        ours(x, None, (tuples[0], tuples[1] + 4, *tuples[2:]))
    with pytest.raises(ValueError, match="what a miner gives"):
        ours(x, None, tuples[:2])
    with pytest.raises(ValueError, match="without labels, give mined tuples"):
        ours(x)


def test_adapters_say_what_they_do_not_take():
    x, labels = leaf(4, 3), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="belong together"):
        metric_learning.NTXentLoss()(x, labels, ref_emb=x)
    with pytest.raises(ValueError, match="query_to_doc"):
        MultipleNegativesRankingLoss(Table(), directions=("doc_to_query",))
    with pytest.raises(ValueError, match="anchor and a positive"):
        MultipleNegativesRankingLoss(Table())([{"x": x}], None)
    assert metric_learning.NTXentLoss()(x, torch.arange(4)).item() == 0.0
