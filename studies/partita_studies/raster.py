"""SVG to PNG by whatever renderer the machine has; partita brings none."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["NEEDED", "png"]

NEEDED = "a PNG needs one of: pip install cairosvg, the program rsvg-convert (librsvg), or Chromium. SVG needs nothing"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def png(text: str, path: Path, *, scale: float = 2.0) -> bool:
    """Write the SVG text (with fixed colours) as PNG; False, and nothing written, if no renderer is there."""
    if importlib.util.find_spec("cairosvg") is not None:
        importlib.import_module("cairosvg").svg2png(bytestring=text.encode(), write_to=str(path), scale=scale)
        return True
    if tool := shutil.which("rsvg-convert"):
        _run([tool, "--zoom", str(scale), "--output", str(path)], text)
        return path.exists()
    named = [os.environ.get("PARTITA_CHROMIUM"), *BROWSERS]
    if browser := next((found for name in named if name and (found := shutil.which(name))), None):
        return _browser(browser, text, path, scale)
    return False


def _browser(browser: str, text: str, path: Path, scale: float) -> bool:
    size = re.search(r'width="(\d+)" height="(\d+)"', text)
    wide, high = size.groups() if size else ("1096", "800")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        page.write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:0">{text}', encoding="utf-8")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        flags += [f"--force-device-scale-factor={scale}", f"--window-size={wide},{high}"]
        shot = Path(folder) / "figure.png"
        _run([browser, *flags, f"--screenshot={shot}", page.as_uri()], "")
        if shot.exists():
            shutil.copyfile(shot, path)
            return True
    return False


def _run(command: list[str], given: str) -> None:
    subprocess.run(command, input=given.encode(), capture_output=True, timeout=120, check=False)
