"""token_stats and token_divergence without a backend: mistakes, memory, shifts. Numbers: the conformance suite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import partita
from partita.errors import DtypeError, ShapeError, TargetError, ValueRangeError
from partita.losses import kl_estimate
from tests.conformance.test_tokens import ALL, made
from tests.tolerances import assert_exact


def test_a_shift_reads_the_next_token():
    hidden, weight, ids = made()
    ids[0, 3] = -100
    ours = partita.token_stats(hidden, weight, ids, shift=1)
    aligned = partita.token_stats(hidden[:, :-1], weight, ids[:, 1:])
    for name in ("log_prob", "entropy"):
        assert torch.equal(getattr(ours, name), getattr(aligned, name))
    kept = torch.randint(17, (3, 5, 4))
    ours = partita.token_stats(hidden, weight, ids, shift=1, kept=kept)
    assert torch.equal(
        ours.log_prob, partita.token_stats(hidden[:, :-1], weight, ids[:, 1:], kept=kept[:, 1:]).log_prob
    )


def test_a_repeated_token_keeps_its_gradient_in_bfloat16():
    """4,096 small parts of one row of the weight: added up in bfloat16 they would stop counting at 256."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    out = partita.token_stats(hidden, weight, torch.zeros(4096, 2, dtype=torch.long), want="log_prob")
    (grad,) = torch.autograd.grad(out.log_prob.sum(), weight)
    assert grad[0].item() == 4096.0  # two ids a row, each (1 - 1/2)


def test_estimates_of_a_divergence_have_its_mean():
    """Over all tokens, weighted by p, k1 and k3 are the KL; k2 is half the mean of r^2."""
    p, q = (torch.randn(17, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    for kind in ("k1", "k3"):
        assert_exact((p.exp() * kl_estimate(p, q, kind)).sum(), (p.exp() * (p - q)).sum())
    assert_exact(kl_estimate(p, q, "k2"), 0.5 * (p - q) ** 2)
    with pytest.raises(ValueRangeError, match="k1, k2, k3"):
        kl_estimate(p, q, "k4")


def test_an_ignored_row_may_hold_anything():
    hidden, weight, ids = made()
    with torch.no_grad():
        hidden[1, 2] = torch.nan
    ids[1, 2] = -100
    ours = partita.token_stats(hidden, weight, ids, want=ALL)
    grads = torch.autograd.grad(ours.log_prob.sum() + ours.entropy.sum(), (hidden, weight))
    assert all(x.isfinite().all() for x in (*ours, *grads) if x.is_floating_point())


H, W, I = torch.zeros(4, 3), torch.zeros(7, 3), torch.zeros(4, dtype=torch.long)


def listed(index=I[:, None], teacher_log_prob=H[:, :1], **options):
    return partita.token_divergence(H, W, teacher_index=index, teacher_log_prob=teacher_log_prob, **options)


COMPUTING = [
    "partita.gibbs.execute", "partita.collective.execute", "partita.comparison.rows_of",
    "partita.losses.tokens.pair_scores", "partita.losses.vocabulary.pair_scores",
    "partita.losses.vocabulary.likely_pairs",
]  # fmt: skip
WRONG = {
    "id too large": (TargetError, "7", lambda: partita.token_stats(H, W, I + 7)),
    "id below 0": (TargetError, "-1", lambda: partita.token_stats(H, W, I - 1)),
    "ids not whole": (DtypeError, "ids", lambda: partita.token_stats(H, W, I.float())),
    "other rows": (ShapeError, "ids must be one per row", lambda: partita.token_stats(H, W, I[:3])),
    "weight turned": (ShapeError, "nn.Linear", lambda: partita.token_stats(H, W.mT, I)),
    "temperature 0": (ValueRangeError, "temperature", lambda: partita.token_stats(H, W, I, temperature=0.0)),
    "negative": (ValueRangeError, "temperature", lambda: partita.token_stats(H, W, I, temperature=-torch.ones(4))),
    "temperature nan": (ValueRangeError, "temperature", lambda: partita.token_stats(H, W, I, temperature=float("nan"))),
    "per token": (ShapeError, "temperature", lambda: partita.token_stats(H, W, I, temperature=torch.ones(7))),
    "unknown name": (ValueRangeError, "want must name", lambda: partita.token_stats(H, W, I, want="logprob")),
    "top_p 0": (ValueRangeError, "top_p", lambda: partita.token_stats(H, W, I, top_p=0.0)),
    "top_k 0": (ValueRangeError, "top_k", lambda: partita.token_stats(H, W, I, top_k=0)),
    "min_p 2": (ValueRangeError, "min_p", lambda: partita.token_stats(H, W, I, min_p=2.0)),
    "kept too large": (TargetError, "kept", lambda: partita.token_stats(H, W, I, kept=torch.full((4, 2), 7))),
    "kept mass of all": (ValueRangeError, "kept_mass", lambda: partita.token_stats(H, W, I, want="kept_mass")),
    "bias per row": (ShapeError, "bias", lambda: partita.token_stats(H, W, I, bias=torch.zeros(4))),
    "two dtypes": (DtypeError, "dtype", lambda: partita.token_stats(H.double(), W, I)),
    "no reference": (ValueRangeError, "reference", lambda: partita.token_divergence(H, W)),
    "temperature 0 in a row": (ValueRangeError, "temperature", lambda: partita.token_stats(
        H, W, I, temperature=torch.arange(4.0))),
    "temperature nan in a row": (ValueRangeError, "temperature", lambda: partita.token_stats(
        H, W, I, temperature=torch.tensor([1.0, torch.nan, 1.0, 1.0]))),
    "temperature inf": (ValueRangeError, "temperature", lambda: partita.token_stats(H, W, I, temperature=torch.inf)),
    "kept below -1": (TargetError, "kept", lambda: partita.token_stats(H, W, I, kept=torch.full((4, 2), -2))),
    "kept of other rows": (ShapeError, "kept", lambda: partita.token_stats(H, W, I, kept=torch.zeros(3, 2).long())),
    "K ids of other rows": (ShapeError, "ids", lambda: partita.token_stats(H, W, torch.zeros(3, 2).long())),
    "top_p nan": (ValueRangeError, "top_p", lambda: partita.token_stats(H, W, I, top_p=float("nan"))),
    "top_k nothing": (ValueRangeError, "want must name", lambda: partita.token_stats(H, W, I, want="top_k:0")),
    "unknown tail": (ValueRangeError, "tail", lambda: listed(tail="keep")),
    "listed too large": (TargetError, "teacher_index", lambda: listed(I[:, None] + 7)),
    "listed below -1": (TargetError, "teacher_index", lambda: listed(I[:, None] - 2)),
    "other lists": (ShapeError, "teacher_index", lambda: listed(I[:, None].expand(4, 2))),
    "list alone": (ValueRangeError, "come together", lambda: listed(teacher_log_prob=None)),
    "list of a distance": (ValueRangeError, "'forward' or 'reverse'", lambda: listed(kind="js")),
    "list and temperature 0": (ValueRangeError, "temperature", lambda: listed(temperature=0.0)),
    "list and its ids": (ValueRangeError, "ref_ids", lambda: listed(ref_ids=torch.arange(7))),
    "reference of other rows": (ShapeError, "same rows", lambda: partita.token_divergence(H, W, H[:3], W)),
    "reference of other tokens": (ShapeError, "ref_ids", lambda: partita.token_divergence(H, W[:3], H, W)),
    "reference without a head": (ValueRangeError, "ref_weight", lambda: partita.token_divergence(H, W, H)),
    "reference at temperature nan": (ValueRangeError, "temperature", lambda: partita.token_divergence(
        H, W, H, W, ref_temperature=torch.tensor(torch.nan))),
    "reference at -1": (ValueRangeError, "temperature", lambda: partita.token_divergence(H, W, H, W, temperature=-1)),
    "no such distance": (ValueRangeError, "kind", lambda: partita.token_divergence(H, W, H, W, kind="kl")),
    "no such mixture": (ValueRangeError, "beta", lambda: partita.token_divergence(H, W, H, W, kind="js", beta=1.0)),
    "a part too large": (TargetError, "ref_ids", lambda: partita.token_divergence(H, W[:2], H, W, ref_ids=I[:2] + 7)),
    "a part of none": (TargetError, "ref_ids", lambda: partita.token_divergence(H, W[:2], H, W, ref_ids=I[:2] - 1)),
    "a part of other tokens": (ShapeError, "ref_ids", lambda: partita.token_divergence(H, W[:2], H, W, ref_ids=I)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_before_anything_is_computed(monkeypatch, name):
    for place in COMPUTING:
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("something was computed"))
    kind, words, call = WRONG[name]
    with pytest.raises(kind, match=words):
        call()


def test_what_was_not_wanted_says_how_to_ask():
    ours = partita.token_stats(H, W, I)
    with pytest.raises(AttributeError, match="want="):
        _ = ours.rank
    assert "log_prob (4,)" in repr(ours)


def test_memory_does_not_grow_with_the_vocabulary():
    """Beside the operands and their gradients: no tensor of rows x vocabulary is ever made."""
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // 4)
            return out

    hidden, weight, ids = made(torch.float32, (1, 1024, 8, 20_000))
    with Sizes():
        ours = partita.token_stats(hidden, weight, ids, want=("log_prob", "entropy", "log_sum_sq"))
        (ours.log_prob.sum() + ours.entropy.sum()).backward()
    assert largest < 1024 * 20_000 / 4
