"""One partition function over several banks of keys."""

from __future__ import annotations

import functools

from torch import Tensor

from partita import _checks
from partita.engine import State
from partita.errors import ShapeError
from partita.rows import reduce_rows

__all__ = ["joint_loss"]


def joint_loss(positive: Tensor, *states: State, reduction: str = "mean") -> Tensor:  # (n,)
    """-log of the positive's share among the keys of all states, its own included: banks, queues, other directions.

        loss_i = log( sum over banks Z_i ) - positive_i

    The positive must be among the keys of one of the states.

    >>> import partita
    >>> half = partita.State.of(torch.zeros(1, 2))
    >>> joint_loss(torch.zeros(1), half, half)  # log 4
    tensor(1.3863)
    """
    _checks.check_reduction(reduction)
    if not states:
        raise ShapeError("joint_loss needs at least one state.")
    return reduce_rows(functools.reduce(State.merge, states).log_partition() - positive, reduction)
