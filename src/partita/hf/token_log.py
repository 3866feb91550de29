"""What a logit-free language model would have said of its tokens, in the Trainer's log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita.hf.deferred import LISTENERS
from partita.rows import LossStats

__all__ = ["token_log_callback"]


class _Tokens:
    """Sums over the tokens of the step that will be logged."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def __call__(self, stats: LossStats) -> None:
        with torch.no_grad():
            kept = stats.visible > 0  # ignored labels see no class
            rows = torch.stack([kept, stats.correct, -stats.nll, stats.entropy]).double()
            found = torch.where(kept, rows, 0.0).flatten(1).sum(1)
            self.sums = found if self.sums is None else self.sums + found

    def means(self) -> dict[str, float]:
        count, *rest = [0.0] if self.sums is None else self.sums.tolist()
        names = ("token_accuracy", "token_log_prob", "token_entropy")
        return {name: value / count for name, value in zip(names, rest, strict=False)} if count else {}


def token_log_callback() -> Any:
    """A callback for the Trainer of a `logit_free` model: `Trainer(..., callbacks=[token_log_callback()])`.

    Adds `token_accuracy`, `token_log_prob` and `token_entropy` (means over the tokens that count, of the step that is
    logged) to the log and its history. They come with the pass of the loss, on the steps that are logged.
    """
    from transformers import TrainerCallback

    class TokenLogCallback(TrainerCallback):  # type: ignore[misc]
        tokens: _Tokens | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._stop()
            every = max(1, int(state.logging_steps or 1))
            first = state.global_step == 0 and args.logging_first_step
            if first or (state.global_step + 1) % every == 0:
                self.tokens = _Tokens()
                LISTENERS.append(self.tokens)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if self.tokens is not None and logs is not None and "loss" in logs:
                said = self.tokens.means()
                logs.update(said)
                state.log_history[-1].update(said)
            self._stop()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._stop()

        def _stop(self) -> None:
            if self.tokens is not None and self.tokens in LISTENERS:
                LISTENERS.remove(self.tokens)
            self.tokens = None

    return TokenLogCallback()
