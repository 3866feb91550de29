"""python -m benchmarks QUESTION: one file per question, a table of ratios, JSON lines if asked for."""

from __future__ import annotations

import argparse
import importlib
import os
from contextlib import nullcontext
from dataclasses import replace

# Before torch: virtual machines have been seen to advertise AMX and die of it in bfloat16; float32 does not use it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch

import partita

from .harness import Options, environment, head, show, write_json
from .revision import installed

QUESTIONS = (
    "attention", "cross_entropy", "contrastive", "margins", "decode", "memory", "accuracy", "watch", "trainer",
    "distributed", "compile", "call", "tokens", "bits",
)  # fmt: skip


def parse() -> tuple[tuple[str, ...], Options, str]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("question", choices=(*QUESTIONS, "all"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, no bars: only to see that everything runs")
    parser.add_argument("--repeat", type=int, default=None, help="times per function, the best counts (default 9)")
    parser.add_argument("--seconds", type=float, default=None, help="then go on with the close ones (default 6)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only cases whose name contains TEXT, or A|B one of them"
    )
    parser.add_argument("--backend", default="auto", help="partita backend: auto, dense, tiled, native")
    parser.add_argument("--since", default="", metavar="REV", help="beside an earlier revision, as git names it")
    parser.add_argument("--json", default="", metavar="FILE", help="append JSON lines to FILE")
    given = parser.parse_args()
    questions = QUESTIONS if given.question == "all" else (given.question,)
    repeat = given.repeat if given.repeat is not None else (2 if given.quick else 9)
    seconds = given.seconds if given.seconds is not None else (0.0 if given.quick else 6.0)
    if repeat < 1 or given.threads < 1:
        parser.error("--repeat and --threads must be at least 1")
    options = Options(given.quick, repeat, seconds, given.threads, given.only, given.backend, given.json)
    return questions, options, given.since


def main() -> None:
    questions, options, since = parse()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    env = environment(options)
    print("  ".join(f"{name} {env[name]}" for name in ("commit", "torch", "cpu", "isa", "threads", "load")))
    print(f"ratio = ours / peer, smaller is better; best of {options.repeat} and {options.seconds:g} s more, in turns")
    print("pairs: the median over rounds of ours / peer, which a lucky moment does not move")
    print("load: one-minute average, this benchmark included; others: processors busy with other work")
    print("roofline: useful operations per second over those of a large torch.mm in that dtype, same run")
    with partita.backend(options.backend), installed(since) if since else nullcontext() as before:
        options = replace(options, before=before)
        for question in questions:
            print(f"\n{question}")
            head()
            for rows in importlib.import_module(f"benchmarks.{question}").cases(options):
                for row in rows:
                    show(row)
                write_json(rows, options)


if __name__ == "__main__":
    main()
