"""Files that appear whole or not at all. Everything that saves a record, a page, a figure or a verdict writes through
here.

The unfinished file is made in the same folder under a random name, and only if nothing has that name: a link
planted there is never followed. Then it takes the place of the old one in a single move.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: str | Path, text: str | Iterable[str]) -> Path:
    """Write the text (or its pieces, one after the other) to `path`, whole; the folder is made."""
    path = Path(path)
    pieces = [text] if isinstance(text, str) else text
    if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe is written to, not replaced
        with path.open("w", encoding="utf-8") as out:
            out.writelines(pieces)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name[:100]}.{secrets.token_hex(8)}.partial")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        with open(file, "w", encoding="utf-8") as out:
            out.writelines(pieces)
        partial.replace(path)
    except BaseException:  # an interruption leaves the old file and nothing else
        partial.unlink(missing_ok=True)
        raise
    return path
