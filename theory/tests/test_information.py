"""Floors, budgets, mutual information, total correlation, bottleneck: M-INF-*, M-INC-2, M-GEO-6, M-LOSS-11."""

from __future__ import annotations

import math
from itertools import pairwise, product
from math import e, log

import pytest
import torch
from draws import F64, close, gen, randn, vector

import partita_theory as theory
from partita import Gibbs
from partita.errors import ValueRangeError
from partita.losses import cross_entropy
from partita.support import causal
from partita_theory import information as info
from partita_theory.experiments.mutual_information import Critic, draw
from partita_theory.information import gaussian_information, mutual_information_bound

# ---- floor ----------------------------------------------------------------------------------------------------------


def test_floor_gap_is_the_infimum_over_two_level_laws():
    """M-INF-2: D* against a fine grid over the share of keys at the top, and its two limits."""
    for w in (0.3, 2.0, 7.0):
        x = torch.linspace(1e-6, 1 - 1e-6, 200001, dtype=F64)
        r = torch.tensor(w, dtype=F64).exp()
        gap = -(torch.log(x * r + 1 - x) - w * x * r / (x * r + 1 - x))
        assert info.floor_gap(w) == pytest.approx(gap.max().item(), abs=1e-6)
    assert info.floor_gap(2.0) == pytest.approx(0.474475, abs=5e-7)
    assert info.floor_gap(1e-3) == pytest.approx(1e-6 / 8, rel=1e-4)
    assert info.floor_gap(0.0099) == pytest.approx(float(info.floor_gap(0.0101)), rel=0.05)
    assert info.floor_gap(80.0) == pytest.approx(80 - 1 - log(80), abs=1e-12)


def test_floor_against_brute_force_and_an_optimiser():
    """M-INF-2 (W (36), (37), (43)): all 2^n corners of the cube, a random search inside, printed numbers."""
    for n, w in ((5, 2.0), (5, 6.0), (9, 2.0)):
        corners = w * torch.tensor(list(product((0.0, 1.0), repeat=n)), dtype=F64)
        assert info.entropy_floor_of_width(n, w) == pytest.approx(info.entropy(corners).min().item(), abs=1e-12)
        inside = w * torch.rand(20000, n, generator=gen(), dtype=F64)
        assert (info.entropy(inside) > info.entropy_floor_of_width(n, w)).all()
    assert info.entropy_floor(5, 1.0) == pytest.approx(1.135082, abs=5e-7)
    assert info.entropy_floor(20, 1.0) == pytest.approx(2.521376, abs=5e-7)
    z = (2 * torch.rand(20, generator=gen(1), dtype=F64) - 1).requires_grad_()
    opt = torch.optim.Adam([z], lr=0.05)
    for _ in range(300):
        opt.zero_grad()
        info.entropy(z).backward()
        opt.step()
        z.data.clamp_(-1, 1)
    assert info.entropy(z.detach()) >= info.entropy_floor(20, 1.0) - 1e-12


def test_table_of_floors():
    """M-INF-2, M-INC-6 (C (45)): the printed table for cosine scores at eight temperatures."""
    t = vector(5, 2, 1, 0.5, 0.3, 0.2, 0.1, 0.07)
    gaps = vector(0.0200, 0.1233, 0.4745, 1.6698, 3.7768, 6.6978, 16.004, 24.219)
    close(info.floor_gap(2 / t), gaps, rtol=0, atol=6e-4)
    short = vector(5.5252, 5.4219, 5.0707, 3.8755, 1.7705, 0.1260, 1.1e-5, 2.9e-9)
    close(info.entropy_floor(256, t), short, rtol=0.02, atol=0)
    long = vector(8.2978, 8.1945, 7.8433, 6.6479, 4.5411, 1.6323, 1.8e-4, 4.7e-8)
    close(info.entropy_floor(4096, t), long, rtol=0.02, atol=0)
    assert (info.entropy_floor(4096, t) >= log(4096) - info.floor_gap(2 / t) - 1e-12).all()
    assert info.entropy(20 * randn(1000)) < log(1000) - 0.4745  # unbounded scores have no such floor
    with pytest.raises(ValueRangeError, match="positive"):
        info.entropy_floor(256, 0.0)


def test_floor_holds_for_any_row_whose_width_is_known():
    """M-INF-2, M-SCL-18: Cauchy-Schwarz gives the width, the floor holds, and keys +-q reach it."""
    q, k = randn(7, 5), randn(90, 5, seed=1)
    width = info.logit_width(q, k, 0.4)
    close(width, 0.8 * q.norm(dim=-1) * k.norm(dim=-1).max())
    h = Gibbs(q, k, scale=0.4).entropy()
    assert (h >= info.entropy_floor_of_width(90, width)).all()
    u = torch.nn.functional.normalize(randn(1, 6), dim=-1)
    best = min(float(info.entropy(torch.cat([torch.ones(k), -torch.ones(9 - k)]).double() / 0.5)) for k in range(1, 9))
    signs = torch.cat([torch.ones(1), -torch.ones(8)]).double()
    assert info.entropy_floor(9, 0.5) == pytest.approx(best)
    assert Gibbs(u, signs[:, None] * u, scale=2.0).entropy().item() >= best - 1e-9


def test_largest_weight_of_bounded_logits():
    """M-SCL-18, M-RMK-2: the cap, attained by one key at the top; kappa below 1/2 forbids concentration."""
    z = torch.zeros(256, dtype=F64)
    z[0] = 2
    assert info.max_weight(256, 2.0) == pytest.approx(torch.softmax(z, -1)[0].item())
    assert info.max_weight(256, 2.0) == pytest.approx(0.0282, abs=1e-4)
    kappa = vector(0.25, 0.5, 0.75, 1.0)
    got = info.max_weight(4096, 2 * kappa * log(4096))
    close(got, vector(0.0154, 0.5001, 0.9846, 0.9998), rtol=0, atol=6e-5)
    n = vector(1e3, 1e6, 1e9)
    assert (info.max_weight(n, 2 * 0.4 * n.log()).diff() < 0).all()
    assert info.max_weight(e**16, theory.layer.qk_norm_width(64, 0.125)) == pytest.approx(0.5, abs=1e-6)
    q = theory.layer.rms_norm(randn(50, 64), eps=0.0)
    assert (q @ q.T).abs().max() <= 64 + 1e-9


# ---- budget, initialisation, regularisation -----------------------------------------------------------------------


def test_budget_is_what_a_row_has_used_and_can_still_lose():
    """M-INF-1, M-ENT-2: on a causal law, against divergences of dense rows and the lowest corner of the cube."""
    u = torch.nn.functional.normalize(randn(9, 6), dim=-1)
    p = Gibbs(u, u, support=causal())
    b = info.information_budget(p, width=2.0)
    unbounded = info.information_budget(p)
    for i in range(9):
        n = i + 1
        row = torch.softmax(u[: i + 1] @ u[i], -1)
        h = torch.special.entr(row).sum()
        corners = 2.0 * torch.tensor(list(product((0.0, 1.0), repeat=n)), dtype=F64)
        lowest = torch.special.entr(torch.softmax(corners, -1)).sum(-1).min()
        assert b.entropy[i].item() == pytest.approx(h.item(), abs=1e-12)
        assert b.ceiling[i].item() == pytest.approx(log(n), abs=1e-12)
        assert b.used[i].item() == pytest.approx((row * (row * n).log()).sum().item(), abs=1e-12)
        assert b.remaining[i].item() == pytest.approx((h - lowest).item(), abs=1e-12)
        assert unbounded.remaining[i].item() == pytest.approx(h.item(), abs=1e-12)  # unbounded logits: floor 0


def test_a_row_loses_what_it_could_and_no_more():
    """M-INF-1: descending the entropy of logits kept inside their interval uses up `remaining`."""
    width = 3.0
    z = vector(0.01, 0, 0, 0, 0, 0)  # one key ahead: the way to the lowest corner, not to another
    start = info.information_budget(Gibbs(torch.ones(1, 1, dtype=F64), z[:, None]), width)
    for _ in range(400):
        z = (z - 0.5 * info.entropy_penalty_gradient(z, -1.0)).clamp(-width / 2, width / 2)
    end = info.information_budget(Gibbs(torch.ones(1, 1, dtype=F64), z[:, None]), width)
    assert end.remaining.item() == pytest.approx(0, abs=1e-6)
    assert (end.used - start.used).item() == pytest.approx(start.remaining.item(), abs=1e-6)


def test_entropy_at_initialisation():
    """M-INF-3: random dot products and random unit vectors against log n - sharpness^2 / 2."""
    q, k = randn(200, 64), randn(1024, 64, seed=1)
    h = info.entropy(q @ k.T / 8).mean()
    assert h == pytest.approx(float(info.expected_init_entropy(1024, 1.0)), abs=0.03)
    u, v = (torch.nn.functional.normalize(x, dim=-1) for x in (randn(200, 128), randn(1024, 128, seed=1)))
    gap = log(1024) - info.entropy(u @ v.T / 0.07).mean()
    predicted = info.sharpness_of_cosine(128, 0.07) ** 2 / 2
    assert predicted == pytest.approx(0.797, abs=1e-3)
    assert gap == pytest.approx(0.781, abs=0.02)
    with pytest.raises(ValueRangeError, match="condensed"):
        info.expected_init_entropy(1024, 4.0)


def test_entropy_penalty_has_the_sign_it_says():
    """M-INF-5 (W (76)): gradient against autograd; descending +H sharpens, descending -H spreads; target form."""
    z = randn(10).requires_grad_()
    (-0.3 * info.entropy(z)).backward()
    close(info.entropy_penalty_gradient(z.detach(), 0.3), z.grad)
    z.grad = None
    (0.3 * (info.entropy(z) - 1.0) ** 2).backward()
    close(info.entropy_penalty_gradient(z.detach(), 0.3, target=1.0), z.grad)
    plus, minus = z.detach().clone(), z.detach().clone()
    for _ in range(3000):
        plus -= 0.5 * info.entropy_penalty_gradient(plus, -1.0)  # descends +H, as printed
        minus -= 0.5 * info.entropy_penalty_gradient(minus, 1.0)  # descends -H
    assert info.entropy(plus) < 0.01
    assert info.entropy(minus) == pytest.approx(log(10), abs=1e-4)


def test_selectivity_flags():
    """M-INF-8: flat, saturated and ordinary rows; a single visible key is never flagged."""
    z = torch.stack([torch.zeros(64), 100 * torch.arange(64.0), randn(64).float()])
    flags = info.selectivity(info.entropy(z), torch.tensor([64, 64, 64]))
    assert flags.tolist() == [1, -1, 0]
    assert info.selectivity(torch.tensor([0.0]), torch.tensor([1])).tolist() == [0]


# ---- mutual information ---------------------------------------------------------------------------------------------


def critic_losses(n, rows, rho=0.9, dim=4, seed=0, shift=0.0, rho_critic=None):
    """InfoNCE losses of correlated Gaussians: one positive, n - 1 draws from the marginal (or a shifted one)."""
    g = gen(seed)
    y = torch.randn(rows, dim, generator=g, dtype=F64)
    x = rho * y + (1 - rho**2) ** 0.5 * torch.randn(rows, dim, generator=g, dtype=F64)
    negatives = torch.randn(rows, n - 1, dim, generator=g, dtype=F64) + shift
    candidates = torch.cat([x[:, None], negatives], 1)
    r = rho if rho_critic is None else rho_critic
    f = torch.stack([info.optimal_gaussian_critic(c, w[None], r)[:, 0] for c, w in zip(candidates, y, strict=False)])
    return torch.logsumexp(f, -1) - f[:, 0]


def test_bound_stays_below_information_and_cap():
    """M-INC-2, M-RMK-5 (C (4.4.8), (4.3.12), P5): value <= min(I, log n), rising with n for the optimal critic."""
    rho = 0.9
    truth = float(info.gaussian_information(rho, 4))
    assert truth == pytest.approx(3.321, abs=1e-3)
    values = []
    for n, printed in ((2, 0.647), (16, 2.206), (128, 2.987)):
        loss = critic_losses(n, 1500)
        b = info.mutual_information_bound(loss, n)
        error = float(loss.std() / len(loss) ** 0.5)
        assert b.cap == pytest.approx(log(n))
        assert b.value <= b.cap
        assert b.value - 4 * error <= truth
        assert b.value == pytest.approx(printed, abs=4 * error + 2e-3)
        values.append(float(b.value))
    assert values == sorted(values)
    assert info.mutual_information_bound(torch.tensor([0.1, 0.3]), 16).value == pytest.approx(log(16) - 0.2, abs=1e-6)


def test_optimal_critic_is_the_log_density_ratio():
    """M-INC-2: log p(x|y) / p(x) against torch's densities; its mean over pairs is the information."""
    x, y, rho = randn(5, 3), randn(4, 3, seed=1), 0.7
    normal = torch.distributions.Normal
    joint = normal(rho * y[None], (1 - rho**2) ** 0.5).log_prob(x[:, None]).sum(-1)
    alone = normal(0.0, 1.0).log_prob(x).sum(-1)[:, None]
    close(info.optimal_gaussian_critic(x, y, rho), joint - alone)
    many, others = randn(6, 5, 3), randn(6, 4, 3, seed=1)
    each = [info.optimal_gaussian_critic(a, b, rho) for a, b in zip(many, others, strict=True)]
    close(info.optimal_gaussian_critic(many, others, rho), torch.stack(each))
    assert info.optimal_gaussian_critic(many[:2, None], others[:3], rho).shape == (2, 3, 5, 4)
    y = randn(2000, 1, seed=2)
    x = rho * y + (1 - rho**2) ** 0.5 * randn(2000, 1, seed=3)
    pairs = info.optimal_gaussian_critic(x, y, rho).diagonal()
    assert pairs.mean() == pytest.approx(float(info.gaussian_information(rho)), abs=5 * float(pairs.std()) / 2000**0.5)


def test_what_breaks_the_bound():
    """M-INC-2 (P3): single values exceed I; shifted negatives are not the marginal; a poor critic saturates."""
    nothing = critic_losses(16, 2000, rho=0.5, rho_critic=0.9, seed=1)
    assert (log(16) - nothing > 0).double().mean() > 0.1
    independent = critic_losses(16, 1500, rho=0.0, rho_critic=0.5, seed=2)
    assert info.mutual_information_bound(independent, 16).value < 0.05
    assert (log(16) - independent > 0).double().mean() > 0.2  # though I = 0
    shifted = critic_losses(16, 500, rho=0.0, rho_critic=0.5, seed=3, shift=3.0)
    assert info.mutual_information_bound(shifted, 16).value > 1  # though I = 0
    poor = [float(info.mutual_information_bound(critic_losses(n, 400, rho_critic=0.2), n).value) for n in (16, 256)]
    assert poor[1] - poor[0] < 0.3
    assert poor[1] < 1.5 < 3.321


def test_bound_reports_saturation():
    """M-INC-2: slack below half a nat is saturation; candidates_needed undoes it; domains are checked."""
    b = info.mutual_information_bound(0.1, 64)
    assert b.saturated
    assert b.slack == pytest.approx(0.1)
    assert b.fraction == pytest.approx((log(64) - 0.1) / log(64))
    n = info.candidates_needed(float(b.value))
    assert n == torch.tensor(float(b.value) + 0.5).exp().ceil()
    assert log(float(n)) - float(b.value) >= 0.5
    assert not info.mutual_information_bound(2.0, 64).saturated
    assert info.mutual_information_bound(0.0, 1).fraction.isnan()
    with pytest.raises(ValueRangeError, match="n >= 1"):
        info.mutual_information_bound(0.1, 0)
    with pytest.raises(ValueRangeError, match="not negative"):
        info.mutual_information_bound(-0.1, 4)


def expected_loss(joint, logits):  # token x context, context x token -> ()
    """Cross entropy of a language-model head over the whole vocabulary, averaged under the joint law."""
    context = joint.sum(0)
    return (context * cross_entropy(logits, (joint / context).T, reduction="none")).sum()


def test_what_a_language_model_knows_is_a_lower_bound():
    """M-LOSS-11: H - CE <= I for any head, short of it by the mean divergence, and equal for the best one."""
    joint = torch.softmax(1.5 * randn(20 * 30), -1).reshape(20, 30)  # token x context
    h, truth = info.entropy_of(joint.sum(1)), info.mutual_information_table(joint)
    best = (joint / joint.sum(0)).log().T
    for noise in (0.0, 0.1, 1.0, 3.0):
        logits = best + noise * randn(30, 20, seed=1)
        gain = info.token_information_gain(expected_loss(joint, logits), h)
        law = torch.log_softmax(logits, -1)
        short = (joint.T * (best - law)).sum()  # E_context KL(truth || model)
        assert gain.item() == pytest.approx((truth - short).item(), abs=1e-12)
        assert gain <= truth + 1e-12
        assert (gain < truth - 1e-4) == (noise > 0)


# ---- total correlation -----------------------------------------------------------------------------------------------


def test_total_correlation_is_not_the_sum_of_informations():
    """M-GEO-6 (W (4.4.27)): XOR, random tables, the chain rule, and TC + DTC."""
    xor = torch.zeros(2, 2, 2, dtype=F64)
    for a, b in product(range(2), repeat=2):
        xor[a, b, a ^ b] = 0.25
    assert info.total_correlation(xor) == pytest.approx(log(2))
    assert info.mutual_information_sum(xor) == pytest.approx(3 * log(2))
    for seed in range(5):
        table = torch.softmax(1.5 * randn(2 * 3 * 2 * 3, seed=seed), -1).reshape(2, 3, 2, 3)
        tc, dtc = info.total_correlation(table), info.dual_total_correlation(table)
        kl = theory.geometry.kl(table.flatten(), info.product_of_marginals(table).flatten())
        assert tc == pytest.approx(float(kl))
        assert info.prefix_information(table) == pytest.approx(float(tc))
        assert info.mutual_information_sum(table) == pytest.approx(float(tc + dtc))
        assert tc != pytest.approx(float(info.mutual_information_sum(table)), rel=0.05)
        # H(x_0 | rest) = -sum P log P(x_0 | rest), and marginals, by brute force
        given = table / table.sum(0, keepdim=True)
        assert info.conditional_entropies(table)[0] == pytest.approx(float(-(table * given.log()).sum()))
        close(info.marginals(table)[1], torch.einsum("abcd->b", table))
        # I(x_0; rest) by brute force
        flat = table.reshape(2, -1)
        brute = (flat * (flat / (flat.sum(1, keepdim=True) * flat.sum(0, keepdim=True))).log()).sum()
        assert info.mutual_information_table(flat) == pytest.approx(float(brute))
    with pytest.raises(ValueRangeError, match="summing to 1"):
        info.total_correlation(2 * xor)


# ---- bottleneck ------------------------------------------------------------------------------------------------------


def test_bottleneck_update_never_raises_its_objective():
    """M-INF-7: the self-consistent step descends, its fixed point is stationary, small beta keeps nothing."""
    joint = torch.softmax(2 * randn(24), -1).reshape(6, 4)
    encoder = torch.softmax(randn(6, 3, seed=1), -1)
    values = []
    for _ in range(60):
        values.append(float(info.bottleneck_objective(encoder, joint, 4.0).objective))
        encoder = info.bottleneck_step(encoder, joint, 4.0)
    assert all(b <= a + 1e-12 for a, b in pairwise(values))
    assert values[-1] < values[0] - 0.05
    best = info.solve_bottleneck(joint, 3, 4.0, generator=gen(2))
    logits = best.log().requires_grad_()
    info.bottleneck_objective(torch.softmax(logits, -1), joint, 4.0).objective.backward()
    assert logits.grad.abs().max() < 1e-4
    idle = info.solve_bottleneck(joint, 3, 0.5, generator=gen(3))
    assert info.bottleneck_objective(idle, joint, 0.5).kept < 1e-6
    b = info.bottleneck_objective(best, joint, 4.0)
    assert b.relevant <= info.mutual_information_table(joint) + 1e-12  # data processing
    assert b.relevant <= b.kept + 1e-12


CASES = [(1, 0.5), (4, 0.8), (12, 0.97)]  # dimensions, correlation: 0.14, 2.04 and 17.0 nats


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
