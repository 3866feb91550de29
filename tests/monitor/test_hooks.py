"""Everything that is there is seen, once; and afterwards torch and the model are what they were."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_models import small
from torch import Tensor, nn

import partita
from partita.monitor import watch
from partita.monitor.hooks import Frame, FunctionMode, SoftmaxCall, Subscriber

PLACES: dict[str, Callable[[], Any]] = {
    "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention,
    "F.softmax": lambda: F.softmax,
    "torch.compile": lambda: torch.compile,
    "nn.Module.__call__": lambda: nn.Module.__call__,
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    gc.collect()  # what an earlier test forgot lets go of its model now, not within this one
    before = {name: place() for name, place in PLACES.items()}
    yield
    for name, place in PLACES.items():
        assert place() is before[name], f"{name} was left replaced"
    assert torch.overrides._get_current_function_mode_stack() == []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small(), small()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(x + self.first(x))
        return out


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def seen(w: Any) -> list[tuple[int, str]]:
    return sorted({(r["step"], r["name"]) for r in w.frame(pandas=False)})


BOTH = [(0, "first"), (0, "second")]


# ---- several watches -------------------------------------------------------------------------------------------------


def test_a_cell_that_is_run_twice() -> None:
    model = Model()
    old = watch(model)
    model(X)
    new = watch(model)
    model(X)
    old.detach()
    model(X)
    new.detach()
    assert seen(old) == [(s, n) for s in range(2) for n in ("first", "second")]
    assert seen(new) == seen(old)


@pytest.mark.parametrize("kind", ["blocks", "handles"])
@pytest.mark.parametrize("order", ["newest first", "oldest first"])
@pytest.mark.parametrize("build", [Model, lambda: nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)])
@pytest.mark.parametrize("training", [True, False])
def test_two_watches_see_the_same(kind: str, order: str, build: Any, training: bool) -> None:
    model = build().train(training)
    if not training:
        model.requires_grad_(False)
    plain = model(X)
    a, b = watch(model), watch(model)
    if kind == "blocks":
        a.__enter__()
        b.__enter__()
    assert torch.equal(model(X), plain)
    for w in (b, a) if order == "newest first" else (a, b):
        w.__exit__(None, None, None) if kind == "blocks" else w.detach()
    assert torch.equal(model(X), plain)
    assert len(a.record.blocks) == len(b.record.blocks) > 0
    for one, other in zip(a.record.blocks, b.record.blocks, strict=True):
        torch.testing.assert_close(torch.tensor(one.values), torch.tensor(other.values), equal_nan=True)


def test_blocks_that_overlap_restore_the_compiler() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    a, b = watch(Model()), watch(Model())
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    compiled(X)
    assert not graphs  # still eager: b is open
    b.__exit__(None, None, None)
    compiled(X)
    assert len(graphs) == 1
    assert torch._dynamo.eval_frame._stance.stance == "default"
    torch._dynamo.reset()


def in_threads(*work: Callable[[], None]) -> None:
    """Run together; an exception of any is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(work))

    def run(one: Callable[[], None]) -> None:
        try:
            start.wait()
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("build", [Model, lambda: nn.MultiheadAttention(8, 2, batch_first=True)])
def test_two_threads_see_their_own_models_and_leave_nothing(build: Any) -> None:
    models = [build(), build()]
    found: list[Any] = [None, None]

    def train(i: int) -> Callable[[], None]:
        def run() -> None:
            with watch(models[i]) as w:
                for _ in range(10):
                    models[i](X) if isinstance(models[i], Model) else models[i](X, X, X)
            found[i] = w

        return run

    in_threads(train(0), train(1))
    for w in found:
        assert sorted({s for s, _ in seen(w)}) == list(range(10)), str(w.coverage)
        assert not w.coverage["missed"] and "other threads" not in str(w.coverage)


@pytest.mark.parametrize("how", ["block", "handle"])
def test_a_forgotten_watch_lets_its_model_go(how: str) -> None:
    model = Model()
    w = watch(model)
    if how == "block":
        with w:
            model(X)
    model(X)
    dead = weakref.ref(model)
    del model, w
    gc.collect()
    assert dead() is None


def test_a_handle_with_a_sink_goes_on_without_a_name() -> None:
    model, steps = Model(), []
    handle = weakref.ref(watch(model, sinks=[lambda record, step, blocks, losses: steps.append(step)]))
    gc.collect()
    for _ in range(3):
        model(X)
    assert steps == [0, 1]
    w = handle()
    assert w is not None
    w.detach()
    assert steps == [0, 1, 2]


def test_calls_of_another_thread_are_named() -> None:
    model = Model()
    with watch(model) as w:
        in_threads(lambda: model(X))
    assert not seen(w) and "in other threads were not seen" in str(w.coverage)


def test_replaced_attention_in_any_order_and_any_thread() -> None:
    a, b = partita.replace_sdpa(), partita.replace_sdpa(scale=partita.scale.Constant(0.0))
    original = F.scaled_dot_product_attention
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    x = torch.randn(1, 2, 5, 4)
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), x.mean(-2, keepdim=True).expand_as(x))
    b.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is original

    def many(scale: float) -> Callable[[], None]:
        def run() -> None:
            for _ in range(50):
                with partita.replace_sdpa(scale=partita.scale.Constant(scale)):
                    out = F.scaled_dot_product_attention(x, x, x)
                torch.testing.assert_close(out, partita.attention(x, x, x, scale=scale))

        return run

    in_threads(many(0.0), many(3.0))
    both_in = threading.Barrier(2)

    def one(scale: float) -> Callable[[], None]:
        def run() -> None:
            with partita.replace_sdpa(scale=partita.scale.Constant(scale)):
                both_in.wait()  # in any order, each thread has its own
                out = F.scaled_dot_product_attention(x, x, x)
                both_in.wait()
            torch.testing.assert_close(out, partita.attention(x, x, x, scale=scale))

        return run

    in_threads(one(0.0), one(3.0))
    assert F.scaled_dot_product_attention is original


def test_plain_attention_still_compiles_afterwards() -> None:
    with watch(nn.MultiheadAttention(8, 2)) as w, partita.replace_sdpa():
        w.model(X, X, X)
    torch._dynamo.reset()
    run = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager", fullgraph=True)
    assert torch.equal(run(X), F.scaled_dot_product_attention(X, X, X))
    torch._dynamo.reset()


# ---- whose forward it is ---------------------------------------------------------------------------------------------


class Wrapped:
    """A tool that keeps what it wraps under names that others might use."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.module, self.name, self.around, self.before = inner, None, "theirs", None, None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + 1
        return out


def test_a_forward_that_a_tool_wrapped_is_called_and_stays() -> None:
    model = Model()
    inner = model.first.forward
    theirs = Wrapped(inner)
    model.first.forward = theirs  # type: ignore[method-assign]
    plain = model(X)
    with watch(model) as w:
        assert torch.equal(model(X), plain)
        later = Wrapped(model.second.forward)
        model.second.forward = later  # type: ignore[method-assign]
        model(X)
    assert model.first.forward is theirs and model.second.forward is later
    assert seen(w) == [(s, n) for s in range(2) for n in ("first", "second")]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_watched_model_are_plain(make: Callable[[nn.Module], nn.Module]) -> None:
    model = Model()
    state = set(model.__dict__)
    with watch(model) as w:
        twin = make(model)
        assert set(twin.__dict__) == state
        twin(X)
        assert not seen(w) or make is copy.copy  # a shallow copy has the model's own layers
        model(X)
    twin.first = nn.Identity()  # type: ignore[assignment]
    twin.forward = lambda x: x  # type: ignore[method-assign]
    assert torch.equal(twin(X), X)


# ---- layers and steps ------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One module, called several times, as in ALBERT."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.attention, self.calls = small(), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = x + self.attention(x)
        return x


def test_every_call_of_a_shared_module_is_a_layer() -> None:
    model = Shared(4)
    with watch(model) as w:
        model(X)
        model(X)
    names = ["attention", "attention[1]", "attention[2]", "attention[3]"]
    assert [site.name for site in w.record.sites] == names
    assert seen(w) == sorted((s, n) for s in range(2) for n in names)
    assert w.coverage["short"] == "1 of 1 attention modules observed"
    with watch(model, layers=r"attention\[3\]") as w:
        model(X)
    assert seen(w) == [(0, "attention[3]")]


def test_layers_that_match_nothing_are_refused() -> None:
    model = Model()
    for given in ([99], "nothing", ["decoder", 7]):
        with pytest.raises(ValueError, match="matches nothing: this model has 2 attention modules"):
            watch(model, layers=given)  # type: ignore[arg-type]
    for given in (-1, [1.5], "["):
        with pytest.raises(ValueError, match="layers takes"):
            watch(model, layers=given)  # type: ignore[arg-type]
    with watch(model, layers=[1, 99]) as w:
        model(X)
    assert seen(w) == [(0, "second")]


def test_a_record_of_nothing_is_named() -> None:
    model = nn.Sequential(Shared(1))  # nothing can be known of later calls before they are made
    with watch(model, layers=r"attention\[1\]") as w:
        model(X)
    assert not seen(w) and "nothing recorded" in str(w.coverage)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"maps": (0, 1)}, r"maps=\[\(0, 1\)\]"),
        ({"maps": "01"}, "pairs"),
        ({"maps": [(0, -1)]}, "pairs"),
        ({"sinks": ["tensorboard"]}, r"partita.monitor.tensorboard\(SummaryWriter"),
        ({"sinks": "json"}, "sinks takes functions"),
        ({"kernel": "fast"}, "'own', 'partita'"),
        *[({"every": every}, "every must") for every in (True, 0, 1.5)],
        ({"rows": 0}, "rows must"),
        ({"thresholds": {"nothing": 1}}, "unknown threshold"),
    ],
)
def test_bad_input_is_refused_with_advice(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        watch(Model(), **given)


def test_a_failing_sink_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise OSError("disk full")

    model = Model()
    with watch(model, sinks=[broken]):
        for _ in range(5):
            model(X)
    assert caplog.text.count("disk full") == 1


# ---- what is not attention, and what is without saying so ------------------------------------------------------------


class Head(nn.Module):
    """Attention as a tutorial writes it; its name does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(x @ x.mT, dim=-1)
        return self.drop(weights) @ x


class Router(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * F.softmax(x, dim=-1)


@pytest.mark.parametrize("training", [True, False])
def test_attention_written_by_hand_is_named_as_not_seen(training: bool) -> None:
    model = nn.ModuleDict({"head": Head(), "router": Router(), "self": small()}).train(training)
    with watch(model) as w:
        for part in model.values():
            part(X)
    (missed,) = w.coverage["missed"]
    assert missed["name"] == "head" and "by hand" in missed["reason"] and "head (a softmax" in str(w.coverage)
    assert w.coverage["short"] == "1 of 2 attention modules observed"


def test_norms_and_masks_are_no_attention_and_masked_attention_is() -> None:
    from partita.monitor.hooks import is_attention

    assert not is_attention("layers.0.attn_norm", nn.Identity)
    assert not is_attention("layers.0.attn_norm", nn.LayerNorm)
    assert not is_attention("attention_mask", nn.Identity)
    assert is_attention("layers.0.attn", Model)
    assert is_attention("x", type("MaskedSelfAttention", (nn.Module,), {}))


def test_other_models_keep_their_fast_path() -> None:
    """A function mode switches torch's fast paths off: those of a model that is not watched stay on."""
    other = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval().requires_grad_(False)
    plain = other(X)
    with watch(Model()) as w:
        assert torch.equal(other(X), plain)
        w.model(X)
    assert seen(w) == BOTH


@pytest.mark.parametrize("training", [True, False])
def test_inputs_of_a_frozen_model_have_their_own_strongest_keys(training: bool) -> None:
    model = nn.ModuleDict({"attention": small()}).train(training)
    with torch.no_grad(), watch(model) as w:
        for sink in (3, 1, 4):
            x = X.clone()
            x[:, sink] *= 30
            model["attention"](x)
    first, *later = [b.column("sink_key") + b.column("sink_top") for b in w.record.blocks]
    assert all((one == first) == training for one in later)  # in training the first sample stands for eight steps


# ---- not a bit changes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "encoder", "partita"])
def test_forty_steps_end_at_the_same_loss(kind: str) -> None:
    def train(watched: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        body: nn.Module = Model()
        if kind == "encoder":
            body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), 2)
        elif kind == "partita":
            body = partita.nn.EntropyInvariantAttention(8, 2)
        head = nn.Linear(8, 11)
        optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], 1e-2)
        handle = watch(body) if watched else None
        losses = []
        if handle is not None:
            handle.__enter__()
        for step in range(40):
            torch.manual_seed(step)
            x, y = torch.randn(3, 70, 8), torch.randint(0, 11, (3, 70))
            out = body(x)
            out = out[0] if isinstance(out, tuple) else out
            loss = partita.linear_cross_entropy(out, head.weight, y, linear_bias=head.bias)
            assert isinstance(loss, Tensor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if handle is not None:
            handle.__exit__(None, None, None)
            assert len({r["step"] for r in handle.frame(pandas=False)}) == 40
        return losses, [p.detach() for p in body.parameters()]

    plain, watched = train(False), train(True)
    assert plain[0] == watched[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))


# ---- numbers that cannot be ------------------------------------------------------------------------------------------


def test_a_number_that_cannot_be_is_reported_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from partita.monitor.scores import Scores

    monkeypatch.setattr(Scores, "first_key", lambda self, log_z: torch.full_like(log_z, 2.8))

    class Own(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return partita.attention(q, q, q, scale=partita.scale.LogLength(64), is_causal=True)

    model = Own()
    with watch(model) as w:
        model(torch.randn(1, 2, 9, 4))
    rows = w.frame(pandas=False)
    assert all(r["sink_first"] != r["sink_first"] for r in rows)  # NaN
    assert all(0 < r["entropy"] < 3 for r in rows)
    assert "sink_first of layer 0, head 1, step 0 came out as 2.8" in w.coverage["impossible"]
    assert "a fault of partita: 2 numbers" in str(w.coverage)
    (finding,) = [f for f in w.findings() if f.code == "NONFINITE"]
    assert finding.where == "partita itself" and "sink_first" in finding.evidence


# ---- one event -------------------------------------------------------------------------------------------------------


class Listener(Subscriber):
    """Keeps the events of one module."""

    def __init__(self, name: str) -> None:
        self.stack, self.leaves, self.events = [Frame(name, nn.Module())], weakref.WeakSet(), []

    def softmax(self, make: Callable[[], SoftmaxCall | None]) -> None:
        call = make()
        self.events += [] if call is None else [call]


@pytest.mark.parametrize("name", ["self_attn", "router"])
def test_every_way_to_a_softmax_is_the_same_event(name: str) -> None:
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    listener = Listener(name)
    with FunctionMode(listener).during():
        out = F.scaled_dot_product_attention(query, key, key)
        partita.attention(query, key, key, return_stats=True)
        (query @ key.mT * 0.5).softmax(-1)
        torch.nn.functional.relu(query)
    kinds = [call.kind for call in listener.events]
    assert kinds == ["sdpa", "partita", *(["softmax"] if name == "self_attn" else [])]
    assert listener.events[0].output is out and listener.events[1].statistics is not None
    want = partita.Gibbs(query, key, scale=0.5).entropy()
    for call in listener.events:
        assert call.module is listener.stack[-1] and call.heads == 3
        torch.testing.assert_close(call.canonical().gibbs().entropy(), want)


def test_a_leaf_of_the_model_is_passed_by_first() -> None:
    """A call of a Linear inside a watched forward costs the frames of two wrappers and of torch's own function."""

    def frames(layers: int) -> int:
        model, x, count = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), torch.randn(2, 4), 0

        def profile(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            count += event == "call" and "/partita/" in frame.f_code.co_filename

        with watch(model):
            model(x)
            sys.setprofile(profile)
            try:
                model(x)
            finally:
                sys.setprofile(None)
        return count

    assert frames(12) - frames(2) <= 10 * 4
