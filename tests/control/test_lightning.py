"""QK-clip and the watch inside Lightning's own Trainer: its batches, its accumulation, its validation."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from partita.control import lightning_qk_clip_callback
from partita.monitor.callbacks import lightning_callback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about loaders and loggers


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both names of the package; the callback is then derived from the base that the name has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = pytest.importorskip(request.param, reason=f"pip install {request.param.split('.')[0]}")
    found = importlib.import_module

    def only(name: str, *more: Any) -> Any:
        if name.startswith("lightning.") and request.param == "pytorch_lightning":
            raise ImportError(name)
        return found(name, *more)

    monkeypatch.setattr("partita.monitor.callbacks.importlib.import_module", only)
    return package


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


def fit(package: Any, folder: Path, *callbacks: Any, rate: float = 0.0, accumulate: int = 1, fail: bool = False) -> Any:
    """Six batches of four sequences of seven places, validation of two batches before the first and after the last."""

    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.reader, self.seen = Reader(), []

        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = batch
            if fail:
                raise RuntimeError("no step")
            loss = F.cross_entropy(self.reader(x), y)
            self.seen.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            F.cross_entropy(self.reader(100.0 * batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=rate)

    torch.manual_seed(0)
    module = Module()
    with torch.no_grad():
        module.reader.attention.in_proj_weight.mul_(5)
    rows = [(torch.randn(7, 8), i % 5) for i in range(24)]
    train, check = (torch.utils.data.DataLoader(part, batch_size=4) for part in (rows, rows[:8]))
    trainer = package.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks), log_every_n_steps=1,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(module, train, check)
    return trainer


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_clips_after_each_step_of_the_optimizer(lightning: Any, tmp_path: Path, accumulate: int) -> None:
    callback = lightning_qk_clip_callback(0.5)
    assert isinstance(callback, lightning.Callback)
    calls = []

    class Count(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            calls.append((callback.clip._steps, trainer.callback_metrics.get("qk_max_score")))

    trainer = fit(lightning, tmp_path, callback, Count(), accumulate=accumulate)
    assert trainer.global_step == 6 // accumulate
    assert [steps for steps, _ in calls] == [(i + 1) // accumulate for i in range(6)]
    peaks = [float(top) for _, top in calls if top is not None]
    assert peaks[0] > 0.5 * 2  # was far above, and a validation hundred times as loud does not count
    # batches differ by chance: the scores of a later one may pass by a little the threshold that an earlier one met
    assert peaks[-1] < peaks[0] / 2 and not callback.clip.unclipped
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_only_reading_changes_nothing(lightning: Any, tmp_path: Path) -> None:
    callback = lightning_qk_clip_callback(None)
    trainer = fit(lightning, tmp_path, callback)
    torch.manual_seed(0)
    weight = 5 * Reader().attention.in_proj_weight
    assert torch.equal(trainer.lightning_module.reader.attention.in_proj_weight, weight)
    assert list(callback.clip.max_scores) == ["reader.attention"]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_watch_sees_training_steps_and_their_loss(lightning: Any, tmp_path: Path, accumulate: int) -> None:
    callback = lightning_callback()
    assert isinstance(callback, lightning.Callback)
    trainer = fit(lightning, tmp_path, callback, accumulate=accumulate)
    steps = 6 // accumulate
    frame, losses = callback.watch.frame(pandas=False), callback.watch.record.losses
    assert sorted({row["step"] for row in frame}) == [row["step"] for row in losses] == list(range(steps))
    assert {row["rows"] for row in frame} == {4 * 7 * accumulate}  # none of the validation
    assert all(row["training"] for row in frame)
    means = torch.stack(trainer.lightning_module.seen).reshape(steps, accumulate).mean(1)
    assert [row["loss"] for row in losses] == pytest.approx(means.tolist(), rel=1e-5)


def test_steps_that_are_not_observed_leave_no_trace(lightning: Any, tmp_path: Path) -> None:
    callback = lightning_callback(every=4)
    fit(lightning, tmp_path, callback)
    assert callback.watch.record.steps() == [0, 4] and [r["step"] for r in callback.watch.record.losses] == [0, 4]


def test_a_run_that_fails_leaves_torch_as_it_was(lightning: Any, tmp_path: Path) -> None:
    callbacks = lightning_callback(), lightning_qk_clip_callback()
    with pytest.raises(RuntimeError, match="no step"):
        fit(lightning, tmp_path, *callbacks, fail=True)
    assert not _get_current_function_mode_stack()
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"
