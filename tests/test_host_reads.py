"""No loss, contrast or attention reads a number of a tensor that is on another device; on the CPU one per tensor.

To read one is to wait for the device. Here no tensor claims to be on the CPU, which is all the library looks
at, so that a call goes the way it goes on a device; what Python can read a number with is counted.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import partita
from tests import surface
from tests.compile.calls import SIZES, Written
from tests.compile.rows import CALLS

READS = ("__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy", "cpu", "nonzero",
         "unique", "equal", "allclose", "masked_select")  # fmt: skip
FUNCTIONS = ("nonzero", "unique", "equal", "allclose", "masked_select", "is_nonzero")


class Reads:
    """What was read, while it is counted."""

    def __init__(self, patch: pytest.MonkeyPatch, elsewhere: bool):
        self.found: list[str] = []
        for name in READS:
            patch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))
        for name in FUNCTIONS:
            patch.setattr(torch, name, self._counting(f"torch.{name}", getattr(torch, name)))
        if elsewhere:
            patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)

    def _counting(self, name, function):
        def call(*args, **options):
            self.found.append(name)
            return function(*args, **options)

        return call


class BooleanIndices(TorchFunctionMode):
    """Counts them. Once Tensor.__getitem__ was patched, torch.tensor([one number]) fails in the rest of the process."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            each = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) and i.dtype == torch.bool for i in each):
                self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


def counted(monkeypatch, run, elsewhere: bool = True) -> list[str]:
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        reads = Reads(patch, elsewhere)
        with BooleanIndices(reads.found):
            total = sum(x.sum() for x in surface.tensors(run()) if x.requires_grad)
            if isinstance(total, Tensor):
                total.backward()
    return reads.found


# Searches and fits, which stop where they are near enough; draws, which take their seed from torch's generator; numbers
# of a whole tensor, which are asked for as such.
READING = (
    "solve_scale", "scale.TargetEntropy", "fit_temperature", "attention, dropout", "gumbel_attention", "measure_sigma",
    "mutual_information_bound", "nn.EntropyInvariantAttention", "nn.init_sharpness_",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith(READING)])
def test_nothing_is_read_on_a_device(name, monkeypatch):
    for _ in range(2):  # once where nothing is remembered, once where something is
        given = Written(SIZES)
        assert counted(monkeypatch, lambda given=given: CALLS[name](given)) == []


FEW = {name: CALLS[name] for name in ("attention, causal and statistics", "linear_cross_entropy, mean",
                                      "linear_cross_entropy, sum", "info_nce_loss, symmetric")}  # fmt: skip
FEW["clip_loss"] = lambda g: partita.clip_loss(*g.pairs(), g.real())


@pytest.mark.parametrize("name", FEW)
def test_on_the_cpu_one_read_per_tensor_is_the_most(name, monkeypatch):
    given = Written(SIZES)
    found = counted(monkeypatch, lambda: FEW[name](given), elsewhere=False)
    assert len(found) <= len(given.tensors) <= 3


@pytest.mark.parametrize(
    "read",
    [bool, int, float, lambda x: x.item(), lambda x: x.tolist(), lambda x: x[x > 0], lambda x: torch.nonzero(x)],
)
def test_the_count_sees_a_read(read, monkeypatch):
    assert counted(monkeypatch, lambda: (read(torch.tensor(1.0)), ())[1])


def test_the_tensors_are_taken_for_those_of_a_device(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
    assert "tiled serves" in str(partita.explain(partita.Gibbs(torch.zeros(2, 3), torch.zeros(5, 3))))


BAD = {
    "linear cross entropy": lambda x, y: partita.linear_cross_entropy(x, torch.ones(7, 5), y, reduction="none"),
    "class weights": lambda x, y: partita.linear_cross_entropy(
        x, torch.ones(7, 5), y, weight=torch.ones(7), reduction="none"
    ),
    "logits": lambda x, y: partita.cross_entropy(x @ torch.ones(5, 7), y, reduction="none"),
    "focal": lambda x, y: partita.focal_loss(x @ torch.ones(5, 7), y, alpha=torch.ones(7), reduction="none"),
    "squared": lambda x, y: partita.brier_loss(x @ torch.ones(5, 7), y, reduction="none"),
    "Gibbs": lambda x, y: partita.Gibbs(x, torch.ones(7, 5)).nll(y),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("bad", [-1, 7])
def test_a_bad_target_on_a_device_makes_its_row_nan(name, bad, monkeypatch):
    x, y = torch.randn(4, 5), torch.tensor([0, bad, 6, 3])
    with pytest.raises(partita.errors.TargetError):
        BAD[name](x, y)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
    assert BAD[name](x, y).isnan().tolist() == [False, True, False, False]
    with partita.validate(True), pytest.raises(partita.errors.TargetError):
        BAD[name](x, y)
    assert BAD[name](x, y).isnan().any()


def test_a_bad_target_is_no_correct_answer_on_a_device(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
    _, stats = partita.linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([9, 1]), return_stats=True)
    assert stats.correct.tolist() == [False, True]
    assert stats.target_rank.tolist() == [-1, 0]


def test_validate_holds_until_the_next_call(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
    partita.validate(True)
    try:
        with pytest.raises(partita.errors.TargetError):
            BAD["Gibbs"](torch.ones(2, 5), torch.tensor([0, 9]))
    finally:
        partita.validate(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BAD["Gibbs"](torch.ones(2, 5), torch.tensor([0, 9])).isnan().any()
