"""Every number that watch records, of random models of every entry point, against scores written out in float64."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from random_models import Case, random_case
from torch import Tensor

import partita
from partita.monitor import COLUMNS
from partita.monitor.record import BAND_COLUMNS, SAMPLED_MEANS, Block

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")
FAST, ALL = 60, 600
BIN = 1 / 256  # of the histogram that quantiles are read from


class Truth(oracle.Truth):
    """And what is read from ordered scores and from pairs of heads."""

    def critical(self, error: float) -> Tensor:  # (heads,)
        """Median over the later half of the rows of max_j log(j) / gap_j, with every gap larger by `error`."""
        ordered = self.scores.sort(-1, descending=True).values
        gaps = torch.where(ordered > -math.inf, ordered[..., :1] - ordered + error, math.inf)[..., 1:].clamp(min=0)
        each = torch.arange(2, self.n_key + 1).double().log() / gaps
        found = torch.where(self.good, each.amax(-1), math.nan) if self.n_key > 1 else self.entropy * math.nan
        return found[:, :, self.n // 2 :].transpose(0, 1).flatten(1).nanmedian(-1).values

    def rivals(self, edge: float) -> Tensor:  # (heads,)
        """Mean over the later half of the rows of the keys whose score is at most `edge` below the best."""
        near = (self.scores >= self.scores.amax(-1, keepdim=True) - edge).sum(-1).double()
        counted = torch.where(self.good, near, math.nan)
        return counted[:, :, self.n // 2 :].transpose(0, 1).flatten(1).nanmean(-1)

    def likeness(self) -> Tensor:  # (heads, heads)
        seen = self.p > 0
        centred = torch.where(seen & self.there[..., None], self.p - 1 / self.visible.clamp(min=1)[..., None], 0.0)
        flat = centred.transpose(0, 1).flatten(1)
        gram = flat @ flat.T
        norm = gram.diagonal().sqrt()
        like = gram / torch.outer(norm, norm)
        like.fill_diagonal_(-math.inf)
        return torch.where(gram.diagonal()[:, None] < 1e-10, math.nan, like)  # a uniform head has no direction


def assert_columns(case: Case, block: Block, truth: Truth) -> None:
    loose = case.tolerance * truth.size
    want = truth.means()
    for name, values in want.items():
        for head, (got, right) in enumerate(zip(block.column(name), values.tolist(), strict=True)):
            slack = loose * max(1.0, abs(right)) * (truth.size if name == "score_variance" else 1.0)
            same = (math.isnan(got) and math.isnan(right)) or abs(got - right) <= slack
            assert same, f"{name} of head {head}: {got}, and it is {right}; {case.about}"
    assert_quantiles(case, block, truth, loose)
    mass, like = truth.key_mass(), truth.likeness()
    for head in range(truth.heads):
        row = block.row(head)
        if truth.there[:, head].any():
            assert abs(row["sink_top"] - float(mass[head].max())) <= loose, case.about
            assert abs(float(mass[head, int(row["sink_key"])] - mass[head].max())) <= 2 * loose, case.about
        if truth.heads == 1 or like[head].isnan().all():
            continue
        assert abs(row["twin_similarity"] - float(like[head].nan_to_num(-2.0).max())) <= 50 * loose, case.about
        assert abs(float(like[head, int(row["twin"])]) - row["twin_similarity"]) <= 50 * loose, case.about
    for got, low, high in zip(
        block.column("critical"), truth.critical(2 * loose), truth.critical(-2 * loose), strict=True
    ):
        # a score that is wrong by `loose` moves a gap by twice as much, and the maximum and the median are monotone
        same = low * (1 - 1e-6) <= got <= high * (1 + 1e-6) if low == low else math.isnan(got)
        assert same, f"critical: {got}, {low} to {high}; {case.about}"
    for got, low, high in zip(
        block.column("rivals"), truth.rivals(1 - 2 * loose), truth.rivals(1 + 2 * loose), strict=True
    ):
        same = low - 1e-9 <= got <= high + 1e-9 if low == low else math.isnan(got)
        assert same, f"rivals: {got}, {low} to {high}; {case.about}"
    quantiles = {name for name in COLUMNS if name[-4:] in ("_p05", "_p50", "_p95")}
    errors = {f"{name}_se" for name in SAMPLED_MEANS}  # every row is looked at; sampled rows: test_phases.py
    assert all(
        error == 0 or right != right
        for name in errors
        for error, right in zip(block.column(name), block.column(name[:-3]), strict=True)
    )
    checked = {
        *want,
        *quantiles,
        *errors,
        "critical",
        "rivals",
        "scale",
        "sink_top",
        "sink_key",
        "twin",
        "twin_similarity",
    }
    assert set(COLUMNS) <= checked, f"no truth for {set(COLUMNS) - checked}"


def assert_quantiles(case: Case, block: Block, truth: Truth, loose: float) -> None:
    """Within a bin of the order statistics on both sides of the level; rounding may move a value into the next bin."""
    for name, level in zip((c for c in COLUMNS if c[-4:] in ("_p05", "_p50", "_p95")), (0.05, 0.5, 0.95), strict=True):
        for head, got in enumerate(block.column(name)):
            values = truth.normal[:, head][truth.good[:, head]].sort()[0].tolist()
            if not values:
                assert math.isnan(got)
                continue
            at = level * len(values)
            low = values[max(0, min(len(values) - 1, math.ceil(at - 1e-6) - 1))]
            high = values[max(0, min(len(values) - 1, math.ceil(at + 1e-6) - 1))]
            assert low - 2 * BIN - loose <= got <= high + 2 * BIN + loose, (
                f"{name}: {got}, {low} to {high}; {case.about}"
            )


def assert_bands(case: Case, block: Block, truth: Truth) -> None:
    band = truth.visible.clamp(min=1).double().log2().floor().long()
    filled = set(band[truth.good].tolist())
    assert set(block.bands) == filled, case.about
    for index in filled:
        inside = truth.good & (band == index)
        count = inside.sum((0, 2)).double()
        given = torch.tensor(list(block.bands[index]), dtype=torch.float64).view(truth.heads, -1)
        names = {"width": "effective_width"}
        for i, name in enumerate(BAND_COLUMNS):
            rows = torch.ones_like(truth.entropy) if name == "rows" else truth.rows[names.get(name, name)]
            right = torch.where(inside, rows, 0.0).sum((0, 2)) / (1.0 if name == "rows" else count.clamp(min=1))
            slack = case.tolerance * truth.size * right.abs().clamp(min=1.0)
            assert ((given[:, i] - right).abs() <= slack).all(), f"band {index} {name}; {case.about}"


def assert_curve(case: Case, curve: dict[str, Any], keep: Tensor | None) -> None:
    for at, factor in enumerate(curve["factors"]):
        truth = Truth(case.scores(factor), keep)
        count = truth.good.sum((0, 2))
        mean = torch.where(truth.good, truth.entropy, 0.0).sum((0, 2)) / count
        for head, right in enumerate(mean.tolist()):
            got = curve["mean"][head][at]
            same = (math.isnan(got) and math.isnan(right)) or abs(got - right) <= 2 * case.tolerance * truth.size
            assert same, f"curve at {factor}: {got}, and it is {right}; {case.about}"


def assert_received(case: Case, profiles: list[dict[str, Any]], truth: Truth) -> None:
    """Column sums over rows that see a key, and those of rows that see the same keys alike."""
    mass, count = truth.key_mass(), truth.there.sum((0, 2))
    assert len(profiles) == int(count.max() > 0), case.about
    for profile in profiles:
        assert profile["n_key"] == truth.n_key and profile["rows"] == count.tolist(), case.about
        for head in range(truth.heads):
            shares, top = torch.tensor(profile["bins"][head], dtype=torch.float64), profile["top"][head]
            assert ((shares - mass[head]).abs() <= 2 * case.tolerance * truth.size).all(), case.about  # a bin per key
            assert all(abs(share - float(mass[head, key])) <= 2 * case.tolerance * truth.size for key, share in top)
        even = torch.where(truth.scores > -math.inf, 1.0 / truth.visible.clamp(min=1)[..., None], 0.0)
        even = torch.where(truth.there[..., None], even, 0.0).sum((0, 1, 2))
        alike = torch.tensor(profile["alike"], dtype=torch.float64)
        assert ((alike - even / even.sum()).abs() <= 1e-5).all(), f"alike; {case.about}"


def check(seed: int) -> None:
    case = random_case(seed)
    results = []
    with case.block(), torch.backends.mkldnn.flags(enabled=False), torch.no_grad():
        torch.manual_seed(seed)
        results.append(case.model(*case.args, **case.kwargs))
        with partita.watch(case.model, received=True, critical=True) as w:
            torch.manual_seed(seed)
            results.append(case.model(*case.args, **case.kwargs))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True, msg=f"other bits; {case.about}")
    assert not w.coverage.get("errors") and not w.coverage.get("impossible"), f"{w.coverage}; {case.about}"
    record = w.finished()
    assert len(record.blocks) == 1, f"{len(record.blocks)} softmaxes; {case.about}"
    truth = Truth(case.scores(1.0), case.keep)
    assert_columns(case, record.blocks[0], truth)
    assert_bands(case, record.blocks[0], truth)
    assert_curve(case, record.curves[0], case.keep)
    assert_received(case, record.received, truth)


@pytest.mark.parametrize("seed", range(FAST))
def test_every_column_of_a_random_model_is_right(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FAST, ALL, 30))
def test_every_column_of_many_random_models_is_right(first: int) -> None:
    for seed in range(first, first + 30):
        check(seed)
