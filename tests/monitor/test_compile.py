"""torch.compile: a watched model runs plainly, is seen as if it had not been compiled, and its graphs serve again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.monitor import watch


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = Attention(), Attention(), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.second(x + self.first(x)))
        return out


@pytest.fixture
def model() -> Iterator[Model]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield Model()
    torch._dynamo.reset()


X = torch.randn(3, 10, 16, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 3, 1])


def learn(call: Any, model: nn.Module) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    loss = F.cross_entropy(call(X).mean(1), Y)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_like(got: tuple[float, list[Tensor]], want: tuple[float, list[Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-6) and len(got[1]) == len(want[1]) > 0
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b)


def entropies(w: Any) -> list[float]:
    return [r["entropy"] for r in w.frame(pandas=False)]


class Counting:
    """A backend that counts how often its graphs run."""

    def __init__(self, inner: str) -> None:
        self.inner, self.runs = inner, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        made = torch._dynamo.lookup_backend(self.inner)(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return made(*args)

        return run


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["block", "handle", "in place", "handle, in place", "compiled in the block"])
def test_a_compiled_model_is_seen_and_its_graphs_serve_again(how: str, backend: str, model: Model) -> None:
    with watch(model) as w:
        want = learn(model, model)
    plain = entropies(w)
    counting = Counting(backend)
    call: Any = model
    if "in place" in how:
        model.compile(backend=counting, fullgraph=True)
    elif how != "compiled in the block":
        call = torch.compile(model, backend=counting, fullgraph=True)
    before = dict(model.__dict__)
    if how != "compiled in the block":
        learn(call, model)
        assert counting.runs == 1
    if "handle" in how:
        w = watch(call)
        got = learn(call, model)
        w.detach()
    else:
        with watch(call) as w:
            if how == "compiled in the block":
                call = torch.compile(model, backend=counting, fullgraph=True)
            got = learn(call, model)
    watched_runs = counting.runs
    assert_like(got, want)
    assert entropies(w) == pytest.approx(plain, rel=1e-6)
    assert w.coverage["short"] == "2 of 2 attention modules observed"
    assert ("without torch.compile" in str(w.coverage)) == (how != "compiled in the block")
    assert watched_runs == (0 if how == "compiled in the block" else 1), "a graph ran while watched"
    assert_like(learn(call, model), want)
    assert counting.runs == watched_runs + 1, "the graphs do not serve again"
    changed = {k for k in model.__dict__ if model.__dict__[k] is not before.get(k, model)}
    assert changed <= {"_is_torch_compile"} and "forward" not in model.__dict__  # a mark that torch.compile leaves


def test_a_handle_beside_a_compiled_model_says_that_it_sees_nothing(model: Model) -> None:
    want = learn(model, model)
    w = watch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # the watch must not break the graph
    assert_like(learn(compiled, model), want)
    w.detach()
    assert not w.frame(pandas=False)
    assert "give the compiled model to watch" in str(w.coverage)


def test_an_exception_leaves_torch_compile_as_it_was(model: Model) -> None:
    counting = Counting("eager")
    compiled = torch.compile(model, backend=counting)
    compile_ = torch.compile
    for w in (watch(compiled), watch(compiled)):
        with pytest.raises(RuntimeError, match="mat1"):
            compiled(torch.randn(3, 10, 7))
        w.detach()
    with pytest.raises(ZeroDivisionError), watch(compiled):
        raise ZeroDivisionError
    assert torch.compile is compile_
    compiled(X)
    assert counting.runs == 1


FIRST_USE = """
import sys
sys.path.insert(0, {folder!r})
import torch
from partita.monitor import watch
from test_compile import Model, X
assert "torch._dynamo" not in sys.modules
model, compile_ = Model(), torch.compile
with watch(model) as w:
    torch.compile(model, backend="eager", fullgraph=True)(X)
assert torch.compile is compile_
assert w.coverage["short"] == "2 of 2 attention modules observed", str(w.coverage)
"""


def test_the_first_use_of_torch_compile_inside_a_block() -> None:
    """Nobody has loaded torch.compile before the block, and watching alone does not load it."""
    folder = __file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", FIRST_USE.format(folder=folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
