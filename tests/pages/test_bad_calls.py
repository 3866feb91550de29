"""A command line that cannot be meant: exit code 2 and one sentence, never a traceback with the code for findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.cli import main
from tests.pages import synthetic

FACTORIES = """
import sys
import torch
from torch import nn
from partita.nn import MultiheadAttention

class Model(nn.Module):
    trained_length = 16

    def __init__(self, size):
        super().__init__()
        self.embed = nn.Embedding(size, 16)
        self.attention = MultiheadAttention(16, 2, batch_first=True, rotary=True)
        self.head = nn.Linear(16, size)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(self.attention(x, x, x, is_causal=True)[0])

class TakesTwo(Model):
    def forward(self, image, text):
        return super().forward(text)

class TakesVectors(Model):
    def forward(self, x):
        return self.head(x @ x.mT)

class TakesDicts(Model):
    def forward(self, input_ids):
        return self.head(input_ids.items())

class Leaves(Model):
    def forward(self, input_ids):
        sys.exit(1)

class FewerClasses(Model):
    def __init__(self, size):
        super().__init__(size)
        self.head = nn.Linear(16, 40)

def fewer_classes(): return FewerClasses(300)
def fine(): return Model(300)
def small(): return Model(7)
def takes_two(): return TakesTwo(300)
def takes_vectors(): return TakesVectors(300)
def takes_dicts(): return TakesDicts(300)
def leaves_late(): return Leaves(300)
def leaves(): sys.exit(1)
def leaves_well(): sys.exit(0)
def fails(): raise KeyError("several\\nlines")
def wants(size): return Model(size)
def nothing(): return None
"""
CONFIGURATIONS = {
    "a list of numbers": "ignore = [3]",
    "a number for a list": "only = 3",
    "a text for a list": 'ignore = "SINK_HEAD"',
    "a list for a level": 'fail-on = ["error"]',
    "a number for a file": "baseline = 3",
    "no file": 'baseline = ""',
    "numbers for a table": "thresholds = 3",
    "a text for a number": 'thresholds = { collapsed = "x" }',
    "a list for a number": "thresholds = { collapsed = [1.0] }",
    "a truth for a number": "thresholds = { collapsed = true }",
    "nan": "thresholds = { collapsed = nan }",
    "an unknown threshold": "thresholds = { far = 1.0 }",
    "an unknown entry": "far = 1",
    "no TOML": "ignore = [",
}
SECTIONS = ("tool = 3 # partita", "[tool]\npartita = 3", "[tool.partita]\nfindings = [1]")
INSPECT = ["inspect", "FILE:fine", "--max-length", "16"]

INPUTS = ("--text", "--config", "--baseline")
OUTPUTS = ("--save", "--report")

CALLS: list[list[str]] = [
    *[[*INSPECT, option, text] for option in ("--rows", "--max-length") for text in ("0", "-1", "x", "1.5", "", "nan")],
    *[[*INSPECT, option, ""] for option in (*INPUTS, *OUTPUTS, "--write-baseline")],
    *[[*INSPECT, option, "DIR"] for option in (*INPUTS, *OUTPUTS)],
    *[[*INSPECT, option, "none/none"] for option in INPUTS],
    *[
        [*INSPECT, "--threshold", text]
        for text in ("collapsed=nan", "collapsed=inf", "collapsed=", "collapsed", "=1", "far=1", "", "collapsed=1e999")
    ],
    *[[*INSPECT, option, "FAR"] for option in ("--ignore", "--only", "--fail-on")],
    *[["inspect", f"FILE:{name}"] for name in ("takes_two", "takes_vectors", "takes_dicts", "leaves_late")],
    *[["inspect", f"FILE:{name}"] for name in ("leaves", "leaves_well", "fails", "wants", "nothing", "absent", "")],
    *[["inspect", name] for name in ("", "no-such-model", "none.py:fine", "TEXT:fine", "BROKEN:fine", "LEAVES:fine")],
    ["inspect"],
    *[["report", "RECORD", option, ""] for option in ("-o", "--studies", "--config", "--baseline")],
    *[["report", "RECORD", option, "DIR"] for option in ("-o", "--studies", "--config")],
    *[["report", name] for name in ("", "none", "DIR", "TEXT", "FILE", "EMPTY")],
    ["report", "RECORD", ""],
    ["report", "RECORD", "none"],
    ["far"],
]  # fmt: skip


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bad")
    made = {"FILE": folder / "models.py", "TEXT": folder / "text.txt", "DIR": folder / "empty", "OUT": folder / "out"}
    made |= {"RECORD": folder / "record.jsonl", "BROKEN": folder / "broken.py", "LEAVES": folder / "leaves.py"}
    made["FILE"].write_text(FACTORIES)
    made["TEXT"].write_text("A text that is long enough to be read at two lengths, and again. " * 8)
    made["BROKEN"].write_text("def fine(:\n")
    made["LEAVES"].write_text("import sys\nsys.exit(1)\n")
    made["EMPTY"] = folder / "empty.jsonl"
    made["EMPTY"].write_text("")
    made["DIR"].mkdir()
    synthetic.record(1, 2, 3).save(made["RECORD"])
    return {name: str(path) for name, path in made.items()}


def refused(call: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(call) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if not line.startswith(("usage:", " "))]  # argparse shows the usage too
    assert len(lines) == 1, said
    assert lines[0].startswith("partita") and len(lines[0]) > 20


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_call_that_cannot_be_meant_is_named(call, names, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled = [":".join(names.get(part, part) for part in word.split(":")) for word in call]
    refused(filled, capsys)


@pytest.mark.parametrize("name", [*CONFIGURATIONS, *SECTIONS, "UTF-16", "bytes"])
@pytest.mark.parametrize("by", ["name", "folder"])
def test_a_configuration_that_cannot_be_meant_is_named(name, by, names, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("pyproject.toml" if by == "folder" else "other.toml")
    text = f"[tool.partita.findings]\n{CONFIGURATIONS.get(name, '')}"
    text = name if name in SECTIONS else text
    file.write_bytes(
        b"partita \xff\xfe\x00" if name == "bytes" else text.encode("utf-16" if name == "UTF-16" else "utf-8")
    )
    refused(["report", names["RECORD"], *(["--config", "other.toml"] if by == "name" else [])], capsys)
