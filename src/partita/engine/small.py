"""Small problems, where torch's dense operations take less time than the calls around a pass.

Only what is usual is served: ordinary tensors of one precision on the CPU, with the backend left to the library. All
give None for everything else, and for what needs the care of a pass: the caller then takes the general path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partita._checks import Reduction
from partita.engine import backends
from partita.engine.autograd import Back, Context, FastPath
from partita.exactness import in_exact_rows
from partita.precision import autocasts

__all__ = ["attention", "pairs", "scores"]

_softmax_backward = torch._C._VariableFunctions._softmax_backward_data
_MATRIX = 1 << 14  # scores of a loss up to which this is quicker
_BATCH = 1 << 15  # scores of all heads together
_PAIRS = 1 << 20  # scores of a batch of pairs
_PRODUCT = 1 << 22  # multiplications from which a backend's product is used
_LEAST_NORM = 1e-12  # as in torch.nn.functional.normalize
_LEAST_MASS = 1e-12  # relative to the largest score of all; below it a row needs a maximum of its own


def _served(*tensors: Tensor) -> bool:
    first = tensors[0]
    alike = all(t.dtype == first.dtype and t.is_cpu for t in tensors)
    return (
        alike
        and first.dtype in (torch.float32, torch.float64)
        and not autocasts("cpu")
        and backends.current() == "auto"
        and not in_exact_rows()  # torch's products know their shapes
    )


def scores(query: Tensor, key: Tensor, scale: float | Tensor = 1.0) -> Tensor | None:  # (n, D), (K, D) to (n, K)
    """scale * <query_i, key_j>; None for the pass."""
    if torch.compiler.is_compiling() or not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        return None
    if query.dim() != 2 or key.dim() != 2 or not 0 < query.shape[0] * key.shape[0] <= _MATRIX:
        return None
    given = (query, key, scale if isinstance(scale, Tensor) else None)
    if query.shape[1] != key.shape[1] or Context.of(given).traced or not _served(query, key):
        return None
    return torch.mm(query if type(scale) is float and scale == 1.0 else scale * query, key.t())


def pairs(
    query: Tensor,  # (n, D)
    key: Tensor,  # (n, D)
    scale: float | Tensor,  # one for all
    normalize: bool,
    symmetric: bool,
    reduction: Reduction,
    again: Callable[[Tensor, Tensor, Tensor | None], Tensor],  # the same by a pass; a number as scale is None
) -> Tensor | None:  # () or (n,)
    """-log p(i|i) of key i for query i, symmetric: its mean with that of query i for key i; None for the pass.

    One exponential of each score serves rows and columns, as long as no sum is too far below the largest score:

        e_ij = exp(s_ij - max s)    R_i = sum_j e_ij    C_j = sum_i e_ij
    """
    n, sharp = len(query), scale if isinstance(scale, Tensor) else None
    if torch.compiler.is_compiling() or not 0 < n * n <= _PAIRS or not query.shape[1]:
        return None
    given = (query, key) if sharp is None else (query, key, sharp)
    if (sharp is not None and sharp.numel() != 1) or Context.of(given).traced or not _served(*given):
        return None

    def make(_: Sequence[bool]) -> tuple[Tensor, Back] | None:
        unit, norm, q, k = None, None, query, key
        if normalize:
            unit = torch.stack((query, key))
            norm = torch.linalg.vector_norm(unit, dim=2, keepdim=True).clamp_min_(_LEAST_NORM)
            q, k = unit.div_(norm).unbind()
        s = query.new_empty(n, n)
        _product(q * scale, k, s)
        own, top = s.diagonal().clone(), s.amax()
        e = s.sub_(top).exp_()
        row = least = mass = e.sum(1)
        column = None
        if symmetric:
            column = e.sum(0)
            least, mass = torch.minimum(row, column), (row * column).sqrt_()
        if not least.amin().item() > _LEAST_MASS:  # nan too
            return None
        nll: Tensor = mass.log().add_(top - own).clamp_min_(0.0)
        out = nll if reduction == "none" else nll.mean() if reduction == "mean" else nll.sum()
        share, number = 1.0 / n if reduction == "mean" else 1.0, scale if sharp is None else None
        return out, functools.partial(_back_of_pairs, (unit, norm, e, row, column), number, share)

    found: Tensor = FastPath.apply(make, again, query, key, sharp)  # type: ignore[no-untyped-call]
    return found


def attention(
    query: Tensor,  # (*b, Q, D)
    key: Tensor,  # (*b, K, D)
    value: Tensor,  # (*b, K, V)
    scale: float,
    causal: bool,
    again: Callable[[Tensor, Tensor, Tensor], Tensor],  # the same by a pass
) -> Tensor | None:
    """E[value_j] of each row; None for the pass."""
    q, k, v = query.shape, key.shape, value.shape
    size = q[:-1].numel() * k[-2]
    if not 0 < size <= _BATCH or q[:-2] != k[:-2] or k[:-1] != v[:-1] or q[-1] != k[-1] or not v[-1] or not q[-1]:
        return None
    if not _served(query, key, value):
        return None
    hidden = _later(q[-2], k[-2]) if causal and k[-2] > 1 else None

    def make(_: Sequence[bool]) -> tuple[Tensor, Back] | None:
        s = torch.bmm(query.flatten(0, -3) * scale, key.flatten(0, -3).mT)
        p = torch.softmax(s if hidden is None else s.masked_fill(hidden, -torch.inf), -1)
        out = torch.bmm(p, value.flatten(0, -3))
        if not math.isfinite((s.sum() + out.sum()).item()):
            return None  # what a hidden key may have spoiled: 0 * nan is nan
        return out.view(*q[:-1], v[-1]), functools.partial(_back, p, scale)

    found: Tensor = FastPath.apply(make, again, query, key, value)  # type: ignore[no-untyped-call]
    return found


@functools.lru_cache(maxsize=64)
def _later(n_query: int, n_key: int) -> Tensor:
    """Keys that come after a row."""
    with torch.inference_mode(False):
        return torch.ones(n_query, n_key, dtype=torch.bool, device="cpu").triu_(1)


def _back(p: Tensor, scale: float, given: Any, needed: Sequence[bool], above: Any) -> list[Tensor | None]:
    """Gradients of plain attention from all its weights."""
    query, key, value = given
    q, k, v, upstream = query.flatten(0, -3), key.flatten(0, -3), value.flatten(0, -3), above[0].flatten(0, -3)
    found: list[Tensor | None] = [None, None, None]
    if needed[0] or needed[1]:
        ds = _softmax_backward(torch.bmm(upstream, v.mT), p, -1, p.dtype)
        if needed[0]:
            found[0] = torch.bmm(ds, k).mul_(scale).view_as(query)
        if needed[1]:
            found[1] = torch.bmm(ds.mT, q).mul_(scale).view_as(key)
    if needed[2]:
        found[2] = torch.bmm(p.mT, upstream).view_as(value)
    return found


def _back_of_pairs(
    known: Sequence[Any], number: Any, share: float, given: Any, needed: Sequence[bool], above: Any
) -> list[Tensor | None]:
    """dL/ds_ij = e_ij (g_i / R_i + g_j / C_j) / 2 - g_i [i = j], and what follows from it."""
    (unit, norm, e, row, column), (query, key, sharp) = known, given
    g = share * above[0]
    if column is None:
        ds = e * (g / row)[:, None]
    else:
        half = 0.5 * g
        ds = torch.add((half / row)[:, None], half / column).mul_(e)
    ds.diagonal().sub_(g)
    q, k = (query, key) if unit is None else unit.unbind()
    grads = e.new_empty(2, *query.shape)
    down, across = grads.unbind()
    _product(ds, k.t(), down) if needed[0] or needed[2] else down.zero_()
    _product(ds.t(), q.t(), across) if needed[1] else across.zero_()
    scale = number if sharp is None else sharp
    sharpness = torch.sum(down * q).view_as(sharp) if needed[2] else None
    if norm is None:
        grads.mul_(scale)
    else:  # what is along a unit vector changes its length alone, which counts where it is below the least
        along = torch.sum(grads * unit, 2, keepdim=True).mul_(norm > _LEAST_NORM)
        grads.addcmul_(unit, along, value=-1.0).mul_(scale / norm)
    return [down if needed[0] else None, across if needed[1] else None, sharpness]


def _product(query: Tensor, key: Tensor, out: Tensor) -> None:  # (n, D), (K, D), (n, K)
    if query.numel() * len(key) >= _PRODUCT:
        for entry in backends.candidates():
            if entry.product is not None and entry.product(query, key, out):
                return
    torch.mm(query, key.t(), out=out)
