"""InfoNCE and NCE: M-INC-1, M-INC-3..7, M-NCE-*."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch.autograd.functional import hessian
from torch.nn import functional as F

from partita.errors import ValueRangeError
from partita.theory import contrast as con
from partita.theory import geometry
from partita.theory.law import gibbs_law

F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def autograd(f, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x)
    return g


def test_loss_and_what_n_counts():
    """M-INC-1 (N (4.4.3), (4.3.10), W (4.4.4)): the anchor as candidate spoils the loss; N is 2B - 1 for two views."""
    base = F.normalize(randn(8, 16), dim=-1)
    a, b = (F.normalize(base + 0.1 * randn(8, 16, seed=s), dim=-1) for s in (1, 2))
    views = torch.cat([a, b])
    sim = views @ views.T / 0.1
    partner = (torch.arange(16) + 8) % 16
    with_self = F.cross_entropy(sim, partner)
    without = F.cross_entropy(sim.masked_fill(torch.eye(16, dtype=torch.bool), -torch.inf), partner)
    assert with_self > without + 0.5
    explicit = []
    for i in range(16):
        others = [j for j in range(16) if j not in (i, int(partner[i]))]
        keys = torch.cat([views[partner[i]][None], views[others]])
        assert len(keys) == con.candidates_in_batch(8, views=2)
        explicit.append(con.info_nce(views[i], keys, temperature=0.1))
    assert torch.stack(explicit).mean() == pytest.approx(float(without))
    assert 0 <= con.info_nce(views[0], views[1:]) <= 2 + log(15)
    assert con.info_nce(torch.zeros(16, dtype=F64), views[1:]) == pytest.approx(log(15))
    p = torch.softmax(sim[0], -1)
    assert p.sum() == pytest.approx(1)  # the printed event c = i would have N probabilities that sum to one


@pytest.mark.parametrize("positive", [0, 3])
def test_gradients_by_every_argument(positive):
    """M-INC-3 (W (4.4.15), (4.4.16), P6, P7): query, keys, scores, temperature, scale against autograd."""
    q, k, t = randn(5), randn(7, 5, seed=1), 0.4
    g = con.info_nce_gradients(q, k, positive, temperature=t)
    torch.testing.assert_close(g.query, autograd(lambda q: con.info_nce(q, k, positive, temperature=t), q))
    torch.testing.assert_close(g.keys, autograd(lambda k: con.info_nce(q, k, positive, temperature=t), k))
    tt = torch.tensor(t, dtype=F64)
    torch.testing.assert_close(g.temperature, autograd(lambda t: con.info_nce(q, k, positive, temperature=t), tt))
    torch.testing.assert_close(g.scale, autograd(lambda x: con.info_nce(q, k, positive, temperature=1 / x), 1 / tt))
    s = k @ q
    auto = autograd(lambda s: torch.logsumexp(s / t, -1) - s[positive] / t, s)
    torch.testing.assert_close(g.scores, auto)
    p = torch.softmax(s / t, -1)
    negatives = con.hardness_weights(q, k, positive, temperature=t) @ k
    torch.testing.assert_close(g.query, (1 - p[positive]) * (negatives - k[positive]) / t)
    printed = (q - p @ k) * p[positive] / t
    assert (printed - g.keys[positive]).norm() / g.keys[positive].norm() > 0.5
    m = (positive + 1) % 7
    printed = (p @ k - q) * p[m] / t
    assert (printed - g.keys[m]).norm() / g.keys[m].norm() > 0.5


def test_descending_the_printed_gradient_raises_the_loss():
    """M-INC-3 (W (4.4.15)): the right pull lowers the loss, the printed one raises it for an orthogonal positive."""
    q, k = F.normalize(randn(8), dim=0), F.normalize(randn(10, 8, seed=1), dim=-1)
    t, p = 0.3, torch.softmax(k @ q / 0.3, -1)
    k[0] = -q  # a badly placed positive: P+ is tiny
    p = torch.softmax(k @ q / t, -1)

    def moved(step):
        other = k.clone()
        other[0] -= 1e-3 * step
        return float(con.info_nce(q, other, temperature=t) - con.info_nce(q, k, temperature=t))

    right = con.info_nce_gradients(q, k, temperature=t).keys[0]
    assert moved(right) < 0
    assert moved((q - p @ k) * p[0] / t) > 0
    assert right.norm() == pytest.approx(float((1 - p[0]) / t))


def test_batch_gradients():
    """M-INC-4: rows, and rows and columns, against torch."""
    q, k, t = randn(6, 4), randn(6, 4, seed=1), 0.5
    label = torch.arange(6)

    def loss(q, k, symmetric):
        z = q @ k.T / t
        rows = F.cross_entropy(z, label)
        return (rows + F.cross_entropy(z.T, label)) / 2 if symmetric else rows

    for symmetric in (False, True):
        g = con.info_nce_batch_gradients(q, k, temperature=t, symmetric=symmetric)
        torch.testing.assert_close(g.queries, autograd(lambda q, s=symmetric: loss(q, k, s), q))
        torch.testing.assert_close(g.keys, autograd(lambda k, s=symmetric: loss(q, k, s), k))


def test_hessians():
    """M-INC-5: query, keys, mixed and joint against autograd; PSD alone, indefinite together."""
    q, k, t = randn(3), randn(4, 3, seed=1), 0.6
    torch.testing.assert_close(
        con.info_nce_hessian_query(q, k, t), hessian(lambda q: con.info_nce(q, k, 1, temperature=t), q)
    )
    flat = hessian(lambda v: con.info_nce(q, v.reshape(4, 3), 1, temperature=t), k.flatten())
    torch.testing.assert_close(con.info_nce_hessian_keys(q, k, t), flat)
    both = torch.cat([q, k.flatten()])
    joint = hessian(lambda v: con.info_nce(v[:3], v[3:].reshape(4, 3), 1, temperature=t), both)
    torch.testing.assert_close(con.info_nce_hessian_joint(q, k, 1, t), joint)
    torch.testing.assert_close(con.info_nce_hessian_mixed(q, k, 1, t), joint[3:, :3].reshape(4, 3, 3))
    assert geometry.curvature_summary(con.info_nce_hessian_query(q, k, t)).convex
    assert geometry.curvature_summary(con.info_nce_hessian_keys(q, k, t)).convex
    assert not geometry.curvature_summary(joint).convex


def test_cosine_gradient_is_across_the_vector():
    """M-INC-6: chain rule through normalisation against autograd; orthogonal to u, scaled by 1/|u|."""
    u, k = 3 * randn(5), F.normalize(randn(7, 5, seed=1), dim=-1)
    auto = autograd(lambda u: con.info_nce(F.normalize(u, dim=0), k, temperature=0.2), u)
    inner = con.info_nce_gradients(F.normalize(u, dim=0), k, temperature=0.2).query
    got = con.normalized_gradient(u, inner)
    torch.testing.assert_close(got, auto)
    assert abs(float(got @ u)) < 1e-12
    torch.testing.assert_close(con.normalized_gradient(2 * u, inner), got / 2)


def test_gradient_is_not_monotone_in_the_temperature():
    """M-INC-7 (P8): an easy positive's gradient rises, then dies; a hard one's grows; low t feeds the hardest."""
    q = torch.tensor([1.0, 0.0], dtype=F64)

    def on_circle(cosines):
        c = torch.tensor(cosines, dtype=F64)
        return torch.stack([c, (1 - c**2).sqrt()], -1)

    taus = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
    easy, hard = on_circle([0.9, 0.3, 0.1, -0.2, 0.0]), on_circle([0.3, 0.9, 0.1, -0.2, 0.0])
    small = [float(con.info_nce_gradients(q, easy, temperature=t).query.norm()) for t in taus]
    assert max(small) > small[0] > small[-1]
    assert small[-1] < 1e-6
    large = [float(con.info_nce_gradients(q, hard, temperature=t).query.norm()) for t in taus]
    assert large == sorted(large)
    shares = [float(con.hardness_weights(q, easy, temperature=t)[1]) for t in taus]
    assert shares == sorted(shares)
    assert shares[-1] > 0.999
    assert con.hardness_weights(q, easy).sum() == pytest.approx(1)
    with pytest.raises(ValueRangeError, match="temperature"):
        con.info_nce(q, easy, temperature=0.0)


# ---- NCE ------------------------------------------------------------------------------------------------------------


def test_posterior_is_bayes():
    """M-NCE-1 ((4.4.1)): m / (m + k p_n), in the log domain where m would overflow; ratio must be positive."""
    f, noise = randn(6), torch.softmax(randn(6, seed=1), -1)
    m = f.exp()
    torch.testing.assert_close(con.nce_posterior(f, noise.log(), 3.0), m / (m + 3 * noise))
    assert con.nce_posterior(torch.tensor(900.0), torch.tensor(0.0)) == 1
    with pytest.raises(ValueRangeError, match="ratio"):
        con.nce_logits(f, noise.log(), 0.0)


def test_loss_is_a_sum_of_binary_decisions():
    """M-NCE-2: (1 + k) times torch's mean binary cross entropy."""
    data, noise = randn(5), randn(5, 3, seed=1)
    logits = torch.cat([data[:, None], noise], 1)
    label = torch.zeros_like(logits)
    label[:, 0] = 1
    bce = F.binary_cross_entropy_with_logits(logits, label, reduction="none").mean(1)
    torch.testing.assert_close(con.nce_sample_loss(data, noise), 4 * bce)


def test_nce_gradients():
    """M-NCE-3: by the log-odds, by f over a finite set, by log noise and log k."""
    data, noise = randn(5), randn(5, 3, seed=1)
    got = con.nce_gradients(data, noise)
    torch.testing.assert_close(got[0], autograd(lambda h: con.nce_sample_loss(h, noise).sum(), data))
    torch.testing.assert_close(got[1], autograd(lambda h: con.nce_sample_loss(data, h).sum(), noise))
    f, p, q = randn(6), torch.softmax(randn(6, seed=2), -1), torch.softmax(randn(6, seed=3), -1)
    auto = autograd(lambda f: con.nce_population_loss(f, p, q, 2.5), f)
    torch.testing.assert_close(con.nce_population_gradient(f, p, q, 2.5), auto)
    one = torch.ones(6, dtype=F64)
    torch.testing.assert_close(autograd(lambda n: con.nce_logits(f, n, 2.0).sum(), q.log()), -one)
    k = torch.tensor(2.0, dtype=F64)
    assert autograd(lambda k: con.nce_logits(f, q.log(), k).sum(), k) * k == pytest.approx(-6)


@pytest.mark.parametrize("k", [0.5, 1.0, 5.0, 50.0])
def test_nce_is_consistent_for_every_ratio(k):
    """M-NCE-4 (P1): the unnormalised minimiser is the data law, whatever k."""
    p, q = torch.softmax(randn(6), -1), torch.softmax(randn(6, seed=1), -1)
    f = torch.zeros(6, dtype=F64, requires_grad=True)
    search = torch.optim.LBFGS(
        [f], max_iter=300, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        search.zero_grad()
        loss = con.nce_population_loss(f, p, q, k)
        loss.backward()
        return loss

    search.step(closure)
    torch.testing.assert_close(f.detach().exp(), p, atol=1e-6, rtol=0)


def test_large_ratio_limit():
    """M-NCE-4 (P2): gradients tend to m - P, the generalised KL's; the loss itself grows like log k."""
    f, p, q = randn(6), torch.softmax(randn(6, seed=2), -1), torch.softmax(randn(6, seed=3), -1)

    def generalised(f):
        return (p * (p.log() - f) - p + f.exp()).sum()

    torch.testing.assert_close(con.generalized_kl_gradient(f, p), autograd(generalised, f))
    limit = con.generalized_kl_gradient(f, p)
    for k in (1e2, 1e4, 1e6):
        # (m - P) k q / (m + k q) falls short of m - P by its share m / (m + k q), whatever was drawn
        gap = (con.nce_population_gradient(f, p, q, k) - limit).abs()
        torch.testing.assert_close(gap, limit.abs() * f.exp() / (f.exp() + k * q), rtol=1e-6, atol=1e-12)
    values = [float(con.nce_population_loss(f, p, q, k)) for k in (1e4, 1e6)]
    # L = log k + sum P log(q / m) + sum m + O(1/k): the constant cancels, and what is left is at most
    # E_P[log(1 + m / (k q))] + sum m^2 / (k q), here twice the largest of them for the smaller k
    rest = 2 * float((f.exp() / q * (p + f.exp())).sum()) / 1e4
    assert values[1] - values[0] == pytest.approx(log(100), abs=rest)
    assert gibbs_law(f).probs.sum() == pytest.approx(1)
