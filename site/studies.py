"""A page for each study: its question, what was expected before the run, what came out, the figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partita.lab.experiments import find, names

__all__ = ["study_pages"]


def study_pages(docs: Path) -> Iterator[tuple[str, str]]:
    """(place on the site, Markdown). Verdicts are those of docs/verdicts.json; a study without one says so."""
    kept = docs / "verdicts.json"
    verdicts: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    rows = []
    for name in names():
        study, found = find(name), verdicts.get(name)
        body = [f"# {study.question}", "", f"`partita study run {name}`", ""]
        if found:
            body += [f"**{found['verdict']}** (size `{found['size']}`). {escape(found['evidence'])}", ""]
        else:
            body += ["Not run for this page.", ""]
        if (docs / "figures" / f"{name}.svg").exists():
            body += [f"![{escape(study.question)}](../figures/{name}.svg)", ""]
        body += ["## Expected before the run", "", escape(study.expected), "", "## Statements it bears on", ""]
        links = [f"[{one}](../statements.md#{one.lower()})" for one in study.ids]
        body += [", ".join(links), ""]
        yield f"study/{name}.md", "\n".join(body)
        rows.append(f"| [{name}]({name}.md) | {escape(study.question)} | {found['verdict'] if found else 'not run'} |")
    table = ["| study | question | verdict |", "|---|---|---|", *rows]
    said = "What each verdict means is in [studies](../studies.md); quick sizes unless a page says otherwise."
    yield "study/index.md", "\n".join(["# All studies", "", said, "", *table, ""])


def escape(text: str) -> str:
    """Text as Markdown that shows it."""
    for sign in "\\`*_[]<|":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
