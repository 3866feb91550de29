"""Attention matrices as operators; heads; projections; initialisation: M-SPE-*, M-INF-4, M-INF-6, M-RMK-3."""

from __future__ import annotations

from math import log

import pytest
import torch
from draws import F64, close, gen, randn

from partita import Gibbs
from partita.errors import ShapeError
from partita.support import causal, segments
from partita_theory import geometry, information
from partita_theory import spectrum as spec


def random_law(n=16, seed=0, **options):
    return Gibbs(randn(n, 6, seed=seed), randn(n, 6, seed=seed + 1), **options)


def test_push_and_pull_are_the_matrix_and_its_transpose():
    """M-SPE-1: neither builds the matrix; both equal it, with a support, a batch and no gradient leaking."""
    p = random_law(12, support=causal())
    a, x = p.probs(), randn(12, seed=5)
    close(spec.push(p, x), a @ x)
    close(spec.pull(p, x), a.T @ x)
    close(spec.push(p, torch.ones(12, dtype=F64)), torch.ones(12, dtype=F64))
    batch = Gibbs(randn(3, 7, 4), randn(3, 9, 4, seed=1))
    y = randn(3, 7, seed=2)
    close(spec.pull(batch, y), torch.einsum("bqk,bq->bk", batch.probs(), y))
    with torch.no_grad():
        assert spec.pull(p, x).shape == (12,)


def test_spectrum_of_a_positive_matrix():
    """M-SPE-1: 1 is simple, the others inside, some complex or negative; streaming values equal dense ones."""
    p = random_law(16)
    a = p.probs()
    dense = torch.linalg.eigvals(a)
    order = dense.abs().argsort(descending=True)
    dense = dense[order]
    assert dense[0].real == pytest.approx(1)
    assert dense[1].abs() < 1
    assert (dense.imag.abs() > 1e-9).any()
    assert (dense.real < 0).any()
    got = spec.leading_eigenvalues(p, 4, generator=gen())
    close(got.abs(), dense[:4].abs(), atol=1e-8, rtol=1e-8)
    assert spec.spectral_gap(p, generator=gen()) == pytest.approx(1 - float(dense[1].abs()), abs=1e-8)
    assert dense[1].abs() <= spec.dobrushin(a) + 1e-12
    pi = spec.stationary(p)
    close(pi.probs @ a, pi.probs, atol=1e-9, rtol=0)
    assert pi.probs.sum() == pytest.approx(1)
    assert pi.residual < 1e-9
    left = torch.linalg.eig(a.T)
    vector = left.eigenvectors[:, (left.eigenvalues - 1).abs().argmin()].real
    close(pi.probs, vector / vector.sum(), atol=1e-8, rtol=0)


def test_masks_break_the_spectral_gap():
    """M-SPE-1 (P36): causal matrices show their diagonal; packed sequences repeat eigenvalue 1; permutations too."""
    p = random_law(10, support=causal())
    dense = torch.linalg.eigvals(p.probs()).real.sort().values
    close(dense, p.probs().diagonal().sort().values)
    pi = spec.stationary(p, steps=2000)
    assert pi.probs[0] == pytest.approx(1, abs=1e-6)
    ids = torch.tensor([0] * 6 + [1] * 6)
    packed = Gibbs(randn(12, 3), randn(12, 3, seed=1), support=segments(ids, ids))
    values = spec.leading_eigenvalues(packed, 3, generator=gen())
    close(values[:2].abs(), torch.ones(2, dtype=F64), atol=1e-8, rtol=0)
    assert values[2].abs() < 1 - 1e-3
    turn = torch.roll(torch.eye(8, dtype=F64), 1, 0)
    cycle = Gibbs(turn, torch.eye(8, dtype=F64), scale=1e3)
    close(spec.leading_eigenvalues(cycle, 8, generator=gen()).abs(), torch.ones(8, dtype=F64), atol=1e-6, rtol=0)
    with pytest.raises(ShapeError, match="the same number of queries and keys"):
        spec.stationary(Gibbs(randn(3, 2), randn(4, 2)))


def test_rank_is_not_width():
    """M-SPE-2 (W (73)): uniform 16 and 1, identity 1 and 16; streaming stable rank equals the dense one."""
    n = 16
    uniform, identity = torch.full((n, n), 1 / n, dtype=F64), torch.eye(n, dtype=F64)
    assert information.entropy_of(uniform).exp().mean() == pytest.approx(16)
    assert spec.effective_rank(uniform) == pytest.approx(1)
    assert information.entropy_of(identity).exp().mean() == pytest.approx(1)
    assert spec.effective_rank(identity) == pytest.approx(16)
    s = torch.linalg.svdvals(random_law(9).probs())
    r = s / s.sum()
    assert spec.effective_rank(random_law(9).probs()) == pytest.approx(float(torch.exp(-(r * r.log()).sum())))
    q, k = randn(20, 5), randn(20, 5, seed=1)
    dense = spec.stable_rank(Gibbs(q, k, scale=0.8).probs())
    assert spec.stable_rank_streaming(q, k, scale=0.8) == pytest.approx(float(dense), rel=1e-6)


def test_von_neumann_entropy():
    """M-SPE-3 (W (72)): -tr rho log rho; the sum over eigenvalues of A is complex and no entropy of rows."""
    a = random_law(16).probs()
    assert 0 <= spec.von_neumann_entropy(a) <= log(16)
    uniform = torch.full((16, 16), 1 / 16, dtype=F64)
    assert spec.von_neumann_entropy(uniform).abs() < 1e-9
    assert spec.eigenvalue_entropy(uniform).abs() < 1e-9
    assert information.entropy_of(uniform).mean() == pytest.approx(2.773, abs=1e-3)
    assert (spec.eigenvalue_entropy(a) - information.entropy_of(a).mean()).abs() > 0.1
    assert torch.linalg.eigvals(a).imag.abs().max() > 1e-3


def test_wide_rows_force_a_low_stable_rank():
    """M-SPE-4: sigma_1 >= 1, |A|_F^2 = sum exp(-H2), so stable rank <= that sum; 2000 random matrices."""
    a = torch.softmax(4 * torch.rand(2000, 1, 1, generator=gen(), dtype=F64) * randn(2000, 8, 8), -1)
    h2 = -a.square().sum(-1).log()
    bound = spec.stable_rank_bound(h2)
    close(bound, a.square().sum((-1, -2)))
    assert (torch.linalg.matrix_norm(a, 2) >= 1 - 1e-12).all()
    assert (spec.stable_rank(a) <= bound + 1e-12).all()
    p = random_law(16)
    assert spec.singular_value(p, generator=gen()) == pytest.approx(
        float(torch.linalg.matrix_norm(p.probs(), 2)), abs=1e-6
    )


def test_head_diversity():
    """M-INF-6 (C (71), P35): JSD as mean divergence, joint entropy between its bounds, equal entropies say nothing."""
    w = torch.softmax(2 * randn(5, 4, 9), -1)
    d = spec.head_diversity(w)
    mean = w.mean(1)
    kls = torch.stack([geometry.kl(w[:, r], mean) for r in range(4)], 1).mean(1)
    close(d.divergence, kls)
    assert (d.divergence <= log(4)).all()
    assert (d.least <= d.mean).all()
    assert (d.mean <= d.most).all()
    two = spec.head_diversity(torch.eye(2, dtype=F64))
    assert two.most == 0
    assert two.divergence == pytest.approx(log(2))
    p, q = torch.softmax(randn(6), -1), torch.softmax(randn(6, seed=1), -1)
    low, high = spec.joint_entropy_bounds(information.entropy_of(torch.stack([p, q])))
    independent, equal = (
        information.entropy_of(torch.outer(p, q).flatten()),
        information.entropy_of(torch.diag(p).flatten()),
    )
    assert independent == pytest.approx(float(high))
    assert low - 1e-12 <= independent
    assert equal == pytest.approx(float(information.entropy_of(p)))  # identical heads: half of the sum
    assert spec.head_diversity(torch.stack([p, p])).divergence.abs() < 1e-12


@pytest.mark.parametrize("support", [None, causal()])
def test_streaming_distances_between_heads(support):
    """M-INF-6, M-GEO-5, M-GEO-2, M-ATT-3: affinity, Fisher-Rao, cosine and KL of every pair, against dense laws."""
    q, k = randn(2, 3, 7, 4), randn(2, 3, 7, 4, seed=1)
    w = Gibbs(q, k, scale=0.7, support=support).probs()  # (2, 3, 7, 7)
    a, b = w[:, :, None], w[:, None]
    kl = spec.head_kl(q, k, scale=0.7, support=support)
    close(kl, geometry.kl(a.expand(2, 3, 3, 7, 7), b.expand(2, 3, 3, 7, 7)), atol=1e-10, rtol=1e-8)
    fr = spec.head_fisher_rao(q, k, scale=0.7, support=support)
    close(fr, geometry.fisher_rao_distance(a, b), atol=1e-6, rtol=0)
    cosine = spec.head_cosine(q, k, scale=0.7, support=support)
    close(cosine, torch.nn.functional.cosine_similarity(a, b, dim=-1))
    assert kl[0, 0, 1].sum() > 0
    with pytest.raises(ShapeError, match="dimension -3"):
        spec.head_kl(q[0, 0], k[0, 0])


def test_projections():
    """M-RMK-3, M-ATT-2 (P24, P28): order of the factors, rank of the match, bound on scores, inert key bias."""
    w = randn(6, 4)
    f = spec.row_svd(w)
    x = randn(5, 6, seed=1)
    close(((x @ f.rotate) * f.stretch) @ f.back, x @ w)
    close(f.rotate.T @ f.rotate, torch.eye(4, dtype=F64))
    wq, wk = randn(32, 4, seed=2), randn(32, 4, seed=3)
    form = spec.match_form(wq, wk)
    assert torch.linalg.matrix_rank(form) == 4
    y = randn(9, 32, seed=4)
    close(y @ form @ y.T, (y @ wq) @ (y @ wk).T)
    close(spec.match_singular_values(wq, wk), torch.linalg.svdvals(form)[:4] / 2)
    norms = y.norm(dim=-1)
    scores = y @ form @ y.T / 2
    bound = spec.score_bound(wq, wk, float(norms.max()), float(norms.max()))
    assert scores.abs().max() <= bound
    beta = randn(4, seed=5)
    close(torch.softmax((y @ wq) @ (y @ wk + beta).T, -1), torch.softmax(y @ form @ y.T, -1))
    with pytest.raises(ShapeError, match="one dim"):
        spec.match_form(wq, wk[:, :3])


def test_xavier_starts_where_it_says():
    """M-INF-4, M-SCL-1 (P25): gain 1 for square matrices only; measured sharpness 1.795, 1.000, 0.496."""
    x, y = randn(300, 512), randn(300, 512, seed=1)
    for shape, gain in (((512, 64), 1.778), ((512, 512), 1.0), ((512, 1536), 0.5)):
        assert spec.xavier_gain(*shape) == pytest.approx(gain, abs=1e-3)
        wq, wk = (torch.empty(*shape, dtype=F64) for _ in range(2))
        for w in (wq, wk):
            torch.nn.init.xavier_normal_(w, generator=gen(3))
            w.copy_(w[:, torch.randperm(shape[1], generator=gen(int(w is wk) + 4))])
        wk = torch.nn.init.xavier_normal_(wk, generator=gen(9))
        q, k = x @ wq[:, :64], y @ wk[:, :64]
        assert q.var() == pytest.approx(gain, rel=0.05)
        assert (q @ k.T / 8).std() == pytest.approx(float(spec.initial_sharpness(*shape)), rel=0.06)
        assert wq.var() == pytest.approx(float(spec.xavier_variance(*shape)), rel=0.05)
    sd = float(spec.sharpness_initialiser_std(512, 0.7))
    q, k = x @ (sd * randn(512, 64, seed=5)), y @ (sd * randn(512, 64, seed=6))
    assert (q @ k.T / 8).std() == pytest.approx(0.7, rel=0.06)
