"""What every kernel for GPUs needs on four kinds of device, without one: compiled ahead of time, read from the binary.

    python -m benchmarks.gpu_resources write     compile everything: tests/triton/resources.json, docs/gpu-resources.md
    python -m benchmarks.gpu_resources all       compile everything, one JSON record a line; `sample` a fixed few of it
    python -m benchmarks.gpu_resources pages     write the pages anew from resources.json

A record is one kernel of one case: a request that is handed to the backend as it would be on the device.
Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import partita
from partita import support
from partita.engine.request import extend
from partita.engine.sums import Upstream

from . import gpu_pages
from .binaries import resources
from .paper_device import DEVICES, on_paper
from .roofline import PRODUCTS

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "triton" / "resources.json"
DIMS = (32, 64, 96, 128, 256)
DTYPES = ("bfloat16", "float32", "float16")
KINDS = ("forward", "backward")
LEVELS = {"forward": (0, 1, 2), "backward": (0, 2)}
ASKED = ("sm_80", "sm_90")  # where everything else a request may ask for is compiled too
NEVER_SPILLS = ("sm_80", "sm_90")  # up to D 128
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
    "segments": lambda: {"support": support.segments(torch.arange(ROWS) // 100, torch.arange(KEYS) // 100)},
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
    """Everything, the most telling first. A backward pass knows two levels: with moments and without."""
    for dtype in DTYPES:
        for device in DEVICES:
            for dim in DIMS:
                for kind in KINDS:
                    levels = LEVELS[kind] if dtype == "bfloat16" else LEVELS[kind][-1:]
                    for level in levels:
                        yield Case(kind, level, dim, dtype, device)
            for kind, level in (("decode", 2), ("weighted_nll", 0), ("both_ways", 0)):
                yield Case(kind, level, 128, dtype, device)
    for device in ASKED:
        for asks in ASKS:
            for kind in KINDS:
                yield Case(kind, 2, 128, "bfloat16", device, asks)
    for dtype in DTYPES[1:]:
        for device in DEVICES:
            for dim in DIMS:
                for kind in KINDS:
                    for level in LEVELS[kind][:-1]:
                        yield Case(kind, level, dim, dtype, device)


def sample() -> Iterator[Case]:
    """The fixed few that are compiled in every test: each device, each kernel, the largest level, the usual sizes."""
    for device in DEVICES:
        yield Case("forward", 2, 128, "bfloat16", device)
        yield Case("backward", 2, 64 if device == "sm_80" else 128, "bfloat16", device)
    yield Case("forward", 0, 64, "float16", "sm_80")
    yield Case("forward", 1, 96, "bfloat16", "sm_90")
    yield Case("forward", 2, 64, "float32", "sm_80")
    yield Case("forward", 2, 128, "bfloat16", "sm_90", "segments")
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
            run(_at_level(self, case), device)

    with ExitStack() as stack:
        launches = stack.enter_context(on_paper(DEVICES[case.device]))
        stack.enter_context(mock.patch.object(launch.Launch, "run", as_asked))
        for module in names:
            stack.enter_context(mock.patch.object(module, "target_of", return_value=case.device))
        _ask(BACKEND, case)
    return [_record(case, found) for found in launches]


def _at_level(launch: Any, case: Case) -> Any:
    """The same launch with as many moments as the case says."""
    from partita.engine.backends.triton.tiles import tile

    if launch.switches.get("LEVEL", case.level) == case.level:
        return launch
    width = max(launch.switches["BLOCK_D"], launch.switches["BLOCK_V"])
    kind = _kernel(launch.kernel.split(".")[1])
    shape = tile(kind, width, getattr(torch, case.dtype), case.level, case.device)
    switches = {**launch.switches, "LEVEL": case.level, "BLOCK_M": shape.rows, "BLOCK_N": shape.keys}
    return replace(launch, switches=switches, tile=shape)


def _kernel(function: str) -> str:
    return f"backward_{function}" if function in ("rows", "keys", "pairs") else function


def _ask(backend: Any, case: Case) -> None:
    """Hand the request of a case to the backend; what comes back was never computed."""
    dtype = getattr(torch, case.dtype)
    if case.kind in ("weighted_nll", "both_ways"):
        x, y = torch.zeros(ROWS, case.dim, dtype=dtype), torch.zeros(KEYS, case.dim, dtype=dtype)
        own, weight = torch.arange(ROWS), torch.ones(ROWS)
        request = extend(partita.Gibbs(x, y, bias=None).request(), target=own, statistics=False)
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
    request = extend(
        partita.Gibbs(query, key, scale=0.1, **asked).request(),
        value=value,
        target=target,
        rank=target is not None,
        statistics=case.level > 0,
        mean=case.kind != "backward",
    )
    assert request is not None
    if case.kind != "backward":
        backend.forward(request)
        return
    by_row = torch.ones(1, 2, rows)
    g = Upstream(by_row, by_row, by_row, torch.ones(query.shape), None if target is None else by_row)
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_resources", description=__doc__)
    parser.add_argument("what", choices=("write", "sample", "all", "pages"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--records", default="", metavar="FILE", help="what `all` printed, for `write`: not compiled again"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains TEXT")
    given = parser.parse_args(argv)
    if given.what in ("sample", "all"):
        wanted = [case for case in (sample() if given.what == "sample" else cases()) if given.only in case.name]
        for record in compile_all(wanted, given.workers):
            print(json.dumps(record), flush=True)
        return
    if given.what == "write":
        wanted = [case for case in cases() if given.only in case.name]
        if given.records:
            made = [json.loads(line) for line in Path(given.records).read_text().splitlines()]
            write(made, {case.name for case in wanted})
        else:
            write(compile_all(wanted, given.workers), {case.name for case in wanted})
    gpu_pages.write(json.loads(TABLE.read_text()))


def write(made: Iterable[dict[str, Any]], done: set[str]) -> None:
    """Put records in the place of those of the same cases; what is no case any more goes."""
    order = {case.name: i for i, case in enumerate(cases())}
    known = json.loads(TABLE.read_text())["kernels"] if TABLE.exists() else []
    rows = [r for r in known if _case(r) in order and _case(r) not in done] + list(made)
    rows.sort(key=lambda r: (order[_case(r)], r["kernel"]))
    lines = ",\n".join(json.dumps(r) for r in rows)
    TABLE.write_text(f'{{"triton": "{version()}", "kernels": [\n{lines}\n]}}\n')


def _case(record: dict[str, Any]) -> str:
    name: str = record["name"]
    return name.removesuffix(f"-{record['kernel']}")


if __name__ == "__main__":
    main()
