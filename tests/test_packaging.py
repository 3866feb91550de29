"""What is installed is what was meant: one dependency, types shipped, one version everywhere."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import re
import sys
import sysconfig
from pathlib import Path

import pytest

import partita

ROOT = Path(__file__).parents[1]


def pyproject_version(folder: Path = ROOT) -> str:
    found = re.search(r'^version = "(.+)"$', (folder / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found.group(1)


@pytest.fixture
def installed() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("partita")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("partita runs from its sources here; `make test` installs it")


def test_torch_is_the_only_requirement(installed: importlib.metadata.Distribution) -> None:
    required = [r for r in installed.requires or [] if "extra ==" not in r]
    assert [re.match(r"[A-Za-z0-9_.-]+", r).group() for r in required] == ["torch"]  # type: ignore[union-attr]


def test_the_wheel_serves_every_python(installed: importlib.metadata.Distribution) -> None:
    tags = re.findall(r"^Tag: (.+)$", installed.read_text("WHEEL") or "", re.MULTILINE)
    assert tags
    assert all(tag.startswith("py3-none-") for tag in tags)


def test_the_wheel_ships_types_and_licence_but_no_sources(installed: importlib.metadata.Distribution) -> None:
    files = {str(f) for f in installed.files or []}
    assert "partita/py.typed" in files
    assert any(f.endswith("licenses/LICENSE") for f in files)
    left_over = [f for f in files if f.endswith((".cpp", ".h", ".hpp", "CMakeLists.txt"))]
    assert not left_over
    assert not [f for f in files if f.split("/")[0] in ("tests", "benchmarks", "docs", "examples", "partita_theory")]


def test_types_are_marked_as_shipped() -> None:
    assert (importlib.resources.files("partita") / "py.typed").is_file()


def test_one_version_everywhere() -> None:
    version = pyproject_version()
    assert partita.__version__ == version
    citation = re.search(r'^version: "?([^"\n]+)"?$', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation
    assert citation.group(1) == version
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest.group(1) == version


def test_the_theory_is_of_the_same_version() -> None:
    if not (ROOT / "theory" / "pyproject.toml").is_file():
        pytest.skip("a wheel is tested, without the rest of the repository")
    version = pyproject_version()
    assert pyproject_version(ROOT / "theory") == version
    assert f'"partita=={version}",' in (ROOT / "theory" / "pyproject.toml").read_text()


def test_the_installed_version_is_the_same(installed: importlib.metadata.Distribution) -> None:
    assert installed.version == pyproject_version()


def test_every_installed_package_is_pinned(installed: importlib.metadata.Distribution) -> None:
    """`make test` must install the same versions tomorrow; GPU builds of torch bring their own pins."""
    if not (Path(sys.prefix) / "dev.stamp").exists():
        pytest.skip("this environment was not made by the Makefile")
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    # Not all of sys.path: setuptools carries copies of others inside itself.
    here = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    names = {d.metadata["Name"].lower().replace("_", "-") for d in here}
    own = {"partita", "partita-theory", "pip", "wheel", "triton"}
    assert not {n for n in names - pinned - own if not n.startswith(("nvidia-", "cuda-"))}
