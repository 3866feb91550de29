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
        return tuple(torch.broadcast_shapes(self.query.shape[:-2], self.key.shape[:-2]))

    @property
    def n_query(self) -> int:
        return self.query.shape[-2]

    @property
    def n_key(self) -> int:
        return self.key.shape[-2]

    def gibbs(self, **changes: object) -> partita.Gibbs:
        p = replace(self, **changes)
        return partita.Gibbs(p.query, p.key, scale=p.scale, bias=p.bias, support=p.support, softcap=p.softcap)

    def score(self, **changes: object) -> Tensor:
        """The oracle's matrix of scores."""
        p = replace(self, **changes)
        return reference.score(p.query, p.key, scale=p.scale, bias=p.bias, softcap=p.softcap, visible=p.visible)

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
    return kinds


SUPPORTS = tuple(catalogue(3, 3))  # the names


@st.composite
def supports(
    draw: st.DrawFn, n_query: int, n_key: int, batch: tuple[int, ...] = (), depth: int = 2
) -> tuple[object, Tensor]:
    """A support of any kind, or two joined by & or |, with the matrix it means."""
    if depth and draw(st.integers(0, 2)) == 0:
        a = draw(supports(n_query, n_key, batch, depth - 1))
        b = draw(supports(n_query, n_key, batch, depth - 1))
        return (both if draw(st.booleans()) else either)(a, b)
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    reach = st.one_of(st.none(), st.integers(-2, n_key + 1))
    kind = draw(st.sampled_from(["all", "causal", "window", "lengths", "segments", "not_self", "mask", "pattern"]))
    if kind == "causal":
        return causal(n_query, n_key, draw(st.sampled_from(["top-left", "bottom-right"])))
    if kind == "window":
        return window(n_query, n_key, draw(reach), draw(reach))
    if kind == "lengths":
        shape = draw(st.sampled_from([batch[:cut] for cut in range(len(batch) + 1)]))
        return lengths(n_query, n_key, torch.randint(0, n_key + 1, shape, generator=g), len(batch))
    if kind == "segments":
        shape = draw(st.sampled_from([batch[:cut] for cut in range(len(batch) + 1)]))
        ids = [torch.randint(0, 3, (*shape, n), generator=g) for n in (n_query, n_key)]
        return segments(ids[0], ids[1], len(batch))
    if kind == "pattern":
        return draw(patterns(n_query, n_key, batch))
    if kind == "mask":
        shape = draw(st.sampled_from([batch, ()]))
        return masked(torch.rand(*shape, n_query, n_key, generator=g) < draw(st.sampled_from([0.2, 0.7])))
    return not_self(n_query, n_key) if kind == "not_self" else everything(n_query, n_key)


@st.composite
def patterns(draw: st.DrawFn, n_query: int, n_key: int, batch: tuple[int, ...] = ()) -> tuple[object, Tensor]:
    """A pattern of sparse attention."""
    step = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["strided", "dilated", "blocks", "global"]))
    if kind == "strided":
        return strided(n_query, n_key, step, draw(st.integers(0, 3)))
    if kind == "dilated":
        reach = st.one_of(st.none(), st.integers(-1, 4))
        return dilated(n_query, n_key, step, draw(reach), draw(reach))
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
    scales: tuple[object, ...] = (0.0, 0.4, 1.0, 3.0, -0.7, "row", "row with 0", "batch"),
) -> Problem:
    """Sizes 1 to 13 (at times 123), supports and their combinations, biases with -inf, scales, broadcast batches."""
    n_query, n_key = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    if draw(st.integers(0, 11)) == 0:  # one side, not both: in tiles of a few keys that is a lot of tiles
        n_query, n_key = draw(st.sampled_from(((123, min(n_key, 7)), (min(n_query, 7), 123))))
    dim, dim_value = draw(st.sampled_from((1, 3, 8))), draw(st.sampled_from((1, 4)))
    batch = draw(st.sampled_from([(), (), (2,), (2, 3)])) if with_batch else ()
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
    key_batch = shared(batch)
    return Problem(
        # The query keeps the whole batch, so that the batch of the rows is the same for every read.
        query=normal(*batch, n_query, dim),
        key=normal(*key_batch, n_key, dim),
        value=normal(*key_batch, n_key, dim_value),
        target=torch.randint(0, n_key, (*batch, n_query), generator=g),
        scale=scale,
        bias=bias,
        softcap=draw(st.sampled_from([None, None, 2.5])) if with_softcap else None,
        support=None if support is None else support[0],
        visible=None if support is None else support[1],
    )
