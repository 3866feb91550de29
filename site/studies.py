"""A page for each study: its question, what was expected before the run, what came out, the figure.

python site/studies.py FOLDER       takes verdicts and figures of `partita study run ... --out FOLDER` into docs/
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partita_studies.experiments import find, names

__all__ = ["study_pages"]

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZES = ("full", "quick")  # the larger one speaks


def study_pages(docs: Path) -> Iterator[tuple[str, str]]:
    """(place on the site, Markdown). Verdicts are those of docs/verdicts.json; a study without one says so."""
    verdicts = _verdicts(docs / "verdicts.json")
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
            body += ["Not run for this page; [the log](../log.md) may have it.", ""]
        if (docs / "figures" / f"{name}.svg").exists():
            body += [f"![{escape(study.question)}](../figures/{name}.svg)", ""]
        body += ["## Expected before the run", "", escape(study.expected), "", "## Statements it bears on", ""]
        body += [", ".join(f"[{one}](../statements.md#{one.lower()})" for one in study.ids), ""]
        yield f"study/{name}.md", "\n".join(body)
        answer = found["answer"] if found else ""
        rows.append(f"| [{name}]({name}.md) | {escape(study.question)} | {answer} |")
    table = ["| study | question | verdict |", "|---|---|---|", *rows]
    said = "What each verdict means is in [studies](../studies.md). Without one: not run for this page."
    yield "study/index.md", "\n".join(["# All studies", "", said, "", *table, ""])


def escape(text: str) -> str:
    """Text as Markdown that shows it."""
    for sign in "\\`*_[]<|":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())


def _verdicts(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def collect(folder: Path) -> None:
    """Verdicts of a folder over those that are there, and the figures of those studies."""
    new = {name: sizes for name, sizes in _verdicts(folder / "verdicts.json").items() if set(sizes) & set(SIZES)}
    whole = {**_verdicts(DOCS / "verdicts.json"), **new}
    (DOCS / "verdicts.json").write_text(json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    for name, sizes in new.items():
        size = next(s for s in SIZES if s in sizes)
        shutil.copy(folder / f"{name}-{size}.svg", DOCS / "figures" / f"{name}.svg")


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
