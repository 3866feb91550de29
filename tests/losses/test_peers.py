"""Equal in value and gradient to the libraries people come from; each is optional."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import warnings

import pytest
import torch
from torch import nn

import partita
from partita.adapters import metric_learning, open_clip
from partita.adapters.sentence_transformers import MultipleNegativesRankingLoss, ranking_loss
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


BOTH = {"directions": GTE[::2]}
RANKINGS = [
    {},
    BOTH | {"partition_mode": "per_direction"},
    BOTH,
    {"directions": GTE},
    *(
        {"directions": directions, "hardness_mode": mode, "hardness_strength": 7.0}
        for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
        for directions in (GTE[:1], GTE)
    ),
    {"scale": 1.0, "similarity_fct": "dot_score"},
]


@pytest.mark.parametrize("columns", [2, 3, 5])
@pytest.mark.parametrize("options", RANKINGS, ids=str)
def test_sentence_transformers_ranking_loss(columns, options):
    losses, util = peer("sentence_transformers.sentence_transformer.losses"), peer("sentence_transformers.util")
    if "similarity_fct" in options:
        options = options | {"similarity_fct": util.dot_score}
    theirs, ours = (
        kind(Table(), **options) for kind in (losses.MultipleNegativesRankingLoss, MultipleNegativesRankingLoss)
    )
    given = [leaf(7, 6) for _ in range(columns)]
    features = [{"x": x} for x in given]
    assert_equal_with_gradients(ours(features, None), theirs(features, None), given)
    assert ours.last_stats.entropy.shape == (7,)
    assert ours.get_config_dict() == theirs.get_config_dict()


class Bilinear(nn.Module):
    """A similarity with a parameter that is not symmetric: an exchange of its arguments shows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, a, b):
        return a @ self.weight.to(a.dtype) @ b.T


SIMILARITIES = {
    "partial": lambda util: functools.partial(util.cos_sim),
    "euclidean": lambda util: util.euclidean_sim,
    "manhattan": lambda util: util.manhattan_sim,
    "learned": lambda util: Bilinear(),
}
SETTINGS = {
    "plain": {},
    "both ways": BOTH | {"partition_mode": "per_direction"},
    "all directions": {"directions": GTE},
    **{
        mode: {"directions": GTE, "hardness_mode": mode, "hardness_strength": 0.5}
        for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
    },
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_sentence_transformers_with_any_similarity(similarity, settings):
    """Of a tile at a time, in value, gradient and description; a module's parameters get theirs."""
    losses, util = peer("sentence_transformers.sentence_transformer.losses"), peer("sentence_transformers.util")
    score = SIMILARITIES[similarity](util)
    kinds = (MultipleNegativesRankingLoss, losses.MultipleNegativesRankingLoss)
    given = [leaf(37, 6) for _ in range(3)]
    features = [{"x": x} for x in given]
    ours, theirs = (kind(Table(), scale=2.0, similarity_fct=score, **SETTINGS[settings]) for kind in kinds)
    own = list(score.parameters()) if isinstance(score, nn.Module) else []
    assert_equal_with_gradients(ours(features, None), theirs(features, None), [*given, *own])
    assert ours.get_config_dict() == theirs.get_config_dict()


@pytest.mark.parametrize("columns", [2, 3])
def test_statistics_of_a_ranking_are_the_same_by_either_way(columns):
    """The inner product as a function must be read as the inner product is: ranks, moments and all."""
    query, *docs = (leaf(9, 6) for _ in range(columns))
    plain, stats = ranking_loss(query, docs, 3.0, return_stats=True)
    other, read = ranking_loss(query, docs, 3.0, score=lambda a, b: a @ b.T, return_stats=True)
    torch.testing.assert_close(other, plain)
    for name, a, b in zip(stats._fields, read, stats, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


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
    for bad in ("euclidean", 3):
        with pytest.raises(ValueRangeError, match="similarity must be 'cos' or 'dot'"):
            MultipleNegativesRankingLoss(Table(), similarity_fct=bad)
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
        {"mini_batch_size": 3, "similarity_fct": "partial"},
    ],
)
def test_sentence_transformers_cached(columns, options):
    losses = peer("sentence_transformers.sentence_transformer.losses")
    if "similarity_fct" in options:
        options = options | {"similarity_fct": SIMILARITIES["partial"](peer("sentence_transformers.util"))}
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
        assert loss.get_config_dict()["similarity_fct"] == "cos_sim"
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    mine, theirs = (
        inspect.signature(kind.__init__)
        for kind in (CachedMultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss)
    )
    assert mine == theirs


def test_sentence_transformers_cached_keeps_statistics_and_its_settings():
    peer("sentence_transformers.util")
    from partita.adapters.sentence_transformers import CachedMultipleNegativesRankingLoss

    loss = CachedMultipleNegativesRankingLoss(Sentences(), mini_batch_size=2)
    features = [{"input_ids": torch.randn(5, 6, dtype=torch.float64)} for _ in range(2)]
    loss(features, None)
    assert loss.last_stats.entropy.shape == (5,)
    loss.scale = 1.0  # goes on to the loss that computes
    assert loss.loss.scale == 1.0 and loss.temperature == 1.0
    loss.similarity_fct = similarity = nn.CosineSimilarity(dim=-1)  # a module, and one without a name
    assert loss.similarity_fct is similarity and loss.loss.similarity_fct is similarity
    assert loss.get_config_dict()["similarity_fct"] == "CosineSimilarity"
    with pytest.raises(ValueRangeError, match="similarity must be 'cos' or 'dot'"):
        CachedMultipleNegativesRankingLoss(Sentences(), similarity_fct="euclidean")


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


MINERS = {
    "nothing": lambda miners: None,
    "triplets": lambda miners: miners.TripletMarginMiner(margin=0.5),
    "pairs": lambda miners: miners.MultiSimilarityMiner(epsilon=0.3),
    "hardest": lambda miners: miners.BatchHardMiner(),
    "easy and hard": lambda miners: miners.BatchEasyHardMiner(),
}
REFS = torch.tensor([0, 0, 1, 2, 3, 3, 5, 7])


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
@pytest.mark.parametrize(("labels", "miner"), [(0, "nothing"), *((1, miner) for miner in MINERS)])
@pytest.mark.parametrize("refs", [False, True])
def test_metric_learning(name, labels, miner, refs):
    """Of labels and of mined tuples, by the module and, where it is the same, by the function."""
    pml, miners = peer("pytorch_metric_learning.losses"), peer("pytorch_metric_learning.miners")
    x, keys, labels = leaf(12, 6), leaf(8, 6), LABELS[labels]
    given, leaves = ({"ref_emb": keys, "ref_labels": REFS}, (x, keys)) if refs else ({}, (x,))
    mine = MINERS[miner](miners)
    tuples = None if mine is None else mine(x, labels, **given)
    assert tuples is None or len(tuples[0])
    temperature = 0.1 if name == "SupConLoss" else 0.2
    ours, theirs = (
        getattr(m, name)(temperature=temperature)(x, labels, tuples, **given) for m in (metric_learning, pml)
    )
    assert_equal_with_gradients(ours, theirs, leaves)
    if name == "SupConLoss" and tuples is None:
        assert_equal_with_gradients(supcon_loss(x, labels, **given), theirs, leaves)


DISTANCES = {
    "cosine": lambda d: d.CosineSimilarity(),
    "squared cosine": lambda d: d.CosineSimilarity(power=2),
    "product": lambda d: d.DotProductSimilarity(normalize_embeddings=False),
    "euclidean": lambda d: d.LpDistance(),
    "euclidean as given": lambda d: d.LpDistance(normalize_embeddings=False),
    "squared": lambda d: d.LpDistance(power=2),
    "manhattan": lambda d: d.LpDistance(p=1),
}
REDUCERS = {
    "own": lambda r: None,
    "mean": lambda r: r.MeanReducer(),
    "sum": lambda r: r.SumReducer(),
    "not zero": lambda r: r.AvgNonZeroReducer(),
    "anchor": lambda r: r.PerAnchorReducer(r.AvgNonZeroReducer()),
    "none": lambda r: r.DoNothingReducer(),
}


def losses_alone(found):
    """What DoNothingReducer gives: the losses one by one, in an order of their indices."""
    if isinstance(found, torch.Tensor):
        return found
    ((_, found),) = found.items()
    index = found["indices"]
    if isinstance(index, tuple):
        index = index[0] * 1000 + index[1]
    return found["losses"][index.argsort()]


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
@pytest.mark.parametrize(
    ("distance", "reducer"), [*((d, "own") for d in DISTANCES), *(("euclidean", r) for r in REDUCERS if r != "own")]
)
@pytest.mark.parametrize("use", ["labels", "refs", "mined"])
def test_metric_learning_distances_and_reducers(name, distance, reducer, use):
    pml, distances, reducers = (peer(f"pytorch_metric_learning.{x}") for x in ("losses", "distances", "reducers"))
    x, keys, labels = leaf(12, 6), leaf(8, 6), LABELS[1]
    given, leaves = {}, (x,)
    if use == "refs":
        given, leaves = {"ref_emb": keys, "ref_labels": REFS}, (x, keys)
    elif use == "mined":
        given = {"indices_tuple": peer("pytorch_metric_learning.miners").MultiSimilarityMiner(epsilon=0.3)(x, labels)}
    options = {"temperature": 0.5, "distance": DISTANCES[distance](distances), "reducer": REDUCERS[reducer](reducers)}
    ours, theirs = (losses_alone(getattr(m, name)(**options)(x, labels, **given)) for m in (metric_learning, pml))
    assert_equal_with_gradients(ours, theirs, leaves)


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
@pytest.mark.parametrize("distance", [None, "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_metric_learning_with_nothing_to_compare_is_zero(name, distance, dtype):
    """Labels all equal, all different, one vector, one pair of each kind: all labels of up to three vectors, with
    references and without. Where there is a loss it is theirs."""
    pml, distances = peer("pytorch_metric_learning.losses"), peer("pytorch_metric_learning.distances")
    options = {"temperature": 0.5} | ({"distance": distances.LpDistance()} if distance else {})
    ours, theirs = (getattr(m, name)(**options) for m in (metric_learning, pml))
    near = 30 * torch.finfo(dtype).eps
    for n in (1, 2, 3):
        for labels in map(torch.tensor, itertools.product(range(3), repeat=n)):
            x = torch.randn(n, 3).to(dtype).requires_grad_()
            refs = {"ref_emb": torch.randn(2, 3).to(dtype), "ref_labels": torch.tensor([0, 1])}
            for given in ({}, refs):
                a, b = ours(x, labels, **given), theirs(x, labels, **given)
                torch.testing.assert_close(a, b, rtol=near, atol=near)
                assert b != 0 or a == 0, f"{labels}, {given}"
                assert a.requires_grad and torch.autograd.grad(a, x)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sole_positive_that_holds_everything_has_no_loss(dtype):
    """Nor has it a place in the mean of the package, which counts the losses above 0."""
    pml = peer("pytorch_metric_learning.losses")
    far = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.1], [-1.0, -0.1], [-1.0, 0.3]], dtype=dtype)
    x, labels = (far + 1e-3 * torch.randn(5, 2, dtype=dtype)).requires_grad_(), torch.tensor([0, 0, 1, 1, 2])
    near = 1e-10 if dtype == torch.float64 else 1e-5
    ours, theirs = (m.SupConLoss(temperature=0.02)(x, labels) for m in (metric_learning, pml))
    torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
    rows = supcon_loss(x, labels, temperature=0.02, reduction="none")
    assert (rows[[0, 1, 4]] == 0).all() and (rows[2:4] > 0).all()


def test_metric_learning_on_two_views_is_nt_xent():
    pml = peer("pytorch_metric_learning.losses")
    a, b = leaf(6, 5), leaf(6, 5)
    labels = torch.arange(6).repeat(2)
    theirs = pml.NTXentLoss(temperature=0.5)(torch.cat([a, b]), labels)
    assert_equal_with_gradients(nt_xent_loss(a, b), theirs, (a, b))


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
def test_metric_learning_mined_lists_of_their_own(name, monkeypatch):
    """Pairs that come twice, an anchor with a positive alone, no labels at all, nothing mined; in blocks too."""
    pml = peer("pytorch_metric_learning.losses")
    ours, theirs = getattr(metric_learning, name)(), getattr(pml, name)()
    x = leaf(6, 5)
    tuples = tuple(torch.tensor(t) for t in ([0, 0, 1, 4, 5], [1, 1, 0, 3, 2], [0, 0, 1, 2], [2, 2, 3, 5]))
    assert_equal_with_gradients(ours(x, None, tuples), theirs(x, None, tuples), (x,))
    monkeypatch.setattr("partita.recompute._SMALL", 0)
    monkeypatch.setattr("partita.recompute._NUMBERS", 10)
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
