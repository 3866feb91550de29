"""Every finding is provoked on purpose and cured; its page explains and shows how."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from partita.monitor import CODES

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("provoked_findings", ROOT / "examples" / "provoked_findings.py")
assert SPEC is not None and SPEC.loader is not None
example: Any = importlib.util.module_from_spec(SPEC)
import sys  # noqa: E402

sys.modules[SPEC.name] = example  # dataclasses look their module up
SPEC.loader.exec_module(example)


@pytest.mark.parametrize("code", CODES)
def test_it_is_found_and_then_cured(code: str) -> None:
    case = example.CASES[code]
    before, after = case.provoked(), case.cured()
    found = [f for f in before.findings() if f.code == code]
    assert found and code not in [f.code for f in after.findings()]
    path, place = found[0].page.split("#")
    text = (ROOT / path).read_text()
    section = next(s for s in re.split(r"^## ", text, flags=re.MULTILINE) if s.startswith(code + "\n"))
    assert place == code.lower() and found[0].page in str(found[0])
    assert "**Provoked** by" in section and "**Cured** by" in section
    (picture,) = re.findall(r"\(\.\./(figures/\S+\.svg)\)", section)
    assert (ROOT / "docs" / picture).is_file()
