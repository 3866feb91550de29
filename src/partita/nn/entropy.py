"""Entropy in training: what attention layers lay aside for the loss, and how it is picked up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

__all__ = ["entropy_loss"]


def entropy_loss(model: nn.Module) -> Tensor:
    """The sum of the entropy penalties of a model's attention layers, as its last forward left them; 0 if none did.

        loss = task + entropy_loss(model)          penalty of a layer = -mean_i weight_i H_i / log n_i        (M-INF-5)

    Layers with an `attention_entropy_weight` (of `partita.nn`, or of `partita.hf.register`) leave their penalty in
    `entropy_loss` while they train; here they are added up and taken away, so that no graph outlives its step. A layer
    that is called several times in a forward leaves the penalty of its last call. Inside `with partita.watch(model)`
    the sum is a row of `losses` in the record.

    >>> layer = partita.nn.MultiheadAttention(8, 2, attention_entropy_weight=0.1)
    >>> _ = layer(torch.zeros(5, 1, 8), torch.zeros(5, 1, 8), torch.zeros(5, 1, 8))
    >>> entropy_loss(layer).item()  # equal scores are as broad as can be: -0.1 * 1
    -0.1...
    """
    found = []
    for module in model.modules():
        penalty = module.__dict__.get("entropy_loss")
        if isinstance(penalty, Tensor):
            found.append(penalty)
            module.__dict__["entropy_loss"] = None
    if found:
        return picked_up(torch.stack([x.to(found[0].device) for x in found]).sum())
    first = next(model.parameters(), None)
    return torch.zeros((), device=None if first is None else first.device)


def picked_up(penalty: Tensor) -> Tensor:
    """The penalty as it is; a TorchFunctionMode, such as a watch's, sees it pass. A graph has no modes."""
    if not torch.compiler.is_compiling() and torch._C._is_torch_function_mode_enabled():
        seen: Tensor = handle_torch_function(picked_up, (), penalty)
        return seen
    return penalty
