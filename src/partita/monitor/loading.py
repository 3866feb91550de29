"""A file of JSON lines -> a Record, or an error that names the line. Whatever passes here can be judged and drawn.

A file may hold several runs one after the other (the JSON-lines sink appends): layers are then matched by name, and the
steps go on. One that resumes at a named step takes the place of what came after that step; one that counts from 0
follows the last.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from partita.monitor.record import BAND_COLUMNS, COLUMNS, LOSS_COLUMNS, SCHEMA, Block, Record, Site, keep_newest

__all__ = ["DamagedRecordError", "RecordError", "check_header", "load_record"]

OLD = {f"entropy_{q}": f"normalized_entropy_{q}" for q in ("p05", "p50", "p95")}  # names of the first version
MOST_HEADS = 1 << 16  # of one layer; more is damage, and would fill the memory of the page that draws it


class RecordError(ValueError):
    """The file is not a record this version can read."""


class DamagedRecordError(RecordError):
    """The file began as a record, and something in it is broken."""


def load_record(path: str | Path) -> Record:
    """Read a file written by `save` or by the JSON-lines sink; a line cut short by an interruption is dropped."""
    with Path(path).open(encoding="utf-8") as lines:
        return read_record(lines, str(path))


def read_record(lines: Iterable[str], name: str) -> Record:
    """The lines of a file; errors call it by this name."""
    reader = _Reader(name)
    try:
        for number, text in enumerate(lines, start=1):
            if text.strip() and not reader.take(number, text):
                break
    except UnicodeDecodeError as error:
        kind = DamagedRecordError if reader.columns else RecordError
        raise kind(f"{name}: not text in UTF-8 ({error.reason} at byte {error.start} of a block).") from None
    if not reader.columns:
        raise RecordError(f"{name} is empty: a record starts with a header line.")
    return reader.record


def check_header(path: str | Path, text: str) -> dict[str, Any]:
    """The first line of a record as a dict."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise RecordError(f"{path}, line 1: not JSON. A record is a file written by watch(...).save.") from None
    if not isinstance(line, dict) or line.get("kind") != "header" or line.get("schema") != SCHEMA:
        given = line.get("schema") if isinstance(line, dict) else None
        raise RecordError(
            f"{path}: expected schema {SCHEMA!r}, got {given!r}. Write it again with this version's watch(...).save."
        )
    return line


class _Reader:
    def __init__(self, name: str) -> None:
        self.name, self.record = name, Record()
        self.columns: list[str] = []
        self.bands: list[str] = []
        self.layers: list[int] = []  # of the run that is being read: where each of its layers stands in the record
        self.fresh, self.shift = False, 0

    def take(self, number: int, text: str) -> bool:
        """Read a line; False where an interruption cut it short, which ends the record."""
        where = f"{self.name}, line {number}"
        try:
            if not self.columns:
                self._header(check_header(self.name, text))
                return True
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                if not text.endswith("\n"):
                    return False
                raise ValueError("not JSON") from None
            if not isinstance(line, dict):
                raise ValueError(f"expected an object, got {type(line).__name__}")
            kind = line.pop("kind", None)
            if kind in KINDS:  # others come from a newer writer of the same schema: they add, they do not change
                getattr(self, f"_{kind}")(line)
        except RecordError:
            raise
        except KeyError as error:
            raise DamagedRecordError(f"{where}: {error.args[0]!r} is missing. The file is damaged.") from None
        except (ValueError, TypeError, OverflowError, AttributeError, RecursionError) as error:
            raise DamagedRecordError(f"{where}: {error}. The file is damaged.") from None
        return True

    # ---- one function for each kind of line ------------------------------------------------------------------------

    def _header(self, line: dict[str, Any]) -> None:
        columns, bands = line["columns"], line["band_columns"]
        for names in (columns, bands):
            if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
                raise ValueError("columns must be a list of names")
        columns = [OLD.get(name, name) for name in columns]
        if not self.columns:
            self.record.provenance = _as(dict, line["provenance"], "provenance")
        else:
            self.record.provenance["resumed"] = int(self.record.provenance.get("resumed") or 0) + 1
        self.columns, self.bands, self.layers, self.fresh, self.shift = columns, bands, [], True, 0

    def _site(self, line: dict[str, Any]) -> None:
        heads = _whole(line, "heads", MOST_HEADS)
        site = Site(_as(str, line["name"], "name"), _as(str, line["type"], "type"), heads, line.get("cross") is True)
        sites = self.record.sites
        same = next((i for i, s in enumerate(sites) if s.name == site.name and i not in self.layers), len(sites))
        if same == len(sites):
            sites.append(site)
        self.layers.append(same)

    def _attention(self, line: dict[str, Any]) -> None:
        self._place(line)
        values = _join(line["values"], self.columns, COLUMNS)
        given = _as(dict, line["bands"], "bands")
        bands = {int(k): _join(v, self.bands, BAND_COLUMNS) for k, v in given.items()}
        phase = _as(str, line.get("phase") or "", "phase")
        self.record.blocks.append(Block(line["step"], line["layer"], bool(line["training"]), values, bands, phase))

    def _loss(self, line: dict[str, Any]) -> None:
        _as(str, line["name"], "name")
        for name in (*LOSS_COLUMNS, "nonfinite", "calibration_error"):
            _number(line.get(name), name)
        if any(count is None for count, _, _ in _table(line.get("bins") or [], "bins", 3)):
            raise ValueError("a bin is a count, a confidence and a share")
        line["step"] = self._step(line)
        self.record.losses.append(line)

    def _curve(self, line: dict[str, Any]) -> None:
        self._place(line)
        factors = _numbers(line["factors"], "factors")
        for name in ("mean", "p10", "p90"):
            _table(line[name], name, len(factors))
        for head in _as(list, line.get("keys") or [], "keys"):
            _table(head, "keys", 2)
        _number(line.get("scale"), "scale")
        _number(line.get("rows"), "rows")
        keep_newest(self.record.curves, line, "layer")

    def _map(self, line: dict[str, Any]) -> None:
        """The picture itself is not looked at: the page leaves out a damaged one, and nothing else."""
        self._place(line)
        _whole(line, "head")
        keep_newest(self.record.maps, line, "layer", "head")

    def _received(self, line: dict[str, Any]) -> None:
        self._place(line)
        n, alike = _whole(line, "n_key", least=1), _numbers(line["alike"], "alike")
        _whole(line, "look")
        for name in ("rows", "bins", "top"):
            if len(_as(list, line[name], name)) != self.record.sites[line["layer"]].heads:
                raise ValueError(f"{name} needs an entry for each head")
        _numbers(line["rows"], "rows")
        _table([bins for bins in line["bins"] if bins is not None], "bins", len(alike))
        for head in line["top"]:
            for pair in [] if head is None else _table(head, "top", 2):
                _whole({"top": pair[0]}, "top", n - 1)
        self.record.received.append(line)

    def _study(self, line: dict[str, Any]) -> None:
        self.record.studies.append(line)

    def _summary(self, line: dict[str, Any]) -> None:
        coverage, overhead = _as(dict, line["coverage"], "coverage"), _as(dict, line["overhead"], "overhead")
        for missed in _as(list, coverage.get("missed") or [], "missed"):
            _as(str, _as(dict, missed, "missed")["name"], "name")
        for name, value in overhead.items():
            _number(value, name)
        self.record.coverage, self.record.overhead = coverage, overhead

    # ---- several runs in one file ----------------------------------------------------------------------------------

    def _place(self, line: dict[str, Any]) -> None:
        """Layer and step as the record counts them."""
        line["layer"] = self.layers[_whole(line, "layer", len(self.layers) - 1)]
        line["step"] = self._step(line)

    def _step(self, line: dict[str, Any]) -> int:
        step = _whole(line, "step", least=-1)
        record = self.record
        if self.fresh and (known := record.steps()) and step <= known[-1]:
            if step <= 0:
                self.shift = known[-1] + 1
            else:  # what was undone by going back to a checkpoint
                record.blocks = [b for b in record.blocks if b.step < step]
                for rows in (record.losses, record.received):
                    rows[:] = [r for r in rows if int(r["step"]) < step]
        self.fresh = False
        return step + self.shift


KINDS = ("header", "site", "attention", "loss", "curve", "map", "received", "study", "summary")


def _as(kind: type, value: Any, name: str) -> Any:
    """The value, if it is of this kind."""
    if not isinstance(value, kind):
        names: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
        raise ValueError(f"{name} must be {names[kind]}, got {value!r:.60}")
    return value


def _whole(line: dict[str, Any], name: str, most: int | None = None, least: int = 0) -> int:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise ValueError(f"{name} must be a whole number of at least {least}{upper}, got {value!r:.60}")
    return value


def _number(value: Any, name: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(f"{name} must be a number, got {value!r:.60}")
    float(value or 0)  # a whole number may be too large for one


def _numbers(value: Any, name: str) -> list[Any]:
    numbers: list[Any] = _as(list, value, name)
    for number in numbers:
        _number(number, name)
    return numbers


def _table(value: Any, name: str, width: int) -> list[list[Any]]:
    """Rows of `width` numbers each."""
    rows: list[list[Any]] = _as(list, value, name)
    for row in rows:
        if len(_numbers(row, name)) != width:
            raise ValueError(f"a row of {name} has {len(row)} numbers, expected {width}")
    return rows


def _join(rows: Any, given: list[str], wanted: Iterable[str]) -> array[float]:
    """Rows as stored -> flat array in this version's column order, NaN where a column is missing."""
    order = [given.index(name) if name in given else -1 for name in wanted]
    flat = array("d")
    if len(_as(list, rows, "values")) > MOST_HEADS:
        raise ValueError(f"{len(rows)} heads in one layer")
    for row in _table(rows, "values", len(given)):
        flat.extend(math.nan if i < 0 or (v := row[i]) is None else v for i in order)
    return flat
