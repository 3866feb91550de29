"""Logits that are not made and are changed in place: they and their loss are those of plain logits."""

from __future__ import annotations

import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_methods_invocations import op_db

from partita.errors import BackendError
from partita.hf.lazy_logits import LazyLogits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of logits made, and of torch
METHODS = sorted(name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_"))
OPERATORS = sorted(name for name in dir(operator) if name.startswith("i") and hasattr(torch.Tensor, f"__{name}__"))
IN_PLACE = {op.name: op for op in op_db if op.get_inplace() is not None and torch.float64 in op.dtypes}
WITH_OUT = {op.name: op for op in op_db if op.supports_out and torch.float64 in op.dtypes and "sparse" not in op.name}
TARGET = torch.tensor([0, 6, 2, 2])


def logits(grad: bool = False) -> tuple[LazyLogits, torch.Tensor]:
    """Twice the same; each with its `leaves`."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    mine, theirs = ([x.clone().requires_grad_(grad) for x in (hidden, weight)] for _ in range(2))
    stand_in, plain = LazyLogits(*mine), theirs[0] @ theirs[1].T
    object.__setattr__(stand_in, "leaves", mine)
    plain.leaves = theirs
    return stand_in, plain


def attempt(call, x):
    """What comes of call(x), or the kind of error."""
    torch.manual_seed(1)  # of what draws
    try:
        return call(x), None
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        return None, type(error)


def assert_equal(ours, truth):
    torch.testing.assert_close(ours, truth, equal_nan=True, rtol=1e-9, atol=1e-9)


def assert_same_change(call, *, grad: bool = False):
    """call(logits) raises the same error for both; afterwards both are the same, with the same loss and gradients."""
    stand_in, plain = logits(grad)
    assert attempt(call, stand_in)[1] == attempt(call, plain)[1]
    assert tuple(stand_in.shape) == tuple(plain.shape) and stand_in.dim() == plain.dim()
    if plain.numel() > 28:  # resize_: the rest is not initialised
        return
    assert_equal(stand_in.dense(), plain)
    ours, truth = (attempt(lambda x: F.cross_entropy(x, TARGET), x) for x in (stand_in, plain))
    assert ours[1] == truth[1]
    if truth[0] is None:
        return
    assert_equal(ours[0], truth[0])
    ours, truth = (
        attempt(lambda loss, leaves=x.leaves: torch.autograd.grad(loss, leaves, allow_unused=True), loss[0])
        for x, loss in ((stand_in, ours), (plain, truth))
    )
    assert ours[1] == truth[1]
    assert_equal(ours[0], truth[0])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "given",
    [(), (2,), (0, 1), (torch.full((4, 7), 2.0, dtype=torch.float64),)],
    ids=["nothing", "a number", "two", "a tensor"],
)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_place(name, given, grad):
    """With no argument, a number, two and a tensor; what does not fit raises what torch raises."""
    assert_same_change(lambda x: getattr(x, name)(*given), grad=grad)
    assert_same_change(lambda x: called(getattr(torch.Tensor, name), x, *given), grad=grad)


def called(function, x, *given):
    """As torch calls a function of something that is no tensor."""
    return (
        function(x, *given) if isinstance(x, torch.Tensor) else LazyLogits.__torch_function__(function, (), (x, *given))
    )


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_in_place(name, grad):
    assert_same_change(lambda x: getattr(operator, name)(x, 2), grad=grad)
    assert_same_change(lambda x: called(getattr(torch.Tensor, f"__{name}__"), x, 2), grad=grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: operator.setitem(x, 0, 1.0),
        lambda x: operator.setitem(x, (Ellipsis, torch.arange(2)), -torch.inf),
        lambda x: operator.setitem(x, (slice(None), slice(2, 4)), torch.finfo(torch.float64).min),  # Chameleon's
        lambda x: operator.delitem(x, 0),
        lambda x: F.relu(x, inplace=True),
        lambda x: F.dropout(x, 0.5, True, True),
        lambda x: F.threshold(x, 0.0, 0.0, True),
        lambda x: torch.nn.ELU(inplace=True)(x),
        lambda x: torch.relu_(x),
        lambda x: torch.nn.init.normal_(x),
        lambda x: torch._foreach_mul_([x], 2),
        lambda x: torch.div(x, 2, out=x),
        lambda x: torch.div(torch.ones(4, 7), 2, out=x),
        lambda x: torch.ops.aten.div_(x, 2),
        lambda x: torch.ops.aten.div_.Scalar(x, 2),
        lambda x: x.data.mul_(3),
        lambda x: x.detach().mul_(3),
        lambda x: x.masked_fill_(torch.eye(4, 7).bool(), -5.0).clamp_(-1, 1).div_(2),
        lambda x: (x[..., 1:].sum(), x.div_(2)),
        lambda x: (x.div_(2), x.mul_(3), x[1:3].fill_(0.0)),
    ],
)
def test_other_spellings(call, grad):
    assert_same_change(call, grad=grad)


def test_memory_that_is_written_to_without_torch():
    assert_same_change(lambda x: operator.setitem(x.numpy(), 0, 1.0))


def sample(op):
    """The arguments of one call for logits of (4, 7), and what the plain function gives."""
    for one in op.sample_inputs("cpu", torch.float64):
        if isinstance(one.input, torch.Tensor):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return one, op.op(one.input, *one.args, **one.kwargs)
    return None, None


@pytest.mark.parametrize("name", IN_PLACE)
def test_the_variant_in_place_of_every_operator(name):
    op = IN_PLACE[name]
    one, _ = sample(op)
    function = op.get_inplace()
    if one is None:
        return
    # a method of Tensor is found on the stand-in; a function gets it as its first argument
    method = getattr(torch.Tensor, getattr(function, "__name__", ""), None) is function
    assert_same_change(
        lambda x: getattr(x, function.__name__)(*one.args, **one.kwargs) if method else called(function, x, *one.args)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_OUT)
def test_the_stand_in_as_out_of_every_operator(name):
    op = WITH_OUT[name]
    one, expected = sample(op)
    if isinstance(expected, torch.Tensor):
        assert_same_change(lambda x: op.op(one.input, *one.args, **one.kwargs, out=x))


VIEWS = {
    "itself": lambda x: x,
    "a column": lambda x: x[..., 0],
    "rows": lambda x: x[1:3],
    "select": lambda x: x.select(-1, 3),
    "transposed": lambda x: x.T,
    "permuted": lambda x: x.permute(1, 0),
    "flat": lambda x: x.flatten(),
    "rows, flat": lambda x: x.reshape(2, 2, 7)[:, :1].contiguous().view(-1, 7),
    "contiguous": lambda x: x.contiguous(),
    "a float": lambda x: x.float(),
    "view": lambda x: x.view(2, 2, 7),
    "chunk": lambda x: x.chunk(2, -1)[0],
    "narrow": lambda x: torch.narrow(x, -1, 1, 2),
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "diagonal": lambda x: torch.diagonal(x),
    "same dtype": lambda x: x.to(torch.float64),
    "unbound": lambda x: x.unbind(0)[2],
    "copy": lambda x: x.clone(),
    "other numbers": lambda x: x * 2,
    "new": lambda x: x.softmax(-1),
}
CHANGES = {
    "div_": lambda x: x.div_(2),
    "/=": lambda x: operator.itruediv(x, 2),
    "out": lambda x: torch.mul(x, 3.0, out=x),
    "index": lambda x: operator.setitem(x, 0, 1.0),
    "fill": lambda x: x.fill_(0.5),
    "function": lambda x: F.relu(x, inplace=True),
    "nothing": lambda x: x.sum(),
}
AFTER = {
    "nothing": lambda x: x,
    "factor": lambda x: x * 0.5,
    "cast": lambda x: x.float(),
    "cap": lambda x: 3 * torch.tanh(x / 3),
    "rows": lambda x: x[:4],
}


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.sampled_from(sorted(CHANGES))), max_size=3),
    after=st.sampled_from(sorted(AFTER)),
)
def test_the_loss_is_that_of_plain_logits(steps, after):
    stand_in, plain = logits()
    for view, change in steps:
        CHANGES[change](VIEWS[view](plain))
    expected = F.cross_entropy(AFTER[after](plain), TARGET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for view, change in steps:
            CHANGES[change](VIEWS[view](stand_in))
        found = F.cross_entropy(AFTER[after](stand_in), TARGET)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    order=st.permutations(["first", "second", "base"]),
    view=st.sampled_from(sorted(VIEWS)),
    change=st.sampled_from(sorted(CHANGES)),
    looked=st.booleans(),
)
def test_views_and_copies_stay_what_they_are(order, view, change, looked):
    """A view made before a change has it, a copy has not, whichever is read or changed first."""
    results = []
    for x in logits():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if looked:
                x.argmax(-1)
            named = {"first": VIEWS[view](x), "second": x[:, :], "base": x}
            CHANGES[change](named[order[0]])
            found = [named[name] for name in order]
            results.append([y.dense() if isinstance(y, LazyLogits) else y for y in found])
            results[-1].append(F.cross_entropy(x, TARGET))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_loss_that_nothing_changed_stays_without_logits():
    """Reading the logits makes them, once; the loss does not need them."""
    stand_in, plain = logits()
    with pytest.warns(UserWarning, match="made after all"):
        stand_in.argmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(F.cross_entropy(stand_in, TARGET), F.cross_entropy(plain, TARGET))
    assert stand_in.dense() is stand_in.dense()
    stand_in.div_(2)
    with pytest.raises(BackendError, match="changed in place"):
        stand_in.token_stats(TARGET)


def test_what_reads_the_logits_still_does():
    stand_in, plain = logits()
    torch.testing.assert_close(torch.zeros(4, 7, dtype=torch.float64).copy_(stand_in), plain)
    torch.testing.assert_close(torch.add(stand_in, 1, out=torch.zeros_like(plain)), plain + 1)
    torch.testing.assert_close(torch.add(stand_in, plain, alpha=2), 3 * plain)
    torch.testing.assert_close(torch.cat([stand_in, stand_in]), torch.cat([plain, plain]))
    torch.testing.assert_close(torch.div(stand_in, 2, rounding_mode="floor"), (plain / 2).floor())
    assert not hasattr(stand_in, "no_such_thing_")
