"""Queries, keys and values in float64, and the comparison of two results with their gradients."""

from __future__ import annotations

import torch


def make(n=7, m=9, d=4, batch=(2, 3), grad=True):
    return tuple(torch.randn(*batch, s, d, dtype=torch.float64, requires_grad=grad) for s in (n, m, m))


def assert_same(got, want, leaves):
    """Values and gradients."""
    torch.testing.assert_close(got, want)
    assert_same_gradients(got, want, leaves)


def assert_same_gradients(got, want, leaves):
    upstream = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad(x, leaves, upstream, retain_graph=True) for x in (got, want))
    torch.testing.assert_close(ours, theirs)
