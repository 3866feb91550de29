"""What does a graph cost? Compiling attention, and calling it compiled, against calling it as it is.

Call overhead shows on one query and a few keys, where the pass is next to nothing; at 512 it should not. Without
gradients plain attention has an operator of its own; with a policy the graph calls the general one. torch's own
attention, compiled the same way, stands beside it. Compile times are those of a first call of this code, in a folder in
which something else was compiled before: the headers, some seconds, are everybody's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

import partita

from .harness import Options, Row, compare

REPEATS = 200  # calls per timing: one takes microseconds


def cases(options: Options) -> Iterator[list[Row]]:
    for backend in ("aot_eager",) if options.quick else ("aot_eager", "inductor"):
        for dynamic in (False, True):
            case = f"compile time, {backend}, {'dynamic' if dynamic else 'fixed'} sizes"
            if options.wants(case):
                yield [_compile_time(case, backend, dynamic)]
        for rows, n in ((1, 64), (512, 512)):
            case = f"call of {rows} queries, {n} keys, {backend}"
            if options.wants(case):
                yield _overhead(case, backend, rows, n, _ours, options)
        case = f"call of 1 queries, 64 keys, LogLength, {backend}"
        if options.wants(case):
            yield _overhead(case, backend, 1, 64, _sharp, options)


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return partita.attention(q, k, v)


def _sharp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return partita.attention(q, k, v, scale=partita.scale.LogLength())


def _theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _inputs(rows: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 8, rows, 64), torch.randn(1, 8, n, 64), torch.randn(1, 8, n, 64)


def _other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sin() @ (k.cos() * v).mT


def _first_call(function: Callable[..., Tensor], backend: str, dynamic: bool) -> float:
    """Seconds of compiling forward and backward."""
    torch._dynamo.reset()
    given = [x.requires_grad_() for x in _inputs(33, 65)]
    start = time.perf_counter()
    torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)(*given).sum().backward()
    return time.perf_counter() - start


@contextmanager
def _empty_folder() -> Iterator[None]:
    """Nothing that was compiled before is found again."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _compile_time(case: str, backend: str, dynamic: bool) -> Row:
    with _empty_folder():
        _first_call(_other, backend, dynamic)  # the compiler's own first time
        ours, theirs = (_first_call(function, backend, dynamic) for function in (_ours, _theirs))
    return Row("compile", case, "torch sdpa compiled", ours, theirs, "s", load=round(os.getloadavg()[0], 2))


@torch.no_grad()
def _overhead(
    case: str, backend: str, rows: int, n: int, function: Callable[..., Tensor], options: Options
) -> list[Row]:
    torch._dynamo.reset()
    given = _inputs(rows, n)
    compiled, sdpa = (torch.compile(f, fullgraph=True, backend=backend) for f in (function, _theirs))
    many = REPEATS if rows == 1 else 5

    def repeated(function: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(many):
                function(*given)

        return run

    peers = {"partita uncompiled": repeated(function), "torch sdpa compiled": repeated(sdpa)}
    return compare("compile", case, repeated(compiled), peers, options, note=f"times are of {many} calls")
