"""Finished cells on disk: strict JSON, provenance, a line cut short by a kill, the order of the plan."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

import partita
from partita.errors import DtypeError
from partita_theory.experiment import Cell
from partita_theory.results import Row
from partita_theory.store import BusyError, Store

PLAN = [Cell({"n": n, "policy": "log"}, seed) for n in (4, 8, 16) for seed in (0, 1)]


def rows_of(cell: Cell) -> list[Row]:
    return [{**cell.settings, "seed": cell.seed, "k": k, "value": (cell.seed + 1) / 3 + k} for k in range(2)]


def filled(folder: Path, cells: list[Cell]) -> Path:
    with Store(folder, "example", "tiny") as store:
        for cell in cells:
            store.add(cell, rows_of(cell), elapsed_s=0.25)
    return store.path


def expected(cells: list[Cell]) -> list[Row]:
    return [row for cell in cells for row in rows_of(cell)]


def test_rows_come_in_the_order_of_the_plan(tmp_path: Path) -> None:
    filled(tmp_path, PLAN[::-1])
    assert Store(tmp_path, "example", "tiny").rows(PLAN) == expected(PLAN)


def test_each_cell_is_on_disk_before_the_next(tmp_path: Path) -> None:
    with Store(tmp_path, "example", "tiny") as store:
        for k, cell in enumerate(PLAN):
            store.add(cell, rows_of(cell), elapsed_s=0.1)
            assert Store(tmp_path, "example", "tiny").rows(PLAN) == expected(PLAN[: k + 1])


def test_a_cell_says_where_it_comes_from(tmp_path: Path) -> None:
    record = json.loads(filled(tmp_path, PLAN[:1]).read_text())
    assert record["settings"] == {"n": 4, "policy": "log"} and record["seed"] == 0 and record["elapsed_s"] == 0.25
    assert record["partita"] == partita.__version__ and record["backend"] == str(partita.backend())
    assert record["time"].endswith("+00:00")
    assert record["environment"]["torch"] == torch.__version__
    assert {"python", "threads", "platform", "processor"} <= record["environment"].keys()


def test_a_cell_is_written_once(tmp_path: Path) -> None:
    path = filled(tmp_path, [*PLAN, *PLAN])
    assert len(path.read_text().splitlines()) == len(PLAN)
    filled(tmp_path, PLAN)
    assert len(path.read_text().splitlines()) == len(PLAN)


def test_a_kill_at_any_byte_loses_the_last_cell_at_most(tmp_path: Path) -> None:
    path = filled(tmp_path, PLAN[:2])
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        done = [c for c, end in ((PLAN[0], second - 1), (PLAN[1], len(whole) - 1)) if cut >= end]
        assert Store(tmp_path, "example", "tiny").rows(PLAN) == expected(done)
        if cut % 97 == 0 or cut > len(whole) - 3:  # opened for writing it is mended, and goes on
            filled(tmp_path, PLAN[::-1])
            store = Store(tmp_path, "example", "tiny")
            assert store.dropped == 0 and store.rows(PLAN) == expected(PLAN)
            assert len(path.read_bytes().splitlines()) == len(PLAN)


def test_a_damaged_line_in_the_middle_costs_that_cell_only(tmp_path: Path) -> None:
    path = filled(tmp_path, PLAN[:3])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:50] + b"\xff\x00", *lines[2:]]))
    store = Store(tmp_path, "example", "tiny")
    assert store.dropped == 1 and store.missing(PLAN[:3]) == [PLAN[1]]


def test_numbers_that_json_lacks_survive_in_strict_json(tmp_path: Path) -> None:
    row = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1 / 3, "e": "nan", "f": None, "g": True, "h": 2**70}
    with Store(tmp_path, "example", "tiny") as store:
        store.add(PLAN[0], [row], elapsed_s=0.0)

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    json.loads(store.path.read_text(), parse_constant=refuse)
    (back,) = Store(tmp_path, "example", "tiny").rows(PLAN)
    assert math.isnan(back.pop("a")) and math.isnan(row.pop("a")) and back == row
    assert store.rows(PLAN)[0].keys() >= row.keys()


def test_rows_that_are_not_flat_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with Store(tmp_path, "example", "tiny") as store, pytest.raises(DtypeError, match=r"Tensor as 'h'.*x\.item"):
        store.add(PLAN[0], [{"h": torch.ones(())}], elapsed_s=0.0)
    assert store.path.read_bytes() == b""


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed here")
def test_rows_are_not_added_to_what_a_planted_link_points_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched, and without an end of line")
    (tmp_path / "example-tiny.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="link"), Store(tmp_path, "example", "tiny"):
        pass
    assert victim.read_text() == "untouched, and without an end of line"


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="no file locks on Windows")
    with Store(tmp_path, "example", "tiny"), pytest.raises(BusyError, match="another run"):
        Store(tmp_path, "example", "tiny").__enter__()
    filled(tmp_path, PLAN)  # the lock is gone with the run
