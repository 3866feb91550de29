"""Layers that start as sharp as they were asked to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import partita
from partita import scale
from partita.errors import PartitaError
from partita.nn import EntropyInvariantAttention, MultiheadAttention, init_sharpness_

LENGTH, WIDTH = 256, 64
SOLVED = scale.TargetEntropy(width=4.0)


LAYERS = {
    "plain": lambda: MultiheadAttention(WIDTH, 4, batch_first=True),
    "log n": lambda: EntropyInvariantAttention(WIDTH, 4),
    "a number": lambda: MultiheadAttention(WIDTH, 4, batch_first=True, scale=1.0),
    "fewer keys": lambda: MultiheadAttention(WIDTH, 4, batch_first=True, kv_heads=2),
    "keys of another width": lambda: MultiheadAttention(WIDTH, 4, batch_first=True, kdim=48, vdim=32),
    "normed": lambda: MultiheadAttention(WIDTH, 4, batch_first=True, qk_norm=True),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("sigma", [0.3, 1.5])
def test_scores_have_the_deviation_asked_for(kind, sigma):
    """M-INF-4: with white inputs, over rows and keys, within four deviations of such a measurement.

    The score of one pair has variance sigma^2 over draws; over (rows, keys) of one draw of n inputs its relative error
    is about sqrt(2 / n) for each of the two factors, and the effective rank of a head (16 here) enters likewise.
    """
    layer = init_sharpness_(LAYERS[kind]().double(), sigma=sigma, length=LENGTH)
    # queries from one text, keys from another: a key's own query is not independent of it
    x = torch.randn(8, LENGTH, WIDTH, dtype=torch.float64)
    y, z = (torch.randn(8, LENGTH, width, dtype=torch.float64) for width in (layer.kdim, layer.vdim))
    q, k, _ = layer.project(x, y, z)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    multiplier = 16**-0.5 if layer.scale is None else layer.scale
    s = q @ k.mT * (multiplier(LENGTH, 16) if isinstance(multiplier, scale.Policy) else multiplier)
    n = 8 * LENGTH
    spread = 4 * math.sqrt(2 * (2 / n))
    for head in range(4):
        assert s[:, head].std().item() == pytest.approx(sigma, rel=spread)


def test_the_variance_is_exact_over_all_inputs():
    """The identity itself: E (x^T A y)^2 = ||A||_F^2 for white x, y; no sample is drawn."""
    layer = init_sharpness_(MultiheadAttention(WIDTH, 4).double(), sigma=0.7)
    query, key = layer.projections()[0][:2]
    for q, k in zip(query.chunk(4), key.chunk(4), strict=True):
        assert (16**-0.5 * (q.mT @ k).norm()).item() == pytest.approx(0.7, rel=1e-12)


@pytest.mark.parametrize("reduction", [0.05, 0.5])
def test_rows_start_with_the_entropy_asked_for(reduction):
    """M-INF-3: H = log n - sigma^2 / 2; rows of several lengths of query differ, so the mean is held loosely."""
    goal = math.log(LENGTH) - reduction
    layer = init_sharpness_(MultiheadAttention(WIDTH, 1, batch_first=True), entropy=goal, length=LENGTH)
    x, y = (torch.randn(16, LENGTH, WIDTH) for _ in range(2))
    _, stats = layer(x, y, y, return_stats=True)
    # Given its query a row is Gaussian; the mean of sigma_i^2 over queries is sigma^2. Of a finite row the reduction
    # is larger by some (e^(sigma^2) (1 + sigma^2) - 1) / 2n, 2 to 3 % here; 16 texts of 256 keys estimate a variance to
    # sqrt(2 / 4096) in each direction, 2 to 3 % in all. Four of those and the bias are below 15 %.
    assert (math.log(LENGTH) - stats.entropy.mean()).item() == pytest.approx(reduction, rel=0.15)


def test_torchs_layers_inside_a_model_are_rescaled_too_and_the_rest_is_not():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True), 2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert init_sharpness_(model, sigma=2.0) is model
    for name, p in model.named_parameters():
        if name.endswith("in_proj_weight"):
            assert torch.equal(p[2 * WIDTH :], before[name][2 * WIDTH :])  # values
            direction = torch.cosine_similarity(p[: 2 * WIDTH].flatten(), before[name][: 2 * WIDTH].flatten(), dim=0)
            assert not torch.equal(p[:WIDTH], before[name][:WIDTH])
            assert direction > 0.99  # heads differ a little in their factors
        else:
            assert torch.equal(p, before[name])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: init_sharpness_(m), "either entropy or sigma"),
        (lambda m: init_sharpness_(m, entropy=1.0, sigma=1.0), "either entropy or sigma"),
        (lambda m: init_sharpness_(m, entropy=7.0), "at most log 512"),
        (lambda m: init_sharpness_(m, sigma=-1.0), "sigma"),
        (lambda m: init_sharpness_(nn.Linear(2, 2), sigma=1.0), "must hold a MultiheadAttention"),
        (
            lambda m: init_sharpness_(MultiheadAttention(8, 2, scale=scale.TargetEntropy(width=4.0)), sigma=1.0),
            "itself",
        ),
    ],
)
def test_bad_requests_say_what_is_wrong(call, words):
    with pytest.raises(PartitaError, match=words):
        call(partita.nn.MultiheadAttention(8, 2))
