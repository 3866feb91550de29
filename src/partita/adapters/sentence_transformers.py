"""A loss for sentence_transformers: columns of features in, one number out, no matrix of similarities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import logsigmoid, normalize

from partita import support
from partita._checks import check_positive
from partita._torch_function import overridable
from partita.contrastive import ContrastStats, joint_loss
from partita.contrastive.candidates import Anchors, Bank, PartialScore
from partita.contrastive.readout import readout
from partita.engine import State, Stats
from partita.errors import ShapeError, ValueRangeError
from partita.score import Score

__all__ = ["CachedMultipleNegativesRankingLoss", "MultipleNegativesRankingLoss", "ranking_loss"]

_HARDNESS = ("in_batch_negatives", "hard_negatives", "all_negatives")
_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


class MultipleNegativesRankingLoss(nn.Module):
    """Drop-in for ``sentence_transformers``' loss of the same name: same value, same gradient, O(n) memory.

        loss_i = -log( exp(scale * cos(q_i, d_i)) / sum over all documents of the batch, hard negatives included )

    forward takes ``(sentence_features, labels)``: columns anchor, positive, negative_1, ...; `model(features)` must
    give a dictionary with "sentence_embedding". The last batch's statistics are kept in `last_stats` (`partita.Stats`).

    similarity_fct: `util.cos_sim` or `util.dot_score` of that package ("cos", "dot"), which every backend serves; or a
        function (n, dim), (m, dim) -> (n, m) of pairs, called with a tile of each at a time. The parameters of a module
        get their gradients.
    gather_across_devices: candidates of all ranks; each rank gives the loss of its own anchors, as there.
    directions, partition_mode: as there; "joint" is one partition function over all of them, merged from states.
    hardness_mode, hardness_strength: as there; a weight exp(strength * similarity), without gradient, on the negatives
        of other anchors, on the anchor's own hard ones, or on all.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[[Tensor, Tensor], Tensor] = "cos",
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        similarity: str | None = None,
    ):
        super().__init__()
        check_positive("scale", scale)
        check_positive("hardness_strength", hardness_strength, zero=True)
        if partition_mode not in ("joint", "per_direction"):
            raise ValueRangeError(f"partition_mode must be 'joint' or 'per_direction'; got {partition_mode!r}.")
        unknown = [name for name in directions if name not in _DIRECTIONS]
        if unknown or "query_to_doc" not in directions:
            raise ValueRangeError(
                f"directions must include 'query_to_doc' and be among {_DIRECTIONS}; got {directions}."
            )
        if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
            raise ValueRangeError("per_direction needs the positive in every direction; same-side ones have none.")
        if hardness_mode not in (None, *_HARDNESS):
            raise ValueRangeError(f"hardness_mode must be None or one of {_HARDNESS}; got {hardness_mode!r}.")
        self.model, self.scale = model, scale
        self.similarity_fct = similarity_fct if similarity is None else similarity
        _similarity(self.similarity_fct)
        self.gather_across_devices = gather_across_devices
        self.directions, self.partition_mode = tuple(directions), partition_mode
        self.hardness_mode, self.hardness_strength = hardness_mode, hardness_strength
        self.last_stats: Any = None

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        columns = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(columns, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of columns that are embedded already."""
        if len(embeddings) < 2:
            raise ShapeError(f"the loss needs an anchor and a positive column; got {len(embeddings)} column(s).")
        similarity = self.similarity
        unit = [normalize(x, dim=-1) for x in embeddings] if similarity == "cos" else embeddings

        def remember(stats: Stats) -> None:
            self.last_stats = type(stats)(*(x.detach() for x in stats))

        loss = ranking_loss(
            unit[0], unit[1:], self.scale, self.directions, joint=self.partition_mode == "joint", remember=remember,
            others=[_others(x) for x in unit] if self.gather_across_devices else None,
            hardness=(self.hardness_mode, self.hardness_strength),
            score=None if isinstance(similarity, str) else similarity,
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        return loss.to(embeddings[0].dtype)

    def get_config_dict(self) -> dict[str, Any]:
        after = ("gather_across_devices", "directions", "partition_mode", "hardness_mode", "hardness_strength")
        named = {"scale": self.scale, "similarity_fct": _name(self.similarity)}
        return named | {name: getattr(self, name) for name in after}

    @property
    def similarity(self) -> str | Score:
        """ "cos" or "dot", or the function itself."""
        return _similarity(self.similarity_fct)

    @property
    def temperature(self) -> float:
        return 1.0 / self.scale


if TYPE_CHECKING:
    CachedMultipleNegativesRankingLoss: Any


def __getattr__(name: str) -> Any:
    if name == "CachedMultipleNegativesRankingLoss":
        return _cached()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _cached() -> type[nn.Module]:
    """Made at first use: how batches are cut, embedded and embedded again is the library's own, and it alone
    knows its models; the loss in between is ours."""
    from sentence_transformers.sentence_transformer import losses

    class CachedMultipleNegativesRankingLoss(losses.CachedMultipleNegativesRankingLoss):  # type: ignore[misc]
        """Drop-in for ``sentence_transformers``' loss of the same name (GradCache): batches beyond memory, and no
        matrix of similarities for them, not even a few rows of it.

            embed in mini-batches without a graph; the loss and its gradient of all embeddings; embed again with it
        """

        @functools.wraps(losses.CachedMultipleNegativesRankingLoss.__init__)  # type: ignore[misc]
        def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
            super().__init__(model, *args, **options)
            theirs: Any = self.loss  # type: ignore[has-type]
            given = theirs.get_config_dict() | {"similarity_fct": theirs.similarity_fct}
            self.loss = MultipleNegativesRankingLoss(model, **given)

        def calculate_loss(
            self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
        ) -> Tensor:
            loss = self.loss.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels)
            if with_backward:
                loss.backward()
                loss = loss.detach()
            return loss

        @property
        def last_stats(self) -> Any:
            """`partita.Stats` of the last batch."""
            return self.loss.last_stats

    made: type[nn.Module] = CachedMultipleNegativesRankingLoss
    made.__module__, made.__qualname__ = __name__, made.__name__
    return made


def _similarity(given: object) -> str | Score:
    known = {"cos": "cos", "dot": "dot", "cos_sim": "cos", "dot_score": "dot"}
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    if name in known:
        return known[name]
    if isinstance(given, str) or not callable(given):
        raise ValueRangeError(
            f"similarity must be 'cos' or 'dot' (cos_sim or dot_score of sentence_transformers.util), or a function "
            f"(n, dim), (m, dim) -> (n, m); got {given!r}."
        )
    return given


def _name(similarity: str | Score) -> str:
    if isinstance(similarity, str):
        return {"cos": "cos_sim", "dot": "dot_score"}[similarity]
    from sentence_transformers.util import similarity_fct_name

    return str(similarity_fct_name(similarity))


def _others(own: Tensor) -> Tensor:  # (rows of the other ranks, dim)
    """The same column on the other ranks, with gradients."""
    from sentence_transformers.util.distributed import all_gather_with_grad

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return own[:0]
    parts = list(all_gather_with_grad(own).chunk(dist.get_world_size()))
    del parts[dist.get_rank()]
    return torch.cat(parts)


@overridable
def ranking_loss(
    query: Tensor,  # (n, dim)
    docs: Sequence[Tensor],  # (n, dim) each: the positives, then columns of negatives
    scale: float,
    directions: Sequence[str] = ("query_to_doc",),
    *,
    joint: bool = True,
    remember: Callable[[Stats], None] | None = None,
    others: Sequence[Tensor] | None = None,  # (m, dim) each: queries and columns of other ranks
    hardness: tuple[str | None, float] = (None, 0.0),
    score: Score | None = None,  # instead of the inner product
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Stats]:
    """What the module above computes, of vectors as they are.

    remember: called with the `Stats` of the first direction, which the loss knows anyway.
    return_stats: also a `ContrastStats` of the queries among all documents, which takes passes of its own.
    """
    queries, *columns = (query, *docs) if others is None else map(torch.cat, zip((query, *docs), others, strict=True))
    anchors, states = Anchors(query, scale, score=score), []
    back = anchors.turned(docs[0])
    for direction in ("query_to_doc", *(name for name in directions if name != "query_to_doc")):
        if direction == "query_to_doc" and (hardness[0] is None or hardness[1] == 0.0):
            state = anchors.state([Bank(torch.cat(columns))])
        elif direction == "query_to_doc":
            state = _hardness_weighted(anchors, docs, columns, hardness)
        elif direction == "query_to_query":
            state = anchors.state([Bank(queries, support.not_self())])
        elif direction == "doc_to_query":
            state = back.state([Bank(queries)])
        else:  # documents of the row's own query are no negatives: one left out of each column
            state = back.state([Bank(x, support.not_self()) for x in columns])
        states.append(state)
    positive = scale * anchors.positive(docs[0])
    if remember is not None:
        remember(states[0].stats())
    each = [joint_loss(positive, *states)] if joint else [joint_loss(positive, state) for state in states]
    loss = torch.stack(each).mean()
    return (loss, _read(states[0], anchors, docs[0], columns, positive)) if return_stats else loss


def _hardness_weighted(
    anchors: Anchors, own: Sequence[Tensor], columns: Sequence[Tensor], hardness: tuple[str | None, float]
) -> State:
    """The row's positive as it is; its hard negatives and all other documents with or without a weight."""

    def weighted(weight: float) -> Anchors:
        if anchors.score is None:
            return replace(anchors, hardness=weight)
        whole = anchors.scale + weight
        return replace(anchors, scale=whole, score=PartialScore(anchors.score, share=float(anchors.scale / whole)))

    mode, strength = hardness
    of_others, hard = (weighted(strength if mode in (name, "all_negatives") else 0.0) for name in _HARDNESS[:2])
    whole = anchors.state([Bank(own[0][:, None])])
    whole = whole.merge(of_others.state([Bank(x, support.not_self()) for x in columns]))
    return whole.merge(hard.state([Bank(torch.stack(list(own[1:]), 1))])) if len(own) > 1 else whole


@torch.no_grad()
def _read(whole: State, anchors: Anchors, doc: Tensor, columns: Sequence[Tensor], own: Tensor) -> ContrastStats:
    """The queries among all documents: those of others, and every column of negatives."""
    banks = [Bank(columns[0], support.not_self()), *(Bank(column) for column in columns[1:])]
    negatives = anchors.state(banks)
    nll = -logsigmoid(own - negatives.log_partition())
    return readout(anchors, doc, banks, whole, negatives, nll, [anchors.positive(doc)])
