"""How many bit patterns does one row have in 200 companies? Its own numbers stay; what rides along changes.

    python -m benchmarks bits                 this machine's kernel: distinct values, ours and torch's, and the price
    python -m benchmarks bits --only price --backend tiled      what exact rows cost there: exact / default
    python -m benchmarks.bits --page FILE     every kernel of this machine and every dtype, as the table of a page

A company is: other rows and where the row stands among them, batch entries and heads, hidden keys behind (padding) or
before its own (packing, padding on the left), 1 to 4 threads, calls of some rows at a time, and one query over a cache
in place of a causal pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from partita import support

from .harness import Options, Row, compare

DIM, WIDTH, KEYS = 40, 24, 2100
KERNELS = ("avx512_bf16", "avx512", "avx2", "baseline")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
KINDS = ("rows", "batch", "padding", "packing", "decoding", "chunks")
QUANTITIES = (
    "log Z", "NLL", "entropy", "mean score", "variance", "rank", "mean value", "own query's gradient",
    "own bias's gradient", "token log p", "token entropy", "loss", "own hidden state's gradient",
)  # fmt: skip
Found = dict[str, Tensor]
EXACT = "partita, exact_rows"
MARK = "<!-- python -m benchmarks.bits --page -->\n"


class Company(NamedTuple):
    """What is computed together with the row."""

    kind: str
    lead: tuple[int, int]  # batch entries, heads
    rows: int
    place: tuple[int, int, int]  # entry, head, row
    before: int  # hidden keys before the row's own
    behind: int
    causal: bool  # the row's keys are its own position and what is before it
    chunk: int  # rows to a call; 0: all
    threads: int


def companies(count: int, keys: int) -> Iterator[Company]:
    """The first is the row alone."""
    generator = torch.Generator().manual_seed(1)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    yield Company("alone", (1, 1), 1, (0, 0, 0), 0, 0, False, 0, 1)
    for i in range(1, count):
        kind = KINDS[i % len(KINDS)]
        lead = (some(1, 3), some(1, 3)) if kind == "batch" else (1, some(1, 2))
        rows = 1 if kind == "batch" and some(0, 1) else some(1, 9) if some(0, 1) else some(10, 150)
        before, behind = 0, some(1, 700) if kind in ("padding", "packing") else 0
        causal = kind == "decoding" and some(0, 1) == 1
        if kind == "packing":
            before = some(1, 900)
        if kind == "decoding":
            rows, behind = (some(2, 40), some(0, 60)) if causal else (1, some(0, 60))
        place = (some(0, lead[0] - 1), some(0, lead[1] - 1), rows - 1 if causal else some(0, rows - 1))
        chunk = some(1, rows) if kind == "chunks" else 0
        yield Company(kind, lead, rows, place, before, behind, causal, chunk, some(1, 4))


class Own(NamedTuple):
    """The row, its keys, and the gradients that flow back to what it gives."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    target: int
    upstream: Tensor

    @staticmethod
    def of(dtype: torch.dtype, keys: int) -> Own:
        torch.manual_seed(2)
        query, key, value = torch.randn(DIM), torch.randn(keys, DIM), torch.randn(keys, WIDTH)
        return Own(*[t.to(dtype) for t in (query, key, value, torch.randn(keys))], 7, torch.randn(WIDTH + 8).to(dtype))


class Call(NamedTuple):
    """The tensors of one company, the row in its place."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    target: Tensor
    upstream: Tensor
    seen: support.Support | None
    mask: Tensor  # the same, dense
    company: Company

    @staticmethod
    def of(own: Own, c: Company, seed: int) -> Call:
        generator = torch.Generator().manual_seed(seed)
        new = len(own.key) + c.before + c.behind

        def others(*shape: int) -> Tensor:
            return torch.randn(*c.lead, *shape, generator=generator).to(own.query.dtype)

        query, key, value, bias = others(c.rows, DIM), others(new, DIM), others(new, WIDTH), others(c.rows, new)
        upstream, target = others(c.rows, WIDTH + 8), torch.full((*c.lead, c.rows), c.before + own.target)
        b, h, i = c.place
        cut = slice(c.before, c.before + len(own.key))
        query[b, h, i], key[b, h, cut], value[b, h, cut], bias[b, h, i, cut] = own[:4]
        upstream[b, h, i] = own.upstream
        at = torch.arange(new)
        shown = (at >= cut.start) & (at < cut.stop)
        mask = shown.expand(c.rows, new)
        seen: support.Support | None = None
        if c.causal:
            last = len(own.key) - 1 - i + torch.arange(c.rows)  # the row sees all of its own keys, those above fewer
            mask = at <= last[:, None]
            seen = support.causal("bottom-right") if not c.behind else support.mask(mask)
        elif c.before:
            ids = torch.full((new,), 5).masked_fill(shown, 3)
            seen = support.segments(torch.full((c.rows,), 3), ids)
        elif c.behind:
            seen = support.lengths(cut.stop)
        return Call(query, key, value, bias, target, upstream, seen, mask, c)

    def own(self, rows: Tensor) -> Tensor:
        return rows[self.company.place]

    def chunks(self) -> Iterator[tuple[slice, Call]]:
        n = self.company.chunk or self.company.rows
        for first in range(0, self.company.rows, n):
            cut = slice(first, min(first + n, self.company.rows))
            parts = [t[:, :, cut] for t in (self.query, self.bias, self.target, self.upstream)]
            query, bias, target, upstream = parts
            yield cut, self._replace(query=query, bias=bias, target=target, upstream=upstream, mask=self.mask[cut])


def read(call: Call, one: Callable[[Call], Found]) -> Found:
    """What `one` gives for the row, from the call or from the chunk of it that holds the row."""
    b, h, i = call.company.place
    for cut, part in call.chunks():
        if cut.start <= i < cut.stop:
            c = part.company._replace(place=(b, h, i - cut.start), rows=cut.stop - cut.start)
            return one(part._replace(company=c))
    raise AssertionError("the row is in no chunk")


def own_columns(call: Call, rows: Tensor) -> Tensor:
    """The columns of the row's own keys."""
    return rows[..., call.company.before : call.company.before + KEYS]


def ours(call: Call) -> Found:
    scale, found = DIM**-0.5, {}
    with torch.no_grad():
        p = partita.Gibbs(call.query, call.key, scale=scale, support=call.seen)
        stats = p.stats()
        found["log Z"], found["entropy"] = stats.log_partition, stats.entropy
        found["mean score"], found["variance"] = stats.mean_score, stats.score_variance
        fresh = partita.Gibbs(call.query, call.key, scale=scale, support=call.seen)
        found["NLL"], found["rank"] = fresh.nll(call.target), fresh.target_rank(call.target)
        found["mean value"] = partita.attention(call.query, call.key, call.value, support=call.seen, scale=scale)
    query, bias = call.query.clone().requires_grad_(), call.bias.clone().requires_grad_()
    p = partita.Gibbs(query, call.key, scale=scale, bias=bias, support=call.seen)
    stats, up = p.stats(), call.upstream
    total = (p.expectation(call.value) * up[..., 8:]).sum() + (p.nll(call.target) * up[..., 0]).sum()
    rest = (stats.log_partition, stats.entropy, stats.mean_score, stats.score_variance)
    total = total + sum((x * up[..., 1 + k]).sum() for k, x in enumerate(rest))
    of_query, of_bias = torch.autograd.grad(total, (query, bias))
    found["own query's gradient"], found["own bias's gradient"] = of_query, own_columns(call, of_bias)
    return {name: call.own(x) for name, x in found.items()}


def our_tokens(call: Call) -> Found:
    """The same row as a token's hidden state: its keys are the vocabulary."""
    b, h, _ = call.company.place
    hidden, weight = call.query[b, h].clone().requires_grad_(), call.key[b, h, call.company.before :][:KEYS]
    ids, up = call.target[b, h] - call.company.before, call.upstream[b, h]
    stats = partita.token_stats(hidden, weight, ids)
    total = (stats.log_prob * up[:, 0]).sum() + (stats.entropy * up[:, 1]).sum()
    (one,) = torch.autograd.grad(total, hidden)
    loss = partita.linear_cross_entropy(hidden, weight, ids, reduction="none").detach()
    (two,) = torch.autograd.grad(partita.linear_cross_entropy(hidden, weight, ids, reduction="sum"), hidden)
    found = {"token log p": stats.log_prob, "token entropy": stats.entropy, "loss": loss}
    found["own hidden state's gradient"] = torch.cat([one, two], -1)
    return {name: x.detach()[call.company.place[2]] for name, x in found.items()}


def dense(call: Call) -> Found:
    query, bias = call.query.clone().requires_grad_(), call.bias.clone().requires_grad_()
    hidden = ~call.mask
    s = (
        (DIM**-0.5 * (query @ call.key.mT)).float()
        if query.dtype == torch.bfloat16
        else DIM**-0.5 * query @ call.key.mT
    )
    s = s.masked_fill(hidden, -torch.inf)
    log_p = torch.log_softmax(s, -1)
    p, finite = log_p.exp(), log_p.masked_fill(hidden, 0.0)
    score = s.masked_fill(hidden, 0.0)
    mean = (p * score).sum(-1)
    found = {
        "log Z": torch.logsumexp(s, -1),
        "NLL": -log_p.gather(-1, call.target[..., None])[..., 0],
        "entropy": -(p * finite).sum(-1),
        "mean score": mean,
        "variance": (p * (score - mean[..., None]) ** 2).sum(-1),
        "rank": (s > s.gather(-1, call.target[..., None])).sum(-1),
        "mean value": p.to(query.dtype) @ call.value,
    }
    p = torch.softmax(s + bias, -1)
    total = ((p.to(query.dtype) @ call.value) * call.upstream[..., 8:]).sum()
    of_query, of_bias = torch.autograd.grad(total, (query, bias))
    found["own query's gradient"], found["own bias's gradient"] = of_query, own_columns(call, of_bias)
    return {name: call.own(x).detach() for name, x in found.items()}


def fused(call: Call) -> Found:
    query = call.query.clone().requires_grad_()
    out = F.scaled_dot_product_attention(query, call.key, call.value, attn_mask=call.mask)
    (back,) = torch.autograd.grad((out * call.upstream[..., 8:]).sum(), query)
    return {"mean value": call.own(out).detach(), "own query's gradient": call.own(back)}


def torch_tokens(chunk: int | None) -> Callable[[Call], Found]:
    def loss(hidden: Tensor, weight: Tensor, ids: Tensor, reduction: str) -> Tensor:
        if chunk is None:
            return F.cross_entropy(hidden @ weight.T, ids, reduction=reduction)
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        return F.linear_cross_entropy(hidden, weight, ids, reduction=reduction, options=options)

    def found(call: Call) -> Found:
        b, h, i = call.company.place
        hidden, weight = call.query[b, h].clone().requires_grad_(), call.key[b, h, call.company.before :][:KEYS]
        ids = call.target[b, h] - call.company.before
        rows = loss(hidden, weight, ids, "none")
        (back,) = torch.autograd.grad(loss(hidden, weight, ids, "sum"), hidden)
        return {"loss": rows.detach()[i], "own hidden state's gradient": back[i]}

    return found


CONTENDERS: dict[str, tuple[Callable[[], AbstractContextManager[object]], tuple[Callable[[Call], Found], ...]]] = {
    "torch dense": (nullcontext, (dense, torch_tokens(None))),
    "torch chunked": (nullcontext, (torch_tokens(64),)),
    "torch SDPA": (nullcontext, (fused,)),
    "partita": (nullcontext, (ours, our_tokens)),
    EXACT: (partita.exact_rows, (ours, our_tokens)),
}


def distinct(name: str, dtype: torch.dtype, count: int) -> dict[str, dict[bytes, set[str]]]:
    """Of every quantity the bit patterns it had, each with the kinds of company that gave it."""
    context, functions = CONTENDERS[name]
    own, threads = Own.of(dtype, KEYS), torch.get_num_threads()
    found: dict[str, dict[bytes, set[str]]] = {}
    try:
        for seed, company in enumerate(companies(count, KEYS)):
            torch.set_num_threads(company.threads)
            call = Call.of(own, company, seed)
            with context():
                for one in functions:
                    for quantity, x in read(call, one).items():
                        bits = x.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
                        found.setdefault(quantity, {}).setdefault(bits, set()).add(company.kind)
    finally:
        torch.set_num_threads(threads)
    return found


def _exactly(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with partita.exact_rows():
            return call()

    return run


def priced(quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that are timed in exact rows and without."""
    n, keys, classes = (64, 256, 1000) if quick else (256, 2048, 4000)
    for label, dtype in list(DTYPES.items())[:2]:
        x = torch.randn(1, 8, n, 64).to(dtype)
        cache = torch.randn(1, 8, keys, 64).to(dtype)
        hidden, weight, ids = torch.randn(n, 256).to(dtype), torch.randn(classes, 256).to(dtype), torch.arange(n)
        given, head = x.clone().requires_grad_(), hidden.clone().requires_grad_()

        def forward(x: Tensor = x) -> Tensor:
            return partita.attention(x, x, x, is_causal=True)

        def both(x: Tensor = given) -> object:
            return torch.autograd.grad(partita.attention(x, x, x, is_causal=True).float().sum(), x)

        def loss(h: Tensor = head, w: Tensor = weight, ids: Tensor = ids) -> object:
            return torch.autograd.grad(partita.linear_cross_entropy(h, w, ids), h)

        def tokens(h: Tensor = hidden, w: Tensor = weight, ids: Tensor = ids) -> object:
            return partita.token_stats(h, w, ids)

        def decode(q: Tensor = x[:, :, :1], k: Tensor = cache) -> Tensor:
            return partita.attention(q, k, k)

        def pairs(a: Tensor = hidden) -> Tensor:
            return partita.info_nce_loss(a, a, temperature=0.1)

        calls = {"attention forward": forward, "attention forward and backward": both, "cross entropy": loss}
        calls |= {"token statistics": tokens, "decoding": decode, "contrast": pairs}
        yield from ((f"{name}, {label}", call) for name, call in calls.items())


def cases(options: Options) -> Iterator[list[Row]]:
    if options.wants("price of exact rows"):
        for name, call in priced(options.quick):
            exact = _exactly(call)
            yield compare("bits", f"price of exact rows, {name}", exact, {"by default": call}, options, warmup=1)
    count = 12 if options.quick else 200
    for label, dtype in DTYPES.items():
        if not options.wants(label):
            continue
        values = {name: distinct(name, dtype, count) for name in CONTENDERS}
        for quantity in QUANTITIES:
            kept = {name: len(found[quantity]) for name, found in values.items() if quantity in found}
            mine = kept.pop(EXACT)
            bar = None if options.quick else 1.0
            yield [
                Row("bits", f"{quantity}, {label}", name, mine, float(n), "values", bar=bar if n == 1 else None)
                for name, n in kept.items()
            ]


def measure(labels: list[str], names: list[str], count: int) -> list[dict[str, object]]:
    return [
        {"dtype": label, "who": name, "quantity": q, "values": len(v), "kinds": sorted(set().union(*v.values()))}
        | {"by": {kind: sum(kind in of for of in v.values()) for kind in ("alone", *KINDS)}}
        for label in labels
        for name in names
        for q, v in distinct(name, DTYPES[label], count).items()
    ]


def table(results: dict[str, list[dict[str, object]]]) -> str:
    """Distinct values in float32 / bfloat16 / float64; of exact rows the most of any kernel."""
    best = next(iter(results))
    lines = [f"| quantity | {' | '.join(CONTENDERS)} |", f"|---|{'---|' * len(CONTENDERS)}"]
    for quantity in QUANTITIES:
        cells = []
        for name in CONTENDERS:
            kernels = results if name == EXACT else [best]
            rows = [r for k in kernels for r in results[k] if r["who"] == name and r["quantity"] == quantity]
            found = [[r["values"] for r in rows if r["dtype"] == label] for label in DTYPES]
            cells.append(" / ".join(str(max(v)) if v else "" for v in found) if rows else "")
        lines.append(f"| {quantity} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bits", description=__doc__)
    parser.add_argument("--page", default="", help="write the table of all kernels at the end of this file")
    parser.add_argument("--json", action="store_true", help="print the measurement of this process's kernel alone")
    parser.add_argument("--companies", type=int, default=200)
    parser.add_argument("--who", default=";".join(CONTENDERS))
    given = parser.parse_args()
    if given.json:
        names = [name for name in CONTENDERS if name in given.who.split(";")]
        print(json.dumps(measure(list(DTYPES), names, given.companies)))
        return
    results: dict[str, list[dict[str, object]]] = {}
    for kernel in KERNELS:
        command = [sys.executable, "-m", "benchmarks.bits", "--json", "--companies", str(given.companies)]
        command += ["--who", EXACT] if results else []
        done = subprocess.run(command, env={**os.environ, "PARTITA_ISA": kernel}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        results[kernel] = json.loads(done.stdout)
        print(kernel, *[r for r in results[kernel] if r["who"] == EXACT and r["values"] != 1], flush=True)
    print(table(results))
    if given.page:
        page = Path(given.page)
        kept = page.read_text().split(MARK)[0]
        page.write_text(f"{kept}{MARK}\n{table(results)}\n")


if __name__ == "__main__":
    main()
