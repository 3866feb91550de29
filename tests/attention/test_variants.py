"""Top-k, hard, Gumbel, pair hooks, positions: by their definitions (M-SPA-1..3, M-ATT-9, M-ATT-10)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import partita
from partita import support
from partita.attn import (
    ALiBi,
    RelativeBias,
    ScaleInvariant,
    alibi_slopes,
    gumbel_attention,
    hard_attention,
    mean_entropy,
    pair_attention,
    rotary,
    sinusoidal,
    top_k_attention,
)
from partita.engine.backends.tiled import tile_shape
from partita.scale import LogLength, TargetEntropy
from tests.attention.operands import assert_same, assert_same_gradients, make

# ---- the k best ------------------------------------------------------------------------------------------------------


def test_top_k_is_softmax_over_the_k_best():
    q, k, v = make()
    keep = torch.rand(7, 9) < 0.7
    scores = (q @ k.mT / 2).masked_fill(~keep, -torch.inf)
    got = top_k_attention(q, k, v, 3, attn_mask=keep)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(3).indices, True) & keep
    want = scores.masked_fill(~best, -torch.inf).softmax(-1)
    assert_same(got.output, want @ v, (q, k, v))
    kept = torch.where(best, scores.softmax(-1), 0.0).sum(-1)
    torch.testing.assert_close(got.log_kept, kept.log())
    full = partita.Gibbs(q, k, scale=0.5, support=support.mask(keep)).entropy()
    assert (got.stats.entropy <= torch.minimum(full, torch.tensor(math.log(3))) + 1e-12).all()


def test_top_k_output_moves_by_at_most_the_lost_mass_times_the_diameter():
    q, k, v = make(grad=False)
    got = top_k_attention(q, k, v, 2)
    moved = (got.output - partita.attention(q, k, v)).norm(dim=-1)
    diameter = torch.cdist(v, v).amax((-2, -1))[..., None]
    assert (moved <= (1 - got.log_kept.exp()) * diameter + 1e-12).all()


def test_top_k_past_the_visible_keys_and_on_empty_rows():
    q, k, v = make(3, 4, 2, ())
    got = top_k_attention(q, k, v, 8, support=support.lengths(torch.tensor(0)) | support.causal())
    torch.testing.assert_close(got.output, partita.attention(q, k, v, is_causal=True))
    empty = top_k_attention(q, k, v, 2, attn_mask=torch.zeros(3, 4, dtype=torch.bool))
    assert (empty.output == 0).all() and (empty.log_kept == 0).all()


def test_top_k_of_grouped_queries():
    q = torch.randn(2, 4, 5, 3)
    k, v = torch.randn(2, 2, 6, 3), torch.randn(2, 2, 6, 3)
    whole = top_k_attention(q, k, v, 6, enable_gqa=True).output
    torch.testing.assert_close(whole, partita.attention(q, k, v, enable_gqa=True))


# ---- the best, and a random one --------------------------------------------------------------------------------------


def test_hard_attention_takes_the_best_value_and_soft_attentions_gradient():
    q, k, v = make()
    got = hard_attention(q, k, v, is_causal=True)
    scores = (q @ k.mT).masked_fill(~torch.ones(7, 9, dtype=torch.bool).tril(), -torch.inf)
    want = v.gather(-2, scores.argmax(-1)[..., None].expand(2, 3, 7, 4))
    torch.testing.assert_close(got, want)
    soft = partita.attention(q, k, v, is_causal=True)
    assert_same_gradients(got, soft, (q, k, v))
    top = partita.Gibbs(q, k, scale=0.5, support=support.causal())
    slack = 1 - (top.max_score() - top.log_partition()).exp()
    assert ((soft - got).norm(dim=-1) <= slack * torch.cdist(v, v).amax((-2, -1))[..., None] + 1e-12).all()


def test_hard_attention_of_a_row_without_keys_is_zero():
    q, k, v = make(3, 4, 2, ())
    assert (hard_attention(q, k, v, attn_mask=torch.zeros(3, 4, dtype=torch.bool)) == 0).all()


def test_a_gumbel_draw_follows_softmax_at_every_temperature():
    q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])
    p = (q @ k.mT).softmax(-1)[0]
    eye = torch.eye(3)
    many = q.expand(20000, 2)
    for temperature in (0.3, 2.0):
        torch.manual_seed(1)
        drawn = gumbel_attention(many, k, eye, temperature, hard=True, scale=1.0)
        assert set(drawn.unique().tolist()) == {0.0, 1.0}
        assert (drawn.mean(0) - p).abs().max() < 5 * (0.25 / 20000) ** 0.5
        torch.manual_seed(1)
        soft = gumbel_attention(many, k, eye, temperature, scale=1.0)
        assert torch.equal(soft.argmax(-1), drawn.argmax(-1))  # the same noise, relaxed
        torch.testing.assert_close(soft.sum(-1), torch.ones(20000))
    biased = gumbel_attention(many, k, eye, 1.0, scale=1.0).mean(0)
    assert (biased - torch.tensor([0.569, 0.289, 0.142])).abs().max() < 0.01  # M-SPA-3: the mean is not softmax


def test_gumbel_gradients_are_those_of_its_noise(blocked):
    q, k, v = make()
    bias = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(4)
    got = gumbel_attention(q, k, v, 0.7, bias=bias, is_causal=True)
    torch.manual_seed(4)
    eye = torch.eye(9, dtype=torch.float64).expand(2, 3, 9, 9)
    weights = gumbel_attention(q.detach(), k.detach(), eye, 0.7, bias=bias.detach(), is_causal=True)
    seen = torch.ones(7, 9, dtype=torch.bool).tril()
    scores = (q @ k.mT / 2 + bias) / 0.7
    noise = (weights.log() - scores.detach()).masked_fill(~seen, -torch.inf)  # up to a constant per row
    want = (scores + noise).softmax(-1) @ v
    assert_same(got, want, (q, k, v, bias))


def test_gumbel_noise_differs_from_block_to_block(small_blocks):
    weights = gumbel_attention(torch.zeros(6, 1), torch.zeros(9, 1), torch.eye(9))
    assert (weights[:3] - weights[3:]).abs().min(-1).values.max() > 1e-4


def test_gumbel_takes_a_generator():
    q, k, v = make(grad=False)
    draws = [gumbel_attention(q, k, v, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*draws)


# ---- pair by pair --------------------------------------------------------------------------------------------------


def test_a_pair_hook_multiplies_and_offsets_each_score(blocked):
    q, k, v = make()
    hook = ScaleInvariant(tau=2.0)
    distance = (torch.arange(7)[:, None] - torch.arange(9)).abs().double()
    square = 2 * (torch.log1p(distance / 2) + 0.5)
    scores = square.sqrt() * (q @ k.mT / 2) + 1 - square
    seen = torch.ones(7, 9, dtype=torch.bool).tril()
    want = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    torch.set_default_dtype(torch.float64)
    try:
        got, stats = pair_attention(q, k, v, hook, is_causal=True, return_stats=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(got, want, (q, k, v))
    assert torch.equal(stats.visible[0, 0], torch.arange(1.0, 8.0, dtype=torch.float64))


def test_scale_invariant_attention_gives_the_whole_in_chunks_and_steps(blocked):
    """The published formula with a cache: `where` says how many keys came before the first query."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 23, 4, dtype=torch.float64) for _ in range(3))
    whole = pair_attention(q, k, v, ScaleInvariant(tau=2.0), is_causal=True)
    for cuts in ([0, 9, 16, 23], range(24)):
        parts = [
            pair_attention(
                q[:, a:b], k[:, :b], v[:, :b], ScaleInvariant(tau=2.0), where=a, support=support.causal("bottom-right")
            )
            for a, b in itertools.pairwise(cuts)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_hook_that_does_nothing_is_attention(blocked):
    q = torch.randn(2, 4, 7, 3)
    k, v = (torch.randn(2, 2, 7, 3) for _ in range(2))
    options = {"enable_gqa": True, "support": support.not_self(), "scale": LogLength(reference=4)}
    one = pair_attention(q, k, v, lambda i, j: (torch.ones(()), torch.zeros(())), **options)
    torch.testing.assert_close(one, partita.attention(q, k, v, **options))


# ---- positions -------------------------------------------------------------------------------------------------------


def test_sinusoids_have_constant_length_and_similarity_by_distance():
    p = sinusoidal(40, 64, dtype=torch.float64)
    torch.testing.assert_close(p.square().sum(-1), torch.full((40,), 32.0, dtype=torch.float64))
    lags = [round(float(p[0] @ p[lag]), 2) for lag in (0, 1, 2, 4, 8, 16, 32)]
    assert lags == [32.0, 30.92, 28.3, 23.93, 22.41, 19.37, 19.55]  # M-ATT-10


def test_rotary_scores_depend_on_distance_alone():
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turned_q, turned_k = rotary(q.expand(9, 8)), rotary(k.expand(9, 8))
    scores = turned_q @ turned_k.mT
    for lag in (-3, 0, 5):
        diagonal = scores.diagonal(lag)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(9))
    later = rotary(q.expand(2, 8), torch.tensor([4, 5]))
    torch.testing.assert_close(later, turned_q[4:6])


@pytest.mark.parametrize("align", ["top-left", "bottom-right"])
def test_position_rules_equal_the_matrix_they_stand_for(align, blocked):
    """Values and gradients, the table's included, whether or not rows come in blocks."""
    q, k, v = make(7, 9)
    table = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    slopes = alibi_slopes(3).double().requires_grad_()
    offset = torch.arange(9) - torch.arange(7)[:, None] - (2 if align == "bottom-right" else 0)
    rule = RelativeBias(table, align) + ALiBi(slopes, align)
    matrix = table[:, offset.clamp(-3, 3) + 3] - slopes[:, None, None] * offset.abs()
    options = {"is_causal": True, "scale": LogLength(reference=4)}
    got, stats = partita.attention(q, k, v, bias=rule, return_stats=True, **options)
    want, dense = partita.attention(q, k, v, bias=matrix, return_stats=True, **options)
    torch.testing.assert_close(stats, dense)
    assert_same(got, want, (q, k, v, table, slopes))


def test_a_scale_is_solved_under_a_position_rule(blocked):
    q, k, v = make()
    slopes = torch.tensor([0.5, 0.1, 0.02], dtype=q.dtype, requires_grad=True)
    rule, policy = ALiBi(slopes), TargetEntropy(entropy=1.0)
    written = rule.dense(q.shape[-2], k.shape[-2], q)
    got, stats = partita.attention(q, k, v, bias=rule, scale=policy, return_stats=True)
    want, dense = partita.attention(q, k, v, bias=written, scale=policy, return_stats=True)
    torch.testing.assert_close(stats, dense)
    _, reached = partita.solve_scale(q, k, entropy=1.0, bias=written, return_reached=True)
    assert reached.any()
    torch.testing.assert_close(stats.entropy[reached], torch.ones_like(stats.entropy)[reached], atol=1e-8, rtol=0)
    assert_same(got, want, (q, k, v, slopes))
    for form in (hard_attention, partita.attn.sigmoid_attention):
        torch.testing.assert_close(form(q, k, v, bias=rule, scale=policy), form(q, k, v, bias=written, scale=policy))


def test_slopes_of_alibi():
    torch.testing.assert_close(alibi_slopes(8), 0.5 ** torch.arange(1.0, 9.0))
    assert alibi_slopes(12).shape == (12,) and (alibi_slopes(12) > 0).all() and alibi_slopes(12).unique().numel() == 12


# ---- entropy in the loss ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("seen", [None, support.causal()], ids=["all", "causal"])
def test_entropy_in_the_loss_moves_the_entropy(sign, seen):
    """M-INF-5 (the notes have the sign wrong): small steps on loss - beta H raise H of that law, on + lower it."""
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randn(8, 4, dtype=torch.float64)
    hidden = torch.ones(5, 8).tril() == 0 if seen is not None else torch.zeros(5, 8, dtype=torch.bool)
    found = []
    for _ in range(30):
        dense = torch.softmax((q @ k.mT).detach().masked_fill(hidden, -torch.inf), -1)
        found.append(torch.special.entr(dense).sum(-1).mean().item())
        (step,) = torch.autograd.grad(-sign * mean_entropy(partita.Gibbs(q, k, support=seen).stats()), q)
        q = (q - 0.05 * step).detach().requires_grad_()
    assert (torch.tensor(found).diff() * sign > 0).all(), found


def test_mean_entropy_leaves_out_rows_without_keys():
    q, k = torch.randn(3, 4), torch.randn(5, 4)
    keep = torch.tensor([True, False, True])[:, None].expand(3, 5)
    stats = partita.Gibbs(q, k, support=support.mask(keep)).stats()
    torch.testing.assert_close(mean_entropy(stats), stats.entropy[[0, 2]].mean())


class Slope(torch.nn.Module):
    """A hook that learns how fast scores fall with distance."""

    def __init__(self):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor([0.1, 0.3], dtype=torch.float64))

    def forward(self, i, j):
        distance = (i - j).abs()
        return torch.ones(()), -self.rate[:, None, None] * distance


def test_a_hook_that_is_a_module_learns():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    hook, scale = Slope(), torch.tensor([0.2, 0.4], dtype=torch.float64)
    out = pair_attention(q, k, v, hook, where=20, scale=scale[:, None])
    distance = (torch.arange(20, 25)[:, None] - torch.arange(7)).abs()
    scores = scale[:, None, None] * (q @ k.mT) - hook.rate[:, None, None] * distance
    expected = scores.softmax(-1) @ v
    assert_same(out, expected, (hook.rate, q, k, v))


@pytest.mark.parametrize("autocast", [True, False])
def test_a_hook_sees_whole_positions_in_half_precision(autocast):
    """bfloat16 tells no two of 1001, 1002, ... from one another."""
    q, k, v = (torch.randn(2, n, 4, dtype=torch.bfloat16) for n in (5, 1010, 1010))

    def own(i, j):
        return torch.zeros(()), torch.where(j == i, 0.0, -torch.inf)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = pair_attention(q, k, v, own, where=1003)
    torch.testing.assert_close(out, v[:, 1003:1008])


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_in_tiles_give_what_one_tile_gives(causal):
    """Forward, statistics and gradients; tiles above the diagonal are not made at all."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, n, d, dtype=torch.float64, requires_grad=True) for n, d in ((50, 4), (61, 4), (61, 3))]
    bias = torch.randn(50, 61, dtype=torch.float64)
    made = []

    def hook(i, j):
        made.append((int(i[0]), int(j[0])))
        return ScaleInvariant()(i, j)

    def run():
        out, stats = pair_attention(*tensors, hook, is_causal=causal, bias=bias, return_stats=True)
        return out, stats.entropy, *torch.autograd.grad((out.sin().sum() + stats.entropy.sum()), tensors)

    whole = run()
    made.clear()
    with partita.backend("tiled"), tile_shape(16, 16):
        for a, b in zip(run(), whole, strict=True):
            torch.testing.assert_close(a, b)
    tiles = {(i, j) for i in range(0, 50, 16) for j in range(0, 61, 16)}
    assert set(made) == {(i, j) for i, j in tiles if j <= i or not causal}
