"""Which findings count: some codes and no others, thresholds of one's own, and only what is new since a baseline.

On the command line, or in pyproject.toml of the current folder (or any TOML file, --config):

    [tool.partita.findings]
    ignore = ["SINK_HEAD"]
    fail-on = "warning"
    baseline = "partita-baseline.json"
    thresholds = { collapsed = 0.005 }

The command line goes before the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.cli import UsageError
from partita.errors import PartitaError
from partita.monitor.files import replace_file
from partita.monitor.findings import CODES, SEVERITIES, Finding, Findings, Thresholds, at_or_above

__all__ = ["Gate", "GateError", "gate", "read_baseline", "write_baseline"]

SCHEMA = "partita.baseline/1"
_KEYS = ("ignore", "only", "fail-on", "baseline", "thresholds")


class GateError(UsageError, PartitaError, ValueError):
    """Options, a file or a baseline that cannot be meant."""


@dataclass(frozen=True)
class Gate:
    """What counts, and from which level on it fails a run."""

    thresholds: Thresholds
    ignore: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()  # empty: all
    fail_on: str | None = None
    known: frozenset[tuple[str, str]] = frozenset()  # of the baseline: a code, and a head or a place

    def counted(self, findings: Iterable[Finding]) -> Findings:
        """Those of a code that counts and of which something is new."""
        codes = (self.only or set(CODES)) - self.ignore
        return Findings(f for f in findings if f.code in codes and not set(_places(f)) <= self.known)

    def fails(self, findings: Iterable[Finding]) -> bool:
        return self.fail_on is not None and bool(at_or_above(self.counted(findings), self.fail_on))


def gate(options: argparse.Namespace) -> Gate:
    """The options given, over those of the file."""
    given, folder = _section(options.config)
    if unknown := sorted(set(given) - set(_KEYS)):
        raise GateError(f"[tool.partita.findings] has no {', '.join(unknown)}; it has {', '.join(_KEYS)}.")
    limits = {name: float(value) for name, value in given.get("thresholds", {}).items()}
    for text in options.threshold or ():
        name, _, number = text.partition("=")
        try:
            limits[name] = float(number)
        except ValueError:
            raise GateError(f"--threshold takes NAME=NUMBER; got {text!r}.") from None
    for name, limit in limits.items():
        if not math.isfinite(limit):
            raise GateError(f"a threshold must be a finite number; got {name}={limit}.")
    try:
        thresholds = Thresholds().with_(**limits)
    except ValueError as error:
        raise GateError(f"{error}.") from None
    level = options.fail_on or given.get("fail-on")
    if level is not None and level not in SEVERITIES:
        raise GateError(f"fail-on must be one of {', '.join(SEVERITIES)}; got {level!r}.")
    baseline = options.baseline or (folder / given["baseline"] if "baseline" in given else None)
    return Gate(
        thresholds,
        _codes(options.ignore if options.ignore is not None else given.get("ignore", ())),
        _codes(options.only if options.only is not None else given.get("only", ())),
        level,
        frozenset() if baseline is None else read_baseline(baseline),
    )


def _codes(given: Sequence[str]) -> frozenset[str]:
    codes = [part.strip().upper() for text in given for part in str(text).split(",") if part.strip()]
    if unknown := sorted(set(codes) - set(CODES)):
        raise GateError(f"no finding is called {', '.join(unknown)}; they are {', '.join(CODES)}.")
    return frozenset(codes)


def _section(path: Path | None) -> tuple[dict[str, Any], Path]:
    """[tool.partita.findings] of the file, empty where there is none; and the folder that names are relative to."""
    file = Path("pyproject.toml") if path is None else path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path is None:
            return {}, Path()
        raise GateError(f"{path} does not exist.") from None
    except UnicodeDecodeError:
        raise GateError(f"{file} is no TOML: it is not in UTF-8. Save it in that encoding.") from None
    if "partita" not in text:
        return {}, file.parent
    try:
        toml = importlib.import_module("tomllib")
    except ImportError:  # Python 3.10
        raise GateError(f"reading {file} needs Python 3.11 or later; give the options on the command line.") from None
    try:
        table = toml.loads(text)
    except ValueError as error:
        raise GateError(f"{file} is no TOML: {error}.") from None
    section: Any = table
    for name in ("tool", "partita", "findings"):
        section = section.get(name, {}) if isinstance(section, dict) else None
    return _typed(section, file), file.parent


def _typed(section: Any, file: Path) -> dict[str, Any]:
    """The section, if its entries are of the kinds that are read."""
    if not isinstance(section, dict):
        raise GateError(f"{file}: [tool.partita.findings] must be a table.")
    for name, value in section.items():
        if name in ("ignore", "only"):
            fine, wanted = isinstance(value, list) and all(isinstance(x, str) for x in value), "a list of codes"
        elif name == "thresholds":
            numbers = isinstance(value, dict) and all(type(x) in (int, float) for x in value.values())
            fine, wanted = numbers, "a table of numbers"
        else:
            fine, wanted = name not in _KEYS or (isinstance(value, str) and bool(value)), "a text"
        if not fine:
            raise GateError(f"{file}: {name} must be {wanted}; got {value!r}.")
    return section


# ---- baseline --------------------------------------------------------------------------------------------------------


def _places(finding: Finding) -> list[tuple[str, str]]:
    """A finding that names heads is known head by head, any other by its place."""
    heads = [f"layer {layer} head {head}" for layer, head in finding.heads]
    return [(finding.code, place) for place in heads or [finding.where]]


def write_baseline(path: Path, gate: Gate, findings: Iterable[Finding]) -> None:
    """What counts of these findings, whatever a baseline has known."""
    counted = replace(gate, known=frozenset()).counted(findings)
    places = sorted({place for finding in counted for place in _places(finding)})
    rows = [{"code": code, "place": place} for code, place in places]
    replace_file(path, json.dumps({"schema": SCHEMA, "known": rows}, indent=1) + "\n")


def read_baseline(path: Path) -> frozenset[tuple[str, str]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise GateError(f"{path} is a baseline of another kind: {found['schema']!r}, not {SCHEMA!r}.")
        return frozenset((str(row["code"]), str(row["place"])) for row in found["known"])
    except FileNotFoundError:
        raise GateError(f"{path} does not exist; make it with --write-baseline.") from None
    except GateError:
        raise
    except (ValueError, KeyError, TypeError):
        raise GateError(f"{path} is no baseline; make one with --write-baseline.") from None
