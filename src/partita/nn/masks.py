"""Masks as torch's modules take them, which hide, and as the notes do, which show: what is hidden and what is added."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita._checks import has_values
from partita.errors import DtypeError, ShapeError, ValueRangeError

__all__ = ["hidden_and_added", "kept"]


def hidden_and_added(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sizes: tuple[int, int, int, int],  # batch, heads, n_query, n_key
    n_all: int,  # keys with those that add_bias_kv and add_zero_attn append
) -> tuple[Tensor | None, Tensor | None]:
    """What is hidden and what is added, (batch, heads, n_query, n_all) up to broadcasting."""
    hidden: Tensor | None = None
    added: Tensor | None = None
    for mask, name in ((attn_mask, "attn_mask"), (key_padding_mask, "key_padding_mask")):
        if mask is None:
            continue
        mask = nn.functional.pad(_with_heads(mask, name, sizes), (0, n_all - sizes[-1]))
        if mask.dtype == torch.bool:
            hidden = mask if hidden is None else hidden | mask
        elif mask.is_floating_point():
            added = mask if added is None else added + mask
        else:
            raise DtypeError(f"{name} must be boolean (True hides) or floating (added); got {mask.dtype}.")
    return hidden, added


def _with_heads(mask: Tensor, name: str, sizes: tuple[int, int, int, int]) -> Tensor:
    batch, heads, n_query, n_key = sizes
    if name == "key_padding_mask":
        if mask.shape != (batch, n_key):
            raise ShapeError(f"key_padding_mask must be (batch, n_key) = {(batch, n_key)}; got {tuple(mask.shape)}.")
        return mask[:, None, None, :]
    if mask.shape[-2:] == (n_query, n_key):
        if mask.dim() == 2 or mask.dim() == 4:
            return mask
        if mask.dim() == 3 and mask.shape[0] == batch * heads:
            return mask.view(batch, heads, n_query, n_key)
        if mask.dim() == 3 and mask.shape[0] == batch:  # one per batch entry: it gains a head axis
            return mask[:, None]
    raise ShapeError(
        f"attn_mask must be {(n_query, n_key)}, with {batch} or {batch * heads} in front; got {tuple(mask.shape)}."
    )


def kept(mask: Tensor, n_query: int, n_key: int) -> Tensor:
    """A keep-mask as booleans over (..., n_query, n_key)."""
    if mask.dtype != torch.bool:
        if has_values(mask) and not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueRangeError("keep_mask must be boolean, or hold 0 and 1; numbers to be added are attn_mask=.")
        mask = mask != 0
    rows = tuple(mask.shape[-2:])
    if mask.dim() < 2 or rows not in ((n_query, n_key), (1, n_key)):
        raise ShapeError(
            f"keep_mask must be {(n_query, n_key)}, also with batch and heads in front; got {tuple(mask.shape)}. "
            f"Of keys alone it is mask[:, None, :]."
        )
    return mask.expand(*mask.shape[:-2], n_query, n_key)
