"""The site as `make site` built it: no broken link, no network, quiet in a browser, found by its search box."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
pytestmark = pytest.mark.skipif(
    not (SITE / "index.html").exists() and "PARTITA_SITE" not in os.environ, reason="no site: make test-site builds it"
)
LOOKED_AT = (
    "index.html",
    "tutorial/00-getting-started.html",
    "tutorial/00-play.html",
    "howto/train-without-logits.html",
    "notebook/1_one_distribution_three_faces.html",
    "guide/watch.html",
    "tutorial/01-one-distribution.html",
    "howto/entropy-of-heads.html",
    "reference/partita.html",
    "study/entropy_floor.html",
    "guide/gallery.html",
)
# what a person types -> the page that answers
QUESTIONS = {
    "see the entropy of my model's heads": "howto/entropy-of-heads.html",
    "cross entropy does not fit in memory": "howto/train-without-logits.html",
    "bigger contrastive batches": "howto/bigger-contrastive-batches.html",
    "my logits explode": "howto/logits-explode.html",
    "read longer text": "howto/read-longer-text.html",
    "several documents in one row": "howto/several-documents-in-one-row.html",
    "context parallel": "howto/context-parallel.html",
    "watch a compiled model": "howto/watch-a-compiled-model.html",
    "grpo": "howto/log-probabilities-for-rl.html",
    "ppo": "howto/log-probabilities-for-rl.html",
    "rlhf": "howto/log-probabilities-for-rl.html",
    "dpo": "howto/log-probabilities-for-rl.html",
    "logprobs": "howto/log-probabilities-for-rl.html",
    "perplexity without logits": "howto/score-a-text.html",
    "distillation from top-k": "howto/distil-from-top-k.html",
    "install": "tutorial/00-getting-started.html",
    "quickstart": "tutorial/00-getting-started.html",
    "oom": "howto/train-without-logits.html",
    "logits": "howto/train-without-logits.html",
    "temperature": "tutorial/04-scales.html",
    "generate": "howto/score-a-text.html",
    "flash attention": "howto/coming-from-attention.html",
    "distillation": "howto/distil-from-top-k.html",
    "kv cache": "guide/margins.html",
}


class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in SITE.rglob("*.html")}


def is_elsewhere(address: str) -> bool:
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https")


def test_no_link_is_broken(pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        if path.name == "404.html" or path.parent.name == "gallery":
            continue  # the first is served from any address; the others follow their own fragments
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not goal.is_file() or (
                parts.fragment and goal in pages and unquote(parts.fragment) not in pages[goal].places
            ):
                broken.append(f"{path.relative_to(SITE)}: {link}")
    assert not broken


def test_nothing_is_loaded_from_the_network(pages: dict[Path, Page]) -> None:
    assert not [f"{path}: {one}" for path, page in pages.items() for one in page.loads if is_elsewhere(one)]
    for path in SITE.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_every_public_name_is_in_the_reference(pages: dict[Path, Page]) -> None:
    """Functions and classes by their own section, constants by their name on the module's page."""
    listed = [
        line.split()[0]
        for line in (ROOT / "tests" / "exports.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in (SITE / "reference").glob("*.html"))
    last = {name: name.rsplit(".", 1)[-1] for name in listed}
    assert not [name for name, short in last.items() if not re.search(rf"partita(?:\.\w+)*\.{short}\b", text)]


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """opened(page, scheme, width, height): the page in a browser, which may neither complain nor ask for anything."""
    heard: list[str] = []
    page = browser.new_page()
    page.set_default_timeout(20_000)
    page.add_init_script("localStorage.clear()")  # the browser is shared, and a page remembers its colours
    page.on("console", lambda m: heard.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: heard.append(str(e)))
    page.on("request", lambda r: heard.append(r.url) if is_elsewhere(r.url) else None)

    def go(path: str, scheme: str = "light", width: int = 1280, height: int = 900) -> Any:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.goto((SITE / path).as_uri())
        page.wait_for_selector("[data-md-component=content], .md-content")
        return page

    yield go
    page.close()
    assert not heard


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_quiet_and_fit(opened: Any, scheme: str, size: tuple[int, int]) -> None:
    for path in LOOKED_AT:
        page = opened(path, scheme, *size)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} scrolls sideways"
        cut = "[...document.querySelectorAll('pre code')].filter(c => c.scrollWidth > c.clientWidth + 1).length"
        assert page.evaluate(cut) == 0, f"{path}: code is cut"
        paper, ink = page.evaluate(
            "['body', 'h1'].map((e, k) => getComputedStyle(document.querySelector(e))[k ? 'color' : 'backgroundColor'])"
        )
        assert (light(paper) > light(ink)) == (scheme == "light"), path
        for link in page.locator("article a:visible").all()[:20]:
            colour = light(link.evaluate("e => getComputedStyle(e).color"))
            assert abs(colour - light(paper)) > 0.2, f"{path}: a link cannot be read"


def light(colour: str) -> float:
    red, green, blue = (float(x) / 255 for x in re.findall(r"[\d.]+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_box_finds_the_page_that_answers(opened: Any, question: str) -> None:
    """By keyboard alone: a slash opens the search, the question is typed, the first result is the answer."""
    page = opened("index.html")
    page.keyboard.press("/")
    page.keyboard.type(question)
    first = page.locator(".md-search-result__link").first
    first.wait_for(state="attached")
    page.wait_for_function("document.querySelector('.md-search-result__meta').textContent.match(/\\d/)")
    assert QUESTIONS[question] in first.get_attribute("href")


@pytest.mark.parametrize("formula", ["n^x", "p~q", "score:beta^n entropy", '"-entropy" -- +', "a\\b ~^ *"])
def test_the_search_box_takes_formulas_for_words(opened: Any, formula: str) -> None:
    """What the index would read as its own operators, letter by letter: `opened` collects every complaint."""
    page = opened("index.html")
    page.keyboard.press("/")
    page.keyboard.type(formula + " entropy")
    page.wait_for_function("/matching/.test(document.querySelector('.md-search-result__meta').textContent)")
    assert page.locator(".md-search-result__link").count()


def test_the_keyboard_reaches_the_content(opened: Any) -> None:
    page = opened("tutorial/01-one-distribution.html")
    page.keyboard.press("Tab")
    assert "md-skip" in page.evaluate("document.activeElement.className")
    page.keyboard.press("Enter")
    assert "#" in page.url
