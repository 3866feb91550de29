"""The structures the library takes: one list of fields each, which is the format, the documentation and the check.

The library says where each of its own fields lies (`partita_layout`); `disagreement` compares that with the lists here,
so that no call can be made with fields that have moved.

>>> print(LOGITS.describe().splitlines()[0])
PartitaLogits, 72 bytes
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = [
    "ATTENTION",
    "COLUMNS",
    "DIVERGENCE_ROWS",
    "GRADIENTS",
    "LOGITS",
    "PROBLEM",
    "SOFTMAX_ROWS",
    "STATISTICS",
    "SUMS",
    "TOP",
    "Layout",
    "disagreement",
]

_FORMATS = {"i64": "q", "i32": "i", "f64": "d", "ptr": "q"}  # native sizes and alignment, as the compiler's


class Field(NamedTuple):
    name: str
    kind: str
    offset: int
    meaning: str


class Layout:
    """One C structure: how its fields are packed, where they lie and what they mean."""

    def __init__(self, name: str, table: str) -> None:
        self.name = name
        rows = [row.split(None, 2) for row in table.strip().splitlines()]
        flat = []
        for field, kind, meaning in rows:
            if kind == "operand":
                parts = (("data", "ptr"), ("offset", "ptr"), ("row", "i64"), ("col", "i64"))
                flat += [(f"{field}.{part}", k, meaning) for part, k in parts]
            else:
                flat.append((field, kind, meaning))
        self.format = "".join(_FORMATS[kind] for _, kind, _ in flat)
        self.pack = struct.Struct(self.format).pack
        self.size = struct.calcsize(self.format)
        self.fields = tuple(
            Field(field, kind, struct.calcsize(self.format[: i + 1]) - struct.calcsize(_FORMATS[kind]), meaning)
            for i, (field, kind, meaning) in enumerate(flat)
        )

    def describe(self) -> str:
        """The structure as a table: offset, name, kind, meaning."""
        rows = [f"{f.offset:5}  {f.name:20} {f.kind:4} {f.meaning}" for f in self.fields]
        return "\n".join([f"{self.name}, {self.size} bytes", *rows])

    def offsets(self) -> dict[str, int]:
        return {**{f"{self.name}.{f.name}": f.offset for f in self.fields}, self.name: self.size}


PROBLEM = Layout(
    "PartitaProblem",
    """
    B              i64      batch entries
    Q              i64      query rows
    K              i64      keys
    D              i64      features
    V              i64      value features
    dtype          i32      of query, key and value: 0 float32, 1 float64, 2 bfloat16, 3 float16
    bias_dtype     i32      of the bias, numbered alike
    threads        i32      at most so many
    exclude_self   i32      key i is invisible to row i
    softcap        f64      0 where absent
    query          operand  (B, Q, D)
    key            operand  (B, K, D)
    value          operand  (B, K, V)
    scale          operand  (B, Q), accumulation dtype
    bias           operand  (B, Q, K)
    target         operand  (B, Q) int64
    start          operand  (B, Q) int32: the first key a row sees
    stop           operand  (B, Q) int32: one past the last
    query_segment  operand  (B, Q) int32
    key_segment    operand  (B, K) int32
    mask           operand  (B, Q, K) bool
    """,
)
SUMS = Layout(
    "PartitaSums",
    """
    peak           ptr  (B, Q) double
    mass           ptr  (B, Q)
    first          ptr  (B, Q)
    second         ptr  (B, Q), about the mean
    moment         ptr  (B, Q, V), placed by the last two fields
    target_score   ptr  (B, Q); of key 0 where there is no target
    count          ptr  (B, Q): visible keys
    rank           ptr  (B, Q) int64
    col_peak       ptr  (K) double: over the rows that see a key; only where B is 1
    col_mass       ptr  (K)
    stats          ptr  (5, B, Q): log Z, entropy, mean, variance and maximum of the score
    mean           i32  moment is divided by the mass
    forward_only   i32  no backward pass follows, which would need the same scores to the last bit
    moment_offset  ptr  (B) where an entry of moment starts, in elements
    moment_row     i64  from one row of moment to the next
    least          ptr  (B, Q): the smallest score; with the next two, or none of them
    argmax         ptr  (B, Q) int64: the first key of the largest score, -1 where there is none
    argmin         ptr  (B, Q) int64: the first key of the smallest
    """,
)
GRADIENTS = Layout(
    "PartitaGradients",
    """
    group           ptr      (B) which key and value an entry uses
    groups          i64      how many there are
    peak            ptr      (B, Q) double, as the forward pass gave it
    mass            ptr      (B, Q) upstream, like the next
    first           ptr      (B, Q)
    second          ptr      (B, Q)
    moment          ptr      (B, Q, V)
    target          ptr      (B, Q)
    query           ptr      (B, Q, D) result, like the next
    scale           ptr      (B, Q)
    key             ptr      (groups, K, D)
    value           ptr      (groups, K, V)
    bias_row        ptr      (B, Q): sum over keys
    bias_col        ptr      (B, K): sum over rows
    bias            operand  (B, Q, K), accumulated into zeros
    bias_is_shared  i64      entries repeat in bias.offset
    col_peak        ptr      (K) double, as the forward pass gave it
    col_mass        ptr      (K) upstream
    """,
)
ATTENTION = Layout(
    "PartitaAttention",
    """
    scale  f64  of every score
    query  ptr  (B, Q, D)
    key    ptr  (B, K, D)
    value  ptr  (B, K, V)
    mean   ptr  (B, Q, V), placed as the sums say
    stats  ptr  (5, B, Q), or null
    count  ptr  (B, Q), or null
    first  ptr  (B, Q), or null: the score of key 0
    """,
)
SOFTMAX_ROWS = Layout(
    "PartitaSoftmaxRows",
    """
    rows          i64  rows of logits
    cols          i64  classes
    row           i64  elements from one row of logits to the next
    dtype         i32  0 float32, 1 float64
    threads       i32  at most so many
    gradient      i32  put it in place of the logits
    unused        i32  0
    logits        ptr  (rows, cols)
    bias          ptr  (cols), or null
    target        ptr  (rows) int64, out of range where there is none
    weight        ptr  (rows) of the loss, or null for 0
    peak          ptr  (rows) result, like the next
    mass          ptr  (rows)
    target_score  ptr  (rows)
    """,
)
LOGITS = Layout(
    "PartitaLogits",
    """
    rows        i64  rows of the input
    classes     i64  rows of the weight
    dim         i64  features
    weight_row  i64  elements from one class to the next
    logits_row  i64  elements from one row of logits to the next
    dtype       i32  0 float32, 1 float64
    threads     i32  at most so many
    input       ptr  (rows, dim) contiguous
    weight      ptr  (classes, dim)
    logits      ptr  (rows, classes) result
    """,
)
STATISTICS = Layout(
    "PartitaStatistics",
    """
    batch        i64  batch entries
    heads        i64  heads
    rows         i64  rows of each
    dim          i64  features of query and key
    threads      i32  at most so many
    bins         i32  of each head's histogram of H / log(visible)
    bands        i32  of log2(visible)
    sink_is_score  i32  rather than its mass
    scale        f64  of <query, key>
    entropy      ptr  (batch, heads, rows) float32, like the next five
    log_z        ptr  log-partition
    variance     ptr  of the score
    top          ptr  the largest score
    visible      ptr  keys seen
    sink         ptr  mass or score of key 0, or null
    query        ptr  rows, a row contiguous; used where sink is null
    key          ptr  key 0 of each head, likewise
    query_batch  i64  stride
    query_head   i64  stride
    query_row    i64  stride
    key_batch    i64  stride
    key_head     i64  stride
    keep         ptr  (batch, rows) bool, or null
    sums         ptr  (11, heads) double, added to, like the next
    peak         ptr  (heads): the largest
    length       ptr  (heads): the most keys seen
    histogram    ptr  (heads, bins)
    band_sums    ptr  (5, heads, bands)
    """,
)
COLUMNS = Layout(
    "PartitaColumns",
    """
    peak    ptr  (B, Q) double, as the forward pass gave it
    weight  ptr  (B, Q), accumulation dtype
    slot    ptr  (B) int64: which row of the result an entry adds to
    slots   i64  how many there are
    sums    ptr  (slots, K) result
    """,
)
DIVERGENCE_ROWS = Layout(
    "PartitaDivergenceRows",
    """
    rows        i64  rows of scores
    cols        i64  keys
    p_row       i64  elements from one row of scores to the next, with room for whole vectors
    q_row       i64  the same of the second distribution
    record_row  i64  elements from one of the six numbers of a row to the next
    dtype       i32  0 float32, 1 float64
    threads     i32  at most so many
    kind        i32  0 forward, 1 reverse, 2 cross entropy, 3 js, 4 hellinger
    p_gradient  i32  put it in place of the scores
    q_gradient  i32  the same of the second distribution
    unused      i32  0
    beta        f64  of js
    p           ptr  (rows, cols) scores
    q           ptr  (rows, cols)
    p_bias      ptr  (cols), or null
    q_bias      ptr  (cols), or null
    p_start     ptr  (rows) int32: the first column a row sees, or null
    p_stop      ptr  (rows) int32: one past the last, or null
    q_start     ptr  (rows) int32, or null
    q_stop      ptr  (rows) int32, or null
    weight      ptr  (rows), or null for no gradients
    record      ptr  (6, rows) result
    """,
)
TOP = Layout(
    "PartitaTop",
    """
    k      i64  how many, at least 1
    score  ptr  (B, Q, k) result, in falling order, like the next
    index  ptr  (B, Q, k) int64
    """,
)
GAPS = Layout(
    "PartitaGaps",
    """
    edges  i64  how many, at least 1
    edge   ptr  (edges) accumulation dtype, not negative, rising
    count  ptr  (B, Q, edges) int64 result
    """,
)
STRUCTURES = (
    PROBLEM, SUMS, GRADIENTS, ATTENTION, SOFTMAX_ROWS, LOGITS, STATISTICS, COLUMNS, DIVERGENCE_ROWS, TOP, GAPS,
)  # fmt: skip


def disagreement(reported: str) -> str | None:
    """What the library's own report ("PartitaProblem.B=0 ...") says otherwise than the lists here; None if nothing."""
    theirs = {name: int(at) for name, _, at in (item.partition("=") for item in reported.split())}
    ours = {name: at for layout in STRUCTURES for name, at in layout.offsets().items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return (
                f"{name} lies at {theirs.get(name, 'no place')} in the library and at {ours.get(name, 'no place')} here"
            )
    return None
