"""Dropout on attention weights, exact, without holding the mask.

    out_i = 1/(1-p) * sum_j keep_ij p(j|i) value_j          P(keep_ij) = 1 - p

A dropped key keeps its place in the denominator and loses its value. So it is two states of disjoint keys, of which
only one has a moment, merged: the statistics of the merge are those before dropout. The mask of a block of rows is
remade from a seed in the backward pass; the seed is drawn from torch's own generator.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from partita import support as supports
from partita._checks import check_no_generator
from partita.attn.problem import Problem
from partita.attn.rows import states_by_rows
from partita.engine import State
from partita.errors import ValueRangeError

__all__ = ["check_dropout", "draw_seed", "state_with_dropout"]


def check_dropout(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueRangeError(f"dropout_p must be a probability between 0 and 1; got {p!r}.")


def state_with_dropout(problem: Problem, value: Tensor, p: float) -> State:
    """The state of all keys, whose moment has lost the dropped values and makes up for them on average."""
    problem = problem.resolved()
    batch = problem.batch(value)
    seed = draw_seed(value.device)

    def run(rows: slice) -> State:
        kept = _mask((*batch, rows.stop - rows.start, problem.n_key), p, seed, rows.start, value.device)
        loud = problem.rows(rows, supports.mask(kept)).state(value)
        silent = problem.rows(rows, supports.mask(~kept)).state()
        assert loud.moment is not None
        whole = loud.merge(replace(silent, moment=torch.zeros_like(loud.moment)))
        assert whole.moment is not None
        return replace(whole, moment=whole.moment * (1 / (1 - p) if p < 1 else 0.0))

    return states_by_rows(run, problem.blocks(value))


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> int | None:
    """A seed from torch's generator of that device, so that torch.manual_seed governs what follows.

    None while tracing: a graph has no seed to remember, it replays torch's own random numbers.
    """
    if torch.compiler.is_compiling():
        check_no_generator(generator)
        return None
    return int(torch.randint(1 << 62, (), device=device, generator=generator).item())


def _mask(shape: tuple[int, ...], p: float, seed: int | None, first: int, device: torch.device) -> Tensor:
    if seed is None:
        return torch.rand(shape, dtype=torch.float32, device=device) >= p
    source = torch.Generator(device).manual_seed(seed + first)
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - p, generator=source)
