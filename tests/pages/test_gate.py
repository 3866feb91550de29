"""Findings in CI: which of them count, from which level on they fail, and what was known before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partita.cli import main
from tests.pages import synthetic


@pytest.fixture
def collapsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A record with collapsed heads, in a folder of its own that the command stands in."""
    record = synthetic.record(sick=True)
    record.save(tmp_path / "run.jsonl")
    monkeypatch.chdir(tmp_path)
    return "run.jsonl"


def report(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, object]]]:
    capsys.readouterr()
    code = main(["report", "run.jsonl", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)["findings"]


def codes(found: list[dict[str, object]]) -> set[object]:
    return {row["code"] for row in found}


def test_codes_are_left_out_or_alone(collapsed: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, everything = report("--fail-on", "warning", capsys=capsys)
    assert code == 1 and "HEAD_COLLAPSED" in codes(everything)
    code, rest = report("--fail-on", "warning", "--ignore", "HEAD_COLLAPSED", capsys=capsys)
    assert codes(rest) == codes(everything) - {"HEAD_COLLAPSED"}
    others = ",".join(sorted(str(c) for c in codes(rest)))
    code, none = report("--fail-on", "info", "--ignore", f"head_collapsed,{others}", capsys=capsys)
    assert code == 0 and none == []
    code, alone = report("--fail-on", "warning", "--only", "HEAD_COLLAPSED", capsys=capsys)
    assert code == 1 and codes(alone) == {"HEAD_COLLAPSED"}


def test_thresholds_decide(collapsed: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, none = report("--threshold", "collapsed=0", "--only", "HEAD_COLLAPSED", capsys=capsys)
    assert none == []


def test_a_file_sets_the_same(collapsed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("tomllib", reason="Python 3.11")
    settings = '[tool.partita.findings]\nonly = ["HEAD_COLLAPSED"]\nfail-on = "warning"\n'
    Path("pyproject.toml").write_text(settings)
    code, found = report(capsys=capsys)
    assert code == 1 and codes(found) == {"HEAD_COLLAPSED"}
    other = tmp_path / "elsewhere.toml"
    other.write_text(settings + "thresholds = { collapsed = 0.0 }\n")
    assert report("--config", str(other), capsys=capsys) == (0, [])
    code, found = report("--config", str(other), "--threshold", "collapsed=0.01", capsys=capsys)  # goes before the file
    assert code == 1


def test_only_what_is_new_since_a_baseline_fails(collapsed: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, everything = report("--write-baseline", "known.json", capsys=capsys)
    assert report("--baseline", "known.json", "--fail-on", "info", capsys=capsys) == (0, [])
    known = json.loads(Path("known.json").read_text())
    gone = next(row for row in known["known"] if row["code"] == "HEAD_COLLAPSED")
    known["known"].remove(gone)  # as if this head had been healthy then
    Path("known.json").write_text(json.dumps(known))
    code, new = report("--baseline", "known.json", "--fail-on", "warning", capsys=capsys)
    assert code == 1 and codes(new) == {"HEAD_COLLAPSED"}
    # written again it knows all of them, not only the new one
    report("--baseline", "known.json", "--write-baseline", "known.json", capsys=capsys)
    assert report("--baseline", "known.json", "--fail-on", "info", capsys=capsys) == (0, [])
    assert everything


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ignore", "HEAD_COLAPSED"], "no finding is called HEAD_COLAPSED"),
        (["--threshold", "collapsed"], "NAME=NUMBER"),
        (["--threshold", "colapsed=1"], "unknown threshold colapsed"),
        (["--baseline", "nowhere.json"], "nowhere.json does not exist; make it with --write-baseline"),
        (["--baseline", "run.jsonl"], "no baseline"),
        (["--config", "nowhere.toml"], "nowhere.toml does not exist"),
    ],
)
def test_mistakes_are_named(
    collapsed: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["report", collapsed, *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[tool.partita.findings]\nignored = ["SINK_HEAD"]\n', "has no ignored; it has ignore, only"),
        ('[tool.partita.findings]\nfail-on = "never"\n', "fail-on must be one of info, warning, error"),
        ("[tool.partita.findings\n", "no TOML"),
    ],
)
def test_mistakes_in_a_file_are_named(collapsed: str, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    pytest.importorskip("tomllib", reason="Python 3.11")
    Path("pyproject.toml").write_text(text)
    assert main(["report", collapsed]) == 2
    assert said in capsys.readouterr().err
