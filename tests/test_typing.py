"""The documented calls type-check for a user: a plain call is a Tensor, with `return_stats=True` it is a pair."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import partita
from partita.attn.problem import Options

ROOT = Path(__file__).parents[1]
# what a user writes -> what a type checker must say of it
USAGE = {
    "partita.attention(x, x, x)": "Tensor",
    "partita.attention(x, x, x, is_causal=True, return_stats=True)": "tuple[Tensor, partita.Stats]",
    "partita.linear_cross_entropy(x, x, y)": "Tensor",
    "partita.linear_cross_entropy(x, x, y, return_stats=True)": "tuple[Tensor, partita.LossStats]",
    "partita.linear_cross_entropy(x, x, y, return_stats=flag)": "Tensor | tuple[Tensor, partita.LossStats]",
    "partita.cross_entropy(x, y, label_smoothing=0.1)": "Tensor",
    "partita.info_nce_loss(x, x)": "Tensor",
    "partita.info_nce_loss(x, x, return_stats=True)[1].effective_negatives": "Tensor",
    "partita.clip_loss(x, x, 10.0)": "Tensor",
    "partita.nt_xent_loss(x, x)": "Tensor",
    "partita.supcon_loss(x, y, return_stats=True)": "tuple[Tensor, partita.contrastive.LabelStats]",
    "partita.Gibbs(x, x).stats()": "partita.Stats",
    "partita.Gibbs(x, x).entropy()": "Tensor",
    "partita.merge(partita.Gibbs(x, x).state(), partita.Gibbs(x, x).state())": "partita.State",
    "partita.support.causal() & partita.support.window(3, None)": "partita.support.Support",
    "partita.scale.LogLength(512)(100, 64)": "Tensor",
    "partita.watch(model).findings()": "list[partita.monitor.Finding]",
    "partita.nn.MultiheadAttention(32, 4)": "partita.nn.MultiheadAttention",
}
# what is no such call -> what mypy and pyright call it
WRONG = {
    'partita.attention(x, x, x, scale="large")': ("call-overload", "reportArgumentType"),
    "partita.linear_cross_entropy(x, x)": ("call-overload", "reportCallIssue"),
    "partita.info_nce_loss(x, x, return_stats=True).backward()": ("attr-defined", "reportAttributeAccessIssue"),
}
HEAD = [
    "import partita",
    "from torch import Tensor, nn",
    "def use(x: Tensor, y: Tensor, model: nn.Module, flag: bool) -> None:",
]
FIRST_WRONG = len(HEAD) + len(USAGE) + 1


def write_user(folder: Path) -> None:
    """A user's file: a line for each call, its type written out; then the wrong ones."""
    lines = [f"    v{k}: {kind} = {call}" for k, (call, kind) in enumerate(USAGE.items())]
    lines += [f"    {call}" for call in WRONG]
    (folder / "user.py").write_text("\n".join([*HEAD, *lines]) + "\n")


def test_the_stub_says_what_the_functions_say() -> None:
    """Each overload has the parameters of the function with their types; only its flag has one of its own."""
    tree = ast.parse((ROOT / "src" / "partita" / "_signatures.pyi").read_text(encoding="utf-8"))
    shared = {name: kind.__forward_arg__ for name, kind in Options.__annotations__.items()}
    options: dict[str, dict[str, str]] = {"Options": shared, "TypedDict": {}}
    overloads: dict[str, list[dict[str, str]]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            inherited = {name: kind for base in node.bases for name, kind in options[ast.unparse(base)].items()}
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            options[node.name] = {**inherited, **{ast.unparse(x.target): ast.unparse(x.annotation) for x in fields}}
        elif isinstance(node, ast.FunctionDef):
            assert node.args.kwarg
            assert isinstance(node.args.kwarg.annotation, ast.Subscript)
            given = [*node.args.args, *node.args.kwonlyargs]
            names = {x.arg: ast.unparse(x.annotation) for x in given if x.annotation}
            overloads.setdefault(node.name, []).append(
                {**names, **options[ast.unparse(node.args.kwarg.annotation.slice)]}
            )
    assert len(overloads) == 8
    for name, found in overloads.items():
        given = inspect.signature(getattr(partita, name)).parameters.values()
        function = {x.name: str(x.annotation).removeprefix("_checks.") for x in given}
        flag = "return_reached" if name == "solve_scale" else "return_stats"
        kinds = ("Literal[False]", "Literal[True]", "bool")
        assert found == [{**function, flag: kind} for kind in kinds], name


def test_documented_calls_have_their_types(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: make test has it")
    write_user(tmp_path)
    # the sources, as a user's checker finds the installed package; what mypy knows of torch is kept between runs
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), "--python-version", "3.10",
         "--follow-imports", "silent", "user.py"],
        cwd=tmp_path, capture_output=True, text=True, env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
    )  # fmt: skip
    found = dict(re.findall(r"user\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE))
    assert found == {str(FIRST_WRONG + k): code for k, (code, _) in enumerate(WRONG.values())}, (
        done.stdout + done.stderr
    )


def test_documented_calls_have_their_types_for_pyright_too(tmp_path: Path) -> None:
    pyright = os.environ.get("PARTITA_PYRIGHT") or shutil.which("pyright")
    if pyright is None:
        pytest.skip("no pyright: npm install pyright, and put it on the PATH or into PARTITA_PYRIGHT")
    write_user(tmp_path)
    settings = {"include": ["user.py"], "extraPaths": [str(ROOT / "src")], "pythonVersion": "3.10"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({**settings, "typeCheckingMode": "standard"}))
    done = subprocess.run(
        [pyright, "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    said = json.loads(done.stdout)["generalDiagnostics"]
    found = {d["range"]["start"]["line"] + 1: d.get("rule") for d in said if d["severity"] == "error"}
    assert found == {FIRST_WRONG + k: rule for k, (_, rule) in enumerate(WRONG.values())}, said
