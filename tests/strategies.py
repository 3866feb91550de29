"""Random problems. Each support comes with the bool matrix it means, built here from its definition, not by partita."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import partita
from tests import reference

SIZES = (1, 2, 3, 7, 13)
INF = float("inf")


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """A Gibbs distribution's ingredients, and `visible`: what its support means, as a bool matrix."""

    query: Tensor  # (*batch, n_query, dim)
    key: Tensor  # (*batch, n_key, dim)
    value: Tensor  # (*batch, n_key, dim_value)
    target: Tensor  # (*batch, n_query)
    scale: float | Tensor = 1.0
    bias: Tensor | None = None
    softcap: float | None = None
    support: object | None = None
    visible: Tensor | None = None
    groups: int = 1  # query heads for each key head; heads are the last batch dimension

    def __repr__(self) -> str:
        """Sizes and options: what a failing example needs to be understood, and not its numbers."""
        scale = f"tensor{tuple(self.scale.shape)}" if isinstance(self.scale, Tensor) else self.scale
        bias = None if self.bias is None else f"tensor{tuple(self.bias.shape)}"
        return (
            f"Problem(query={tuple(self.query.shape)}, key={tuple(self.key.shape)}, scale={scale}, bias={bias}, "
            f"softcap={self.softcap}, support={self.support})"
        )

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:  # hypothesis asks for this one
        printer.text(repr(self))  # type: ignore[attr-defined]

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.query.shape[:-2], self.spread(self.key).shape[:-2]))

    @property
    def n_query(self) -> int:
        return self.query.shape[-2]

    @property
    def n_key(self) -> int:
        return self.key.shape[-2]

    def gibbs(self, **changes: object) -> partita.Gibbs:
        p = replace(self, **changes)
        options = {"bias": p.bias, "support": p.support, "softcap": p.softcap, "grouped": p.groups > 1}
        return partita.Gibbs(p.query, p.key, scale=p.scale, **options)

    def score(self, **changes: object) -> Tensor:
        """The oracle's matrix of scores."""
        p = replace(self, **changes)
        return reference.score(
            p.query, p.spread(p.key), scale=p.scale, bias=p.bias, softcap=p.softcap, visible=p.visible
        )

    def spread(self, keys: Tensor) -> Tensor:
        """Keys or values of each query head."""
        return reference.repeat_heads(keys, self.query.shape[-3]) if self.groups > 1 else keys

    @property
    def magnitude(self) -> float:
        """The largest finite score: what rounding is proportional to."""
        s = self.score()
        s = s[s.isfinite()].abs()
        return float(s.max()) if s.numel() else 1.0


# Supports, each as (support, bool matrix) ----------------------------------------------------------------------------


def grid(n_query: int, n_key: int) -> tuple[Tensor, Tensor]:
    """Row and column numbers of the matrix."""
    return torch.arange(n_query)[:, None], torch.arange(n_key)[None, :]


def everything(n_query: int, n_key: int) -> tuple[object, Tensor]:
    return partita.support.all(), torch.ones(n_query, n_key, dtype=torch.bool)


def causal(n_query: int, n_key: int, align: str = "top-left") -> tuple[object, Tensor]:
    i, j = grid(n_query, n_key)
    return partita.support.causal(align=align), j <= i + (n_key - n_query if align == "bottom-right" else 0)


def window(n_query: int, n_key: int, left: int | None, right: int | None) -> tuple[object, Tensor]:
    i, j = grid(n_query, n_key)
    inside = torch.ones(n_query, n_key, dtype=torch.bool)
    if left is not None:
        inside &= j >= i - left
    if right is not None:
        inside &= j <= i + right
    return partita.support.window(left, right), inside


def not_self(n_query: int, n_key: int) -> tuple[object, Tensor]:
    i, j = grid(n_query, n_key)
    return partita.support.not_self(), i != j


def lengths(n_query: int, n_key: int, key_lengths: Tensor | int, batch_rank: int = 0) -> tuple[object, Tensor]:
    """Lengths belong to the leading batch dimensions: trailing ones of size 1 are added here by hand."""
    n = torch.as_tensor(key_lengths)
    n = n.reshape(*n.shape, *[1] * (batch_rank - n.ndim), 1, 1)
    return partita.support.lengths(key_lengths), (torch.arange(n_key) < n).expand(*n.shape[:-2], n_query, n_key)


def segments(q_ids: Tensor, k_ids: Tensor, batch_rank: int = 0) -> tuple[object, Tensor]:
    def aligned(ids: Tensor) -> Tensor:
        if ids.ndim == 1:
            return ids
        return ids.reshape(*ids.shape[:-1], *[1] * (batch_rank - ids.ndim + 1), ids.shape[-1])

    return partita.support.segments(q_ids, k_ids), aligned(q_ids)[..., :, None] == aligned(k_ids)[..., None, :]


def masked(keep: Tensor) -> tuple[object, Tensor]:
    return partita.support.mask(keep), keep


def strided(n_query: int, n_key: int, stride: int, reach: int) -> tuple[object, Tensor]:
    i, j = grid(n_query, n_key)
    return partita.support.strided(stride, reach), ((i - j) % stride == 0) | ((i - j).abs() <= reach)


def dilated(n_query: int, n_key: int, step: int, left: int | None, right: int | None) -> tuple[object, Tensor]:
    i, j = grid(n_query, n_key)
    inside = (j - i) % step == 0
    if left is not None:
        inside &= j >= i - left * step
    if right is not None:
        inside &= j <= i + right * step
    return partita.support.dilated(step, left, right), inside


def blocks(n_query: int, n_key: int, block: int, layout: Tensor) -> tuple[object, Tensor]:
    i, j = grid(n_query, n_key)
    return partita.support.blocks(block, layout), layout[..., i // block, j // block]


def global_tokens(n_query: int, n_key: int, positions: list[int]) -> tuple[object, Tensor]:
    i, j = grid(n_query, n_key)
    chosen = torch.tensor(positions)
    return partita.support.global_tokens(positions), torch.isin(i, chosen) | torch.isin(j, chosen)


def both(a: tuple[object, Tensor], b: tuple[object, Tensor]) -> tuple[object, Tensor]:
    return a[0] & b[0], a[1] & b[1]  # type: ignore[operator]


def either(a: tuple[object, Tensor], b: tuple[object, Tensor]) -> tuple[object, Tensor]:
    return a[0] | b[0], a[1] | b[1]  # type: ignore[operator]


def catalogue(n_query: int, n_key: int, batch: tuple[int, ...] = ()) -> dict[str, tuple[object, Tensor]]:
    """One support of every kind and some of their combinations, several with empty rows; for parametrised tests."""
    g = torch.Generator().manual_seed(n_query * 1000 + n_key)
    some = torch.rand(*batch, n_query, n_key, generator=g) < 0.6
    if n_query > 1:
        some[..., n_query // 2, :] = False
    ids = (torch.arange(n_query) * 3 // max(n_query, 1), torch.arange(n_key) * 3 // max(n_key, 1))
    short = torch.randint(0, n_key + 1, batch, generator=g) if batch else max(1, n_key - 2)
    rank = len(batch)
    kinds = {
        "all": everything(n_query, n_key),
        "causal": causal(n_query, n_key),
        "causal-bottom-right": causal(n_query, n_key, "bottom-right"),
        "window": window(n_query, n_key, 2, 1),
        "window-left": window(n_query, n_key, 1, None),
        "window-behind": window(n_query, n_key, 3, -1),
        "lengths": lengths(n_query, n_key, short, rank),
        "segments": segments(*ids),
        "not-self": not_self(n_query, n_key),
        "mask": masked(some),
    }
    sketch = torch.rand(*batch, -(-n_query // 3), -(-n_key // 3), generator=g) < 0.5
    kinds["strided"] = strided(n_query, n_key, 4, 1)
    kinds["dilated"] = dilated(n_query, n_key, 2, 2, 1)
    kinds["blocks"] = blocks(n_query, n_key, 3, sketch)
    kinds["global | window"] = either(global_tokens(n_query, n_key, [0, 1, 5]), kinds["window"])
    kinds["(blocks | global | window) & causal"] = both(
        either(kinds["blocks"], kinds["global | window"]), kinds["causal"]
    )
    kinds["causal & lengths"] = both(kinds["causal"], kinds["lengths"])
    kinds["segments & causal"] = both(kinds["segments"], kinds["causal"])
    kinds["not-self & mask"] = both(kinds["not-self"], kinds["mask"])
    kinds["window | mask"] = either(kinds["window"], kinds["mask"])
    kinds["(causal & not-self) | lengths"] = either(both(kinds["causal"], kinds["not-self"]), kinds["lengths"])
    kinds["(window | segments) & (mask | not-self)"] = both(
        either(kinds["window"], kinds["segments"]), either(kinds["mask"], kinds["not-self"])
    )
    # intervals that are turned round in some rows, in a union
    ahead = both(window(n_query, n_key, -2, None), lengths(n_query, n_key, short, rank))
    kinds["segments | (window & lengths)"] = either(kinds["segments"], ahead)
    late = both(global_tokens(n_query, n_key, [max(n_key - 2, 0)]), kinds["causal"])
    kinds["strided | (global & causal)"] = either(kinds["strided"], late)
    return kinds


SUPPORTS = tuple(catalogue(3, 3))  # the names


KINDS = ("all", "causal", "window", "lengths", "segments", "not_self", "mask", "pattern")


@st.composite
def supports(
    draw: st.DrawFn, n_query: int, n_key: int, batch: tuple[int, ...] = (), depth: int = 3
) -> tuple[object, Tensor]:
    """A support of any kind, or some joined by & or | three deep, or a union with intervals that are turned round."""
    if depth and draw(st.booleans()):
        a = draw(supports(n_query, n_key, batch, depth - 1))
        b = draw(supports(n_query, n_key, batch, depth - 1))
        return (both if draw(st.booleans()) else either)(a, b)
    if draw(st.integers(0, 3)) == 0:
        return draw(unions(n_query, n_key, batch))
    return draw(plain(n_query, n_key, batch))


@st.composite
def plain(
    draw: st.DrawFn, n_query: int, n_key: int, batch: tuple[int, ...] = (), kinds: tuple[str, ...] = KINDS
) -> tuple[object, Tensor]:
    """A support of one kind."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    kind = draw(st.sampled_from(kinds))
    if kind == "causal":
        return causal(n_query, n_key, draw(st.sampled_from(["top-left", "bottom-right"])))
    if kind == "window":
        return window(n_query, n_key, *draw(reaches(2, n_key + 1)))
    if kind == "lengths":
        shape = draw(st.sampled_from([batch[:cut] for cut in range(len(batch) + 1)]))
        return lengths(n_query, n_key, torch.randint(0, n_key + 1, shape, generator=g), len(batch))
    if kind == "segments":
        shape = draw(st.sampled_from([batch[:cut] for cut in range(len(batch) + 1)]))
        query_ids, key_ids = (torch.randint(0, 4, (*shape, n), generator=g) for n in (n_query, n_key))
        order = draw(st.sampled_from(["any", "sorted", "together"]))
        if order != "any":  # documents, in the order of their ids or another
            key_ids = key_ids.sort(-1).values
        if order == "together":
            names = torch.tensor(draw(st.permutations([-7, 0, 2, 2**40])))
            query_ids, key_ids = names[query_ids], names[key_ids]
        return segments(query_ids, key_ids, len(batch))
    if kind == "pattern":
        return draw(patterns(n_query, n_key, batch))
    if kind == "mask":
        shape = (*draw(st.sampled_from([batch, ()])), *draw(st.sampled_from([(n_query, n_key), (1, n_key)])))
        return masked(torch.rand(shape, generator=g) < draw(st.sampled_from([0.2, 0.7])))
    return not_self(n_query, n_key) if kind == "not_self" else everything(n_query, n_key)


@st.composite
def reaches(draw: st.DrawFn, behind: int, furthest: int) -> tuple[int | None, int | None]:
    """Left and right of a window: None, or -behind and up; one that ends before it starts is refused."""
    left = draw(st.one_of(st.none(), st.integers(-behind, furthest)))
    least = -behind if left is None else max(-behind, -left)
    return left, draw(st.one_of(st.none(), st.integers(least, max(least, furthest))))


@st.composite
def unions(draw: st.DrawFn, n_query: int, n_key: int, batch: tuple[int, ...] = ()) -> tuple[object, Tensor]:
    """A kind that is no interval, or a pattern, joined by | with intervals that are turned round in some rows."""
    found = draw(plain(n_query, n_key, batch, ("segments", "not_self", "mask", "pattern")))
    for _ in range(draw(st.integers(1, 2))):
        found = either(found, draw(turned(n_query, n_key, batch)))
    return found


@st.composite
def turned(draw: st.DrawFn, n_query: int, n_key: int, batch: tuple[int, ...] = ()) -> tuple[object, Tensor]:
    """An & of two intervals that meet in some rows only: elsewhere its start is past its stop, and it shows nothing."""
    middle = n_key // 2
    later = draw(st.sampled_from(["ahead", "token", "near"]))
    if later == "ahead":
        a = window(n_query, n_key, -draw(st.integers(1, middle + 1)), None)
    else:
        a = global_tokens(n_query, n_key, [middle]) if later == "token" else window(n_query, n_key, 1, None)
    if draw(st.booleans()):
        return both(a, causal(n_query, n_key, draw(st.sampled_from(["top-left", "bottom-right"]))))
    return both(a, lengths(n_query, n_key, draw(st.integers(0, middle)), len(batch)))


@st.composite
def patterns(draw: st.DrawFn, n_query: int, n_key: int, batch: tuple[int, ...] = ()) -> tuple[object, Tensor]:
    """A pattern of sparse attention."""
    step = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["strided", "dilated", "blocks", "global"]))
    if kind == "strided":
        return strided(n_query, n_key, step, draw(st.integers(0, 3)))
    if kind == "dilated":
        return dilated(n_query, n_key, step, *draw(reaches(1, 4)))
    if kind == "blocks":
        g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
        shape = (*draw(st.sampled_from([batch, ()])), -(-n_query // step), -(-n_key // step))
        return blocks(n_query, n_key, step, torch.rand(shape, generator=g) < draw(st.sampled_from([0.2, 0.7])))
    return global_tokens(n_query, n_key, draw(st.lists(st.integers(0, 14), max_size=4)))


# Problems ------------------------------------------------------------------------------------------------------------


def problem(
    n_query: int = 7,
    n_key: int = 13,
    dim: int = 5,
    dim_value: int = 3,
    batch: tuple[int, ...] = (),
    *,
    seed: int = 0,
    support: tuple[object, Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> Problem:
    """A plain problem with normal entries; options (scale, bias, softcap) as in Problem."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return Problem(
        query=normal(*batch, n_query, dim),
        key=normal(*batch, n_key, dim),
        value=normal(*batch, n_key, dim_value),
        target=torch.randint(0, max(n_key, 1), (*batch, n_query), generator=g),
        support=None if support is None else support[0],
        visible=None if support is None else support[1],
        **options,
    )


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    sizes: tuple[int, ...] = SIZES,
    with_bias: bool = True,
    with_support: bool = True,
    with_softcap: bool = True,
    with_batch: bool = True,
    with_groups: bool = False,
    furthest: int = 123,
    scales: tuple[object, ...] = (0.0, 0.4, 1.0, 3.0, -0.7, "row", "row with 0", "batch"),
) -> Problem:
    """Sizes 1 to 13 (at times `furthest`), supports and their joins, biases with -inf, scales, broadcast batches."""
    n_query, n_key = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    if draw(st.integers(0, 11)) == 0:  # one side, not both: in tiles of a few keys that is a lot of tiles
        n_query, n_key = draw(st.sampled_from(((furthest, min(n_key, 7)), (min(n_query, 7), furthest))))
    dim, dim_value = draw(st.sampled_from((1, 3, 8))), draw(st.sampled_from((1, 4)))
    batch = draw(st.sampled_from([(), (), (2,), (2, 3)])) if with_batch else ()
    groups = draw(st.sampled_from((1, 1, 2))) if with_groups and batch else 1
    batch = (*batch[:-1], batch[-1] * groups) if batch else ()
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def shared(dims: tuple[int, ...]) -> tuple[int, ...]:
        """The same batch, some dimensions of which broadcast."""
        return tuple(n if draw(st.booleans()) else 1 for n in dims)

    support = draw(supports(n_query, n_key, batch)) if with_support and draw(st.integers(0, 3)) else None
    bias = None
    if with_bias and draw(st.booleans()):
        shape = draw(st.sampled_from([(n_query, n_key), (1, n_key), (n_query, 1), (*batch, n_query, n_key)]))
        bias = normal(*shape)
        if draw(st.booleans()):
            bias = bias.masked_fill(torch.rand(shape, generator=g) < 0.3, -INF)
    kind = draw(st.sampled_from(scales))
    if kind == "row":
        scale: object = torch.rand(n_query, generator=g, dtype=torch.float64) + 0.1
    elif kind == "row with 0":
        scale = torch.rand(*batch, n_query, generator=g, dtype=torch.float64).mul(3).floor()
    elif kind == "batch":
        scale = torch.rand(*batch, 1, generator=g, dtype=torch.float64) + 0.1
    else:
        scale = kind
    key_batch = shared(batch) if groups == 1 else (*batch[:-1], batch[-1] // groups)
    return Problem(
        # The query keeps the whole batch, so that the batch of the rows is the same for every read.
        query=normal(*batch, n_query, dim),
        key=normal(*key_batch, n_key, dim),
        value=normal(*key_batch, n_key, dim_value),
        target=torch.randint(0, max(n_key, 1), (*batch, n_query), generator=g),
        groups=groups,
        scale=scale,
        bias=bias,
        softcap=draw(st.sampled_from([None, None, 2.5])) if with_softcap else None,
        support=None if support is None else support[0],
        visible=None if support is None else support[1],
    )
