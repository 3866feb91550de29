"""Which rows of which parameters make the queries and keys of each head of a layer.

A projection is recognised by its output, not by its name: rotary positions, transposes and constant factors keep the
norm of every query up to a constant, so over the tokens of a batch

    log |query of head h at token t|  -  log |rows r .. r + dim of the projection's output at token t|  =  constant

holds for the rows that made the head, and for no others. That finds plain and fused projections in any order, and
shared keys. Names decide where norms are normalised (QK-norm), a head is concatenated from parts (MLA), or no module is
called (torch's MultiheadAttention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partita.nn.qk_clip import holds, why_unfit

__all__ = ["Layout", "Product", "Rows", "find"]

TOKENS = 512  # compared at most
CLOSE = 0.03  # standard deviation of the difference of logarithms: about 0.005 in bfloat16, 0.1 or more of another head
NORMS = (
    ("q_norm", "k_norm"), ("norm_q", "norm_k"), ("q_layernorm", "k_layernorm"), ("q_ln", "k_ln"),
    ("query_layernorm", "key_layernorm"), ("query_norm", "key_norm"),
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """`size` outputs of a module from `start` on, in all its parameters that make them."""

    module: nn.Module
    names: tuple[str, ...]  # of parameters; "weight" and "bias" of a linear map
    dim: int  # of the weight's outputs; a bias has only one
    start: int
    size: int
    offset: float = 0.0  # added to the parameter before it multiplies: 1 for gains stored as their difference from one


@dataclass(frozen=True)
class Product:
    """A part of the score, <query part, key part>, made by these rows of each head; None for a fixed key part."""

    query: Sequence[Rows]
    key: Sequence[Rows] | None


@dataclass(frozen=True)
class Layout:
    """The score of head h is the sum of its products."""

    products: Sequence[Product]

    def why_unfit(self, flat: bool) -> str | None:
        """Why its parameters cannot be multiplied, or None. flat: plain tensors replace the parameters for now, which
        FSDP's older class keeps in pieces."""
        for product in self.products:
            for rows in {**dict.fromkeys(product.query), **dict.fromkeys(product.key or ())}:
                for name in rows.names:
                    placed = flat and not rows.module._parameters and name in rows.module.__dict__
                    why = None if placed else why_unfit(rows.module, name, rows.start + rows.size)
                    if why is not None:
                        return why
        return None

    def agreed(self, factor: Sequence[float]) -> list[float]:  # one per head
        """Heads whose queries are made by the same rows (one gain for all heads) take their smallest factor."""
        for product in self.products:
            factor = _together(product.query, factor, min)
        return list(factor)

    def shares(self, factor: Sequence[float]) -> list[tuple[Rows, float]]:  # agreed factors, one per head
        """The factor of each group of rows, so that the scores of head h shrink by factor_h.

        key = sqrt(largest factor among the heads that share it)        query = factor / key
        """
        out: list[tuple[Rows, float]] = []
        for product in self.products:
            key = [1.0] * len(factor)
            if product.key is not None:
                key = [x**0.5 for x in _together(product.key, factor, max)]
                out += dict(zip(product.key, key, strict=True)).items()
            query = [f / k for f, k in zip(factor, key, strict=True)]
            out += dict(zip(product.query, query, strict=True)).items()
        return out


def _together(rows: Sequence[Rows], factor: Sequence[float], choose: Callable[[Iterable[float]], float]) -> list[float]:
    """For each head, a choice among the factors of all heads that have the same rows."""
    return [choose(f for other, f in zip(rows, factor, strict=True) if other == mine) for mine in rows]


def find(
    module: nn.Module,  # in whose forward the softmax was
    heads: int,
    query: Tensor | None,  # (batch, heads, n_query, dim)
    key: Tensor | None,
    linear: Sequence[tuple[nn.Module, Tensor]],  # maps called before it, with their outputs
) -> Layout | str:
    """The layout, or the reason why it could not be found."""
    if hasattr(module, "kv_b_proj") and hasattr(module, "qk_nope_head_dim"):
        return _latent(module, heads)
    for names in NORMS:
        norms = [norm for name in names if isinstance(norm := getattr(module, name, None), nn.Module)]
        if len(norms) == 2 and not all(isinstance(norm, nn.Identity) for norm in norms):  # timm's place for none
            return _gains(norms, heads, int(getattr(module, "head_dim", 1)) if query is None else query.shape[-1])
    if holds(module, "in_proj_weight") or holds(module, "q_proj_weight"):
        return _packed(module, heads)
    if query is None or key is None or query.dim() != 4 or key.dim() != 4:
        return "its scores were seen, its queries and keys were not"
    inside = {id(part) for module, _ in linear for part in module.modules() if part is not module}
    linear = [(module, out) for module, out in linear if id(module) not in inside]  # the outermost wrapper
    queries, keys = _made_by(query, linear), _made_by(key, linear)
    if isinstance(queries, str):
        return "queries: " + queries
    if isinstance(keys, str):
        return "keys: " + keys
    return Layout([Product(queries, [keys[h * len(keys) // heads] for h in range(heads)])])


# ---- by evidence -----------------------------------------------------------------------------------------------------


def _made_by(x: Tensor, linear: Sequence[tuple[nn.Module, Tensor]]) -> list[Rows] | str:
    """For each head of x (batch, heads, n, dim) the rows that made it."""
    batch, heads, n, dim = x.shape
    own = _log_norms(x.transpose(1, 2).reshape(batch * n, heads, dim))
    if own.shape[0] < 4 or bool((own.std(0) < 2 * CLOSE / 3).any()):
        return "their lengths hardly differ from token to token, so it cannot be seen which weights made them"
    found: list[Rows] = []
    distances: list[Tensor] = []
    for module, out in linear:
        for tokens in _token_orders(out, batch, n):
            if tokens.shape[-1] % dim:
                continue
            blocks = _log_norms(tokens.unflatten(-1, (-1, dim)))
            distances.append((own[:, :, None] - blocks[:, None, :]).std(0).nan_to_num(torch.inf))  # (heads, blocks)
            found += [_rows(module, block * dim, dim) for block in range(blocks.shape[1])]
    if not distances:
        return "no linear map with an output of their size was called just before"
    table = torch.cat(distances, 1)
    best, at = table.min(1)
    if bool((best > CLOSE).any()):
        return "no rows of a linear map have their lengths, so something between the two changes it"
    rows = [found[int(i)] for i in at]
    for head, mine in enumerate(rows):
        rivals = torch.tensor([other != mine for other in found], dtype=torch.bool, device=table.device)
        if bool((table[head, rivals] < 3 * best[head] + 1e-3).any()):
            return "several rows have the same lengths, so it cannot be seen which of them made a head"
    return rows


def _log_norms(x: Tensor) -> Tensor:  # (tokens, heads, dim) -> (some tokens, heads)
    pick = torch.linspace(0, x.shape[0] - 1, min(TOKENS, x.shape[0]), dtype=torch.float64, device=x.device).long()
    norms: Tensor = torch.linalg.vector_norm(x.detach()[pick].double(), dim=-1)
    return norms.log()


def _token_orders(out: Tensor, batch: int, n: int) -> list[Tensor]:
    """The output as (batch * n, features), whichever of batch and position comes first."""
    if out.dim() == 2 and out.shape[0] == batch * n:
        return [out]
    if out.dim() < 3 or out.shape[:-1].numel() != batch * n:
        return []
    orders = [out.flatten(0, -2)]
    if out.dim() == 3 and out.shape[:2] == (n, batch) and n > 1 and batch > 1:
        orders.append(out.transpose(0, 1).flatten(0, 1))
    return orders


def _rows(module: nn.Module, start: int, size: int, offset: float = 0.0) -> Rows:
    names = tuple(name for name in ("weight", "bias") if holds(module, name))
    # Conv1D of transformers keeps (in, out); everything else (out, in)
    return Rows(module, names, 1 if type(module).__name__ == "Conv1D" else 0, start, size, offset)


# ---- by name ---------------------------------------------------------------------------------------------------------


def _packed(module: nn.Module, heads: int) -> Layout | str:
    """MultiheadAttention, torch's and partita's: parameters of its own, queries before keys."""
    if getattr(module, "bias_k", None) is not None:
        return "bias_k is a key of its own that heads would have to share with their projection"
    dim: int = module.head_dim  # type: ignore[assignment]
    groups = heads // int(getattr(module, "kv_heads", heads))
    fused, bias = holds(module, "in_proj_weight"), holds(module, "in_proj_bias")

    def rows(place: int, head: int) -> list[Rows]:
        start = head * dim + place * heads * dim
        if fused:
            return [Rows(module, ("in_proj_weight", *(("in_proj_bias",) if bias else ())), 0, start, dim)]
        weight = Rows(module, (("q_proj_weight", "k_proj_weight")[place],), 0, head * dim, dim)
        return [weight, Rows(module, ("in_proj_bias",), 0, start, dim)] if bias else [weight]

    # where weight and bias are separate parameters each takes the same share, as one more product would
    sides = [[rows(0, h) for h in range(heads)], [rows(1, h // groups) for h in range(heads)]]
    return Layout([Product([q[i] for q in sides[0]], [k[i] for k in sides[1]]) for i in range(len(sides[0][0]))])


def _gains(norms: Sequence[nn.Module], heads: int, dim: int) -> Layout | str:
    """QK-norm: its gains set the size of the scores, one for all heads or one for each."""
    sides = []
    for norm in norms:
        if isinstance(getattr(type(norm), "weight", None), property):
            return f"QK-norm: {why_unfit(norm, 'weight')}"
        weight, kind = getattr(norm, "weight", None), type(norm).__name__
        if not isinstance(weight, Tensor):
            return "QK-norm without a gain: its scores cannot grow, and there is nothing to clip"
        if weight.dim() != 1 or weight.numel() % dim:
            return f"QK-norm by a {kind} whose weight {tuple(weight.shape)} is no gain per feature of a head of {dim}"
        offset = _offset(norm, weight)
        if offset is None:
            return f"QK-norm by a {kind} that multiplies neither by its weight nor by one plus it"
        count = weight.numel() // dim
        sides.append([_rows(norm, (h * count // heads) * dim, dim, offset) for h in range(heads)])
    return Layout([Product(*sides)])


def _offset(norm: nn.Module, weight: Tensor) -> float | None:
    """What is added to the weight before it multiplies, found by giving the norm a vector."""
    x = torch.linspace(1, 2, weight.numel(), dtype=torch.float32, device=weight.device).to(weight.dtype)
    x = x * (-1) ** torch.arange(x.numel(), device=x.device)
    with torch.no_grad():
        out = norm(x[None])[0].float()
        if getattr(norm, "bias", None) is not None:
            out = out - norm.bias.float()
        x = x.float()
        unit = (x - x.mean() if isinstance(norm, nn.LayerNorm) else x) / x.square().mean().sqrt()
        for offset in (0.0, 1.0):
            if torch.allclose(out, unit * (weight.float() + offset), rtol=0.05, atol=0.02):
                return offset
    return None


def _latent(module: nn.Module, heads: int) -> Layout | str:
    """Multi-head latent attention: a key is a part of the head's own, from a latent, and a rotary part that all share.

    The shared part stays; its queries take the whole factor.
    """
    nope, rope, value = (int(getattr(module, f"{n}_head_dim")) for n in ("qk_nope", "qk_rope", "v"))
    up = getattr(module, "q_b_proj", None) or getattr(module, "q_proj", None)
    if up is None:
        return "latent attention whose queries are made neither by q_b_proj nor by q_proj"
    down: nn.Module = module.kv_b_proj  # type: ignore[assignment]
    query = [_rows(up, h * (nope + rope), nope) for h in range(heads)]
    turned = [_rows(up, h * (nope + rope) + nope, rope) for h in range(heads)]
    key = [_rows(down, h * (nope + value), nope) for h in range(heads)]
    return Layout([Product(query, key), Product(turned, None)])
