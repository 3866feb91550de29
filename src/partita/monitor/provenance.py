"""Where and how a record was made. No host names, no paths, no environment variables."""

from __future__ import annotations

import platform
import sys
import time
from importlib import metadata
from typing import Any

import torch


def provenance(model: torch.nn.Module | None, options: dict[str, Any]) -> dict[str, Any]:
    """Version, machine kind, model class and size, options."""
    about: dict[str, Any] = {
        "partita": _version("partita"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "options": options,
    }
    if "transformers" in sys.modules:
        about["transformers"] = _version("transformers")
    if model is not None:
        parameters = list(model.parameters())
        about["model"] = type(model).__name__
        about["parameters"] = sum(p.numel() for p in parameters)
        about["dtype"] = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})) or "none"
        about["device"] = ", ".join(sorted({p.device.type for p in parameters})) or "none"
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if implementation:
            about["attention"] = str(implementation)
        if (longest := positions(model)) is not None:
            about["positions"] = longest
    return about


def positions(model: torch.nn.Module) -> int | None:
    """The longest input the model says it takes."""
    config = getattr(model, "config", None)
    found = [getattr(config, n, None) for n in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return next((int(n) for n in found if isinstance(n, int) and n > 0), None)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
