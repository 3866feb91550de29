"""Thin callbacks for trainers: they start the watch, name the steps, and end it. Neither trainer is imported here
until its callback is made."""

from __future__ import annotations

import importlib
from typing import Any

from partita.monitor.handle import Watch


class LightningCallback:
    """For Lightning: `Trainer(callbacks=[LightningCallback(every=50)])`. Lightning takes any object with these methods
    once it is derived from its Callback; `lightning_callback` does that."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.watch: Watch | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.watch = Watch(pl_module, **self.options)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.watch is not None:
            self.watch.set_step(int(trainer.global_step))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.watch is not None:
            self.watch.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)


def lightning_callback(**options: Any) -> Any:
    """A Lightning callback; needs lightning or pytorch_lightning."""
    try:
        base: Any = importlib.import_module("lightning.pytorch.callbacks")
    except ImportError:
        base = importlib.import_module("pytorch_lightning.callbacks")
    made = type("PartitaCallback", (LightningCallback, base.Callback), {})
    return made(**options)


def trainer_callback(**options: Any) -> Any:
    """A callback for the transformers Trainer: `Trainer(..., callbacks=[trainer_callback(every=50)])`.

    The callback sees no activations: it names the steps, and the watch on the model does the rest.
    """
    from transformers import TrainerCallback

    class PartitaCallback(TrainerCallback):  # type: ignore[misc]
        watch: Watch | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.watch = Watch(model, **options)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watch is not None:
                self.watch.set_step(int(state.global_step))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watch is not None:
                self.watch.detach()

    return PartitaCallback()
