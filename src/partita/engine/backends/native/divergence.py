"""Two distributions over the same keys, on the native library: a chunk of both score matrices at a time.

The scores of a chunk of rows are made, turned into the rows' divergences and, where their weights are known, into the
gradients of the scores, which two more products carry on: four products for one side's gradients, six for both, and
nothing of size Q * K held. Legend: Q rows, K keys, D features. Nothing here is differentiable.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from partita._checks import broadcast
from partita.engine.backends.native import library
from partita.engine.backends.native.call import CODES, CPU, at, block, check_memory
from partita.engine.backends.native.losses import workspace, write_logits
from partita.engine.backends.protocol import Gradients, Needs
from partita.engine.divergences import KINDS, Record
from partita.engine.request import Request
from partita.engine.sums import OPERANDS
from partita.engine.terms import cut, window_mask

__all__ = ["divergences"]

_CHUNK_BYTES = 16 << 20  # of both score matrices at a time, where a key is read once for all rows of a chunk
_CACHED_BYTES = 2 << 20  # where all keys fit into a cache, so do the scores
_SMALL_KEYS = 1 << 19  # bytes
_FEW = 32  # batch entries, which are gone through one by one
_SMALL = 1 << 12  # scores of an entry that is not worth it where there are many


class _Side:
    """One distribution's numbers in the dtype of the sums, spread over all batch entries, and its gradients."""

    def __init__(self, x: Request, batch: tuple[int, ...], needs: Needs, acc: torch.dtype):
        self.x, self.batch = x, batch
        self.query, key = check_memory(x.query, "query").to(acc), check_memory(x.key, "key").to(acc)
        plain = x.scale.numel() == 1 and float(x.scale) == 1.0
        self.scale = None if plain else x.scale[..., None]
        self.scaled = self.spread(self.query if plain else self.query * x.scale[..., None])
        self.key = self.spread(key)
        self.bias = None if x.bias is None else self.spread(check_memory(x.bias, "bias").to(acc))
        self.by_class = x.bias is not None and x.bias.shape[-2] == 1 and x.bias.shape[-1] > 1
        by_interval = len(x.terms) == 1 and x.terms[0].is_interval
        bounds = x.terms[0][:2] if by_interval else (None, None)
        self.start, self.stop = (None if t is None else t.expand(*batch, t.shape[-1]) for t in bounds)
        self.masked = bool(x.terms) and not by_interval
        given = zip(OPERANDS, needs, strict=True)
        self.needs = {name for name, need in given if need and name != "value" and getattr(x, name) is not None}
        # "toward": d / d (scale * query) of every entry, since a scale may differ where a query is shared
        shapes = {
            "toward": (*batch, *x.query.shape[-2:]),
            "key": x.key.shape,
            "bias": x.bias is not None and x.bias.shape,
        }
        wanted = self.needs | ({"toward"} if self.needs & {"query", "scale"} else set())
        self.made = {name: key.new_zeros(shapes[name]) for name in shapes if name in wanted}
        self.places = {name: self.spread(t) for name, t in self.made.items()}

    def spread(self, matrices: Tensor) -> Tensor:
        """One for each batch entry, as views."""
        return matrices.expand(*self.batch, *matrices.shape[-2:])

    def mask(self, rows: slice, n_key: int) -> Tensor | None:
        """What a chunk of rows sees, where that is more than an interval; a union is written out for it."""
        shown = window_mask(self.x.terms, rows, slice(0, n_key), torch.device(CPU)) if self.masked else None
        return None if shown is None else shown.expand(*self.batch, rows.stop - rows.start, n_key)

    def reach(self, entry: tuple[int, ...], rows: slice, n_key: int) -> tuple[int, int]:
        """The first key that any of the rows sees, and one past the last."""
        low = 0 if self.start is None else int(self.start[entry][rows].min())
        high = n_key if self.stop is None else int(self.stop[entry][rows].max())
        return max(0, low), min(n_key, high)

    def bounds(self, entry: tuple[int, ...], rows: slice, first: int) -> list[Tensor | None]:
        """The intervals of the rows, counted from the first key."""
        n, both = rows.stop - rows.start, (self.start, self.stop)
        return [None if t is None else (t[entry][rows] - first).to(torch.int32).expand(n).contiguous() for t in both]

    def class_bias(self, entry: tuple[int, ...], keys: slice) -> Tensor | None:
        return self.bias[entry][0, keys].contiguous() if self.bias is not None and self.by_class else None

    def write_scores(self, entry: tuple[int, ...], rows: slice, keys: slice, seen: Tensor | None, to: Tensor) -> None:
        write_logits(self.scaled[entry][rows].contiguous(), self.key[entry][keys], to)
        if self.bias is not None and not self.by_class:
            to += cut(self.bias[entry], rows, keys)
        if seen is not None:
            to.masked_fill_(~seen[entry][:, keys], -math.inf)

    def add(self, entry: tuple[int, ...], rows: slice, keys: slice, ds: Tensor) -> None:
        """Carry the gradient of some scores on to the operands."""
        if "toward" in self.places:
            torch.mm(ds, self.key[entry][keys], out=self.places["toward"][entry][rows])
        if "key" in self.places:
            self.places["key"][entry][keys].addmm_(ds.t(), self.scaled[entry][rows])
        if "bias" in self.places:
            own = cut(self.places["bias"][entry], rows, keys)
            own += ds.sum_to_size(own.shape)

    def gradients(self) -> dict[str, Tensor]:
        toward = self.made.pop("toward", None)
        if toward is not None and "scale" in self.needs:
            self.made["scale"] = (toward * self.query).sum(-1).sum_to_size(self.x.scale.shape)
        if toward is not None and "query" in self.needs:
            whole = toward if self.scale is None else toward.mul_(self.scale)
            self.made["query"] = whole.sum_to_size(self.query.shape)
        return self.made


def divergences(
    p: Request,
    q: Request,
    kind: str,
    beta: float,
    weight: Tensor | None,  # (*b, Q), accumulation dtype; None: no gradients
    needs: tuple[Needs, Needs],
) -> tuple[Record, Gradients, Gradients] | None:
    """The record of every row, and the gradients of sum_i weight_i divergence_i; None: no kernel, or one not finite."""
    batch, n_query, n_key, acc = broadcast(p.batch, q.batch), p.n_query, p.n_key, p.dtype
    tiny = math.prod(batch) > _FEW and n_query * n_key < _SMALL
    if tiny or p.softcap is not None or q.softcap is not None:
        return None
    nothing = (False,) * len(OPERANDS)
    sides = [_Side(x, batch, nothing if weight is None else n, acc) for x, n in zip((p, q), needs, strict=True)]
    record = torch.empty((6, *batch, n_query), dtype=acc, device=CPU)
    if not record.numel() or not n_key:
        record.zero_()[[0, 2]] = -math.inf  # both peaks
        return Record(*record.unbind()), sides[0].gradients(), sides[1].gradients()
    keys_fit = max(side.key.shape[-1] for side in sides) * n_key * acc.itemsize <= _SMALL_KEYS
    budget = _CACHED_BYTES if keys_fit else _CHUNK_BYTES
    chunks = min(n_query, max(1, -(-n_query * n_key * 2 * acc.itemsize // budget)))
    height = -(-n_query // chunks)
    given = None if weight is None else block(weight, "weight", (*batch, n_query), acc)
    with workspace(2 * height, n_key, acc) as matrix:
        for k in range(chunks):
            rows = slice(n_query * k // chunks, n_query * (k + 1) // chunks)
            n = rows.stop - rows.start
            seen = [side.mask(rows, n_key) for side in sides]
            for entry in itertools.product(*map(range, batch)):
                reach = [side.reach(entry, rows, n_key) for side in sides]
                keys = slice(min(low for low, _ in reach), max(high for _, high in reach))
                if keys.stop <= keys.start:  # no row sees a key: one that is hidden stands for all
                    keys = slice(0, 1)
                width = keys.stop - keys.start
                scores = [matrix[:n, :width], matrix[height : height + n, :width]]
                for side, mask, to in zip(sides, seen, scores, strict=True):
                    side.write_scores(entry, rows, keys, mask, to)
                bias = [side.class_bias(entry, keys) for side in sides]
                bounds = [t for side in sides for t in side.bounds(entry, rows, keys.start)]
                share = None if given is None else given[entry][rows]
                packed = library.DIVERGENCE_ROWS.pack(
                    n, width, scores[0].stride(0), scores[1].stride(0), record[0].numel(),
                    CODES[acc], torch.get_num_threads(), KINDS.index(kind), *(bool(x.needs) for x in sides), 0, beta,
                    *at(*scores, *bias, *bounds, share, record.movedim(0, -1)[entry][rows]),
                )  # fmt: skip
                if not library.run("divergence_rows", packed):
                    return None
                for side, ds in zip(sides, scores, strict=True):
                    if side.needs:
                        side.add(entry, rows, keys, ds)
    grads = [side.gradients() for side in sides]
    # a nan in a key that no row sees has met a gradient of 0 in the products
    hidden = p.terms or q.terms or p.bias is not None or q.bias is not None
    if hidden and not all(bool(x.sum().isfinite()) for found in grads for x in found.values()):
        return None
    return Record(*record.unbind()), grads[0], grads[1]
