"""What is on the site: every page of docs/ and theory/docs/, of the root, the reference, the studies, the gallery.

Nothing is listed by hand but the order of the sections: a page that appears in one of the two appears on the site,
under the folder it lies in, with its first heading as its name.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCS = (ROOT / "docs", ROOT / "theory" / "docs")  # of mkdocs, and what joins it
sys.path.insert(0, str(HERE))

from equations import is_equation, typeset  # noqa: E402
from pictures import COLOURS, DARK, DARK_COLOURS, INK, stylesheet  # noqa: E402
from studies import study_pages  # noqa: E402

# pages of the root -> their place on the site
ROOTED = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "RELEASING.md": "releasing.md",
}
# words of the glossary that pages use too often, or in their common sense too
COMMON = ("score", "scale", "state", "received", "entropy", "Z, log Z")
# what a search puts first: the questions people type, and last what was measured when
BOOSTS = {"howto/": 4, "tutorial/": 3, "guide/": 2, "study/": 0.3, "reference/": 0.5}
# section -> its pages in order; a folder stands for its pages that no section names, by name
SECTIONS = {
    "Tutorial": ["tutorial/", "notebook/"],
    "How do I": ["howto/"],
    "Notes": [
        *(f"notes/{note}.md" for note in ("contrast", "losses", "noise", "scale", "attention")),
        "reference/sections.md",
    ],
    "Guides": [*(f"guide/{page}.md" for page in ("watch", "nn", "hf", "adapters", "choosing-a-loss")), "guide/"],
    "Reference": ["reference/conventions.md", "reference/index.md", "reference/"],
    "Why": ["explain/"],
    "Studies": [
        "reference/studies.md",
        "reference/verdicts.md",
        "guide/reading-longer.md",
        "study/",
        "reference/errata.md",
        "reference/study-log.md",
        "reference/log.md",
    ],
    "Gallery": ["guide/gallery.md"],
    "Project": list(ROOTED.values()),
}
FIGURE = re.compile(r'<img alt="[^"]*" src="[^"]*figures/(\w+\.svg)" ?/?>')
LINK = re.compile(r"(!?\[(?:[^\]\\]|\\.)*\])\(([^)\s]+)\)")
PLAIN = re.compile(
    r'<div class="(?:language-text )?highlight"><pre>(?:<span></span>)?<code>(.*?)</code></pre></div>', re.DOTALL
)


# ---- pages ---------------------------------------------------------------------------------------------------------


def public_modules() -> dict[str, list[str]]:
    """Module -> its public names, in the order of the reference; of one name in two modules the shorter path stays."""
    import partita

    own = [name for name in partita.__all__ if not inspect.ismodule(getattr(partita, name))]
    found = {"partita": own}
    inner = [f"partita.{name}" for name in partita.__all__ if inspect.ismodule(getattr(partita, name))]
    inner += [f"partita.adapters.{path.stem}" for path in sorted((ROOT / "src/partita/adapters").glob("[a-z]*.py"))]
    seen = {id(getattr(partita, name)) for name in own}
    for module in inner:
        loaded = importlib.import_module(module)
        names = []
        for name in getattr(loaded, "__all__", ()):
            thing = named(loaded, name)
            if (thing is not None and id(thing) in seen) or inspect.ismodule(thing):
                continue
            seen.add(id(thing))
            names.append(name)
        if names:
            found[module] = names
    import partita_theory

    for name in partita_theory.__all__:
        thing = getattr(partita_theory, name)
        if inspect.ismodule(thing):
            listed = [n for n in thing.__all__ if callable(getattr(thing, n)) and id(getattr(thing, n)) not in seen]
            if listed:
                found[thing.__name__] = listed
    return found


def named(module: Any, name: str) -> Any:
    """What a module has under this name; None where that needs a package that is not installed."""
    try:
        return getattr(module, name)
    except ImportError:
        return None


def described(module: str, name: str) -> bool:
    """Whether there is anything to generate: a function or class of partita with a docstring."""
    thing = named(importlib.import_module(module), name)
    home = getattr(thing, "__module__", "") or ""
    return (inspect.isclass(thing) or inspect.isroutine(thing)) and home.startswith("partita") and bool(thing.__doc__)


def reference_pages() -> Iterator[tuple[str, str]]:
    rows = []
    for module, names in public_modules().items():
        loaded = importlib.import_module(module)
        about = (loaded.__doc__ or "").strip().partition("\n")[0]
        body = [f"# {module}", "", about, ""]
        for name in sorted(names, key=lambda n: (n != "Gibbs", inspect.isclass(named(loaded, n)), n)):
            if described(module, name):
                thing = named(loaded, name)
                home = f"{thing.__module__}.{thing.__qualname__}"
                body += [f"::: {home}", "    options:", f"      heading: {module}.{name}", ""]
        places = [n for n in names if not described(module, n)]
        if places:
            body += ["## Also", "", ", ".join(f"`{module}.{n}`" for n in places), ""]
        yield f"reference/{module}.md", "\n".join(body)
        rows.append(f"| [{module}]({module}.md) | {about} | {len(names)} |")
    table = ["| module | what | names |", "|---|---|---|", *rows]
    yield "reference/index.md", "\n".join(["# Reference", "", "Made of the docstrings.", "", *table, ""])


def notebook_pages() -> Iterator[tuple[str, str]]:
    """Notebooks, run here and now: words, code and what the cells show. They are committed without outputs."""
    import nbclient
    import nbformat

    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        book: Any = nbformat.read(path, as_version=4)
        body = []
        if all(importlib.util.find_spec(name) for name in book.metadata.get("needs", ())):
            with tempfile.TemporaryDirectory() as folder:
                nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": folder}}).execute()
        for cell in book.cells:
            if cell.cell_type == "markdown":
                body.append(cell.source)
                continue
            body.append(f"```python\n{cell.source}\n```")
            body += [shown_output(output) for output in cell.get("outputs", ())]
        body.insert(1, f"`examples/notebooks/{path.name}`, run when this site was built.")
        yield f"notebook/{path.stem}.md", "\n\n".join(body) + "\n"


def shown_output(output: Any) -> str:
    """What a cell shows, as a part of a page: HTML of an object in a frame of its own, else its text."""
    data = output.get("data", {})
    if rich := data.get("text/html"):
        height = 640 if "<iframe" in rich else 260
        frame = html.escape(f"<!doctype html><body style='margin:0;font:14px system-ui'>{rich}")
        return f'<iframe class="output" srcdoc="{frame}" height="{height}" title="output" loading="lazy"></iframe>'
    text = output.get("text") or data.get("text/plain") or ""
    return f'<pre class="output">{html.escape(text.rstrip())}</pre>' if output.output_type != "error" else ""


def title(markdown: str, otherwise: str) -> str:
    found = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    return found.group(1).replace("`", "") if found else otherwise


def on_files(files: Files, config: Any) -> Files:
    for source, place in ROOTED.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in sorted(path for path in DOCS[1].rglob("*") if path.suffix in (".md", ".csv")):
        files.append(File.generated(config, path.relative_to(DOCS[1]).as_posix(), abs_src_path=str(path)))
    for place, content in [*reference_pages(), *notebook_pages(), *study_pages()]:
        files.append(File.generated(config, place, content=content))
    for asset in sorted((HERE / "assets").iterdir()):
        files.append(File.generated(config, f"assets/{asset.name}", abs_src_path=str(asset)))
    files.append(File.generated(config, "assets/figures.css", content=figure_style()))
    gallery = ROOT / "build" / "gallery"
    for page in sorted(gallery.glob("*.html")):
        files.append(File.generated(config, f"gallery/{page.name}", abs_src_path=str(page)))
    config.nav = navigation(files)
    return files


def navigation(files: Files) -> list[Any]:
    pages = {f.src_uri: title(f.content_string, f.src_uri) for f in files.documentation_pages()}
    for uri in pages:  # a question is a heading, but too long for a menu
        if uri.startswith("study/") and not uri.endswith("/index.md"):
            pages[uri] = Path(uri).stem.replace("_", " ")
    pages.pop("index.md")
    named = {p for starts in SECTIONS.values() for p in starts}
    nav: list[Any] = [{"partita": "index.md"}]
    for section, starts in SECTIONS.items():
        chosen: list[str] = []
        for start in starts:
            more = [p for p in pages if p == start or (start[-1] == "/" and p.startswith(start) and p not in named)]
            chosen += sorted(more, key=lambda p: (not p.endswith("/index.md"), p.removesuffix(".md")))
        if chosen:
            nav.append({section: [{pages[p]: p} for p in chosen]})
    return nav


# ---- links and equations ---------------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they are in the repository, made to lead to the same place on the site."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri == "reference/sections.md":
        page.meta["hide"] = ["navigation", "toc"]  # a table of eight columns
    for folder, boost in BOOSTS.items():
        if page.file.src_uri.startswith(folder):
            page.meta["search"] = {"boost": boost}
    back = {place: source for source, place in ROOTED.items()}
    uri = page.file.src_uri
    lies = ROOT / back[uri] if uri in back else next((d / uri for d in DOCS if (d / uri).is_file()), DOCS[0] / uri)

    def follow(found: re.Match[str]) -> str:
        text, link = found.groups()
        file, sharp, fragment = link.partition("#")
        if not file or "://" in link or link.startswith("mailto:"):
            return found.group(0)
        goal = Path(os.path.normpath(lies.parent / file))
        if inside := [folder for folder in DOCS if goal.is_relative_to(folder)]:
            place = goal.relative_to(inside[0]).as_posix()
        elif goal.is_relative_to(ROOT) and goal.relative_to(ROOT).as_posix() in ROOTED:
            place = ROOTED[goal.relative_to(ROOT).as_posix()]
        else:  # a source file: it is in the repository, not on the site
            return text[1:-1]
        return f"{text}({os.path.relpath(place, os.path.dirname(uri) or '.')}{sharp}{fragment})"

    markdown = LINK.sub(follow, markdown)
    return markdown + abbreviations() if uri.startswith(("tutorial/0", "howto/", "guide/")) else markdown


def abbreviations() -> str:
    """Words of the glossary, explained under the pointer where a page uses them."""
    table = (ROOT / "docs" / "tutorial" / "glossary.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines() if line.startswith("| ")]
    return "\n\n" + "\n".join(f"*[{word}]: {meaning}" for word, meaning in rows[1:] if word not in COMMON)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    def shown(found: re.Match[str]) -> str:
        text = html.unescape(found.group(1))
        return typeset(text) if is_equation(text) else found.group(0)

    def inlined(found: re.Match[str]) -> str:
        """Figures in colours that a page may set become part of it, so that they follow its scheme."""
        drawn = (ROOT / "docs" / "figures" / found.group(1)).read_text(encoding="utf-8")
        if 'class="partita-figure"' not in drawn:  # of matplotlib: an image
            return found.group(0)
        return f'<div class="figure">{re.sub("<style>.*?</style>", "", drawn, count=1, flags=re.DOTALL)}</div>'

    return FIGURE.sub(inlined, PLAIN.sub(shown, content))


def figure_style() -> str:
    """The rules of the figures once for all of them, and their colours for both schemes of the theme."""
    light = {**INK, **{f"c{k}": c for k, c in enumerate(COLOURS)}}
    dark = {**DARK, **{f"c{k}": c for k, c in enumerate(DARK_COLOURS)}}
    rules = [stylesheet()]
    for scheme, colours in (("default", light), ("slate", dark)):
        # more classes than the rule that asks the system
        select = f"body[data-md-color-scheme={scheme}] .md-content .partita-figure.partita-figure"
        rules.append(f"{select}{{{';'.join(f'--pf-{name}:{value}' for name, value in colours.items())}}}")
    return "\n".join(rules)


# The search (lunr) writes the nodes of its tree of words as letters and numbers without a sign between them: an edge
# "1" to node 23 reads as an edge "1" to node 2 and one "3". Words with digits, of which a log is full, then share what
# they should not, and a search for the first letters of such a word stops with an error.
NODE = re.compile(r"(TokenSet\.prototype\.toString=function\(\)\{[^}]*?(\w)=\2\+\w\+\w\.id)\}")


def on_post_build(config: Any) -> None:
    """Put a comma after each number."""
    (worker,) = Path(config["site_dir"], "assets/javascripts/workers").glob("search.*.js")
    text, found = NODE.subn(r'\1+","}', worker.read_text())
    if found != 1:
        raise PluginError(f"{worker.name} writes the nodes of its tree in another way now; look whether that is needed")
    worker.write_text(text)
