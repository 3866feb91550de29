"""Names that are loaded when they are first used: what a package's `__getattr__` calls."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["load"]


def load(package: str, name: str, home: Mapping[str, str]) -> Any:
    """A name of a package, from the module of `home` that has it; or one of the package's own modules."""
    try:
        if name in home:
            found = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        elif name.startswith("_"):  # doctest, pickle and inspect look these up in every module
            raise ModuleNotFoundError(name=f"{package}.{name}")
        else:
            found = importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{name}":  # it is there, and needs a package that is not
            raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
    setattr(sys.modules[package], name, found)
    return found
