"""partita inspect | report | doctor | bench, and the commands of other packages: demo | lab | stretch | study.

torch is imported by the command that needs it. A package adds a command with an entry point of the group
`partita.commands`: a function that takes the arguments after the command's name and returns the exit code.

Exit codes: 0 fine, 1 findings at or above --fail-on, 2 wrong use (also a file that is no record or cannot be written),
3 a damaged record, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import partita
from partita._later import load

if TYPE_CHECKING:
    from partita.cli.gate import Gate

FINE, FOUND, USAGE, DAMAGED, INTERRUPTED = 0, 1, 2, 3, 130
LEVELS = ("info", "warning", "error")
GROUP = "partita.commands"
THEORY = {  # the commands of partita-theory, for the list of --help
    "demo": "watch an encoder, train a small language model, run studies, write pages of it all",
    "stretch": "which way of reading carries a trained model beyond its length of training",
    "study": "run an experiment of the theory part",
    "lab": "write the softmax lab, an interactive page",
}


def __getattr__(name: str) -> Any:
    return load(__name__, name, {})


class UsageError(Exception):
    """What was requested cannot be done; the message says what can."""

    code = USAGE


class DamagedError(UsageError):
    """A record that something has broken."""

    code = DAMAGED


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code."""
    parser = build()
    given = list(sys.argv[1:] if argv is None else argv)
    # torch warns on import where numpy is missing, which nothing here needs
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        if given[:1] == ["bench"]:  # it parses its own options, --help included
            code: int = run_bench(given[1:])
        elif given and given[0] in THEORY:
            code = load_command(given[0])(given[1:])
        elif (options := parser.parse_args(given)).command is None:
            parser.print_help()
            return FINE
        else:
            code = options.run(options)
        sys.stdout.flush()  # here, where a reader that has gone is no error
        return code
    except SystemExit as stop:  # argparse: --help is 0, a mistake is 2
        return stop.code if isinstance(stop.code, int) else USAGE
    except UsageError as error:
        print(f"partita: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        resumes = given[:2] == ["study", "run"] or given[:1] == ["stretch"]
        kept = "; finished cells are on disk, the same command goes on from them" if resumes else ""
        print(f"partita: interrupted{kept}.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `partita ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except OSError as error:  # a full disk, a folder that may not be written
        if error.filename is None:
            raise
        print(f"partita: {error.filename}: {error.strerror}.", file=sys.stderr)
        return USAGE


def build() -> argparse.ArgumentParser:
    about = "One partition function: see what the softmaxes of a model are doing."
    parser = argparse.ArgumentParser(prog="partita", description=about)
    parser.add_argument("--version", action="version", version=f"partita {partita.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")

    inspect = _command(commands, "inspect", run_inspect, "run a model on text and report what its softmaxes do")
    inspect.add_argument("model", help="a Hugging Face folder or a name available locally, or FILE.py:factory")
    inspect.add_argument("--text", type=to_path, help="a text file (default: built-in text)")
    fed = "feed the bytes of the text, modulo the vocabulary, to a model that comes without a tokenizer"
    inspect.add_argument("--bytes", action="store_true", help=fed)
    inspect.add_argument("--max-length", type=int, default=512, help="longest input in tokens (512)")
    inspect.add_argument("--rows", type=to_count, help="observe this number of queries per call (default: all)")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    _add_gate(inspect)
    inspect.add_argument("--save", type=to_path, help="write the record as JSON lines")
    inspect.add_argument("--report", type=to_path, help="write the HTML report")

    report = _command(commands, "report", run_report, "a record, or two to compare, as one HTML page")
    record = "a file written by watch(...).save, or a folder with one"
    report.add_argument("record", type=to_path, metavar="RUN", help=record)
    report.add_argument("other", type=to_path, nargs="?", metavar="OTHER", help="a second record to compare with")
    out = "the page (report.html; with --json a page is written only where this names one)"
    report.add_argument("-o", "--out", type=to_path, help=out)
    finished = "show the experiments `partita study run --out DIR` finished"
    report.add_argument("--studies", type=to_path, metavar="DIR", help=finished)
    report.add_argument("--json", action="store_true", help="print the findings as JSON")
    _add_gate(report)

    commands.add_parser("bench", help="time and memory of this machine (needs the repository's benchmarks)")

    doctor = _command(commands, "doctor", run_doctor, "what is installed, which backend serves, and why not another")
    doctor.add_argument("--json", action="store_true")
    for name, what in THEORY.items():
        commands.add_parser(name, help=f"{what} (needs partita-theory)")
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run)
    return parser


def _add_gate(parser: argparse.ArgumentParser) -> None:
    """Options that `partita.cli.gate` reads."""
    group = parser.add_argument_group("which findings count")
    group.add_argument("--fail-on", choices=LEVELS, help="exit with 1 if there are findings at or above this level")
    group.add_argument("--ignore", action="append", metavar="CODE", help="leave these out; may be given several times")
    group.add_argument("--only", action="append", metavar="CODE", help="only these; may be given several times")
    group.add_argument("--threshold", action="append", metavar="NAME=NUMBER", help="when a number becomes a finding")
    group.add_argument("--config", type=to_path, metavar="FILE", help="a TOML file with [tool.partita.findings]")
    group.add_argument("--baseline", type=to_path, metavar="FILE", help="leave out what this file lists")
    group.add_argument("--write-baseline", type=to_path, metavar="FILE", help="list what is found now in this file")


def to_path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("must name a file or folder; got nothing")
    return Path(text)


def to_count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1; got {text}")
    return int(text)


# ---- terminal ------------------------------------------------------------------------------------------------------


def paint(text: str, severity: str) -> str:
    """Colour for terminals that want it."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return f"\033[{ {'error': 31, 'warning': 33}.get(severity, 32) }m{text}\033[0m"


def show(findings: Sequence[Any], limit: int = 20) -> None:
    """Findings as text: one block each."""
    if not findings:
        print(paint("no findings", "fine"))
    for finding in findings[:limit]:
        print(f"{paint(finding.severity, finding.severity)}  {finding.code}  {finding.where}")
        print(f"    {finding.evidence}  [{finding.threshold}]" if finding.threshold else f"    {finding.evidence}")
        print(f"    {finding.meaning}" + (f" Try: {finding.action}" if finding.action else ""))
    if len(findings) > limit:
        print(f"... and {len(findings) - limit} more")


def verdict(everything: Sequence[Any], counts: Gate, options: argparse.Namespace) -> int:
    if options.write_baseline:
        from partita.cli.gate import write_baseline

        write_baseline(options.write_baseline, counts, everything)
    return FOUND if counts.fails(everything) else FINE


# ---- commands ------------------------------------------------------------------------------------------------------


def load_command(name: str) -> Callable[[Sequence[str]], int]:
    """A command of another package, where one is installed that has it."""
    from importlib.metadata import entry_points

    for found in entry_points(group=GROUP, name=name):
        command: Callable[[Sequence[str]], int] = found.load()
        return command
    raise UsageError(
        f"`partita {name}` is in a package of its own: pip install partita-theory, "
        "or pip install ./theory in a clone of the repository."
    )


def run_inspect(options: argparse.Namespace) -> int:
    from partita.cli.gate import gate
    from partita.cli.inspect import inspect, summary

    if options.max_length < 2:
        raise UsageError("--max-length must be at least 2.")
    counts = gate(options)
    watched = inspect(
        options.model, text=options.text, max_length=options.max_length, rows=options.rows, as_bytes=options.bytes
    )
    everything = watched.findings(counts.thresholds)
    findings = counts.counted(everything)
    if options.save:
        watched.save(options.save)
    if options.report:
        watched.report(options.report, thresholds=counts.thresholds)
    found = summary(watched, findings)
    if options.json:
        print(json.dumps(found, allow_nan=False))
    else:
        print(found["sentence"])
        print(f"fed: {found['fed']}")
        print(found["coverage"]["text"])
        print(f"{'layer':>5} {'heads':>5} {'H/log n':>8} {'width':>8} {'max':>8} {'key 0':>7}  name")
        for row in found["layers"]:
            numbers = (row[name] for name in ("normalized_entropy", "effective_width", "max_score"))
            cells = " ".join("      no" if x is None else f"{x:8.3f}" for x in numbers)
            print(f"{row['layer']:>5} {row['heads']:>5} {cells} {row['sink_first'] or 0:7.3f}  {row['name'][:60]}")
        show(findings)
        for what, path in (("record", options.save), ("report", options.report)):
            if path:
                print(f"{what}: {path}")
    return verdict(everything, counts, options)


def run_report(options: argparse.Namespace) -> int:
    from partita.cli.gate import gate
    from partita.monitor.findings import find
    from partita.monitor.loading import DamagedRecordError, RecordError, load_record

    def load(path: Path) -> Any:
        if path.is_dir():
            records = sorted(path.glob("*.jsonl"))
            if not records:
                raise UsageError(f"{path} holds no record (*.jsonl). Write one with watch(...).save(path).")
            path = records[0]
        try:
            return load_record(path)
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist.") from None
        except DamagedRecordError as error:
            raise DamagedError(f"a damaged record: {error}") from None
        except RecordError as error:
            raise UsageError(f"not a record: {error}") from None

    counts = gate(options)
    record = load(options.record)
    other = load(options.other) if options.other else None
    if options.studies:
        from partita.monitor.report.studies import KIND, gather

        finished = gather(options.studies)
        if not finished:
            raise UsageError(f"{options.studies} holds no finished experiment. Make one: partita study run NAME.")
        record.studies = [row for row in record.studies if row.get("study") != KIND] + finished
    everything = find(record, counts.thresholds)
    findings = counts.counted(everything)
    out = options.out or (None if options.json else Path("report.html"))
    path = record.report(out, other, thresholds=counts.thresholds) if out else None
    if options.json:
        from partita.monitor.record import clean

        shown = {"report": str(path) if path else None, "findings": [clean(f.as_dict()) for f in findings]}
        print(json.dumps(shown, allow_nan=False))
    else:
        show(findings, limit=5)
        print(f"report: {path} ({path.stat().st_size / 1e6:.2f} MB)" if path else "")
    return verdict(everything, counts, options)


def run_bench(rest: list[str]) -> int:
    sys.path.insert(0, str(Path.cwd()))
    if importlib.util.find_spec("benchmarks") is None:
        where = "The benchmarks are part of the repository: run this in a clone of it, for example partita bench speed"
        if {"-h", "--help"} & set(rest):
            print(f"usage: partita bench [NAME ...]\n\ntime and memory of this machine. {where}")
            return FINE
        raise UsageError(f"no `benchmarks` folder here. {where}")
    import runpy

    sys.argv = ["benchmarks", *rest]
    runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
    return FINE


def run_doctor(options: argparse.Namespace) -> int:
    from partita.cli.doctor import doctor

    checks = doctor()
    if options.json:
        print(json.dumps(checks))
    else:
        for check in checks:
            mark = paint("ok  ", "fine") if check["ok"] else paint("no  ", "warning")
            print(f"{mark}{check['name']}: {check['what']}")
    return FINE
