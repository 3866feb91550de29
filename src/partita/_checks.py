"""Shape, dtype, device and index checks, with all their messages.

Checks that need to look at *values* are made only where values exist: not while tracing, not under vmap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.errors import DeviceError, DtypeError, ShapeError, TargetError, ValueRangeError

__all__ = [
    "broadcast",
    "broadcast_batch",
    "check_bias",
    "check_bool",
    "check_classes",
    "check_device",
    "check_edges",
    "check_float",
    "check_heads",
    "check_index_dtype",
    "check_matrix",
    "check_no_generator",
    "check_pair",
    "check_positions",
    "check_positive",
    "check_reduction",
    "check_rows",
    "check_target",
    "check_value",
    "check_whole",
    "expands",
    "finite",
    "has_values",
    "shape_text",
]


def shape_text(tensor: Tensor) -> str:
    """The shape as a user writes it, (2, 3); joined from its sizes, since a graph cannot write a tuple of symbols."""
    sizes = [f"{n}" for n in tensor.shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


def has_values(tensor: Tensor) -> bool:
    """Whether the tensor's numbers can be looked at now (not traced, not batched by vmap, not meta)."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return type(tensor) in (Tensor, torch.nn.Parameter)


def finite(number: float) -> bool:
    """Whether a number is neither nan nor infinite; by comparing, since a symbolic one has no math.isfinite.

    The largest double is written out: a name would become one more symbol of a graph.
    """
    return -1.7976931348623157e308 <= number <= 1.7976931348623157e308


def check_float(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        module = isinstance(tensor, torch.nn.Module) and isinstance(getattr(tensor, "weight", None), Tensor)
        hint = "Give its weight: module.weight" if module else "Wrap it with torch.as_tensor"
        raise DtypeError(f"{name} must be a tensor; got {type(tensor).__name__}. {hint}.")
    if not tensor.is_floating_point():
        raise DtypeError(
            f"{name} must hold real floating-point numbers; got {tensor.dtype}. Convert it, e.g. {name}.float()."
        )
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise DtypeError(f"{name} must be float64, float32, bfloat16 or float16; got {tensor.dtype}.")


def check_bool(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise DtypeError(
            f"{name} must be a boolean tensor, True where a key is visible; got {got}. "
            f"Use {name}.bool(), or pass additive numbers as bias."
        )


def check_index_dtype(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise DtypeError(f"{name} must hold integers (torch.long); got {got}. Use {name}.long().")


def check_matrix(name: str, tensor: Tensor) -> None:
    check_float(name, tensor)
    if tensor.dim() < 2:
        raise ShapeError(
            f"{name} must have at least two dimensions (..., n, dim); got {shape_text(tensor)}. "
            f"Add the missing one with {name}.unsqueeze(0)."
        )


def check_device(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    there = [(n, t.device) for n, t in zip(names, tensors, strict=True) if t is not None]
    for name, device in there[1:]:
        if device != there[0][1]:
            raise DeviceError(
                f"all tensors must be on one device; {there[0][0]} is on {there[0][1]} and {name} on {device}. "
                f"Move one with .to()."
            )


def check_pair(query: Tensor, key: Tensor, *, alike: bool = True) -> None:
    """Query and key can be compared; `alike`: by an inner product, which takes as many features of both."""
    check_matrix("query", query)
    check_matrix("key", key)
    if alike and query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"query and key must share their last dim; got query {shape_text(query)} and key {shape_text(key)}. "
            f"Project key to {query.shape[-1]} features, or query to {key.shape[-1]}."
        )
    if query.dtype != key.dtype:
        raise DtypeError(
            f"query and key must share their dtype; got {query.dtype} and {key.dtype}. Convert one of them with .to()."
        )
    check_device(("query", "key"), (query, key))


def check_heads(query: Tensor, key: Tensor) -> None:
    """Fewer key heads than query heads need to be asked for; what is no tensor is told so later."""
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() < 3 or key.dim() < 3:
        return
    many, few = query.shape[-3], key.shape[-3]
    if 1 < few < many and many % few == 0:
        raise ShapeError(
            f"query has {many} heads and key {few}; got query {shape_text(query)} and key {shape_text(key)}. "
            f"Grouped queries are asked for with enable_gqa=True in attention, grouped=True in Gibbs."
        )


def check_value(value: Tensor, key: Tensor) -> None:
    check_matrix("value", value)
    if value.shape[-2] != key.shape[-2]:
        raise ShapeError(
            f"value must have one row per key; got {value.shape[-2]} values for {key.shape[-2]} keys "
            f"(value {shape_text(value)}, key {shape_text(key)})."
        )
    if value.dtype != key.dtype:
        raise DtypeError(f"value must have the dtype of key; got {value.dtype} and {key.dtype}. Convert with .to().")
    check_device(("key", "value"), (key, value))


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape; torch.broadcast_shapes in plain integers, which is some twenty times quicker."""
    out: list[int] = []
    for shape in shapes:
        if not shape or list(shape) == out:
            continue
        if len(shape) > len(out):
            out = [1] * (len(shape) - len(out)) + out
        for at in range(-1, -1 - len(shape), -1):
            size = shape[at]
            if size != 1 and size != out[at]:
                if out[at] != 1:
                    raise ShapeError(f"shapes do not broadcast: {tuple(shape)} against {tuple(out)}.")
                out[at] = size
    return tuple(out)


def expands(given: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor of this shape expands to that one; asked, since a graph cannot catch what torch would raise."""
    missing = len(wanted) - len(given)
    return missing >= 0 and not [1 for a, b in zip(given, wanted[missing:], strict=True) if a not in (1, b)]


def broadcast_batch(named: Sequence[tuple[str, Sequence[int]]]) -> tuple[int, ...]:
    """The common batch shape, or an error that names the tensor that does not fit."""
    out: tuple[int, ...] = ()
    for name, shape in named:
        try:
            out = broadcast(out, shape)
        except ShapeError:
            raise ShapeError(
                f"batch dimensions must broadcast; {name} has {tuple(shape)}, the others {out}. "
                f"Unsqueeze the dimension that is missing (for heads: {name}.unsqueeze(1))."
            ) from None
    return out


def check_rows(name: str, given: Tensor, rows: Tensor) -> None:
    """A number per row, or one for several."""
    check_float(name, given)
    check_device(("query", name), (rows, given))
    if not expands(given.shape, rows.shape):
        raise ShapeError(
            f"{name} must broadcast to the rows {shape_text(rows)}; got {shape_text(given)}. "
            f"One number per head is {name}[:, None]."
        )


def check_bias(bias: Tensor, n_query: int, n_key: int) -> None:
    check_float("bias", bias)
    if not expands(bias.shape[-2:], (n_query, n_key)):
        raise ShapeError(
            f"bias must broadcast to (..., n_query, n_key) = (..., {n_query}, {n_key}); got {shape_text(bias)}. "
            f"A bias per query is bias[:, None]."
        )


def check_target(target: Tensor, n_key: int) -> None:
    check_index_dtype("target", target)
    outside = _outside(target, n_key)
    if outside:
        raise TargetError(
            f"target must name a key, 0 <= target < {n_key}; got {outside}. Mask rows without a target before the call."
        )


def check_classes(index: Tensor, n_class: int, ignore_index: int) -> None:
    """Class indices of the rows that count."""
    outside = _outside(index, n_class)
    if outside:
        raise TargetError(
            f"target must name a class, 0 <= target < {n_class}, or be ignore_index = {ignore_index}; got {outside}. "
            f"Rows without a class are left out by giving their number as ignore_index."
        )


def _outside(index: Tensor, n: int) -> str | None:
    """What indices there are, if some name nothing; None where all do, or where values cannot be looked at."""
    if not has_values(index) or not index.numel():
        return None
    low, high = (int(edge) for edge in torch.aminmax(index))
    return None if low >= 0 and high < n else f"values from {low} to {high}"


def check_positions(n_query: int, n_key: int) -> None:
    """Sums and differences of positions fit into the 32 bits that a support is kept in."""
    if n_query + n_key > 1 << 29:
        raise ShapeError(
            f"a support by position takes up to {1 << 29} queries and keys together; got {n_query} and {n_key}. "
            f"Split the keys and merge their states (partita.merge)."
        )


def check_positive(name: str, number: float, *, zero: bool = False) -> None:
    fine = isinstance(number, (int, float)) and finite(number) and (number >= 0 if zero else number > 0)
    if not fine:
        kind = "not negative" if zero else "positive"
        raise ValueRangeError(f"{name} must be a finite number, {kind}; got {number!r}.")


def check_whole(name: str, number: object, *, least: int = -(1 << 63)) -> None:
    """A whole number that a 64-bit index can hold."""
    fine = isinstance(number, int) and not isinstance(number, bool) and least <= number < 1 << 63
    if not fine:
        floor = "" if least < 0 else f", at least {least}" if least else ", not negative"
        raise ValueRangeError(f"{name} must be a whole number{floor}; got {number!r}.")


def check_edges(edges: Tensor) -> None:
    """A vector of numbers that are not negative; +inf may be one of them."""
    example = "Give one number per distance below the row's maximum: gaps([0.0, 1.0, 2.0])."
    if edges.dim() != 1:
        raise ShapeError(f"edges must be a sequence of numbers or a 1-D tensor; got {shape_text(edges)}. {example}")
    if edges.is_complex() or edges.dtype == torch.bool:
        raise DtypeError(f"edges must be real numbers; got {edges.dtype}. {example}")
    if has_values(edges) and bool((~(edges >= 0)).any()):
        wrong = edges[~(edges >= 0)][0].item()
        raise ValueRangeError(f"edges must be numbers that are not negative; got {wrong!r} among them. {example}")


def check_reduction(reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueRangeError(f"reduction must be 'none', 'mean' or 'sum'; got {reduction!r}.")


def check_no_generator(generator: torch.Generator | None) -> None:
    """What a draw inside a graph asks of its generator."""
    if generator is not None:
        raise ValueRangeError("a compiled graph has no generator: leave it None, torch.manual_seed governs the draw.")
