"""Contrastive losses against loops written from their definitions, and every option that changes who is compared."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import partita
from partita import score
from partita.contrastive import (
    AbovePositive,
    ContrastStats,
    Guide,
    Queue,
    alignment,
    clip_loss,
    info_nce_loss,
    joint_loss,
    nt_xent_loss,
    siglip_loss,
    supcon_loss,
    uniformity,
)
from partita.errors import DtypeError, ValueRangeError
from tests import reference
from tests.losses.checks import assert_equal_with_gradients, leaf


def unit(x):
    return F.normalize(x, dim=-1)


def by_loop(score):
    """Mean over i of -log( exp(s_ii) / sum_j exp(s_ij) ), one row and one candidate at a time."""
    total = 0.0
    for i in range(len(score)):
        denominator = sum(torch.exp(score[i, j] - score[i, i]) for j in range(score.shape[1]))
        total = total + torch.log(denominator)
    return total / len(score)


def test_info_nce_is_the_loop_over_its_definition():
    """M-INC-1, M-INC-4, M-INC-6."""
    q, k = leaf(7, 5), leaf(7, 5)
    s = unit(q) @ unit(k).mT / 0.2
    assert_equal_with_gradients(info_nce_loss(q, k, temperature=0.2), by_loop(s), (q, k))
    both = (by_loop(s) + by_loop(s.mT)) / 2
    assert_equal_with_gradients(info_nce_loss(q, k, temperature=0.2, symmetric=True), both, (q, k))


@pytest.mark.parametrize("n", [3, 200])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("hard", [None, "far", "zero"])
def test_pairs_in_one_node(n, normalize, symmetric, reduction, hard, monkeypatch):
    """By the product of torch and of a backend; sums far below the largest score are left to a pass."""
    monkeypatch.setattr(partita.engine.small, "_PRODUCT", 1 << 18)
    q, k = leaf(n, 16, scale=0.3), leaf(n, 16, scale=0.3)
    with torch.no_grad():
        q[0] *= {None: 1.0, "far": 0.0 if normalize else 1e3, "zero": 1e-13}[hard]
    t = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    a, b = (unit(q), unit(k)) if normalize else (q, k)
    s, own = a @ b.mT / t, torch.arange(n)
    theirs = F.cross_entropy(s, own, reduction=reduction)
    if symmetric:
        theirs = (theirs + F.cross_entropy(s.mT, own, reduction=reduction)) / 2
    ours = info_nce_loss(q, k, temperature=t, normalize=normalize, symmetric=symmetric, reduction=reduction)
    assert_equal_with_gradients(ours, theirs, (q, k, t))
    if n == 3 and hard is None:
        penalty = [torch.autograd.grad(x.sum(), q, create_graph=True)[0].square().sum() for x in (ours, theirs)]
        assert_equal_with_gradients(*penalty, (q, k, t))


def test_the_pull_on_the_positive_is_one_minus_its_probability():
    """M-INC-3 against the printed (4.4.15), P_+ (q - E[k]): a step along that one raises the loss."""
    q, keys = torch.randn(1, 5).double(), leaf(1, 6, 5)
    loss = info_nce_loss(q, keys[:, 0], keys[:, 1:], negative_mode="paired", normalize=False, temperature=1.0)
    (grad,) = torch.autograd.grad(loss, keys)
    p = (keys.detach()[0] @ q[0]).softmax(-1)
    torch.testing.assert_close(grad[0, 0], -(1 - p[0]) * q[0])
    torch.testing.assert_close(grad[0, 1:], p[1:, None] * q[0])
    printed = (q[0] - p @ keys.detach()[0]) * p[0]
    assert (grad[0, 0] - printed).norm() / grad[0, 0].norm() > 0.5


@pytest.mark.parametrize("mode", ["unpaired", "paired"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_given_negatives_replace_the_batch(mode, reduction):
    q, k = leaf(7, 5), leaf(7, 5)
    negatives = leaf(9, 5) if mode == "unpaired" else leaf(7, 3, 5)
    options = {"negative_mode": mode, "reduction": reduction, "temperature": 0.3}
    theirs = reference.info_nce(q, k, negatives, **options)
    assert_equal_with_gradients(info_nce_loss(q, k, negatives, **options), theirs, (q, k, negatives))


@pytest.mark.parametrize("kind", ["temperature", "logarithm", "rows"])
def test_the_temperature_is_learned(kind):
    """M-INC-3: dL/dt = (s_+ - E[s]) / t^2, also through its logarithm, also one per row."""
    q, k = leaf(7, 5), leaf(7, 5)
    t = torch.full((7,) if kind == "rows" else (), 0.3, dtype=torch.float64)
    t = (t.log() if kind == "logarithm" else t).requires_grad_()
    given = {"log_temperature": t} if kind == "logarithm" else {"temperature": t}
    factor = (t.exp() if kind == "logarithm" else t).reshape(-1, 1)
    theirs = F.cross_entropy(unit(q) @ unit(k).mT / factor, torch.arange(7))
    assert_equal_with_gradients(info_nce_loss(q, k, **given), theirs, (q, k, t))


def test_clip_is_open_clips_loss():
    """open_clip's ClipLoss, one process: two cross entropies of logit_scale * image @ text.T + logit_bias."""
    image, text = leaf(7, 5), leaf(7, 5)
    scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (4.0, -1.5))
    labels = torch.arange(7)
    per_image = scale * image @ text.T + bias
    per_text = scale * text @ image.T + bias
    theirs = (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2
    assert_equal_with_gradients(clip_loss(image, text, scale, bias), theirs, (image, text, scale, bias))
    loss, stats = clip_loss(image, text, scale, bias, return_stats=True)
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(stats.log_partition, per_image.logsumexp(-1))


def test_nt_xent_is_simclrs_loss():
    """2n anchors, each against the 2n - 1 others (M-INC-1): with itself among the candidates it is another number."""
    a, b = leaf(6, 5), leaf(6, 5)
    x = unit(torch.cat([a, b]))
    total = with_self = 0.0
    for i in range(12):
        s = (x[i] * x).sum(-1) / 0.1
        others = [j for j in range(12) if j != i]
        total = total - torch.log(torch.exp(s[(i + 6) % 12]) / sum(torch.exp(s[j]) for j in others))
        with_self = with_self - torch.log(torch.exp(s[(i + 6) % 12]) / torch.exp(s).sum())
    assert_equal_with_gradients(nt_xent_loss(a, b, temperature=0.1), total / 12, (a, b))
    assert with_self / 12 > total / 12 + 0.01
    _, stats = nt_xent_loss(a, b, temperature=0.1, return_stats=True)
    assert stats.entropy.shape == (12,) and (stats.visible == 11).all()


@pytest.mark.parametrize("refs", [False, True])
def test_supcon_is_the_loop_over_positives(refs):
    """Labels that occur once, several times, and (with references) nowhere among the keys."""
    x, labels = leaf(9, 5), torch.tensor([0, 0, 1, 1, 1, 2, 3, 0, 9])
    keys, key_labels = (leaf(6, 5), torch.tensor([0, 1, 1, 2, 4, 4])) if refs else (x, labels)
    u, v = unit(x), unit(keys)
    losses = []
    for i in range(9):
        candidates = [j for j in range(len(v)) if refs or j != i]
        positives = [j for j in candidates if labels[i] == key_labels[j]]
        if positives:
            s = (u[i] * v).sum(-1) / 0.1
            log_z = torch.stack([s[j] for j in candidates]).logsumexp(0)
            losses.append(sum(log_z - s[j] for j in positives) / len(positives))
    theirs = sum(losses) / len(losses)
    given = {"ref_emb": keys, "ref_labels": key_labels} if refs else {}
    leaves = (x, keys) if refs else (x,)
    assert_equal_with_gradients(supcon_loss(x, labels, **given), theirs, leaves)
    rows = supcon_loss(x, labels, reduction="none", **given)
    assert rows.shape == (9,) and rows[8] == 0


def test_supcon_without_any_positive_is_zero():
    x = leaf(4, 5)
    loss = supcon_loss(x, torch.arange(4))
    loss.backward()
    assert loss.item() == 0.0 and (x.grad == 0).all()


@pytest.mark.parametrize("tiny", [False, True])
def test_siglip_asks_every_pair(tiny, monkeypatch):
    """open_clip's SigLipLoss, one process: -sum logsigmoid(labels * logits) / n; also a few rows at a time."""
    if tiny:
        from partita import recompute

        monkeypatch.setattr(recompute, "_SMALL", 1)
        monkeypatch.setattr(recompute, "_NUMBERS", 20)
    image, text = leaf(7, 5), leaf(7, 5)
    scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (3.0, -2.0))
    labels = 2 * torch.eye(7).double() - 1
    theirs = -F.logsigmoid(labels * (scale * image @ text.T + bias)).sum() / 7
    assert_equal_with_gradients(siglip_loss(image, text, scale, bias), theirs, (image, text, scale, bias))


def test_decoupled_leaves_the_positive_out():
    q, k = leaf(7, 5), leaf(7, 5)
    s = unit(q) @ unit(k).mT / 0.3
    others = s.masked_fill(torch.eye(7, dtype=torch.bool), -torch.inf)
    theirs = (others.logsumexp(-1) - s.diagonal()).mean()
    assert_equal_with_gradients(info_nce_loss(q, k, temperature=0.3, decoupled=True), theirs, (q, k))
    assert info_nce_loss(q[:1], k[:1], decoupled=True).item() == 0.0


def test_hard_negatives_weigh_more():
    """exp(hardness * similarity) on every negative, without gradient of its own."""
    q, k = leaf(7, 5), leaf(7, 5)
    similarity = unit(q) @ unit(k).mT
    s = similarity / 0.3 + (9.0 * similarity.detach()).masked_fill(torch.eye(7, dtype=torch.bool), 0.0)
    theirs = F.cross_entropy(s, torch.arange(7))
    assert_equal_with_gradients(info_nce_loss(q, k, temperature=0.3, hardness=9.0), theirs, (q, k))
    negatives = leaf(7, 4, 5)
    near = torch.einsum("nd,nmd->nm", unit(q), unit(negatives))
    s = torch.cat([similarity.diagonal()[:, None] / 0.3, near / 0.3 + 2.0 * near.detach()], 1)
    ours = info_nce_loss(q, k, negatives, negative_mode="paired", temperature=0.3, hardness=2.0)
    assert_equal_with_gradients(ours, F.cross_entropy(s, torch.zeros(7).long()), (q, k, negatives))


@pytest.mark.parametrize("symmetric", [False, True])
def test_equal_labels_are_no_negatives(symmetric):
    q, k, labels = leaf(9, 5), leaf(9, 5), torch.tensor([3, 1, 3, 2, 1, 1, 7, 8, 3])
    s = unit(q) @ unit(k).mT / 0.3
    hidden = (labels[:, None] == labels) & ~torch.eye(9, dtype=torch.bool)
    s = s.masked_fill(hidden, -torch.inf)
    theirs = F.cross_entropy(s, torch.arange(9))
    theirs = (theirs + F.cross_entropy(s.mT, torch.arange(9))) / 2 if symmetric else theirs
    ours = info_nce_loss(q, k, temperature=0.3, labels=labels, symmetric=symmetric)
    assert_equal_with_gradients(ours, theirs, (q, k))
    _, stats = info_nce_loss(q, k, temperature=0.3, labels=labels, return_stats=True)
    assert (stats.visible == (~hidden).sum(-1)).all()
    assert (stats.target_rank == (s > s.diagonal()[:, None]).sum(-1)).all()


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("rule", ["above", "guide"])
def test_a_rule_on_scores_leaves_negatives_out(rule, tiny, monkeypatch):
    """Equal to a dense mask; with few scores at a time no such mask exists."""
    if tiny:
        from partita import recompute

        monkeypatch.setattr(recompute, "_SMALL", 1)
        monkeypatch.setattr(recompute, "_NUMBERS", 25)
    q, k = leaf(9, 5), leaf(9, 5)
    similarity = unit(q) @ unit(k).mT
    if rule == "above":
        exclude, hidden = AbovePositive(0.1), similarity > similarity.diagonal()[:, None] + 0.1
    else:
        guide = unit(torch.randn(9, 3).double()), unit(torch.randn(9, 3).double())
        exclude = Guide(*guide, margin=0.2)
        near = guide[0] @ guide[1].mT
        hidden = near > near.diagonal()[:, None] - 0.2
    hidden = hidden & ~torch.eye(9, dtype=torch.bool)
    assert hidden.any() and not hidden.all()
    s = (similarity / 0.3).masked_fill(hidden, -torch.inf)
    ours, stats = info_nce_loss(q, k, temperature=0.3, exclude=exclude, return_stats=True)
    assert_equal_with_gradients(ours, F.cross_entropy(s, torch.arange(9)), (q, k))
    assert (stats.visible == (~hidden).sum(-1)).all()
    assert (stats.target_rank == (s > s.diagonal()[:, None]).sum(-1)).all()


def test_a_queue_adds_negatives_and_forgets_the_oldest():
    queue = Queue(5, 4, dtype=torch.float64)
    batches = [torch.randn(3, 4).double() for _ in range(3)]
    for batch in batches:
        queue.push(batch)
    assert len(queue) == 5
    kept = {tuple(row.tolist()) for row in unit(torch.cat(batches)[-5:])}
    assert {tuple(row.tolist()) for row in queue.keys} == kept
    q, k = leaf(6, 4), leaf(6, 4)
    s = torch.cat([unit(q) @ unit(k).mT, unit(q) @ queue.keys.mT], 1) / 0.3
    ours, stats = info_nce_loss(q, k, temperature=0.3, queue=queue, return_stats=True)
    assert_equal_with_gradients(ours, F.cross_entropy(s, torch.arange(6)), (q, k))
    torch.testing.assert_close(stats.log_partition, s.logsumexp(-1))
    again = Queue(5, 4, dtype=torch.float64)
    again.load_state_dict(queue.state_dict())
    assert torch.equal(again.keys, queue.keys)


def test_a_labelled_queue_hides_the_anchors_own_label():
    queue = Queue(8, 4, labelled=True, dtype=torch.float64)
    queue.push(torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 0, 1]))
    q, k, labels = leaf(3, 4), leaf(3, 4), torch.tensor([0, 1, 5])
    s = torch.cat([unit(q) @ unit(k).mT, unit(q) @ queue.keys.mT], 1) / 0.3
    hidden = torch.cat([torch.zeros(3, 3).bool(), labels[:, None] == queue.labels], 1)
    theirs = F.cross_entropy(s.masked_fill(hidden, -torch.inf), torch.arange(3))
    assert_equal_with_gradients(info_nce_loss(q, k, temperature=0.3, queue=queue, labels=labels), theirs, (q, k))


def test_banks_join_in_one_partition():
    """M-GIB-9: the loss over the union of banks, from their states."""
    q, a, b = leaf(6, 4), leaf(6, 4), leaf(9, 4)
    states = [partita.Gibbs(q, key, scale=3.0).state() for key in (a, b)]
    s = 3.0 * torch.cat([q @ a.mT, q @ b.mT], 1)
    ours = joint_loss(s[:, :6].diagonal(), *states)
    assert_equal_with_gradients(ours, F.cross_entropy(s, torch.arange(6)), (q, a, b))


def test_autocast_leaves_the_moments_of_the_negatives_alone():
    q, k = (leaf(9, 5).float() for _ in range(2))
    want = info_nce_loss(q, k, return_stats=True)[1]
    with torch.autocast("cpu", torch.bfloat16):
        got = info_nce_loss(q, k, return_stats=True)[1]
    for name in ("negative_similarity", "negative_variance"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))


def test_the_readout_is_that_of_the_dense_matrix():
    q, k = leaf(9, 5), leaf(9, 5)
    loss, stats = info_nce_loss(q, k, temperature=0.3, return_stats=True)
    assert isinstance(stats, ContrastStats) and isinstance(stats, partita.Stats)
    similarity = (unit(q) @ unit(k).mT).detach()
    s = similarity / 0.3
    off = ~torch.eye(9, dtype=torch.bool)
    p = s.softmax(-1)
    negatives = s[off].view(9, 8).softmax(-1)
    expected = {
        "entropy": -(p * p.log()).sum(-1),
        "target_rank": (s > s.diagonal()[:, None]).sum(-1),
        "confidence": p.amax(-1),
        "nll": -p.diagonal().log(),
        "effective_negatives": torch.exp(-(negatives * negatives.log()).sum(-1)),
        "hardest_share": negatives.amax(-1),
        "positive_similarity": similarity.diagonal(),
        "negative_similarity": similarity[off].view(9, 8).mean(-1),
        "negative_variance": similarity[off].view(9, 8).var(-1, correction=0),
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(stats, name).detach(), value, check_dtype=False)
    torch.testing.assert_close(loss, stats.nll.mean())
    # the same numbers by the other route, through banks
    other = info_nce_loss(q, k, temperature=0.3, labels=torch.arange(9), return_stats=True)[1]
    for a, b in zip(stats, other, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mode", ["unpaired", "paired"])
def test_the_readout_of_given_negatives(mode):
    q, k = leaf(7, 5), leaf(7, 5)
    negatives = leaf(9, 5) if mode == "unpaired" else leaf(7, 9, 5)
    _, stats = info_nce_loss(q, k, negatives, negative_mode=mode, temperature=0.3, return_stats=True)
    near = torch.einsum("nd,nmd->nm", unit(q), unit(negatives if mode == "paired" else negatives.expand(7, 9, 5)))
    own = (unit(q) * unit(k)).sum(-1)
    assert (stats.target_rank == (near > own[:, None]).sum(-1)).all()
    torch.testing.assert_close(stats.negative_similarity, near.mean(-1).detach())
    torch.testing.assert_close(stats.hardest_share, (near / 0.3).softmax(-1).amax(-1).detach())


def test_alignment_and_uniformity():
    """Wang and Isola's definitions, pair by pair."""
    x, y = leaf(9, 5), leaf(9, 5)
    assert_equal_with_gradients(alignment(x, y), (unit(x) - unit(y)).norm(dim=-1).square().mean(), (x, y))
    u = unit(x)
    pairs = [torch.exp(-2.0 * (u[i] - u[j]).square().sum()) for i in range(9) for j in range(9) if i != j]
    assert_equal_with_gradients(uniformity(x), torch.stack(pairs).mean().log(), (x,))


def test_a_single_pair_has_nothing_to_contrast_with():
    """One candidate: probability 1, loss 0, gradient 0."""
    q, k = leaf(1, 5), leaf(1, 5)
    for loss in (info_nce_loss(q, k), info_nce_loss(q, k, symmetric=True), nt_xent_loss(q, k), clip_loss(q, k, 3.0)):
        grads = torch.autograd.grad(loss, (q, k))
        assert loss.item() == 0.0
        assert all(float(g.abs().max()) < 1e-12 for g in grads)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.2, 0.1, 0.05, 0.02])
def test_low_temperature_pushes_the_hardest_negative(temperature):
    """M-INC-7: the hardest negative's share of the push is its softmax among the negatives."""
    q = torch.eye(4, dtype=torch.float64)[:1]
    similarity = torch.tensor([0.9, 0.5, 0.2]).double()
    keys = torch.stack([similarity, (1 - similarity**2).sqrt(), torch.zeros(3), torch.zeros(3)], 1).double()
    _, stats = info_nce_loss(q, keys[:1], keys[1:], temperature=temperature, return_stats=True)
    weights = (similarity[1:] / temperature).softmax(-1)
    torch.testing.assert_close(stats.hardest_share[0], weights[0])
    assert math.isclose(stats.effective_negatives.item(), torch.exp(-(weights * weights.log()).sum()), rel_tol=1e-9)


def test_gradients_grow_and_die_with_the_temperature():
    """M-INC-7: as the temperature falls an easy positive's gradient rises, then vanishes; a hard one's only rises."""
    q = torch.eye(4, dtype=torch.float64)[:1].requires_grad_()
    temperatures = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
    lengths = {}
    for kind, similarity in (("easy", [0.9, 0.5, 0.2]), ("hard", [0.2, 0.9, 0.5])):
        cosine = torch.tensor(similarity, dtype=torch.float64)
        zero = torch.zeros(3, dtype=torch.float64)
        keys = torch.stack([cosine, (1 - cosine**2).sqrt(), zero, zero], 1)
        found = []
        for t in temperatures:
            loss = info_nce_loss(q, keys[:1], keys[1:], temperature=t, normalize=False)
            (grad,) = torch.autograd.grad(loss, q)
            p = (cosine / t).softmax(-1)
            torch.testing.assert_close(grad[0], (p @ keys - keys[0]) / t)  # prefactor 1/t, and the sharpness of p
            found.append(float(grad.norm()))
        lengths[kind] = found
    easy, hard = lengths["easy"], lengths["hard"]
    top = easy.index(max(easy))
    assert 0 < top < len(easy) - 1
    assert easy[-1] < 1e-4 * easy[top]
    assert hard == sorted(hard)


# ---- scores other than the inner product -----------------------------------------------------------------------------

SCORES = {
    "cosine": score.Cosine,
    "squared distance": score.SquaredDistance,
    "distance": score.Distance,
    "bilinear": lambda: score.Bilinear(4, 4, dtype=torch.float64),
    "additive": lambda: score.Additive(4, 4, 3, dtype=torch.float64),
    "a function": lambda: lambda a, b: (a[..., :, None, :] * b[..., None, :, :]).sin().sum(-1),
}


def surprise(raw, own):  # (n, candidates), (n,) the positive among them
    return (raw / 0.3).logsumexp(-1).sub(own / 0.3).mean()


@pytest.mark.parametrize("kind", SCORES)
def test_the_score_may_be_another(kind):
    """Each form of the loss and its statistics by the dense matrix of scores, with gradients of the parameters too."""
    torch.manual_seed(0)
    made, settings = SCORES[kind](), {"temperature": 0.3, "normalize": False}
    x, y = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    shared, own = torch.randn(5, 4, dtype=torch.float64), torch.randn(6, 3, 4, dtype=torch.float64)
    raw = made(x, y)
    positive = raw.diagonal()
    wanted = {
        "plain": (surprise(raw, positive), {}),
        "symmetric": ((surprise(raw, positive) + surprise(raw.mT, positive)) / 2, {"symmetric": True}),
        "unpaired": (surprise(torch.cat([positive[:, None], made(x, shared)], 1), positive), {"negative_keys": shared}),
        "paired": (
            surprise(torch.cat([positive[:, None], made(x[:, None], own)[:, 0]], 1), positive),
            {"negative_keys": own, "negative_mode": "paired"},
        ),
    }
    labels = torch.tensor([0, 0, 1, 1, 2, 3])
    other = (labels[:, None] != labels) | torch.eye(6, dtype=torch.bool)
    wanted["labels"] = surprise(raw.masked_fill(~other, -torch.inf), positive), {"labels": labels}
    learned = list(made.parameters()) if isinstance(made, torch.nn.Module) else []
    for name, (value, options) in wanted.items():
        loss = partita.info_nce_loss(x, y, score=made, **settings, **options)
        torch.testing.assert_close(loss, value, msg=name)
        grads, by_hand = (torch.autograd.grad(v, [x, y, *learned], retain_graph=True) for v in (loss, value))
        torch.testing.assert_close(grads, by_hand, rtol=1e-6, atol=1e-9, msg=name)
    _, stats = partita.info_nce_loss(x, y, score=made, return_stats=True, **settings)
    rest = raw.detach()[~torch.eye(6, dtype=torch.bool)].view(6, 5)
    torch.testing.assert_close(stats.negative_similarity, rest.mean(-1))
    torch.testing.assert_close(stats.negative_variance, rest.var(-1, unbiased=False))
    assert torch.equal(stats.target_rank, (rest > positive.detach()[:, None]).sum(-1))
    _, among = partita.info_nce_loss(x, y, own, negative_mode="paired", score=made, return_stats=True, **settings)
    torch.testing.assert_close(among.negative_similarity, made(x[:, None], own)[:, 0].mean(-1).detach())
    _, known = partita.info_nce_loss(x, y, labels=labels, score=made, return_stats=True, **settings)
    assert torch.equal(known.target_rank, ((raw > positive[:, None]) & other).sum(-1))


def test_a_score_is_of_the_vectors_as_they_are_normalised():
    x, y = torch.randn(2, 5, 3, dtype=torch.float64).unbind(0)
    unit = torch.nn.functional.normalize
    near = partita.info_nce_loss(x, y, temperature=0.5, score=score.Distance())
    raw = -torch.cdist(unit(x, dim=-1), unit(y, dim=-1)) / 0.5
    torch.testing.assert_close(near, torch.nn.functional.cross_entropy(raw, torch.arange(5)))
    cosines = partita.info_nce_loss(x, y, normalize=False, score=score.Cosine())
    torch.testing.assert_close(cosines, partita.info_nce_loss(x, y))
    module = partita.nn.InfoNCELoss(score=score.Bilinear(3, 3, dtype=torch.float64))
    assert [name for name, _ in module.named_parameters()] == ["score.weight"] and module(x, y).isfinite()


def test_what_needs_inner_products_says_so():
    x = torch.randn(4, 3)
    assert partita.info_nce_loss(x, x, score=score.Cosine(), hardness=0.5).isfinite()
    for options in ({"hardness": 0.5}, {"exclude": AbovePositive()}):
        with pytest.raises(ValueRangeError, match="look at inner products"):
            partita.info_nce_loss(x, x, score=score.Distance(), **options)
    with pytest.raises(DtypeError, match="Make one of this class"):
        partita.info_nce_loss(x, x, score=score.Cosine)
