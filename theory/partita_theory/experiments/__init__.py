"""One file per question; each holds one `EXPERIMENT`. `partita study list` shows them."""

from __future__ import annotations

import importlib
import pkgutil

from partita.errors import ValueRangeError
from partita_theory.experiment import Experiment

__all__ = ["find", "names"]


def names() -> list[str]:
    """Every experiment by name, which is the name of its file."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def find(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in names():
        raise ValueRangeError(f"no experiment is called {name!r}; there are {', '.join(names())}.")
    found = importlib.import_module(f"{__name__}.{name}").EXPERIMENT
    assert isinstance(found, Experiment)
    assert found.name == name
    return found
