"""What does a graph cost? Compiling attention, and calling it compiled, against calling it as it is.

Call overhead shows on one query and a few keys, where the pass is next to nothing; at 512 it should not.
torch's own attention, compiled the same way, stands beside it. Compile times are those of a first call, cold, each in a
fresh folder of inductor's; a model compiles a layer once, whatever its length, where sizes are dynamic.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator

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
                yield _overhead(case, backend, rows, n, options)


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return partita.attention(q, k, v)


def _theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _inputs(rows: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 8, rows, 64), torch.randn(1, 8, n, 64), torch.randn(1, 8, n, 64)


def _first_call(function: Callable[..., Tensor], backend: str, dynamic: bool) -> float:
    """Seconds of compiling forward and backward."""
    torch._dynamo.reset()
    given = [x.requires_grad_() for x in _inputs(33, 65)]
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            start = time.perf_counter()
            torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)(*given).sum().backward()
            return time.perf_counter() - start
        finally:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _compile_time(case: str, backend: str, dynamic: bool) -> Row:
    _first_call(_theirs, backend, dynamic)  # the compiler's own first time
    ours, theirs = (_first_call(function, backend, dynamic) for function in (_ours, _theirs))
    return Row("compile", case, "torch sdpa compiled", ours, theirs, "s", load=round(os.getloadavg()[0], 2))


@torch.no_grad()
def _overhead(case: str, backend: str, rows: int, n: int, options: Options) -> list[Row]:
    torch._dynamo.reset()
    given = _inputs(rows, n)
    compiled, sdpa = (torch.compile(f, fullgraph=True, backend=backend) for f in (_ours, _theirs))
    many = REPEATS if rows == 1 else 5

    def repeated(function: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(many):
                function(*given)

        return run

    peers = {"partita uncompiled": repeated(_ours), "torch sdpa compiled": repeated(sdpa)}
    return compare("compile", case, repeated(compiled), peers, options, note=f"times are of {many} calls")
