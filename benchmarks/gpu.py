"""On a GPU: attention, decode and losses next to the other packages that are installed. `make bench-gpu`.

For each function: the best and the median time, the peak of memory above what its operands need, useful operations per
second, and their share of what a large product of the same dtype reaches in the same run, and of what the vendor says.
No number of this file has been published: no GPU has been seen by those who wrote it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

import partita

from . import gpu_peers
from .harness import Call, Options, environment, interleave

# Dense bfloat16 and float16 products, operations per second, as the vendors' sheets say (no sparsity).
SHEET = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "MI300X": 1307e12}

# batch, heads, key heads, n_query, n_key, dim
ATTENTION = [(4, 16, 16, 4096, 4096, 64), (4, 16, 16, 4096, 4096, 128), (1, 32, 8, 16384, 16384, 128)]
DECODE = [(8, 32, 8, 1, 8192, 128), (1, 32, 8, 1, 131072, 128)]
CLASSIFIER = [(8192, 4096, 128256), (8192, 2048, 32768)]  # rows, dim, classes
PAIRS = [(32768, 1024)]  # rows, dim
TINY = {
    "attention": [(1, 2, 1, 20, 20, 16)],
    "decode": [(1, 2, 1, 1, 40, 16)],
    "classifier": [(9, 16, 21)],
    "pairs": [(9, 16)],
}


@dataclass(frozen=True)
class Row:
    """One function on one case; times in seconds, -1 where it could not run (and `note` says why)."""

    case: str
    who: str
    best_s: float
    median_s: float
    peak_bytes: int  # above what was held before the call
    operations: float  # that the mathematics needs
    of_product: float  # share of the speed of a large product
    of_sheet: float  # share of the vendor's number; nan where we know none
    note: str = ""


def cases(device: str, dtype: torch.dtype, quick: bool) -> Iterator[tuple[str, float, dict[str, Call]]]:
    """(name, operations, calls) of each case; the first call is ours."""
    sizes = TINY if quick else {"attention": ATTENTION, "decode": DECODE, "classifier": CLASSIFIER, "pairs": PAIRS}
    normal = partial(torch.randn, device=device, dtype=dtype)
    for shape in sizes["attention"]:
        for causal in (False, True):
            for backward in (False, True):
                yield _attention(shape, causal, backward, normal)
    for shape in sizes["decode"]:
        yield _attention(shape, False, False, normal, name="decode")
    for rows, dim, classes in sizes["classifier"]:
        yield _classifier(rows, dim, classes, normal)
    for rows, dim in sizes["pairs"]:
        yield _pairs(rows, dim, normal)


def _attention(
    shape: tuple[int, ...], causal: bool, backward: bool, normal: Callable[..., Tensor], name: str = "attention"
) -> tuple[str, float, dict[str, Call]]:
    batch, heads, key_heads, n_query, n_key, dim = shape
    q = normal(batch, heads, n_query, dim, requires_grad=backward)
    k, v = (normal(batch, key_heads, n_key, dim, requires_grad=backward) for _ in range(2))
    upstream, by_row = normal(q.shape), torch.randn(q.shape[:-1], device=q.device)
    ours = partial(partita.attention, is_causal=causal, enable_gqa=heads != key_heads)

    def with_statistics() -> object:
        out, stats = ours(q, k, v, return_stats=True)
        return torch.autograd.grad((out, stats.entropy), (q, k, v), (upstream, by_row)) if backward else out

    def of(function: gpu_peers.Forward) -> Call:
        def call() -> object:
            out = function(q, k, v)
            return torch.autograd.grad(out, (q, k, v), upstream) if backward else out

        return call

    calls = {"partita with statistics": with_statistics, "partita": of(ours)}
    calls |= {who: of(function) for who, function in gpu_peers.attention(q, k, causal).items()}
    # two products forward; scores again, dP, dV, dQ, dK backward
    operations = 4.0 * batch * heads * n_query * n_key * dim * (0.5 if causal else 1.0) * (3.5 if backward else 1.0)
    kind = f"{name}{' causal' if causal else ''}{' forward+backward' if backward else ' forward'}"
    return f"{kind} {'x'.join(map(str, shape))}", operations, calls


def _classifier(rows: int, dim: int, classes: int, normal: Callable[..., Tensor]) -> tuple[str, float, dict[str, Call]]:
    x = normal(rows, dim, requires_grad=True)
    w = (normal(classes, dim) * dim**-0.5).requires_grad_()
    y = torch.randint(classes, (rows,), device=x.device)
    losses = {"partita": partita.linear_cross_entropy, **gpu_peers.cross_entropy()}

    def of(loss: gpu_peers.Loss) -> Call:
        return lambda: torch.autograd.grad(loss(x, w, y), (x, w))

    calls = {who: of(loss) for who, loss in losses.items()}
    return f"linear cross entropy forward+backward {rows}x{dim}x{classes}", 6.0 * rows * dim * classes, calls


def _pairs(rows: int, dim: int, normal: Callable[..., Tensor]) -> tuple[str, float, dict[str, Call]]:
    x, y = (torch.nn.functional.normalize(normal(rows, dim), dim=-1).requires_grad_() for _ in range(2))
    calls: dict[str, Call] = {
        "partita": lambda: torch.autograd.grad(partita.clip_loss(x, y, 20.0), (x, y)),
        "torch dense": lambda: torch.autograd.grad(gpu_peers.contrast(x, y, 20.0), (x, y)),
    }
    return f"symmetric contrast forward+backward {rows}x{dim}", 6.0 * rows * rows * dim, calls


def measure(
    case: str, operations: float, calls: dict[str, Call], product: float, sheet: float, options: Options
) -> list[Row]:
    """A row for each call; those that raise are left out of the race, with what they say."""
    rows, runs, peaks = [], {}, {}
    for who, call in calls.items():
        try:
            peaks[who], runs[who] = _peak_bytes(call), _to_the_end(call)
        except Exception as error:  # a peer may refuse a dtype, a shape, a device
            note = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            rows.append(Row(case, who, -1.0, -1.0, -1, operations, math.nan, math.nan, note))
    if runs:
        timings, _ = interleave(runs, repeat=options.repeat, seconds=options.seconds)
        for who, timing in timings.items():
            speed = operations / timing.best_s
            rows.append(
                Row(case, who, timing.best_s, timing.median_s, peaks[who], operations, speed / product, speed / sheet)
            )
    return rows


def _to_the_end(call: Call) -> Call:
    """Until the device is done: a launch alone takes no time."""

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def _peak_bytes(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def product_speed(device: str, dtype: torch.dtype, size: int, repeat: int) -> float:
    """Operations per second of a large product of this dtype: what can be reached here."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timings, _ = interleave({"mm": _to_the_end(lambda: torch.mm(a, b))}, repeat=repeat)
    return 2 * size**3 / statistics.median(timings["mm"].times)


def show(rows: list[Row]) -> None:
    ours = next((row for row in rows if row.who.startswith("partita") and row.best_s > 0), None)
    for row in rows:
        if row.best_s < 0:
            print(f"  {row.who:<28} cannot: {row.note}")
            continue
        ratio = f"{ours.best_s / row.best_s:7.3f}" if ours else ""
        print(
            f"  {row.who:<28} {row.best_s * 1e3:10.3f} ms {row.peak_bytes / 2**20:9.1f} MB "
            f"{row.operations / row.best_s / 1e12:8.1f} TF/s {row.of_product:6.1%} of a product "
            f"{row.of_sheet:6.1%} of the sheet {ratio}"
        )


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that everything runs")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="then go on with the close ones")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains TEXT")
    parser.add_argument("--backend", default="auto", help="partita backend")
    parser.add_argument("--json", default="", metavar="FILE", help="append JSON lines to FILE")
    given = parser.parse_args(argv)
    options = Options(given.quick, given.repeat, given.seconds, torch.get_num_threads(), given.only, given.backend)
    torch.manual_seed(0)
    name = torch.cuda.get_device_name()
    dtype = getattr(torch, given.dtype)
    sheet = next((speed for known, speed in SHEET.items() if known in name and dtype.itemsize == 2), math.nan)
    product = product_speed(given.device, dtype, 64 if given.quick else 8192, given.repeat)
    where = {**environment(options), "gpu": name, "dtype": given.dtype, "product_flops": product, "sheet_flops": sheet}
    print(
        f"{name}  {given.dtype}  torch {torch.__version__}  "
        f"a large product {product / 1e12:.0f} TF/s, sheet {sheet / 1e12:.0f}"
    )
    print("last column: ours / theirs, of the best times, smaller is better")
    found: list[Row] = []
    with partita.backend(given.backend):
        for case, operations, calls in cases(given.device, dtype, given.quick):
            if not options.wants(case):
                continue
            print(case)
            rows = measure(case, operations, calls, product, sheet, options)
            show(rows)
            found += rows
            if given.json:
                with open(given.json, "a", encoding="utf-8") as out:
                    out.writelines(json.dumps({**asdict(row), "environment": where}) + "\n" for row in rows)
    return found


if __name__ == "__main__":
    main()
