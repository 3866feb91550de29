"""Hugging Face models on partita, compiled whole: one graph, the numbers of the uncompiled model, a static cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import partita.hf
from partita import scale
from tests.hf.models import inputs, make

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


def test_generation_with_a_static_cache_compiles():
    model = make("llama", "partita")
    given, _ = inputs("llama", "left")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(**given, **options, disable_compile=True)
    forward = model.forward
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(forward, backend=counted)
    try:
        got = model.generate(**given, **options, disable_compile=True)
    finally:
        model.forward = forward
    assert torch.equal(got, want)
    assert counted.frame_count <= 3  # the prompt, a token, and a token at any place
