"""The kernels as compiled for sm_80, with the launcher's own grids and arguments, against dense float64.

Every run watches for races, bounds, alignment and what was never written; the slow ones do the rest of the table.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

import partita
from tests.ptx.cases import Problem, agrees, normal, served
from tests.ptx.device import executing
from tests.ptx.opcodes import Rounding
from tests.tolerances import assert_no_worse_than_naive

S = partita.support
BF, HF, F = torch.bfloat16, torch.float16, torch.float32
WORST = {
    "one warp at a time": Rounding(order="apart", seed=1),
    "another order": Rounding(order="apart", seed=2),
    "exponentials too large": Rounding(approximate=1.0, product="truncated"),
    "exponentials too small": Rounding(approximate=-1.0, product="truncated"),
    "exponentials either way": Rounding(approximate="scattered", product="truncated", order="apart", seed=3),
}
HARD = ("causal", "segments", "decode, split")
ULPS = 64  # of the worst: an exponential is off by 4, and of 8 products at a time each sum is cut by 1 or 2

g = torch.Generator().manual_seed(0)
HALF = torch.rand(70, 70, generator=g) < 0.5
HALF[5] = False  # a row that sees nothing
CASES: dict[str, functools.partial[Problem]] = {
    name: functools.partial(Problem, *shape, **options)
    for name, shape, options in [
        ("causal", (BF, 150, 150, 64), {"support": S.causal()}),
        ("window", (BF, 70, 70, 128), {"support": S.causal() & S.window(20, 0)}),
        ("segments", (HF, 70, 70, 64), {"support": S.segments(torch.arange(70) % 5, torch.arange(70) % 5)}),
        ("mask and softcap", (BF, 70, 70, 64), {"support": S.mask(HALF), "softcap": 2.0}),
        ("target and its rank", (BF, 70, 70, 64), {"target": torch.arange(70) % 45}),
        ("dense bias", (BF, 70, 70, 64), {"bias": (70, 70), "support": S.not_self()}),
        ("bias by key", (F, 33, 65, 64), {"bias": (1, 65)}),
        ("bias by row", (HF, 70, 70, 128), {"bias": (70, 1), "statistics": False}),
        ("grouped", (BF, 70, 70, 64), {"batch": (4,), "shared": (2,), "grouped": True, "support": S.causal()}),
        ("float32", (F, 40, 70, 128), {"support": S.causal()}),
        ("middle level", (BF, 70, 140, 64), {"variance": False}),
        ("output alone", (BF, 150, 130, 128), {"statistics": False}),
        ("tails", (BF, 129, 65, 40), {"dim_value": 72, "batch": (1,)}),
        ("nothing but one", (HF, 17, 1, 64), {}),
        ("rows with nothing", (BF, 70, 70, 64), {"support": S.lengths(torch.tensor([0, 33]))}),
        ("decode, split", (BF, 3, 600, 64), {"differentiate": False}),
        ("decode, split, float32", (F, 1, 300, 128), {"differentiate": False, "support": S.lengths(259)}),
        ("decode, heads as rows", (HF, 1, 520, 64),
         {"batch": (2, 6), "shared": (2, 2), "grouped": True, "differentiate": False}),
    ]
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_pass_and_its_backward(name):
    problem = CASES[name]()
    found, device = problem.results()
    agrees(problem, found)
    kinds = ["forward", "(forward)", *(["merge"] if "decode" in name else ["rows", "(rows)", "keys", "(keys)"])]
    assert served(device)[: len(kinds)] == kinds
    assert device.host_reads == []


@pytest.mark.parametrize("how", WORST)
@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in HARD else pytest.mark.slow) for x in CASES])
def test_the_worst_that_hardware_may_do(name, how):
    problem = CASES[name]()
    found, _ = problem.results(WORST[how])
    agrees(problem, found, ulps=ULPS)


def test_tf32_where_it_is_allowed(monkeypatch):
    monkeypatch.setattr("partita.engine.backends.triton.launch._allows_tf32", lambda: True)
    problem = Problem(F, 40, 70, 64)
    found, device = problem.results()
    assert all("mma.sync.aligned.m16n8k8.row.col.f32.tf32" in x.ptx for x in device.launches)
    truth = problem.truth()
    for key, x in found.items():  # factors of 11 bits, cut: scores to 2^-9 of their size, and what follows from them
        near = 2e-2 * max(1.0, float(truth[key].abs().max()))
        torch.testing.assert_close(x.double(), truth[key], rtol=0, atol=near)
    assert (found["mean"] - truth["mean"]).abs().max() > 1e-5


@pytest.mark.parametrize("place", ["key", "value"])
def test_nan_behind_the_diagonal_reaches_exactly_the_rows_that_see_it(place):
    """What the usual pass spoils, the careful one repairs."""
    clean, poisoned = (Problem(BF, 70, 70, 64, support=S.causal()) for _ in range(2))
    poisoned.operands[place] = poisoned.operands[place].clone()
    poisoned.operands[place][:, 40] = torch.nan
    (found, device), (want, _) = poisoned.results(), clean.results()
    rows = torch.arange(70) >= 40
    assert torch.equal(~found["mean"].isfinite().all(-1), rows.expand(2, 70))
    assert max(x.instructions for x in device.launches if x.constants["CAREFUL"]) > 500
    for key in ("mean", "entropy"):  # tiles are smaller there, and round otherwise
        torch.testing.assert_close(found[key][:, :40], want[key][:, :40], rtol=8e-3, atol=8e-3)
    assert found["d query"][:, :40].isfinite().all()


def test_a_query_of_nan_spoils_no_key_it_does_not_see():
    problem = Problem(HF, 45, 45, 64, support=S.causal())
    problem.operands["query"] = problem.operands["query"].clone()
    problem.operands["query"][:, 3] = torch.nan
    found, _ = problem.results()
    assert torch.equal(found["d key"].isnan().any(-1), (torch.arange(45) <= 3).expand(2, 45))
    assert torch.equal(found["d query"].isnan().any(-1), (torch.arange(45) == 3).expand(2, 45))


def strided(x: torch.Tensor, *strides: int, size: int) -> torch.Tensor:
    """The same numbers this far apart: memory that is not touched costs nothing."""
    out = torch.empty(size, dtype=x.dtype).as_strided(x.shape, strides)
    return out.copy_(x)


@pytest.mark.parametrize("far", ["rows", "entries"])
def test_offsets_past_2_to_the_31(far):
    """Elements beyond 2^31 of an operand, inside one entry (INDEX is int64) or between entries (the table)."""
    problem = Problem(BF, 70, 70, 64, support=S.causal())
    step = 2**31 // 60 // 16 * 16 if far == "rows" else 64
    entry = 70 * 64 if far == "rows" else 2**31 + 512
    for name in ("key", "value"):
        x = problem.operands[name]
        problem.operands[name] = strided(x, 64 if far == "rows" else entry, step, 1, size=entry + 70 * step)
    o = problem.operands
    with executing() as device, partita.backend("triton"):
        mean, state = partita.Gibbs(o["query"], o["key"], scale=o["scale"], support=S.causal()).mean(o["value"])
    assert str(device.launches[0].constants["INDEX"]) == ("int64" if far == "rows" else "int32")
    truth = problem.truth()
    assert_no_worse_than_naive(mean, problem.plainly(BF)["mean"].float(), truth["mean"])
    assert_no_worse_than_naive(state.entropy(), problem.plainly(F)["entropy"], truth["entropy"])


def test_operands_in_place_heads_behind_positions_and_odd_beginnings():
    """Entries that begin at any even byte: no 16 bytes are read at once there."""
    problem = Problem(BF, 40, 70, 64)
    x = problem.operands
    x["query"] = torch.empty(40, 2, 64, dtype=BF).transpose(0, 1).copy_(x["query"])
    x["key"] = torch.empty(2 * 70 * 64 + 9, dtype=BF)[1:].as_strided((2, 70, 64), (70 * 64 + 3, 64, 1)).copy_(x["key"])
    x["value"] = torch.empty(2, 64, 70, dtype=BF).mT.copy_(x["value"])
    with executing(), partita.backend("triton"):
        mean, state = partita.Gibbs(x["query"], x["key"], scale=x["scale"]).mean(x["value"])
    truth = problem.truth()
    assert_no_worse_than_naive(mean, problem.plainly(BF)["mean"].float(), truth["mean"])
    assert_no_worse_than_naive(state.log_partition(), problem.plainly(F)["log_partition"], truth["log_partition"])


def test_a_row_alone_is_the_row_in_a_batch_to_the_bit():
    """Another place in its tile, other rows beside it, another entry: the split over keys is the same."""
    whole, some = Problem(BF, 150, 130, 64), Problem(BF, 40, 130, 64, batch=(1,))
    chosen = torch.arange(40) * 3 + 11
    x, y = whole.operands, some.operands
    y |= {"query": x["query"][1:, chosen], "key": x["key"][1:], "value": x["value"][1:], "scale": x["scale"][chosen]}
    worst = Rounding(approximate="scattered", product="truncated")
    for problem in (whole, some):
        problem.options["differentiate"] = False
    (alone, _), (beside, _) = some.results(worst), whole.results(worst)
    for key, found in alone.items():
        assert torch.equal(found[0], beside[key][1, chosen]), key


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_of_its_own_has_the_same_bits_where_rows_are_exact(exact):
    """Of 600 keys a lone row is cut into parts, and rounds otherwise, unless `exact_rows` is on."""
    problem = Problem(BF, 20, 600, 64, batch=(8,), differentiate=False)
    lone = Problem(BF, 1, 600, 64, batch=(1,), differentiate=False)
    x, y = problem.operands, lone.operands
    y |= {"query": x["query"][3:4, 7:8], "key": x["key"][3:4], "value": x["value"][3:4], "scale": x["scale"][7:8]}
    with partita.exact_rows() if exact else contextlib.nullcontext():
        (alone, device), (beside, _) = lone.results(), problem.results()
    assert ("merge" in served(device)) != exact
    assert all(torch.equal(found[0, 0], beside[key][3, 7]) for key, found in alone.items()) == exact


def test_a_sink():
    problem = Problem(BF, 40, 70, 64, support=S.causal(), statistics=False)
    q, k, v = (problem.operands[n] for n in ("query", "key", "value"))
    sink = torch.tensor([0.5, -1.0])

    def dense(kind: torch.dtype) -> torch.Tensor:
        s = (q.to(kind) @ k.to(kind).mT) * 0.125
        s = s.masked_fill(~torch.ones(40, 70, dtype=torch.bool).tril(), -torch.inf)
        joined = torch.cat([s, sink.to(kind)[:, None, None].expand(2, 40, 1)], -1)
        return joined.softmax(-1)[..., :-1] @ v.to(kind)

    with executing() as device, partita.backend("triton"):
        found = partita.attention(q, k, v, scale=0.125, support=S.causal(), sink=sink)
    assert served(device) == ["forward", "(forward)"]
    assert_no_worse_than_naive(found, dense(BF), dense(torch.float64))


def test_what_keys_receive_and_its_gradient():
    problem = Problem(BF, 40, 70, 64, support=S.causal())
    q, k, scale = (problem.operands[n] for n in ("query", "key", "scale"))

    def gives(run: Any, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(kind).requires_grad_() for x in (q, k)]
        out = run(*leaves, scale.to(kind if kind != BF else F))
        return [out.detach(), *torch.autograd.grad((out * torch.linspace(0.1, 1, 70, dtype=out.dtype)).sum(), leaves)]

    def plainly(a: torch.Tensor, b: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        s = (a @ b.mT) * factor.to(a.dtype)[:, None]
        return s.masked_fill(~torch.ones(40, 70, dtype=torch.bool).tril(), -torch.inf).softmax(-1).sum(-2)

    with executing() as device, partita.backend("triton"):
        found = gives(lambda a, b, f: partita.Gibbs(a, b, scale=f, support=S.causal()).received(), BF)
    assert "forward" in served(device)
    for mine, naive, truth in zip(found, gives(plainly, BF), gives(plainly, torch.float64), strict=True):
        assert_no_worse_than_naive(mine, naive.to(mine.dtype), truth)


@pytest.mark.parametrize("kind", ["forward", pytest.param("js", marks=pytest.mark.slow)])
def test_divergences_of_two_distributions(kind):
    a, b, keys = (
        normal(2, 33, 64, seed=1, dtype=BF),
        normal(2, 33, 64, seed=2, dtype=BF),
        normal(2, 70, 64, seed=3, dtype=BF),
    )

    def gives(dtype: torch.dtype, run: Any) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (a, b, keys)]
        out = run(*leaves)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]

    def ours(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return partita.divergence(partita.Gibbs(x, z, scale=0.1), partita.Gibbs(y, z, scale=0.1), kind)

    def plainly(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        p, q = ((w @ z.mT * 0.1).log_softmax(-1) for w in (x, y))
        if kind == "forward":
            return (p.exp() * (p - q)).sum(-1)
        m = ((p.exp() + q.exp()) / 2).log()
        return ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2

    with executing(), partita.backend("triton"):
        found = gives(BF, ours)
    for mine, naive, truth in zip(found, gives(BF, plainly), gives(torch.float64, plainly), strict=True):
        assert_no_worse_than_naive(mine, naive.to(mine.dtype), truth)


@pytest.mark.parametrize("dtype", [BF, HF, pytest.param(F, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_a_classifier(dtype, dim):
    hidden, weight = normal(29, dim, seed=1, dtype=dtype), normal(150, dim, seed=2, dtype=dtype)
    bias, target = normal(150, seed=3, dtype=dtype), torch.arange(29) * 5 % 150

    def gives(kind: torch.dtype, run: Any) -> list[torch.Tensor]:
        leaves = [x.to(kind).requires_grad_() for x in (hidden, weight, bias)]
        loss = run(*leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def plainly(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(0.1 * (x @ w.T) + b, target)

    with executing() as device, partita.backend("triton"):
        found = gives(dtype, lambda x, w, b: partita.linear_cross_entropy(x, w, target, linear_bias=b, scale=0.1))
    assert {"row_sums", "gradient"} <= set(served(device))
    for mine, naive, truth in zip(found, gives(dtype, plainly), gives(torch.float64, plainly), strict=True):
        assert_no_worse_than_naive(mine, naive.to(mine.dtype), truth)


@pytest.mark.parametrize(
    "dtype", [BF, pytest.param(HF, marks=pytest.mark.slow), pytest.param(F, marks=pytest.mark.slow)]
)
def test_a_symmetric_contrast(dtype):
    images, texts = (torch.nn.functional.normalize(normal(150, 64, seed=n), dim=-1).to(dtype) for n in (1, 2))

    def gives(kind: torch.dtype, run: Any) -> list[torch.Tensor]:
        leaves = [x.to(kind).requires_grad_() for x in (images, texts)]
        loss = run(*leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def plainly(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits, own = 10.0 * (x @ y.T), torch.arange(150)
        return sum(torch.nn.functional.cross_entropy(s, own) for s in (logits, logits.T)) / 2

    with executing() as device, partita.backend("triton"):
        found = gives(dtype, lambda x, y: partita.clip_loss(x, y, torch.tensor(10.0)))
    assert {"row_sums", "column_sums", "gradient"} <= set(served(device))
    for mine, naive, truth in zip(found, gives(dtype, plainly), gives(torch.float64, plainly), strict=True):
        assert_no_worse_than_naive(mine, naive.to(mine.dtype), truth)
