"""Foreign code on partita: inside `with replace_sdpa():` torch's attention is partita's."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

import torch.nn.functional as F

from partita.attn import attention
from partita.scale import Policy

__all__ = ["replace_sdpa"]


class replace_sdpa(ContextDecorator):
    """A context manager (or decorator) in which F.scaled_dot_product_attention is `partita.attention`.

    The name in torch.nn.functional is exchanged, for all threads, and put back on leaving, also by an exception. Code
    that took the function out of the module before (from ... import scaled_dot_product_attention) keeps torch's.

    >>> import torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> with replace_sdpa() as block:
    ...     out = F.scaled_dot_product_attention(x, x, x)
    >>> block.calls, torch.allclose(out, F.scaled_dot_product_attention(x, x, x), atol=1e-6)
    (1, True)

    scale: a policy that replaces the scale of every call; None keeps each call's own.
    """

    def __init__(self, *, scale: Policy | None = None):
        self.scale = scale
        self.calls = 0  # how many were served
        self._before: list[Any] = []

    def __enter__(self) -> replace_sdpa:
        self._before.append(F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = self._serve
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        F.scaled_dot_product_attention = self._before.pop()

    def _serve(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.scale is not None:
            kwargs["scale"] = self.scale
        return attention(*args, **kwargs)
