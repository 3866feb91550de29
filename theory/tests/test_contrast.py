"""InfoNCE and NCE: M-INC-1, M-INC-3..7, M-NCE-*."""

from __future__ import annotations

import itertools
from math import log

import pytest
import torch
from draws import F64, autograd, close, gen, law, randn, vector
from torch.autograd.functional import hessian
from torch.nn import functional as F

from partita.contrastive import info_nce_loss
from partita.errors import ValueRangeError
from partita.losses import nce_loss
from partita_theory import contrast as con
from partita_theory import geometry


def test_loss_and_what_n_counts():
    """M-INC-1 (N (4.4.3), (4.3.10), W (4.4.4)): N is 2B - 1 for two views, and log N the loss of equal scores."""
    views = F.normalize(randn(16, 16), dim=-1)
    assert con.candidates_in_batch(8, views=2) == len(views[1:]) == 15
    assert 0 <= con.info_nce(views[0], views[1:]) <= 2 + log(15)
    assert con.info_nce(torch.zeros(16, dtype=F64), views[1:]) == pytest.approx(log(15))
    loss = F.cross_entropy(views[:1] @ views[1:].T / 0.1, torch.tensor([3]))
    assert con.info_nce(views[0], views[1:], 3, temperature=0.1) == pytest.approx(float(loss))


@pytest.mark.parametrize("positive", [0, 3])
def test_gradients_by_every_argument(positive):
    """M-INC-3 (W (4.4.15), (4.4.16), P6, P7): query, keys, scores, temperature, scale against autograd."""
    q, k, t = randn(5), randn(7, 5, seed=1), 0.4
    g = con.info_nce_gradients(q, k, positive, temperature=t)
    close(g.query, autograd(lambda q: con.info_nce(q, k, positive, temperature=t), q))
    close(g.keys, autograd(lambda k: con.info_nce(q, k, positive, temperature=t), k))
    tt = torch.tensor(t, dtype=F64)
    close(g.temperature, autograd(lambda t: con.info_nce(q, k, positive, temperature=t), tt))
    close(g.scale, autograd(lambda x: con.info_nce(q, k, positive, temperature=1 / x), 1 / tt))
    s = k @ q
    auto = autograd(lambda s: torch.logsumexp(s / t, -1) - s[positive] / t, s)
    close(g.scores, auto)
    p = torch.softmax(s / t, -1)
    negatives = con.hardness_weights(q, k, positive, temperature=t) @ k
    close(g.query, (1 - p[positive]) * (negatives - k[positive]) / t)


def test_hessians():
    """M-INC-5: query, keys, mixed and joint against autograd; PSD alone, indefinite together."""
    q, k, t = randn(3), randn(4, 3, seed=1), 0.6
    close(con.info_nce_hessian_query(q, k, t), hessian(lambda q: con.info_nce(q, k, 1, temperature=t), q))
    flat = hessian(lambda v: con.info_nce(q, v.reshape(4, 3), 1, temperature=t), k.flatten())
    close(con.info_nce_hessian_keys(q, k, t), flat)
    both = torch.cat([q, k.flatten()])
    joint = hessian(lambda v: con.info_nce(v[:3], v[3:].reshape(4, 3), 1, temperature=t), both)
    close(con.info_nce_hessian_joint(q, k, 1, t), joint)
    close(con.info_nce_hessian_mixed(q, k, 1, t), joint[3:, :3].reshape(4, 3, 3))
    assert geometry.curvature_summary(con.info_nce_hessian_query(q, k, t)).convex
    assert geometry.curvature_summary(con.info_nce_hessian_keys(q, k, t)).convex
    assert not geometry.curvature_summary(joint).convex


def test_cosine_gradient_is_across_the_vector():
    """M-INC-6: chain rule through normalisation against autograd; orthogonal to u, scaled by 1/|u|."""
    u, k = 3 * randn(5), F.normalize(randn(7, 5, seed=1), dim=-1)
    auto = autograd(lambda u: con.info_nce(F.normalize(u, dim=0), k, temperature=0.2), u)
    inner = con.info_nce_gradients(F.normalize(u, dim=0), k, temperature=0.2).query
    got = con.normalized_gradient(u, inner)
    close(got, auto)
    assert abs(float(got @ u)) < 1e-12
    close(con.normalized_gradient(2 * u, inner), got / 2)


def test_gradient_is_not_monotone_in_the_temperature():
    """M-INC-7 (P8): an easy positive's gradient rises, then dies; a hard one's grows; low t feeds the hardest."""
    q = vector(1.0, 0.0)

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


def test_batch_gradients():
    """M-INC-4, M-INC-3: rows, and rows and columns, against torch's loss and partita's."""
    q, k, t = randn(6, 4), randn(6, 4, seed=1), 0.5

    def loss(q, k, symmetric):
        z, label = q @ k.T / t, torch.arange(6)
        rows = F.cross_entropy(z, label)
        return (rows + F.cross_entropy(z.T, label)) / 2 if symmetric else rows

    def ours(q, k, symmetric):
        return info_nce_loss(q, k, temperature=t, normalize=False, symmetric=symmetric)

    for symmetric, value in itertools.product((False, True), (loss, ours)):
        g = con.info_nce_batch_gradients(q, k, temperature=t, symmetric=symmetric)
        close(g.queries, autograd(lambda q, s=symmetric, f=value: f(q, k, s), q))
        close(g.keys, autograd(lambda k, s=symmetric, f=value: f(q, k, s), k))


def test_gradients_of_the_loss_of_partita():
    """M-INC-3: query, keys and temperature of paired negatives."""
    q, keys, t = randn(1, 5), randn(1, 7, 5, seed=1), torch.tensor(0.4, dtype=F64)

    def loss(q, keys, t):
        options = {"negative_mode": "paired", "normalize": False, "temperature": t}
        return info_nce_loss(q, keys[:, 0], keys[:, 1:], **options)

    found = torch.autograd.functional.jacobian(loss, (q, keys, t))
    closed = con.info_nce_gradients(q[0], keys[0], temperature=t)
    for a, b in zip(found, (closed.query[None], closed.keys[None], closed.temperature), strict=True):
        close(a, b)


# ---- NCE ------------------------------------------------------------------------------------------------------------


def test_posterior_is_bayes():
    """M-NCE-1 ((4.4.1)): m / (m + k p_n), in the log domain where m would overflow; ratio must be positive."""
    f, noise = randn(6), torch.softmax(randn(6, seed=1), -1)
    m = f.exp()
    close(con.nce_posterior(f, noise.log(), 3.0), m / (m + 3 * noise))
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
    close(con.nce_sample_loss(data, noise), 4 * bce)


def test_nce_gradients():
    """M-NCE-3: by the log-odds, by f over a finite set, by log noise and log k."""
    data, noise = randn(5), randn(5, 3, seed=1)
    got = con.nce_gradients(data, noise)
    close(got[0], autograd(lambda h: con.nce_sample_loss(h, noise).sum(), data))
    close(got[1], autograd(lambda h: con.nce_sample_loss(data, h).sum(), noise))
    f, p, q = randn(6), torch.softmax(randn(6, seed=2), -1), torch.softmax(randn(6, seed=3), -1)
    auto = autograd(lambda f: con.nce_population_loss(f, p, q, 2.5), f)
    close(con.nce_population_gradient(f, p, q, 2.5), auto)
    one = torch.ones(6, dtype=F64)
    close(autograd(lambda n: con.nce_logits(f, n, 2.0).sum(), q.log()), -one)
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
    close(f.detach().exp(), p, atol=1e-6, rtol=0)


def test_large_ratio_limit():
    """M-NCE-4 (P2): gradients tend to m - P, the generalised KL's; the loss itself grows like log k."""
    f, p, q = randn(6), torch.softmax(randn(6, seed=2), -1), torch.softmax(randn(6, seed=3), -1)

    def generalised(f):
        return (p * (p.log() - f) - p + f.exp()).sum()

    close(con.generalized_kl_gradient(f, p), autograd(generalised, f))
    limit = con.generalized_kl_gradient(f, p)
    for k in (1e2, 1e4, 1e6):
        # (m - P) k q / (m + k q) falls short of m - P by its share m / (m + k q), whatever was drawn
        gap = (con.nce_population_gradient(f, p, q, k) - limit).abs()
        close(gap, limit.abs() * f.exp() / (f.exp() + k * q), rtol=1e-6, atol=1e-12)
    values = [float(con.nce_population_loss(f, p, q, k)) for k in (1e4, 1e6)]
    # L = log k + sum P log(q / m) + sum m + O(1/k): the constant cancels, and what is left is at most
    # E_P[log(1 + m / (k q))] + sum m^2 / (k q), here twice the largest of them for the smaller k
    rest = 2 * float((f.exp() / q * (p + f.exp())).sum()) / 1e4
    assert values[1] - values[0] == pytest.approx(log(100), abs=rest)


def test_the_sampled_loss_has_the_gradient_of_the_population():
    """M-NCE-2, M-NCE-4: partita's loss over many noise draws, against the expected gradient."""
    data, noise, model = (law(6, seed=s) for s in range(3))
    f = (model.log() + 0.3).requires_grad_()
    k, n, g = 400, 2000, gen()
    x = torch.multinomial(data, n, replacement=True, generator=g)
    draws = torch.multinomial(noise, n * k, replacement=True, generator=g).view(n, k)
    (grad,) = torch.autograd.grad(nce_loss(f[x], f[draws], noise.log()[x], noise.log()[draws]), f)
    # One datum and its k draws give sigma(h_c) for each draw of c, less 1 - sigma(h_c) if the datum is c: a variance
    # of at most P_c (1 - sigma)^2 + k q_c sigma^2. Five standard errors of n of them, around the expectation.
    share = f.detach().exp() / (f.detach().exp() + k * noise)
    error = ((data * (1 - share) ** 2 + k * noise * share**2) / n).sqrt()
    expected = con.nce_population_gradient(f.detach(), data, noise, k)
    assert ((grad - expected).abs() < 5 * error).all()
