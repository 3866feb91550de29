"""What a call does on the host: what it launches and allocates, and whether it waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partita
from tests.ptx.cases import normal, served
from tests.ptx.device import Device, executing

S = partita.support
BF = torch.bfloat16
PASS, BACK = ["forward", "(forward)"], ["rows", "(rows)", "keys", "(keys)"]


def operands(n_query: int = 20, n_key: int = 70) -> list[torch.Tensor]:
    return [normal(2, n, 64, seed=n, dtype=BF).requires_grad_() for n in (n_query, n_key, n_key)]


def attends(**options: Any) -> Any:
    return partita.attention(*operands(), **options)


def differentiates(**options: Any) -> Any:
    q, k, v = operands()
    return torch.autograd.grad(partita.attention(q, k, v, **options).sum(), (q, k, v))


def biased() -> Any:
    q, k, v = operands()
    bias = torch.zeros(20, 70, requires_grad=True)
    mean, _ = partita.Gibbs(q, k, bias=bias).mean(v)
    return torch.autograd.grad(mean.sum(), (q, k, v, bias))


def decodes() -> Any:
    return partita.attention(*operands(1, 600))


def classifies() -> Any:
    hidden, weight = (normal(n, 64, seed=n, dtype=BF).requires_grad_() for n in (20, 70))
    loss = partita.linear_cross_entropy(hidden, weight, torch.arange(20))
    return torch.autograd.grad(loss, (hidden, weight))


def contrasts() -> Any:
    images, texts = (normal(40, 64, seed=n, dtype=BF).requires_grad_() for n in (1, 2))
    return torch.autograd.grad(partita.clip_loss(images, texts, torch.tensor(1.0)), (images, texts))


# What is launched, how many results are allocated for kernels (flags among them), and how often the host reads.
CALLS = {
    "statistics alone": (lambda: partita.Gibbs(*operands()[:2]).stats(), ["forward"], 6, 0),
    "attention": (attends, PASS, 5, 0),
    "attention with statistics": (lambda: attends(return_stats=True), PASS, 8, 0),
    "attention, causal": (lambda: attends(is_causal=True), PASS, 5, 0),
    "its gradients": (differentiates, PASS + BACK, 5 + 5, 0),
    "its gradients, causal": (lambda: differentiates(is_causal=True), PASS + BACK, 5 + 5, 0),
    "with those of a dense bias": (biased, [*PASS, *BACK, "pairs"], 8 + 6, 0),
    "decoding": (decodes, [*PASS, "merge"], 4 + 4 + 1, 0),
    "a classifier's loss": (classifies, ["row_sums", "gradient"], None, 1),
    "a contrast": (contrasts, ["row_sums", "column_sums", "gradient"], None, 1),
}  # fmt: skip


def ran(call: Any) -> Device:
    with executing() as device, partita.backend("triton"):
        call()
    return device


@pytest.mark.parametrize("name", CALLS)
def test_launches_allocations_and_reads_of_a_call(name):
    """A loss reads one number, whether everything was finite; a pass leaves a flag to the careful kernel instead."""
    call, kernels, allocations, reads = CALLS[name]
    device = ran(call)
    assert served(device) == kernels
    assert len(device.host_reads) == reads
    if allocations is not None:
        assert len(device.allocated) == allocations
        used = {t.data_ptr() for x in device.launches for t in x.tensors}
        assert {t.data_ptr() for t in device.allocated} <= used  # nothing that no kernel gets


def test_the_same_call_again_makes_no_table_again():
    """Where batch entries begin is looked up once: the second call allocates results, and nothing else."""
    made = []
    for _ in range(2):
        device = ran(differentiates)
        made.append((device.made, len(device.allocated)))
    assert made[0][1] == made[1][1] and made[1][0] <= made[0][0]
    tables = [x.tensors for x in device.launches if x.name == "forward"]
    assert tables[0][-1] is not None


def test_a_careful_kernel_returns_at_once_where_nothing_asks_for_it():
    device = ran(differentiates)
    careful = [x for x in device.launches if x.constants["CAREFUL"]]
    assert len(careful) == 3
    for x in careful:
        usual = next(y for y in device.launches if y.name == x.name)
        assert x.instructions < 40 < 500 < usual.instructions


def test_no_kernel_runs_twice_where_no_value_can_be_nan():
    """Without a value there is no product that 0 * nan could spoil: a pass of statistics is one launch."""
    device = ran(lambda: partita.Gibbs(*operands()[:2], support=S.causal()).entropy())
    assert served(device) == ["forward"]
