"""Functions of this library in the place of another package's, checked, and taken out again."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from partita.errors import BackendError

__all__ = ["Installed", "put"]


class Installed(contextlib.ExitStack):
    """What `install` has done: called, or left as a context manager, it puts the package's own functions back."""

    def __call__(self) -> None:
        self.close()


def put(package: str, version: str, ours: Mapping[tuple[str, str], Any], also: Sequence[str] = ()) -> Installed:
    """Put each of these in the place of what a module of the package calls by this name.

    All are checked first: a package whose functions take other arguments is refused as a whole. `also` are modules
    that import them by name: what is loaded of these is changed too.
    """
    replaced = []
    for (where, name), own in ours.items():
        module = _module(where, package, version)
        theirs = getattr(module, name, None)
        if getattr(_called(theirs), "__module__", None) == f"partita.adapters.{package}":
            raise BackendError(
                f"partita.adapters.{package} is installed already; call what the first install() returned, or leave "
                f"its with block, before you install it again."
            )
        expected, found = _arguments(own), _arguments(theirs)
        if found != expected:
            now = getattr(_module(package, package, version), "__version__", "unknown")
            takes = "is not there" if found is None else f"takes ({', '.join(found)})"
            raise BackendError(
                f"partita.adapters.{package} was made for {package} {version}, whose {where}.{name} takes "
                f"({', '.join(expected or [])}); that of {package} {now} {takes}. Run pip install "
                f"{package}=={version}, or train without install()."
            )
        known = [module, *(sys.modules[x] for x in also if x in sys.modules)]
        replaced += [(m, name, theirs, own) for m in known if hasattr(m, name)]
    undo = Installed()
    for module, name, theirs, own in replaced:
        setattr(module, name, own)
        undo.callback(setattr, module, name, theirs)
    return undo


def _module(name: str, package: str, version: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendError(
            f"partita.adapters.{package} needs {package}, made for {version}: {name} cannot be imported ({error}). "
            f"Run pip install {package}=={version}."
        ) from error


def _called(given: Any) -> Any:
    """What runs: the forward of an autograd function or a module, or the function itself."""
    owner = getattr(given, "__self__", given)  # of Function.apply
    forward = getattr(owner, "forward", None)
    return forward if forward is not None else getattr(given, "apply", given)


def _arguments(given: Any) -> list[str] | None:
    """Names of the arguments that may be positional; None of what cannot be called."""
    if not callable(function := _called(given)):
        return None
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind is not p.KEYWORD_ONLY and p.name not in ("self", "ctx")]
