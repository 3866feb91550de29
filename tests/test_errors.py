"""Every bad input is named before anything is computed: what was expected, what was given, how to fix it."""

from __future__ import annotations

import math

import pytest
import torch

import partita
from partita import errors, scale, support
from partita.errors import (
    BackendError,
    DeviceError,
    DtypeError,
    PartitaError,
    ShapeError,
    TargetError,
    ValueRangeError,
)


def q(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


GIBBS = partita.Gibbs
LONG = torch.long

# (what is wrong, the call, the error, words its message must hold)
CASES = {
    # shapes
    "dims differ": (lambda: GIBBS(q(2, 3), q(5, 4)), ShapeError, ["query", "key", "(2, 3)", "(5, 4)"]),
    "query is a vector": (lambda: GIBBS(q(3), q(5, 3)), ShapeError, ["query", "(3,)"]),
    "key is a vector": (lambda: GIBBS(q(2, 3), q(3)), ShapeError, ["key", "(3,)"]),
    "batches do not broadcast": (lambda: GIBBS(q(2, 4, 3), q(3, 5, 3)), ShapeError, ["batch", "(2,)", "(3,)"]),
    "too few values": (lambda: GIBBS(q(2, 3), q(5, 3)).expectation(q(4, 3)), ShapeError, ["value", "4", "5"]),
    "bias of the wrong width": (lambda: GIBBS(q(2, 3), q(5, 3), bias=q(2, 4)), ShapeError, ["bias", "(2, 4)", "5"]),
    "bias per query, not per key": (lambda: GIBBS(q(2, 3), q(5, 3), bias=q(2)), ShapeError, ["bias", "(2,)"]),
    "scale of the wrong length": (lambda: GIBBS(q(2, 3), q(5, 3), scale=q(4)), ShapeError, ["scale", "(4,)"]),
    "too few targets": (
        lambda: GIBBS(q(2, 3), q(5, 3)).nll(torch.zeros(3, dtype=LONG)),
        ShapeError,
        ["target", "(3,)", "2"],
    ),
    "lengths that fit no batch": (
        lambda: GIBBS(q(2, 4, 3), q(2, 5, 3), support=support.lengths(torch.tensor([1, 2, 3]))),
        ShapeError,
        ["key_lengths", "(3,)"],
    ),
    "segments of the wrong length": (
        lambda: GIBBS(
            q(4, 3), q(5, 3), support=support.segments(torch.zeros(4, dtype=LONG), torch.zeros(4, dtype=LONG))
        ),
        ShapeError,
        ["k_ids", "(4,)", "5"],
    ),
    "mask of the wrong shape": (
        lambda: GIBBS(q(4, 3), q(5, 3), support=support.mask(torch.ones(5, 4, dtype=torch.bool))),
        ShapeError,
        ["mask", "(5, 4)", "(4, 5)"],
    ),
    "heads that do not divide": (
        lambda: partita.attention(q(1, 5, 4, 3), q(1, 2, 4, 3), q(1, 2, 4, 3), enable_gqa=True),
        ShapeError,
        ["heads", "5", "2"],
    ),
    # dtypes
    "integer query": (lambda: GIBBS(torch.zeros(2, 3, dtype=LONG), q(5, 3)), DtypeError, ["query", "int64"]),
    "complex key": (lambda: GIBBS(q(2, 3), q(5, 3, dtype=torch.complex64)), DtypeError, ["key", "complex"]),
    "mixed dtypes": (
        lambda: GIBBS(q(2, 3), q(5, 3, dtype=torch.float64)),
        DtypeError,
        ["query", "key", "float32", "float64"],
    ),
    "value of another dtype": (
        lambda: GIBBS(q(2, 3), q(5, 3)).expectation(q(5, 3, dtype=torch.float64)),
        DtypeError,
        ["value", "float64", "float32"],
    ),
    "integer bias": (
        lambda: GIBBS(q(2, 3), q(5, 3), bias=torch.zeros(2, 5, dtype=LONG)),
        DtypeError,
        ["bias", "int64"],
    ),
    "a mask that is not boolean": (lambda: support.mask(torch.ones(2, 5)), DtypeError, ["mask", "bool", "float32"]),
    "an integer mask": (lambda: support.mask(torch.ones(2, 5, dtype=LONG)), DtypeError, ["mask", "bool", "int64"]),
    "an integer attn_mask": (
        lambda: partita.attention(q(2, 3), q(5, 3), q(5, 3), attn_mask=torch.ones(2, 5, dtype=LONG)),
        DtypeError,
        ["attn_mask", "int64"],
    ),
    "floating targets": (lambda: GIBBS(q(2, 3), q(5, 3)).nll(torch.zeros(2)), DtypeError, ["target", "float32"]),
    "floating lengths": (lambda: support.lengths(torch.ones(2)), DtypeError, ["key_lengths", "float32"]),
    "floating ids": (lambda: support.segments(torch.ones(2), torch.ones(2)), DtypeError, ["q_ids", "float32"]),
    "a support joined with a tensor": (
        lambda: support.causal() & torch.ones(2, 2, dtype=torch.bool),
        DtypeError,
        ["support", "Tensor", "mask"],
    ),
    # devices
    "two devices": (lambda: GIBBS(q(2, 3), q(5, 3).to("meta")), DeviceError, ["cpu", "meta", "key"]),
    # indices
    "target too large": (lambda: GIBBS(q(2, 3), q(5, 3)).nll(torch.tensor([0, 5])), TargetError, ["target", "5"]),
    "target negative": (
        lambda: GIBBS(q(2, 3), q(5, 3)).target_rank(torch.tensor([0, -1])),
        TargetError,
        ["target", "-1"],
    ),
    "class out of range": (
        lambda: partita.linear_cross_entropy(q(2, 3), q(5, 3), torch.tensor([0, 7])),
        TargetError,
        ["target", "7"],
    ),
    # numbers
    "negative lengths": (lambda: support.lengths(torch.tensor([1, -2])), ValueRangeError, ["key_lengths", "-2"]),
    "a negative length": (lambda: support.lengths(-2), ValueRangeError, ["key_lengths", "-2"]),
    "nan scale": (lambda: GIBBS(q(2, 3), q(5, 3), scale=math.nan), ValueRangeError, ["scale", "nan"]),
    "infinite scale": (lambda: GIBBS(q(2, 3), q(5, 3), scale=math.inf), ValueRangeError, ["scale", "inf"]),
    "nan in a tensor of scales": (
        lambda: GIBBS(q(2, 3), q(5, 3), scale=torch.tensor([1.0, math.nan])),
        ValueRangeError,
        ["scale", "nan"],
    ),
    "scale of the wrong kind": (lambda: GIBBS(q(2, 3), q(5, 3), scale="sharp"), PartitaError, ["scale", "sharp"]),
    "softcap zero": (lambda: GIBBS(q(2, 3), q(5, 3), softcap=0.0), ValueRangeError, ["softcap", "0.0"]),
    "negative softcap": (lambda: GIBBS(q(2, 3), q(5, 3), softcap=-1.0), ValueRangeError, ["softcap", "-1.0"]),
    "unknown alignment": (
        lambda: support.causal(align="middle"),
        ValueRangeError,
        ["align", "middle", "top-left", "bottom-right"],
    ),
    "a window that is no number": (lambda: support.window("a", 1), DtypeError, ["window", "left", "str"]),
    "negative k": (lambda: GIBBS(q(2, 3), q(5, 3)).top(-1), ValueRangeError, ["k", "-1"]),
    "a negative edge": (lambda: GIBBS(q(2, 3), q(5, 3)).gaps([1.0, -0.5]), ValueRangeError, ["edges", "-0.5"]),
    "an edge that is nan": (lambda: GIBBS(q(2, 3), q(5, 3)).gaps([math.nan]), ValueRangeError, ["edges", "nan"]),
    "one edge that is no sequence": (lambda: GIBBS(q(2, 3), q(5, 3)).gaps(1.0), DtypeError, ["edges", "1.0"]),
    "edges that are no numbers": (lambda: GIBBS(q(2, 3), q(5, 3)).gaps(["far"]), DtypeError, ["edges", "far"]),
    "edges of the wrong kind": (
        lambda: GIBBS(q(2, 3), q(5, 3)).gaps(torch.tensor([True])),
        DtypeError,
        ["edges", "bool"],
    ),
    "edges in a matrix": (lambda: GIBBS(q(2, 3), q(5, 3)).gaps(q(2, 2)), ShapeError, ["edges", "(2, 2)", "1-D"]),
    "unknown reduction": (
        lambda: partita.linear_cross_entropy(q(2, 3), q(5, 3), torch.tensor([0, 1]), reduction="median"),
        ValueRangeError,
        ["reduction", "median", "mean"],
    ),
    "a reference length of one": (lambda: scale.LogLength(reference=1), ValueRangeError, ["reference", "1"]),
    "sigma zero": (lambda: scale.CalibratedLog(512, 0.0), ValueRangeError, ["sigma", "0.0"]),
    "two targets of a policy": (lambda: scale.TargetEntropy(entropy=1.0, width=2.0), ValueRangeError, ["one of", "2"]),
    "no target of a policy": (lambda: scale.TargetEntropy(), ValueRangeError, ["one of"]),
    "a fraction above one": (lambda: scale.TargetEntropy(fraction=1.5), ValueRangeError, ["fraction", "1.5"]),
    "temperature zero": (
        lambda: partita.info_nce_loss(q(4, 3), q(4, 3), temperature=0.0),
        ValueRangeError,
        ["temperature", "0.0"],
    ),
    "unknown negative mode": (
        lambda: partita.info_nce_loss(q(4, 3), q(4, 3), q(5, 3), negative_mode="free"),
        ValueRangeError,
        ["negative_mode", "free", "paired"],
    ),
    "unmatched positives": (lambda: partita.info_nce_loss(q(4, 3), q(5, 3)), ShapeError, ["positive_key", "4", "5"]),
    # backends
    "unknown backend": (lambda: partita.backend("cuda"), BackendError, ["cuda", "dense", "tiled", "native", "auto"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named_before_computing(name, monkeypatch):
    call, kind, words = CASES[name]
    monkeypatch.setattr("partita.passes.execute", _must_not_compute)
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, PartitaError)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


def _must_not_compute(*args, **kwargs):
    raise AssertionError("computed before checking")


def test_lengths_beyond_the_keys_are_refused():
    with pytest.raises(ValueRangeError, match="key_lengths"):
        GIBBS(q(2, 3), q(5, 3), support=support.lengths(6))


def test_an_unknown_backend_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("PARTITA_BACKEND", "quantum")
    with pytest.raises(BackendError, match="quantum"):
        GIBBS(q(2, 3), q(5, 3)).entropy()


def test_errors_are_also_pythons_own():
    """Code that catches ValueError, TypeError or IndexError keeps working."""
    assert issubclass(ShapeError, ValueError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(DeviceError, ValueError)
    assert issubclass(ValueRangeError, ValueError)
    assert issubclass(TargetError, IndexError)
    assert issubclass(BackendError, RuntimeError)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), PartitaError)


def test_the_tree_at_the_top_of_the_file_lists_every_error():
    for name in errors.__all__:
        assert name in errors.__doc__
