"""What is checked before an address is handed over: storage, bits of views, devices, integers, structures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita.engine import axes
from partita.engine.backends.native import layout, library, losses, plain_attention, reduce, statistics
from partita.engine.terms import Term

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native library: {library.why_not()}")

ONE = torch.ones(1, 1)
UNIT, ROW, OWN = torch.ones(1), torch.ones(5), torch.arange(5)


def sums(query: Tensor, key: Tensor, value: Tensor) -> object:
    return reduce.reduce(query, key, value, ONE, None, None, (), None, moments=True, rank=False)


def gradients(query: Tensor, key: Tensor, value: Tensor) -> object:
    rows = ROW[None] - 1
    upstream = (rows.double(), rows, rows, rows, ROW[None, :, None].expand(1, 5, 4), None)
    needs = (True, True, True, True, False)
    return reduce.reduce_backward(query, key, value, ONE, None, None, (), None, *upstream, needs)


def weighted(query: Tensor, key: Tensor, value: Tensor) -> object:
    bias = value[0, :, 0].contiguous()
    return losses.weighted_nll(query[0], key[0], bias, UNIT, OWN, ROW, (True,) * 4)


def both(query: Tensor, key: Tensor, value: Tensor) -> object:
    found = losses.both_ways(query[0], key[0], UNIT, OWN)
    assert found is not None
    rows, columns = found
    upstream = reduce.ColumnSums(columns.peak, value[0, :, 0].contiguous())
    given = (query[0], key[0], UNIT, None, rows.peak, (value[0, :5, 1].contiguous(), None), upstream)
    return rows, columns, losses.both_ways_backward(*given, (True, True, True))


def accumulated(query: Tensor, key: Tensor, value: Tensor) -> object:
    made = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in ((11, 1), (1,), (1,), (1, 7), (5, 1, 9))]
    totals = statistics.Totals(*made)
    row = value[:, :5, 0][None] * 0 + 2.0
    assert statistics.accumulate(totals, row, row, row, row, row, (query[None], key[None], 0.5), None)
    return totals


def plain(query: Tensor, key: Tensor, value: Tensor) -> Any:
    found = plain_attention.attention(query, key, value, 0.5, True, True)
    if found is None:  # what is wrong with them is said by the ordinary way
        with torch.no_grad():
            return partita.attention(query, key, value, scale=0.5, is_causal=True, return_stats=True)
    return found


def described(query: Tensor, key: Tensor, value: Tensor) -> object:
    out, stats = plain(query, key, value)
    found = plain_attention.row_statistics(query, key, 0.5, True)
    return out, stats if found is None else tuple(found[:6])


ENTRIES: list[Callable[[Tensor, Tensor, Tensor], object]] = [
    sums, gradients, weighted, both, accumulated, plain, described,
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
    plain_attention._kept_geometry.cache_clear()
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
    seen = reduce.reduce(query, key, value, ONE, None, None, terms, None, moments=False, rank=False)
    assert seen is not None
    want = reduce.reduce(query, key, value, ONE, None, None, (), None, moments=False, rank=False)
    assert want is not None
    assert torch.equal(seen.mass, want.mass if wide > 0 else torch.zeros_like(want.mass))


def test_large_tables_are_not_kept() -> None:
    axes._kept_offsets.cache_clear()
    plain_attention._kept_geometry.cache_clear()
    for n in range(5000, 5010):
        query = torch.zeros(n, 1, 1, 4)
        assert plain_attention.attention(query, query, query, 1.0, False, True) is not None
        long, few = query.view(1, 1, n, 4), query[:3].view(1, 1, 3, 4)
        assert plain_attention.attention(long, few, few, 1.0, True, False) is not None
        assert sums(*(query[:, 0],) * 3) is not None
    assert plain_attention._kept_geometry.cache_info().currsize == 0
    assert axes._kept_offsets.cache_info().currsize <= 40
    kept = axes._kept_offsets.cache_parameters()["maxsize"] * axes._CACHED * 8
    assert kept <= 8 << 20


def test_a_library_whose_structures_differ_is_refused() -> None:
    handle = library.load().handle  # type: ignore[union-attr]
    reported = handle.partita_layout().decode()
    assert layout.disagreement(reported) is None
    for old, new, named in (
        ("PartitaSums.stats=80", "PartitaSums.stats=88", "PartitaSums.stats"),
        ("PartitaLogits=72", "PartitaLogits=80", "PartitaLogits"),
        ("PartitaProblem.B=0 ", "", "PartitaProblem.B"),
        ("PartitaProblem.B=0 ", "PartitaProblem.B=0 PartitaProblem.new=500 ", "PartitaProblem.new"),
    ):
        assert old in reported
        assert named in (layout.disagreement(reported.replace(old, new)) or "")


def test_every_field_is_documented_once() -> None:
    for structure in layout.STRUCTURES:
        names = [field.name for field in structure.fields]
        assert len(set(names)) == len(names)
        text = structure.describe()
        assert all(f" {name} " in text for name in names) and all(field.meaning for field in structure.fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_plain_attention_is_the_ordinary_pass(dtype: torch.dtype, transposed: bool) -> None:
    query = torch.randn(2, 6, 33, 16).to(dtype)
    key, value = torch.randn(2, 3, 40, 16).to(dtype), torch.randn(2, 3, 40, 24).to(dtype)
    if transposed:
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    for causal in (False, True):
        for scale in (0.25, -3.0):  # the scale is no part of what is kept
            found = plain_attention.attention(query, key, value, scale, causal, True)
            assert found is not None and found[1] is not None
            seen = partita.support.causal() if causal else None
            gibbs = partita.Gibbs(query, key, scale=scale, support=seen, grouped=True)
            mean, state = gibbs.mean(value)
            assert found[0].dtype == dtype and torch.equal(found[0], mean.to(dtype))
            for a, b in zip(found[1], state.stats(), strict=True):
                assert torch.equal(a, b)


def test_what_plain_attention_does_not_serve_is_none() -> None:
    q = torch.randn(2, 4, 5, 8)
    assert plain_attention.attention(q, q, q, 1.0, False, False) is not None
    bad: list[tuple[Tensor, Tensor, Tensor, float]] = [
        (q, q.double(), q, 1.0), (*(q.int(),) * 3, 1.0), (*(q[0, 0],) * 3, 1.0), (q, q[:1], q[:1], 1.0),
        (q, q[:, :3], q[:, :3], 1.0), (q, q[..., :7], q, 1.0), (q[:, :, :0], q, q, 1.0), (q, q, q, float("nan")),
        (q, q.mT.contiguous().mT, q, 1.0), (q, q, q[:, :, :4], 1.0), (q, q, q * float("nan"), 1.0),
        (q.to("meta"), q, q, 1.0),
    ]  # fmt: skip
    for query, key, value, scale in bad:
        assert plain_attention.attention(query, key, value, scale, False, True) is None


def test_logits_and_rows_check_their_storage_too() -> None:
    x = torch.ones(2, 3)
    freed = torch.ones(2, 4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage"):
        losses.logits_of(x, torch.ones(4, 3), freed)
    rows, target = losses.NllSums(*(torch.zeros(2) for _ in range(3))), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="storage"):
        losses.softmax_rows(freed, None, target, rows, torch.ones(2), gradient=True)
