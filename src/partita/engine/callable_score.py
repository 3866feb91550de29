"""A score that is no inner product: a function of a tile of queries and a tile of keys, for the tiled backend.

    raw_ij = function(query_i, key_j)            s_ij = softcap(scale_i * raw_ij) + bias_ij

Parameters of a module are operands of the pass like query and key: the tiles of a backward pass add up their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from partita._checks import has_values, shape_text
from partita.engine.request import Request
from partita.engine.sums import PARAMETER
from partita.errors import DtypeError, ShapeError, ValueRangeError
from partita.precision import no_autocast

__all__ = ["Pairs", "compared", "written_out"]

_PROBE = 2  # rows and keys of the tile that is tried before anything is computed


@dataclass(frozen=True, eq=False)
class Pairs:
    """A function of tiles, and the tensors of its own that are differentiated."""

    function: Callable[[Tensor, Tensor], Tensor]
    names: tuple[str, ...] = ()
    parameters: tuple[Tensor, ...] = ()
    per_pair: int | None = None  # numbers the function holds for each pair; None: the number of features

    @staticmethod
    def of(score: Any) -> Pairs:
        """Those of a callable: a module is called with its parameters as arguments."""
        if not callable(score) or isinstance(score, type):
            cure = f" Make one of this class: {score.__name__}(...)." if isinstance(score, type) else ""
            raise DtypeError(
                f"score must be an object of partita.score or a callable (query, key) -> (..., q, k); "
                f"got {'the class ' + score.__name__ if cure else type(score).__name__}.{cure}"
            )
        function, many = getattr(score, "pairs", score), getattr(score, "per_pair", None)
        if not isinstance(function, nn.Module):
            return Pairs(function, per_pair=many)
        named = {name: p for name, p in function.named_parameters() if p.is_floating_point()}
        return Pairs(function, tuple(named), tuple(named.values()), many)

    def __call__(self, query: Tensor, key: Tensor, parameters: Sequence[Tensor] | None = None) -> Tensor:
        """Raw scores (..., q, k) of tiles that are in the accumulation dtype, as the parameters then are."""
        own = self.parameters if parameters is None else parameters
        as_is = parameters is None and all(p.dtype == query.dtype for p in own)
        with no_autocast(query):
            if as_is or not isinstance(self.function, nn.Module):
                return self.function(query, key)
            cast = {name: p.to(query.dtype) for name, p in zip(self.names, own, strict=True)}
            for name, buffer in self.function.named_buffers():
                cast[name] = buffer.to(query.dtype) if buffer.is_floating_point() else buffer
            found: Tensor = torch.func.functional_call(self.function, cast, (query, key))
            return found

    def named(self) -> dict[str, Tensor]:
        """The parameters, by the names of their gradients."""
        return {f"{PARAMETER}{i}": p for i, p in enumerate(self.parameters)}

    def exchanged(self) -> Pairs:
        """The same with query and key exchanged."""
        return replace(self, function=_Exchanged(self.function), names=tuple(f"score.{name}" for name in self.names))

    def check(self, request: Request) -> None:
        """Try the function on two rows and two keys: it must give scores, of pairs alone, the same each time."""
        query, key = (x[..., :_PROBE, :].detach().to(request.dtype) for x in (request.query, request.key))
        if not query.numel() or not key.numel() or not all(has_values(x) for x in (query, key, *self.parameters)):
            return
        fixed = [p.detach() for p in self.parameters]
        with torch.enable_grad():
            raw = self(query, key, fixed)
        want = (query.shape[-2], key.shape[-2])
        if not isinstance(raw, Tensor) or tuple(raw.shape[-2:]) != want or raw.dim() > query.dim():
            got = shape_text(raw) if isinstance(raw, Tensor) else type(raw).__name__
            raise ShapeError(
                f"score must give one number per pair: for query {shape_text(query)} and key {shape_text(key)} "
                f"a tensor (..., {want[0]}, {want[1]}); got {got}."
            )
        if raw.dtype != request.dtype:
            raise DtypeError(f"score must keep the dtype of its tiles, {request.dtype}; got {raw.dtype}.")
        if raw.requires_grad:
            raise ValueRangeError(
                "score reads tensors that require gradients and that it does not own; they would get none. Make it an "
                "nn.Module that holds them as parameters."
            )
        with torch.no_grad():
            again, alone = self(query, key, fixed), self(query[..., :1, :], key[..., :1, :], fixed)
        if not torch.allclose(raw, again, equal_nan=True):
            raise ValueRangeError(
                "score must give the same numbers each time, since it is computed again in the backward pass; it gave "
                "others the second time. Leave dropout out of it (module.eval())."
            )
        room = 1e-3 * float(raw.abs().nan_to_num(0.0, 0.0, 0.0).max())
        if not torch.allclose(raw[..., :1, :1], alone, rtol=1e-3, atol=room, equal_nan=True):
            raise ValueRangeError(
                "score must look at each pair alone: that of the first query and key changed when others were taken "
                "away. Normalise queries and keys before, not scores within."
            )


def compared(score: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors that a score compares: its features of query and key, or these themselves.

    Those of a vector that is not finite are constants: 0 * nan would carry a key that no row sees into the gradients
    of the score's parameters.
    """
    prepare = getattr(score, "features", None)
    if prepare is None:
        return query, key
    made, given, bad = _of_finite(prepare, query, key)
    one, other = (x if w is None else torch.where(w, g, x) for x, g, w in zip(made, given, bad, strict=True))
    return one, other


def _of_finite(
    function: Callable[[Tensor, Tensor], Any], query: Tensor, key: Tensor
) -> tuple[Any, Any, list[Tensor | None]]:
    """function(query, key) with vectors that are not finite as 0, and as they are without a graph; and which they are.

    Where all are known to be finite, both are the same.
    """
    bad = [_not_finite(query), _not_finite(key)]
    if bad[0] is None and bad[1] is None:
        made = function(query, key)
        return made, made, bad
    with torch.no_grad():
        given = function(query, key)
    zeroed = (
        x if w is None else torch.where(w, torch.zeros_like(x), x) for x, w in zip((query, key), bad, strict=True)
    )
    return function(*zeroed), given, bad


def _not_finite(x: Tensor) -> Tensor | None:  # (..., n, 1)
    """Which vectors hold nan or inf; None if it is known that none does: on a device no value is read."""
    bad = ~x.isfinite().all(-1, keepdim=True)
    known = has_values(x) and x.device.type == "cpu"
    return None if known and not bool(bad.any()) else bad


class _Exchanged(nn.Module):
    def __init__(self, score: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.score = score

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.score(key, query).mT


def written_out(request: Request) -> Request:
    """The same with all raw scores as a bias: under tracing or functorch, where nothing is cut by size."""
    r = request
    if r.pairs is None:
        return r
    query, key = r.query.to(r.dtype), r.key.to(r.dtype)
    (raw, given, (bad_query, bad_key)), scale = _of_finite(r.pairs, query, key), r.scale[..., None]
    for wrong in (bad_query, None if bad_key is None else bad_key.mT):
        raw = raw if wrong is None else torch.where(wrong, given, raw)
    fine = raw.isfinite()  # a hidden nan is no part of the gradient of the scale
    scaled = torch.where(fine, torch.where(fine, raw, 0.0) * scale, (raw * scale).detach())
    s, _ = r.capped(scaled, r.bias)
    if r.bias is not None:
        s = torch.where(r.bias == -torch.inf, -torch.inf, s)
    return replace(
        r, query=r.query[..., :0], key=r.key[..., :0], scale=torch.ones_like(r.scale[..., :1]).detach(), bias=s,
        softcap=None, cap_bias=False, pairs=None,
    )  # fmt: skip
