"""What the native kernels promise one by one: ties, empty rows, NaN, accuracy, layouts, splits, checks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import partita
from partita.engine.backends.native import library
from partita.engine.backends.native import losses as native_losses
from partita.engine.backends.native import passes as native
from partita.engine.sums import OPERANDS, SumGrads, Sums
from partita.engine.terms import Term
from tests.tolerances import assert_exact, assert_no_worse_than_naive

from . import dense
from .dense import Case

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native library: {library.why_not()}")


def simple(*shape: int, n_key: int | None = None, dtype: torch.dtype = torch.float32) -> Case:
    *batch, n, d = shape
    m = n if n_key is None else n_key
    one = (1,) * len(batch)
    query, key, value = (
        torch.randn(shape, dtype=dtype),
        torch.randn(*batch, m, d, dtype=dtype),
        torch.randn(*batch, m, d, dtype=dtype),
    )
    scale = torch.full((*one, 1), d**-0.5, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return Case(query, key, value, scale)


def run(case: Case, *, rank: bool = False) -> Sums:
    sums = native.forward(case.request(rank=rank))
    assert sums is not None
    return sums


def causal(n: int, batch: int = 0) -> tuple[Term, ...]:
    return (Term(stop=torch.arange(1, n + 1, dtype=torch.int32).expand(*(1,) * batch, n)),)


@pytest.mark.parametrize(("n_query", "dim"), [(40, 3), (40, 64), (40, 500), (1, 64)])
def test_a_copy_of_the_target_ties_with_it(n_query: int, dim: int) -> None:
    key = torch.randn(700, dim).repeat_interleave(2, 0)  # every key twice: in other panels, tiles and blocks
    key = key[torch.randperm(1400)]
    query = torch.randn(n_query, dim)
    best = (query @ key.T).topk(2).indices  # the best key, by each of its two copies
    for softcap in (None, 3.0):
        bias = torch.full((1, 1400), 0.125) if softcap else None
        for target in best.unbind(1):
            case = Case(query, key, None, torch.full((1,), dim**-0.5), bias, target, (), softcap)
            assert torch.equal(run(case, rank=True).rank, torch.zeros(n_query, dtype=torch.int64))


def test_an_empty_row_has_neutral_sums_and_zero_gradients() -> None:
    case = simple(5, 8)
    stop = torch.tensor([0, 3, 0, 5, 1], dtype=torch.int32)
    case = Case(case.query, case.key, case.value, case.scale, terms=(Term(stop=stop),))
    sums = run(case)
    empty = stop == 0
    assert bool((sums.peak[empty] == float("-inf")).all())
    assert not sums.mass[empty].any() and not sums.moment[empty].any() and not sums.count[empty].any()
    nan = torch.where(empty, float("nan"), 1.0)  # what autograd may hand over for such a row
    upstream = SumGrads(nan, nan, None, nan[:, None].expand(5, 8))
    grads = native.backward(case.request(), sums.peak, upstream, (True, True, True, True, False))
    assert grads is not None
    assert not grads["query"][empty].any() and not grads["scale"].isnan().any() and grads["key"].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_reported_or_harmless(bad: float) -> None:
    case = simple(33, 16, n_key=40)
    case.key[35:] = bad
    case.value[35:] = bad
    assert native.forward(case.request()) is None  # visible: never a silent number
    clean = Case(case.query, case.key[:35], case.value[:35], case.scale)
    hidden = Case(
        case.query, case.key, case.value, case.scale, terms=(Term(stop=torch.full((33,), 35, dtype=torch.int32)),)
    )
    sums = native.forward(hidden.request())
    if sums is not None:  # None sends the caller to a backend that looks at every key
        torch.testing.assert_close(sums.moment, run(clean).moment)


@pytest.mark.parametrize("shape", [(2, 3, 200, 64), (1, 2, 700, 128), (4, 33, 24)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_error_is_at_most_twice_that_of_plain_torch(shape: tuple[int, ...], is_causal: bool) -> None:
    case = simple(*shape)
    n = shape[-2]
    case = Case(case.query, case.key, case.value, case.scale, terms=causal(n, len(shape) - 2) if is_causal else ())
    sums = run(case)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = q @ k.mT * q.shape[-1] ** -0.5
        if is_causal:
            s = s.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        return s.softmax(-1) @ v, s.logsumexp(-1)

    exact = plain(case.query.double(), case.key.double(), case.value.double())
    naive = plain(case.query, case.key, case.value)
    mine = sums.moment / sums.mass[..., None], sums.peak + sums.mass.log()
    for ours, theirs, truth in zip(mine, naive, exact, strict=True):
        root = lambda x: (x.double() - truth).square().mean().sqrt().item()  # noqa: B023, E731
        assert root(ours) <= 2 * root(theirs) + 1e-9


def test_batch_first_layout_is_read_in_place() -> None:
    """(batch, n, heads, d) seen as (batch, heads, n, d): same numbers as a copy, bit for bit."""
    qkv = [torch.randn(2, 70, 3, 32).transpose(1, 2) for _ in range(3)]
    scale = torch.full((1, 1, 1), 0.2)
    seen, copied = run(Case(*qkv, scale)), run(Case(*(x.contiguous() for x in qkv), scale))
    assert all(torch.equal(a, b) for a, b in zip(seen, copied, strict=True) if a is not None)


@pytest.mark.parametrize("heads", [3, 8, 32])  # 32 heads: rows a multiple of 4096 bytes apart, which are packed
def test_the_mean_value_is_laid_out_as_the_query(heads: int) -> None:
    query, key, value = (torch.randn(70, 2 * heads, 32).transpose(0, 1).view(2, heads, 70, 32) for _ in range(3))
    out, stats = partita.attention(query, key, value, return_stats=True)
    peer = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert out.stride() == peer.stride()
    torch.testing.assert_close(out, peer)
    dense, known = partita.attention(query.contiguous(), key.contiguous(), value.contiguous(), return_stats=True)
    assert dense.is_contiguous()
    torch.testing.assert_close(out, dense, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stats.entropy, known.entropy, rtol=1e-6, atol=1e-6)
    few = partita.attention(query, key[:, :1], value[:, :1], enable_gqa=True)
    torch.testing.assert_close(few, partita.attention(query, key[:, :1].expand_as(key), value[:, :1].expand_as(value)))
    narrow = partita.attention(query, key, value[..., :5])  # another width: no layout to follow
    torch.testing.assert_close(narrow, peer[..., :5])


@pytest.mark.parametrize(("n_query", "n_key"), [(700, 30), (30, 3000), (300, 300)])
def test_one_head_is_split_over_threads_with_one_result(n_query: int, n_key: int) -> None:
    case = simple(n_query, 24, n_key=n_key, dtype=torch.float64)
    bias = torch.randn(n_query, n_key, dtype=torch.float64)
    case = Case(case.query, case.key, case.value, case.scale, bias, torch.randint(0, n_key, (n_query,)))
    exact = case.exact()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            sums = run(case, rank=True)
            want = dense.reduce(exact, sums.peak)
            torch.testing.assert_close(sums.moment, want.moment.detach())
            torch.testing.assert_close(sums.spread, want.spread.detach())
            upstream = [
                torch.randn_like(x) for x in (sums.mass, sums.first, sums.spread, sums.moment, sums.target_score)
            ]
            grads = native.backward(case.request(), sums.peak, SumGrads(*upstream), (True,) * 5)
            leaves = {name: getattr(exact, name) for name in OPERANDS}
            found = torch.autograd.grad(dense.total(want, upstream), leaves.values())
            for name, need in zip(leaves, found, strict=True):
                torch.testing.assert_close(grads[name], need)
    finally:
        torch.set_num_threads(before)


def test_operands_are_checked_before_a_pointer_is_passed() -> None:
    case = simple(2, 5, 8)
    q, k, v, scale = case.query, case.key, case.value, case.scale
    wrong = [
        Case(q, k.double(), v, scale),
        Case(q, k[..., :7], v, scale),
        Case(q, k, v[:, :4], scale),
        Case(q, k[0], v, scale),
        Case(q, torch.randn(3, 5, 8), v, scale),
        Case(q, k, v, torch.ones(1, 4)),
        Case(q, k, v, torch.ones(1, 1, dtype=torch.float64)),
        Case(q, k, v, scale, torch.zeros(1, 5, 4)),
        Case(q, k, v, scale, None, torch.zeros(1, 5, dtype=torch.int32)),
        Case(q, k, v, scale, None, None, (Term(stop=torch.zeros(1, 5)),)),
        Case(q, k, torch.empty(2, 5, 8, device="meta"), scale),
    ]
    for case in wrong:
        with pytest.raises((ValueError, TypeError)):
            native.forward(case.request())


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512_bf16"])
def test_every_instruction_set_gives_the_same_numbers(isa: str) -> None:
    """In a process of its own, since the choice is made once; a set the processor lacks falls back to a lesser one."""
    code = (
        "from tests.native.test_fuzz import check; from partita.engine.backends.native import library\n"
        "[check(seed) for seed in range(5000, 5025)]; print(library.load().isa)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PARTITA_ISA": isa}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() in ("baseline", "avx2", "avx512", "avx512_bf16")


def test_a_missing_library_is_a_reason_and_not_an_error() -> None:
    code = "from partita.engine.backends.native.library import load, why_not; assert load() is None; print(why_not())"
    env = {**os.environ, "PARTITA_NATIVE_LIBRARY": os.path.join(os.sep, "nowhere", "lib.so")}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "not there" in found.stdout


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="files that are loaded are read from /proc")
@pytest.mark.parametrize("spelled", ["./x.so", "x.so", "sub/../x.so", "{}/x.so", "link.so"])
def test_the_file_that_is_named_is_the_one_that_is_loaded(spelled: str, tmp_path: Path) -> None:
    """The loader searches its own folders for a name without a slash: a file of that name there is not loaded."""
    known = library.load()
    assert known is not None
    here, searched = tmp_path / "here", tmp_path / "searched"
    for folder in (here / "sub", searched):
        folder.mkdir(parents=True)
    for file in (here / "x.so", searched / "x.so", searched / "link.so"):
        shutil.copy(known.path, file)
    (here / "link.so").symlink_to("x.so")
    code = (
        "from partita.engine.backends.native.library import load, why_not; print(why_not() or load().path)\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if line.rstrip().endswith('.so')}, sep='\\n')"
    )
    paths = os.pathsep.join(os.path.abspath(p) for p in sys.path if p)
    env = {"PARTITA_NATIVE_LIBRARY": spelled.format(here), "LD_LIBRARY_PATH": str(searched), "PYTHONPATH": paths}
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, cwd=here, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    said, *loaded = found.stdout.splitlines()
    assert os.path.isabs(said) and os.path.samefile(said, here / "x.so")
    assert [path for path in loaded if path.startswith(str(tmp_path))] == [str(here / "x.so")]


@pytest.mark.parametrize("shape", ["late", "rising", "hidden first", "one above"])
def test_a_variance_keeps_its_digits_wherever_the_peak_comes(shape: str) -> None:
    """A centre set by keys that turn out not to matter must give way: about it, a narrow row's variance cancels.

    So does, about the peak, that of a row whose peak is one key of small mass: 300 times its variance.
    """
    n = 4000
    score = (0.001 if shape == "one above" else 0.1) * torch.randn(6, n)
    if shape == "one above":
        score[:, 7] += 0.5
    if shape == "late":
        score[:, 3000:3005] += 14.0
    if shape == "rising":
        score += torch.linspace(0.0, 40.0, n)
    start = torch.full((6,), 2500, dtype=torch.int32)
    terms = (Term(start=start),) if shape == "hidden first" else ()
    score = score - 100.0 if terms else score
    case = Case(torch.ones(6, 1), torch.zeros(n, 1), None, torch.ones(1), score, None, terms)
    sums = native.forward(case.request())
    assert sums is not None
    assert sums.statistics is not None
    seen = score[:, 2500:] if terms else score

    def variance(s: Tensor) -> Tensor:
        p = s.softmax(-1)
        return (p * (s - (p * s).sum(-1, keepdim=True)) ** 2).sum(-1)

    truth = variance(seen.double())
    unit = 1.0 if shape == "hidden first" else truth  # differences of scores near -100 are rounded
    found, naive = ((x / unit).float() for x in (sums.statistics[3], variance(seen)))
    assert_no_worse_than_naive(found, naive, truth / unit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (15, 33, 7), (14, 512, 64), (301, 1003, 65), (3, 5000, 700), (700, 3, 130)]
)
def test_logits_of_a_chunk_are_the_product(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n, classes, dim = shape
    x, wide = torch.randn(n, dim, dtype=dtype), torch.randn(classes, dim + 3, dtype=dtype)
    for weight in (wide[:, :dim], wide[:, :dim].contiguous(), wide.t().contiguous().t()[:, :dim]):
        logits = torch.full((n, classes), torch.nan, dtype=dtype)
        native_losses.write_logits(x, weight, logits)
        truth = x.double() @ weight.double().T
        if dtype == torch.float64:
            assert_exact(logits, truth)
        else:
            assert_no_worse_than_naive(logits, x @ weight.T, truth)


def test_sums_about_a_centre_come_back_to_the_peak() -> None:
    """Over several blocks of keys the exponentials are relative to a mean; the peak's own is 1 all the same."""
    torch.manual_seed(5)
    key = -torch.rand(1100, 1) * 6 - 18
    key[3] = 0  # nearly all of the mass: the rest is a few roundings
    query = torch.linspace(0.85, 1.2, 20000)[:, None]
    sums = native.forward(Case(query, key, None, torch.ones(1)).request())
    assert sums is not None and sums.mass.min() >= 1 and sums.mass.max() < 1.0001
    entropy = partita.Gibbs(query, key).entropy()
    log_p = (query.double() @ key.double().T).log_softmax(-1)
    naive = (query @ key.T).log_softmax(-1)
    assert entropy.min() >= 0
    assert_no_worse_than_naive(entropy, -(naive.exp() * naive).sum(-1), -(log_p.exp() * log_p).sum(-1))
