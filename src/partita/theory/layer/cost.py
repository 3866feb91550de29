"""What attention costs, in multiply-adds and numbers stored."""

from __future__ import annotations

from typing import NamedTuple

from partita.theory._domain import require

__all__ = ["Cost", "attention_cost", "balance_length"]


class Cost(NamedTuple):
    """Multiply-adds of one sequence through one layer, and numbers stored if the weights are kept."""

    scores: int
    values: int
    projections: int
    stored_weights: int

    @property
    def attention(self) -> int:
        """Scores and values together."""
        return self.scores + self.values


def attention_cost(n: int, dim_model: int, heads: int = 1, *, n_key: int | None = None) -> Cost:
    """Multiply-adds of dense multi-head attention with dim = dim_model / heads.

        scores = values = n * n_key * dim_model,    projections = 4 n dim_model^2,    stored weights = n * n_key * heads

    Tiled evaluation stores O(n) instead. Sparse supports replace n * n_key by the number of visible pairs.
    Spec: M-ATT-13.

    >>> c = attention_cost(512, 512)
    >>> c.projections // 10**6, c.attention // 10**6
    (536, 268)
    """
    require(
        heads >= 1 and dim_model % heads == 0, f"heads must divide dim_model; got {heads} heads, dim_model {dim_model}."
    )
    keys = n if n_key is None else n_key
    product = n * keys * dim_model
    return Cost(product, product, 4 * n * dim_model**2, n * keys * heads)


def balance_length(dim_model: int) -> int:
    """The length at which attention costs as much as its projections; below it the projections dominate.

        n = 2 * dim_model

    Spec: M-ATT-13.

    >>> balance_length(512)
    1024
    """
    return 2 * dim_model
