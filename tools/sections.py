"""Write a page for each note, and the table of all their headings: theory/docs/notes/*.md, reference/sections.md.

    python tools/sections.py

theory/sections.toml has the headings in the order of the notes and what became of each. Who cites a statement is found
as for the page of statements, what is wrong in print comes from the errata, what came out of a study from
verdicts.json, and the call under a heading is the example of the function's docstring.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import tomllib

from partita_theory import errata

ROOT = Path(__file__).resolve().parents[1]
DOCS, HOME = ROOT / "docs", ROOT / "theory" / "docs"  # of the library, and of the theory, where these pages go
MOST = 3  # names in a cell; the page of statements has them all
NOTES = {  # number and title in print, as far as the note has one
    "contrast": ("000", "Contrast", "", ""),
    "losses": ("001", "Losses", "", ""),
    "noise": (
        "002", "Noise and entropy", "注意力和Softmax的两点有趣发现：鲁棒性和信息量",
        "Two interesting findings about attention and softmax: robustness and amount of information",
    ),
    "scale": (
        "003", "Scale and length", "熵不变性Softmax的一个快速推导", "A quick derivation of entropy-invariant softmax",
    ),
    "attention": ("004", "Attention", "第5章 注意力机制数学", "Chapter 5: The mathematics of attention"),
}  # fmt: skip
TABLE = """# The notes, heading by heading

The five texts this project began with ([statements](statements.md) says which), and what became of each heading: the
statements it was corrected to, the functions that compute them, the tests that would fail if they were false, the
studies that put them to the test with their verdicts, what is printed otherwise, a picture, and the page to read. A
cell names a few of what there is; the pages of the notes and the statements have all of it.

This page is written by `python tools/sections.py` from `theory/sections.toml` and the sources.
"""
PAGE = """<!-- needs: partita_theory -->

{title}What became of the note, in its own order and under its own titles: under each heading the statements as
corrected, a call with its number, the figure, what came out of the studies, and what is printed otherwise. What the
letters mean is on the page of [statements](../reference/statements.md). The other notes: {others}. All headings
stand in [one table](../reference/sections.md).

This page is written by `python tools/sections.py`; every example runs in the tests.

```python
>>> import torch, partita

```
"""
ABOVE = "its sections follow"


class Cells(NamedTuple):
    """What a section became."""

    ids: list[str]
    code: list[str]
    tests: list[str]
    studies: list[str]
    errata: list[errata.Row]
    figure: str
    page: str


@functools.cache
def load(path: str) -> Any:
    """Another script of this folder."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_script", ROOT / "tools" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def statements() -> tuple[Any, Any]:
    """The script of the statements, and who cites them."""
    script = load("statements.py")
    return script, script.sources()


@functools.cache
def verdicts() -> dict[str, Any]:
    """What came out of each study, by the sizes it was run at."""
    found: dict[str, Any] = json.loads((HOME / "reference" / "verdicts.json").read_text(encoding="utf-8"))
    return found


def sections() -> list[dict[str, Any]]:
    """The headings, in the order of the notes."""
    text = (ROOT / "theory" / "sections.toml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)["section"]
    return found


def label(section: dict[str, Any]) -> str:
    """The number, or a title without one, and both titles: as on the pages."""
    return " ".join(part for part in (section.get("at", ""), section["zh"], "·", section["en"]) if part)


def is_parent(section: dict[str, Any]) -> bool:
    """A heading whose text is in the headings below it."""
    return "ids" not in section and "why" not in section


def cells(section: dict[str, Any], script: Any, found: Any) -> Cells:
    """What is named in the file comes first, then what cites the statements of the section."""
    order = list(script.statements())
    named = re.findall(r"\S+", section.get("ids", ""))
    ids = [each for one in named for each in sorted(script.ids(one), key=order.index)]

    def cited(kind: str) -> list[str]:
        names: list[str] = section.get(kind, "").split()
        for each in ids:
            names += [name for name in getattr(found, kind).get(each, []) if name not in names]
        return names

    rows = []
    for one in section.get("errata", "").split():
        document, _, where = one.rpartition(":")
        rows.append(errata.find(f"{document or section['note']} {where}"))
    studies = cited("studies")
    studies += ["errata"] if rows and "errata" not in studies else []
    return Cells(ids, cited("code"), cited("tests"), studies, rows, section.get("figure", ""), section.get("page", ""))


# ---- the table -------------------------------------------------------------------------------------------------------


def _few(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:MOST])
    return shown + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def place(page: str) -> Path:
    """The file of a page: of the theory's if there is one."""
    return HOME / page if (HOME / page).is_file() else DOCS / page


def _link(page: str, start: str) -> str:
    """The title of a page, with a link from a folder of the theory's."""
    (title,) = re.findall(r"^# (.+)$", place(page).read_text(encoding="utf-8"), re.MULTILINE)[:1]
    return f"[{title.replace('`', '')}]({os.path.relpath(place(page), HOME / start)})"


def picture(figure: str) -> str:
    """Its file, from a folder of theory/docs/."""
    (found,) = (DOCS / "figures").glob(f"{figure}.*")
    return os.path.relpath(found, HOME / "notes")


def _answers() -> dict[str, str]:
    """What came out of each study that was run, in a few words."""
    studies = load("site/studies.py")
    return {
        name: next(sizes[size]["answer"] for size in studies.SIZES if size in sizes)
        for name, sizes in verdicts().items()
        if set(sizes) & set(studies.SIZES)
    }


def row(section: dict[str, Any], script: Any, found: Any, answers: dict[str, str]) -> str:
    """A line of the table."""
    title = f"[{section.get('at') or section['en']}](../notes/{section['note']}.md) {section['zh']}<br>{section['en']}"
    if is_parent(section) or "why" in section:
        why = section.get("why", ABOVE)
        return f"| {'**' + title + '**' if is_parent(section) else title} | *{why}* | | | | | | |"
    one = cells(section, script, found)
    studies = [f"`{name}`" + (f" ({answers[name]})" if name in answers else "") for name in one.studies[:MOST]]
    more = f" and {len(one.studies) - MOST} more" if len(one.studies) > MOST else ""
    wrong = [f"[{each.label}](errata.md#{each.label.split()[0]})" for each in one.errata]
    columns = (
        title,
        ", ".join(f"[{each}](statements.md#{each.lower()})" for each in one.ids),
        _few(one.code),
        _few([test.partition("::")[2] or test for test in one.tests]),
        ", ".join(studies) + more or section["no_study"],
        ", ".join(wrong) or "nothing found wrong",
        f"[{one.figure.removeprefix('picture_')}]({picture(one.figure)})",
        _link(one.page, "reference"),
    )
    return "| " + " | ".join(columns) + " |"


def page() -> str:
    """The text of theory/docs/reference/sections.md."""
    (script, found), answers = statements(), _answers()
    parts, note = [TABLE], ""
    for section in sections():
        if section["note"] != note:
            note = section["note"]
            parts.append(f"\n## {NOTES[note][1]}\n")
            parts.append("| heading | statements | functions | tests | studies | printed otherwise | picture | page |")
            parts.append("|---|---|---|---|---|---|---|---|")
        parts.append(row(section, script, found, answers))
    return "\n".join(parts).rstrip() + "\n"


# ---- a page for each note --------------------------------------------------------------------------------------------


def find(name: str) -> tuple[Any, str]:
    """What a dotted name stands for, and the module it is taken from."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        thing: Any = module
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing, module.__name__
    raise AttributeError(name)


def example(name: str) -> str:
    """The example in the docstring of a function, after the imports it needs."""
    thing, public = find(name)
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")
    assert examples, f"{name} has no example"
    home: ModuleType = sys.modules[thing.__module__]
    trees = [ast.parse(each.source) for each in examples]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in nodes if isinstance(node.ctx, ast.Store)} | {"torch", "partita", *dir(builtins)}
    names = sorted({node.id for node in nodes} - made)
    imports = [f">>> import {each}" for each in names if isinstance(getattr(home, each, None), ModuleType)]
    for place in (public, home.__name__):
        own = [each for each in names if f">>> import {each}" not in imports and hasattr(sys.modules[place], each)]
        imports += [f">>> from {place} import {', '.join(own)}"] if own else []
        names = [each for each in names if each not in own]
    lines = []
    for each in examples:
        first, *rest = each.source.rstrip("\n").split("\n")
        lines += [f">>> {first}", *(f"... {line}" for line in rest), *each.want.rstrip("\n").split("\n")]
    return "\n".join([*imports, *(line for line in lines if line)])


def body(section: dict[str, Any], script: Any, found: Any, seen: set[str]) -> list[str]:
    """What is under a heading; `seen` are the figures that the page has shown."""
    if is_parent(section) or "why" in section:
        why = section.get("why")
        return [] if why is None else [f"Nothing to compute: {why}.", ""]
    one, known, answers = cells(section, script, found), script.statements(), load("site/studies.py")
    parts = [section["says"], ""] if "says" in section else []
    for each in one.ids:
        said = f"**{script._capital(known[each]['title'])}.** {script._plain(known[each]['states'])}"
        parts += [f"- {said} ([{each}](../reference/statements.md#{each.lower()}))"]
    parts += ["", "```python", example(section["call"]), "", "```", ""]
    parts += [f"Read on: {_link(one.page, 'notes')}.", ""]
    file = picture(one.figure)
    if one.figure in seen:
        parts += [f"The figure is [shown above]({file}).", ""]
    else:
        seen.add(one.figure)
        parts += [f"![{section['en']}]({file})", ""]
    studies = [name for name in one.studies if name != "errata"] or one.studies  # its rows follow
    parts += [line for name in studies for line in study(name, answers)]
    parts += [] if one.studies else [f"- No study: {section['no_study']}."]
    for each in one.errata:
        document, where = each.label.split(" ", 1)
        kind = errata.KINDS[each.kind].partition(":")[0]
        place = where if document == section["note"] else each.label
        printed, right = (script._plain(text) for text in (each.printed, each.right))
        link = f"[{place}](../reference/errata.md#{document})"
        parts += [f"- **Printed otherwise** ({link}, {kind}): *{printed}*. Right: {right}."]
    return [*parts, ""]


def study(name: str, script: Any) -> list[str]:
    """The verdict of a study in a line."""
    question = importlib.import_module("partita_theory.experiments").find(name).question
    came_out = verdicts().get(name, {})
    size = next((size for size in script.SIZES if size in came_out), "")
    if size:
        link, said = f"../reference/verdicts.md#{name}", f"**{came_out[size]['answer']}** at {size} size"
    elif name == "errata":
        link, said = "../reference/errata.md", "each row is measured"
    elif name not in script.ELSEWHERE:
        link, said = f"../reference/verdicts.md#{name}", "not run for this page yet"
    else:
        link = os.path.relpath(place(script.ELSEWHERE[name].partition("#")[0]), HOME / "notes")
        said = "its outcome is described there"
    return [f"- Study [`{name}`]({link}): {question} {said[0].upper() + said[1:] if size == '' else said}."]


def note_page(note: str) -> str:
    """The text of theory/docs/notes/NOTE.md."""
    (script, found), seen = statements(), set[str]()
    number, name, zh, en = NOTES[note]
    title = f"# Note {number}: {name}\n\n" + (f"**{zh}** · {en}\n\n" if zh else "")
    others = ", ".join(f"[{NOTES[each][0]}]({each}.md)" for each in NOTES if each != note)
    parts = [PAGE.format(title=title, others=others)]
    for section in sections():
        if section["note"] == note:
            parts += [f"{'#' * section['level']} {label(section)}", "", *body(section, script, found, seen)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def pages() -> dict[Path, str]:
    """Every page this script writes, with its text."""
    return {HOME / "reference" / "sections.md": page(), **{HOME / "notes" / f"{n}.md": note_page(n) for n in NOTES}}


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
