"""One tile: its scores, its sums, and the one backward formula.

    s    = softcap(scale * <query, key>) + bias              -inf where not visible
    e    = exp(s - peak),  c = s - peak
    ds   = e * (g_mass + g_first (1 + c) + g_second (2 c + c^2) + <g_moment, value>) + g_target [j = target]

Legend: q rows of a tile, k columns, D the compared dimension, V the value's. Written without in-place operations, so
that the second derivative is torch's own derivative of `gradients`.

0 * nan is the trap of every masked product. Operands are cleaned once (`Clean`): products run on finite numbers, and
the scores of a row or key that was not finite are what its own product gives: nan, inf, or -inf, which is a key of no
weight as it is for torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita._checks import has_values
from partita.engine.callable_score import Pairs
from partita.engine.request import Request
from partita.engine.state import LOWEST, State, centre, divided
from partita.engine.sums import OPERANDS, PARAMETER, SumGrads
from partita.engine.terms import cut
from partita.precision import product

__all__ = ["Clean", "Operands", "add", "gradients", "pulled_back", "scores", "sums", "view", "zeros"]


Operands = dict[str, Tensor]  # a tile's part of each operand there is, by name, in the accumulation dtype


@dataclass(frozen=True, eq=False)
class Clean:
    """A request whose query, key and value are finite, and where they were not."""

    request: Request
    query: Tensor
    key: Tensor
    value: Tensor | None
    bad_query: Tensor | None  # (*b, Q, 1): a row that held nan or inf
    bad_key: Tensor | None  # (*b, 1, K)
    bad_value: Tensor | None  # the value as given, if it was not finite

    @staticmethod
    def of(request: Request) -> Clean:
        query, bad_query = _finite(request.query)
        key, bad_key = _finite(request.key)
        value, bad_value = (None, None) if request.value is None else _finite(request.value)
        bad_query = None if bad_query is None else bad_query.any(-1, keepdim=True)
        bad_key = None if bad_key is None else bad_key.any(-1)[..., None, :]
        return Clean(request, query, key, value, bad_query, bad_key, None if bad_value is None else request.value)

    def corrected(self, s: Tensor, scale: Tensor, rows: slice, cols: slice) -> Tensor:
        """Products of a tile; those of a bad row or key are taken with the numbers as given, and have no gradient."""
        bad_query = None if self.bad_query is None else self.bad_query[..., rows, :]
        bad_key = None if self.bad_key is None else self.bad_key[..., cols]
        if bad_query is None and bad_key is None:
            return s
        dtype = self.request.dtype
        query, key = self.request.query[..., rows, :].to(dtype), self.request.key[..., cols, :].to(dtype)
        given = self.products(query, key, scale).detach()
        for bad in (bad_query, bad_key):
            s = s if bad is None else torch.where(bad, given, s)
        return s

    def products(self, query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
        """scale * <query, key>, or what a function of the pairs gives in its place."""
        pairs = self.request.pairs
        if pairs is None:
            return _against(query * scale[..., None], key.mT)
        return pairs(query, key) * scale[..., None]

    def tensors(self) -> Operands:
        """The operands that there are."""
        r = self.request
        named = zip(OPERANDS, (self.query, self.key, self.value, r.scale, r.bias), strict=True)
        return {name: t for name, t in named if t is not None}

    def operands(self, rows: slice, cols: slice) -> Operands:
        return {name: view(name, t, rows, cols).to(self.request.dtype) for name, t in self.tensors().items()}


def _finite(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    good = tensor.isfinite()
    if has_values(tensor) and bool(good.all()):
        return tensor, None
    return torch.where(good, tensor, torch.zeros_like(tensor)), ~good


def _against(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix; a batch dimension the matrix lacks joins the rows, so that the matrix is not repeated."""
    if rows.dim() > 2 and matrix.shape[-3] == 1 and rows.shape[-3] > 1:
        flat = product(rows.flatten(-3, -2), matrix.squeeze(-3))
        out: Tensor = flat.unflatten(-2, rows.shape[-3:-1])
        return out
    return product(rows, matrix)


def _gathered(weight: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """weight^T @ rows, summed to `shape`; the mirror of `_against`."""
    if weight.dim() > 2 and shape[-3] == 1 and weight.shape[-3] > 1:
        rows = rows.expand(*rows.shape[:-3], weight.shape[-3], *rows.shape[-2:])
        flat = product(weight.flatten(-3, -2).mT, rows.flatten(-3, -2))
        return flat.unsqueeze(-3).sum_to_size(shape)
    return product(weight.mT, rows).sum_to_size(shape)


def scores(
    clean: Clean, x: Operands, rows: slice, cols: slice, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores of a tile (-inf where not visible), its final mask, and the slope of the softcap."""
    scale, bias = x["scale"], x.get("bias")
    products = clean.corrected(clean.products(x["query"], x["key"], scale), scale.detach(), rows, cols)
    s, t = clean.request.capped(products, bias)
    slope = None if t is None else 1 - t * t
    if slope is not None and (clean.bad_query is not None or clean.bad_key is not None):
        slope = slope.nan_to_num(0.0)  # of a place that is hidden, or whose score spoils its row anyway
    if bias is not None:
        shown = bias != -torch.inf
        mask = shown if mask is None else mask & shown
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    return s, mask, slope


def sums(clean: Clean, x: Operands, s: Tensor, mask: Tensor | None, cols: slice) -> State:
    """The state of one tile; uses up the scores."""
    peak = s.amax(-1)
    empty = peak.isneginf()
    c = s.sub_(torch.where(empty, torch.zeros_like(peak), peak)[..., None]).clamp_(min=LOWEST)
    weight = c.exp()
    mass = weight.sum(-1)
    first = spread = torch.zeros_like(mass)
    if clean.request.statistics:
        first = torch.linalg.vecdot(weight, c)
    if clean.request.level > 1:
        mean = divided(first, mass)
        c.sub_(mean[..., None]).square_()
        spread = torch.linalg.vecdot(weight, c)
    if mask is None:
        count = torch.full_like(mass, s.shape[-1])
    else:
        count = mask.expand(*mask.shape[:-2], *s.shape[-2:]).sum(-1).to(mass.dtype).expand_as(mass)
    moment = None
    if "value" in x:
        moment = _against(weight, x["value"])
        if clean.bad_value is not None:
            moment = _poison(moment, clean.bad_value[..., cols, :], mask, s)
    return State(peak, mass, first, spread, count, moment)


def _poison(result: Tensor, given: Tensor, mask: Tensor | None, s: Tensor) -> Tensor:
    """Put nan, inf and -inf of the given values into the rows that see them."""
    seen = torch.ones_like(s) if mask is None else mask.to(s.dtype).expand_as(s)
    high = _against(seen, given.isposinf().to(s.dtype)) > 0
    low = _against(seen, given.isneginf().to(s.dtype)) > 0
    lost = (_against(seen, given.isnan().to(s.dtype)) > 0) | (high & low)
    result = torch.where(high, torch.inf, torch.where(low, -torch.inf, result))
    return torch.where(lost, torch.nan, result)


def gradients(
    clean: Clean, x: Operands, g: SumGrads, peak: Tensor, rows: slice, cols: slice, mask: Tensor | None
) -> Operands:
    """Gradients of a tile's operands, each in its operand's shape."""
    s, mask, slope = scores(clean, x, rows, cols, mask)
    c, e = centre(s, peak)
    pull = (g.mass if g.first is None else g.mass + g.first)[..., None]
    if g.second is not None:
        slope_of_c = 2 * g.second if g.first is None else g.first + 2 * g.second
        pull = pull + c * (slope_of_c[..., None] + c * g.second[..., None])
    elif g.first is not None:
        pull = pull + c * g.first[..., None]
    found: Operands = {}
    if "value" in x and g.moment is not None:
        pull = pull + _against(g.moment, x["value"].mT)
        found["value"] = _gathered(e, g.moment, x["value"].shape)
    ds = e * pull
    if g.target is not None and clean.request.target is not None:
        at = clean.request.target[..., rows] - cols.start
        hit = torch.arange(s.shape[-1], device=s.device) == at[..., None]
        ds = ds + hit * g.target[..., None]
    if mask is not None:
        ds = torch.where(mask, ds, torch.zeros_like(ds))
    return found | pulled_back(clean, x, ds, slope)


def pulled_back(clean: Clean, x: Operands, ds: Tensor, slope: Tensor | None) -> Operands:
    """Gradients of a tile's operands from those of its scores; not of the values, which scores know nothing of."""
    query, key, scale = x["query"], x["key"], x["scale"]
    inner = ds if slope is None else ds * slope  # what reaches the products
    found: Operands = {}
    if "bias" in x:
        found["bias"] = (inner if clean.request.cap_bias else ds).sum_to_size(x["bias"].shape)
    if clean.request.pairs is not None:
        return found | _through(clean.request.pairs, x, inner)
    toward = _against(inner, key)  # d / d (scale * query)
    found["query"] = (toward * scale[..., None]).sum_to_size(query.shape)
    found["key"] = _gathered(inner, query * scale[..., None], key.shape)
    found["scale"] = (toward * query).sum(-1).sum_to_size(scale.shape)
    return found


def _through(pairs: Pairs, x: Operands, ds: Tensor) -> Operands:
    """The same through a function of the pairs, by torch's own derivative of it on this tile."""
    scale = x["scale"]
    given = {"query": x["query"], "key": x["key"], **pairs.named()}
    with torch.enable_grad():
        query, key, *own = leaves = [t.detach().requires_grad_() for t in given.values()]
        raw = pairs(query, key, own)
        above = (ds * scale[..., None]).sum_to_size(raw.shape)
        found = torch.autograd.grad(raw, leaves, above, materialize_grads=True) if raw.requires_grad else None
    grads = [torch.zeros_like(t) for t in leaves] if found is None else found
    return {**dict(zip(given, grads, strict=True)), "scale": (ds * raw.detach()).sum(-1).sum_to_size(scale.shape)}


def zeros(request: Request, needs: Sequence[bool]) -> Operands:
    """What the gradients of all operands are added up in, in the accumulation dtype."""
    named = zip(request.operands().items(), needs, strict=False)
    return {name: torch.zeros_like(t, dtype=request.dtype) for (name, t), need in named if need and t is not None}


def add(total: Operands, part: Operands, rows: slice, cols: slice) -> None:
    """Add the gradients of a tile."""
    for name in total.keys() & part.keys():
        place = view(name, total[name], rows, cols)
        place += part[name]


def view(name: str, tensor: Tensor, rows: slice, cols: slice) -> Tensor:
    """The part of an operand, or of an upstream gradient (g_...), that a tile reads."""
    if name in ("query", "g_moment"):
        return tensor[..., rows, :]
    if name in ("key", "value"):
        return tensor[..., cols, :]
    if name == "bias":
        return cut(tensor, rows, cols)
    return tensor if name.startswith(PARAMETER) or tensor.shape[-1] == 1 else tensor[..., rows]
