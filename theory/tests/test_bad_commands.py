"""A command of partita-theory that cannot be meant: exit code 2 and one line that names what is wrong."""

from __future__ import annotations

import pytest

from tests.pages.test_bad_calls import names, refused

__all__ = ["names"]  # a fixture

STRETCH = ["stretch", "--text", "TEXT", "--to", "32", "-o", "OUT"]
CALLS: list[list[str]] = [
    *[[*STRETCH, f"FILE:{name}", "--bytes"] for name in ("small", "fewer_classes", "takes_two", "takes_dicts")],
    *[[*STRETCH, f"FILE:{name}", "--bytes"] for name in ("leaves_late", "leaves")],
    *[[*STRETCH, "FILE:fine", "--bytes", option, "0"] for option in ("--to", "--targets", "--trained")],
    *[[*STRETCH, "FILE:fine", "--bytes", option, "-3"] for option in ("--to", "--targets", "--trained")],
    *[[*STRETCH, "FILE:fine", "--bytes", option, ""] for option in ("-o", "--text", "--to", "--mask-id")],
    *[["lab", "-o", name] for name in ("", "DIR")],
    *[["demo", "--minutes", text] for text in ("0", "nan", "x", "-1", "inf")],
    ["demo", "-o", ""],
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_call_that_cannot_be_meant_is_named(call, names, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled = [":".join(names.get(part, part) for part in word.split(":")) for word in call]
    refused(filled, capsys)
