"""torch.compile: a watched model stays compiled, is seen as if it were not, and its own graphs serve again."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_models import GPT, MODELS, Attention, OwnAttention, encoder
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partita
from partita.monitor import compiled as compiled_of_monitor
from partita.monitor import watch

pytestmark = [
    # torch.compile reads .grad of the inputs of a layer that is compiled by itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, while it imports its compiler
]
CLOSE = 1e-5  # what is promised; queries and keys rounded otherwise by 2^-24 move statistics of small scores by less


class Counting:
    """A backend that keeps its graphs and counts how often they run."""

    def __init__(self, inner: str = "aot_eager") -> None:
        self.inner, self.runs, self.graphs = inner, 0, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        made = torch._dynamo.lookup_backend(self.inner)(graph, inputs)
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return made(*args)

        return run


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def learn(call: Any, model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The output of a training step, and all gradients."""
    model.zero_grad()
    out = call(**inputs)
    first: Tensor = out if isinstance(out, Tensor) else out[0]
    first.square().mean().backward()
    return [first.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same_record(got: Any, want: Any) -> None:
    """Every number of every head and loss, and the names of the layers."""
    assert [(s.name, s.kind, s.heads) for s in got.record.sites] == [
        (s.name, s.kind, s.heads) for s in want.record.sites
    ]
    for a, b in ((got.frame(pandas=False), want.frame(pandas=False)), (got.loss_frame(False), want.loss_frame(False))):
        assert len(a) == len(b)
        for row, right in zip(a, b, strict=True):
            assert row.keys() == right.keys()
            for name, value in right.items():
                if isinstance(value, float) and name != "sink_key" and name != "twin":
                    assert row[name] == pytest.approx(value, rel=CLOSE, abs=CLOSE, nan_ok=True), name
    assert len(got.frame(pandas=False)) > 0


def seen(call: Any, model: nn.Module, inputs: dict[str, Any], **options: Any) -> tuple[Any, list[Tensor]]:
    """The watch of a training step, and what the step gave."""
    with watch(call, **options) as w:
        got = learn(call, model, inputs)
    return w, got


def assert_seen_alike(model: nn.Module, inputs: dict[str, Any], backend: Any = "aot_eager", **how: Any) -> Any:
    """The record of the compiled model is that of the plain one; given back for more questions."""
    plain, _ = seen(model, model, inputs)
    w, _ = seen(torch.compile(model, backend=backend, **how), model, inputs)
    assert_same_record(w, plain)
    return w


def both(name: str, backend: Any, **how: Any) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """The watch of the plain model and of the compiled one; a step of the compiled one unwatched and watched."""
    model, inputs = MODELS[name]()
    plain, _ = seen(model, model, inputs)
    compiled = torch.compile(model, backend=backend, fullgraph=True, **how)
    torch.manual_seed(5)
    want, state = learn(compiled, model, inputs), torch.get_rng_state()
    with watch(compiled) as w:
        torch.manual_seed(5)
        got = learn(compiled, model, inputs)
        assert torch.equal(torch.get_rng_state(), state)
    with torch.compiler.set_stance("fail_on_recompile"):
        learn(compiled, model, inputs)
    return plain, w, want, got


FAST = ("log length", "received", "core, padded", "encoder, padded", "Llama, sdpa", "BERT, sdpa")  # others are slow


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_a_graph_reports_what_the_plain_model_does(name: str) -> None:
    backend = Counting()
    plain, w, want, got = both(name, backend)
    assert backend.graphs == 2 and backend.runs == 3, "one graph each, and every step ran in one"
    assert_same_record(w, plain)
    for a, b in zip(got, want, strict=True):
        # the same operations in the same order; partita's own give statistics too
        exact = {} if "partita" in name or name in ("log length", "window", "received") else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(a, b, **exact)
    assert w.coverage["in_graphs"] == w.coverage["observed"] == plain.coverage["observed"]
    assert w.coverage["missed"] == plain.coverage["missed"]
    assert not w.coverage.get("errors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log length", "encoder", "Llama, sdpa", "BERT, sdpa", "BERT, eager"])
def test_inductor_keeps_the_reports(name: str) -> None:
    plain, w, want, got = both(name, "inductor")
    assert_same_record(w, plain)
    for a, b in zip(got, want, strict=True):  # another fusion rounds otherwise
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["log length", "Llama, sdpa", "BERT, sdpa"])
def test_explain_shows_one_graph_of_a_watched_model(name: str) -> None:
    model, inputs = MODELS[name]()
    w = watch(model)
    shown = torch._dynamo.explain(model)(**inputs)
    w.detach()
    assert (shown.graph_count, shown.graph_break_count) == (1, 0)
    assert "reported" in str([node.target for node in shown.graphs[0].graph.nodes])
    assert len(w.frame(pandas=False)) == 4


WAYS = ["block", "handle", "in place", "compiled later", "layers in place", "forward", "inside another"]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_compile_at_any_time(way: str) -> None:
    model, inputs = MODELS["sdpa"]()
    plain, want = seen(model, model, inputs)
    backend, call = Counting(), model
    if way == "inside another":
        call = Around(model)
    early = watch(model) if way == "compiled later" else None
    if way == "in place":
        model.compile(backend=backend, fullgraph=True)
    elif way == "layers in place":
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile(backend=backend, fullgraph=True)
    elif way == "forward":
        model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    else:
        call = torch.compile(call, backend=backend, fullgraph=True)
    if way == "block":
        with watch(call) as w:
            got = learn(call, model, inputs)
    else:
        w = early or watch(model)
        got = learn(call, model, inputs)
        w.detach()
    assert_same_record(w, plain)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert backend.runs == (2 if way == "layers in place" else 1)
    assert backend.graphs == 1, "two layers of one class share a graph"
    before = backend.graphs
    learn(call, model, inputs)  # never compiled unwatched: now it is, and the graph does not report
    assert backend.graphs == before + 1
    assert len(w.frame(pandas=False)) == 4


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        out: Tensor = self.model(**inputs)
        return out


def test_every_rows_maps_and_layers_need_no_other_graph() -> None:
    model, inputs = MODELS["sdpa"]()
    compiled = torch.compile(model, backend=(backend := Counting()), fullgraph=True)
    with watch(compiled, every=2) as w:
        for _ in range(5):
            learn(compiled, model, inputs)
    assert sorted({r["step"] for r in w.frame(pandas=False)}) == [0, 2, 4]
    for options in ({"rows": 4}, {"maps": [(1, 0)]}, {"layers": [1]}):
        (plain, _), (w, _) = (seen(call, model, inputs, **options) for call in (model, compiled))  # type: ignore[arg-type]
        assert_same_record(w, plain)
        assert [m["data"] for m in w.record.maps] == [m["data"] for m in plain.record.maps]
    assert backend.graphs == 1


@pytest.mark.parametrize("name", ["sdpa", "encoder", "Llama, sdpa"])
def test_one_pass_for_output_and_statistics_in_a_graph(name: str) -> None:
    model, inputs = MODELS[name]()
    plain, want = seen(model, model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    w, got = seen(compiled, model, inputs, kernel="partita")
    assert_same_record(w, plain)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_two_watches_and_one_after_the_other_share_a_graph() -> None:
    model, inputs = MODELS["encoder"]()
    compiled = torch.compile(model, backend=(backend := Counting()), fullgraph=True)
    with watch(compiled) as one, watch(model) as two:
        learn(compiled, model, inputs)
    three, _ = seen(compiled, model, inputs)
    assert_same_record(one, two)
    assert_same_record(three, one)
    assert backend.graphs == 1


def test_other_compiled_models_are_left_alone() -> None:
    model, inputs = MODELS["sdpa"]()
    other, others = MODELS["log length"]()
    backend = Counting()
    compiled, another = (torch.compile(m, backend=backend, fullgraph=True) for m in (model, other))
    learn(another, other, others)
    assert backend.graphs == 1
    with watch(compiled) as w:
        learn(compiled, model, inputs)
        learn(another, other, others)
    handle = watch(compiled)
    learn(another, other, others)
    handle.detach()
    assert backend.graphs == 2 and backend.runs == 4
    assert len(w.frame(pandas=False)) == 4


def test_one_graph_serves_several_lengths() -> None:
    model = GPT(Attention)
    compiled = torch.compile(model, backend=(backend := Counting()), fullgraph=True, dynamic=True)
    for length in (9, 12, 17):
        inputs = {"ids": torch.randint(23, (3, length))}
        assert_same_record(seen(compiled, model, inputs)[0], seen(model, model, inputs)[0])
    assert backend.graphs == 1


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.attention, x, use_reentrant=False)
        return out


class Broken(nn.Module):
    """A graph break, with attention before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        out: Tensor = self.second(x)
        return out


class Stack(nn.Module):
    """Its loop is no graph; its layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    @torch._dynamo.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(("kind", "runs"), [(Checkpointed, 1), (Broken, 2), (Stack, 2)])
def test_what_is_recomputed_or_between_graphs_is_counted_once_and_named(kind: type[nn.Module], runs: int) -> None:
    backend = Counting()
    assert_seen_alike(kind(), {"x": torch.randn(2, 5, 16)}, backend, fullgraph=kind is Checkpointed)
    assert backend.runs == runs


@pytest.mark.parametrize("padded", [False, True])
def test_torchs_fused_layers_are_read(padded: bool) -> None:
    model, x = encoder(False), torch.randn(3, 9, 16)
    hidden = torch.arange(9) >= torch.tensor([[9], [5], [7]]) if padded else None
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        with watch(model) as plain:
            model(x, src_key_padding_mask=hidden)
        with watch(compiled) as w:
            compiled(x, src_key_padding_mask=hidden)
    assert_same_record(w, plain)


def test_a_module_of_torchs_own_compiled_in_place_runs_plainly_and_is_seen() -> None:
    """torch.compile skips such a module's code then, watched or not."""
    model, inputs = MODELS["encoder"]()
    plain, _ = seen(model, model, inputs)
    model.compile(backend=(backend := Counting()))
    w, _ = seen(model, model, inputs)
    assert_same_record(w, plain)
    assert backend.graphs == 0 and "run without it" in str(w.coverage)


def test_a_compiled_function_runs_plainly_in_a_block_and_is_not_seen_with_a_handle() -> None:
    model, inputs = MODELS["sdpa"]()
    plain, _ = seen(model, model, inputs)
    backend = Counting()
    function = torch.compile(lambda ids: model(ids) * 1.0, backend=backend, fullgraph=True)
    with watch(model) as w:
        learn(function, model, inputs)
    assert_same_record(w, plain)
    assert backend.runs == 0
    w = watch(model)
    learn(function, model, inputs)  # the watch must not break the graph
    w.detach()
    assert backend.runs == 1 and not w.frame(pandas=False)
    assert "compile the model instead" in str(w.coverage)


def test_a_loss_whose_arguments_are_objects_is_named_as_not_seen() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            loss = partita.info_nce_loss(x, x.roll(1, -1), exclude=partita.contrastive.AbovePositive(0.1))
            assert isinstance(loss, Tensor)
            return loss

    model = Loss()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with watch(compiled) as w:
        compiled(torch.randn(5, 4))
    assert "losses not seen" in str(w.coverage) and "info_nce_loss" in str(w.coverage)


def test_attention_that_takes_no_close_look_breaks_no_graph() -> None:
    """Its score is a function of pairs: the coverage names it, as it does without a graph."""

    class Far(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = partita.attention(x, x, x, score=partita.score.Distance())
            assert isinstance(found, Tensor)
            return found

    model, x = Far(), torch.randn(2, 2, 5, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with watch(compiled) as w:
        got = compiled(x)
    torch.testing.assert_close(got, model(x))
    assert "a score given by a callable" in str(w.coverage["errors"])


@pytest.mark.parametrize("learning", [False, True])
def test_what_keys_receive_is_followed_in_a_graph(learning: bool) -> None:
    model, inputs = MODELS["received"]()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(learning):
        want, got = model(**inputs), compiled(**inputs)
        with watch(model, received=True) as plain:
            model(**inputs)
        with watch(compiled, received=True) as w:
            torch.testing.assert_close(compiled(**inputs), got)
    torch.testing.assert_close(got, want)
    assert len(w.record.received) == len(plain.record.received) == 2
    for row, right in zip(w.record.received, plain.record.received, strict=True):
        torch.testing.assert_close(torch.tensor(row["bins"]), torch.tensor(right["bins"]), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("statistics", [False, True])
def test_plain_attention_of_an_exported_program_is_seen(statistics: bool) -> None:
    class Plain(OwnAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            found = partita.attention(q, k, v, is_causal=True, return_stats=statistics)
            out: Tensor = found[0] if statistics else found
            return out.transpose(1, 2).flatten(2)

    model, x = Plain(), torch.randn(2, 7, 16)
    with torch.no_grad():
        program: Any = torch.export.export(model, (x,)).module()
        with watch(model) as plain:
            model(x)
        with watch(program) as w:
            program(x)
    for row, right in zip(w.frame(pandas=False), plain.frame(pandas=False), strict=True):
        assert row["entropy"] == pytest.approx(right["entropy"], rel=CLOSE)
        assert row["rows"] == right["rows"] == 12  # the first of each text has no choice


def test_an_exception_leaves_torch_compile_as_it_was() -> None:
    model, inputs = MODELS["sdpa"]()
    compiled = torch.compile(model, backend=(backend := Counting()))
    compile_, place = torch.compile, torch._dynamo.eval_frame._callback_from_stance
    for w in (watch(compiled), watch(compiled)):
        with pytest.raises(Exception, match=r"float|Long|indices|scalar"):
            compiled(torch.randn(3, 10))
        w.detach()
    with pytest.raises(ZeroDivisionError), watch(compiled):
        raise ZeroDivisionError
    assert torch.compile is compile_ and torch._dynamo.eval_frame._callback_from_stance is place
    before = backend.runs
    learn(compiled, model, inputs)
    assert backend.runs == before + 1


FIRST_USE = """
import sys
sys.path.insert(0, {folder!r})
import torch
from partita.monitor import compiled as compiled_of_monitor
from partita.monitor import watch
from compiled_models import GPT, Attention
assert "torch._dynamo" not in sys.modules
model, compile_ = GPT(Attention), torch.compile
with watch(model) as w:
    torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(2, 7, dtype=torch.long))
assert torch.compile is compile_
assert w.coverage["short"] == "2 of 2 attention modules observed", str(w.coverage)
"""


def test_the_first_use_of_torch_compile_inside_a_block() -> None:
    """torch.compile is not loaded before the block, and watching alone does not load it."""
    folder = __file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", FIRST_USE.format(folder=folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


INSIDES = compiled_of_monitor.NEEDED


class Lacking:
    """`importlib` that loads modules without one name, which torch itself goes on using."""

    def __init__(self, name: str) -> None:
        self.module, self.name = name.rsplit(".", 1)

    def import_module(self, name: str) -> Any:
        found = vars(importlib.import_module(name))
        return SimpleNamespace(**{k: v for k, v in found.items() if name != self.module or k != self.name})


@pytest.mark.parametrize("way", ["shell", "in place", "both layers"])
@pytest.mark.parametrize("name", INSIDES)
def test_a_torch_without_these_insides_is_watched_uncompiled(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of torch.compile: the same record, a sentence in the coverage, and graphs again afterwards."""
    if way != "shell" and name != INSIDES[0]:
        pytest.skip("one name is enough")
    model, ids = GPT(Attention), torch.randint(23, (2, 9))
    with watch(model) as plain:
        model(ids)
    backend = Counting()
    call: Any = torch.compile(model, backend=backend) if way == "shell" else model
    if way == "in place":
        model.compile(backend=backend)
    if way == "both layers":
        for layer in model.layers:
            layer.compile(backend=backend)
    want = call(ids)
    runs = backend.runs
    with monkeypatch.context() as patch:
        patch.setattr(compiled_of_monitor, "importlib", Lacking(name))
        with watch(model) as w:
            got = call(ids)
    assert backend.runs == runs, "nothing compiled ran"
    torch.testing.assert_close(got, want)
    assert_same_record(w, plain)
    assert f"has no {name}" in w.coverage["text"]
    assert "without torch.compile" in w.coverage["text"]
    call(ids)
    assert backend.runs > runs


def test_a_backend_that_cannot_be_put_behind_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = GPT(Attention), torch.randint(23, (2, 9))
    call = torch.compile(model, backend=Counting())
    want = call(ids)
    monkeypatch.delattr("torch._dynamo.convert_frame.ConvertFrame._clone_with_backend")
    with watch(model) as w:
        torch.testing.assert_close(call(ids), want)
    assert compiled_of_monitor.SILENT in w.coverage["text"]
