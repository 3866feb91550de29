"""What torch's default device and default dtype are changes nothing: every call gives the same bits."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest
import torch

import partita
from tests import surface

SOURCE = Path(partita.__file__).parent
FACTORIES = {
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
    "zeros",
}  # fmt: skip
WHOLE = {"arange", "randint", "randperm"}  # whole numbers, whatever the default
# Modules make their parameters where the default says, as torch does; cli and monitor are programs of their own.
MAY_FOLLOW_THE_DEFAULT = ("nn", "cli", "monitor", "distributed", "adapters")


@pytest.mark.parametrize("name", surface.CALLS)
def test_the_defaults_change_no_bit(name):
    ordinary = surface.run(name)
    assert ordinary or name == "measure_sigma"
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            found = surface.run(name)
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same_bits(found, ordinary, dtype)
    with torch.device("meta"):
        found = surface.run(name)
    assert_same_bits(found, ordinary, "meta")


def assert_same_bits(found, ordinary, default):
    assert len(found) == len(ordinary), default
    for ours, want in zip(found, ordinary, strict=True):
        assert ours.device == want.device and ours.dtype == want.dtype, default
        torch.testing.assert_close(ours, want, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{default}: {m}")


# Kinds of things, contexts, programs, what writes into the parameters of a module; and what makes a tensor out of
# nothing, which follows the defaults as torch does.
NO_CALLS = {
    "BestScale", "Bias", "ClassStats", "ContrastStats", "Exclusion", "InformationBound", "LabelStats",
    "LinearState", "LossStats", "OtherLabel", "PairHook", "Policy", "Positions", "State", "Stats", "Support",
    "TopK", "WeightStats", "alibi_slopes", "backend", "backends", "best_for", "entropy_loss", "exact_rows", "explain",
    "init_sharpness_", "load_record", "qk_clip_", "replace_sdpa", "sinusoidal", "validate", "watch",
}  # fmt: skip


def test_every_public_function_is_among_the_calls():
    tree = ast.parse(Path(surface.__file__).read_text())
    told = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    told |= {word for node in ast.walk(tree) if isinstance(node, ast.Constant) for word in str(node.value).split()}
    for module in (partita, partita.attn, partita.contrastive, partita.metrics, partita.nn, partita.scale):
        public = {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}
        assert public - NO_CALLS <= told, f"tests/surface.py does not call these of {module.__name__}"
    reads = {name for name in dir(partita.Gibbs) if not name.startswith("_")} - {"asking", "reduce", "request", "scale"}
    assert reads <= told
    assert set(partita.support.__all__) - {"Support"} <= told


def test_a_policy_counts_in_the_precision_of_the_query():
    n, policy = torch.arange(1, 40), partita.scale.LogLength(reference=16)
    query = torch.ones(39, 8, dtype=torch.float64)
    exact = policy(n.double(), 8)
    assert torch.equal(policy.fold(query, n)[:, 0], exact)
    assert policy(n, 8).dtype == torch.float32


def _parts() -> list[Path]:
    free = [SOURCE / name for name in MAY_FOLLOW_THE_DEFAULT]
    return [p for p in SOURCE.rglob("*.py") if not [1 for place in free if p.is_relative_to(place)]]


@pytest.mark.parametrize("path", _parts(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_tensor_names_its_device_and_dtype(path):
    """Under a default device of "meta" a forgotten one is an error, or worse: a null pointer given to a kernel.

    A default of bfloat16 leaves eight bits of what forgot its dtype, as the random numbers of a mask.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if of_torch and node.func.attr in FACTORIES:
            given = {word.arg for word in node.keywords}
            needed = {"device"} if node.func.attr in WHOLE else {"device", "dtype"}
            assert needed <= given or None in given, f"{path.name}:{node.lineno} torch.{node.func.attr}"
        # sinusoidal makes a tensor out of nothing: computed in float64, given in the dtype torch would give it in
        assert node.func.attr != "get_default_dtype" or path.name == "positions.py", f"{path.name}:{node.lineno}"
