"""Finished cells on disk: a line for each setting and length, so that a stopped run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partita.lab.cli import UsageError

__all__ = ["Cells"]


class Cells:
    """Loss of every window by setting and length; the first line says of what."""

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path = path
        self.known: dict[tuple[str, int], list[float]] = {}
        if path.exists():
            self._read(about)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"about": about}, sort_keys=True) + "\n", encoding="utf-8")

    def _read(self, about: dict[str, Any]) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(_row, lines) if row is not None]
        if not rows or rows[0].get("about") != about:
            raise UsageError(
                f"{self.path} holds cells of another model, text or question. Give another --out, or remove that file."
            )
        self.known = {(row["setting"], row["length"]): row["losses"] for row in rows[1:]}
        if lines and _row(lines[-1]) is None:  # the last line was cut short: the next one must not be joined to it
            kept = [line for line in lines if _row(line) is not None]
            self.path.write_text("\n".join(kept) + "\n", encoding="utf-8")

    def add(self, setting: str, length: int, losses: list[float]) -> None:
        self.known[setting, length] = losses
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"setting": setting, "length": length, "losses": losses}) + "\n")


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
