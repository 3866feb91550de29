"""The pictures of the pages, drawn with the numbers of the library.

    python tools/site/pictures.py            writes docs/figures/picture_*.svg

Nothing in them is drawn from imagination: walks are the tiles of a support, states are merged by `partita.merge`,
policies are called. Numbers are rounded, so that every machine writes the same files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import torch

import partita
from partita import scale, support
from partita_theory.figure import Figure, Line, Panel, svg

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"

INK = {"ink": "#1b1e23", "paper": "#ffffff", "soft": "#63666b", "context": "#b4b8bd", "c0": "#3b6fb6", "c1": "#b26a00"}
DARK = {"ink": "#e6e8eb", "paper": "#14171a", "soft": "#9ea2a7", "context": "#565b61", "c0": "#7aa7e6", "c1": "#e0a040"}
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


class Drawing:
    """Squares, bars and words in the colours of every figure."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []
        self.say(title, 0, 24, "title")

    def say(self, text: str, x: float, y: float, kind: str = "axis", anchor: str = "start") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def square(self, x: float, y: float, w: float, h: float, kind: str, about: str = "") -> None:
        inside = f"<title>{escape(about)}</title>" if about else ""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}">{inside}</rect>')

    def path(self, steps: str, kind: str) -> None:
        self.parts.append(f'<path class="{kind}" d="{steps}"/>')

    def matrix(self, rows: Sequence[Sequence[bool]], x: float, y: float, size: float) -> None:
        for i, row in enumerate(rows):
            for j, seen in enumerate(row):
                kind = "dot c0" if seen else "band context"
                self.square(x + j * size, y + i * size, size - 1.5, size - 1.5, kind)

    def text(self) -> str:
        label = f'role="img" aria-label="{escape(self.title)}"'
        view = f'viewBox="-8 0 {self.width + 16} {self.height}" width="{self.width + 16}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="partita-figure" {label} {view}>'
        return "\n".join([head, f"<style>{stylesheet()}</style>", *self.parts, "</svg>"]) + "\n"


def walk() -> str:
    """A causal support in tiles of 4 x 4: empty tiles are skipped, full ones need no mask."""
    n, tile, size = 20, 4, 15
    keep = support.causal().dense(n, n)
    out = Drawing("How does the engine walk?", 820, 420)
    out.matrix(keep.tolist(), 0, 56, size)
    out.say("keys →", 0, 48)
    for i in range(0, n, tile):
        order = 0
        for j in range(0, n, tile):
            part = keep[i : i + tile, j : j + tile]
            x, y, side = j * size - 1, 56 + i * size - 1, tile * size
            out.path(f"M{x} {y}h{side}v{side}h{-side}Z", "edge")
            if part.any():
                order += 1
                out.say(str(order), x + side / 2, y + side / 2 + 5, "panel", "middle")
    lines = (
        "Queries go down, keys go right. One tile of scores",
        "exists at a time; its numbers join the row's state.",
        "",
        "Tiles without a visible key are never computed.",
        "Tiles that are seen whole need no mask.",
        "Only those on the edge ask for one.",
        "",
        "What stays of a row, whatever its length:",
        "peak, mass, first, spread, moment, count.",
        "",
        "Backward walks once more and computes the",
        "scores again instead of having kept them.",
    )
    for k, line in enumerate(lines):
        out.say(line, 340, 76 + 24 * k, "note")
    skipped = sum(not keep[i : i + tile, j : j + tile].any() for i in range(0, n, tile) for j in range(0, n, tile))
    out.say(f"{skipped} of {(n // tile) ** 2} tiles skipped", 0, 56 + n * size + 26)
    return out.text()


def merging() -> str:
    """Two states over different keys, and the one `partita.merge` makes of them."""
    scores = torch.tensor([[1.0, 2.5, 0.5, 1.5], [3.0, 0.0, 2.0, 1.0]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    a, b = (partita.Gibbs(one, row[:, None]).state() for row in scores)
    both = partita.merge(a, b)
    out = Drawing("What is a state, and how do two become one?", 820, 350)
    for k, (name, state, row) in enumerate(
        (("keys 0 to 3", a, scores[0]), ("keys 4 to 7", b, scores[1]), ("merged: all eight", both, scores.flatten()))
    ):
        x, base = 280 * k, 190
        out.say(name, x, 60, "panel")
        out.path(f"M{x} {base}h{24 * len(row)}", "edge")
        peak = float(state.peak)
        for j, s in enumerate(row.tolist()):
            high = 110 * torch.tensor(s - peak).exp().item()
            about = f"exp({s:g} - {peak:g})"
            kind = "dot c1" if k == 1 or j > 3 else "dot c0"
            out.square(x + 24 * j, round(base - high, 2), 20, round(high, 2), kind, about)
        values = {"peak": state.peak, "mass": state.mass, "first": state.first, "count": state.count}
        for row_, (word, value) in enumerate(values.items()):
            out.say(f"{word} = {round(float(value), 3):g}", x, base + 26 + 20 * row_, "note")
        stats = state.stats()
        out.say(f"log Z = {float(stats.log_partition):.3f}", x, base + 112, "note")
        out.say(f"H = {float(stats.entropy):.3f}", x, base + 132, "note")
    out.say("+", 245, 140, "title", "middle")
    out.say("=", 525, 140, "title", "middle")
    return out.text()


SUPPORTS: dict[str, Callable[[], support.Support]] = {
    "all()": support.all,
    "causal()": support.causal,
    "window(2, 1)": lambda: support.window(2, 1),
    "lengths(7)": lambda: support.lengths(7),
    "segments(ids)": lambda: support.segments(*[torch.tensor([0] * 3 + [1] * 4 + [2] * 3)] * 2),
    "not_self()": support.not_self,
    "causal() & window(3, 0)": lambda: support.causal() & support.window(3, 0),
    "… | lengths(1), a sink": lambda: support.causal() & (support.window(3, 0) | support.lengths(1)),
    "strided(3)": lambda: support.strided(3),
    "dilated(2, 4, 4)": lambda: support.dilated(2, 4, 4),
    "blocks(2, layout)": lambda: support.blocks(2, torch.eye(5, dtype=torch.bool) | (torch.arange(5) == 0)),
    "global_tokens([0, 5])": lambda: support.global_tokens([0, 5]),
}


def supports() -> str:
    """Every support of ten keys."""
    rows = -(-len(SUPPORTS) // 4)
    out = Drawing("Which keys does a query see?", 820, 50 + 190 * rows)
    for k, (name, made) in enumerate(SUPPORTS.items()):
        x, y = 208 * (k % 4), 56 + 190 * (k // 4)
        out.say(name, x, y, "panel")
        out.matrix(made().dense(10, 10).tolist(), x, y + 12, 14)
    return out.text()


def policies() -> str:
    """How each policy bends with the number of visible keys, against 1 / sqrt(dim); and what it does to the width."""
    dim = 64
    lengths = [2**k for k in range(4, 17)]
    shown = {
        "InverseSqrt()": scale.InverseSqrt(),
        "LogLength(512)": scale.LogLength(512),
        "SqrtLogLength(512)": scale.SqrtLogLength(512),
        "CalibratedLog(512, 8)": scale.CalibratedLog(512, 8.0),
        "GaussianEntropy(5, 8)": scale.GaussianEntropy(5.0, 8.0),
    }
    bends, widths = [], []
    for name, policy in shown.items():
        times = [round(float(policy(n, dim)), 6) for n in lengths]
        bends.append(Line(name, lengths, [round(t * dim**0.5, 3) for t in times]))
        # scores of unit-variance vectors: sigma = sqrt(dim), so H = log n - (scale sigma)^2 / 2 while it is positive
        level = [
            max(0.0, float(torch.tensor(n).log()) - (t * dim**0.5) ** 2 / 2)
            for n, t in zip(lengths, times, strict=True)
        ]
        widths.append(Line(name, lengths, [round(float(torch.tensor(h).exp()), 2) for h in level]))
    what = "n, keys a row sees"
    return svg(
        Figure(
            "How does each policy bend with n?",
            [
                Panel("how sharp", what, "scale * sqrt(dim)", bends, log_x=True),
                Panel("how many keys are looked at", what, "exp(log n - (scale * sigma)^2 / 2)", widths, True, True),
            ],
            note="dim 64; the right panel is the law of Gaussian scores with sigma = sqrt(dim), not a measurement",
        )
    )


def faces() -> str:
    """One row of scores, read three times."""
    torch.manual_seed(0)
    s = torch.tensor([0.4, 1.6, 0.2, 2.4, 1.0, 0.7], dtype=torch.float64)
    p = partita.Gibbs(torch.ones(1, 1, dtype=torch.float64), s[:, None])
    probs = p.probs()[0].tolist()
    out = Drawing("One distribution, three faces", 820, 330)
    target = 1
    nll = float(p.nll(torch.tensor([target])))
    value = torch.tensor([[0.2], [0.9], [0.4], [0.6], [0.1], [0.8]], dtype=torch.float64)
    mean = float(p.expectation(value))
    said = (
        ("classification", "hidden state", "classes", f"-log p(target) = {nll:.3f}"),
        ("contrast", "anchor", "candidates", f"-log p(positive) = {nll:.3f}"),
        ("attention", "query", "keys", f"E[value] = {mean:.3f}"),
    )
    for k, (face, query, key, read) in enumerate(said):
        x, base = 280 * k, 215
        out.say(face, x, 60, "panel")
        out.say(f"one {query} against six {key}", x, 80)
        out.path(f"M{x} {base}h186", "edge")
        for j, weight in enumerate(probs):
            high = round(220 * weight, 2)
            marked = k < 2 and j == target
            kind = "dot c1" if marked else "dot c0"
            out.square(x + 31 * j, round(base - high, 2), 26, high, kind, f"p({j}) = {weight:.3f}")
            if k == 2:
                out.say(f"{float(value[j]):g}", x + 31 * j + 13, base + 18, "tick", "middle")
            elif marked:
                out.say("target" if k == 0 else "positive", x + 31 * j + 13, base + 18, "tick", "middle")
        out.say(read, x, base + 48, "note")
    width = float(p.effective_width())
    out.say(
        f"and for all three, from the same pass: H = {float(p.entropy()):.3f} nats, {width:.2f} keys wide",
        0,
        308,
        "note",
    )
    return out.text()


def stylesheet() -> str:
    """The rules of every drawing. Colours are variables that a page may set (--ink, --paper, --soft)."""
    page = {name: f"var(--{name}, {{}})" for name in ("ink", "paper", "soft")}

    def setting(of: dict[str, str]) -> str:
        return ";".join(f"--pf-{name}:{page.get(name, '{}').format(c)}" for name, c in of.items())

    me = ".partita-figure"
    rules = [
        f"{me}{{{setting(INK)}}}",
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]) {me},{me}:root{{{setting(DARK)}}}}}",
        f":root[data-theme=dark] {me}{{{setting(DARK)}}}",
    ]
    kinds = {
        "": f"font-family:{FONT};background:var(--pf-paper);max-width:100%;height:auto",
        " text": f"font-family:{FONT};font-size:12px;fill:var(--pf-ink)",
        " .title": "font-size:20px;font-weight:620",
        " .panel": "font-size:15px;font-weight:620",
        " .note": "font-size:13px;fill:var(--pf-soft)",
        " .axis": "fill:var(--pf-soft)",
        " .tick": "font-size:11px;fill:var(--pf-soft);font-variant-numeric:tabular-nums",
        " .edge": "fill:none;stroke:var(--pf-soft);stroke-width:1",
        " .band": "fill:var(--pf-context);fill-opacity:0.16",
        " .dot": "stroke:var(--pf-paper);stroke-width:0.8",
        " .c0": "fill:var(--pf-c0)",
        " .c1": "fill:var(--pf-c1)",
    }
    return "".join([*rules, *(f"{me}{selector}{{{rule}}}" for selector, rule in kinds.items())])


PICTURES = {
    "engine_walk": walk,
    "state_merge": merging,
    "supports": supports,
    "policies": policies,
    "three_faces": faces,
}


def main() -> None:
    for name, draw in PICTURES.items():
        path = FOLDER / f"picture_{name}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(path.name, path.stat().st_size, file=sys.stderr)


if __name__ == "__main__":
    main()
