"""Thin callbacks for trainers: they start the watch, name the steps, and end it. What a trainer does between its steps
(evaluation) is not looked at. Neither trainer is imported here until its callback is made."""

from __future__ import annotations

import importlib
from typing import Any

from partita.monitor.handle import Watch

__all__ = ["LightningCallback", "from_lightning", "lightning_callback", "trainer_callback"]


class LightningCallback:
    """For Lightning: `Trainer(callbacks=[lightning_callback(every=50)])`, which derives this from Lightning's own."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.watch: Watch | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.watch = Watch(pl_module, **self.options)
        self.watch.set_step(None)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.watch is not None:
            self.watch.set_step(int(trainer.global_step))
            if self.watch.observing:
                self.watch.open()  # training_step is a method: its loss is made outside any call of a module

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.watch is not None:
            self.watch.shut()
            self.watch.set_step(None)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.watch is not None:
            self.watch.shut()
            self.watch.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)


def from_lightning(made: type, *args: Any, **options: Any) -> Any:
    """An object of this class that Lightning takes for a callback: of `lightning`, or of `pytorch_lightning`."""
    try:
        base: Any = importlib.import_module("lightning.pytorch.callbacks")
    except ImportError:
        base = importlib.import_module("pytorch_lightning.callbacks")
    return type(made.__name__, (made, base.Callback), {})(*args, **options)


def lightning_callback(**options: Any) -> Any:
    """A Lightning callback; needs lightning or pytorch_lightning. `callback.watch` is the handle.

    Batches whose gradients are accumulated are one step, validation is not looked at.
    """
    return from_lightning(LightningCallback, **options)


def trainer_callback(**options: Any) -> Any:
    """A callback for the transformers Trainer: `Trainer(..., callbacks=[trainer_callback(every=50)])`.

    The callback sees no activations: it names the steps, and the watch on the model does the rest. Batches whose
    gradients are accumulated are one step, evaluation is not looked at. A loss that is a module outside the model
    (sentence-transformers) is seen; one that is a function is not, unless the model calls it.
    """
    from transformers import TrainerCallback

    class PartitaCallback(TrainerCallback):  # type: ignore[misc]
        watch: Watch | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.watch = Watch(model, **options)
            self.watch.set_step(None)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watch is not None:
                self.watch.set_step(int(state.global_step))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watch is not None:
                self.watch.set_step(None)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watch is not None:
                self.watch.detach()

    return PartitaCallback()
