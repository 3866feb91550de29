"""The programs of tools/, which are no package: loaded by their path."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parents[2] / "tools"


def program(path: str) -> ModuleType:
    """Such as `site/studies.py`."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_program", TOOLS / path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
