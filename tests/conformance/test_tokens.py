"""token_stats and token_divergence against dense float64: every number, every gradient, every set of kept tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import partita
from tests.conformance.serving import serving
from tests.tolerances import assert_exact, assert_no_worse_than_naive

F64 = torch.float64
ROWS = ("entropy", "varentropy", "log_sum_sq", "max_logit", "mean_logit", "logsumexp")
ALL = ("log_prob", "rank", "is_top", *ROWS)
SIZES = (3, 5, 6, 17)  # batch, positions, features, vocabulary


def made(dtype=torch.float64, sizes=SIZES, many: int = 0):
    b, t, d, v = sizes
    hidden = torch.randn(b, t, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(v, (b, t, many) if many else (b, t))


def logits(hidden, weight, bias=None, temperature=1.0, softcap=None) -> Tensor:
    z = hidden @ weight.mT
    z = z if bias is None else z + bias
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return z / (temperature[..., None] if isinstance(temperature, Tensor) and temperature.dim() else temperature)


def dense(z: Tensor, ids: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
    """Every field from logits (..., V); keep (..., V) bool."""
    whole, all_z = z.logsumexp(-1), z
    z = z if keep is None else z.masked_fill(~keep, -torch.inf)
    log_p = z.log_softmax(-1)
    p, own = log_p.exp(), log_p.masked_fill(log_p == -torch.inf, 0.0)
    at = ids if ids.dim() == z.dim() else ids[..., None]
    chosen = log_p.gather(-1, at)
    rank = (z[..., None, :] > all_z.gather(-1, at)[..., None]).sum(-1)
    entropy = -(p * own).sum(-1)
    found = {
        "log_prob": chosen, "rank": rank, "is_top": (rank == 0) & (chosen > -torch.inf), "entropy": entropy,
        "varentropy": (p * (own + entropy[..., None]) ** 2).sum(-1), "log_sum_sq": p.square().sum(-1).log(),
        "max_logit": z.amax(-1).detach(), "mean_logit": (p * z.masked_fill(p == 0, 0.0)).sum(-1),
        "logsumexp": z.logsumexp(-1), "kept_mass": (z.logsumexp(-1) - whole).exp(),
    }  # fmt: skip
    if ids.dim() < z.dim():
        found |= {name: found[name][..., 0] for name in ("log_prob", "rank", "is_top")}
    return found


def assert_same(ours: partita.losses.TokenStats, truth: dict[str, Tensor], names, operands, ignored=None):
    for name in names:
        value, true = getattr(ours, name), truth[name]
        if ignored is not None:
            mask = ignored if true.dim() == ignored.dim() else ignored.all(-1)
            true = true.masked_fill(mask if mask.dim() == true.dim() else mask[..., None], 0)
        assert value.shape == true.shape, name
        if not true.is_floating_point():
            assert torch.equal(value, true), name
            continue
        assert_exact(value.detach(), true.detach(), magnitude=30.0)
        assert value.requires_grad == true.requires_grad, name
        if true.requires_grad:
            finite = true.detach().isfinite()
            g = torch.randn_like(true).masked_fill(~finite, 0.0)
            got, wanted = (
                torch.autograd.grad(torch.where(finite, x, 0.0), operands, g, retain_graph=True) for x in (value, true)
            )
            for a, b in zip(got, wanted, strict=True):
                assert_exact(a, b, magnitude=300.0)


@pytest.mark.parametrize("many", [0, 1, 4])
@pytest.mark.parametrize("ignore", [False, True])
def test_every_number_and_gradient(backend, many, ignore):
    hidden, weight, ids = made(many=many)
    ignored = torch.zeros_like(ids, dtype=torch.bool)
    if ignore:
        ignored[0], ignored[1, 2] = True, True
        ignored[2].reshape(-1)[:1] = True
    with serving(backend):
        ours = partita.token_stats(hidden, weight, ids.masked_fill(ignored, -100), temperature=0.7, want=ALL)
        assert_same(ours, dense(logits(hidden, weight, temperature=0.7), ids), ALL, (hidden, weight), ignored)


@pytest.mark.parametrize("name", ALL)
def test_a_number_wanted_alone_is_the_same(backend, name):
    """A pass leaves out what is not wanted, and nothing that is."""
    hidden, weight, ids = made()
    with serving(backend):
        ours = partita.token_stats(hidden, weight, ids, want=name)
        assert_same(ours, dense(logits(hidden, weight), ids), [name], (hidden, weight))


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["number", "tensor", "rows"])
def test_bias_softcap_and_temperature(backend, softcap, biased, kind):
    hidden, weight, ids = made()
    bias = torch.randn(17, dtype=torch.float64, requires_grad=True) if biased else None
    temperature = {"number": 0.6, "tensor": torch.tensor(0.6).double(), "rows": torch.rand(3, 5).double() + 0.5}[kind]
    operands = [hidden, weight, *([bias] if biased else [])]
    if kind == "rows":
        operands.append(temperature.requires_grad_())
    with serving(backend):
        ours = partita.token_stats(hidden, weight, ids, bias=bias, temperature=temperature, softcap=softcap, want=ALL)
        assert_same(ours, dense(logits(hidden, weight, bias, temperature, softcap), ids), ALL, operands)


def kept_by(z: Tensor, top_k=None, top_p=None, min_p=None) -> Tensor:
    """By sorting, one limit after another."""
    z = z.detach()
    keep = torch.ones_like(z, dtype=torch.bool)
    if top_k:
        keep &= z >= z.sort(-1, descending=True).values[..., top_k - 1, None]
    if top_p:
        p, at = z.masked_fill(~keep, -torch.inf).softmax(-1).sort(-1, descending=True)
        keep &= torch.zeros_like(keep).scatter(-1, at, p.cumsum(-1) - p < top_p)
    if min_p:
        p = z.softmax(-1)
        keep &= p >= min_p * p.amax(-1, keepdim=True)
    return keep


@pytest.mark.parametrize("many", [0, 3])
@pytest.mark.parametrize(
    "limits", [{"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}]
)
def test_the_tokens_a_sampler_kept(backend, limits, many):
    hidden, weight, ids = made(many=many)
    z = logits(hidden, weight, temperature=1.3)
    keep = kept_by(z, **limits)
    names = (*ALL, "kept_mass")
    with serving(backend):
        ours = partita.token_stats(hidden, weight, ids, temperature=1.3, want=(*names, "top_k:3"), **limits)
    truth = dense(z, ids, keep)
    assert_same(ours, truth, names, (hidden, weight))
    assert int(ours.outside) == int(truth["log_prob"].isneginf().sum()) > 0
    best = z.masked_fill(~keep, -torch.inf).log_softmax(-1).topk(3)
    assert torch.equal(ours.top_k_ids, best.indices.masked_fill(best.values.isneginf(), -1))
    assert_exact(ours.top_k_log_prob.detach(), best.values.detach(), magnitude=30.0)


@pytest.mark.parametrize("limits", [{}, {"top_k": 6}])
def test_kept_ids_are_given_padded_and_in_any_order(backend, limits):
    hidden, weight, ids = made()
    keep = torch.rand(3, 5, 17) < 0.5
    keep[0, 0] = False  # nothing is kept of this row
    listed = torch.full((3, 5, 20), -1)
    for i, j in itertools.product(range(3), range(5)):
        own = keep[i, j].nonzero()[:, 0]
        listed[i, j, torch.randperm(20)[: len(own)]] = own
    listed[0, 1, :] = listed[0, 1].amax()  # one token, many times
    keep[0, 1] = torch.zeros(17, dtype=torch.bool).scatter(0, listed[0, 1, :1], True)
    z = logits(hidden, weight)
    both = keep & kept_by(z, **limits) if limits else keep
    names = ("log_prob", "entropy", "varentropy", "mean_logit", "logsumexp", "kept_mass", "rank", "is_top")
    with serving(backend):
        ours = partita.token_stats(hidden, weight, ids, kept=listed, want=names, **limits)
    rows = both.any(-1)
    assert ours.entropy[~rows].abs().sum() == 0 and ours.log_prob[~rows].isneginf().all()
    assert ours.kept_mass[~rows].abs().sum() == 0
    for name in names:
        value = getattr(ours, name)[rows]
        true = dense(z[rows], ids[rows], both[rows])[name]
        assert torch.equal(value.isneginf(), true.isneginf()) if true.is_floating_point() else torch.equal(value, true)
        if true.is_floating_point():
            assert_exact(value.detach(), true.detach(), magnitude=30.0)
    entropy = dense(z[rows], ids[rows], both[rows])["entropy"]
    for a, b in zip(*(torch.autograd.grad(x.sum(), (hidden, weight)) for x in (ours.entropy, entropy)), strict=True):
        assert_exact(a, b, magnitude=300.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("many", [0, 3])
@pytest.mark.parametrize("chosen", ["all", "listed", "limits"])
@pytest.mark.parametrize("warm", [False, True], ids=["", "per row"])
def test_half_precision_is_no_worse_than_the_formula(natural, dtype, many, chosen, warm):
    """Values, float32, and gradients, rounded to the operands' dtype: against the formula on the same numbers."""
    hidden, weight, ids = made(dtype, (2, 9, 32, 300), many)
    temperature = torch.rand(2, 9).double() + 0.5 if warm else 0.75
    exact, plain = ([x.detach().to(kind).requires_grad_() for x in (hidden, weight)] for kind in (F64, torch.float32))
    keep, options = None, {}
    if chosen != "all":
        listed = torch.rand(2, 9, 300).argsort(-1)[..., :40]
        keep = torch.zeros(2, 9, 300, dtype=torch.bool).scatter(-1, listed, True)
        options = {"kept": listed}
        if chosen == "limits":
            order = logits(*exact, temperature=temperature).sort(dim=-1, descending=True)
            gap = -order.values.diff(dim=-1)[..., 20:60]  # a cut that no rounding moves: at the widest gap there
            count = int(gap.amin((0, 1)).argmax()) + 21
            assert gap.amin((0, 1)).max() > 1e-4
            keep, options = torch.zeros_like(keep).scatter(-1, order.indices[..., :count], True), {"top_k": count}
    floats = [name for name in (*ALL, *["kept_mass"] * (keep is not None)) if name not in ("rank", "is_top")]
    results = []
    with serving(natural):
        ours = partita.token_stats(hidden, weight, ids, temperature=temperature, want=floats, **options)
    for operands, found in (
        ((hidden, weight), vars(ours)),
        *(
            (x, dense(logits(*x, temperature=temperature.to(x[0].dtype) if warm else temperature), ids, keep))
            for x in (plain, exact)
        ),
    ):
        finite = {name: torch.where(found[name].isfinite(), found[name], 0.0) for name in floats}
        total = sum(
            (x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in finite.values() if x.requires_grad
        )
        results.append([*finite.values(), *torch.autograd.grad(total, operands)])
    for value, naive, true, name in zip(*results, [*floats, "hidden", "weight"], strict=True):
        half = name in ("hidden", "weight")
        assert value.dtype == (dtype if half else torch.float32)
        # a share of the mass is exp(log Z - log Z): it has the roundings of the largest logit
        ulps = 16 * int(results[2][floats.index("max_logit")].abs().max()) if name == "kept_mass" else 16
        value, naive, true = (x.detach() for x in (value, naive, true))
        assert_no_worse_than_naive(value, naive.to(dtype) if half else naive, true, factor=4.0, ulps=ulps)


@pytest.mark.parametrize("kind", ["forward", "reverse", "js", "hellinger"])
def test_divergence_of_two_heads(backend, kind):
    hidden, weight, _ = made()
    other, theirs = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(17, 4, dtype=torch.float64)
    warm = torch.rand(3, 5).double() + 0.5
    other, theirs = other.requires_grad_(), theirs.requires_grad_()
    with serving(backend):
        ours = partita.token_divergence(hidden, weight, other, theirs, kind=kind, temperature=warm, ref_temperature=0.9)
    p = (logits(hidden, weight) / warm[..., None]).log_softmax(-1)
    q = (logits(other, theirs) / 0.9).log_softmax(-1)
    m = torch.logaddexp(p, q) - torch.tensor(2.0).double().log()
    true = {
        "forward": (p.exp() * (p - q)).sum(-1), "reverse": (q.exp() * (q - p)).sum(-1),
        "js": (0.5 * p.exp() * (p - m) + 0.5 * q.exp() * (q - m)).sum(-1),
        "hellinger": 1 - (0.5 * (p + q)).exp().sum(-1),
    }[kind]  # fmt: skip
    assert_exact(ours.detach(), true.detach(), magnitude=30.0)
    operands = (hidden, weight, other, theirs)
    for a, b in zip(*(torch.autograd.grad(x.sum(), operands) for x in (ours, true)), strict=True):
        assert_exact(a, b, magnitude=300.0)


@pytest.mark.parametrize("kind", ["forward", "reverse", "cross_entropy", "js", "hellinger"])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_policy_that_knows_a_part_of_the_references_tokens(backend, monkeypatch, kind, blocks):
    """A draft vocabulary: log Z of the reference's whole, probabilities of the part; what is unknown has p = 0."""
    if blocks:
        monkeypatch.setattr("partita.recompute._CELLS", 17)
        monkeypatch.setattr("partita.recompute._FEWEST", 4)  # rows
    hidden, weight, _ = made(sizes=(3, 5, 6, 7))
    other, theirs = (torch.randn(size, dtype=F64, requires_grad=True) for size in ((3, 5, 4), (17, 4)))
    part, warm = torch.randperm(17)[:7], torch.rand(3, 5).double() + 0.5
    with serving(backend):
        ours = partita.token_divergence(
            hidden, weight, other, theirs, kind=kind, beta=0.3, temperature=warm, ref_temperature=0.9, ref_ids=part
        )
    p = (logits(hidden, weight) / warm[..., None]).softmax(-1)
    p = torch.zeros(3, 5, 17, dtype=F64).index_copy(-1, part, p)
    q = (logits(other, theirs) / 0.9).softmax(-1)
    m = 0.3 * p + 0.7 * q
    pointwise = {
        "forward": p.xlogy(p) - p.xlogy(q),
        "cross_entropy": -p.xlogy(q),
        "hellinger": 1 / 17 - (p * q).clamp(min=1e-300).sqrt(),
        "reverse": (q.xlogy(q) - q.xlogy(p.clamp(min=1e-300)))[..., part],
        "js": 0.3 * (p.xlogy(p) - p.xlogy(m)) + 0.7 * (q.xlogy(q) - q.xlogy(m)),
    }[kind]
    true = pointwise.sum(-1)
    assert_exact(ours.detach(), true.detach(), magnitude=30.0)
    operands = (hidden, weight, other, theirs)
    for a, b in zip(*(torch.autograd.grad(x.sum(), operands) for x in (ours, true)), strict=True):
        assert_exact(a, b, magnitude=300.0)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize("tail", ["ignore", "bucket"])
def test_a_teacher_known_by_its_best_tokens(backend, kind, tail):
    hidden, weight, _ = made()
    teacher = torch.randn(3, 5, 17, dtype=torch.float64).log_softmax(-1)
    given, index = teacher.topk(4)
    index[0, 0, 2:] = -1
    with serving(backend):
        ours = partita.token_divergence(
            hidden, weight, teacher_index=index, teacher_log_prob=given, kind=kind, tail=tail, temperature=0.8
        )
    log_p = logits(hidden, weight, temperature=0.8).log_softmax(-1)
    valid = index >= 0
    own, theirs = (x.masked_fill(~valid, -torch.inf) for x in (log_p.gather(-1, index.clamp(min=0)), given))
    if tail == "bucket":
        own, theirs = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in (own, theirs))
    first, second = (own, theirs) if kind == "forward" else (theirs, own)
    true = (first.exp() * (first - second).masked_fill(first.isneginf(), 0.0)).sum(-1)
    assert_exact(ours.detach(), true.detach(), magnitude=1e3)
    # log(1 - sum p) of a tail that is small has digits to lose on both sides
    for a, b in zip(*(torch.autograd.grad(x.sum(), (hidden, weight)) for x in (ours, true)), strict=True):
        assert_exact(a, b, magnitude=1e4)


@pytest.mark.parametrize("sizes", [(0, 5, 6, 17), (3, 0, 6, 17), (2, 3, 6, 1)])
def test_nothing_to_read(backend, sizes):
    for many, limits in itertools.product((0, 2), ({}, {"top_p": 0.9})):
        hidden, weight, ids = made(sizes=sizes, many=many)
        with serving(backend):
            ours = partita.token_stats(hidden, weight, ids, want=ALL, **limits)
        assert_same(ours, dense(logits(hidden, weight), ids), [n for n in ALL if ids.numel()], (hidden, weight))
        assert ours.log_prob.shape == ids.shape
    ignored = torch.full((2, 3), -100)
    hidden, weight, _ = made(sizes=(2, 3, 6, 17))
    ours = partita.token_stats(hidden, weight, ignored, want=ALL)
    assert all(x.double().abs().sum() == 0 for x in ours)
