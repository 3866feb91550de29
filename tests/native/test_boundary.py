"""What is checked before an address is handed over: storage, bits of views, devices, integers, structures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita.engine import axes
from partita.engine.backends.native import call, library, losses, passes
from partita.engine.request import Request
from partita.engine.sums import SumGrads
from partita.engine.terms import Term

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native library: {library.why_not()}")

ONE = torch.ones(1, 1)
UNIT, ROW, OWN = torch.ones(1), torch.ones(5), torch.arange(5)


def request(query: Tensor, key: Tensor, value: Tensor | None = None, **more: Any) -> Request:
    return Request(
        query, key, value, **{"scale": ONE, "bias": None, "target": None, "terms": (), "softcap": None, **more}
    )


def sums(query: Tensor, key: Tensor, value: Tensor) -> object:
    return passes.forward(request(query, key, value))


def gradients(query: Tensor, key: Tensor, value: Tensor) -> object:
    rows = ROW[None] - 1
    upstream = SumGrads(rows, rows, rows, ROW[None, :, None].expand(1, 5, 4))
    found = passes.backward(request(query, key, value), rows.double(), upstream, (True, True, True, True, False))
    return found and tuple(found.values())


def weighted(query: Tensor, key: Tensor, value: Tensor) -> object:
    given = request(query[0], key[0], scale=UNIT, bias=value[..., 0], target=OWN)
    found = losses.weighted_nll(given, ROW, (True, True, False, True, True))
    return found and (found[0], *found[1].values())


def both(query: Tensor, key: Tensor, value: Tensor) -> object:
    given = request(query[0], key[0], scale=UNIT, target=OWN)
    found = losses.both_ways(given)
    assert found is not None
    rows, columns = found
    upstream = passes.ColumnSums(columns.peak, value[0, :, 0])
    g = SumGrads(value[0, :5, 1])
    grads = passes.backward(given, rows.peak, g, (True, True, False, True, False), upstream)
    return rows, columns, grads and tuple(grads.values())


def plain(query: Tensor, key: Tensor, value: Tensor) -> Any:
    found = passes.attention(query, key, value, 0.5, True, True)
    if found is None:  # the general path raises what is wrong with them
        with torch.no_grad():
            return partita.attention(query, key, value, scale=0.5, is_causal=True, return_stats=True)
    return found


def described(query: Tensor, key: Tensor, value: Tensor) -> object:
    out, stats = plain(query, key, value)
    found = passes.row_statistics(query, key, 0.5, True)
    return out, stats if found is None else tuple(found[:6])


ENTRIES: list[Callable[[Tensor, Tensor, Tensor], object]] = [
    sums, gradients, weighted, both, plain, described,
]  # fmt: skip


def operand(i: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.Generator().manual_seed(i)
    return torch.randn(1, 5 + 2 * (i > 0), 4, generator=made, dtype=torch.float64, device="cpu").to(dtype)


def flat(found: object) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [t for part in found for t in flat(part)] if isinstance(found, tuple) else []


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("left", [0, 8])
def test_a_storage_that_was_freed_or_shrunk_raises(
    entry: Callable[[Tensor, Tensor, Tensor], object], which: int, left: int
) -> None:
    """As torch does; the memory behind a parameter is taken away by FSDP, and came back as a segmentation fault."""
    given = [operand(i) for i in range(3)]
    given[which].untyped_storage().resize_(left)
    with pytest.raises(RuntimeError, match="storage"):
        entry(*given)


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_default_device_is_not_followed(entry: Callable[[Tensor, Tensor, Tensor], object]) -> None:
    given = [operand(i) for i in range(3)]
    want = flat(entry(*given))
    passes._kept_plain.cache_clear()
    call._kept_geometry.cache_clear()
    axes._kept_offsets.cache_clear()
    with torch.device("meta"):
        got = flat(entry(*given))
    assert want and len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_negative_bit_of_a_view_is_seen(entry: Callable[[Tensor, Tensor, Tensor], object], which: int) -> None:
    given, views = [operand(i) for i in range(3)], [operand(i) for i in range(3)]
    given[which] = -given[which]
    views[which] = torch.complex(views[which], views[which]).conj().imag if which else torch._neg_view(views[which])
    assert views[which].is_neg() and torch.equal(views[which], given[which])
    for a, b in zip(flat(entry(*views)), flat(entry(*given)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wide", [2**31, 2**40, -(2**40)])
def test_an_interval_past_int32_is_cut_and_not_wrapped(wide: int) -> None:
    query, key, value = (operand(i) for i in range(3))
    bound = torch.full((1, 5), wide)
    terms = (Term(start=-bound.abs(), stop=bound),)
    seen = passes.forward(request(query, key, value, terms=terms))
    assert seen is not None
    want = passes.forward(request(query, key, value))
    assert want is not None
    assert torch.equal(seen.mass, want.mass if wide > 0 else torch.zeros_like(want.mass))


def test_large_tables_are_not_kept() -> None:
    axes._kept_offsets.cache_clear()
    passes._kept_plain.cache_clear()
    for n in range(5000, 5010):
        query = torch.zeros(n, 1, 1, 4)
        assert passes.attention(query, query, query, 1.0, False, True) is not None
        long, few = query.view(1, 1, n, 4), query[:3].view(1, 1, 3, 4)
        assert passes.attention(long, few, few, 1.0, True, False) is not None
        assert sums(*(query[:, 0],) * 3) is not None
    assert passes._kept_plain.cache_info().currsize == 0
    assert axes._kept_offsets.cache_info().currsize <= 40
    kept = axes._kept_offsets.cache_parameters()["maxsize"] * axes._CACHED * 8
    assert kept <= 8 << 20


def test_a_library_whose_structures_differ_is_refused() -> None:
    handle = library.load().handle  # type: ignore[union-attr]
    reported = handle.partita_layout().decode()
    assert library.disagreement(reported) is None
    for old, new, named in (
        ("PartitaSums.stats=80", "PartitaSums.stats=88", "PartitaSums.stats"),
        ("PartitaLogits=72", "PartitaLogits=80", "PartitaLogits"),
        ("PartitaProblem.B=0 ", "", "PartitaProblem.B"),
        ("PartitaProblem.B=0 ", "PartitaProblem.B=0 PartitaProblem.new=500 ", "PartitaProblem.new"),
    ):
        assert old in reported
        assert named in (library.disagreement(reported.replace(old, new)) or "")
