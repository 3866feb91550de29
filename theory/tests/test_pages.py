"""What pages say of partita_theory is there, and the pictures of the pages are what their script draws."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
from programs import program

from partita_theory import errata

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "theory").rglob("*.md")])
NAME = re.compile(r"(?<![\w./-])partita_theory(?:\.[A-Za-z]\w*)+(?![\w/])")


def resolves(name: str) -> bool:
    """A module, or an attribute of the longest part of the name that is one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if importlib.util.find_spec(module) is None if end == 1 else not is_module(module):
            continue
        found: object = importlib.import_module(module)
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def is_module(name: str) -> bool:
    path = ROOT / "theory" / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_theory_are_there(page: Path) -> None:
    if page.name in ("CHANGELOG.md", "log.md", "study-log.md"):  # which speak of names that were
        return
    assert not [name for name in sorted(set(NAME.findall(page.read_text("utf-8")))) if not resolves(name)]


def test_the_pictures_are_what_their_script_draws() -> None:
    """`python tools/site/pictures.py` writes them anew."""
    pictures = program("site/pictures.py")
    pinned = "matplotlib==" + importlib.metadata.version("matplotlib")
    if pinned not in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        pictures.PICTURES.pop("policies")  # another version of matplotlib writes another text
    for picture, draw in pictures.PICTURES.items():
        assert (ROOT / "docs" / "figures" / f"picture_{picture}.svg").read_text("utf-8") == draw(), picture


# What a reader of the notes would act on and be wrong, where the guides come to it: page, erratum, what the page says.
ACTED_ON = {
    "the floor 0.4745 of Gaussian scores": ("guide/scores.md", "noise (35)", "That floor is of bounded scores"),
    "the sign of lambda H": ("guide/nn.md", "noise (76)", "their lambda is `-attention_entropy_weight`"),
    "gradients of the keys": (
        "guide/choosing-a-loss.md",
        "contrast (4.4.15)",
        "a step along the first raises the loss",
    ),
    "exp H as a rank": ("guide/healthy-attention.md", "noise (73)", "it is the width of a row"),
    "more entropy, more information": ("guide/healthy-attention.md", "noise P34", "spreading transmits less"),
    "kappa = 1": ("guide/nn.md", "code K9", "kappa = 1, the printed choice, the scale has hardly any effect"),
}


@pytest.mark.parametrize("mistake", ACTED_ON)
def test_what_a_reader_would_act_on_stands_in_the_guides(mistake: str) -> None:
    page, label, said = ACTED_ON[mistake]
    text = " ".join((ROOT / "docs" / page).read_text("utf-8").split())
    assert said in text and errata.find(label).check().confirmed


def test_the_log_names_its_sources() -> None:
    """KappaLog(sqrt d) is log n / sqrt(d), and numbers of others have a place where they were published."""
    text = (ROOT / "theory" / "docs" / "reference" / "study-log.md").read_text("utf-8")
    assert "| kappa log n / d |" not in text and "KappaLog(sqrt d) = log n / sqrt(d)" in text
    assert "published for a large model" not in text and "number 8823" in text
