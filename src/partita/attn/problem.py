"""One call's arguments, read once: which keys, what is added, how sharp; and the same for a block of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from partita import support as supports
from partita._checks import broadcast, check_heads, check_matrix, shape_text
from partita.attn.bias import Bias
from partita.attn.rows import KeysOf, RowsOf, blocks, by_rows
from partita.engine.axes import Sides
from partita.errors import DtypeError, ShapeError
from partita.gibbs import Gibbs
from partita.scale import Policy, TargetEntropy
from partita.score import Score
from partita.support import Support
from partita.support.base import check_support

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Options", "Problem", "both", "distribution"]


class Options(TypedDict, total=False):
    """What every form of attention takes besides query, key and value."""

    attn_mask: Tensor | None
    is_causal: bool
    scale: float | Tensor | Policy | None
    enable_gqa: bool
    support: Support | None
    bias: Tensor | Bias | None
    softcap: float | None
    score: Score | None


_KNOWN = tuple(Options.__annotations__)


def distribution(query: Tensor, key: Tensor, **options: Unpack[Options]) -> Gibbs:
    """The distribution that the arguments of attention describe, where the bias is a tensor or none."""
    scale, support, bias, rule = _ingredients(query, key, options)
    assert rule is None
    softcap, grouped = options.get("softcap"), options.get("enable_gqa", False)
    score = options.get("score")
    return Gibbs(query, key, scale=scale, bias=bias, support=support, softcap=softcap, grouped=grouped, score=score)


def _ingredients(
    query: Tensor, key: Tensor, options: Options
) -> tuple[float | Tensor | Policy, Support | None, Tensor | None, Bias | None]:
    """How sharp, which keys, what is added, and what is added by a rule."""
    for name in options:
        if name not in _KNOWN:
            raise TypeError(
                f"{name} is no option of this form of attention, which takes {', '.join(_KNOWN)}; "
                f"all others are partita.attention's alone."
            )
    attn_mask, support, bias = options.get("attn_mask"), options.get("support"), options.get("bias")
    scale = options.get("scale")
    check_matrix("query", query)
    check_matrix("key", key)
    check_support(support)
    rule, bias = (bias, None) if isinstance(bias, Bias) else (None, bias)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            support = both(support, supports.mask(attn_mask))
        elif attn_mask.is_floating_point():
            bias = attn_mask if bias is None else bias + attn_mask
        else:
            raise DtypeError(f"attn_mask must be boolean (True = visible) or floating (added); got {attn_mask.dtype}.")
    if bias is not None and bias.dim() < 2:
        bias = bias.reshape(1, -1)
    if options.get("is_causal", False):
        support = both(support, supports.causal())
    if scale is None:  # a score of another kind has a size of its own
        scale = max(query.shape[-1], 1) ** -0.5 if options.get("score") is None else 1.0
    if not options.get("enable_gqa", False):
        check_heads(query, key)
    return scale, support, bias, rule


@dataclass(frozen=True, eq=False)
class Problem(Sides):
    query: Tensor  # (..., heads, n_query, dim)
    key: Tensor  # (..., heads, n_key, dim)
    scale: float | Tensor | Policy
    support: Support | None
    bias: Tensor | None
    rule: Bias | None  # a bias made a block at a time
    softcap: float | None
    grouped: bool
    score: Score | None = None

    @staticmethod
    def of(query: Tensor, key: Tensor, **options: Unpack[Options]) -> Problem:
        scale, support, bias, rule = _ingredients(query, key, options)
        softcap, grouped = options.get("softcap"), options.get("enable_gqa", False)
        return Problem(query, key, scale, support, bias, rule, softcap, grouped, options.get("score"))

    def gibbs(self) -> Gibbs:
        """The distribution of all rows; a rule is written out."""
        return self._gibbs(self.query, self.scale, self._bias(slice(0, self.n_query)), self.support)

    def resolved(self) -> Problem:
        """The policy replaced by the scale it gives each row, so that the rows can be told apart."""
        if not isinstance(self.scale, Policy):
            return self
        if self.rule is not None and isinstance(self.scale, TargetEntropy):
            return replace(self, scale=self._solved(self.scale))
        whole = self._gibbs(self.query, self.scale, self.bias, self.support)
        return replace(self, scale=whole.scale, support=whole.support, bias=whole.bias)

    def _solved(self, policy: TargetEntropy) -> Tensor:  # (..., n_query)
        """The scale of each row under a rule, whose numbers are there for one block of rows at a time."""

        def run(rows: slice) -> tuple[Tensor, ...]:
            found = replace(self, scale=policy).rows(rows).scale
            assert isinstance(found, Tensor)
            return (found,)

        return by_rows(run, self.blocks(), (0,))[0]

    def rows(self, rows: slice, also: Support | None = None) -> Gibbs:
        """The distribution of a block of rows of a resolved problem, over the keys that `also` shows."""
        scale, support = self.scale, self.support
        if isinstance(scale, Tensor) and scale.dim() and scale.shape[-1] != 1:
            scale = scale[..., rows]
        support = None if support is None else self._of_rows(support, rows)
        support = support if also is None else both(support, also)
        return self._gibbs(self.query[..., rows, :], scale, self._bias(rows), support)

    def keys(self, cols: slice, query: Tensor | None = None, key: Tensor | None = None) -> Gibbs:
        """The distribution of all rows over some of the keys of a resolved problem.

        query, key: what stands in for the queries and for those keys.
        """
        bias = self._bias(slice(0, self.n_query))
        bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., cols]
        support = self.support
        if support is not None and (cols.start, cols.stop) != (0, self.n_key):
            support = KeysOf(support, cols.start, self.n_key)
        key = self.key[..., cols, :] if key is None else key
        return replace(self, key=key)._gibbs(self.query if query is None else query, self.scale, bias, support)

    def divided(self, temperature: float, noise: Bias) -> Problem:
        """A resolved problem whose scores are (score + noise) / temperature."""
        assert not isinstance(self.scale, Policy)
        rule = noise if self.rule is None else self.rule + noise
        bias = None if self.bias is None else self.bias / temperature
        return replace(self, scale=self.scale / temperature, bias=bias, rule=rule * (1 / temperature))

    # ---- scores written out, for what the engine has no operand for --------------------------------------------------

    def spread(self, value: Tensor) -> Tensor:
        """One value per query head."""
        return value.repeat_interleave(self.query.shape[-3] // value.shape[-3], -3) if self.grouped else value

    def content(self, rows: slice, cols: slice = slice(None)) -> Tensor:  # (..., rows, cols)
        """softcap(scale * <query, key>) of a tile of a resolved problem, in float32 or better."""
        assert not isinstance(self.scale, Policy)
        dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        scale = self.scale
        if isinstance(scale, Tensor):
            scale = (scale[..., rows] if scale.dim() and scale.shape[-1] != 1 else scale)[..., None].to(dtype)
        query, key = self.query[..., rows, :].to(dtype), self.spread(self.key[..., cols, :]).to(dtype)
        scores = (query * scale) @ key.mT if self.score is None else self.score(query, key) * scale
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def plus_bias(self, scores: Tensor, rows: slice, cols: slice = slice(None)) -> Tensor:
        bias = self._bias(rows)
        bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., cols]
        return scores if bias is None else scores + bias.to(scores.dtype)

    def hidden(self, scores: Tensor, rows: slice, cols: slice) -> Tensor:
        """-inf where a key is not visible."""
        seen = self.seen(rows, cols, scores.shape[:-2])
        return scores if seen is None else torch.where(seen, scores, -torch.inf)

    def seen(self, rows: slice, cols: slice, batch: Sequence[int]) -> Tensor | None:  # (..., rows, cols)
        """Which keys of a tile are visible; None where all are."""
        if self.support is None:
            return None
        support = self._of_rows(self.support, rows)
        if (cols.start, cols.stop) != (0, self.n_key):
            support = KeysOf(support, cols.start, self.n_key)
        return support.dense(rows.stop - rows.start, cols.stop - cols.start, batch, self.query.device)

    def _of_rows(self, support: Support, rows: slice) -> Support:
        whole = (rows.start, rows.stop) == (0, self.n_query)
        return support if whole else RowsOf(support, rows.start, self.n_query)

    def _bias(self, rows: slice) -> Tensor | None:
        bias = self.bias
        if bias is not None and bias.dim() >= 2 and bias.shape[-2] != 1:
            bias = bias[..., rows, :]
        if self.rule is not None:
            made = self.rule.rows(rows, self.n_query, self.n_key, self._like())
            bias = made if bias is None else bias + made
        return bias

    def _gibbs(
        self, query: Tensor, scale: float | Tensor | Policy, bias: Tensor | None, support: Support | None
    ) -> Gibbs:
        return Gibbs(
            query, self.key, scale=scale, bias=bias, support=support, softcap=self.softcap, grouped=self.grouped,
            score=self.score,
        )  # fmt: skip

    def _like(self) -> Tensor:
        return self.query.detach()

    def batch(self, value: Tensor | None = None) -> tuple[int, ...]:
        """The batch dimensions of the rows, heads included."""
        shapes: list[Sequence[int]] = [self.query.shape[:-2]]
        for tensor in (self.key, value):
            if tensor is not None:
                lead = tensor.shape[:-2]
                shapes.append((*lead[:-1], self.query.shape[-3]) if self.grouped else lead)
        shapes += [self.bias.shape[:-2]] if self.bias is not None else []
        shapes += [self.scale.shape[:-1]] if isinstance(self.scale, Tensor) else []
        try:
            return broadcast(*shapes)
        except ShapeError:
            given = f"query {shape_text(self.query)}, key {shape_text(self.key)}"
            third = "" if value is None else f", value {shape_text(value)}"
            raise ShapeError(f"batch dimensions must broadcast; got {given}{third}.") from None

    def blocks(self, value: Tensor | None = None) -> list[slice]:
        return blocks(self.n_query, self.n_key, self.batch(value))


def both(a: Support | None, b: Support) -> Support:
    return b if a is None else a & b
