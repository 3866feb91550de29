"""Few rows against many keys: heads as rows, keys in parts, and the states of the parts merged."""

from __future__ import annotations

import pytest
import torch

import partita
from partita.engine.backends.triton import reduce
from tests.triton.cases import DEVICE, DTYPE, compare, everything, needs_triton, normal

pytestmark = needs_triton
S = partita.support


SEEN = {
    "all": None,
    "lengths": S.lengths(259),
    "window": S.window(None, 200),
    "segments": S.segments(torch.zeros(3).long(), torch.arange(300) // 100),
    "mask": S.mask(torch.rand(3, 300, generator=torch.Generator().manual_seed(0)) < 0.3),
    "not self": S.not_self(),
    "none": S.lengths(0),
}


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("kind", SEEN)
def test_parts_of_the_keys_merge_to_the_whole(kind, statistics, launched):
    if DEVICE.type != "cpu":
        pytest.skip("on a device the number of parts is its own")
    given = {"query": normal(3, 8, seed=1), "key": normal(300, 8, seed=2), "value": normal(300, 5, seed=3)}
    compare(given, support=SEEN[kind], statistics=statistics, differentiate=False)
    assert [x.kernel for x in launched] == ["forward.forward", "forward.forward", "decode.merge"]
    assert launched[0].switches["SPLIT"] and launched[0].programs > launched[-1].programs


def test_the_merge_is_the_engines():
    """The whole, and the merge of the states of two halves by `partita.merge`."""
    query, key, value = normal(2, 3, 8, seed=1), normal(2, 300, 8, seed=2), normal(2, 300, 5, seed=3)
    with partita.backend("triton"):
        whole = partita.Gibbs(query, key).state(value)
        halves = [partita.Gibbs(query, key[:, a]).state(value[:, a]) for a in (slice(0, 140), slice(140, 300))]
    merged = partita.merge(*halves)
    slack = 308 * torch.finfo(DTYPE).eps * float(whole.peak.abs().max()) ** 2
    for name in ("peak", "mass", "first", "spread", "count", "moment"):
        torch.testing.assert_close(getattr(whole, name), getattr(merged, name), rtol=slack, atol=slack)


@pytest.mark.parametrize("kind", ["all", "lengths", "not self", "mask by head"])
def test_heads_that_share_their_keys_become_rows(kind, launched):
    support = {"not self": S.not_self(), "lengths": S.lengths(torch.tensor([259, 0], device=DEVICE))}.get(kind)
    if kind == "mask by head":
        support = S.mask((torch.arange(300, device=DEVICE) + torch.arange(6, device=DEVICE)[:, None])[:, None] % 3 > 0)
    query, key, value = normal(2, 6, 1, 8, seed=1), normal(2, 2, 300, 8, seed=2), normal(2, 2, 300, 5, seed=3)
    given = {"query": query, "key": key, "value": value}
    found = everything("triton", given, grouped=True, support=support)
    first = launched[0]
    assert (first.arguments["o"].n_query, first.arguments["o"].n_batch) == (3, 4)  # three heads a tile, four key heads
    want = everything("dense", {n: x.double() for n, x in given.items()}, grouped=True, support=support)
    for name, x in found.items():
        slack = 308 * torch.finfo(DTYPE).eps * max(1.0, float(want["max_score"].nan_to_num(0, 0, 0).abs().max()) ** 2)
        torch.testing.assert_close(x.double(), want[name].double(), rtol=0, atol=slack)


def test_an_infinite_value_stays_infinite_however_little_its_part_weighs():
    query, key, value = torch.ones(1, 1), torch.zeros(300, 1), torch.zeros(300, 2)
    key[290], value[3, 0] = 1000.0, torch.inf
    with partita.backend("triton"):
        mean = partita.Gibbs(query.to(DEVICE), key.to(DEVICE)).expectation(value.to(DEVICE))
    assert mean[0].tolist() == [torch.inf, 0.0]


def test_what_is_not_a_group_is_not_folded():
    query, key = torch.zeros(2, 3, 1, 4), torch.zeros(2, 1, 5, 4)
    asked = partita.Gibbs(query, key).request()
    folded = reduce.fold(asked)
    assert folded is not None and folded.batch == (2, 1) and folded.n_query == 3
    assert reduce.fold(partita.Gibbs(query, key.expand(2, 3, 5, 4)).request()) is None  # keys of their own
    assert reduce.fold(partita.Gibbs(query.expand(2, 3, 2, 4), key).request()) is None  # more than one query
