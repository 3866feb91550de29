"""A plain table: rows as dicts, columns by name. Becomes a pandas DataFrame where pandas is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any


class Table:
    """Rows of named values.

    >>> t = Table([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    >>> t["a"], t.b, t[1], len(t)  # columns by name or as attributes, as in pandas
    ([1, 3], [2, 4], {'a': 3, 'b': 4}, 2)
    """

    def __init__(self, rows: Iterable[dict[str, Any]], columns: list[str] | None = None) -> None:
        self.rows = list(rows)
        self.columns = columns or list(dict.fromkeys(key for row in self.rows for key in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, (int, slice)):
            return self.rows[key]
        if key not in self.columns:
            raise KeyError(f"no column {key!r}; the columns are {', '.join(self.columns)}")
        return [row.get(key) for row in self.rows]

    def __getattr__(self, name: str) -> Any:
        columns = self.__dict__.get("columns", ())
        if name not in columns:
            raise AttributeError(f"a table has no {name!r}; its columns are {', '.join(columns)}")
        return self[name]

    def to_dict(self, orient: str = "records") -> Any:
        """As pandas does it: "records" (list of rows) or "list" (dict of columns)."""
        if orient == "records":
            return [dict(row) for row in self.rows]
        if orient == "list":
            return {name: self[name] for name in self.columns}
        raise ValueError(f"orient must be 'records' or 'list'; got {orient!r}")

    def native(self, pandas: bool | None = None) -> Any:
        """A DataFrame if pandas is wanted (None: if it is installed), else this table."""
        if pandas is False or (pandas is None and importlib.util.find_spec("pandas") is None):
            return self
        import pandas as pd

        return pd.DataFrame(self.rows, columns=self.columns)

    def __repr__(self) -> str:
        shown = [[_short(row.get(name)) for name in self.columns] for row in self.rows[:20]]
        widths = [max([len(name), *(len(line[i]) for line in shown)]) for i, name in enumerate(self.columns)]
        head = "  ".join(name.rjust(w) for name, w in zip(self.columns, widths, strict=True))
        body = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in shown]
        more = [f"... {len(self) - 20} more rows"] if len(self) > 20 else []
        return "\n".join([head, *body, *more])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
