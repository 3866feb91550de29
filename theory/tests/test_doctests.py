"""Every example in the docstrings runs, and every public function of the mathematics has one, an equation and an id."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import partita
import partita_theory
from partita_theory._domain import public

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
PASSED_ON = {  # names of other modules, and second names
    "geometry": {"cross_entropy_hessian_logits", "fisher_logits", "kl", "softmax_jacobian", "softmax_vjp"},
    "information": {"InformationBound", "mutual_information_bound"},
    "sharpness": {"critical_scale"},
}
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
    for symbol in public(vars(module)):
        thing = getattr(module, symbol)
        if not inspect.isfunction(thing):
            continue
        doc = inspect.getdoc(thing) or ""
        assert ">>>" in doc, f"{name}.{symbol} has no example"
        assert re.search(r"M-[A-Z]+-\d+", doc), f"{name}.{symbol} cites no statement"
        assert re.search(r"^ {4}\S", doc, re.M), f"{name}.{symbol} shows no equation"


@pytest.mark.parametrize("name", MATHEMATICS)
def test_a_module_lists_what_it_defines_and_nothing_it_merely_uses(name):
    """Read off the sources: every function and class without an underscore, of its own or of its files."""
    listed = importlib.import_module(f"partita_theory.{name}").__all__
    path = Path(partita_theory.__file__).parent / name
    files = path.glob("[a-z]*.py") if path.is_dir() else [path.with_suffix(".py")]
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")}
    assert set(listed) - defined == PASSED_ON.get(name, set()) and defined <= set(listed)
    assert len(set(listed)) == len(listed)
