"""The three faces against their definitions, with every option that the first versions have."""

from __future__ import annotations

import pytest
import torch

import partita
from tests import reference
from tests.conformance.serving import serving
from tests.strategies import INF, catalogue, problem
from tests.tolerances import assert_exact


@pytest.mark.parametrize("sink", [None, torch.randn(()).double(), torch.randn(3, 1).double()])
@pytest.mark.parametrize("kind", ["all", "causal", "mask", "window | mask"])
def test_attention_is_its_definition(kind, sink):
    """M-ATT-1, M-ATT-4, M-ATT-6; statistics describe the keys alone, without the sink."""
    p = problem(7, 13, batch=(2, 3), support=catalogue(7, 13, (2, 3))[kind])
    bias = torch.randn(7, 13, dtype=torch.float64)
    given = sink[:, 0] if sink is not None and sink.ndim else sink  # one per head
    out, stats = partita.attention(
        p.query, p.key, p.value, support=p.support, bias=bias, softcap=2.0, sink=given, return_stats=True
    )
    options = {"visible": p.visible, "bias": bias, "softcap": 2.0}
    assert_exact(out, reference.attention(p.query, p.key, p.value, sink=sink, **options))
    s = reference.score(p.query, p.key, scale=5**-0.5, **options)
    assert_exact(stats.entropy, reference.entropy(s))
    assert_exact(stats.visible, reference.visible(s).double())


@pytest.mark.parametrize("way", ["plain", "dropout", "rule", "score"])
@pytest.mark.parametrize("sink", [-INF, 0.3, INF, (-INF, 0.3, -INF)])
def test_an_empty_row_gives_0_whatever_the_sink(backend, way, sink):
    """Output and every gradient; rows that see keys have those of the definition."""
    p = problem(7, 13, batch=(2, 3), support=catalogue(7, 13, (2, 3))["mask"])
    assert not p.visible.any(-1).all()
    given = torch.tensor(sink, dtype=torch.float64).requires_grad_()
    leaves = [x.clone().requires_grad_() for x in (p.query, p.key, p.value)]
    more = {
        "dropout": {"dropout_p": 1e-12},
        "rule": {"bias": partita.attn.ALiBi(torch.zeros(3).double())},
        "score": {"score": partita.score.Distance(), "scale": 0.0},
    }.get(way, {})
    with serving(backend):
        out = partita.attention(*leaves, support=p.support, sink=given, **more)
    level = given.detach() if given.ndim == 0 else given.detach()[:, None]
    options = {"visible": p.visible, **({"scale": 0.0} if way == "score" else {})}
    s = reference.score(p.query, p.key, **{"scale": 5**-0.5, **options})
    empty = ~p.visible.any(-1).expand(2, 3, 7)
    kept = torch.where(empty, 0.0, torch.sigmoid(reference.log_partition(s) - level))
    assert_exact(out, reference.expectation(s, p.value) * kept[..., None])
    grads = torch.autograd.grad(out.square().sum(), (*leaves, given))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][empty] == 0).all()
    assert (grads[3][given.isinf()] == 0).all()


def test_attention_takes_a_policy_that_counts_visible_keys():
    """M-SCL-5: causal row i has n = i."""
    p = problem(7, 7, batch=(2, 3), support=catalogue(7, 7)["causal"])
    ours = partita.attention(p.query, p.key, p.value, is_causal=True, scale=partita.scale.KappaLog(kappa=2.0))
    scale = reference.kappa_log(torch.arange(1, 8), 5, kappa=2.0)
    assert_exact(ours, reference.attention(p.query, p.key, p.value, visible=p.visible, scale=scale))


LCE_OPTIONS = {
    "plain": {},
    "linear_bias": {"linear_bias": torch.linspace(-1, 1, 11).double()},
    "weight": {"weight": torch.linspace(0.1, 2, 11).double()},
    "label_smoothing": {"label_smoothing": 0.2},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5, "linear_bias": torch.linspace(-1, 1, 11).double()},
    "z_loss": {"z_loss": 0.1},
    "entropy_weight": {"entropy_weight": 0.5},
    "sample_weight": {"sample_weight": torch.linspace(0, 1, 21).view(3, 7).double(), "z_loss": 0.1},
    "together": {
        "weight": torch.linspace(0.1, 2, 11).double(),
        "label_smoothing": 0.2,
        "scale": 0.5,
        "softcap": 3.0,
        "z_loss": 0.01,
        "entropy_weight": 0.2,
        "sample_weight": torch.linspace(0, 1, 21).view(3, 7).double(),
    },
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", ["some", "all"])
@pytest.mark.parametrize("name", LCE_OPTIONS)
def test_linear_cross_entropy_is_its_definition(name, reduction, ignored):
    """M-LOSS-1, M-LOSS-7, M-LOSS-9, M-INF-5; ignored rows count nowhere, and where all are the loss is 0."""
    x, w = torch.randn(3, 7, 5).double().requires_grad_(), torch.randn(11, 5).double().requires_grad_()
    target = torch.randint(0, 11, (3, 7))
    target[1, :3] = -100
    target = torch.full_like(target, -100) if ignored == "all" else target
    options = {**LCE_OPTIONS[name], "reduction": reduction}
    values = [f(x, w, target, **options) for f in (partita.linear_cross_entropy, reference.linear_cross_entropy)]
    assert_exact(values[0].detach(), values[1].detach(), magnitude=10)
    for a, b in zip(*(torch.autograd.grad(v.sum(), (x, w)) for v in values), strict=True):
        assert_exact(a, b)


@pytest.mark.parametrize("case", ["in-batch", "symmetric", "unpaired", "paired", "raw", "none", "sum"])
def test_info_nce_is_its_definition(case):
    """M-INC-1, M-INC-4."""
    q, k = torch.randn(7, 5).double().requires_grad_(), torch.randn(7, 5).double().requires_grad_()
    negatives = {"unpaired": (9, 5), "paired": (7, 3, 5)}
    options = {
        "in-batch": {},
        "symmetric": {"symmetric": True},
        "unpaired": {"negative_mode": "unpaired"},
        "paired": {"negative_mode": "paired"},
        "raw": {"normalize": False, "temperature": 2.0},
        "none": {"reduction": "none"},
        "sum": {"reduction": "sum"},
    }[case]
    extra = [torch.randn(negatives[case]).double()] if case in negatives else []
    values = [f(q, k, *extra, **options) for f in (partita.info_nce_loss, reference.info_nce)]
    assert_exact(values[0].detach(), values[1].detach(), magnitude=15)
    for a, b in zip(*(torch.autograd.grad(v.sum(), (q, k)) for v in values), strict=True):
        assert_exact(a, b, magnitude=15)


def test_faces_return_stats_when_asked():
    x, w, target = torch.randn(7, 5).double(), torch.randn(11, 5).double(), torch.randint(0, 11, (7,))
    loss, stats = partita.linear_cross_entropy(x, w, target, return_stats=True)
    assert loss.shape == ()
    assert_exact(stats.entropy, reference.entropy(x @ w.mT))
    loss, stats = partita.info_nce_loss(x, x + 0.1, return_stats=True)
    assert isinstance(stats, partita.Stats)
    assert stats.entropy.shape == (7,)
