"""Every example in the docstrings of the theory runs, and every public function has one, an equation and a spec id."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import partita.theory

FOUND = list(pkgutil.walk_packages(partita.theory.__path__, "partita.theory."))
MODULES = [m.name for m in FOUND if not m.ispkg]


@pytest.mark.parametrize("name", [m.name for m in FOUND])
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("name", [m for m in MODULES if "_domain" not in m])
def test_every_function_says_its_equation_example_and_statement(name):
    module = importlib.import_module(name)
    for symbol in module.__all__:
        thing = getattr(module, symbol)
        if not inspect.isfunction(thing):
            continue
        doc = inspect.getdoc(thing) or ""
        assert ">>>" in doc, f"{name}.{symbol} has no example"
        assert re.search(r"Spec: M-[A-Z]+-\d+", doc.replace("\n", " ")), f"{name}.{symbol} cites no statement"
        assert re.search(r"^ {4}\S", doc, re.M), f"{name}.{symbol} shows no equation"


def test_packages_export_what_their_files_do():
    for info in pkgutil.iter_modules(partita.theory.__path__):
        if not info.ispkg:
            continue
        package = importlib.import_module(f"partita.theory.{info.name}")
        inside = set()
        for sub in pkgutil.iter_modules(package.__path__):
            inside |= set(importlib.import_module(f"{package.__name__}.{sub.name}").__all__)
        assert set(package.__all__) == inside
