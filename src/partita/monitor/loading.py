"""A file of JSON lines -> a Record, or an error that names the line. Whatever passes here can be judged and drawn.

A file may hold several runs one after the other (the JSON-lines sink appends): layers are then told by name, and the
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
MOST_HEADS = 1 << 16  # of one layer; more is damage, and would fill the memory of whoever draws it


class RecordError(ValueError):
    """The file is not a record this version can read."""


class DamagedRecordError(RecordError):
    """The file began as a record, and something in it is broken."""


def load_record(path: str | Path) -> Record:
    """Read a file written by `save` or by the JSON-lines sink; a line cut short by an interruption is dropped."""
    reader = _Reader(Path(path))
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, start=1):
                if text.strip() and not reader.take(number, text):
                    break
    except UnicodeDecodeError as error:
        kind = DamagedRecordError if reader.columns else RecordError
        raise kind(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start} of a block).") from None
    if not reader.columns:
        raise RecordError(f"{path} is empty: a record starts with a header line.")
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
    def __init__(self, path: Path) -> None:
        self.path, self.record = path, Record()
        self.columns: list[str] = []
        self.bands: list[str] = []
        self.layers: list[int] = []  # of the run that is being read: where each of its layers stands in the record
        self.fresh, self.shift = False, 0

    def take(self, number: int, text: str) -> bool:
        """Read a line; False where an interruption cut it short, which ends the record."""
        where = f"{self.path}, line {number}"
        try:
            if not self.columns:
                self._header(check_header(self.path, text))
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
            self.record.provenance = _object(line["provenance"], "provenance")
        else:
            self.record.provenance["resumed"] = int(self.record.provenance.get("resumed") or 0) + 1
        self.columns, self.bands, self.layers, self.fresh, self.shift = columns, bands, [], True, 0

    def _site(self, line: dict[str, Any]) -> None:
        heads = _whole(line, "heads", MOST_HEADS)
        site = Site(_text(line, "name"), _text(line, "type"), heads, line.get("cross") is True)
        sites = self.record.sites
        same = next((i for i, s in enumerate(sites) if s.name == site.name and i not in self.layers), len(sites))
        if same == len(sites):
            sites.append(site)
        self.layers.append(same)

    def _attention(self, line: dict[str, Any]) -> None:
        self._place(line)
        values = _join(line["values"], self.columns, COLUMNS)
        given = _object(line["bands"], "bands")
        bands = {int(k): _join(v, self.bands, BAND_COLUMNS) for k, v in given.items()}
        self.record.blocks.append(Block(line["step"], line["layer"], bool(line["training"]), values, bands))

    def _loss(self, line: dict[str, Any]) -> None:
        _text(line, "name")
        for name in (*LOSS_COLUMNS, "nonfinite", "calibration_error"):
            _number(line.get(name), name)
        for row in _list(line.get("bins") or [], "bins"):
            count, *rest = _numbers(row, "bins")
            if count is None or len(rest) != 2:
                raise ValueError("a bin is a count, a confidence and a share")
        line["step"] = self._step(line)
        self.record.losses.append(line)

    def _curve(self, line: dict[str, Any]) -> None:
        self._place(line)
        factors = _numbers(line["factors"], "factors")
        for name in ("mean", "p10", "p90"):
            for row in _list(line[name], name):
                if len(_numbers(row, name)) != len(factors):
                    raise ValueError(f"{name} needs a number for each of {len(factors)} factors")
        for head in _list(line.get("keys") or [], "keys"):
            if any(len(_numbers(pair, "keys")) != 2 for pair in _list(head, "keys")):
                raise ValueError("keys are pairs of an index and a mass")
        _number(line.get("scale"), "scale")
        _number(line.get("rows"), "rows")
        keep_newest(self.record.curves, line, "layer")

    def _map(self, line: dict[str, Any]) -> None:
        """The picture itself is not looked at: a damaged one is left out by whoever draws it, and nothing else is."""
        self._place(line)
        _whole(line, "head")
        keep_newest(self.record.maps, line, "layer", "head")

    def _received(self, line: dict[str, Any]) -> None:
        self._place(line)
        n = _whole(line, "n_key", least=1)
        _whole(line, "look")
        alike = _numbers(line["alike"], "alike")
        for name in ("rows", "bins", "top"):
            if len(_list(line[name], name)) != self.record.sites[line["layer"]].heads:
                raise ValueError(f"{name} needs an entry for each head")
        _numbers(line["rows"], "rows")
        for bins, top in zip(line["bins"], line["top"], strict=True):
            if bins is not None and len(_numbers(bins, "bins")) != len(alike):
                raise ValueError(f"bins needs {len(alike)} numbers")
            for pair in _list(top, "top") if top is not None else ():
                if len(_list(pair, "top")) != 2 or not 0 <= _whole({"top": pair[0]}, "top") < n:
                    raise ValueError("top are pairs of a key and its share")
                _number(pair[1], "top")
        self.record.received.append(line)

    def _study(self, line: dict[str, Any]) -> None:
        self.record.studies.append(line)

    def _summary(self, line: dict[str, Any]) -> None:
        coverage, overhead = _object(line["coverage"], "coverage"), _object(line["overhead"], "overhead")
        for missed in _list(coverage.get("missed") or [], "missed"):
            _text(_object(missed, "missed"), "name")
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
                record.losses = [r for r in record.losses if int(r["step"]) < step]
                record.received = [r for r in record.received if int(r["step"]) < step]
        self.fresh = False
        return step + self.shift


KINDS = ("header", "site", "attention", "loss", "curve", "map", "received", "study", "summary")


def _text(line: dict[str, Any], name: str) -> str:
    if not isinstance(line[name], str):
        raise ValueError(f"{name} must be text, got {line[name]!r:.60}")
    return str(line[name])


def _whole(line: dict[str, Any], name: str, most: int | None = None, least: int = 0) -> int:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise ValueError(f"{name} must be a whole number of at least {least}{upper}, got {value!r:.60}")
    return value


def _number(value: Any, name: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(f"{name} must be a number, got {value!r:.60}")
    return None if value is None else float(value)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {value!r:.60}")
    return value


def _numbers(value: Any, name: str) -> list[float | None]:
    return [_number(v, name) for v in _list(value, name)]


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {value!r:.60}")
    return value


def _join(rows: Any, given: list[str], wanted: Iterable[str]) -> array[float]:
    """Rows as stored -> flat array in this version's column order, NaN where a column is missing."""
    order = [given.index(name) if name in given else -1 for name in wanted]
    flat = array("d")
    if len(_list(rows, "values")) > MOST_HEADS:
        raise ValueError(f"{len(rows)} heads in one layer")
    for row in rows:
        if len(_list(row, "a row")) != len(given):
            raise ValueError(f"a row has {len(row)} numbers, the header names {len(given)}")
        numbers = _numbers(row, "a value")
        flat.extend(math.nan if i < 0 or (v := numbers[i]) is None else v for i in order)
    return flat
