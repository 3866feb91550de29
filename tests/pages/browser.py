"""A headless Chromium for the pages; without one these tests are skipped with a message."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["browser", "table", "visit", "wait_for"]

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


def chromium() -> str | None:
    names = [os.environ.get("PARTITA_CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome"]
    return next((found for n in names if n and (found := shutil.which(n))), None)


@dataclass
class Seen:
    """What must stay empty: errors on the console, exceptions, requests, dialogs."""

    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def assert_quiet(self) -> None:
        assert not (self.console or self.errors or self.requests or self.dialogs), self


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright (no browser download needed)"
    )
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium found: install Debian's chromium, or set PARTITA_CHROMIUM")
    with playwright.sync_playwright() as p:
        context = p.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")),
            executable_path=executable,
            args=FLAGS,
            headless=True,
            accept_downloads=True,
        )
        context.set_default_timeout(240_000)
        yield context
        context.close()


@pytest.fixture
def wait_for() -> Any:
    """wait_for(page, expression): until it is true, however busy the machine; the pages' own policy forbids polling."""

    def wait(page: Any, expression: str) -> None:
        for _ in range(2400):
            if page.evaluate(expression):
                return
            page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")

    return wait


def table(page: Any, figure: str) -> list[list[str]]:
    """The rows that a figure's CSV button saves."""
    with page.expect_download() as got:
        page.locator(f"{figure} .tools button", has_text="CSV").click()
    return list(csv.reader(io.StringIO(Path(got.value.path()).read_text())))


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """visit(path, width, height, hash) -> (page, seen)."""
    opened = []

    def go(path: Path, width: int = 1024, height: int = 768, hash: str = "") -> tuple[Any, Seen]:
        page, seen = browser.new_page(), Seen()
        opened.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.on("console", lambda m: seen.console.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: seen.errors.append(str(e)))
        page.on(
            "request",
            lambda r: seen.requests.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None,
        )
        page.on("dialog", lambda d: (seen.dialogs.append(d.message), d.dismiss()))
        page.goto(path.resolve().as_uri() + hash)
        page.wait_for_selector("body[data-ready=yes]")
        return page, seen

    yield go
    for page in opened:
        page.close()
