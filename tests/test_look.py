"""What objects show of themselves, in a terminal and in a notebook."""

from __future__ import annotations

import re

import pytest
import torch

import partita
from partita import scale, support


def squares(html: str) -> list[bool]:
    return [float(x) > 0.5 for x in re.findall(r'fill-opacity="([\d.]+)"', html)]


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (support.causal(), (12, 12)),
        (support.window(2, 1) | support.lengths(1), (12, 12)),
        (support.segments(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])), (3, 3)),
        (support.mask(torch.tensor([[True, False, True], [False, True, True]])), (2, 3)),
        (support.lengths(torch.tensor([20, 3])), (20, 20)),
        (support.lengths(torch.tensor([[4, 3]])) & support.causal(), (12, 12)),
    ],
    ids=str,
)
def test_a_support_draws_the_keys_each_row_sees(made, shape):
    batch = next((tuple(t.shape) for t in made.tensors() if "lengths" in repr(made)), ())
    dense = made.dense(*shape, batch).reshape(-1, *shape)[0]
    assert squares(made._repr_html_()) == dense.flatten().tolist()


def test_a_large_support_says_what_it_is_and_draws_nothing():
    made = support.mask(torch.ones(100, 100, dtype=torch.bool))
    assert "<svg" not in made._repr_html_()
    assert "support.mask(&lt;bool (100, 100)&gt;)" in made._repr_html_()


def test_statistics_show_their_range_and_what_is_not_finite():
    key = torch.tensor([[0.0], [0.0]])
    stats = partita.Gibbs(torch.zeros(3, 1), key, support=support.lengths(torch.tensor(2))).stats()
    shown = repr(stats)
    assert shown.startswith("Stats of 3 rows (3,)")
    assert re.search(r"entropy +0\.6931\n", shown)  # log 2 in every row
    empty = repr(partita.Gibbs(torch.zeros(1, 1), key, support=support.lengths(0)).stats())
    assert re.search(r"log_partition +nowhere finite, -inf", empty)


def test_statistics_of_losses_show_themselves_under_their_own_names():
    x = torch.eye(4)
    calls = [
        lambda: partita.info_nce_loss(x, x, return_stats=True),
        lambda: partita.nt_xent_loss(x, x, return_stats=True),
        lambda: partita.linear_cross_entropy(x, x, torch.arange(4), return_stats=True),
        lambda: partita.supcon_loss(x, torch.arange(4) % 2, return_stats=True),
    ]
    for call in calls:
        stats = call()[1]
        assert repr(stats).startswith(f"{type(stats).__name__} of {len(stats.entropy)} rows")
        assert all(field in repr(stats) for field in stats._fields)


def test_statistics_without_numbers_show_their_shape():
    meta = torch.empty(2, 3, device="meta")
    assert "float32 (2, 3)" in repr(partita.Stats(*[meta] * 6))


def test_a_state_shows_its_sums_and_a_gibbs_its_ingredients():
    p = partita.Gibbs(torch.zeros(2, 3), torch.zeros(5, 3), scale=scale.LogLength(), support=support.causal())
    assert "(2, 3)" in repr(p)
    assert repr(p).endswith("scale=LogLength(reference=512, floor=4), support=support.causal())")
    shown = repr(p.state(torch.zeros(5, 7)))
    assert shown.startswith("State of 2 rows (2,)")
    assert "moment  (2, 7)" in shown


def test_a_policy_shows_how_it_bends():
    shown = scale.LogLength(reference=512)._repr_html_()
    assert "<td>512 keys</td><td>1.000 / sqrt(dim)</td>" in shown
    assert "<td>32,768 keys</td><td>1.667 / sqrt(dim)</td>" in shown  # log 32768 / log 512 = 15 / 9
    assert "TargetEntropy" in scale.TargetEntropy(fraction=0.5)._repr_html_()
