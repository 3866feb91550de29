"""The kernels against one dense tile: tile borders, levels, supports, dimensions, strides, biases, determinism."""

from __future__ import annotations

import pytest
import torch

import partita
from partita.engine.backends import TABLE
from partita.engine.backends.triton import launch
from partita.engine.sums import SumGrads
from tests.strategies import SUPPORTS, catalogue
from tests.triton.cases import DEVICE, DTYPE, INTERPRETED, compare, everything, needs_triton, normal

pytestmark = needs_triton


def operands(n_query=37, n_key=45, dim=9, dim_value=5, batch=(), **given):
    found = {
        "query": normal(*batch, n_query, dim, seed=1),
        "key": normal(*batch, n_key, dim, seed=2),
        "value": normal(*batch, n_key, dim_value, seed=3),
        "scale": normal(n_query, seed=4).abs() + 0.1,
        "bias": None,
    }
    return {**found, **given}


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (31, 33), (32, 32), (33, 65)])
def test_sizes_that_straddle_the_border_of_a_tile(n_query, n_key, statistics):
    target = torch.arange(n_query, device=DEVICE) % n_key
    compare(operands(n_query, n_key), statistics=statistics, target=target)


@pytest.mark.parametrize("kind", SUPPORTS)
def test_every_support_over_more_than_one_tile_of_rows_and_keys(kind):
    """With a target and its rank, and with gradients of everything."""
    support, _ = catalogue(37, 45)[kind]
    if DEVICE.type != "cpu":
        pytest.skip("the catalogue's supports are made on the CPU")
    compare(operands(), support=support, target=torch.arange(37) % 45)


@pytest.mark.parametrize(("dim", "dim_value"), [(1, 1), (17, 96), (96, 3), (256, 256)])
def test_any_dimension_up_to_256_and_a_value_of_another(dim, dim_value):
    compare(operands(5, 33, dim, dim_value, scale=normal(5, seed=4) / dim**0.5))


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("shape", [(37, 1), (1, 45), (37, 45), (2, 1, 37, 45), (3, 1, 45)])
def test_biases_by_row_by_key_and_dense_in_a_batch_that_shares_keys(shape, softcap):
    """Batch (2, 3); keys are shared by the last dimension, the bias by either or both: gradients add up."""
    given = operands(batch=(2, 3), bias=normal(*shape, seed=5))
    given["key"], given["value"] = given["key"][:, :1], given["value"][:, :1]
    compare(given, softcap=softcap)


def test_operands_that_broadcast_each_in_its_own_way_get_gradients_of_their_shape():
    """Rows (2, 3): the query lacks one dimension, key and value the other or both, bias and scale what they like."""
    shapes = {"query": (2, 1, 33, 4), "key": (3, 35, 4), "value": (1, 35, 2), "bias": (2, 1, 1, 35), "scale": (3, 1)}
    compare({name: normal(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}, terms=6 * (33 + 35 + 4))


def test_a_bias_before_the_softcap_and_hidden_keys():
    bias = normal(1, 45, seed=5).masked_fill(torch.arange(45, device=DEVICE) % 7 == 0, -torch.inf)
    compare(operands(bias=bias), softcap=1.5, cap_bias=True)


def test_grouped_queries_without_copies():
    query, key, value = normal(2, 6, 33, 8, seed=1), normal(2, 2, 40, 8, seed=2), normal(2, 2, 40, 4, seed=3)
    given = {"query": query, "key": key, "value": value}
    found = everything("triton", given, grouped=True, support=partita.support.causal())
    repeated = {"query": query, **{n: given[n].repeat_interleave(3, 1) for n in ("key", "value")}}
    want = everything("dense", {n: x.double() for n, x in repeated.items()}, support=partita.support.causal())
    for name in ("key", "value"):
        want["d " + name] = want["d " + name].unflatten(1, (2, 3)).sum(2)
    slack = (
        121 * torch.finfo(DTYPE).eps * float(query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max()) ** 2
    )
    for name, x in found.items():
        torch.testing.assert_close(x.double(), want[name].double(), rtol=0, atol=slack)


def test_strided_operands_in_place():
    """Heads behind positions, features that are not adjacent, an expanded value, the negative bit of a view."""
    given = {
        "query": normal(2, 33, 3, 8, seed=1).transpose(1, 2),
        "key": normal(2, 3, 8, 40, seed=2).mT,
        "value": torch._neg_view(normal(2, 1, 40, 4, seed=3)).expand(2, 3, 40, 4),
    }
    with partita.backend("triton"):
        p = partita.Gibbs(given["query"], given["key"])
        mean, state = p.mean(given["value"])
    with partita.backend("dense"):
        want = partita.Gibbs(given["query"].double(), given["key"].double())
        expected, other = want.mean(given["value"].double())
    slack = 48 * torch.finfo(DTYPE).eps * float(want.max_score().abs().max()) ** 2
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=slack)
    torch.testing.assert_close(state.entropy().double(), other.entropy(), rtol=0, atol=slack)


def test_the_result_is_laid_out_as_the_query():
    query = normal(2, 33, 3, 8, seed=1).transpose(1, 2)
    with partita.backend("triton"):
        out = partita.attention(query, query, query, scale=0.3)
    assert out.stride() == query.stride()


@pytest.mark.parametrize(("n_query", "n_key"), [(1, 300), (33, 70)])
def test_the_same_call_twice_gives_the_same_bits(n_query, n_key):
    """One row is split over its keys; more than a tile of each go over several."""
    given = operands(n_query, n_key, batch=(2,), bias=normal(n_query, n_key, seed=5))
    first, second = (everything("triton", given, softcap=3.0) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize("place", ["key", "value"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_behind_the_diagonal_reaches_exactly_the_rows_that_see_it(place, poison):
    """Key 40 lies in the second tile, beside keys that every row of the tile sees."""
    given = operands(45, 45)
    given[place] = given[place].clone()
    given[place][40] = poison
    found = everything("triton", given, support=partita.support.causal())
    clean = everything("triton", operands(45, 45), support=partita.support.causal())
    rows = torch.arange(45, device=DEVICE) >= 40
    assert torch.equal(~found["mean"].isfinite().all(-1), rows)
    # on a device the repair has smaller tiles, and rounds otherwise
    slack = 0.0 if INTERPRETED else 45 * torch.finfo(DTYPE).eps * float(clean["max_score"].abs().max())
    for name in ("mean", "entropy"):
        torch.testing.assert_close(found[name][:40], clean[name][:40], rtol=0, atol=slack)
    assert found["d query"][:40].isfinite().all()


def test_a_query_that_is_not_finite_spoils_no_key_it_does_not_see():
    given = operands(45, 45)
    given["query"] = given["query"].clone()
    given["query"][3] = torch.nan
    found = everything("triton", given, support=partita.support.causal())
    assert torch.equal(found["d key"].isnan().any(-1), torch.arange(45, device=DEVICE) <= 3)
    assert torch.equal(found["d query"].isnan().any(-1), torch.arange(45, device=DEVICE) == 3)


def test_small_scores_keep_their_digits_under_a_large_softcap():
    """50 tanh(s / 50) of a small s is s to nearly all its digits; 1 - 2 / (1 + exp) alone would know 50 * eps of it."""
    query, key = normal(9, 4, seed=1, dtype=torch.float32) * 0.02, normal(33, 4, seed=2, dtype=torch.float32) * 0.02
    with partita.backend("triton"):
        found = partita.Gibbs(query, key, softcap=50.0).max_score()
    want = (50 * torch.tanh(query.double() @ key.double().mT / 50)).amax(-1)
    # 4 products and their sum, the change to base 2 and back, and the polynomial: a dozen roundings
    torch.testing.assert_close(found.double(), want, rtol=12 * torch.finfo(torch.float32).eps, atol=0)


def test_gradients_of_half_precision_do_not_sink_below_its_smallest_number():
    """The backward pass is linear: a millionth (a power of two) of the upstream gives a millionth, to the last bit."""
    query, key, value = (normal(n, 8, seed=n, dtype=torch.float16) for n in (33, 40, 40))
    asked = partita.Gibbs(query, key).asking(value)
    kernels = TABLE["triton"]
    peak = kernels.forward(asked).peak

    def gradients(factor):
        rows = [normal(33, seed=seed, dtype=torch.float32) * factor for seed in (1, 2, 3)]
        g = SumGrads(*rows, normal(33, 8, seed=4, dtype=torch.float32) * factor, None)
        return kernels.backward(asked, peak, g, (True, True, True, True, False))

    whole, part = gradients(1.0), gradients(2.0**-20)
    for name, x in whole.items():
        assert torch.equal(part[name] * 2**20, x), name
        assert x.abs().min() > 0


def test_the_middle_level_has_everything_but_the_variance():
    """To the last bit, in the pass and in its backward; on a device, up to rounding."""
    given = operands(33, 65)
    want, found = (everything("triton", given, variance=variance) for variance in (True, False))
    assert found.pop("score_variance").isnan().all()
    assert found.keys() == want.keys() - {"score_variance"}
    for name in ("log_partition", "entropy", "mean_score", "max_score", "visible", "mean"):
        assert torch.equal(found[name], want[name]) or not INTERPRETED, name
    compare({n: x for n, x in given.items() if n != "bias"} | {"bias": None}, variance=False)


@pytest.mark.parametrize(("of", "level"), [("mean", 0), ("entropy", 2), ("score_variance", 2)])
def test_the_backward_pass_has_the_level_that_flows_back(of, level, launched):
    """Statistics that are not differentiated cost nothing there."""
    given = operands()
    query = given["query"].clone().requires_grad_()
    with partita.backend("triton"):
        mean, state = partita.Gibbs(query, given["key"]).mean(given["value"])
    (mean if of == "mean" else getattr(state, of)()).sum().backward()
    levels = {(x.kernel.split(".")[0], x.switches["LEVEL"]) for x in launched}
    assert levels == {("forward", 2), ("backward", level)}


@pytest.mark.skipif(not INTERPRETED, reason="sizes of the interpreter's tiles")
def test_tiles_that_no_row_sees_are_not_visited(monkeypatch):
    """A nan in a key that the intervals exclude is never multiplied: not even a repair is needed."""
    seen = []
    run = launch.Launch.run

    def watched(self, device):
        run(self, device)
        if not self.switches.get("CAREFUL", True):
            seen.append((self.kernel, self.arguments["flags"].clone()))

    monkeypatch.setattr(launch.Launch, "run", watched)
    given = operands(64, 96)
    for name in ("key", "value"):
        given[name] = given[name].clone()
        given[name][64:] = torch.nan
    everything("triton", given, support=partita.support.window(5, 0))
    assert {name for name, _ in seen} == {"forward.forward", "backward.rows", "backward.keys"}
    assert not any(flags.any() for _, flags in seen)
