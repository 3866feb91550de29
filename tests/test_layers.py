"""Imports go down; the package and its tests know nothing of partita-theory, nor the package of the tests' oracle."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import partita
from tests import reference

SOURCE = Path(partita.__file__).parent
ROOT = Path(__file__).parents[1]
THEORY = ROOT / "theory" / "partita_theory"  # read, never imported
KERNELS = SOURCE / "engine/backends/triton/kernels"  # what Triton compiles

# Each part of the package and how high it stands; a file may import what is strictly lower, and its own part.
LAYERS = {
    "errors": 0,
    "theory": 0,
    "_torch_function": 0,
    "_later": 0,
    "exactness": 0,
    "_checks": 1,
    "precision": 1,
    "_repr": 1,
    "terms": 2,
    "support": 2,
    "scale": 2,
    "score": 2,
    "engine": 3,
    "solve": 4,
    "gibbs": 4,
    "recompute": 4,
    "rows": 4,
    "comparison": 4,
    "losses": 5,
    "contrastive": 5,
    "attn": 5,
    "metrics": 5,
    "calibration": 5,
    "nn": 6,
    "distributed": 4,
    "collective": 4,
    "hf": 6,
    "interception": 6,
    "adapters": 6,
    "monitor": 7,
    "control": 7,
    "cli": 8,
    "__main__": 9,
}
# In one layer, who stands on whom: supports are made of terms, scales count a support, a distribution solves its scale,
# the rows of a loss are read off a distribution.
BESIDE = {
    ("_repr", "_checks"),
    ("support", "terms"),
    ("scale", "terms"),
    ("scale", "support"),
    ("gibbs", "solve"),
    ("control", "monitor"),
    ("comparison", "gibbs"),
    ("distributed", "collective"),
    ("distributed", "rows"),
    ("hf", "interception"),
    ("adapters", "hf"),
    ("collective", "gibbs"),
    ("collective", "rows"),
    ("rows", "recompute"),
}
# A support bound to sizes: these files of the engine know no request, and stand below it.
TERMS = ("axes", "terms")
# Faces read a distribution and never its engine, but the two types that their signatures name.
FACES = ("losses", "contrastive", "attn", "metrics")
PUBLIC_TYPES = {"Stats", "State", "Sums", "Term", "Visibility"}


def files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def part_of(path: Path) -> str:
    first, *rest = path.relative_to(SOURCE).with_suffix("").parts
    return "terms" if first == "engine" and rest[0] in TERMS else first


def imports(tree: ast.AST, *, nested: bool = False) -> list[tuple[str, tuple[str, ...], int]]:
    """(part of partita, names taken from it, line) of every import; only those inside functions if nested."""
    found = []
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        if nested and id(node) not in inside:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            module, names = (node.module or "").split("."), tuple(alias.name for alias in node.names)
            if module[0] != "partita" or module[1:] == ["_signatures"]:  # a stub, which type checkers alone read
                continue
            if module[1:2] == ["engine"] and module[2:3] and module[2] in TERMS:
                found.append(("terms", names, node.lineno))
            elif len(module) > 1:
                found.append((module[1], names, node.lineno))
            else:
                found += [(name, (), node.lineno) for name in names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name.split(".")
                if module[0] == "partita":
                    found.append((module[1] if len(module) > 1 else "partita", (), node.lineno))
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path):
    part, tree = part_of(path), ast.parse(path.read_text())
    assert part in LAYERS, f"{part} has no layer: give it one here and in the design"
    height = LAYERS[part]
    for target, _, line in imports(tree):
        where = f"{path.name}:{line} imports {target}"
        if target == part:
            continue
        if height >= 7 and (target == "partita" or target not in LAYERS):
            continue  # watch and the command line use public names
        assert target in LAYERS, f"{where}, which has no layer"
        assert LAYERS[target] < height or (part, target) in BESIDE, f"{where}, which does not stand below it"


def test_the_order_says_nothing_that_is_not_there():
    """Every part that has a layer exists, and every neighbour that is allowed is really imported."""
    assert set(LAYERS) == {part_of(path) for path in files()}
    used = {(part_of(path), target) for path in files() for target, _, _ in imports(ast.parse(path.read_text()))}
    assert used >= BESIDE, BESIDE - used


@pytest.mark.parametrize("folder", ["src/partita", "tests"])
def test_nothing_imports_the_theory(folder):
    """partita-theory stands on partita and nothing of partita, nor of its tests, on it; commands are entry points."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "importorskip")):
                names += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            assert not [name for name in names if str(name).startswith("partita_theory")], f"{path}:{node.lineno}"


def test_the_oracle_imports_torch_alone():
    modules = set()
    for node in ast.walk(ast.parse(Path(reference.__file__).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").split(".")[0])
    assert modules == {"__future__", "collections", "math", "torch"}


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_faces_know_no_backend_and_no_other_face(path):
    if part_of(path) not in FACES:
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            named = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
            assert "backends" not in named, f"{path.name}:{node.lineno} imports a backend"
    for target, _, line in imports(tree):
        assert target not in FACES or target == part_of(path), f"{path.name}:{line} imports another face, {target}"


@pytest.mark.parametrize("name", ["losses", "contrastive", "attn"])
def test_faces_never_normalise_by_themselves(name):
    """Stability and the empty row belong to the engine; the exp of a number it gave (a width) is fine."""
    places = [*SOURCE.glob(f"{name}.py"), *SOURCE.glob(f"{name}/**/*.py")]
    forbidden = {"softmax", "log_softmax", "logsumexp"}
    for path in places:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in forbidden, f"{path.name}:{node.lineno} calls {node.func.attr}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_import_hides_in_a_function_to_dodge_a_cycle(path):
    """The command line and the monitor may delay imports; below them one inside a function hides a cycle."""
    if LAYERS.get(part_of(path), 0) < 7:
        assert imports(ast.parse(path.read_text()), nested=True) == []


def _without_type_checking(tree: ast.Module) -> ast.Module:
    """The tree without `if TYPE_CHECKING:` blocks, which never run."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return node.orelse
            return self.generic_visit(node)

    return Drop().visit(tree)


def test_torch_is_the_only_dependency_of_what_computes():
    allowed = {"torch", "partita", *sys.stdlib_module_names}
    for path in files():
        if part_of(path) in ("cli", "hf", "monitor", "control", "adapters"):
            continue
        if path.parent == KERNELS:  # not imported until one runs, which tests/triton shows
            continue
        for node in ast.walk(_without_type_checking(ast.parse(path.read_text()))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name}:{node.lineno} imports {name}"


# torch keeps these private and offers nothing else; a NamedTuple and a version counter are public in all but name.
FOREIGN = {"_C", "_version", "_orig_mod", "_current_level", "_forward_hooks", "_forward_pre_hooks", "_parameters"}
FOREIGN |= {"_fields", "_replace", "_asdict", "_make"}
FOREIGN |= {"_torchdynamo_orig_backend", "_clone_with_backend"}  # of torch.compile, for graphs that report
FOREIGN |= {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}  # functions that a graph may call


@pytest.mark.parametrize(
    "path", [*files(), *sorted(THEORY.rglob("*.py"))], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_no_file_uses_a_private_name_of_another(path):
    """`x._name` is defined in the file that says it; a private name that others need is a missing public one."""
    tree = ast.parse(path.read_text())
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            of_torch = ast.unparse(node).startswith(("torch._C.", "torch.ops."))
            assert of_torch or node.attr in own | FOREIGN, f"{path.name}:{node.lineno} uses {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("partita.", "partita_theory.")):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{path.name}:{node.lineno} imports {private}"
