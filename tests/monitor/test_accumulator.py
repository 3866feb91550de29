"""Sums of rows are those of a loop over the rows, and finished steps are what they were alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita
from partita.engine import Stats
from partita.monitor.measure import BANDS, BINS, SUMS, Accumulator, blocks
from partita.monitor.scores import Scores


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


def by_rows(stats: Stats, sink: torch.Tensor, keep: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The same sums, row by row."""
    batch, heads, n = stats.entropy.shape
    out = {
        "sums": torch.zeros(len(SUMS), heads),
        "peak": torch.full((heads,), -torch.inf),
        "length": torch.zeros(heads),
    }
    out |= {"histogram": torch.zeros(heads, BINS), "bands": torch.zeros(5, heads, BANDS)}
    out = {name: t.double() for name, t in out.items()}
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(n)):
        row = Stats(*(float(t[b, h, i]) for t in stats))
        if row.visible == 0 or (keep is not None and not keep[b, i]):
            continue
        out["length"][h] = max(float(out["length"][h]), row.visible)
        if not all(math.isfinite(x) for x in (row.log_partition, row.entropy, row.max_score)):
            out["sums"][2, h] += 1
            continue
        out["peak"][h] = max(float(out["peak"][h]), row.max_score)
        if row.visible < 2:
            out["sums"][1, h] += 1
            continue
        normal, width, mass = row.entropy / math.log(row.visible), math.exp(row.entropy), float(sink[b, h, i])
        top = math.exp(row.max_score - row.log_partition)
        means = (row.entropy, normal, width, row.log_partition, row.score_variance, mass, top, row.visible)
        out["sums"][:, h] += torch.tensor([1.0, 0.0, 0.0, *means]).double()
        out["histogram"][h, min(BINS - 1, int(normal * BINS))] += 1
        band = min(BANDS - 1, int(math.log2(row.visible) + 1e-4))
        out["bands"][:, h, band] += torch.tensor([1.0, row.visible, width, normal, mass]).double()
    return out


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.sampled_from([1, 8]),
    st.booleans(),
)  # fmt: skip
def test_sums_are_those_of_a_loop_over_the_rows(seed: int, batch: int, heads: int, n: int, dim: int, pad: bool) -> None:
    stats, call = rows_of(seed, batch, heads, n, dim)
    keep = torch.rand(batch, n, generator=torch.Generator().manual_seed(seed + 1)) < 0.7 if pad else None
    sink, part = call.first_key(stats.log_partition), Accumulator(heads, torch.device("cpu"), True)
    for _ in range(2):  # twice: sums go on
        part.add(stats, sink, keep)
    for name, wanted in by_rows(stats, sink, keep).items():
        found, wanted = getattr(part, name), wanted if name in ("peak", "length") else 2 * wanted
        if name == "histogram":  # a value on the edge of two bins may fall to either side
            assert (found.cumsum(-1) - wanted.cumsum(-1)).abs().max() <= 2
        else:
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("same", [True, False])
def test_bands_of_heads_that_see_the_same_keys_or_others(same: bool) -> None:
    visible = torch.tensor([2.0, 4.0, 64.0, 70.0]).expand(1, 3, 4).clone()
    visible[:, 1] = visible[:, 1] if same else 8.0
    stats = Stats(*(torch.full_like(visible, 0.5) for _ in range(5)), visible)
    part = Accumulator(3, torch.device("cpu"), True)
    part.add(stats, torch.zeros_like(visible), None)
    torch.testing.assert_close(part.bands, by_rows(stats, torch.zeros_like(visible), None)["bands"])
    assert part.bands[0, 1, 3] == (0 if same else 4) and part.bands[0, 0, 6] == 2


def test_layers_and_steps_finished_together_are_those_finished_alone() -> None:
    parts = []
    for step in range(2):
        for layer, heads in enumerate((2, 5, 1)):
            stats, call = rows_of(step * 10 + layer, 2, heads, 20, 4)
            part = Accumulator(heads, torch.device("cpu"), True)
            part.add(stats, call.first_key(stats.log_partition), None)
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
