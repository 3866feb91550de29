"""The command line: quick to answer, exit codes as promised, finished work survives an interruption."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partita.cli import main
from tests.pages import synthetic

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

WITHOUT_TORCH = """
import sys
from partita.cli import main
code = main({})
assert "torch" not in sys.modules
sys.exit(code)
"""
FACTORY = """
import torch, torch.nn as nn, torch.nn.functional as F

class Attention(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.qkv, self.gain = nn.Linear(16, 48), gain

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(self.gain * q, k, v).transpose(1, 2).flatten(2)

class Model(nn.Module):
    def __init__(self, gain=4.0):
        super().__init__()
        self.embed, self.attention = nn.Embedding(100, 16), Attention(gain)
        self.place = nn.Parameter(torch.randn(600, 16))

    def forward(self, input_ids):
        return self.attention(self.embed(input_ids) + self.place[: input_ids.shape[1]])

def healthy():
    torch.manual_seed(0)
    return Model()

def collapsed():
    torch.manual_seed(0)
    return Model(4000.0)

def with_tokenizer():
    return healthy(), lambda text: [ord(c) % 100 for c in text]

def wrong():
    return "not a model"

def raises():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(FACTORY)
    return str(path)


def test_help_imports_the_parser_and_nothing_heavy() -> None:
    """What makes it quick: the command line's own module, the standard library, and nothing else."""
    own = "{m for m in sys.modules if m.partition('.')[0] == 'partita'} == {'partita', 'partita._later', 'partita.cli'}"
    code = WITHOUT_TORCH.format(["--help"]).replace("sys.exit", f"assert {own}, sorted(sys.modules)\nsys.exit")
    code = code.replace("import sys\n", "import sys\nbefore = set(sys.modules)\n", 1)
    heavy = "{'numpy', 'importlib.metadata', 'asyncio'} & (set(sys.modules) - before)"
    code = code.replace("sys.exit", f"assert not {heavy}\nsys.exit")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert all(c in done.stdout for c in ("demo", "inspect", "study", "report", "bench", "lab", "doctor"))


def test_reports_need_no_torch(tmp_path: Path) -> None:
    path = synthetic.record(2, 2, 3).save(tmp_path / "run.jsonl")
    code = WITHOUT_TORCH.format(["report", str(path), "-o", str(tmp_path / "r.html")])
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 0
    assert "synthetic run" in (tmp_path / "r.html").read_text()


def test_a_damaged_record_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = synthetic.record(1, 2, 3).save(tmp_path / "run.jsonl")
    lines = path.read_text().splitlines()
    lines[3] = '{"kind":"attention","step":"first"}'
    path.write_text("\n".join(lines))
    assert main(["report", str(path), "-o", str(tmp_path / "r.html")]) == 3
    assert "line 4" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


def test_output_that_cannot_be_written_is_wrong_use(
    capsys: pytest.CaptureFixture[str], factory: str, tmp_path: Path
) -> None:
    run, file = str(synthetic.record(1, 1, 3).save(tmp_path / "run.jsonl")), tmp_path / "file"
    file.write_text("")
    for arguments in (
        ["report", run, "-o", str(file / "r.html")],
        ["report", run, "-o", str(tmp_path)],
        ["inspect", f"{factory}:healthy", "--max-length", "16", "--save", str(file / "run.jsonl")],
    ):
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert str(file) in said or str(tmp_path) in said, said
        assert "Traceback" not in said


def test_a_factory_that_raises_is_named_with_its_line(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    assert main(["inspect", f"{factory}:raises"]) == 2
    line = 1 + FACTORY.splitlines().index('    raise RuntimeError("no weights here")')
    said = capsys.readouterr().err
    assert f"line {line})" in said and "no weights here" in said and "Traceback" not in said


def test_version_and_help_everywhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import partita

    assert main(["--version"]) == 0 and partita.__version__ in capsys.readouterr().out
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "benchmarks" else real(n, *a))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--help"]) == 0 and "clone" in capsys.readouterr().out


def test_json_writes_no_page_unless_one_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synthetic.record(1, 2, 3).save(tmp_path / "run.jsonl")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


def test_an_interrupted_inspect_claims_nothing(
    capsys: pytest.CaptureFixture[str], factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from partita.cli import inspect

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "run", stopped)
    assert main(["inspect", f"{factory}:healthy"]) == 130
    assert "disk" not in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_needs_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**small, vocab_size=90, max_position_embeddings=32)
    transformers.BertModel(config).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 2 and "--bytes" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--bytes"]) == 0
    assert "bytes of built-in text, modulo a vocabulary of 90" in capsys.readouterr().out


def test_absent_commands_of_other_parts_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "benchmarks" else real(n, *a))
    monkeypatch.chdir(tmp_path)
    for asked in (["study", "--anything"], ["demo", "--quick"], ["lab"], ["stretch", "model", "--help"]):
        assert main(asked) == 2 and "pip install partita-theory" in capsys.readouterr().err
    assert main(["bench"]) == 2 and "benchmarks" in capsys.readouterr().err


def test_a_command_of_another_package_gets_its_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def command(arguments: list[str]) -> int:
        asked.append(arguments)
        if arguments[0] == "stop":
            raise KeyboardInterrupt
        return 1

    def entry_points(*, group: str, name: str) -> list[Any]:
        found = importlib.metadata.EntryPoint(name, "somewhere:command", group)
        return [found] if (group, name) == ("partita.commands", "study") else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: command)
    assert main(["study", "run", "--out", "folder"]) == 1
    assert main(["study", "stop"]) == 130
    assert asked == [["run", "--out", "folder"], ["stop"]]
    assert main(["lab"]) == 2


def test_inspect_a_file(capsys: pytest.CaptureFixture[str], factory: str, tmp_path: Path) -> None:
    assert main(["inspect", f"{factory}:healthy"]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 attention modules observed" in said and "fed: 1819 bytes of built-in text" in said
    text = tmp_path / "text.txt"
    text.write_text("In the beginning was the word. " * 40)
    arguments = ["inspect", f"{factory}:collapsed", "--text", str(text), "--json", "--max-length", "128"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert "HEAD_COLLAPSED" in {f["code"] for f in found["findings"]} and found["layers"][0]["heads"] == 2
    assert main([*arguments, "--fail-on", "warning"]) == 1
    known = str(tmp_path / "known.json")
    assert main([*arguments, "--fail-on", "warning", "--ignore", ",".join(f["code"] for f in found["findings"])]) == 0
    assert main([*arguments, "--fail-on", "warning", "--only", "NONFINITE"]) == 0
    assert main([*arguments, "--write-baseline", known]) == 0
    assert main([*arguments, "--fail-on", "warning", "--baseline", known]) == 0
    assert main(["inspect", f"{factory}:healthy", "--max-length", "16", "--fail-on", "error"]) == 0
    assert main(["inspect", f"{factory}:with_tokenizer", "--max-length", "32"]) == 0


def test_inspect_saves_and_report_compares(capsys: pytest.CaptureFixture[str], factory: str, tmp_path: Path) -> None:
    for name in ("healthy", "collapsed"):
        saved = str(tmp_path / f"{name}.jsonl")
        assert main(["inspect", f"{factory}:{name}", "--save", saved, "--max-length", "64"]) == 0
    out = tmp_path / "both.html"
    code = main(
        ["report", str(tmp_path / "healthy.jsonl"), str(tmp_path / "collapsed.jsonl"), "-o", str(out), "--json"]
    )
    assert code == 0 and out.stat().st_size < 2_000_000
    assert '"other":{' in out.read_text()
    assert main(["report", str(tmp_path / "collapsed.jsonl"), "-o", str(out), "--fail-on", "warning"]) == 1
    capsys.readouterr()


def test_doctor_lists_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    names = {c["name"]: c["ok"] for c in json.loads(capsys.readouterr().out)}
    assert names["torch"] and names["a softmax over six equal scores"]


def test_no_colour_without_a_terminal(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    main(["inspect", f"{factory}:collapsed", "--max-length", "32"])
    assert "\033[" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"]], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error(command: list[str]) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "partita", *command], env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    said = run.stderr.read()
    run.stderr.close()
    assert (run.wait(120), said) == (0, "")
