"""A key-value cache that keeps the keys with the most attention received, and the most recent ones.

    score_j = sum over the queries so far of p(j|i)          summed over the query heads that share a key head

After every call each key head keeps its `keep` best keys by that score and its `recent` last ones. Kept keys are not
recomputed and stay at their position; memory is O(keep + recent).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from partita._checks import check_whole
from partita.errors import ValueRangeError
from partita.hf.attention import NAMES, OBSERVERS

__all__ = ["HeavyHitterLayer", "heavy_hitter_cache"]


def heavy_hitter_cache(model: Any, keep: int, recent: int) -> Any:
    """A cache that keeps, in each key head, the keys that received most attention and the last ones.

        model.generate(**inputs, past_key_values=heavy_hitter_cache(model, keep=192, recent=64))

    No matrix of weights is made. With keep=0 it is a recent window. The model's attention must be partita's, since no
    other gives the attention received per key.
    """
    check_whole("keep", keep, least=0)
    check_whole("recent", recent, least=1)
    config = model.config.get_text_config(decoder=True)
    own = getattr(config, "_attn_implementation", None)
    if own not in NAMES:
        raise ValueRangeError(
            f"the attention of this model is {own!r}, which gives no attention received per key. First call "
            f"partita.hf.register() and model.set_attn_implementation('partita')."
        )
    return Cache(layers=[HeavyHitterLayer(keep, recent) for _ in range(config.num_hidden_layers)])


class HeavyHitterLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of the cache; the attention function of `partita.hf` passes it what its keys received."""

    is_croppable = False

    def __init__(self, keep: int, recent: int) -> None:
        super().__init__()
        self.keep, self.recent = keep, recent
        self.cumulative_length = 0  # tokens seen, kept or not
        self.received: Tensor | None = None  # (batch, key heads, kept)
        self.positions: Tensor | None = None  # the same, int64: which tokens those are

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        shape = key_states.shape[:-1]
        first, self.cumulative_length = self.cumulative_length, self.cumulative_length + shape[-1]
        place = torch.arange(first, self.cumulative_length, device=keys.device).expand(shape)
        dtype = torch.promote_types(keys.dtype, torch.float32)
        none = torch.zeros(shape, dtype=dtype, device=keys.device)
        self.received = none if self.received is None else torch.cat([self.received, none], -1)
        self.positions = place if self.positions is None else torch.cat([self.positions, place], -1)
        OBSERVERS[keys] = self.observe
        return keys, values

    @torch.no_grad()
    def observe(self, received: Tensor) -> None:  # (batch, key heads, n_key)
        """Add what the keys received in a call, and drop those that received least."""
        assert self.received is not None
        self.received = self.received + received
        n = self.received.shape[-1]
        if n <= self.keep + self.recent:
            return
        old = self.received[..., : n - self.recent]
        best = old.sort(dim=-1, descending=True, stable=True).indices[..., : self.keep].sort(-1).values
        last = torch.arange(n - self.recent, n, device=old.device).expand(*old.shape[:-1], self.recent)
        index = torch.cat([best, last], -1)
        self._change(
            lambda t: t.gather(2, index.view(*index.shape, *[1] * (t.dim() - 3)).expand(*index.shape, *t.shape[3:]))
        )

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Kept keys come just before the new ones: all of them are in the past of every query."""
        kept = 0 if self.received is None else self.received.shape[-1]
        return kept + query_length, self.cumulative_length - kept

    def reset(self) -> None:
        self.received = self.positions = None
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("a cache that has dropped keys cannot be rolled back.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda t: t[indices, ...])

    def _change(self, change: Any) -> None:
        if self.received is not None:
            for name in ("keys", "values", "received", "positions"):
                setattr(self, name, change(getattr(self, name)))
