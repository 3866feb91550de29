"""A loss for sentence_transformers: columns of features in, one number out, no matrix of similarities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from partita import support
from partita._checks import check_positive
from partita._overrides import overridable
from partita.contrastive import ContrastStats, joint_loss
from partita.contrastive.candidates import Bank, positive_score
from partita.contrastive.readout import above, readout, similarity_moments
from partita.engine import State, Stats
from partita.errors import ShapeError, ValueRangeError

__all__ = ["MultipleNegativesRankingLoss", "ranking_loss"]

_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


class MultipleNegativesRankingLoss(nn.Module):
    """Drop-in for ``sentence_transformers``' loss of the same name: same value, same gradient, O(n) memory.

        loss_i = -log( exp(scale * cos(q_i, d_i)) / sum over all documents of the batch, hard negatives included )

    forward takes ``(sentence_features, labels)``: columns anchor, positive, negative_1, ...; `model(features)` must
    give a dictionary with "sentence_embedding". The last batch's statistics are kept in `last_stats` (`partita.Stats`).

    similarity: "cos" or "dot".
    directions, partition_mode: as there; "joint" is one partition function over all of them, merged from states.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity: str = "cos",
        *,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
    ):
        super().__init__()
        check_positive("scale", scale)
        if similarity not in ("cos", "dot"):
            raise ValueRangeError(f"similarity must be 'cos' or 'dot'; got {similarity!r}.")
        if partition_mode not in ("joint", "per_direction"):
            raise ValueRangeError(f"partition_mode must be 'joint' or 'per_direction'; got {partition_mode!r}.")
        unknown = [name for name in directions if name not in _DIRECTIONS]
        if unknown or "query_to_doc" not in directions:
            raise ValueRangeError(
                f"directions must include 'query_to_doc' and be among {_DIRECTIONS}; got {directions}."
            )
        if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
            raise ValueRangeError("per_direction needs the positive in every direction; same-side ones have none.")
        self.model, self.scale, self.similarity = model, scale, similarity
        self.directions, self.partition_mode = tuple(directions), partition_mode
        self.last_stats: Any = None

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        columns = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(columns, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of columns that are embedded already."""
        if len(embeddings) < 2:
            raise ShapeError(f"the loss needs an anchor and a positive column; got {len(embeddings)} column(s).")
        unit = [normalize(x, dim=-1) for x in embeddings] if self.similarity == "cos" else embeddings

        def remember(stats: Stats) -> None:
            self.last_stats = type(stats)(*(x.detach() for x in stats))

        loss = ranking_loss(
            unit[0], unit[1:], self.scale, self.directions, joint=self.partition_mode == "joint", remember=remember
        )
        assert isinstance(loss, Tensor)
        return loss.to(embeddings[0].dtype)

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "similarity": self.similarity,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
        }

    @property
    def temperature(self) -> float:
        return 1.0 / self.scale


@overridable
def ranking_loss(
    query: Tensor,  # (n, dim)
    docs: Sequence[Tensor],  # (n, dim) each: the positives, then columns of negatives
    scale: float,
    directions: Sequence[str] = ("query_to_doc",),
    *,
    joint: bool = True,
    remember: Callable[[Stats], None] | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Stats]:
    """What the module above computes, of vectors as they are.

    remember: called with the `Stats` of the first direction, which the loss knows anyway.
    return_stats: also a `ContrastStats` of the queries among all documents, which takes passes of its own.
    """
    states = _states(query, list(docs), scale, directions)
    score = positive_score(query, docs[0], scale)
    if remember is not None:
        remember(states[0].stats())
    each = [joint_loss(score, *states)] if joint else [joint_loss(score, state) for state in states]
    loss = torch.stack(each).mean()
    return (loss, _read(states[0], query, docs, score, scale)) if return_stats else loss


def _states(query: Tensor, docs: list[Tensor], scale: float, directions: Sequence[str]) -> list[State]:
    positive = docs[0]
    found = {"query_to_doc": Bank(torch.cat(docs)).state(query, scale)}
    if "query_to_query" in directions:
        found["query_to_query"] = Bank(query, support.not_self()).state(query, scale)
    if "doc_to_query" in directions:
        found["doc_to_query"] = Bank(query).state(positive, scale)
    if "doc_to_doc" in directions:
        # documents of one's own query are no negatives: one hole in each column
        state = Bank(docs[0], support.not_self()).state(positive, scale)
        for column in docs[1:]:
            state = state.merge(Bank(column, support.not_self()).state(positive, scale))
        found["doc_to_doc"] = state
    return [found["query_to_doc"], *(found[name] for name in directions if name != "query_to_doc")]


@torch.no_grad()
def _read(whole: State, query: Tensor, docs: Sequence[Tensor], score: Tensor, scale: float) -> ContrastStats:
    """The queries among all documents: those of others, and every column of negatives."""
    banks = [Bank(docs[0], support.not_self()), *(Bank(column) for column in docs[1:])]
    negatives = banks[0].state(query, scale)
    for bank in banks[1:]:
        negatives = negatives.merge(bank.state(query, scale))
    positive = positive_score(query, docs[0], 1.0)
    rank = torch.stack([above(bank, query, positive) for bank in banks]).sum(0)
    moments = similarity_moments(banks, query, positive, [positive])
    nll = -logsigmoid(score - negatives.log_partition())
    return readout(whole, negatives, rank, nll, positive, moments, scale, (query, docs[0]))
