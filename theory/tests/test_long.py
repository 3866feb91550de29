"""What claims to stream works at n = 65536, where a dense matrix would take 17 GB."""

from __future__ import annotations

from math import log

import pytest
import torch

from partita import Gibbs
from partita_theory import information, robustness, spectrum

N = 65536


@pytest.fixture(scope="module")
def keys():
    g = torch.Generator().manual_seed(0)
    return torch.randn(N, 8, generator=g) / 8**0.5


def test_rows_of_a_long_law(keys):
    """M-INF-1, M-ENT-1, M-ENT-4, M-DER-4, M-SCL-12: budget, bounds, n_eff and slope of some rows over 65536 keys."""
    q = 8**0.5 * torch.nn.functional.normalize(keys[:16], dim=-1)  # scores over keys: normal of variance 1
    p = Gibbs(q, keys)
    budget = information.information_budget(p)
    assert budget.entropy.mean() == pytest.approx(log(N) - 0.5, abs=0.02)
    low, high = information.entropy_bounds(p)
    assert (low <= p.entropy()).all()
    assert (p.entropy() <= high).all()
    size = information.renyi_entropy(q, keys).exp()
    assert size.mean() == pytest.approx(N / 2.71828, rel=0.05)  # E[e^s]^2 / E[e^2s] = 1/e
    assert information.entropy_scale_slope(p).mean() == pytest.approx(-1, abs=0.05)


def test_noise_prediction_over_a_long_row(keys):
    """M-ROB-2: streaming bias and sd over 65536 keys against the dense formula on the same row."""
    q, v = keys[:2] * 8, keys[:, :2]
    cv2 = robustness.GaussianNoise(0.5).cv2()
    got = robustness.noise_effect(q, keys, v, cv2)
    w = torch.softmax((q @ keys.T).double(), -1)
    values = v.double().expand(2, N, 2)
    torch.testing.assert_close(got.bias.double(), robustness.noise_bias(w, values, cv2), rtol=1e-3, atol=1e-9)
    sd = robustness.noise_covariance(w, values, cv2).diagonal(dim1=-2, dim2=-1).sqrt()
    torch.testing.assert_close(got.sd.double(), sd, rtol=1e-3, atol=0)


def test_head_distances_over_long_rows(keys):
    """M-INF-6: two heads, 65536 keys, a few rows."""
    k = torch.stack([keys, keys.flip(-1)])
    q = torch.stack([keys[:3], keys[:3]]) * 4
    kl = spectrum.head_kl(q, k)
    w = torch.softmax(q.double() @ k.double().transpose(-1, -2), -1)
    dense = (w[0] * (w[0] / w[1]).log()).sum(-1)
    torch.testing.assert_close(kl[0, 1].double(), dense, rtol=1e-3, atol=1e-4)
    assert (spectrum.head_cosine(q, k)[0, 1] < 1).all()


@pytest.mark.slow
def test_square_operator_of_65536():
    """M-SPE-1: a stationary law of a 65536 x 65536 operator, whose columns sum as power iteration says."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=g)
    p = Gibbs(x, x, scale=0.1)
    pi = spectrum.stationary(p, steps=2, tolerance=0.0)
    assert pi.probs.sum() == pytest.approx(1, abs=1e-4)
    assert pi.residual < 1e-2


def test_square_operator_streams(keys):
    """M-SPE-1: stationary law and gap of a 1200 x 1200 operator against dense linear algebra."""
    x = keys[:1200].double()
    p = Gibbs(x, x, scale=2.0)
    pi = spectrum.stationary(p, steps=16, tolerance=1e-9)
    z = torch.logsumexp(2 * x @ x.T, -1)
    exact = torch.softmax(z, -1)  # symmetric scores: a reversible chain, stationary in proportion to Z
    torch.testing.assert_close(pi.probs, exact, rtol=1e-5, atol=0)
    gap = spectrum.spectral_gap(p, steps=8, generator=torch.Generator().manual_seed(0))
    half = (2 * x @ x.T - z[:, None] / 2 - z[None, :] / 2).exp()  # similar to A, symmetric
    v = half @ torch.randn(1200, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for _ in range(12):
        v = torch.linalg.qr(half @ v).Q
    top = torch.linalg.eigvalsh(v.T @ half @ v)
    assert top[-1] == pytest.approx(1, abs=1e-9)
    assert gap == pytest.approx(1 - float(top[-2]), abs=1e-3)
