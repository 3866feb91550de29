"""Every example in the docstrings runs, and every public function of the mathematics has one, an equation and an id."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest
import torch

import partita
import partita_theory

FOUND = list(pkgutil.walk_packages(partita_theory.__path__, "partita_theory."))
MATHEMATICS = [
    "contrast",
    "geometry",
    "information",
    "law",
    "layer",
    "robustness",
    "selection",
    "sharpness",
    "spectrum",
]
MODULES = [m.name for m in FOUND if not m.ispkg and m.name.split(".")[1] in MATHEMATICS]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", [m.name for m in FOUND])
def test_examples_run(name):
    loaded = importlib.import_module(name)
    torch.manual_seed(0)
    result = doctest.testmod(loaded, optionflags=FLAGS, extraglobs={"torch": torch, "partita": partita})
    assert result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_function_says_its_equation_example_and_statement(name):
    module = importlib.import_module(name)
    for symbol in module.__all__:
        thing = getattr(module, symbol)
        if not inspect.isfunction(thing):
            continue
        doc = inspect.getdoc(thing) or ""
        assert ">>>" in doc, f"{name}.{symbol} has no example"
        assert re.search(r"M-[A-Z]+-\d+", doc), f"{name}.{symbol} cites no statement"
        assert re.search(r"^ {4}\S", doc, re.M), f"{name}.{symbol} shows no equation"


def test_packages_export_what_their_files_do():
    for info in pkgutil.iter_modules(partita_theory.__path__):
        if not info.ispkg or info.name not in MATHEMATICS:
            continue
        package = importlib.import_module(f"partita_theory.{info.name}")
        inside = set()
        for sub in pkgutil.iter_modules(package.__path__):
            inside |= set(importlib.import_module(f"{package.__name__}.{sub.name}").__all__)
        assert set(package.__all__) == inside
