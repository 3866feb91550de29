"""Every bad input is named before anything is computed: what was expected, what was given, how to fix it."""

from __future__ import annotations

import math

import pytest
import torch

import partita
from partita import errors, scale, support
from partita.attn.problem import sink_per_row
from partita.errors import (
    BackendError,
    DeviceError,
    DtypeError,
    PartitaError,
    ShapeError,
    TargetError,
    ValueRangeError,
)
from tests import mistakes, surface


def q(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


GIBBS = partita.Gibbs
LONG = torch.long


def small(**options: object) -> partita.Gibbs:
    """Two queries and five keys of three features."""
    return GIBBS(q(2, 3), q(5, 3), **options)


P = small()

# (what is wrong, the call, the error, words its message must hold)
CASES = {
    # shapes
    "dims differ": (lambda: GIBBS(q(2, 3), q(5, 4)), ShapeError, ["query", "key", "(2, 3)", "(5, 4)"]),
    "query is a vector": (lambda: GIBBS(q(3), q(5, 3)), ShapeError, ["query", "(3,)"]),
    "key is a vector": (lambda: GIBBS(q(2, 3), q(3)), ShapeError, ["key", "(3,)"]),
    "batches do not broadcast": (lambda: GIBBS(q(2, 4, 3), q(3, 5, 3)), ShapeError, ["batch", "(2,)", "(3,)"]),
    "too few values": (lambda: P.expectation(q(4, 3)), ShapeError, ["value", "4", "5"]),
    "bias of the wrong width": (lambda: small(bias=q(2, 4)), ShapeError, ["bias", "(2, 4)", "5"]),
    "bias per query, not per key": (lambda: small(bias=q(2)), ShapeError, ["bias", "(2,)"]),
    "scale of the wrong length": (lambda: small(scale=q(4)), ShapeError, ["scale", "(4,)"]),
    "too few targets": (lambda: P.nll(torch.zeros(3, dtype=LONG)), ShapeError, ["target", "(3,)", "2"]),
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
        lambda: P.expectation(q(5, 3, dtype=torch.float64)),
        DtypeError,
        ["value", "float64", "float32"],
    ),
    "integer bias": (lambda: small(bias=torch.zeros(2, 5, dtype=LONG)), DtypeError, ["bias", "int64"]),
    "a mask that is not boolean": (lambda: support.mask(torch.ones(2, 5)), DtypeError, ["mask", "bool", "float32"]),
    "an integer mask": (lambda: support.mask(torch.ones(2, 5, dtype=LONG)), DtypeError, ["mask", "bool", "int64"]),
    "an integer attn_mask": (
        lambda: partita.attention(q(2, 3), q(5, 3), q(5, 3), attn_mask=torch.ones(2, 5, dtype=LONG)),
        DtypeError,
        ["attn_mask", "int64"],
    ),
    "floating targets": (lambda: P.nll(torch.zeros(2)), DtypeError, ["target", "float32"]),
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
    "target too large": (lambda: P.nll(torch.tensor([0, 5])), TargetError, ["target", "5"]),
    "target negative": (lambda: P.target_rank(torch.tensor([0, -1])), TargetError, ["target", "-1"]),
    "class out of range": (
        lambda: partita.linear_cross_entropy(q(2, 3), q(5, 3), torch.tensor([0, 7])),
        TargetError,
        ["target", "7"],
    ),
    # numbers
    "negative lengths": (lambda: support.lengths(torch.tensor([1, -2])), ValueRangeError, ["key_lengths", "-2"]),
    "a negative length": (lambda: support.lengths(-2), ValueRangeError, ["key_lengths", "-2"]),
    "nan scale": (lambda: small(scale=math.nan), ValueRangeError, ["scale", "nan"]),
    "infinite scale": (lambda: small(scale=math.inf), ValueRangeError, ["scale", "inf"]),
    "nan in a tensor of scales": (
        lambda: small(scale=torch.tensor([1.0, math.nan])),
        ValueRangeError,
        ["scale", "nan"],
    ),
    "scale of the wrong kind": (lambda: small(scale="sharp"), PartitaError, ["scale", "sharp"]),
    "softcap zero": (lambda: small(softcap=0.0), ValueRangeError, ["softcap", "0.0"]),
    "negative softcap": (lambda: small(softcap=-1.0), ValueRangeError, ["softcap", "-1.0"]),
    "unknown alignment": (
        lambda: support.causal(align="middle"),
        ValueRangeError,
        ["align", "middle", "top-left", "bottom-right"],
    ),
    "a window that is no number": (lambda: support.window("a", 1), DtypeError, ["window", "left", "str"]),
    "negative k": (lambda: P.top(-1), ValueRangeError, ["k", "-1"]),
    "a negative edge": (lambda: P.gaps([1.0, -0.5]), ValueRangeError, ["edges", "-0.5"]),
    "an edge that is nan": (lambda: P.gaps([math.nan]), ValueRangeError, ["edges", "nan"]),
    "one edge that is no sequence": (lambda: P.gaps(1.0), DtypeError, ["edges", "1.0"]),
    "edges that are no numbers": (lambda: P.gaps(["far"]), DtypeError, ["edges", "far"]),
    "edges of the wrong kind": (lambda: P.gaps(torch.tensor([True])), DtypeError, ["edges", "bool"]),
    "edges in a matrix": (lambda: P.gaps(q(2, 2)), ShapeError, ["edges", "(2, 2)", "1-D"]),
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
    # what was served, or failed inside
    "6 queries and 5 keys as pairs": (
        lambda: GIBBS(q(6, 3), q(5, 3)).both_ways_nll(),
        ShapeError,
        ["(6, 3)", "(5, 3)"],
    ),
    "one bias for all classes": (
        lambda: partita.linear_distillation_loss(q(4, 3), q(5, 3), q(4, 3), q(5, 3), linear_bias=q(1)),
        ShapeError,
        ["linear_bias", "(1,)", "(5,)"],
    ),
    "a bias per row": (
        lambda: partita.linear_distillation_loss(q(4, 3), q(5, 3), q(4, 3), q(5, 3), teacher_bias=q(4, 1)),
        ShapeError,
        ["teacher_bias", "(4, 1)", "(5,)"],
    ),
    "a bias per row to calibrate": (
        lambda: partita.fit_temperature(q(5, 3), q(5, 3), torch.zeros(5, dtype=LONG), bias=q(5, 5)),
        ShapeError,
        ["bias", "(5, 5)", "(5,)"],
    ),
    "an integer sink": (lambda: sink_per_row(torch.ones(2, dtype=LONG), q(2, 4)), DtypeError, ["sink", "int64"]),
    "a number merged": (lambda: partita.merge(3), DtypeError, ["State", "int"]),
    "a floor of nan": (lambda: scale.LogLength(floor=math.nan), ValueRangeError, ["floor", "nan"]),
    "a class of scores": (lambda: small(score=partita.score.Cosine), DtypeError, ["class Cosine", "Cosine(...)"]),
    # hints
    "positions before heads, other keys": (
        lambda: partita.attention(q(2, 7, 4, 8), q(2, 9, 4, 8), q(2, 9, 4, 8)),
        ShapeError,
        [".transpose(1, 2)", "(batch, heads, n, dim)"],
    ),
    "positions before heads, half the keys": (
        lambda: partita.attention(q(2, 8, 4, 8), q(2, 4, 4, 8), q(2, 4, 4, 8)),
        ShapeError,
        [".transpose(1, 2)"],
    ),
    "a padding mask": (
        lambda: partita.attention(q(2, 4, 7, 8), q(2, 4, 9, 8), q(2, 4, 9, 8), torch.ones(2, 9, dtype=torch.bool)),
        ShapeError,
        ["(2, 9)", "mask[:, None, None]"],
    ),
    "a padding mask of numbers": (
        lambda: partita.attention(q(2, 4, 7, 8), q(2, 4, 9, 8), q(2, 4, 9, 8), torch.zeros(2, 9)),
        ShapeError,
        ["(2, 9)", "bias[:, None, None]"],
    ),
    # backends
    "unknown backend": (lambda: partita.backend("cuda"), BackendError, ["cuda", "dense", "tiled", "native", "auto"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named_before_computing(name, monkeypatch):
    call, kind, words = CASES[name]
    monkeypatch.setattr("partita.gibbs.execute", _must_not_compute)
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
        small(support=support.lengths(6))


def test_an_unknown_backend_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("PARTITA_BACKEND", "quantum")
    with pytest.raises(BackendError, match="quantum"):
        P.entropy()


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


# arguments that a call does not read unless another is given, or that are a function of anything
UNREAD = {
    ("info_nce_loss", "temperature"), ("linear_distillation_loss", "ignore_index"),
    ("expected_calibration_error", "correct"), ("TransformerEncoderLayer", "activation"),
    ("TransformerDecoderLayer", "activation"), ("TemperatureController.forward", "query"),
}  # fmt: skip


@pytest.mark.parametrize("name", surface.CALLS)
def test_every_wrong_argument_is_named_or_served(name):
    """A call with one argument of the wrong kind succeeds, or raises an error of the package: never one from inside.

    What can be right of no argument of its kind (a text, a class, nan for a number) must be refused. A flag may be
    anything that is true or false, and modules hold their settings for the function that reads them to check.
    """
    found = []
    for call in mistakes.recorded()[name]:
        holds = isinstance(call.function, type) and issubclass(call.function, torch.nn.Module)
        for argument, label, run in mistakes.mistaken(call):
            what = f"{call.name}({argument}={label})"
            try:
                run()
            except PartitaError as error:
                wrong = len(str(error)) < 20
                said = str(error)
            except Exception as error:
                wrong, said = True, f"{type(error).__name__}: {error}"[:160]
            else:
                wrong = mistakes.never_right(call.arguments.arguments[argument], label)
                wrong, said = wrong and not holds and (call.name, argument) not in UNREAD, "is served"
            if wrong:
                found.append(f"{what}: {said}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("call", "wrong", "meant"), [("attention", "causal", "is_causal"), ("info_nce_loss", "temprature", "temperature")]
)
def test_a_misspelt_argument_is_answered_with_the_right_one(call: str, wrong: str, meant: str) -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(TypeError, match=f"{call}.*unexpected keyword argument '{wrong}'. Did you mean '{meant}'"):
        getattr(partita, call)(x, x, x, **{wrong: 1})
    with pytest.raises(TypeError, match=r"'far_from_all'$"):
        getattr(partita, call)(x, x, x, far_from_all=1)


def test_the_package_lists_its_own_names_only() -> None:
    assert {name for name in dir(partita) if not name.startswith("__")} == set(partita.__all__)
