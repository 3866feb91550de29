"""The walk over rows in the native library and the tensor operations it stands for add up the same numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita
from partita.engine import Stats
from partita.engine.backends.native import library as native_library
from partita.engine.backends.native import statistics as native_tally
from partita.monitor.accumulator import Accumulator, blocks
from partita.monitor.scores import Scores

needs_native = pytest.mark.skipif(native_library.load() is None, reason="no native library")
FIELDS = ("sums", "peak", "length", "histogram", "bands")


def rows_of(seed: int, batch: int, heads: int, n: int, dim: int) -> tuple[Stats, Scores]:
    """Statistics with rows that see nothing, one key, few and many, and with rows that are not finite."""
    made = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=made)

    visible = torch.tensor([0.0, 1.0, 2.0, 3.0, 64.0, 70.0, 4096.0])[(uniform(batch, heads, n) * 7).long()]
    entropy = uniform(batch, heads, n) * visible.clamp(min=1).log()
    log_z = uniform(batch, heads, n) * 4 + entropy
    top = log_z - uniform(batch, heads, n)
    spoil = uniform(batch, heads, n)
    log_z = torch.where(spoil < 0.05, torch.nan, log_z)
    top = torch.where((spoil > 0.05) & (spoil < 0.1), torch.inf, top)
    query, key = (uniform(batch, n, heads, dim).transpose(1, 2) - 0.5 for _ in range(2))
    return Stats(log_z, entropy, log_z, uniform(batch, heads, n), top, visible), Scores(query, key, 0.3)


def both(stats: Stats, call: Scores, keep: torch.Tensor | None, *, given_sink: bool) -> tuple[Accumulator, Accumulator]:
    mine, plain = (Accumulator(call.heads, torch.device("cpu"), True) for _ in range(2))
    first = call.first_key(stats.log_partition)
    totals = native_tally.Totals(*(getattr(mine, name) for name in FIELDS))
    rows = (stats.entropy, stats.log_partition, stats.score_variance, stats.max_score, stats.visible)
    for _ in range(2):  # twice: sums go on
        assert native_tally.accumulate(totals, *rows, first if given_sink else call.plain(), keep)
        plain._add(stats, first, keep)
    return mine, plain


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 5), st.integers(1, 70), st.sampled_from([1, 7, 8, 33]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_both_ways_of_adding_agree(
    seed: int, batch: int, heads: int, n: int, dim: int, padded: bool, given_sink: bool
) -> None:
    stats, call = rows_of(seed, batch, heads, n, dim)
    keep = torch.rand(batch, n, generator=torch.Generator().manual_seed(seed + 1)) < 0.7 if padded else None
    mine, plain = both(stats, call, keep, given_sink=given_sink)
    for name in FIELDS:
        a, b = getattr(mine, name), getattr(plain, name)
        if name == "histogram":  # a value on the edge of two bins may fall to either side
            a, b = a.cumsum(-1), b.cumsum(-1)
            assert (a - b).abs().max() <= 2
        else:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)


@needs_native
def test_rows_the_library_does_not_serve_are_left_to_torch() -> None:
    stats, call = rows_of(0, 2, 3, 8, 4)
    part = Accumulator(3, torch.device("cpu"), True)
    wide = Stats(*(t.double() for t in stats))
    totals = native_tally.Totals(*(getattr(part, name) for name in FIELDS))
    rows = (wide.entropy, wide.log_partition, wide.score_variance, wide.max_score, wide.visible)
    assert not native_tally.accumulate(totals, *rows, call.first_key(stats.log_partition).double(), None)
    assert part.sums.abs().sum() == 0
    part.add(call, wide)
    assert part.sums[0].sum() > 0
    with pytest.raises(ValueError, match="sums must be contiguous float64"):
        native_tally.accumulate(totals._replace(sums=part.sums.float()), *(stats.entropy,) * 6, None)


def test_layers_and_steps_finished_together_are_those_finished_alone() -> None:
    parts = []
    for step in range(2):
        for layer, heads in enumerate((2, 5, 1)):
            stats, call = rows_of(step * 10 + layer, 2, heads, 20, 4)
            part = Accumulator(heads, torch.device("cpu"), True)
            part.add(call, stats)
            part.add_sample(torch.rand(2, heads, 4, 9).softmax(-1), None)
            parts.append((step, layer, part))
    together = blocks(parts)
    assert [(b.step, b.layer) for b in together] == [(s, layer) for s, layer, _ in parts]
    for block, one in zip(together, parts, strict=True):
        (alone,) = blocks([one])
        assert list(block.bands) == list(alone.bands)
        torch.testing.assert_close(torch.tensor(block.values), torch.tensor(alone.values), equal_nan=True)
        for band in block.bands:
            torch.testing.assert_close(torch.tensor(block.bands[band]), torch.tensor(alone.bands[band]))
    assert blocks([]) == []


def test_every_step_is_recorded_once_and_in_order() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 9, 16)
    with partita.watch(model) as seen:
        for _ in range(11):
            model(x)
        assert seen.finished().steps() == list(range(11))  # in the middle of the block, unfinished ones included
        for _ in range(20):
            model(x)
    record = seen.finished()
    assert [(b.step, b.layer) for b in record.blocks] == [(s, i) for s in range(31) for i in range(2)]


def test_a_later_step_leaves_the_numbers_of_an_earlier_one_alone() -> None:
    """A token alone borrows the last close look; a whole input in the same step then takes one of its own."""

    class Attention(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, key)

    def first_step(*, more: bool) -> list[list[float]]:
        model, made = Attention().eval(), torch.Generator().manual_seed(0)
        x, y = (torch.randn(1, 3, 16, 4, generator=made) for _ in range(2))
        with partita.watch(model, critical=True) as seen:
            seen.set_step(0)
            model(x, x)
            seen.set_step(1)
            model(x[:, :, :1], x)
            if more:
                model(3 * y, y)
        columns = ("sink_top", "sink_key", "twin", "twin_similarity", "critical")
        return [[row[name] for name in columns] for row in seen.frame(pandas=False) if row["step"] == 0]

    assert first_step(more=True) == first_step(more=False)
