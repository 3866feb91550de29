"""Which keys count: lazy descriptions, joined by `&` and `|`.

    causal()                     j <= i                       rows and columns aligned at the top left
    causal("bottom-right")       j <= i + n_key - n_query     the last row sees every key (cached decoding)
    window(left, right)          i - left <= j <= i + right   None is unbounded
    lengths(key_lengths)         j < length                   padding
    segments(q_ids, k_ids)       q_ids[i] == k_ids[j]         packed documents
    not_self()                   j != i
    mask(bool)                   mask[i, j]
    all()                        every key

Patterns of sparse attention, made of the same row intervals and ids:

    dilated(step, left, right)   j = i + t step, -left <= t <= right
    strided(stride, window)      j = i mod stride, or |i - j| <= window
    blocks(block, layout)        layout[i // block, j // block]
    global_tokens(positions)     i or j is one of the positions

Nothing of size n_query * n_key is built, except by `dense`.
"""

from partita.support.base import Support
from partita.support.kinds import (
    all,
    blocks,
    causal,
    dilated,
    global_tokens,
    lengths,
    mask,
    not_self,
    segments,
    strided,
    window,
)  # fmt: skip

__all__ = [
    "Support", "all", "blocks", "causal", "dilated", "global_tokens", "lengths", "mask", "not_self", "segments",
    "strided", "window",
]  # fmt: skip
