"""An earlier revision of partita beside this one, in one process and under another name.

    python -m benchmarks attention --since REV

A case calls `partita`, a global of its file; what it measures is the same call with that global bound to the other
package. So both run the same lines, in turns, beside the same peer, and their ratio is free of the machine's drift.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


@contextmanager
def installed(revision: str) -> Iterator[ModuleType]:
    """The package of a revision, built by pip from what git holds of it, and imported as `partita_before`.

    Every whole word `partita` in its Python files becomes that name: imports, and the names of its operators, which
    torch.library would not register twice.
    """
    with tempfile.TemporaryDirectory(prefix="partita_before_") as folder:
        source, site = Path(folder, "source"), Path(folder, "site")
        source.mkdir()
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True)
        if archive.returncode:
            raise SystemExit(f"--since {revision}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "x"], cwd=source, input=archive.stdout, check=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(site)]
        subprocess.run([*pip, str(source)], check=True)
        package = site / "partita_before"
        shutil.move(site / "partita", package)
        for path in package.rglob("*.py"):
            path.write_text(re.sub(r"\bpartita\b", "partita_before", path.read_text()))
        sys.path.insert(0, str(site))
        try:
            yield importlib.import_module("partita_before")
        finally:
            sys.path.remove(str(site))
