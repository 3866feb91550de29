"""open_clip's own training program, run as its front page says, with its losses and then with ours.

A process of its own, started by test_documented.py: what it needs beside open_clip is kept out of the others' sight.

    python -m tests.losses.clip_training folder      writes folder/runs.pt
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# What is asked for beside the documented command, and the precision of the model. As documented the program computes in
# mixed precision, which autocast leaves alone where the model is double.
RUNS = {
    "ClipLoss": ("", torch.float64),
    "ClipLoss, accumulated": ("--accum-freq 2 --local-loss --gather-with-grad", torch.float64),
    "ClipLoss, single": ("--precision fp32", torch.float32),
    "ClipLoss, mixed": ("", torch.float32),
    "SigLipLoss": ("--siglip", torch.float64),
    "SigLipLoss, accumulated": ("--siglip --accum-freq 2", torch.float64),
    "SigLipLoss, single": ("--siglip --precision fp32", torch.float32),
    "SigLipLoss, mixed": ("--siglip", torch.float32),
}

_LIBRARIES: list[torch.library.Library] = []  # torch takes back what a library defined when it goes


def let_torchvision_in() -> None:
    """torchvision, of whose compiled part nothing is computed here.

    A wheel that is linked against CUDA does not load beside a torch without it, and the import stops at the first
    operator that is then missing. Their names are enough for the rest, which is Python.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        names = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(names)
        importlib.import_module("torchvision")


def command(folder: Path) -> list[str]:
    """The arguments of the documented command, with files that exist and as little of everything as will train."""
    text = importlib.metadata.distribution("open_clip_torch").read_text("METADATA")
    assert text is not None
    section = text.split("### Sample single-process running code:")[1]
    documented = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[0].replace("\\\n", " ")
    for what in ("train", "validation"):
        assert f"/path/to/{what}_data.csv" in documented
        documented = documented.replace(f"/path/to/{what}_data.csv", str(folder / f"{what}.csv"))
    # "You can remove this argument if you do not want to perform zero-shot evaluation on ImageNet"
    documented, removed = re.subn(r"--imagenet-val=\S+", "", documented)
    assert removed == 1
    python, m, program, *arguments = shlex.split(documented)
    assert (python, m, program) == ("python", "-m", "open_clip_train.main")
    return [*arguments, *shlex.split("--warmup 2 --batch-size 6 --epochs 2 --workers 0 --device cpu")]


def data(folder: Path) -> None:
    """Pictures of noise, each with a sentence of its own; and RN50 in a size for them."""
    from PIL import Image

    # with seed 0 a rounding decides which way training goes: theirs, with noise of 6e-8 in its gradients, is 1e-3 from
    # itself in two runs of six
    draw = torch.Generator().manual_seed(1)
    for what, count in (("train", 24), ("validation", 6)):
        lines = ["filepath\ttitle"]
        for i in range(count):
            pixels = torch.randint(256, (40, 40, 3), generator=draw, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / f"{what}{i}.png")
            lines.append(f"{folder / f'{what}{i}.png'}\tpicture {i} of the {what} set")
        (folder / f"{what}.csv").write_text("\n".join(lines))
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    (folder / "RN50.json").write_text(json.dumps(config))


def train(main: Any, arguments: list[str], name: str, dtype: torch.dtype) -> dict[str, Any]:
    """One run of the program: every loss it computed, who computed it, and the parameters that it saved."""
    losses: list[Tensor] = []
    homes: set[str] = set()

    def keep(module: nn.Module, given: Any, out: Any) -> None:
        if type(module).__name__ in ("ClipLoss", "SigLipLoss"):
            losses.append(out["contrastive_loss"].detach())
            homes.add(f"{type(module).__module__}.{type(module).__name__}")

    torch.set_default_dtype(dtype)
    hook = nn.modules.module.register_module_forward_hook(keep)
    try:
        main([*arguments, "--name", name])
    finally:
        hook.remove()
        torch.set_default_dtype(torch.float32)
    saved = torch.load(Path("logs") / name / "checkpoints" / "epoch_2.pt")
    return {"losses": torch.stack(losses), "homes": homes, "parameters": saved["state_dict"]}


def run(folder: Path) -> None:
    os.chdir(folder)  # the program writes where it is
    let_torchvision_in()
    data(folder)
    import open_clip
    from open_clip import factory
    from open_clip_train.main import main

    open_clip.add_model_config(folder)
    arguments = command(folder)
    found: dict[str, dict[str, Any]] = {name: {} for name in RUNS}
    assert "from .loss import ClipLoss, DistillClipLoss, CoCaLoss, SigLipLoss\n" in inspect.getsource(factory)
    for who in ("theirs", "ours"):
        if who == "ours":  # the import, changed where the program's losses are made: in open_clip.create_loss
            exec("from partita.adapters.open_clip import ClipLoss, SigLipLoss", vars(factory))
        for i, (name, (flags, dtype)) in enumerate(RUNS.items()):
            found[name][who] = train(main, [*arguments, *shlex.split(flags)], f"{who}{i}", dtype)
    torch.save(found, folder / "runs.pt")


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve())
