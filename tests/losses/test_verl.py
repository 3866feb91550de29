"""verl's fused log-probabilities and entropy: against its torch code where verl is, against dense torch where not.

`make test-peers` brings verl 0.9.1 in a folder of its own (TRAINERS in the Makefile): it asks for other transformers
than the peers. Its own tests of these functions need a GPU.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType

import pytest
import torch

from partita.adapters.verl import FusedLinearForPPO, install, linear_cross_entropy
from partita.errors import BackendError, ShapeError, ValueRangeError

KERNEL = "verl.utils.kernel.linear_cross_entropy"


def operands(dtype=torch.float64, lead=(3, 7), dim=16, vocabulary=61):
    torch.manual_seed(0)
    hidden = torch.randn(*lead, dim, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, dim, dtype=dtype) / 2).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, lead)


def dense(hidden, weight, labels, temperature=1.0):
    """(log-probabilities, entropy, sum of p^2) by the formulas."""
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


def theirs(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("verl", reason="verl stands in a folder of its own: make test-peers")
        return getattr(importlib.import_module(module), name)


def assert_same(ours, expected, leaves, tol=1e-10):
    """Values, and the gradients of a mixture of all of them."""
    found = []
    for results in (ours, expected):
        total = sum(((i + 1) * x.double().sin()).sum() for i, x in enumerate(results))
        found.append(torch.autograd.grad(total, leaves, retain_graph=True))
    for one, want in zip((*ours, *found[0]), (*expected, *found[1]), strict=True):
        assert one.shape == want.shape
        torch.testing.assert_close(one, want, rtol=tol, atol=tol, check_dtype=False)


TEMPERATURES = {
    "number": (0.7, 0.7),
    "per sample": (torch.tensor([0.5, 1.0, 2.0]).double(), torch.tensor([0.5, 1.0, 2.0]).double()[:, None, None]),
    "per token": (torch.linspace(0.5, 2, 21).double(), torch.linspace(0.5, 2, 21).double().view(3, 7, 1)),
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_values_and_gradients(temperature):
    hidden, weight, labels = operands()
    given, spread = TEMPERATURES[temperature]
    expected = dense(hidden, weight, labels, spread)
    assert_same(
        linear_cross_entropy(hidden, weight, labels, given, "none", sum_pi_squared=True),
        [x.flatten() for x in expected],
        (hidden, weight),
    )
    assert_same(FusedLinearForPPO()(hidden, weight, labels, given, sum_pi_squared=True), expected, (hidden, weight))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_are_of_the_log_probabilities(reduction):
    hidden, weight, labels = operands()
    log_prob, entropy, _ = dense(hidden, weight, labels)
    expected = getattr(log_prob, reduction)(), entropy.flatten()
    assert_same(linear_cross_entropy(hidden, weight, labels.flatten(), 1.0, reduction), expected, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(21,), (3, 7)])
def test_as_verls_fused_linear(lead, dtype):
    class_ = theirs("verl.utils.experimental.torch_functional", "FusedLinearForPPO")
    hidden, weight, labels = operands(dtype, lead)
    expected = class_(chunk_size=5)(hidden, weight, labels, 0.7)
    found = FusedLinearForPPO(chunk_size=5)(hidden, weight, labels, temperature=0.7)
    assert [x.dtype for x in found] == [x.dtype for x in expected] == [torch.float32, dtype]
    assert_same(found, expected, (hidden, weight), 1e-5 if dtype == torch.float32 else 0.1)


def test_as_verls_sum_of_squares():
    of_logits = theirs("verl.utils.torch_functional", "calculate_sum_pi_squared_from_logits")
    hidden, weight, labels = operands()
    found = linear_cross_entropy(hidden, weight, labels, 0.5, sum_pi_squared=True)[2]
    torch.testing.assert_close(found, of_logits(hidden @ weight.T / 0.5).flatten())


def test_in_the_models_of_verl():
    """verl's forwards of a language model, both back ends, with these in place of its own."""
    forwards = [
        theirs("verl.models.transformers.dense_common", f"forward_with_{x}_backend") for x in ("torch", "triton")
    ]
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=99
        )
    )
    ids = torch.randint(99, (2, 9))
    expected = forwards[0](model, input_ids=ids, return_dict=True, temperature=0.7)
    with install():
        for forward in forwards:
            found = forward(model, input_ids=ids, return_dict=True, temperature=0.7)
            for name in ("log_probs", "entropy"):
                torch.testing.assert_close(getattr(found, name).flatten(), getattr(expected, name).flatten())


def test_put_in_place_and_taken_out(monkeypatch):
    class_ = theirs("verl.utils.experimental.torch_functional", "FusedLinearForPPO")
    modules = [sys.modules["verl.utils.experimental.torch_functional"], importlib.import_module(KERNEL)]
    function = modules[1].linear_cross_entropy
    megatron = ModuleType("verl.models.mcore.model_forward_fused")  # it needs Megatron; it imports by name
    megatron.linear_cross_entropy = function
    monkeypatch.setitem(sys.modules, megatron.__name__, megatron)
    undo = install()
    assert modules[0].FusedLinearForPPO is FusedLinearForPPO
    assert modules[1].linear_cross_entropy is megatron.linear_cross_entropy is linear_cross_entropy
    with pytest.raises(BackendError, match="installed already"):
        install()
    undo()
    undo()  # once more does nothing
    assert modules[0].FusedLinearForPPO is class_
    assert modules[1].linear_cross_entropy is megatron.linear_cross_entropy is function


def test_another_verl_is_refused(monkeypatch):
    class Other(torch.nn.Module):
        def forward(self, hidden_states, vocab_weights, input_ids): ...

    theirs("verl.utils.experimental.torch_functional", "FusedLinearForPPO")
    module = importlib.import_module(KERNEL)
    own = module.linear_cross_entropy
    monkeypatch.setattr("verl.utils.experimental.torch_functional.FusedLinearForPPO", Other)
    with pytest.raises(BackendError, match=r"takes \(hidden_states, vocab_weights, input_ids\).* verl==0\.9\.1"):
        install()
    monkeypatch.undo()
    monkeypatch.delattr(f"{KERNEL}.linear_cross_entropy")
    with pytest.raises(BackendError, match=r"made for verl 0\.9\.1.*is not there"):
        install()
    monkeypatch.undo()
    assert module.linear_cross_entropy is own


def test_mistakes():
    hidden, weight, labels = operands()
    for call, error, says in (
        (lambda: linear_cross_entropy(hidden, weight, labels, 1.0, "max"), ValueRangeError, "'none', 'sum' or 'mean'"),
        (lambda: linear_cross_entropy(hidden, weight, labels[:2]), ShapeError, r"\(3, 7\)"),
        (lambda: linear_cross_entropy(hidden, weight, labels, 0.0), ValueRangeError, "temperature"),
        (lambda: FusedLinearForPPO(impl_backend="cuda"), ValueRangeError, "'torch' or 'liger'"),
    ):
        with pytest.raises(error, match=says):
            call()
