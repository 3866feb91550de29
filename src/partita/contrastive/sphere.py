"""How embeddings are spread over the sphere: positives near each other, everything else spread out.

    alignment  = E_pairs |x - y|^a                     small is good
    uniformity = log E_{i != j} exp(-t |x_i - x_j|^2)  small is good; between -4t and 0

Both are defined for unit vectors only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita import _checks
from partita import support as supports
from partita.contrastive.candidates import check_pairs, prepare
from partita.engine import State
from partita.errors import ShapeError, ValueRangeError
from partita.gibbs import Gibbs
from partita.precision import log_of
from partita.rows import reduce_rows

__all__ = ["alignment", "uniformity"]


def alignment(x: Tensor, y: Tensor, *, power: float = 2.0, normalize: bool = True) -> Tensor:  # (n, dim), (n, dim)
    """Mean distance of positives, to a power; 0 if both views agree, at most 2^power.

    >>> alignment(torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]]))  # opposite points: |x - y|^2 = 4
    tensor(4.)
    """
    check_pairs(x, y, ("x", "y"))
    _checks.check_positive("power", power)
    a, b = _unit("x", x, normalize), _unit("y", y, normalize)
    distance: Tensor = torch.linalg.vector_norm(a - b, dim=-1)
    return reduce_rows(distance.pow(power), "mean")


def uniformity(x: Tensor, *, sharpness: float = 2.0, normalize: bool = True) -> Tensor:  # (n, dim)
    """Log of the mean Gaussian potential between different vectors: a log-partition, so it streams.

        -2t + log( sum_i Z_i / (n (n - 1)) ),      Z_i = sum_{j != i} exp(2t <x_i, x_j>)

    >>> uniformity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))  # two opposite points: -4t
    tensor(-8.)
    """
    _checks.check_float("x", x)
    _checks.check_positive("sharpness", sharpness)
    if x.dim() != 2 or len(x) < 2:
        raise ShapeError(f"x must hold at least two vectors, (n, dim); got {_checks.shape_text(x)}.")
    unit, n = _unit("x", x, normalize), len(x)
    rows = Gibbs(unit, unit, scale=2 * sharpness, support=supports.not_self()).log_partition()
    total = State.of(rows[None]).log_partition()[0]
    return (total - log_of(n * (n - 1), x.device) - 2 * sharpness).to(x.dtype)


def _unit(name: str, vectors: Tensor, normalize: bool) -> Tensor:
    """Vectors of length 1: the formulas are only true for those."""
    if not normalize and _checks.has_values(vectors) and vectors.numel():
        raised = vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32))
        worst = float((torch.linalg.vector_norm(raised, dim=-1) - 1).abs().max())
        if not worst <= 16 * torch.finfo(vectors.dtype).eps ** 0.5:
            raise ValueRangeError(
                f"{name} must hold unit vectors; a length differs from 1 by {worst:.3g}. "
                f"Normalise them (F.normalize), or pass normalize=True."
            )
    return prepare(name, vectors, normalize)
