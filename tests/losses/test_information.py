"""What InfoNCE says about mutual information, where the truth is known: correlated Gaussians (M-INC-2)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from partita.contrastive import info_nce_loss
from partita.theory.information import gaussian_information, mutual_information_bound

CASES = [(1, 0.5), (4, 0.8), (12, 0.97)]  # dimensions, correlation: 0.14, 2.04 and 17.0 nats


class Critic(torch.nn.Module):
    """<A phi(x), B phi(y)> with phi = (x, x^2, 1): the log density ratio of Gaussians is among these."""

    def __init__(self, dim: int):
        super().__init__()
        width = 2 * dim + 1
        start = torch.eye(width) * torch.tensor([0.5] * dim + [0.1] * dim + [1.0])
        self.query, self.key = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())

    def forward(self, x: Tensor, y: Tensor, **options) -> Tensor:
        q, k = (torch.cat([z, z.square(), torch.ones(len(z), 1)], -1) for z in (x, y))
        return info_nce_loss(q @ self.query, k @ self.key, temperature=1.0, normalize=False, **options)


def draw(n: int, dim: int, rho: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, noise = torch.randn(2, n, dim, generator=generator)
    return x, rho * x + math.sqrt(1 - rho**2) * noise


def trained(dim: int, rho: float, generator: torch.Generator) -> Critic:
    critic = Critic(dim)
    step = torch.optim.Adam(critic.parameters(), lr=0.03)
    for _ in range(200):
        loss = critic(*draw(256, dim, rho, generator))
        step.zero_grad()
        loss.backward()
        step.step()
    return critic


def assert_bound(dim: int, rho: float, sizes: tuple[int, ...], total: int) -> None:
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    critic, truth = trained(dim, rho, generator), gaussian_information(rho, dim).item()
    before = -math.inf
    for n in sizes:
        with torch.no_grad():
            draws = [critic(*draw(n, dim, rho, generator), reduction="none") for _ in range(max(2, total // n))]
        rows = torch.cat(draws)
        bound = mutual_information_bound(rows, n)
        error = rows.std().item() / math.sqrt(len(rows))
        value, cap = bound.value.item(), bound.cap.item()
        assert math.isclose(cap, math.log(n), rel_tol=1e-6)
        assert value <= min(truth, cap) + 2 * error, f"n={n}: {value:.3f} of {truth:.3f}, cap {cap:.3f}"
        if truth > cap + 2:
            assert value > cap - 0.6, f"n={n}: {value:.3f} is not saturated at {cap:.3f}"
            assert bool(bound.saturated) == (cap - value < 0.5)
        elif cap > truth + 1:
            assert value > truth - 0.25, f"n={n}: {value:.3f} of {truth:.3f} with room to spare"
        assert value > before - 3 * error  # more candidates never say less
        before = value


@pytest.mark.parametrize(("dim", "rho"), CASES)
def test_the_bound_never_exceeds_the_truth_nor_its_cap(dim, rho):
    assert_bound(dim, rho, (64, 512), total=4096)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "rho"), [*CASES, (2, 0.9), (8, 0.6)])
def test_the_bound_up_to_8192_candidates(dim, rho):
    assert_bound(dim, rho, (64, 256, 1024, 8192), total=16384)


def test_independent_pairs_carry_nothing_and_a_single_batch_may_say_otherwise():
    """M-INC-2: true in expectation only; the rows of one batch lie on both sides of zero."""
    generator = torch.Generator().manual_seed(0)
    critic = trained(1, 0.5, generator)
    with torch.no_grad():
        x, y = draw(64, 1, 0.0, generator)
        rows = math.log(64) - critic(x, y, reduction="none")
        many = torch.stack([critic(*draw(64, 1, 0.0, generator)) for _ in range(50)])
    assert (rows > 0).any() and (rows < 0).any()
    assert mutual_information_bound(many, 64).value <= 2 * many.std() / math.sqrt(50)
