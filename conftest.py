"""Seeds, marks, warnings as errors, the backends to test, and how long hypothesis may search."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
import torch

from partita.errors import BackendError
from tests.conformance.serving import names
from tests.pages.browser import browser, visit, wait_for

__all__ = ["browser", "visit", "wait_for"]  # fixtures: one browser for all tests of a session

# Compiling, and torch's first call of anything, take their time: a deadline would measure the machine.
_COMMON = {"deadline": None, "derandomize": True, "print_blob": True}
hypothesis.settings.register_profile("few", max_examples=5, **_COMMON)  # where a backend runs in an interpreter
hypothesis.settings.register_profile("fast", max_examples=25, **_COMMON)
hypothesis.settings.register_profile("thorough", max_examples=400, **_COMMON)
PROFILE = os.environ.get("PARTITA_HYPOTHESIS", "fast")
# inductor does not ask whether a graph in its cache was made for other kernels than torch may use in this run
if CAPABILITY := os.environ.get("ATEN_CPU_CAPABILITY"):
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getattr(os, 'getuid', int)()}_{CAPABILITY}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
hypothesis.settings.load_profile(PROFILE)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "error",
        # torch.compile makes an instance of every autograd.Function it traces, and then warns that one should not.
        "ignore:.*should not be instantiated:DeprecationWarning",
        # Triton's interpreter computes with numpy, which warns where a kernel makes or meets a nan; a device is silent.
        *(f"ignore:{what} encountered:RuntimeWarning" for what in ("All-NaN slice", "invalid value", "overflow")),
    ):
        config.addinivalue_line("filterwarnings", line)
    # A shell that starts us in the background has interruptions ignored, and processes we start would inherit that.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if PASSED is not None:
        config.pluginmanager.register(Passed(PASSED))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run when asked for (-m with any expression), thorough searches are slow; GPU tests need a GPU."""
    no_gpu = pytest.mark.skip(reason="torch sees no GPU here")
    slow = pytest.mark.skip(reason="slow: run with -m slow, or make test-slow")
    for item in items:
        if PROFILE == "thorough" and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("slow") and not config.getoption("-m"):
            item.add_marker(slow)


# CI runs a test several times: without the packages that partita works with and then with them, with the backends in
# one process and then one by one. PARTITA_TEST_PASSED names a file of what passed: written where it does not exist;
# where it does, what it holds is left out.
PASSED = Path(os.environ["PARTITA_TEST_PASSED"]) if os.environ.get("PARTITA_TEST_PASSED") else None


def asked(item: pytest.Item) -> str:
    """The identity of a test: its name, and what the environment chooses for it."""
    named = {"backend", "natural", "blocked"} & {*getattr(item, "fixturenames", ())}  # the backend is in its name
    chosen = "" if named else os.environ.get("PARTITA_BACKEND", "")
    return " ".join([item.nodeid, chosen, os.environ.get("PARTITA_ISA", "")]).rstrip()


class Passed:
    """Keeps what passed, or leaves out what a file names."""

    def __init__(self, file: Path):
        self.file = file
        self.known = frozenset(file.read_text().splitlines()) if file.exists() else None
        self.passed: list[str] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            item.user_properties.append(("asked", asked(item)))  # reported by a worker to the process that writes
        if self.known is not None:
            again = {item for item in items if asked(item) in self.known and item.path.name != "test_docs.py"}
            items[:] = [item for item in items if item not in again]  # pages may leave out what cannot be run
            config.hook.pytest_deselected(items=[*again])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(dict(report.user_properties)["asked"])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.known is None and not hasattr(session.config, "workerinput"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text("\n".join(self.passed) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Where PARTITA_BACKEND names one backend, what it refuses to serve is skipped with its reason."""
    try:
        return (yield)
    except BackendError as error:
        if "PARTITA_BACKEND" in os.environ and "cannot serve" in str(error):
            pytest.skip(str(error))
        raise


# Other random numbers on any machine: PARTITA_TEST_SEED=1; ATEN_CPU_CAPABILITY=avx2 and =default draw otherwise too.
SEED = int(os.environ.get("PARTITA_TEST_SEED", "20240229"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(SEED)


@pytest.fixture(scope="session", params=names())
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a way to compute; a test enters it with `serving(backend)`."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", params=[name for name in names("tiled-64x64") if name != "dense"])
def blocked(request: pytest.FixtureRequest) -> str:
    """Those of them that cut rows and keys into blocks: what is asked of sizes beyond one."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", params=names("tiled-64x64"))
def natural(request: pytest.FixtureRequest) -> str:
    """The same with tiles of a size that is used, for problems of hundreds of keys."""
    name: str = request.param
    return name
