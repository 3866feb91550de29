"""The page of verdicts has every study and says what verdicts.json says; its rows are means over seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from programs import program

from partita_theory.experiments import find, names

ROOT = Path(__file__).parents[2]
VERDICTS = json.loads((ROOT / "theory" / "docs" / "reference" / "verdicts.json").read_text(encoding="utf-8"))


SCRIPT = program("site/studies.py")


def test_the_page_is_up_to_date() -> None:
    kept = (ROOT / "theory" / "docs" / "reference" / "verdicts.md").read_text(encoding="utf-8")
    assert kept == SCRIPT.verdict_page(), "run python tools/site/studies.py"
    assert all(f"\n## {name}\n" in kept for name in names())


def test_verdicts_are_of_studies_that_exist_and_expect_what_they_did() -> None:
    """What was expected may not be reworded after the run: the run then has to be made again."""
    for name, sizes in VERDICTS.items():
        for found in sizes.values():
            assert found["expected"] == find(name).expected, name
            assert found["answer"] in ("holds", "holds within", "does not hold") and found["evidence"]
        assert (ROOT / "docs" / "figures" / f"{name}.svg").is_file()


def test_rows_are_means_over_seeds(tmp_path: Path) -> None:
    rows = [
        {"n": n, "kind": "a", "seed": seed, "theory": 2.0, "value": n + seed, "more": math.nan}
        for n in (1, 2)
        for seed in (0, 1)
    ]
    found = SCRIPT.means(rows)
    assert [(r["n"], r["kind"], r["seeds"], r["theory"], r["value"]) for r in found] == [
        (1, "a", 2, 2.0, "1.5"),
        (2, "a", 2, 2.0, "2.5"),
    ]
    assert float(found[0]["value +-"]) == pytest.approx(12.706 * math.sqrt(0.5) / math.sqrt(2), rel=0.02)  # Student's
    assert SCRIPT.means(rows[:3]) == rows[:3]  # seeds that did not run alike are not averaged
    SCRIPT.write_rows(tmp_path / "rows" / "x.csv", [*found, {"other": 1}])
    lines = (tmp_path / "rows" / "x.csv").read_text().splitlines()
    assert lines[0].split(",")[0] == "seeds" and "other" in lines[0] and len(lines) == 4
