"""Second derivatives: a penalty on gradients of every public call is right, or refused by an error of ours.

torch's `gradgradcheck` gives upstream gradients that need one themselves; a penalty's are constant, and a derivative
may be lost there alone. So both are asked.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita
from partita import score, support
from tests import reference, surface
from tests.compile.calls import Again, Written
from tests.compile.rows import CALLS, CHANCE
from tests.differences import gradgradcheck
from tests.tolerances import assert_exact

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "conventions.md"
KINDS = ("forward", "reverse", "cross_entropy", "js", "hellinger")
# Of the surface's calls those without one that can be differenced here, and why.
COARSE = {title for title in CALLS if "autocast" in title or "bfloat16" in title}
RAW = {
    "Gibbs.state",
    "attention, dropout and everything",
    "gumbel_attention, hard",
    "info_nce_loss, hard",
}  # relative to a peak held constant; chance; a weight that has no gradient, nor a second one


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weighted(found, seed: int = 3):
    """One number of all results that have a gradient."""
    parts = [x for x in surface.tensors(found) if x.requires_grad]
    kept = [torch.where(x.isfinite(), x, 0.0).double() * normal(seed + i, *x.shape) for i, x in enumerate(parts)]
    return torch.stack([x.sum() for x in kept]).sum() if kept else None


def penalty(function, leaves):
    """Gradients, and the gradient of the sum of their squares."""
    first = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
    return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]


def agree(ours, theirs, *tensors):
    got, want = (penalty(f, [x.clone().requires_grad_() for x in tensors]) for f in (ours, theirs))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("title", sorted(set(CALLS) - COARSE - RAW - CHANCE))
def test_a_penalty_on_gradients_is_right(title):
    """Of every public call: along one direction, against differences of its first derivative."""
    sizes = {**surface.SIZES, "n_key": 9}
    written = Written(sizes)
    found = weighted(CALLS[title](written))
    leaves = [x for x in written.leaves if x.requires_grad]
    leaves += [p for m in written.modules for p in m.parameters() if p.requires_grad]
    if found is None or not leaves:
        return
    first = torch.autograd.grad(found, leaves, allow_unused=True)
    leaves = [
        x for x, g in zip(leaves, first, strict=True) if g is not None
    ]  # the others are constants, as teachers are
    along, by = ([normal(50 * k + i, *x.shape) for i, x in enumerate(leaves)] for k in (1, 2))

    def slope(**options):
        total = weighted(CALLS[title](Again(sizes, written.tensors, written.modules)))
        grads = torch.autograd.grad(total, leaves, allow_unused=True, **options)
        return torch.stack([(g * d).sum() for g, d in zip(grads, along, strict=True) if g is not None]).sum()

    eps = 1e-5

    def at(way: float) -> float:
        with torch.no_grad():
            for x, d in zip(leaves, by, strict=True):
                x.add_(d, alpha=way * eps)
        try:
            return slope().item()
        finally:
            with torch.no_grad():
                for x, d in zip(leaves, by, strict=True):
                    x.sub_(d, alpha=way * eps)

    # fourth order: what is left is about eps^4 of the fifth derivative, and rounding over eps
    numeric = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * eps)
    found = slope(create_graph=True)
    second = [0.0]
    if found.requires_grad:
        grads = torch.autograd.grad(found, leaves, allow_unused=True)
        second = [(g * d).sum().item() for g, d in zip(grads, by, strict=True) if g is not None]
    # a scale is solved to 1e-10 of its target, and a sharp row multiplies that by what its entropy does to the scale
    room = 1e-4 if "solve" in title or "TargetEntropy" in title else 1e-6
    assert sum(second) == pytest.approx(numeric, rel=room, abs=room * (1 + sum(map(abs, second))))


# ---- against definitions ----


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(KINDS), st.integers(2, 6), st.sampled_from([None, 1.5]), st.booleans())
def test_divergences(seed, kind, n, softcap, plain):
    tensors = [normal(seed + i, size, 3) for i, size in enumerate((4, n, 4, n))]
    how = None if plain else lambda q, k: (q @ k.mT).tanh()

    def scored(q, k):
        return reference.score(q, k, softcap=softcap, compare=how)

    def ours(q, k, r, m):
        pair = (partita.Gibbs(x, y, softcap=softcap, score=how) for x, y in ((q, k), (r, m)))
        return partita.divergence(*pair, kind).sum()

    agree(ours, lambda q, k, r, m: reference.divergence(scored(q, k), scored(r, m), kind).sum(), *tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_under_supports(kind):
    """Hidden keys have no derivative, and rows where a divergence is infinite none at all."""
    seen, other = torch.ones(4, 6).tril(2).bool(), torch.ones(4, 6).bool()
    other[:, 5] = False
    tensors = [3 * normal(i, n, 3) for i, n in enumerate((4, 6, 4, 6))]

    def ours(q, k, r, m):
        p, o = (partita.Gibbs(x, y, support=support.mask(s)) for x, y, s in ((q, k, seen), (r, m, other)))
        rows = partita.divergence(p, o, kind)
        return torch.where(rows.isfinite(), rows, 0.0).sum()

    def dense(q, k, r, m):
        scores = (reference.score(x, y, visible=see) for x, y, see in ((q, k, seen), (r, m, other)))
        rows = reference.divergence(*scores, kind)
        return torch.where(rows.isfinite(), rows, 0.0).sum()

    agree(ours, dense, *tensors)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_solved_scales(seed, biased):
    """The implicit function's second derivative, by three Newton steps from the solution."""
    query, key = normal(seed, 3, 4), normal(seed + 1, 7, 4)
    bias = 0.1 * normal(seed + 2, 3, 7) if biased else None

    def ours(q, k):
        return partita.solve_scale(q, k, entropy=1.2, bias=bias).sum()

    def dense(q, k):
        x, reached = partita.solve_scale(q.detach(), k.detach(), entropy=1.2, bias=bias, return_reached=True)

        def entropy(x):
            log_p = (x[:, None] * (q @ k.mT) + (0.0 if bias is None else bias)).log_softmax(-1)
            return -(log_p.exp() * log_p).sum(-1)

        for _ in range(3):
            slope = torch.autograd.grad(entropy(y := x.detach().requires_grad_()).sum(), y)[0]
            x = torch.where(reached, x - (entropy(x) - 1.2) / torch.where(reached, slope, 1.0), x)
        return x.sum()

    got, want = (penalty(f, [x.clone().requires_grad_() for x in (query, key)]) for f in (ours, dense))
    for a, b in zip(got, want, strict=True):  # as exact as the scale is solved
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max() + 1))


def test_statistics_beside_a_value_that_needs_a_gradient():
    def ours(q, k, v):
        out, stats = partita.attention(q, k, v, return_stats=True)
        return stats.entropy.sum() + 0 * out.detach().sum()

    q, k, v = (normal(i, 3, 4).requires_grad_() for i in range(3))
    first = torch.autograd.grad(ours(q, k, v), (q, k), create_graph=True)
    got = torch.autograd.grad(sum(x.square().sum() for x in first), (q, k))
    p = ((q @ k.mT) / 2).log_softmax(-1)
    first = torch.autograd.grad(-(p.exp() * p).sum(), (q, k), create_graph=True)
    want = torch.autograd.grad(sum(x.square().sum() for x in first), (q, k))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradgradcheck_of_what_a_kernel_differentiates(kind):
    x = [normal(i, 3, 2).requires_grad_() for i in range(4)]
    assert gradgradcheck(lambda q, k, r, m: partita.divergence(partita.Gibbs(q, k), partita.Gibbs(r, m), kind), x)


def test_torch_func_differentiates_twice():
    q, k, r, m = (normal(i, 3, 2) for i in range(4))

    def value(q):
        p = partita.Gibbs(q, k, scale=partita.solve_scale(q, k, entropy=0.9))
        return partita.divergence(p, partita.Gibbs(r, m)).sum()

    found = torch.func.grad(lambda q: torch.func.grad(value)(q).square().sum())(q)
    want = penalty(value, [q.clone().requires_grad_()])[1]
    torch.testing.assert_close(found, want, rtol=1e-7, atol=1e-7)


def test_confidence_has_no_gradient():
    """As the largest score has none; its derivative at a constant peak was another number's."""
    stats = partita.linear_cross_entropy(
        normal(1, 4, 3).requires_grad_(), normal(2, 5, 3), torch.arange(4), return_stats=True
    )[1]
    assert not stats.confidence.requires_grad


def test_the_page_names_what_has_a_second_derivative():
    """Each name in the first column of the table is a call that was looked at above, or one that is refused."""
    text = PAGE.read_text().split("## Second derivatives")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = {name for line in rows for name in re.findall(r"`([A-Za-z_.]+)`", line.split("|")[1])}
    tried = {title.split(", ")[0] for title in set(CALLS) - RAW - COARSE - CHANCE}
    assert rows
    assert named <= tried | {"group", "torch.compile", "LossStats.confidence"}


def test_one_tensor_as_query_and_key_is_two_operands():
    """A second derivative through what is computed again: a tensor given twice has a gradient in each place."""
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    others = support.not_self()  # each vector is at no distance from itself
    for read in (
        lambda q, k: partita.Gibbs(q, k).received().square().sum(),
        lambda q, k: partita.Gibbs(q, k, score=score.Distance(), support=others).entropy().sum(),
    ):
        once, apart = (torch.autograd.grad(read(x, k), x, create_graph=True)[0] for k in (x, x * 1.0))
        pair = [torch.autograd.grad(g.square().sum(), x)[0] for g in (once, apart)]
        assert_exact(pair[0], pair[1], magnitude=100.0)
    dense = -((x[:, None] - x).square().sum(-1) + torch.eye(5, dtype=torch.float64)).sqrt()
    log_p = dense.masked_fill(torch.eye(5, dtype=torch.bool), -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0.0)).sum()
    (g,) = torch.autograd.grad(entropy, x, create_graph=True)
    assert_exact(pair[0], torch.autograd.grad(g.square().sum(), x)[0], magnitude=100.0)
