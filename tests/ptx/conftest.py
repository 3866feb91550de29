"""Running PTX takes numpy; running what Triton compiles, Triton, and a process without its interpreter."""

from __future__ import annotations

import importlib.util
import os

_WITHOUT_NUMPY = ["test_*.py"]
_WITHOUT_TRITON = ["test_suite.py", "test_mutants.py", "test_host.py"]

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("numpy") is None:
    collect_ignore_glob += _WITHOUT_NUMPY
if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") == "1":
    collect_ignore_glob += _WITHOUT_TRITON
