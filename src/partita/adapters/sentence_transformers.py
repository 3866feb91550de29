"""A loss for sentence_transformers: columns of features in, one number out, no matrix of similarities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from partita import support
from partita._checks import check_positive
from partita.contrastive import joint_loss
from partita.contrastive.candidates import Bank, positive_score
from partita.engine import State
from partita.errors import ShapeError, ValueRangeError

__all__ = ["MultipleNegativesRankingLoss"]

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
        states = self._states(unit[0], unit[1:])
        score = positive_score(unit[0], unit[1], self.scale)
        self.last_stats = type(states[0].stats())(*(x.detach() for x in states[0].stats()))
        if self.partition_mode == "joint":
            return joint_loss(score, *states).to(embeddings[0].dtype)
        each = torch.stack([joint_loss(score, state) for state in states])
        return each.mean().to(embeddings[0].dtype)

    def _states(self, query: Tensor, docs: list[Tensor]) -> list[State]:
        positive = docs[0]
        found = {"query_to_doc": Bank(torch.cat(docs)).state(query, self.scale)}
        if "query_to_query" in self.directions:
            found["query_to_query"] = Bank(query, support.not_self()).state(query, self.scale)
        if "doc_to_query" in self.directions:
            found["doc_to_query"] = Bank(query).state(positive, self.scale)
        if "doc_to_doc" in self.directions:
            # documents of one's own query are no negatives: one hole in each column
            state = Bank(docs[0], support.not_self()).state(positive, self.scale)
            for column in docs[1:]:
                state = state.merge(Bank(column, support.not_self()).state(positive, self.scale))
            found["doc_to_doc"] = state
        return [found[name] for name in self.directions]

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
