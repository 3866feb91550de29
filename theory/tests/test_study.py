"""The study command: resumes after a kill, plans, skips, fails softly, shows."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import fakes
import pytest

from partita.cli import main
from partita_theory import experiments, study
from partita_theory.store import Store
from partita_theory.verdict import Verdict

SECONDS = 600  # a hang, not a busy machine


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "names", fakes.names)
    monkeypatch.setattr(experiments, "find", fakes.find)


def start(out: Path, log: Path, *, pause: float = 0.0, seeds: int = 4) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "LOG": str(log), "PAUSE": str(pause), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, fakes.__file__, "run", "sound", "--size", "tiny"]
    return subprocess.Popen(
        [*command, "--seeds", str(seeds), "--out", str(out)],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def stored(out: Path, seeds: int = 4) -> list[dict[str, object]]:
    rows = Store(out, "sound", "tiny").rows(fakes.FAKES["sound"].cells("tiny", seeds))
    return [{k: str(v) if k == "odd" else v for k, v in row.items()} for row in rows]  # nan is not equal to itself


def wait_for_lines(path: Path, count: int) -> None:
    until = time.monotonic() + SECONDS
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < until, f"no {count} lines in {path}"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL on Windows")
def test_killed_twice_and_started_again_gives_the_rows_of_an_undisturbed_run(tmp_path: Path) -> None:
    calm, torn, log = tmp_path / "calm", tmp_path / "torn", tmp_path / "log"
    assert start(calm, tmp_path / "calm.log").wait(SECONDS) == 0
    kept = 0
    for lines in (2, 5):
        process = start(torn, log, pause=0.3)
        wait_for_lines(torn / "sound-tiny.jsonl", lines)
        process.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL
        kept = (torn / "sound-tiny.jsonl").read_bytes().count(b"\n")
        assert lines <= kept < 12
    assert start(torn, log).wait(SECONDS) == 0
    assert len(stored(calm)) == 36 and stored(torn) == stored(calm)
    ran = Counter(log.read_text().split("\n")[:-1])
    assert len(ran) == 12  # none lost
    assert sum(ran.values()) - 12 <= 2  # repeated: only the cell that was running when it was killed, once per kill
    lines = (torn / "sound-tiny.jsonl").read_text().splitlines()
    assert len(lines) == 12 and len({json.loads(line)["cell"] for line in lines}) == 12
    before = (torn / "sound-tiny.jsonl").read_bytes()
    assert start(torn, log).wait(SECONDS) == 0  # nothing is left to run
    assert (torn / "sound-tiny.jsonl").read_bytes() == before
    assert (torn / "sound-tiny.svg").read_text() == (calm / "sound-tiny.svg").read_text()
    assert json.loads((torn / "verdicts.json").read_text()) == json.loads((calm / "verdicts.json").read_text())


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ on Windows")
def test_an_interruption_is_130_and_keeps_finished_cells(tmp_path: Path) -> None:
    process = start(tmp_path, tmp_path / "log", pause=0.3)
    wait_for_lines(tmp_path / "sound-tiny.jsonl", 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 130
    assert len(stored(tmp_path)) >= 6


@pytest.mark.usefixtures("fake")
def test_a_terminal_gets_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["study", "run", "sound", "--size", "tiny", "--out", str(tmp_path)]) == 0
    drawn = capsys.readouterr().err.split("\r\033[K")
    assert drawn[1].startswith("sound [........................] 0/6  n=4 seed=0")
    assert drawn[6].startswith("sound [####################....] 5/6, about 0.0 s left")
    assert drawn[-1] == "" and max(map(len, drawn)) < 60 and "\n" not in "".join(drawn)  # the bar leaves nothing behind


@pytest.mark.usefixtures("fake")
def test_a_run_says_what_came_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "run", "sound", "sound", "--size", "tiny", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.count("sound: holds: mean") == 1 and "1 asked: 1 holds" in out
    assert "sound 6/6  n=16 seed=1" in err and "\r" not in err
    entry = json.loads((tmp_path / "verdicts.json").read_text())["sound"]["tiny"]
    assert entry["answer"] == "holds" and entry["rows"] == 18 and entry["ids"] == ["M-GIB-1"]
    assert (tmp_path / "sound-tiny.svg").read_text().startswith("<svg")


@pytest.mark.usefixtures("fake")
def test_one_that_fails_or_lacks_a_package_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "run", "all", "--size", "tiny", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "broken: failed, ArithmeticError: the second cell breaks" in out and "Traceback" in err
    assert "lacking: skipped, needs no_such_package, sklearn_of_another_world: pip install no-such-package" in out
    assert "last: holds" in out and "4 asked: 2 holds, 1 skipped, 1 failed" in out
    assert len(Store(tmp_path, "broken", "tiny").records) == 1  # what was finished before it broke is kept
    assert set(json.loads((tmp_path / "verdicts.json").read_text())) == {"sound", "last"}
    assert main(["study", "run", "lacking", "--size", "tiny", "--out", str(tmp_path)]) == 0


def test_verdicts_of_studies_that_end_together_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process may read the file between another's reading and writing: what the other says would be lost."""
    pytest.importorskip("fcntl", reason="no file locks on Windows")
    names, real = [f"study {i}" for i in range(6)], study.replace_file
    together = threading.Barrier(len(names))

    def late(path: Path, text: str) -> Path:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.5)  # for others who have read the file as well; where it is locked no process gets in
        return real(path, text)

    monkeypatch.setattr(study, "replace_file", late)

    def judged(name: str) -> None:
        store = Store(tmp_path, name, "tiny")
        study._remember(tmp_path, fakes.experiment(name), "tiny", Verdict("holds", "counted."), store, [])

    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(judged, names))
    assert set(json.loads((tmp_path / "verdicts.json").read_text())) == set(names)
    assert [path.name for path in tmp_path.iterdir()] == ["verdicts.json"]


@pytest.mark.usefixtures("fake")
def test_a_dry_run_prints_cells_and_time_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["study", "run", "sound", "lacking", "--size", "tiny", "--out", str(tmp_path)]
    assert main([*arguments, "--dry-run", "--seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert "sound: 9 of 9 cells to run, about 18 s" in out and "    n=16 seed=2" in out
    assert "in all about 18 s; 1 skipped" in out and not list(tmp_path.iterdir())
    main(arguments)
    capsys.readouterr()
    assert main([*arguments, "--dry-run", "--seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert "sound: 3 of 9 cells to run, about" in out and "seed=1" not in out
    assert "about 6.0 s" not in out  # as fast as the finished ones, not 2 s each as the size says


@pytest.mark.usefixtures("fake")
def test_more_seeds_add_cells_and_repeat_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("LOG", str(log))
    for seeds in ("2", "4", "3"):
        assert main(["study", "run", "sound", "--size", "tiny", "--out", str(tmp_path), "--seeds", seeds]) == 0
    assert sorted(Counter(log.read_text().splitlines()).values()) == [1] * 12
    assert json.loads((tmp_path / "verdicts.json").read_text())["sound"]["tiny"]["cells"] == 9


@pytest.mark.usefixtures("fake")
def test_cells_of_another_version_are_kept_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["study", "run", "sound", "--size", "tiny", "--out", str(tmp_path)]
    main(arguments)
    monkeypatch.setattr("partita.__version__", "99.0")
    capsys.readouterr()
    main(arguments)
    assert "6 of 6 cells are on disk, some by partita 0." in capsys.readouterr().err
    assert "99.0" not in (tmp_path / "sound-tiny.jsonl").read_text()


@pytest.mark.usefixtures("fake")
def test_the_list_has_questions_times_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "list"]) == 0
    out = capsys.readouterr().out
    assert "sound\n    Are they random?\n    tiny 12 s, quick 12 s, full 12 s; M-GIB-1" in out
    assert "    needs no_such_package" in out


@pytest.mark.usefixtures("fake")
def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["study", "show", "sound", "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert "partita study run sound --size quick" in capsys.readouterr().err
    main(["study", "run", "sound", "--size", "tiny", "--seeds", "1", "--out", str(tmp_path)])
    capsys.readouterr()
    assert main([*arguments, "--figure", str(tmp_path / "new" / "f.svg")]) == 0
    out = capsys.readouterr().out
    assert "Are they random?\n    expected: they are" in out and "tiny: 3 of 6 cells, 9 rows (unfinished)" in out
    assert "holds: mean" in out and (tmp_path / "new" / "f.svg").read_text().startswith("<svg")
    assert main([*arguments, "--figure", "f.jpg"]) == 2 and ".svg or .png" in capsys.readouterr().err
    assert main([*arguments, "--figure", str(tmp_path / "f.png")]) == 0
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert main(["study", "show", "all"]) == 2


def test_unknown_names_and_numbers_are_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "run", "nothing_of_the_kind"]) == 2
    assert ", ".join(experiments.names()) in capsys.readouterr().err
    file = tmp_path / "file"
    file.write_text("")
    some = experiments.names()[0]
    for wrong in (["run"], ["run", some, "--size", "huge"], ["run", some, "--seeds", "0"], ["nothing"], []):
        assert main(["study", *wrong]) == 2, wrong
        assert capsys.readouterr().err.strip()
    assert main(["study", "run", some, "--out", str(file)]) == 2 and "folder" in capsys.readouterr().err


def test_help_imports_no_torch() -> None:
    code = "import sys; from partita.cli import main; c = main({}); assert 'torch' not in sys.modules; sys.exit(c)"
    for arguments in (["study", "--help"], ["study", "run", "--help"]):
        done = subprocess.run([sys.executable, "-c", code.format(arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "run" in done.stdout
