"""While an optimizer steps nobody watches: it calls thousands of functions, and none of them is a softmax or a loss."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from partita.monitor.functions import FunctionMode


class Updates:
    """Takes a function mode off the stack for the time of `optimizer.step()`, in the thread that asked.

    A step with a closure calls the model, and is left alone.
    """

    def __init__(self, mode: FunctionMode) -> None:
        self._mode = mode
        self._thread = 0
        self._hooks: tuple[Any, ...] = ()
        self._above: int | None = None  # modes above ours in the stack it was taken out of, while it is

    def on(self) -> None:
        self._thread = threading.get_ident()
        self._hooks = (register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after))

    def off(self) -> None:
        self.resume()
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()

    def resume(self) -> None:
        """Put the mode back; also when a module is called, in a step or after one that raised and told nobody."""
        above, self._above = self._above, None
        if above is not None:
            self._mode.on(above)

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread or any(callable(x) for x in (*args[1:], *kwargs.values())):
            return
        self.resume()
        self._above = self._mode.off()

    def _after(self, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self.resume()
