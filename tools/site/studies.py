"""A page for each study: its question, what was expected before the run, what came out, the figure, the rows.

python tools/site/studies.py [FOLDER]     takes verdicts and rows of `partita study run ... --out FOLDER` into
                                          theory/docs/, figures into docs/, and writes theory/docs/reference/verdicts.md
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partita_theory.experiments import find, names
from partita_theory.results import Row, interval
from partita_theory.store import Store

__all__ = ["study_pages", "verdict_page"]

ROOT = Path(__file__).resolve().parents[2]
HOME, FIGURES = ROOT / "theory" / "docs", ROOT / "docs" / "figures"
VERDICTS = HOME / "reference" / "verdicts.json"
SIZES = ("full", "quick")  # the larger one speaks
ELSEWHERE = {  # studies whose outcome is described on a page, where this one has no verdict of theirs
    "errata": "reference/errata.md",
    "finding_quality": "guide/findings.md#how-often-they-are-right",
    "length_generalisation": "reference/study-log.md#2026-11-16",
}
HEAD = """# What came out of every study

Question, what was expected before the run, verdict and the numbers it rests on, of the largest size that was run; what
does not hold stands here as what does. What a verdict means is in [studies](studies.md). Rows are means over seeds,
with the half width of their 95 % interval beside them.

This page is written by `python tools/site/studies.py` from `theory/docs/reference/verdicts.json`.
"""


def study_pages() -> Iterator[tuple[str, str]]:
    """(place on the site, Markdown). A study without a verdict says so."""
    verdicts = _verdicts(VERDICTS)
    rows = []
    for name in names():
        study = find(name)
        size, found = next(((s, verdicts[name][s]) for s in SIZES if s in verdicts.get(name, {})), ("", None))
        body = [f"# {study.question}", "", f"`partita study run {name}`", ""]
        if found:
            within = f" ({escape(found['within'])})" if found.get("within") else ""
            body += [f"**{found['answer']}**{within}. {escape(found['evidence'])}", ""]
            body += [f"Size `{size}`: {found['cells']} settings and seeds, {found['rows']} rows.", ""]
        else:
            page = ELSEWHERE.get(name)
            told = f"What came out is described in [{_stem(page)}](../{page})." if page else "Not run for this page."
            body += [told, ""]
        if (FIGURES / f"{name}.svg").exists():
            body += [f"![{escape(study.question)}](../figures/{name}.svg)", ""]
        if found and (HOME / "rows" / f"{name}.csv").exists():
            body += [f"[Means and intervals of the rows](../rows/{name}.csv)", ""]
        body += ["## Expected before the run", "", escape(study.expected), "", "## Statements it bears on", ""]
        body += [", ".join(f"[{one}](../reference/statements.md#{one.lower()})" for one in study.ids), ""]
        yield f"study/{name}.md", "\n".join(body)
        answer = found["answer"] if found else ""
        rows.append(f"| [{name}]({name}.md) | {escape(study.question)} | {answer} |")
    table = ["| study | question | verdict |", "|---|---|---|", *rows]
    said = "What each verdict means is in [studies](../reference/studies.md). Without one: not run for this page."
    yield "study/index.md", "\n".join(["# All studies", "", said, "", *table, ""])


def verdict_page() -> str:
    """The text of theory/docs/reference/verdicts.md: every study, run or not."""
    verdicts = _verdicts(VERDICTS)
    parts = [HEAD]
    for name in names():
        study = find(name)
        parts += [f"## {name}", "", escape(study.question), "", f"Expected: {escape(study.expected)}", ""]
        size = next((s for s in SIZES if s in verdicts.get(name, {})), "")
        if not size and name in ELSEWHERE:
            page = ELSEWHERE[name]
            folder = next(each for each in (HOME, ROOT / "docs") if (each / page.partition("#")[0]).is_file())
            link = os.path.relpath(folder / page, HOME / "reference")
            parts += [f"What came out is described in [{_stem(page)}]({link}).", ""]
        elif not size:
            parts += ["Not run for this page.", ""]
        else:
            found = verdicts[name][size]
            within = f" ({escape(found['within'])})" if found.get("within") else ""
            parts += [f"**{found['answer']}**{within}. {escape(found['evidence'])}", ""]
            links = [f"size `{size}`: {found['cells']} settings and seeds, {found['rows']} rows"]
            links += [
                f"[{kind}]({os.path.relpath(file, HOME / 'reference')})"
                for kind, file in (("figure", FIGURES / f"{name}.svg"), ("rows", HOME / "rows" / f"{name}.csv"))
                if file.exists()
            ]
            parts += ["; ".join(links) + ".", ""]
    return "\n".join(parts).rstrip() + "\n"


def means(rows: list[Row]) -> list[Row]:
    """One row for what every seed repeats: what seeds agree on as it is, else its mean and half width of the interval.

    The rows of a seed come in the order of the plan, so the k-th of each belongs together; seeds that have different
    numbers of rows, or another kind of row in that place, are left as they are.
    """
    seeds: dict[int, list[Row]] = {}
    for row in rows:
        seeds.setdefault(row["seed"], []).append(row)
    beside = list(zip(*seeds.values(), strict=False))
    if len({len(own) for own in seeds.values()}) > 1 or any(len({tuple(r) for r in same}) > 1 for same in beside):
        return rows
    found = []
    for same in beside:
        mean: Row = {"seeds": len(same)}
        for column in same[0]:
            values = [row[column] for row in same]
            if column != "seed" and len(set(map(str, values))) == 1:
                mean[column] = values[0]
            elif column != "seed":
                spread = interval(float(v) for v in values)
                mean |= {column: f"{spread.mean:.6g}", f"{column} +-": f"{spread.half:.2g}"}
        found.append(mean)
    return found


def write_rows(path: Path, rows: list[Row]) -> None:
    """As comma-separated values, with every column that some row has."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def escape(text: str) -> str:
    """Text as Markdown that shows it."""
    for sign in "\\`*_[]<|":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())


def _stem(page: str) -> str:
    return Path(page.partition("#")[0]).stem


def _verdicts(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def collect(folder: Path) -> None:
    """Verdicts of a folder over those that are there, and the figures and rows of those studies."""
    new = {name: sizes for name, sizes in _verdicts(folder / "verdicts.json").items() if set(sizes) & set(SIZES)}
    whole = _verdicts(VERDICTS)
    for name, sizes in new.items():
        size = next(s for s in SIZES if s in sizes)
        if size == "quick" and "full" in whole.get(name, {}):
            continue  # the larger one speaks
        whole[name] = {size: sizes[size]}
        shutil.copy(folder / f"{name}-{size}.svg", FIGURES / f"{name}.svg")
        rows = Store(folder, name, size).rows(find(name).cells(size))
        write_rows(HOME / "rows" / f"{name}.csv", means(rows))
    VERDICTS.write_text(json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        collect(Path(given))
    (HOME / "reference" / "verdicts.md").write_text(verdict_page(), encoding="utf-8")
