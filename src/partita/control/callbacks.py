"""QK-clip inside the Trainers of Hugging Face and Lightning, which are imported when their callbacks are made."""

from __future__ import annotations

from typing import Any

from partita.control.qk_clip import QKClip
from partita.monitor.callbacks import from_lightning

__all__ = ["lightning_qk_clip_callback", "qk_clip_callback"]


def qk_clip_callback(threshold: float | None = 100.0, **options: Any) -> Any:
    """A callback for the transformers Trainer: `Trainer(..., callbacks=[qk_clip_callback(100.0)])`.

    It clips after every optimizer step; `callback.clip` is the QKClip, with its `max_scores`. A loop of one's own needs
    no callback: `QKClip(model).after(optimizer)`.
    """
    from transformers import TrainerCallback

    class QKClipCallback(TrainerCallback):  # type: ignore[misc]
        clip: QKClip | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.clip = QKClip(model, threshold, **options)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.clip is not None:
                self.clip.step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if self.clip is not None and logs is not None and self.clip.max_scores:
                top = _top(self.clip)
                logs["qk_max_score"] = top
                state.log_history[-1]["qk_max_score"] = top

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.clip is not None:
                self.clip.detach()

    return QKClipCallback()


class LightningQKClip:
    """For Lightning; `lightning_qk_clip_callback` derives it from Lightning's own callback."""

    def __init__(self, threshold: float | None = 100.0, **options: Any) -> None:
        self.threshold, self.options = threshold, options
        self.clip: QKClip | None = None
        self._taken = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # what the strategy made of the module: the shell of FSDP is needed to see whole parameters
        self.clip = QKClip(trainer.strategy.model, self.threshold, **self.options)
        self._taken = int(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        taken = int(trainer.global_step)  # counts steps of optimizers: accumulated batches leave it as it is
        if self.clip is not None and taken != self._taken:
            self._taken = taken
            self.clip.step()
            if self.clip.max_scores:
                pl_module.log("qk_max_score", _top(self.clip))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.clip is not None:
            self.clip.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def lightning_qk_clip_callback(threshold: float | None = 100.0, **options: Any) -> Any:
    """A callback for Lightning's Trainer: `Trainer(..., callbacks=[lightning_qk_clip_callback(100.0)])`.

    It clips after each batch that ended in an optimizer's step, and logs `qk_max_score`; `callback.clip` is the QKClip.
    Needs lightning or pytorch_lightning.
    """
    return from_lightning(LightningQKClip, threshold, **options)


def _top(clip: QKClip) -> float:
    return max(float(peak.max()) for peak in clip.max_scores.values())
