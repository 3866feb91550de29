"""Whole losses on a GPU: a classifier's cross entropy in three products, a symmetric contrast in four.

    sum_i weight_i nll_i       nll_i = log Z_i - s_i,target       s_ij = scale_i <query_i, key_j> + bias_j

A chunk of rows at a time: torch makes its logits in the dtype of the sums and multiplies its gradient, kernels make the
sums and the gradient. Nothing of size Q * K is held, and the products are those of the vendor's library. Nothing is
added in an order that could change: the same bits each time.
Legend: Q rows, K keys (classes), D features, n rows of a chunk. Nothing here is differentiable.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.engine.backends.protocol import BothWays, Gradients, Needs
from partita.engine.request import Request
from partita.engine.sums import Sums
from partita.precision import accumulation_dtype, no_autocast

__all__ = ["BOTH_WAYS", "both_ways", "both_ways_backward", "weighted_nll"]

_CHUNK_BYTES = 256 << 20  # of logits: 512 rows of 128k classes, enough rows for a product at full speed
_BAND = 8192  # keys whose gradient is added at a time, where it is summed in more digits than it is multiplied in
# Work of a program. All kernels here are bound by memory: 16 numbers for each of 128 threads are enough in flight.
_ROW_COLUMNS = 2048  # of a row at a time
_TILE_ROWS, _TILE_COLUMNS = 16, 128  # of column sums and of a gradient


def _kernels() -> Any:
    return importlib.import_module("partita.engine.backends.triton.kernels.losses")  # imports triton


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the dtype of the sums, not rounded to that of half operands."""
    if accumulation_dtype(a.dtype) == a.dtype:
        return torch.mm(a, b)
    if a.device.type == "cpu":  # the interpreter's stand-in for a device
        return torch.mm(a.float(), b.float())
    out: Tensor = torch.mm(a, b, out_dtype=torch.float32)
    return out


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, for a total in the dtype of the sums."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
        return
    for start in range(0, total.shape[0], _BAND):  # a band at a time: the product needs memory of its own
        total[start : start + _BAND] += _wide(a[start : start + _BAND], b)


def _finite(mass: Tensor, score: Tensor) -> bool:
    return bool((mass.isfinite() & score.isfinite()).all())


@dataclass(frozen=True, eq=False)
class _Loss:
    """The operands, laid out for the kernels, and what is made of each chunk of their logits."""

    query: Tensor  # (Q, D)
    key: Tensor  # (K, D)
    scale: Tensor  # (Q,), as the bias in the dtype of the sums
    bias: Tensor | None  # (K,)
    target: Tensor  # (Q,) int64
    chunk_bytes: int

    @staticmethod
    def of(r: Request, chunk_bytes: int) -> _Loss:
        assert r.target is not None
        bias = None if r.bias is None else r.bias[0].to(r.dtype).expand(r.n_key).contiguous()
        scale = r.scale.expand(r.n_query).contiguous()
        return _Loss(r.query, r.key, scale, bias, r.target.contiguous(), chunk_bytes)

    def each_chunk(self, work: Callable[[slice, Tensor], None]) -> None:
        """work(rows, logits) for one chunk after the other; the logits are its own, and gone when it returns."""
        n, K = len(self.query), len(self.key)
        chunks = min(n, max(1, -(-n * K * self.scale.itemsize // self.chunk_bytes)))
        for k in range(chunks):
            rows = slice(n * k // chunks, n * (k + 1) // chunks)
            work(rows, _wide(self.query[rows], self.key.t()))

    def empty_sums(self) -> list[Tensor]:
        """Peak and mass of every row, nan where a logit is not finite, and the target's score."""
        return [torch.empty_like(self.scale) for _ in range(3)]

    def row_sums(self, logits: Tensor, rows: slice, out: Sequence[Tensor]) -> None:
        n, K = logits.shape
        bias, own = self.scale if self.bias is None else self.bias, [x[rows] for x in out]
        _kernels().row_sums[(n,)](
            logits, self.scale[rows], bias, self.target[rows], *own, K, logits.stride(0),
            HAS_BIAS=self.bias is not None, COLUMNS=_ROW_COLUMNS, num_warps=4,
        )  # fmt: skip

    def column_sums(self, logits: Tensor, peak: Tensor, mass: Tensor) -> None:
        n, K = logits.shape
        _kernels().column_sums[(-(-K // _TILE_COLUMNS),)](
            logits, self.scale, peak, mass, n, K, logits.stride(0),
            ROWS=_TILE_ROWS, COLUMNS=_TILE_COLUMNS, num_warps=4,
        )  # fmt: skip

    def gradient(
        self, logits: Tensor, rows: slice, peak: Tensor, g_mass: Tensor, g_score: Tensor, columns: Sequence[Tensor] = ()
    ) -> Tensor:  # (n, K) in the dtype of the operands
        """ds of a chunk, in the place of its logits where the dtype allows."""
        n, K = logits.shape
        out = logits if self.query.dtype == logits.dtype else torch.empty_like(logits, dtype=self.query.dtype)
        bias = self.scale if self.bias is None else self.bias
        grid = (-(-n // _TILE_ROWS), -(-K // _TILE_COLUMNS))
        _kernels().gradient[grid](
            logits, self.scale[rows], bias, self.target[rows], peak, g_mass, g_score, *(columns or (peak, peak)), out,
            n, K, logits.stride(0), HAS_BIAS=self.bias is not None, HAS_COLUMNS=bool(columns),
            ROWS=_TILE_ROWS, COLUMNS=_TILE_COLUMNS, num_warps=4,
        )  # fmt: skip
        return out


class _Pull:
    """Gradients of the operands, from the ds of one chunk after the other."""

    def __init__(self, loss: _Loss, needs: Needs, unit: Tensor | None = None):
        need_query, need_key, _, need_scale, need_bias = needs
        self.loss, self.unit = loss, unit
        self.query = torch.empty_like(loss.query) if need_query else None
        self.key = torch.zeros_like(loss.key, dtype=loss.scale.dtype) if need_key else None
        self.scale = torch.empty_like(loss.scale) if need_scale else None
        self.bias = torch.zeros_like(loss.bias) if need_bias and loss.bias is not None else None

    def add(self, rows: slice, ds: Tensor) -> None:
        loss = self.loss
        query, sharp = loss.query[rows], loss.scale[rows, None]
        if self.query is not None or self.scale is not None:
            toward = self._in_full(_wide(ds, loss.key))
            if self.scale is not None:
                torch.sum(toward * query, 1, out=self.scale[rows])
            if self.query is not None:
                self.query[rows] = toward.mul_(sharp)
        if self.key is not None:
            _add_product(self.key, ds.t(), (query * sharp).to(ds.dtype))
        if self.bias is not None:
            self.bias += ds.sum(0, dtype=self.bias.dtype)

    def _in_full(self, grad: Tensor) -> Tensor:
        """A gradient with the factor that was kept out of ds."""
        return grad if self.unit is None else grad.mul_(self.unit)

    def by_name(self, r: Request) -> Gradients:
        """In the dtypes and shapes of the request."""
        found = {}
        if self.query is not None:
            found["query"] = self.query
        if self.key is not None:
            found["key"] = self._in_full(self.key).to(r.key.dtype)
        if self.scale is not None:
            found["scale"] = self.scale.sum_to_size(r.scale.shape)
        if self.bias is not None and r.bias is not None:
            found["bias"] = self._in_full(self.bias)[None].sum_to_size(r.bias.shape).to(r.bias.dtype)
        return found


def weighted_nll(
    request: Request, weight: Tensor, needs: Needs, *, chunk_bytes: int = _CHUNK_BYTES
) -> tuple[Tensor, Gradients] | None:
    """nll of every row, and the gradients of their weighted sum; None where that has no kernel or is not finite."""
    r = request
    flat = r.query.dim() == 2 and not r.terms and r.softcap is None and r.target is not None and r.target.dim() == 1
    if not flat or not r.n_query or (r.bias is not None and r.bias.shape[-2] != 1):
        return None
    with no_autocast(r.query):
        loss = _Loss.of(r, chunk_bytes)
        by_row = weight.to(r.dtype).expand(r.n_query)
        peak, mass, score = sums = loss.empty_sums()
        pull = _Pull(loss, needs)

        def work(rows: slice, logits: Tensor) -> None:
            loss.row_sums(logits, rows, sums)
            if any(needs):
                g = by_row[rows]
                pull.add(rows, loss.gradient(logits, rows, peak[rows], g / mass[rows], -g))

        loss.each_chunk(work)
        if not _finite(mass, score):
            return None
        return mass.log() + (peak - score), pull.by_name(r)


def both_ways(request: Request, *, chunk_bytes: int = _CHUNK_BYTES) -> tuple[Sums, Sums] | None:
    """Row and column sums of one product, and the scores of the diagonal; None where one is not finite."""
    r = request
    with no_autocast(r.query):
        loss = _Loss.of(r, chunk_bytes)
        peak, mass, score = sums = loss.empty_sums()
        columns = torch.full_like(peak, -torch.inf), torch.zeros_like(mass)

        def work(rows: slice, logits: Tensor) -> None:
            loss.row_sums(logits, rows, sums)
            loss.column_sums(logits, *columns)

        loss.each_chunk(work)
        if not _finite(mass, score):
            return None
        count = torch.full_like(mass, r.n_key)
        return Sums(peak, mass, count, target_score=score), Sums(*columns, count, target_score=score)


def both_ways_backward(
    request: Request,
    sums: Sequence[Tensor],  # peaks and masses of rows, of columns
    g: Sequence[Tensor],  # upstream of both nlls
    needs: Needs,
    *,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Gradients:
    """Gradients of both nlls: the logits once more, then one product for each side."""
    r = request
    peak, mass, column_peak, column_mass = sums
    down, across = (x.to(r.dtype) for x in g)
    # An upstream of 1/n times a probability is below what float16 can hold: it is kept out of ds, and comes back last.
    unit = torch.maximum(down.abs().amax(), across.abs().amax())
    unit = torch.where(unit == 0, 1.0, unit)
    down, across = down / unit, across / unit
    with no_autocast(r.query):
        loss = _Loss.of(r, chunk_bytes)
        pull, g_mass, g_score = _Pull(loss, needs, unit), down / mass, -(down + across)
        columns = (column_peak, across / column_mass)

        def work(rows: slice, logits: Tensor) -> None:
            pull.add(rows, loss.gradient(logits, rows, peak[rows], g_mass[rows], g_score[rows], columns))

        loss.each_chunk(work)
        return pull.by_name(r)


BOTH_WAYS = BothWays(both_ways, both_ways_backward)
