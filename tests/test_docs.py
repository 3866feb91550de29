"""Every code block of the documentation runs, every printed result is true, every link leads somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import partita

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "theory" / "docs").rglob("*.md")])
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"^<!-- needs: ([\w ]+) -->$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")  # pictures too


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """(line of the first statement, code) of each ```python block."""
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start()) + 2, match.group(1)


def run_block(code: str, line: int, page: str, namespace: dict[str, object]) -> None:
    """Run a plain block, or a session with >>> whose results are compared with what is printed."""
    if ">>>" not in code:
        # Leading newlines, so that a traceback names the line of the page.
        exec(compile("\n" * (line - 1) + code, page, "exec", dont_inherit=True), namespace)
        return
    test = doctest.DocTestParser().get_doctest(code, namespace, page, page, line - 1)
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=failures.append, clear_globs=False)
    namespace.update(test.globs)  # a doctest works on a copy
    assert not failures, "".join(failures)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=name)
def test_code_blocks_run(page: Path) -> None:
    missing = [p for p in " ".join(NEEDS.findall(page.read_text())).split() if importlib.util.find_spec(p) is None]
    if missing:
        pytest.skip(f"{name(page)} is about {', '.join(missing)}, which is not installed; make test-peers has it")
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for line, code in python_blocks(page.read_text()):
        run_block(code, line, name(page), namespace)


def modules() -> Iterator[str]:
    yield "partita"
    extras = {"partita.engine.backends.triton.kernels.": "triton", "partita.hf.cache": "transformers"}
    for found in pkgutil.walk_packages(partita.__path__, "partita."):
        needed = [extra for name, extra in extras.items() if found.name.startswith(name)]
        if needed and importlib.util.find_spec(needed[0]) is None:
            continue
        if found.name == "partita.theory":  # says where it has gone
            continue
        if not found.name.endswith(".libpartita_native"):  # beside the modules that load it, and itself none
            yield found.name


@pytest.mark.parametrize("module", sorted(modules()))
def test_docstring_examples_are_true(module: str) -> None:
    loaded: ModuleType = importlib.import_module(module)
    torch.manual_seed(0)
    failed, _ = doctest.testmod(loaded, optionflags=FLAGS, extraglobs={"torch": torch, "partita": partita})
    assert failed == 0


def site_tool(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file, ROOT / "tools" / "site" / f"{file}.py")
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[file] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def test_equations_are_typeset_as_their_docstrings_say() -> None:
    assert doctest.testmod(site_tool("equations")).failed == 0


# A name must not depend on what was imported before it: each module is looked for in a process that has imported torch,
# partita and the packages it is in. Where processes cannot be forked, one after the other.
LOOK_FOR = """
import json, operator, os, sys
import partita
import torch

def look(name, found, inside):
    for part, parts in inside.items():
        if parts is None:
            continue
        if hasattr(os, "fork") and (child := os.fork()):
            os.waitpid(child, 0)
            continue
        with_name(name, found, part, parts)
        if hasattr(os, "fork"):
            sys.stdout.flush()
            os._exit(0)
    for part, parts in inside.items():
        if parts is None:
            with_name(name, found, part, {})

def with_name(name, package, part, parts):
    try:
        found = operator.attrgetter(part)(package)
    except ModuleNotFoundError as error:
        if error.name.startswith("partita"):  # others are optional
            print(f"{name}.{part}", repr(error))
    except Exception as error:
        print(f"{name}.{part}", repr(error))
    else:
        look(f"{name}.{part}", found, parts)

look("partita", partita, json.load(sys.stdin))
"""


def test_every_dotted_name_is_there_after_importing_partita_alone() -> None:
    """Of the pages and of the site; the changelog names what is gone."""
    texts = [p for p in PAGES if p.name != "CHANGELOG.md"]
    texts += [p for p in (ROOT / "tools" / "site").rglob("*") if p.suffix in (".py", ".yml", ".html", ".js")]
    named = re.compile(r"(?<![\w./@-])partita(?:\.[A-Za-z_]\w*)+")
    names = {found for text in texts for found in named.findall(text.read_text(encoding="utf-8"))}
    assert {"partita.monitor.callbacks.trainer_callback", "partita.attention"} <= names
    tree: dict[str, Any] = {}  # modules have a dictionary, what else they hold has none
    for each in sorted(names):
        at, path, parts = tree, Path(partita.__file__).parent, each.split(".")[1:]
        while parts and ((path := path / parts[0]).is_dir() or path.with_suffix(".py").is_file()):
            at = at.setdefault(parts.pop(0), {})
        if parts:
            at[".".join(parts)] = None
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK_FOR], input=json.dumps(tree), capture_output=True, text=True, env=env
    )
    assert not done.stdout + done.stderr
    assert done.returncode == 0


def anchors(page: Path) -> set[str]:
    """The fragments a forge gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, fragment = link.partition("#")
        goal = (page.parent / file).resolve() if file else page
        assert goal.exists(), f"{name(page)} links to {link}, which does not exist"
        if fragment and goal.suffix == ".md":
            assert fragment in anchors(goal), f"{name(page)} links to {link}; no such heading"


def test_the_pages_are_reached_from_the_index() -> None:
    """A page without links to it is not read."""
    seen, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for link in LINK.findall(page.read_text()):
            goal = (page.parent / link.partition("#")[0]).resolve()
            if goal.is_file():
                queue.append(goal)
    assert not set(PAGES) - seen


def test_every_environment_variable_is_documented() -> None:
    """What a variable changes, a reader must be able to find out: one of them loads a library."""
    packages = [Path(partita.__file__).parent, ROOT / "theory" / "partita_theory"]
    sources = [*(path for each in packages for path in each.rglob("*.py")), *(ROOT / "native").glob("*.cpp")]
    read = re.compile(r"(?:environ(?:\.get\(|\[)|getenv\()\s*\"(PARTITA_\w+)\"")
    found = {variable for source in sources for variable in read.findall(source.read_text(encoding="utf-8"))}
    assert {"PARTITA_BACKEND", "PARTITA_ISA", "PARTITA_NATIVE_LIBRARY"} <= found
    page = (ROOT / "docs" / "reference" / "conventions.md").read_text(encoding="utf-8")
    assert not {variable for variable in found if f"| `{variable}` |" not in page}


def test_a_wrong_result_in_a_page_is_noticed() -> None:
    """The checker itself: a false claim must fail."""
    with pytest.raises(AssertionError, match="Expected"):
        run_block(">>> 1 + 1\n3\n", 1, "page", {})
    with pytest.raises(ZeroDivisionError):
        run_block("1 / 0\n", 1, "page", {})


NAME = re.compile(r"(?<![\w./-])partita(?:\.[A-Za-z]\w*)+(?![\w/])")  # partita.record/1 is the name of a format


def resolves(name: str, modules: set[str]) -> bool:
    """A module, or an attribute of the longest part of the name that is one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (module := ".".join(parts[:end])) in modules:
            try:
                found: object = importlib.import_module(module)
            except ImportError:
                return True  # it needs a package that is not installed here
            for part in parts[end:]:
                found = getattr(found, part, None)
            if found is not None:
                return True
    return False


def test_names_in_docstrings_messages_and_pages_can_be_reached():
    """`partita.watch.tensorboard` in a docstring, where watch is a function, leads nowhere."""
    told = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which speaks of names that were
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in told}
    package = Path(partita.__file__).parent
    modules = {".".join(p.relative_to(package.parent).with_suffix("").parts) for p in package.rglob("*.py")}
    modules |= {name.removesuffix(".__init__") for name in modules}
    for path in sorted(package.rglob("*.py")):
        if path == package / "theory.py":  # names what is no longer here
            continue
        strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        texts[str(path)] = "\n".join(s for s in strings if isinstance(s, str))
    names = {name: where for where, text in texts.items() for name in NAME.findall(text)}
    names.pop("partita.commands", None)  # a group of entry points
    lost = {name: where for name, where in names.items() if not resolves(name, modules)}
    assert not lost, lost


def test_every_public_name_is_on_a_page() -> None:
    """Pages for people, that is: not the generated lists. What tests/exports.txt gives a reason for needs no page."""
    made = {"statements.md", "sections.md", "compile.md", "errata.md", "log.md", "study-log.md", "verdicts.md"}
    text = "\n".join(p.read_text(encoding="utf-8") for p in PAGES if p.name not in made | {"CHANGELOG.md"})
    words = set(re.findall(r"\w+", text))
    lines = (ROOT / "tests" / "exports.txt").read_text(encoding="utf-8").splitlines()
    public = [line.split()[0] for line in lines if line and not line.startswith("#") and "  - " not in line]
    assert not [name for name in public if name.rpartition(".")[2] not in words]
