"""What every kernel for GPUs needs on four kinds of device, without one: compiled ahead of time, read from the binary.

    python -m benchmarks.gpu_resources write     compile what is missing in tests/triton/resources.json; write the page
    python -m benchmarks.gpu_resources all       compile everything, one JSON record a line; `sample` a fixed few of it
    python -m benchmarks.gpu_resources page      write the roofline of docs/explain/gpu.md anew from resources.json

A record is one kernel of one case: a request that is handed to the backend as it would be on the device. `write` puts
each case down when it is compiled, so it may be stopped and goes on where it was; records of other kernels' code (the
file holds a fingerprint of it) or of other tiles count as missing. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import partita
from partita import support
from partita.engine.sums import SumGrads

from .binaries import resources
from .paper_device import DEVICES, on_paper
from .roofline import PAGE, PRODUCTS, with_roofline

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "src" / "partita" / "engine" / "backends" / "triton" / "kernels"
TABLE = ROOT / "tests" / "triton" / "resources.json"
DIMS = (32, 64, 96, 128, 256)
LEVELS = (0, 1, 2)
DTYPES = ("bfloat16", "float32", "float16")
NEVER_SPILLS = ("sm_80", "sm_90")  # up to D 128, whatever is asked; there everything a request may ask for is compiled
ROWS, KEYS = 512, 512  # of the requests; the kernels are the same for more


@dataclass(frozen=True)
class Case:
    """A request, and the device it is for."""

    kind: str  # forward, backward, decode, weighted_nll, both_ways
    level: int  # 0 output, 1 with entropy, 2 with variance
    dim: int
    dtype: str
    device: str
    asks: str = ""  # what else: a name of ASKS

    @property
    def name(self) -> str:
        return "-".join(
            str(x) for x in (self.device, self.kind, self.dtype, self.dim, self.level, self.asks) if x != ""
        )


# What else a request may ask for; each changes the kernel.
ASKS: dict[str, Any] = {
    "causal": lambda: {"support": support.causal()},
    "window": lambda: {"support": support.causal() & support.window(64, 0)},
    "segments": lambda: {"support": support.segments(torch.arange(ROWS) % 5, torch.arange(KEYS) % 5)},  # not sorted
    "mask": lambda: {"support": support.mask(torch.ones(ROWS, KEYS, dtype=torch.bool))},
    "not_self": lambda: {"support": support.not_self()},
    "bias by row": lambda: {"bias": torch.zeros(ROWS, 1)},
    "bias by key": lambda: {"bias": torch.zeros(1, KEYS)},
    "dense bias": lambda: {"bias": torch.zeros(ROWS, KEYS)},
    "softcap": lambda: {"softcap": 30.0},
    "target": dict,
    "careful": dict,
}


def cases() -> Iterator[Case]:
    """Everything: first what must not spill, and of that what is most likely to."""
    for dtype, device, asks in itertools.product(("bfloat16", "float32"), NEVER_SPILLS, ASKS):
        for kind in ("forward", "backward"):
            yield Case(kind, 2, 128, dtype, device, asks)
    for devices in (NEVER_SPILLS, [device for device in DEVICES if device not in NEVER_SPILLS]):
        for dtype, device, dim in itertools.product(DTYPES, devices, reversed(DIMS)):
            for kind, level in itertools.product(("forward", "backward"), reversed(LEVELS)):
                yield Case(kind, level, dim, dtype, device)
    for device in DEVICES:
        for kind, level in (("decode", 2), ("weighted_nll", 0), ("both_ways", 0)):
            yield Case(kind, level, 128, "bfloat16", device)


def sample() -> Iterator[Case]:
    """The fixed few that are compiled in every test: each device, each kernel, the largest level, the usual sizes."""
    for device in DEVICES:
        yield Case("forward", 2, 128, "bfloat16", device)
        yield Case("backward", 2, 64 if device == "sm_80" else 128, "bfloat16", device)
    yield Case("forward", 0, 64, "bfloat16", "sm_90")
    yield Case("forward", 2, 64, "float16", "sm_80")
    yield Case("forward", 2, 64, "float32", "sm_80")
    yield Case("backward", 2, 128, "float32", "sm_80")
    yield Case("forward", 2, 128, "bfloat16", "sm_80", "segments")
    yield Case("backward", 2, 128, "bfloat16", "sm_80", "causal")
    yield Case("decode", 2, 128, "bfloat16", "sm_90")
    yield Case("weighted_nll", 0, 128, "bfloat16", "sm_80")
    yield Case("both_ways", 0, 128, "bfloat16", "sm_90")


def compiled(case: Case) -> list[dict[str, Any]]:
    """Records of the kernels that this case would launch."""
    from partita.engine.backends.triton import (  # where triton may be absent, nothing else needs it
        BACKEND,
        launch,
        reduce,
    )

    run, names = launch.Launch.run, [module for module in (launch, reduce) if hasattr(module, "target_of")]

    def as_asked(self: Any, device: torch.device) -> None:
        # the careful form of a kernel runs where something is not finite: it is a case of its own
        if self.switches.get("CAREFUL", case.asks == "careful") == (case.asks == "careful"):
            run(self, device)

    with ExitStack() as stack:
        launches = stack.enter_context(on_paper(DEVICES[case.device]))
        stack.enter_context(mock.patch.object(launch.Launch, "run", as_asked))
        for module in names:
            stack.enter_context(mock.patch.object(module, "target_of", return_value=case.device))
        _ask(BACKEND, case)
    return [_record(case, found) for found in launches]


def _kernel(function: str) -> str:
    return f"backward_{function}" if function in ("rows", "keys", "pairs") else function


def _ask(backend: Any, case: Case) -> None:
    """Hand the request of a case to the backend; what comes back was never computed."""
    dtype = getattr(torch, case.dtype)
    if case.kind in ("weighted_nll", "both_ways"):
        x, y = torch.zeros(ROWS, case.dim, dtype=dtype), torch.zeros(KEYS, case.dim, dtype=dtype)
        own, weight = torch.arange(ROWS), torch.ones(ROWS)
        request = partita.Gibbs(x, y).asking(target=own, statistics=False)
        if case.kind == "weighted_nll":
            backend.weighted_nll(request, weight, (True, True, False, True, True))
        else:
            backend.both_ways.forward(request)
            backend.both_ways.backward(request, [weight] * 4, [weight] * 2, (True, True, False, True, False))
        return
    rows, keys = (4, 16384) if case.kind == "decode" else (ROWS, KEYS)
    query = torch.zeros(1, 2, rows, case.dim, dtype=dtype)
    key, value = (torch.zeros(1, 2, keys, case.dim, dtype=dtype) for _ in range(2))
    asked = ASKS[case.asks]() if case.asks in ASKS else {}
    target = torch.zeros(1, 2, rows, dtype=torch.long) if case.asks == "target" else None
    request = partita.Gibbs(query, key, scale=0.1, **asked).asking(
        value,
        target,
        rank=target is not None,
        statistics=case.level > 0,
        variance=case.level > 1,
        mean=case.kind != "backward",
    )
    if case.kind != "backward":
        backend.forward(request)
        return
    by_row = torch.ones(1, 2, rows)
    moments = (by_row if case.level > 0 else None, by_row if case.level > 1 else None)
    g = SumGrads(by_row, *moments, torch.ones(query.shape), None if target is None else by_row)
    backend.backward(request, by_row.double(), g, (True, True, True, True, request.bias is not None))


def _record(case: Case, launch: Any) -> dict[str, Any]:
    rows, keys = (
        launch.constants.get(a, launch.constants.get(b)) for a, b in (("BLOCK_M", "ROWS"), ("BLOCK_N", "COLUMNS"))
    )
    kernel = _kernel(launch.name)
    itemsize = getattr(torch, case.dtype).itemsize
    given = {"name": f"{case.name}-{kernel}", "kernel": kernel, "rows": rows, "keys": keys, "itemsize": itemsize}
    return {**given, **asdict(case), **asdict(resources(launch.kernel))}


def excess(record: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    """What a kernel needs beyond its device or beyond what is committed; empty where all is well."""
    device, name, found = DEVICES[record["device"]], record["name"], []
    spared = record["device"] in NEVER_SPILLS and record["dim"] <= 128
    if record["spilled"] > (0 if spared else committed["spilled"]):
        found.append(f"{name} spills {record['spilled']} bytes, committed {committed['spilled']}")
    if record["shared_bytes"] > device.shared_bytes:
        found.append(
            f"{name} wants {record['shared_bytes']:,} bytes of shared memory, more than the {device.shared_bytes:,}"
        )
    # float32 products that are not rounded to tf32 have no tensor cores at NVIDIA
    multiplies = record["kernel"] in PRODUCTS and (record["itemsize"] == 2 or device.backend == "hip")
    if multiplies and not record["tensor"]:
        found.append(f"{name} has no tensor cores in its products")
    more = [what for what in ("registers", "shared_bytes") if record[what] > committed[what]]
    return found + [f"{name} {what}: {record[what]}, committed {committed[what]}" for what in more]


def compile_all(wanted: Iterable[Case], workers: int = 2) -> Iterator[dict[str, Any]]:
    """Records of all cases, in their order; a process for each core, since compiling holds one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for records in pool.map(compiled, wanted):
            yield from records


def version() -> str:
    from triton import __version__

    return str(__version__)


def fingerprint() -> str:
    """Of the kernels' code, without its comments and docstrings."""
    found = hashlib.sha256()
    for file in sorted(KERNELS.glob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and len(body) > 1 and isinstance(body[0], ast.Expr):
                del body[0]
        found.update(ast.unparse(tree).encode())
    return found.hexdigest()[:16]


def fits(record: dict[str, Any]) -> bool:
    """Whether a record has the tile that the table gives it today; a loss has none."""
    from partita.engine.backends.triton.tiles import careful, tile

    if record["kernel"] not in (*PRODUCTS, "backward_pairs"):
        return True
    kind = "decode" if record["kind"] == "decode" else record["kernel"]
    width = 1 << (record["dim"] - 1).bit_length()
    crowded = record["asks"] not in ("", "causal", "window", "careful")
    found = tile(kind, width, getattr(torch, record["dtype"]), record["level"], record["device"], crowded)
    found = careful(record["kernel"], found, record["device"]) if record["asks"] == "careful" else found
    return tuple(found) == tuple(record[name] for name in ("rows", "keys", "warps", "stages"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_resources", description=__doc__)
    parser.add_argument("what", choices=("write", "sample", "all", "page"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains TEXT")
    given = parser.parse_args(argv)
    if given.what in ("sample", "all"):
        wanted = [case for case in (sample() if given.what == "sample" else cases()) if given.only in case.name]
        for record in compile_all(wanted, given.workers):
            print(json.dumps(record), flush=True)
        return
    if given.what == "write":
        write(given.only, given.workers)
    PAGE.write_text(with_roofline(PAGE.read_text(), json.loads(TABLE.read_text())["kernels"]))


def write(only: str = "", workers: int = 2) -> None:
    """Compile the cases that have no record yet, and put each down when it is there; what is no case any more goes."""
    order = {case.name: i for i, case in enumerate(cases())}
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    current = known.get("code") == fingerprint() and known.get("triton") == version()
    rows = [r for r in known["kernels"] if _case(r) in order] if current else []
    stale = {_case(r) for r in rows if not fits(r)}
    rows = [r for r in rows if _case(r) not in stale]
    done = {_case(r) for r in rows}
    missing = [case for case in cases() if only in case.name and case.name not in done]
    for _, records in itertools.groupby(compile_all(missing, workers), _case):
        rows.extend(records)
        rows.sort(key=lambda r: (order[_case(r)], r["kernel"]))
        lines = ",\n".join(json.dumps(r) for r in rows)
        beside = TABLE.with_suffix(".new")  # an interrupted run leaves a whole table
        beside.write_text(f'{{"triton": "{version()}", "code": "{fingerprint()}", "kernels": [\n{lines}\n]}}\n')
        beside.replace(TABLE)


def _case(record: dict[str, Any]) -> str:
    name: str = record["name"]
    return name.removesuffix(f"-{record['kernel']}")


if __name__ == "__main__":
    main()
