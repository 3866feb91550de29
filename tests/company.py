"""One row in the company of others: what it must not notice. Drawn by hypothesis, computed, and compared to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import partita
from partita import support

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
SUPPORTS = ("all", "lengths", "segments", "mask", "holes", "window")


@dataclass(frozen=True)
class Row:
    """A row and the keys it sees; `seed` makes its numbers."""

    dtype: torch.dtype
    keys: int
    dim: int
    width: int
    seed: int
    softcap: float | None
    biased: bool


@dataclass(frozen=True)
class Company:
    """What is computed together with the row."""

    lead: tuple[int, ...]
    rows: int
    place: tuple[int, ...]  # in the batch
    at: int  # among the rows
    before: int  # hidden keys
    behind: int
    support: str
    causal: bool  # the rows before it see fewer of its keys
    chunk: int
    threads: int
    seed: int


ALONE = Company((1,), 1, (0,), 0, 0, 0, "all", False, 0, 1, 0)


def rows(dtypes: tuple[torch.dtype, ...] = DTYPES, keys: tuple[int, ...] = (1, 37, 300, 1100)) -> Any:
    few = st.sampled_from
    return st.builds(
        Row,
        few(dtypes),
        few(keys),
        few((5, 16, 40)),
        few((3, 16, 24)),
        st.integers(0, 3),
        few((None, 20.0)),
        st.booleans(),
    )


@st.composite
def companies(
    draw: Any,
    hidden: tuple[int, ...] = (0, 1, 31, 32, 200, 700),
    lead: tuple[tuple[int, ...], ...] = ((1,), (2,), (2, 3), (5,)),
    most: int = 130,
    front: bool = True,  # hidden keys before the row's own
) -> Company:
    lead = draw(st.sampled_from(lead))
    n = min(most, draw(st.sampled_from((1, 1, 2, 3, 13, 15, 40, 130))))
    kind = draw(st.sampled_from(SUPPORTS))
    before = draw(st.sampled_from(hidden)) if front and kind in ("segments", "mask", "window") else 0
    behind = draw(st.sampled_from(hidden)) if kind not in ("all",) else 0
    causal = kind in ("all", "mask") and draw(st.booleans())
    at = n - 1 if causal else draw(st.integers(0, n - 1))
    chunk = 0 if causal or kind in ("holes", "window") else draw(st.sampled_from((0, 1, 2, 7)))
    place = tuple(draw(st.integers(0, size - 1)) for size in lead)
    threads = draw(st.integers(1, 4))
    return Company(lead, n, place, at, before, behind, kind, causal, chunk, threads, draw(st.integers(0, 5)))


def numbers(row: Row, c: Company) -> dict[str, Tensor]:
    """What a row is given in this company, by name; threads are set, and set back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(c.threads)
    try:
        return _numbers(row, c)
    finally:
        torch.set_num_threads(threads)


def _numbers(row: Row, c: Company) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(row.seed)
    other = torch.Generator().manual_seed(100 + c.seed)
    keys = c.before + row.keys + c.behind
    cut = slice(c.before, c.before + row.keys)

    def made(*shape: int, keyed: bool) -> Tensor:
        """Random numbers of all, with the row's own in their place: of its keys, or of the row."""
        out = torch.randn(*c.lead, *shape, generator=other)
        if keyed:
            out[c.place][cut] = torch.randn(row.keys, shape[-1], generator=own)
        else:
            out[c.place][c.at] = torch.randn(shape[-1], generator=own)
        return out.to(row.dtype)

    query, up = made(c.rows, row.dim, keyed=False), made(c.rows, row.width + 5, keyed=False)
    key, value = made(keys, row.dim, keyed=True), made(keys, row.width, keyed=True)
    bias = torch.randn(*c.lead, c.rows, keys, generator=other).to(row.dtype)
    bias[c.place][c.at, cut] = torch.randn(row.keys, generator=own).to(row.dtype)
    target = torch.randint(keys, (*c.lead, c.rows), generator=other)
    target[c.place][c.at] = c.before + row.keys // 2
    part = slice(0, c.rows)
    if c.chunk:
        first = c.at // c.chunk * c.chunk
        part = slice(first, min(first + c.chunk, c.rows))
    seen = _support(row, c, keys)
    at = (*c.place, c.at - part.start)
    q, b = query[..., part, :].clone().requires_grad_(), bias[..., part, :].clone().requires_grad_()
    up, target = up[..., part, :], target[..., part]
    if isinstance(seen, Tensor):
        seen = support.mask(seen[part])
    elif seen is not None and c.support == "segments":
        ids = torch.full((keys,), 5)
        ids[cut] = 3
        seen = support.segments(torch.full((part.stop - part.start,), 3), ids)
    given: dict[str, Any] = {"support": seen, "softcap": row.softcap, "bias": b if row.biased else None}
    p = partita.Gibbs(q, key, scale=row.dim**-0.5, **given)
    stats, score = p.stats(), p.nll(target)
    mean = p.expectation(value)
    total = (mean * up[..., 5:]).sum() + (score * up[..., 0]).sum()
    reads = (stats.log_partition, stats.entropy, stats.mean_score, stats.score_variance)
    total = total + sum((x * up[..., 1 + i]).sum() for i, x in enumerate(reads))
    found = {"mean": mean, "nll": score, **stats._asdict(), "rank": p.target_rank(target)}
    made_of = torch.autograd.grad(total, (q, b) if row.biased else (q,))
    found["gradient of the query"] = made_of[0]
    if row.biased:
        found["gradient of the bias"] = made_of[1][..., cut]
    with torch.no_grad():
        again = {**given, "bias": None if given["bias"] is None else b.detach()}
        found["attention"] = partita.attention(q.detach(), key, value, **again)
        best, index = partita.Gibbs(q.detach(), key, scale=row.dim**-0.5, **again).top(min(3, row.keys))
        found["top"], found["top's keys"] = best, index - c.before
        lean = partita.Gibbs(q.detach(), key, scale=row.dim**-0.5, **again)
        found["log p"], found["log Z alone"] = lean.log_prob(target), lean.log_partition()
    return {name: x[at].detach().clone() for name, x in found.items()}


def _support(row: Row, c: Company, keys: int) -> Any:
    at = torch.arange(keys)
    shown = (at >= c.before) & (at < c.before + row.keys)
    if c.causal:  # other rows see less
        return shown & (at < c.before + row.keys - (c.rows - 1 - torch.arange(c.rows))[:, None])
    if c.support == "mask":
        return shown.expand(c.rows, keys)
    if c.support == "holes":  # other rows see other keys, so that the panels of a tile are not the row's own
        mask = torch.rand(c.rows, keys, generator=torch.Generator().manual_seed(c.seed)) < 0.02
        mask[c.at] = shown
        return mask
    if c.support == "window":  # other rows see other intervals
        start = torch.randint(keys, (c.rows, 1), generator=torch.Generator().manual_seed(c.seed))
        mask = (at >= start) & (at < start + 64)
        mask[c.at] = shown
        return mask
    if c.support == "lengths":
        return support.lengths(row.keys)
    return support.all() if c.support == "segments" else None


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what has not the same bits; a zero may have either sign."""
    return [name for name, x in one.items() if not torch.equal(x, other[name])]
