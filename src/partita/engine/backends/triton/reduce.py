"""A request's pass and its gradients by kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita._checks import broadcast
from partita.engine.backends.disjoint import added, forward_each, one_term, split_request
from partita.engine.backends.triton.launch import Launch, Operands, Strided, interpreted, named, padded, target_of
from partita.engine.backends.triton.tiles import Tile, careful, tile
from partita.engine.request import Request
from partita.engine.sums import OPERANDS, SumGrads, Sums
from partita.engine.terms import TAIL, Term
from partita.exactness import in_exact_rows

__all__ = ["FEW", "backward", "fold", "forward", "key_parts", "unfold"]


def _nothing(request: Request) -> bool:
    """A size of zero: no program would run."""
    sizes = (*request.batch, request.n_query, request.n_key, request.query.shape[-1])
    return 0 in sizes or (request.value is not None and request.value.shape[-1] == 0)


def _crowded(request: Request, term: Term | None) -> bool:
    """Whether a tile of scores needs more per score than intervals."""
    r = request
    rare = term is not None and (term.query_segment is not None or term.mask is not None or term.skip is not None)
    return rare or r.bias is not None or r.target is not None or r.softcap is not None


def _empty_as(request: Request, shape: tuple[int, ...]) -> Tensor:
    """An empty tensor; where it can, with the query's order of dimensions in memory."""
    query, dtype = request.query, request.dtype
    if request.as_query and query.dtype == dtype and tuple(query.shape) == shape:
        return torch.empty_like(query)
    return torch.empty(shape, dtype=dtype, device=query.device)


def forward(request: Request) -> Sums | None:
    return None if _nothing(request) or request.argmax else forward_each(request, _folded)


def _folded(request: Request) -> Sums:
    folded = None if in_exact_rows() else fold(request)
    return _forward(request) if folded is None else unfold(_forward(folded))


def _forward(r: Request) -> Sums:
    rows, device = (*r.batch, r.n_query), r.query.device
    level = r.level
    aimed, ranked = r.target is not None, r.rank and r.target is not None
    width = padded(max(r.query.shape[-1], 1 if r.value is None else r.value.shape[-1]))
    exact = in_exact_rows()  # then no tile and no split depends on how many rows or programs there are
    few = r.n_query <= FEW and not exact
    term = one_term(r)
    kind = "decode" if few else "forward"
    shape = tile(kind, width, r.query.dtype, level, target_of(device), exact or _crowded(r, term))
    programs = -(-r.n_query // shape.rows) * math.prod(r.batch)
    split = 1 if ranked or exact else key_parts(programs, r.n_key, shape.keys, device)

    def empty(there: bool, *lead: int, dtype: torch.dtype = r.dtype) -> Tensor | None:
        return torch.empty((*lead, *rows), dtype=dtype, device=device) if there else None

    found: dict[str, Any] = {
        "peak": empty(True, dtype=torch.float64),
        "mass": empty(True),
        "count": empty(True),
        "first": empty(level > 0),
        "spread": empty(level > 1),
        "target_score": empty(aimed),
    }
    extra: dict[str, Any] = {"statistics": empty(level > 0, 5), "rank": empty(ranked, dtype=torch.int64)}
    moment = None if r.value is None else _empty_as(r, (*rows, r.value.shape[-1]))
    given = Operands.of(r, term, moment)
    laid = None if moment is None else Strided(moment, moment.stride(-2), moment.stride(-1))
    whole = to = named(**found, **extra, moment=laid)
    if split > 1:  # raw sums of each part
        raw = {name: empty(x is not None, split) for name, x in found.items()}
        part = None if moment is None else Strided(moment.new_empty((split, *moment.shape)), moment.shape[-1], 1)
        to = named(**raw, moment=part)
    arguments: dict[str, Any] = {
        "o": given.arguments(),
        "out": to,
        "flags": None if moment is None else torch.empty(programs * split, dtype=torch.int32, device=device),
        "split_keys": -(-r.n_key // (split * shape.keys)) * shape.keys,
    }
    wanted = {"LEVEL": level, "TARGET": aimed}
    switches = given.switches() | wanted | {"RANK": ranked, "SPLIT": split > 1, "MEAN": r.mean and split == 1}
    _twice("forward.forward", shape, r.n_query, given.n_batch * split, arguments, switches, device, moment is not None)
    if split > 1:
        sizes = {"n_batch": given.n_batch, "n_query": r.n_query, "parts": split}
        constant = {name: switches[name] for name in ("V", "BLOCK_V", "VALUE", "ACC")} | wanted
        constant |= {"MEAN": r.mean, "BLOCK_M": shape.rows}
        merging = {"raw": to, "out": whole, "offsets": given.table(), **sizes}
        Launch("decode.merge", programs, merging, constant, shape).run(device)
    sums = Sums(**found, **extra)
    return sums._replace(mean=moment) if r.mean else sums._replace(moment=moment)


# ---- few rows against many keys: heads become rows of one tile, keys are shared out over programs -------------------

FEW = 16  # rows that one tile of the decode kernel holds
_TILES = 4  # tiles of keys that a part has at least: below, starting it costs more than its work
_PRETENDED = 4  # processors of the interpreter, which has none


def fold(request: Request) -> Request | None:
    """One query per head, heads that share their keys: the heads as rows; None where that does not hold."""
    r = request
    if r.n_query != 1 or r.query.dim() < 3 or r.query.shape[-3] == 1 or r.key.shape[-3] != 1 or len(r.terms) > 1:
        return None
    if r.value is not None and r.value.shape[-3] != 1:
        return None
    for term in r.terms:
        if term.key_segment is not None and term.key_segment.shape[-2] != 1:
            return None

    def turned(tensor: Tensor | None, tail: int) -> Any:
        return None if tensor is None else tensor.transpose(-1 - tail, -tail)

    terms = tuple(term.each(lambda slot, t: t if slot == "key_segment" else turned(t, TAIL[slot])) for term in r.terms)
    bias, target = turned(r.bias, 2), turned(r.target, 1)
    query, scale = r.query.transpose(-3, -2), r.scale.transpose(-2, -1)
    return replace(r, query=query, scale=scale, bias=bias, target=target, terms=terms, as_query=False)


def unfold(sums: Sums) -> Sums:
    """The rows of a folded request as heads again."""
    at = {"moment": (-3, -2), "mean": (-3, -2)}
    made = {name: x.transpose(*at.get(name, (-2, -1))) for name, x in sums._asdict().items() if x is not None}
    return Sums(**made)


def key_parts(programs: int, n_key: int, keys: int, device: torch.device) -> int:
    """How many parts the keys are cut into, so that every processor has something to do; 1 where rows suffice."""
    processors = _PRETENDED
    if device.type == "cuda" and not interpreted():
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * processors // programs, n_key // (_TILES * keys)))


# ---- launching ------------------------------------------------------------------------------------------------------


def _twice(
    kernel: str,
    shape: Tile,
    owned: int,
    entries: int,
    arguments: dict[str, Any],
    switches: dict[str, Any],
    device: torch.device,
    again: bool = True,
) -> None:
    """The usual pass, and `again` carefully where it left a flag; programs own rows, or keys, of each entry."""
    by_keys = kernel.endswith(".keys")
    for small in (False, True) if again else (False,):
        run = careful(kernel.split(".")[1], shape, target_of(device)) if small else shape
        own, flagged = (run.keys, shape.keys) if by_keys else (run.rows, shape.rows)
        constant = {"BLOCK_M": run.rows, "BLOCK_N": run.keys, "CAREFUL": small, "FLAGGED": flagged}
        Launch(kernel, -(-owned // own) * entries, arguments, switches | constant, run).run(device)


def _boost(g: SumGrads) -> Tensor:
    """A power of two that makes the largest gradient about 1: float16 would lose what is 1e-7 of nothing much."""
    largest = [x.abs().amax() for x in g if x is not None]
    top = torch.stack(largest).amax()
    power = torch.floor(torch.log2(top)).clamp(-100, 100)  # 2^-power must be a number, too
    return torch.where(top.isfinite() & (top > 0), torch.exp2(-power), torch.ones_like(top))


def _row_bounds(term: Term, n_query: int, n_key: int, batch: tuple[int, ...], shape: Tile) -> Tensor:
    """(*batch, key tiles, 2) int32: the first row, and the row after the last, that may see a key of a tile."""
    known = term.start if term.start is not None else term.stop
    assert known is not None
    device = known.device
    down, across = -(-n_query // shape.rows), -(-n_key // shape.keys)

    def by_tile(bound: Tensor | None, default: int, outside: int) -> Tensor:  # (*b, row tiles, rows of a tile)
        bound = torch.full_like(known, default) if bound is None else bound.clamp(0, n_key).to(torch.int32)
        full = torch.nn.functional.pad(bound, (0, down * shape.rows - n_query), value=outside)
        return full.view(*full.shape[:-1], down, shape.rows)

    low = by_tile(term.start, 0, n_key).amin(-1)[..., None]
    high = by_tile(term.stop, n_key, 0).amax(-1)[..., None]
    here = torch.arange(across, dtype=torch.int32, device=device) * shape.keys
    row = torch.arange(down, dtype=torch.int32, device=device)[:, None] * shape.rows
    meets = (low < here + shape.keys) & (high > here)
    first = torch.where(meets, row, n_query).amin(-2)
    last = torch.where(meets, row + shape.rows, 0).amax(-2)
    return torch.stack([first, last], -1).expand(*batch, across, 2).contiguous()


def backward(request: Request, peak: Tensor, g: SumGrads, needs: Sequence[bool]) -> dict[str, Tensor] | None:
    if _nothing(request):
        return None
    return added(_backward(part, peak, g, needs) for part in split_request(request) or (request,))


def _backward(r: Request, peak: Tensor, g: SumGrads, needs: Sequence[bool]) -> dict[str, Tensor]:
    wanted = {name for name, needed in zip(OPERANDS, needs, strict=True) if needed and getattr(r, name) is not None}
    device, batch, K = r.query.device, r.batch, r.n_key
    given = Operands.of(r, one_term(r))
    valued, aimed = g.moment is not None, g.target is not None and r.target is not None
    switches = given.switches() | {"LEVEL": g.level, "VALUE": valued, "TARGET": aimed}
    boost = _boost(g) if r.query.dtype == torch.float16 else None
    g = g if boost is None else SumGrads(*[None if x is None else x * boost for x in g])  # type: ignore[arg-type]
    # the moment is a factor of products, as the others are: rounded once, and not for every tile that reads it
    g = g._replace(target=g.target if aimed else None, moment=None if g.moment is None else g.moment.to(r.query.dtype))
    upstream = {name: None if x is None else x.contiguous() for name, x in g._asdict().items()}
    arguments = {"o": given.arguments(), "g": named(peak=peak.contiguous(), **upstream)}
    target = target_of(device)
    dim = max(switches["BLOCK_D"], switches["BLOCK_V"] if valued else 0)
    made: dict[str, Tensor] = {}

    def shaped(kind: str) -> Tile:
        return tile(kind, dim, r.query.dtype, switches["LEVEL"], target, in_exact_rows() or _crowded(r, given.term))

    def empty(name: str, *shape: int) -> Tensor | None:
        if name not in wanted:
            return None
        made[name] = torch.empty(shape, dtype=r.dtype, device=device)
        return made[name]

    def launch(kind: str, owned: int, entries: int, shape: Tile, outputs: dict[str, Tensor | int | None]) -> None:
        programs = -(-owned // (shape.keys if kind == "keys" else shape.rows)) * entries
        flags = torch.empty(programs, dtype=torch.int32, device=device)
        outs = {name.upper(): x is not None for name, x in outputs.items() if name.endswith("_out")}
        all_of_it = {**arguments, **outputs, "flags": flags}
        _twice(f"backward.{kind}", shape, owned, entries, all_of_it, switches | outs, device)

    bias = r.bias
    by_row = bias is not None and bias.shape[-1] == 1
    by_key = bias is not None and bias.shape[-2] == 1 and not by_row
    if wanted & {"query", "scale"} or (by_row and "bias" in wanted):
        shape = shaped("backward_rows")
        outputs: dict[str, Tensor | int | None] = {
            "query_out": empty("query", *batch, r.n_query, r.query.shape[-1]),
            "scale_out": empty("scale", *batch, r.n_query),
            "bias_out": empty("bias", *batch, r.n_query, 1) if by_row else None,
        }
        launch("rows", r.n_query, given.n_batch, shape, outputs)
    if wanted & {"key", "value"} or (by_key and "bias" in wanted):
        shape = shaped("backward_keys")
        shared = broadcast(
            r.key.shape[:-2],
            r.value.shape[:-2] if r.value is not None and valued else (),
            bias.shape[:-2] if bias is not None and by_key and "bias" in wanted else (),
        )
        table = given.members(shared)
        bounded = switches["START"] or switches["STOP"]
        outputs = {
            "key_out": empty("key", *shared, K, r.key.shape[-1]),
            "value_out": empty("value", *shared, K, switches["V"]) if valued else None,
            "bias_out": empty("bias", *shared, 1, K) if by_key else None,
            "members": table,
            "n_members": table.shape[1],
            "bounds": _row_bounds(given.term, r.n_query, K, batch, shape) if bounded and given.term else None,
        }
        launch("keys", K, table.shape[0], shape, outputs)
    if bias is not None and "bias" in wanted and not by_row and not by_key:
        shape = shaped("backward_pairs")
        table = given.members(tuple(bias.shape[:-2]))
        out = empty("bias", *bias.shape[:-2], r.n_query, K)
        programs = -(-r.n_query // shape.rows) * -(-K // shape.keys) * table.shape[0]
        all_of_it = arguments | {"bias_out": out, "members": table, "n_members": table.shape[1]}
        constant = switches | {"BLOCK_M": shape.rows, "BLOCK_N": shape.keys}
        Launch("backward.pairs", programs, all_of_it, constant, shape).run(device)
    for name in wanted - made.keys():  # a value that nothing flows back from
        made[name] = torch.zeros_like(getattr(r, name), dtype=r.dtype)
    found = {name: x.sum_to_size(getattr(r, name).shape) for name, x in made.items()}
    return found if boost is None else {name: x / boost for name, x in found.items()}
