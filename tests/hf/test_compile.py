"""Hugging Face models on partita, compiled whole: one graph, the numbers of the uncompiled model, a static cache."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import partita.hf
from partita import scale
from partita.hf.lazy_logits import LazyLogits
from tests.hf.models import inputs, make

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it imports its compiler
    from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    partita.hf.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_is_one_graph(name):
    model = make(name, "partita")
    partita.hf.set_scale(model, scale.LogLength(reference=8))
    given, real = inputs(name, "right")
    given = given if name == "bert" else {**given, "use_cache": False}
    found = torch._dynamo.explain(model)(**given)
    assert found.graph_count == 1, found.break_reasons
    assert found.graph_break_count == 0
    compiled = torch.compile(lambda **given: model(**given).logits, fullgraph=True, backend="aot_eager")
    results = []
    for run in (lambda **given: model(**given).logits, compiled):
        model.zero_grad()
        logits = run(**given)[real]
        torch.nn.functional.cross_entropy(logits, torch.arange(logits.shape[0]) % 99).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results.append((logits.detach(), grads))
    torch.testing.assert_close(*results)
    assert results[0][1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loss_without_logits_is_one_graph(dynamic):
    model = partita.hf.logit_free(make("llama", "partita"))
    given, _ = inputs("llama", "right")
    given = {**given, "use_cache": False, "labels": given["input_ids"]}
    shapes: list[torch.Size] = []

    def keep(graph, inputs):
        shapes.extend(x.shape for node in graph.graph.nodes if isinstance(x := node.meta.get("example_value"), Tensor))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(lambda **given: model(**given).loss, fullgraph=True, backend=keep, dynamic=dynamic)
    results = []
    for run in (lambda **given: model(**given).loss, compiled):
        model.zero_grad()
        loss = run(**given)
        loss.backward()
        results.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    torch.testing.assert_close(*results)
    assert shapes
    assert not [shape for shape in shapes if len(shape) > 1 and shape[-1] == model.config.vocab_size]


@pytest.mark.filterwarnings("ignore:logits of a logit_free model")
def test_logits_changed_in_place_end_the_graph():
    hidden, weight, target = torch.randn(4, 5), torch.randn(7, 5), torch.arange(4)

    def loss(hidden, weight):
        logits = LazyLogits(hidden, weight)
        row = logits[1]
        logits.div_(2)
        return torch.nn.functional.cross_entropy(logits, target) + row.sum()

    plain = hidden @ weight.T / 2
    expected = torch.nn.functional.cross_entropy(plain, target) + plain[1].sum()
    torch.testing.assert_close(torch.compile(loss, backend="eager")(hidden, weight), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(loss, backend="eager", fullgraph=True)(hidden, weight)


def test_generation_with_a_static_cache_compiles():
    model = make("llama", "partita")
    given, _ = inputs("llama", "left")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(**given, **options, disable_compile=True)
    forward = model.forward
    counted = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(forward, backend=counted)
    try:
        got = model.generate(**given, **options, disable_compile=True)
    finally:
        model.forward = forward
    assert torch.equal(got, want)
    assert counted.frame_count <= 3  # the prompt, a token, and a token at any place
