"""Sizes of zero: every public call works, as torch's own do, or raises an error of ours."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import partita
from partita.errors import PartitaError
from tests import surface

# What has no answer where there is nothing: a target among no classes, a fit to no rows, a spread of no vectors.
NO_TARGET = ("Gibbs.nll", "Gibbs.log_prob", "Gibbs.target_rank", "brier_score")
REFUSED = {
    "n_key": (*NO_TARGET, "measure_sigma"),
    "n_query": ("measure_sigma",),
    "batch": ("measure_sigma",),
    "heads": (
        "measure_sigma", "attention, grouped", "scale.ScalableSoftmax", "nn.ScalableSoftmax", "scale.CriticalScale",
        "score.LogSigmoid", "entropy_penalty",
    ),
    "few": ("attention, grouped", "nce_loss", "nn.NCELoss"),
    "dim": ("rotary", "info_nce_loss, queue", "score.Bilinear", "score.Additive", "score.LogSigmoid"),
    "rows": ("fit_temperature", "uniformity"),
    "classes": (
        "linear_cross_entropy", "cross_entropy", "focal_loss", "brier_loss", "mse_loss", "mae_loss", "fit_temperature",
        "top_k_accuracy", "mean_reciprocal_rank", "perplexity", "expected_calibration_error", "Gibbs.weighted_nll",
        "token_stats",
        "nn.CrossEntropyLoss", "nn.FocalLoss", "nn.BrierLoss", "nn.MSELoss", "nn.MAELoss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", surface.CALLS)
def test_a_size_of_zero_works_or_is_refused(name):
    for size in surface.SIZES:
        sizes = {**surface.SIZES, size: 0}
        if name.startswith(REFUSED.get(size, ())):
            with pytest.raises(PartitaError):
                surface.run(name, sizes)
            continue
        for tensor in surface.run(name, sizes):
            assert not tensor.isnan().any(), f"no {size}: nothing at all gives 0, not nan"


@pytest.mark.parametrize(
    ("n_query", "n_key", "dim", "dim_value"), [(0, 6, 4, 3), (5, 0, 4, 3), (5, 6, 0, 3), (5, 6, 4, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_attention_over_nothing_is_torchs(n_query, n_key, dim, dim_value, causal, grad):
    shapes = ((2, 3, n_query, dim), (2, 3, n_key, dim), (2, 3, n_key, dim_value))
    q, k, v = (torch.randn(s, requires_grad=grad) for s in shapes)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(partita.attention(q, k, v, is_causal=causal), want.nan_to_num(0.0))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_losses_of_no_rows_are_torchs(reduction):
    x, w, y = torch.randn(0, 4), torch.randn(7, 4), torch.zeros(0, dtype=torch.long)
    want = F.cross_entropy(x @ w.mT, y, reduction=reduction)
    assert torch.equal(partita.linear_cross_entropy(x, w, y, reduction=reduction), want)
    assert torch.equal(partita.cross_entropy(x @ w.mT, y, reduction=reduction), want)
