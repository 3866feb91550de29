"""Defects at the rim, each as it was found: what a user may pass, and the one answer every way gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import partita
from partita import support
from partita.attn import ALiBi, RelativeBias
from partita.errors import DtypeError, PartitaError, ShapeError

HALF = (torch.bfloat16, torch.float16)


def heads(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, dtype=dtype) for _ in range(3))


# ---- supports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_per_key_broadcasts(kind, backend):
    q, k, v = heads(2, 3, 7, 4)
    seen = torch.tensor([True, True, False, True, False, True, True])
    mask = seen if kind == "bool" else torch.randn(7).double()
    with partita.backend(backend.split("-")[0]):
        for function in (partita.attention, lambda *x: partita.attn.blockwise_attention(*x[:3], 3, attn_mask=x[3])):
            want = F.scaled_dot_product_attention(q, k, v, mask.expand(7, 7))
            torch.testing.assert_close(function(q, k, v, mask), want)
        if kind == "float":
            whole = partita.Gibbs(q, k, bias=mask.expand(7, 7)).entropy()
            torch.testing.assert_close(partita.Gibbs(q, k, bias=mask).entropy(), whole)
            one = partita.Gibbs(q, k, bias=torch.tensor(2.0).double())
            torch.testing.assert_close(one.log_partition(), partita.Gibbs(q, k).log_partition() + 2)


@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**32 - 1, 10**12, 2**63])
def test_a_window_does_not_wrap_round(far):
    n_query, n_key = 5, 9
    for given, same in (
        ((0, far), (0, None)),
        ((far, 0), (None, 0)),
        ((far, far), (None, None)),
        ((-far, None), (-n_key, None)),
        ((None, -far), (None, -n_query)),
    ):
        ours, want = (support.window(*sides).dense(n_query, n_key) for sides in (given, same))
        assert torch.equal(ours, want), given
        assert torch.equal(support.window(*given).visible(n_query, n_key), want.sum(-1))
    assert not support.window(-far, None).dense(n_query, n_key).any()


def test_a_length_that_cannot_be_looked_at_does_not_wrap_round():
    q, k = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    seen = torch.func.vmap(lambda a, n: partita.Gibbs(a, k[0], support=support.lengths(n)).visible())
    assert (seen(q, torch.tensor([2**32, 3])) == torch.tensor([[5.0], [3.0]])).all()


def test_positions_that_32_bits_cannot_hold_are_refused():
    with pytest.raises(ShapeError, match="queries and keys together"):
        support.causal().bind(2**31, 4, (), torch.device("meta"))


@pytest.mark.parametrize("bad", [10**30, -(10**30), 2.5, True, "3", None])
def test_a_number_that_no_index_holds_is_refused(bad):
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    calls = [
        lambda: support.lengths(bad),
        lambda: partita.linear_cross_entropy(x, w, y, shift=bad),
        lambda: partita.cross_entropy(x, y, ignore_index=bad),
        lambda: partita.focal_loss(x, y, ignore_index=bad),
        lambda: partita.fit_temperature(x, w, y, ignore_index=bad),
        lambda: partita.Gibbs(x, w).top(bad),
        lambda: partita.attn.top_k_attention(x, w, w, bad),
        lambda: partita.attn.blockwise_attention(x, w, w, bad),
        lambda: partita.metrics.top_k_accuracy(y, bad),
        lambda: partita.metrics.expected_calibration_error(x.sigmoid(), x > 0, bins=bad),
        lambda: partita.contrastive.Queue(bad, 4),
    ]
    for call in calls:
        with pytest.raises(PartitaError, match=r"whole number|integer"):
            call()


def test_a_value_may_have_dimensions_that_the_support_knows_nothing_of(backend):
    q, k, _ = heads(2, 3, 5, 4)
    value = torch.randn(7, 2, 3, 5, 6).double()
    with partita.backend(backend.split("-")[0]):
        p = partita.Gibbs(q, k, support=support.lengths(torch.tensor([3, 2])) & support.causal())
        want = torch.stack([p.expectation(part) for part in value])
        torch.testing.assert_close(p.expectation(value), want)


SUPPORTS = [
    support.all(),
    support.causal(),
    support.causal("bottom-right"),
    support.window(2, None),
    support.window(-1, 3),
    support.not_self(),
    support.lengths(4),
    support.lengths(torch.tensor([4, 2], dtype=torch.int32)),
    support.segments(torch.tensor([0, 0, 1, 1, 1])),
    support.segments(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 0, 1, 0, 1])),
    support.mask(torch.eye(5, dtype=torch.bool)),
    support.mask(torch.zeros(0, dtype=torch.bool)),
    (support.causal() | support.not_self()) & support.lengths(3),
    support.causal() & support.window(1, 1) | support.not_self() & support.lengths(3),
]


@pytest.mark.parametrize("given", SUPPORTS, ids=repr)
def test_a_support_prints_as_it_is_written(given):
    again = eval(repr(given), {"support": support, "torch": torch})
    assert repr(again) == repr(given)
    sizes = (5, 0) if "dtype=torch.bool" in repr(given) else (5, 5)
    assert torch.equal(again.dense(*sizes, (2,)), given.dense(*sizes, (2,)))


def test_a_large_mask_is_named_by_its_shape():
    assert repr(support.mask(torch.ones(9, 9, dtype=torch.bool))) == "support.mask(<bool (9, 9)>)"


@pytest.mark.parametrize(
    "policy",
    [
        "LogLength(reference=64, floor=2)",
        "TargetEntropy(entropy=None, width=None, fraction=0.5)",
        "ScalableSoftmax(heads=3)",
        "Mixed(alpha=1.0, beta=0.2)",
    ],
)
def test_a_policy_prints_as_it_is_written(policy):
    assert repr(eval(policy, vars(partita.scale).copy())) == policy


def test_an_explanation_reads_the_same_at_a_prompt():
    text = partita.explain(partita.Gibbs(torch.zeros(2, 3), torch.zeros(5, 3)))
    assert repr(text) == str(text) and "serves" in text and isinstance(text, str)


# ---- what deserves a sentence ----------------------------------------------------------------------------------------


def test_a_support_is_neither_true_nor_false():
    with pytest.raises(DtypeError, match="Join supports with &"):
        support.causal() and support.window(1, 1)
    with pytest.raises(DtypeError):
        bool(support.all())


@pytest.mark.parametrize("entry", ["attention", "Gibbs", "solve_scale", "measure_sigma", "&"])
def test_what_is_no_support_is_refused_with_a_hint(entry):
    q, k, v = heads(2, 3, 5, 4)
    call = {
        "attention": lambda s: partita.attention(q, k, v, support=s),
        "Gibbs": lambda s: partita.Gibbs(q, k, support=s),
        "solve_scale": lambda s: partita.solve_scale(q, k, entropy=1.0, support=s),
        "measure_sigma": lambda s: partita.scale.measure_sigma(q, k, s),
        "&": lambda s: support.causal() & s,
    }[entry]
    with pytest.raises(DtypeError, match=r"support\.mask\(tensor\)"):
        call(torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(DtypeError, match=r"Call it: support\.causal\("):
        call(support.causal)
    with pytest.raises(DtypeError, match="Make one"):
        call("causal")


@pytest.mark.parametrize("options", [{}, {"enable_gqa": True}, {"dropout_p": 0.5}, {"softcap": 2.0}])
def test_what_is_no_tensor_is_named(options):
    q, k, v = heads(2, 3, 5, 4)
    with pytest.raises(DtypeError, match="query must be a tensor; got list"):
        partita.attention([1.0], k, v, **options)
    with pytest.raises(DtypeError, match="key must be a tensor; got list"):
        partita.attention(q, [1.0], v, **options)


def test_explain_takes_a_distribution():
    with pytest.raises(DtypeError, match=r"explain\(Gibbs\(query, key\)\)"):
        partita.explain(torch.zeros(2, 3))


def test_fewer_key_heads_suggest_grouped_queries():
    q, k = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 5, 4)
    with pytest.raises(ShapeError, match="enable_gqa=True"):
        partita.attention(q, k, k)
    with pytest.raises(ShapeError, match="enable_gqa=True"):
        partita.attention(q, k, k, dropout_p=0.5)


# ---- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mask", "lengths", "segments", "joined"])
def test_a_support_changed_in_place_is_seen(kind):
    q, k, v = (x[0] for x in heads(2, 5, 4))
    keep, length, ids = torch.ones(5, 5, dtype=torch.bool), torch.tensor(5), torch.zeros(5, dtype=torch.long)
    made = {
        "mask": support.mask(keep),
        "lengths": support.lengths(length),
        "segments": support.segments(ids),
        "joined": support.causal() & (support.mask(keep) | support.lengths(length)),
    }[kind]
    p = partita.Gibbs(q, k, support=made)
    before = p.stats().visible.clone(), p.expectation(v)
    keep[:, 2:], ids[2:] = False, 1
    length.fill_(1)
    assert not torch.equal(p.visible(), before[0])
    torch.testing.assert_close(p.expectation(v), partita.Gibbs(q, k, support=made).expectation(v))


def test_the_best_of_no_keys_has_a_gradient_of_zero():
    q, k = torch.randn(2, 5, 4, requires_grad=True), torch.randn(2, 0, 4, requires_grad=True)
    bias = torch.randn(5, 1, requires_grad=True)
    score, index = partita.Gibbs(q, k, bias=bias).top(2)
    assert score.isneginf().all() and (index == -1).all() and score.shape == (2, 5, 2)
    found = torch.autograd.grad(score, (q, k, bias), torch.ones_like(score))
    assert all((g == 0).all() for g in found)


def test_attention_on_meta_tensors():
    q, k, v = (x.to("meta") for x in heads(2, 3, 5, 4))
    q.requires_grad_()
    options = {"is_causal": True, "support": support.lengths(torch.tensor([2, 3], device="meta"))}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out, stats = partita.attention(q, k, v, return_stats=True, **options)
            assert out.is_meta and out.shape == v.shape and stats.entropy.shape == (2, 3, 5)
            assert partita.attention(q, k, v).shape == v.shape
            assert partita.linear_cross_entropy(q, k[0, 0], torch.zeros(2, 3, 5, device="meta").long()).is_meta
    partita.attention(q, k, v, **options).sum().backward()
    assert q.grad is not None and q.grad.is_meta


# ---- numbers that are not finite -------------------------------------------------------------------------------------


def dense(q, k, v, softcap):
    s = q @ k.mT
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    return s.logsumexp(-1), s.softmax(-1) @ v


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("place", ["key", "query"])
def test_an_infinite_key_or_query_gives_what_torch_gives(place, softcap, backend):
    """A product of -inf is a key of no weight, one of inf or nan spoils its row, a softcap bounds both."""
    q, k, v = (x[0] for x in heads(1, 6, 4))
    q[:4, 0], k[:4, 0] = torch.tensor([-2.0, 3.0, 0.0, -1.0]).double(), torch.tensor([-2.0, 3.0, 0.0, 1.0]).double()
    (k if place == "key" else q)[1, 0] = torch.inf
    want = dense(q, k, v, softcap)
    assert want[0].isfinite().any() and want[0].isnan().any()
    with partita.backend(backend.split("-")[0]):
        for rows in (slice(0, 6), slice(0, 1), slice(3, 4)):
            p = partita.Gibbs(q[rows], k, softcap=softcap)
            torch.testing.assert_close(
                p.log_partition(), want[0][rows].nan_to_num(torch.nan, torch.nan), equal_nan=True
            )
            torch.testing.assert_close(p.expectation(v), want[1][rows], equal_nan=True)


def test_a_hidden_infinity_changes_nothing(backend):
    q, k, v = (x[0].requires_grad_() for x in heads(1, 6, 4))
    bad_k, bad_v = k.detach().clone(), v.detach().clone()
    bad_k[2], bad_k[3, 1], bad_v[2] = torch.inf, torch.nan, -torch.inf
    keep = torch.ones(6, 6, dtype=torch.bool)
    keep[:, 2:4] = False
    found = []
    with partita.backend(backend.split("-")[0]):
        for key, value in ((k, v), (bad_k.requires_grad_(), bad_v.requires_grad_())):
            out = partita.Gibbs(q, key, support=support.mask(keep), softcap=2.0).expectation(value)
            found.append((out, *torch.autograd.grad(out.sum(), (q, key))))
    torch.testing.assert_close(found[0], found[1])


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cross_entropy", "focal_loss", "mae_loss", "mse_loss"])
def test_class_156_of_uint8_is_not_ignored(name):
    x, y = torch.randn(3, 200), torch.tensor([156, 3, 156], dtype=torch.uint8)
    loss = getattr(partita, name)
    for reduction in ("mean", "sum", "none"):
        assert torch.equal(loss(x, y, reduction=reduction), loss(x, y.long(), reduction=reduction))


def test_class_156_of_uint8_calibrates():
    q, k, y = torch.randn(9, 4), torch.randn(200, 4), torch.full((9,), 156, dtype=torch.uint8)
    assert torch.equal(partita.fit_temperature(q, k, y), partita.fit_temperature(q, k, y.long()))


def siglip_naive(image, text, scale, bias):
    s = scale * (image @ text.mT) + bias
    sign = 2 * torch.eye(len(s), dtype=s.dtype) - 1
    return -F.logsigmoid(sign * s).sum() / len(s)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_siglip_keeps_the_gradient_of_a_sure_yes(dtype, blocks, monkeypatch):
    """Where every positive is nearly certain its pull is a difference of large terms, unless the sign comes first.

    Sums are in float32, so the one rounding that shows is that of each gradient entry to its own dtype: eps / 2, and
    eps for two entries added. The naive formula is taken of the same rounded inputs, in float64.
    """
    if blocks:
        monkeypatch.setattr(partita.recompute, "_SMALL", 1)
        monkeypatch.setattr(partita.recompute, "_NUMBERS", 50)
    n, dim = 16, 64
    unit = F.normalize(torch.randn(n, dim), dim=-1)
    image, text = (unit.clone().to(dtype).requires_grad_() for _ in range(2))
    for logit in (5.0, 8.0):
        scale, bias = 10.0 + logit, -10.0
        loss = partita.siglip_loss(image, text, scale, bias)
        ours = torch.autograd.grad(loss, (image, text))
        wide = [x.detach().double().requires_grad_() for x in (image, text)]
        truth = siglip_naive(*wide, scale, bias)
        exact = torch.autograd.grad(truth, wide)
        eps = max(torch.finfo(dtype).eps, 2**6 * torch.finfo(torch.float32).eps)
        assert abs(loss.item() - truth.item()) <= eps * truth.item()
        for found, want in zip(ours, exact, strict=True):
            assert (found.double() - want).norm() <= eps * want.norm()


@pytest.mark.parametrize("way", ["eager", "compiled", "several outputs", "vmap"])
def test_ignored_rows_look_the_same_on_every_way(way):
    x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    y = torch.tensor([0, -100, 3, 4, -100, 1])
    _, want = partita.linear_cross_entropy(x, w, y, return_stats=True)
    if way == "several outputs":
        found = partita.linear_cross_entropy(x, w[:, None], y[:, None], return_stats=True)[1]
        found = type(found)(*(field[:, 0] for field in found))
    elif way == "vmap":
        found = torch.func.vmap(lambda a, t: partita.linear_cross_entropy(a, w, t, return_stats=True)[1])(
            x[None], y[None]
        )
        found = type(want)(*(field[0] for field in found))
    elif way == "compiled":
        call = torch.compile(lambda a, t: partita.linear_cross_entropy(a, w, t, return_stats=True), backend="eager")
        found = call(x, y)[1]
    else:
        found = partita.cross_entropy(x @ w.mT, y, return_stats=True)[1]
    ignored = y == -100
    for name, ours, theirs in zip(want._fields, found, want, strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
        blank = {"log_partition": -torch.inf, "max_score": -torch.inf, "target_rank": -1, "predicted": -1}.get(name, 0)
        assert (ours[ignored] == blank).all(), name


# ---- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rule", ["alibi", "relative"])
def test_a_rule_over_positions_is_not_rounded_to_half(rule, dtype):
    """Positions from 256 on are no numbers of bfloat16, and a table keeps the digits it was given in."""
    q, k = torch.zeros(1, 3, 8, dtype=dtype), torch.zeros(1, 900, 8, dtype=dtype)
    if rule == "alibi":
        made, exact = ALiBi(torch.tensor([0.01])), ALiBi(torch.tensor([0.01], dtype=torch.float64))
    else:
        table = torch.linspace(-3, 3, 1801)
        made, exact = RelativeBias(table), RelativeBias(table.double())
    value = torch.randn(1, 900, 2, dtype=dtype)
    _, stats = partita.attention(q, k, value, bias=made, return_stats=True)
    truth = partita.Gibbs(q.double(), k.double(), bias=exact.dense(3, 900, q.double())).stats()
    eps = torch.finfo(torch.float32).eps
    # a float32 bias of size up to 9 is known to 9 eps, and 900 exponentials are added up
    torch.testing.assert_close(stats.log_partition.double(), truth.log_partition, rtol=0, atol=64 * eps)
    torch.testing.assert_close(stats.max_score.double(), truth.max_score, rtol=0, atol=9 * eps)
