"""Shape, dtype, device and index checks, with all their messages.

Checks that need to look at *values* are made where that costs nothing: on the CPU, and not while tracing or under vmap.
To read a number of another device is to wait for it; `validate(True)` does so, for debugging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from partita.errors import DeviceError, DtypeError, ShapeError, TargetError, ValueRangeError

__all__ = [
    "Reduction", "broadcast", "broadcast_batch", "check_bias", "check_bool", "check_classes", "check_classwise",
    "check_device", "check_float", "check_heads", "check_index_dtype", "check_kind", "check_matrix",
    "check_no_generator", "check_number", "check_pair", "check_positions", "check_positive", "check_reduction",
    "check_rows", "check_target", "check_value", "check_whole", "concrete", "cure_of_mask", "expands", "finite",
    "has_values", "number", "require", "shape_text", "validate", "within",
]  # fmt: skip

Reduction = Literal["none", "mean", "sum"]


def shape_text(tensor: Tensor) -> str:
    """The shape as a user writes it, (2, 3); joined from its sizes, since a graph cannot write a tuple of symbols."""
    sizes = [f"{n}" for n in tensor.shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


class validate:
    """Check values on every device at once, not on the CPU alone: each check waits for the device. For debugging.

    Without it a target that names no key makes its row nan. As a call it holds until the next one, in a `with` block
    until its end.

    >>> with validate(True):
    ...     pass
    """

    everywhere = False

    def __init__(self, on: bool = True):
        self.before, validate.everywhere = validate.everywhere, bool(on)

    def __enter__(self) -> validate:
        return self

    def __exit__(self, *error: object) -> None:
        validate.everywhere = self.before


def has_values(tensor: Tensor) -> bool:
    """Whether a check may look at the tensor's numbers: they are there, and to read them waits for no device."""
    return (tensor.is_cpu or validate.everywhere) and concrete(tensor)


def concrete(tensor: Tensor) -> bool:
    """Whether the tensor has numbers now (not traced, not batched by vmap, not meta)."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return type(tensor) in (Tensor, torch.nn.Parameter)


def number(x: float | Tensor) -> Tensor:
    """A tensor of x: floating tensors as they are, everything else in float64 so that lengths up to 2^53 stay exact."""
    if isinstance(x, Tensor) and x.is_floating_point():
        return x
    if isinstance(x, (Tensor, complex)) and torch.is_complex(torch.as_tensor(x)):
        raise DtypeError(f"a real number is needed here; got {x!r}.")
    try:
        return torch.as_tensor(x, dtype=torch.float64, device=x.device if isinstance(x, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(f"a number or a tensor of numbers is needed here; got {x!r}.") from error


def require(ok: bool | Tensor, message: str) -> None:
    """Raise ValueRangeError with this message unless ok (everywhere); a graph has no values to look at."""
    if isinstance(ok, Tensor) and torch.compiler.is_compiling():
        return
    if not bool(ok.all() if isinstance(ok, Tensor) else ok):
        raise ValueRangeError(message)


def finite(number: float) -> bool:
    """Whether a number is neither nan nor infinite; by comparing, since a symbolic one has no math.isfinite.

    The largest double is written out: a name would become one more symbol of a graph.
    """
    return -1.7976931348623157e308 <= number <= 1.7976931348623157e308


def check_kind(name: str, given: object, kind: type, hint: str) -> None:
    """An object of this class; the class itself, which is often given in its place, is named as what it is."""
    if not isinstance(given, kind):
        got = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise DtypeError(f"{name} must be a {kind.__name__}; got {got}. {hint}")


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
        cure = f"{name}.long()" if isinstance(tensor, Tensor) else f"torch.as_tensor({name})"
        raise DtypeError(f"{name} must be a tensor of integers (torch.long); got {got}. Use {cure}.")


def check_matrix(name: str, tensor: Tensor) -> None:
    check_float(name, tensor)
    if tensor.dim() < 2:
        raise ShapeError(
            f"{name} must have at least two dimensions (..., n, dim); got {shape_text(tensor)}. "
            f"Add the missing one with {name}.unsqueeze(0)."
        )


def check_device(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    first: tuple[str, torch.device] | None = None
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise DeviceError(
                f"all tensors must be on one device; {first[0]} is on {first[1]} and {name} on {tensor.device}. "
                f"Move one with .to()."
            )


def check_pair(query: Tensor, key: Tensor, *, alike: bool = True) -> None:
    """Query and key can be compared; `alike`: by an inner product, which takes the same number of features of both."""
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
    """Fewer key heads than query heads require `grouped=True`; non-tensors are rejected later."""
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() < 3 or key.dim() < 3:
        return
    many, few = query.shape[-3], key.shape[-3]
    if 1 < few < many and many % few == 0:
        raise ShapeError(
            f"query has {many} heads and key {few}; got query {shape_text(query)} and key {shape_text(key)}. "
            f"Grouped queries need enable_gqa=True in attention, grouped=True in Gibbs; tensors laid out as "
            f"(batch, n, heads, dim) need .transpose(1, 2)."
        )


def check_value(value: Tensor, key: Tensor) -> None:
    check_matrix("value", value)
    if value.shape[-2] != key.shape[-2]:
        raise ShapeError(
            f"value must have one row per key; got {value.shape[-2]} values for {key.shape[-2]} keys "
            f"(value {shape_text(value)}, key {shape_text(key)}). Positions are the last dimension but one of both."
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
    """Whether a tensor of this shape expands to that one; a graph cannot catch what torch would raise."""
    missing = len(wanted) - len(given)
    # compared one by one: a tracer finds no number in a tuple that holds a symbol
    return missing >= 0 and not [1 for a, b in zip(given, wanted[missing:], strict=True) if a != 1 and a != b]


def broadcast_batch(named: Sequence[tuple[str, Sequence[int]]]) -> tuple[int, ...]:
    """The common batch shape, or an error that names the tensor that does not fit."""
    out: tuple[int, ...] = ()
    for name, shape in named:
        try:
            out = broadcast(out, shape)
        except ShapeError:
            raise ShapeError(
                f"batch dimensions must broadcast; {name} has {tuple(shape)}, the others {out}. "
                f"{_cure(name, shape, out)}"
            ) from None
    return out


def _cure(name: str, shape: Sequence[int], others: Sequence[int]) -> str:
    """A missing dimension, or heads and positions the wrong way round."""
    if len(shape) < len(others):
        return f"Unsqueeze the dimension that is missing (for heads: {name}.unsqueeze(1))."
    if len(shape) > 1 and tuple(shape[:-1]) == tuple(others[-len(shape) : -1]):
        return (
            "Heads come before positions, (batch, heads, n, dim): tensors laid out as (batch, n, heads, dim) need "
            ".transpose(1, 2) each; fewer key heads than query heads need enable_gqa=True (grouped=True in Gibbs)."
        )
    return "Give sizes that are equal, or 1 where one entry serves all."


def check_classwise(name: str, given: Tensor, n_class: int) -> None:
    """A number per class."""
    check_float(name, given)
    if tuple(given.shape) != (n_class,):
        raise ShapeError(f"{name} must hold one number per class, shape ({n_class},); got {shape_text(given)}.")


def check_rows(name: str, given: Tensor, rows: Tensor, over: str = "query") -> None:
    """A number per row, or one for several."""
    check_float(name, given)
    check_device((over, name), (rows, given))
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
            f"{cure_of_mask('bias', bias, n_query, n_key)}"
        )


def cure_of_mask(name: str, given: Tensor, n_query: int, n_key: int) -> str:
    """How a mask or bias that does not fit becomes one over (..., n_query, n_key)."""
    if given.dim() == 2 and given.shape[-1] == n_key:
        return f"A padding mask (batch, n_key) needs {name}[:, None, None], or {name}[:, None] without heads."
    if given.dim() == 1 and given.shape[0] == n_query:
        return f"One number per query is {name}[:, None]."
    return f"One of shape (batch, n_query, n_key), for inputs with heads, needs {name}[:, None]."


def check_target(target: Tensor, n_key: int) -> None:
    check_index_dtype("target", target)
    outside = _outside(target, n_key)
    if outside:
        raise TargetError(
            f"target must name a key, 0 <= target < {n_key}; got {outside}. "
            f"Rows without a target are -100 in nll, log_prob and target_rank, and ignore_index in the cross entropies."
        )


def check_classes(index: Tensor, n_class: int, ignore_index: int) -> None:
    """Class indices of the rows that count."""
    outside = _outside(index, n_class)
    if outside:
        raise TargetError(
            f"target must name a class, 0 <= target < {n_class}, or be ignore_index = {ignore_index}; got {outside}. "
            f"Rows without a class are left out by giving their number as ignore_index."
        )


def within(index: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
    """Indices that can be gathered, and which of them name nothing; None where a check has looked at them.

    On a device, whose values are not read, one out of range is brought into it; its row is nan.
    """
    if index.is_cpu or not n:
        return index, None
    return index.clamp(0, n - 1), (index < 0) | (index >= n)


def _outside(index: Tensor, n: int) -> str | None:
    """What indices there are, if some name nothing; None where all do, or where values cannot be looked at."""
    if not has_values(index) or not index.numel():
        return None
    low, high = torch.stack(torch.aminmax(index)).tolist()
    return None if low >= 0 and high < n else f"values from {low} to {high}"


def check_positions(n_query: int, n_key: int) -> None:
    """Sums and differences of positions fit into the 32 bits that a support is kept in."""
    if n_query + n_key > 1 << 29:
        raise ShapeError(
            f"a support by position takes up to {1 << 29} queries and keys together; got {n_query} and {n_key}. "
            f"Split the keys and merge their states (partita.merge)."
        )


def check_positive(name: str, number: float, *, zero: bool = False) -> None:
    if not (_is_number(number) and (number >= 0 if zero else number > 0)):
        kind = "not negative" if zero else "positive"
        raise ValueRangeError(f"{name} must be a finite number, {kind}; got {number!r}.")


def check_number(name: str, number: float, least: float | None = None, most: float | None = None) -> None:
    """A finite number, where these are given between them."""
    if not (_is_number(number) and (least is None or number >= least) and (most is None or number <= most)):
        floor, roof = "" if least is None else f", at least {least}", "" if most is None else f", at most {most}"
        raise ValueRangeError(f"{name} must be a finite number{floor}{roof}; got {number!r}.")


def _is_number(number: object) -> bool:
    """A finite real number; an integer only as far as a tensor can be multiplied by it."""
    if isinstance(number, bool):
        return False
    if isinstance(number, int):
        return -(1 << 63) <= number < 1 << 63
    return isinstance(number, float) and finite(number)


def check_whole(name: str, number: object, *, least: int = -(1 << 63)) -> None:
    """A whole number that a 64-bit index can hold."""
    fine = isinstance(number, int) and not isinstance(number, bool) and least <= number < 1 << 63
    if not fine:
        floor = "" if least < 0 else f", at least {least}" if least else ", not negative"
        raise ValueRangeError(f"{name} must be a whole number{floor}; got {number!r}.")


def check_reduction(reduction: Reduction) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueRangeError(f"reduction must be 'none', 'mean' or 'sum'; got {reduction!r}.")


def check_no_generator(generator: torch.Generator | None) -> None:
    """A draw inside a graph takes no generator."""
    if generator is not None:
        raise ValueRangeError("a compiled graph has no generator: leave it None, torch.manual_seed governs the draw.")
