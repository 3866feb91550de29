"""Patterns of sparse attention: what they show, that unions split, and that 65,536 positions are no matter."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import partita
from partita import support
from partita.engine.terms import split_disjoint, window_mask
from partita.errors import PartitaError
from tests.strategies import either, reaches, supports, window

CPU = torch.device("cpu")


@given(st.data())
def test_a_union_splits_into_terms_without_a_key_in_common(data):
    n_query, n_key = data.draw(st.sampled_from((1, 3, 12))), data.draw(st.sampled_from((0, 1, 5, 13)))
    batch = data.draw(st.sampled_from([(), (2, 3)]))
    # two to four intervals, at times one support of any kind besides
    members = [window(n_query, n_key, *data.draw(reaches(3, 5))) for _ in range(data.draw(st.integers(2, 4)))]
    if data.draw(st.booleans()):
        members.append(data.draw(supports(n_query, n_key, batch, depth=1)))
    joined, visible = functools.reduce(either, members)
    terms = joined.bind(n_query, n_key, batch, CPU)
    found = split_disjoint(terms, n_query, n_key, CPU)
    if found is None:  # two terms that are no plain intervals
        assert sum(t.mask is not None or t.query_segment is not None or t.skip is not None for t in terms) > 1
        return
    shown = torch.zeros(*batch, n_query, n_key, dtype=torch.int64)
    for term in found:
        part = window_mask([term], slice(0, n_query), slice(0, n_key), CPU)
        shown += torch.ones_like(shown) if part is None else part.expand(shown.shape).long()
    assert torch.equal(shown, visible.expand(shown.shape).long())  # none twice, none missing


def rows_of_definition(rows: Tensor, n: int, block: int, layout: Tensor) -> Tensor:
    """(len(rows), n): a window of 40, tokens 0, 1 and n // 2 global, random blocks, all of it causal."""
    i, j = rows[:, None], torch.arange(n)
    chosen = torch.tensor([0, 1, n // 2])
    shown = ((i - j).abs() <= 40) | torch.isin(i, chosen) | torch.isin(j, chosen) | layout[i // block, j // block]
    return shown & (j <= i)


@pytest.mark.parametrize("n", [2048, 65536])
def test_a_big_bird_layer_of_any_length_is_served_by_intervals(n):
    """Values, counts and gradients of a few rows against the dense formula; nothing of size n * n fits in the test."""
    if n > 10_000 and partita.backend() not in ("auto", "native"):
        pytest.skip("the definition takes a minute at this length; its values are those of the shorter one")
    block, g = n // 32, torch.Generator().manual_seed(0)
    layout = torch.rand(n // block, n // block, generator=g) < 0.05
    pattern = support.window(40, 40) | support.global_tokens([0, 1, n // 2]) | support.blocks(block, layout)
    pattern = pattern & support.causal()
    query, key = (torch.randn(n, 8, generator=g, dtype=torch.float64) for _ in range(2))
    rows = torch.cat([torch.randint(0, n, (12,), generator=g), torch.tensor([0, n // 2, n - 1])])
    shown = rows_of_definition(rows, n, block, layout)
    assert torch.equal(pattern.visible(n, n)[rows], shown.sum(-1))

    ours, theirs = (key.clone().requires_grad_() for _ in range(2))
    p = partita.Gibbs(query, ours, support=pattern)
    log_p = (query[rows] @ theirs.mT).masked_fill(~shown, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~shown, 0.0)).sum(-1)
    found = p.entropy()[rows]
    torch.testing.assert_close(found, entropy)
    (a,), (b,) = torch.autograd.grad(found.sum(), ours), torch.autograd.grad(entropy.sum(), theirs)
    torch.testing.assert_close(a, b)


LAYOUT = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) < 0.1
PATTERNS = {  # the pattern, and what it says of positions i and j
    "strided": (
        lambda: support.strided(512, 32) & support.causal(),
        lambda i, j: (((i - j) % 512 == 0) | (i - j <= 32)) & (j <= i),
    ),
    "dilated": (lambda: support.dilated(64, 3, 9), lambda i, j: ((j - i) % 64 == 0) & (j >= i - 192) & (j <= i + 576)),
    "blocks": (lambda: support.blocks(1024, LAYOUT), lambda i, j: LAYOUT[i // 1024, j // 1024]),
    "global": (lambda: support.global_tokens([5, 9000]), lambda i, j: (i == 5) | (i == 9000) | (j == 5) | (j == 9000)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pattern_reaches_65536_positions(name):
    """Counts and means of a few rows, by the definition of the pattern."""
    from partita.engine.backends.native import library

    if library.why_not() is not None or partita.backend() not in ("auto", "native"):
        pytest.skip("by definition the whole matrix takes a minute; its values are those of the shorter tests")
    n, g = 65536, torch.Generator().manual_seed(0)
    make, shows = PATTERNS[name]
    query, key, value = (torch.randn(n, d, generator=g, dtype=torch.float64) for d in (2, 2, 1))
    rows = torch.cat([torch.randint(0, n, (9,), generator=g), torch.tensor([0, 5, 9000, n - 1])])
    shown = shows(rows[:, None], torch.arange(n))
    p = partita.Gibbs(query, key, support=make())
    assert partita.explain(p).startswith("native serves")
    mean = p.expectation(value)[rows]
    assert torch.equal(p.visible()[rows].long(), shown.sum(-1))
    weight = (query[rows] @ key.mT).masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num(0.0)  # some rows see none
    torch.testing.assert_close(mean, weight @ value)


def test_native_needs_no_mask_for_unions_of_intervals():
    """At this size a mask would be 4 GB, and the library does not write one."""
    from partita.engine.backends.native import library

    if library.why_not() is not None:
        pytest.skip("the native library is not there")
    n = 65536
    query = torch.zeros(n, 1)
    longformer = support.window(256, 256) | support.global_tokens([0])
    with partita.backend("auto"):
        assert partita.explain(partita.Gibbs(query, query, support=longformer)).startswith("native serves")
        two_kinds = support.strided(64) | (support.not_self() & support.lengths(9))
        assert partita.explain(partita.Gibbs(query, query, support=two_kinds)).startswith("tiled serves")


def test_a_strided_row_counts_in_closed_form():
    """Row i of n sees its residue class and a window of 2 w + 1, which have 1 + 2 (w // stride) keys in common."""
    n, stride, w = 65536, 128, 200
    count = support.strided(stride, w).visible(n, n)
    assert int(count[n // 2]) == n // stride + 2 * w + 1 - (1 + 2 * (w // stride))


def test_the_layout_of_each_head_is_its_own():
    layout = torch.tensor([[[True, False], [False, True]], [[True, True], [False, False]]])
    per_head = support.blocks(3, layout)
    assert torch.equal(per_head.dense(6, 6, (2,)), layout.repeat_interleave(3, -1).repeat_interleave(3, -2))
    query = torch.randn(5, 2, 6, 4)
    out, stats = partita.attention(query, query, query, support=per_head, return_stats=True)
    assert stats.visible[0].tolist() == [[3.0] * 6, [6.0] * 3 + [0.0] * 3]
    assert torch.equal(out[:, 1, 3:], torch.zeros(5, 3, 4))  # no key to see


def test_a_layout_changed_in_place_is_seen():
    layout = torch.zeros(2, 2, dtype=torch.bool)
    p = partita.Gibbs(torch.zeros(4, 1), torch.zeros(4, 1), support=support.blocks(2, layout))
    assert p.visible().tolist() == [0, 0, 0, 0]
    layout[0, 1] = True
    assert p.visible().tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: support.strided(0), "at least 1"),
        (lambda: support.strided(2, -1), "not negative"),
        (lambda: support.strided(2.0), "whole number"),
        (lambda: support.dilated(2, 1.5, 0), "whole number"),
        (lambda: support.blocks(0, torch.ones(1, 1, dtype=torch.bool)), "at least 1"),
        (lambda: support.blocks(2, torch.ones(2, 2)), "bool"),
        (lambda: support.blocks(2, torch.ones(2, dtype=torch.bool)), "query blocks, key blocks"),
        (lambda: support.blocks(2, torch.ones(2, 2, dtype=torch.bool)).visible(5, 4), r"\(3, 2\)"),
        (lambda: support.global_tokens([-1]), "not negative"),
        (lambda: support.global_tokens([0.5]), "whole number"),
        (lambda: support.global_tokens(torch.tensor([0.5])), "positions"),
    ],
)
def test_what_is_no_pattern_is_refused(make, words):
    with pytest.raises(PartitaError, match=words):
        make()


def test_patterns_print_as_they_read():
    text = "support.window(2, 2) | support.global_tokens([0, 7]) | support.strided(3)"
    joined = support.window(2, 2) | support.global_tokens([7, 0, 7]) | support.strided(3)
    assert repr(joined) == text
    assert repr(support.strided(4, 1)) == "support.window(1, 1) | support.strided(4)"
    assert repr(support.dilated(2, 1, None)) == "support.window(2, None) & support.strided(2)"
