"""QK-clip inside the Hugging Face Trainer, which is imported when its callback is made."""

from __future__ import annotations

from typing import Any

from partita.control.qk_clip import QKClip

__all__ = ["qk_clip_callback"]


def qk_clip_callback(threshold: float | None = 100.0, **options: Any) -> Any:
    """A callback for the transformers Trainer: `Trainer(..., callbacks=[qk_clip_callback(100.0)])`.

    It clips after every optimizer step; `callback.clip` is the QKClip, with its `max_scores`. Lightning and others need
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
                top = max(float(peak.max()) for peak in self.clip.max_scores.values())
                logs["qk_max_score"] = top
                state.log_history[-1]["qk_max_score"] = top

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.clip is not None:
                self.clip.detach()

    return QKClipCallback()
