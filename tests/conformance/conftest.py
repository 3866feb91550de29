"""What the conformance suite does not ask of a backend, with the reason: everything else is asked of every one.

Triton's interpreter takes some milliseconds for every operation of a kernel, so a test that calls a pass hundreds of
times is left out where the same thing is compared directly.
"""

from __future__ import annotations

import os

import pytest

DIRECTLY = (
    "finite differences take some ten passes, 5 s a test in the interpreter; tests/triton compares the same "
    "gradients, over several tiles, with those of the dense backend, which this test has checked"
)
SECOND = "second derivatives are those of the tiled backend whatever backend serves the pass: no kernel runs"
SEARCHES = (
    "hundreds of searches of some forty passes each, minutes in the interpreter; the search and its derivative are "
    "code above every backend, and the same is asked without a bias"
)

LEFT_OUT = {
    "triton": {
        "test_first_order_under_every_support": DIRECTLY,
        "test_first_order_with_broadcast_operands": DIRECTLY,
        "test_second_order": SECOND,
        "test_second_order_in_a_batch_with_shared_keys": SECOND,
        "test_the_weighted_nll_has_second_derivatives": SECOND,
        "test_the_implicit_gradient_under_a_bias": SEARCHES,
    }
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where PARTITA_BACKEND names a backend, its tests that are left out are skipped with their reason."""
    reasons = LEFT_OUT.get(os.environ.get("PARTITA_BACKEND", ""), {})
    for item in items:
        reason = reasons.get(getattr(item, "originalname", item.name)) if "conformance" in item.nodeid else None
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
