"""What partita-theory adds to the command line: demo, lab, stretch, study (the entry points of `partita.commands`).

Each takes the arguments after its name and returns the exit code. torch is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from partita.cli import FINE, THEORY, to_count, to_path

__all__ = ["demo", "lab", "stretch", "study"]


def demo(argv: Sequence[str]) -> int:
    parser = _parser("demo")
    parser.add_argument("-o", "--out", type=to_path, default=Path("out"), help="folder for the pages and records (out)")
    parser.add_argument("--minutes", type=_minutes, default=2.75, help="time for the training part (2.75)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps only: shows that everything runs")
    options = parser.parse_args(argv)
    from partita_theory.demo import demo

    return demo(options.out, minutes=options.minutes, seed=options.seed, quick=options.quick)


def lab(argv: Sequence[str]) -> int:
    parser = _parser("lab")
    parser.add_argument("-o", "--out", type=to_path, default=Path("lab.html"))
    options = parser.parse_args(argv)
    from partita_theory.lab import write

    print(f"lab: {write(options.out)}")
    return FINE


def stretch(argv: Sequence[str]) -> int:
    parser = _parser("stretch")
    parser.add_argument("model", help="a Hugging Face folder or a name available locally, or FILE.py:factory")
    parser.add_argument("--text", type=to_path, required=True, help="text that the model was not trained on")
    parser.add_argument("--to", type=to_count, required=True, help="the length to read, in tokens")
    parser.add_argument("--trained", type=to_count, help="the length of training (default: what the model declares)")
    parser.add_argument("--targets", type=to_count, default=2048, help="about how many tokens to score (2048)")
    parser.add_argument("--mask-id", type=int, help="the token that hides another, for a model that looks ahead")
    parser.add_argument(
        "--bytes", action="store_true", help="feed the bytes of the text to a model without a tokenizer"
    )
    parser.add_argument(
        "-o", "--out", type=to_path, default=Path("stretch"), help="folder for stretch.html, stretch.json and the cells"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, and no progress")
    options = parser.parse_args(argv)
    from partita.monitor.files import replace_file
    from partita_theory.stretch import stretch
    from partita_theory.stretch.page import render

    found = stretch(
        options.model, text=options.text, to=options.to, out=options.out, trained=options.trained,
        targets=options.targets, mask=options.mask_id, as_bytes=options.bytes,
        say=(lambda _: None) if options.json else (lambda line: print(line, flush=True)),
    )  # fmt: skip
    replace_file(options.out / "stretch.json", json.dumps(found, allow_nan=False))
    page = replace_file(options.out / "stretch.html", render(found))
    if options.json:
        print(json.dumps(found, allow_nan=False))
        return FINE
    print(found["says"])
    if found["code"]:
        print(found["code"])
    print(f"report: {page}")
    return FINE


def study(argv: Sequence[str]) -> int:
    from partita_theory.study import main

    return main(argv)


def _parser(name: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"partita {name}", description=THEORY[name])


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0; got {text}")
    return value
