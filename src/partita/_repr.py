"""How an object of rows or of a matrix shows itself: a few lines in a terminal, a small picture in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from partita._checks import concrete
from partita.errors import PartitaError

__all__ = ["escaped", "matrix_html", "rows_text", "small_matrix", "table_html"]

LARGEST = 48  # rows and columns of a picture
USUAL = 12


def rows_text(name: str, fields: Mapping[str, Tensor]) -> str:
    """One line per field: its mean over the finite rows, its least and its largest.

    >>> import torch
    >>> print(rows_text("Stats", {"entropy": torch.tensor([1.0, 3.0])}))
    Stats of 2 rows (2,)
      entropy  mean 2  from 1 to 3
    """
    first = next(iter(fields.values()))
    wide = max(len(one) for one in fields)
    head = f"{name} of {first.numel():,} row{'s' * (first.numel() != 1)} {tuple(first.shape)}"
    return "\n".join([head, *(f"  {one.ljust(wide)}  {_numbers(value)}" for one, value in fields.items())])


def _numbers(value: Tensor) -> str:
    if not concrete(value) or not value.numel():
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    flat = value.detach().double().flatten()
    fine = flat[flat.isfinite()]
    if not len(fine):
        return f"nowhere finite, {flat[0].item()}"
    other = f", {len(flat) - len(fine):,} not finite" * (len(fine) < len(flat))
    least, mean, largest = fine.min().item(), fine.mean().item(), fine.max().item()
    return (f"{mean:.4g}" if least == largest else f"mean {mean:.4g}  from {least:.4g} to {largest:.4g}") + other


def small_matrix(dense: Callable[[int, int, Sequence[int]], Tensor], made_of: Iterable[Tensor]) -> Tensor | None:
    """The matrix (n_query, n_key) at a size that suits what it was made of; None where it would be too large."""
    for n_query, n_key, batch in _sizes(tuple(made_of)):
        try:
            whole = dense(n_query, n_key, batch)
        except PartitaError:  # made for other sizes
            continue
        return whole.reshape(-1, n_query, n_key)[0]
    return None


def _sizes(made_of: tuple[Tensor, ...]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    longest = max((int(t.max()) for t in made_of if concrete(t) and t.numel() and not t.is_floating_point()), default=0)
    last = [t.shape[-1] for t in made_of if t.dim()]
    pairs = [(USUAL, USUAL), *((t.shape[-2], t.shape[-1]) for t in made_of if t.dim() > 1)]
    if last:
        pairs += [(last[0], last[-1])]
    pairs += [(longest, longest)]
    batches = [(), *(tuple(t.shape[:k]) for t in made_of for k in range(1, t.dim() + 1))]
    for n_query, n_key in pairs:
        if 0 < n_query <= LARGEST and 0 < n_key <= LARGEST:
            for batch in batches:
                yield n_query, n_key, batch


def escaped(text: str) -> str:
    """Text as a page shows it."""
    import html  # here, since importing partita should load nothing that only a notebook needs

    return html.escape(text)


def matrix_html(keep: Tensor, title: str) -> str:
    """Rows are queries, columns are keys; a filled square is a key that is seen."""
    n_query, n_key = keep.shape
    squares = "".join(
        f'<rect x="{1 + 9 * j}" y="{1 + 9 * i}" width="8" height="8" fill="currentColor" '
        f'fill-opacity="{0.75 if keep[i, j] else 0.08}"/>'
        for i in range(n_query)
        for j in range(n_key)
    )
    size = f'width="{9 * n_key + 1}" height="{9 * n_query + 1}"'
    label = escaped(title)
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" {size}>{squares}</svg>'
    return f"<div><code>{label}</code><br>{picture}</div>"


def table_html(title: str, rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escaped(a)}</td><td>{escaped(b)}</td></tr>" for a, b in rows)
    return f"<div><code>{escaped(title)}</code><table>{cells}</table></div>"
