"""A figure as one SVG: no scripts, no fonts, no links, readable in light and dark, alone or inside a page.

The question is the title; lines are labelled at their ends, in the margin, where labels do not overlap; intervals are
bands; theory is dashed. A theory line or points that share the label of a data line share its colour. What cannot be
shown (nothing finite, nothing positive on a log axis) is counted under the panel; an empty panel says that it is empty.
Ticks and points carry their numbers in `data-` attributes and tooltips.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import ShapeError
from partita.lab.axis import Axis, fit, shown, written
from partita.lab.figure import Figure, Line, Panel

__all__ = ["stylesheet", "svg"]

INK = {"ink": "#1b1e23", "paper": "#ffffff", "soft": "#63666b", "hair": "#dcdddf", "context": "#b4b8bd"}
DARK = {"ink": "#e6e8eb", "paper": "#14171a", "soft": "#9ea2a7", "hair": "#33373c", "context": "#565b61"}
COLOURS = ("#3b6fb6", "#b26a00", "#2e7d4f", "#8a4fa3", "#b8476a")
DARK_COLOURS = ("#7aa7e6", "#e0a040", "#63b98a", "#c294d8", "#ec8ba6")
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
LINE = 15  # height of a line of labels
MARKED = 64  # lines of more points than this carry no dots


def svg(figure: Figure, *, theme: str = "auto") -> str:
    """The figure as SVG text; theme "light" or "dark" fixes the colours for renderers without CSS variables.

    >>> svg(Figure("Why?", [])).startswith("<svg")
    True
    """
    columns = 1 if len(figure.panels) < 2 else 2
    width = 820 if columns == 1 else 1080
    each = (width - 24 * (columns - 1)) / columns
    body, y = [], 8.0
    for kind, size, text in (("title", 20, figure.title), ("note", 13, figure.note)):
        for line in _wrapped(text, width, size, 3):
            y += 1.4 * size
            body.append(_text(line, 0, y, kind))
    y += 14
    for row in range(0, len(figure.panels), columns):
        drawn = [_panel(p, k * (each + 24), y, each) for k, p in enumerate(figure.panels[row : row + columns])]
        body += [text for text, _ in drawn]
        y += max(height for _, height in drawn) + 16
    if not figure.panels:
        y += 20
        body.append(_text("nothing to show: the figure has no panels", 0, y, "note"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="partita-figure" role="img" aria-label="{_safe(figure.title)}" '
        f'viewBox="-8 0 {width + 16} {y + 8:.0f}" width="{width + 16}" height="{y + 8:.0f}">'
    )
    return "\n".join([head, f"<style>{stylesheet(theme)}</style>", *body, "</svg>"]) + "\n"


# ---- one panel -----------------------------------------------------------------------------------------------------


@dataclass
class _Label:
    """The name of a line beside its end."""

    text: str
    colour: str
    x: float  # where the line ends
    wanted: float
    lines: list[str]
    context: bool
    y: float = 0.0

    @property
    def height(self) -> float:
        return LINE * len(self.lines)


def _panel(panel: Panel, left: float, top: float, width: float) -> tuple[str, float]:
    """The panel as SVG text, and its height."""
    for line in panel.lines:
        _check(line, panel.title)
    parts, y = ["<g>"], top
    for kind, size, text in (("panel", 15, panel.title), ("axis", 12, _log_said(panel.y_label, panel.log_y))):
        for piece in _wrapped(text, width, size, 2):
            y += 1.3 * size
            parts.append(_text(piece, left, y, kind))
    seen = [_points(line, panel) for line in panel.lines]
    missing = sum(len(line.x) - len(points) for line, points in zip(panel.lines, seen, strict=True))
    if not any(seen):
        why = (
            "no lines were given" if not panel.lines else "no finite values" if missing else "the lines hold no points"
        )
        if missing and (panel.log_x or panel.log_y):
            why = "no finite positive values (log axis)"
        parts.append(_text(f"nothing to show: {why}", left, y + 40, "note"))
        return "\n".join([*parts, "</g>"]), y + 60 - top
    names = _names(panel.lines)
    margin = min(0.36 * width, 20 + max((_wide(text, 12) for text in names), default=0))
    y += 12
    bottom = y + (300 if width > 600 else 250)
    ys = fit(_heights(panel, seen), panel.log_y, bottom, y, want=6)
    gutter = 12 + max(_wide(written(t), 11) for t in ys.ticks or (0.0,))
    start, stop = left + gutter, left + width - margin
    xs = fit([x for points in seen for x, *_ in points], panel.log_x, start, stop, want=max(3, int(stop - start) // 75))
    parts += _axes(xs, ys)
    labels: dict[str, _Label] = {}
    order = {"context": 0, "data": 1, "theory": 2, "points": 3}
    # one dashed line over the line it predicts is told from it by being grey; of several, each has its line's colour
    alone = len({line.label for line in panel.lines if line.kind == "theory"}) < 2
    for line, points in sorted(zip(panel.lines, seen, strict=True), key=lambda pair: order[pair[0].kind]):
        colour = "soft" if line.kind == "theory" and alone else names[line.label]
        if not points:
            continue
        parts += _marks(line, points, xs, ys, colour)
        end = max(points, key=lambda p: p[0]) if line.kind == "points" else points[-1]
        pieces = _wrapped(line.label, margin - 16, 12, 2)
        if pieces and (line.label not in labels or line.kind == "data"):
            at = (xs.place(end[0]), ys.place(end[1]))
            labels[line.label] = _Label(line.label, colour, *at, pieces, line.kind == "context")
    parts += _labelled(list(labels.values()), stop, y, bottom)
    bottom += 34
    parts.append(_text(_log_said(panel.x_label, panel.log_x), (start + stop) / 2, bottom, "axis", anchor="middle"))
    for remark in _remarks(panel, seen, missing):
        bottom += 16
        parts.append(_text(remark, left, bottom, "axis"))
    return "\n".join([*parts, "</g>"]), bottom - top


def _check(line: Line, title: str) -> None:
    sizes = {len(v) for v in (line.x, line.y, line.low, line.high) if v is not None}
    if len(sizes) != 1 or (line.low is None) != (line.high is None):
        raise ShapeError(
            f"line {line.label!r} of panel {title!r} needs as many y as x, and low and high both or neither; "
            f"got {len(line.x)} x, {len(line.y)} y, {[None if v is None else len(v) for v in (line.low, line.high)]}."
        )


_Point = tuple[float, float, float | None, float | None]  # x, y, low, high


def _points(line: Line, panel: Panel) -> list[_Point]:
    """What of a line can be shown on these axes; an end of an interval that cannot is None."""
    found: list[_Point] = []
    for k, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
        if not (shown(float(x), panel.log_x) and shown(float(y), panel.log_y)):
            continue
        low, high = (None if v is None else float(v[k]) for v in (line.low, line.high))
        if low is None or high is None or not (shown(low, False) and shown(high, panel.log_y)):
            low = high = None
        found.append((float(x), float(y), low, high))
    return found


def _heights(panel: Panel, seen: Sequence[Sequence[_Point]]) -> list[float]:
    """What the y axis spans: every value, and intervals as far as they do not dwarf the values."""
    values = [p[1] for points in seen for p in points]
    if panel.log_y:
        low, high = min(values) / 10, max(values) * 10
    else:
        span = max(values) - min(values) or max(abs(v) for v in values) or 1.0
        low, high = min(values) - span, max(values) + span
    return values + [min(max(end, low), high) for points in seen for p in points for end in p[2:] if end is not None]


def _names(lines: Sequence[Line]) -> dict[str, str]:
    """label -> colour: the first five of data and points have one of their own, the rest is context."""
    strong = dict.fromkeys(line.label for line in lines if line.kind in ("data", "points"))
    found = {label: f"c{k}" if k < len(COLOURS) else "context" for k, label in enumerate(strong)}
    for line in lines:
        found.setdefault(line.label, "context" if line.kind == "context" else "soft")
    return found


def _remarks(panel: Panel, seen: Sequence[Sequence[_Point]], missing: int) -> list[str]:
    empty = [line.label or "a line" for line, points in zip(panel.lines, seen, strict=True) if not points]
    found = [f"nothing to show for {', '.join(empty)}"[:90]] if empty else []
    log = panel.log_x or panel.log_y
    kind = "not finite, or not positive on a log axis" if log else "not finite"
    return found + ([f"{missing} point{'s' * (missing > 1)} left out: {kind}"] if missing else [])


# ---- marks ---------------------------------------------------------------------------------------------------------


def _axes(xs: Axis, ys: Axis) -> list[str]:
    parts = []
    for t in ys.ticks:
        at = ys.place(t)
        parts.append(f'<path class="hair" d="M{xs.start:.2f} {at:.2f}H{xs.stop:.2f}"/>')
        parts.append(_text(written(t), xs.start - 6, at + 4, "tick", anchor="end", data=f' data-y="{t!r}"'))
    parts.append(f'<path class="edge" d="M{xs.start:.2f} {ys.start:.2f}H{xs.stop:.2f}"/>')
    for t in xs.ticks:
        at = xs.place(t)
        parts.append(f'<path class="edge" d="M{at:.2f} {ys.start:.2f}v4"/>')
        parts.append(_text(written(t), at, ys.start + 17, "tick", anchor="middle", data=f' data-x="{t!r}"'))
    return parts


def _marks(line: Line, points: Sequence[_Point], xs: Axis, ys: Axis, colour: str) -> list[str]:
    at = [(xs.place(x), ys.place(y)) for x, y, _, _ in points]
    parts = []
    joined = line.kind != "points" and len(points) > 1
    ends = [
        (px, ys.place(low), ys.place(high))
        for (px, _), (_, _, low, high) in zip(at, points, strict=True)
        if low is not None and high is not None
    ]
    if joined and len(ends) > 1:
        there = "L".join(f"{x:.2f} {high:.2f}" for x, _, high in ends)
        back = "L".join(f"{x:.2f} {low:.2f}" for x, low, _ in reversed(ends))
        parts.append(f'<path class="band {colour}" d="M{there}L{back}Z"/>')
    else:
        parts += [f'<path class="line {colour}" d="M{x:.2f} {low:.2f}V{high:.2f}"/>' for x, low, high in ends]
    if joined:
        path = "L".join(f"{x:.2f} {y:.2f}" for x, y in at)
        parts.append(f'<path class="line {colour}{" dash" if line.kind == "theory" else ""}" d="M{path}"/>')
    if len(points) == 1 or (line.kind in ("data", "points") and len(points) <= (MARKED if joined else 4000)):
        for (px, py), (x, y, low, high) in zip(at, points, strict=True):
            about = f"{line.label}: {written(y)} at {written(x)}"
            if low is not None and high is not None:
                about += f" ({written(low)} to {written(high)})"
            parts.append(
                f'<circle class="dot {colour}" cx="{px:.2f}" cy="{py:.2f}" r="{2.6 if joined else 3}" '
                f'data-x="{x!r}" data-y="{y!r}"><title>{_safe(about)}</title></circle>'
            )
    return parts


def _labelled(labels: list[_Label], right: float, top: float, bottom: float) -> list[str]:
    """Labels in the margin, as near to the ends of their lines as they can be without touching each other."""
    room = bottom - top + LINE
    kept = sorted(labels, key=lambda label: label.context)
    while sum(label.height for label in kept) > room:
        kept.pop()
    kept.sort(key=lambda label: label.wanted)
    edge = top - LINE / 2
    for label in kept:
        label.y = max(label.wanted, edge + label.height / 2)
        edge = label.y + label.height / 2
    edge = bottom + LINE / 2
    for label in reversed(kept):
        label.y = min(label.y, edge - label.height / 2)
        edge = label.y - label.height / 2
    parts = []
    for label in kept:
        if abs(label.y - label.wanted) > 5 or right - label.x > 30:
            path = f"M{label.x + 4:.2f} {label.wanted:.2f}L{right + 8:.2f} {label.y:.2f}"
            parts.append(f'<path class="lead {label.colour}" d="{path}"/>')
        first = label.y - label.height / 2 + 11
        for k, piece in enumerate(label.lines):
            about = f"<title>{_safe(label.text)}</title>" if piece.endswith("…") else ""
            parts.append(_text(piece, right + 12, first + LINE * k, f"name {label.colour}", inside=about))
    return parts


# ---- text and colour -----------------------------------------------------------------------------------------------


def _safe(text: str) -> str:
    """Text that XML takes: escaped, and without the characters that XML forbids."""
    legal = (c if c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff" else " " for c in text)
    return html.escape("".join(legal))


def _text(text: str, x: float, y: float, kind: str, *, anchor: str = "start", data: str = "", inside: str = "") -> str:
    where = f'x="{x:.2f}" y="{y:.2f}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text class="{kind}" {where}{data}>{_safe(text)}{inside}</text>'


def _wide(text: str, size: float) -> float:
    """About how wide text is: fonts are the reader's, so this is generous."""
    size *= 1.12 if size >= 15 else 1.0  # titles are bold
    return size * sum(1.0 if ord(c) > 0x2E80 else 0.34 if c in " .,:;'|ilj!()[]" else 0.62 for c in text)


def _wrapped(text: str, width: float, size: float, most: int) -> list[str]:
    text = " ".join(text.split())
    if not text:
        return []
    if _wide(text, size) <= width:
        return [text]
    per = max(4, int(width / (_wide(text, size) / len(text))))
    lines = textwrap.wrap(text, per) or [text]
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: per - 1] + "…"]
    return lines


def _log_said(label: str, log: bool) -> str:
    return f"{label} (log scale)" if log else label


def stylesheet(theme: str = "auto") -> str:
    """The rules of every figure of a theme; those of "auto" serve a page that allows no style inside its figures.

    Colours are variables that a page may set (--ink, --paper, --soft, --hair), or fixed values.
    """
    every = {**INK, **{f"c{k}": c for k, c in enumerate(COLOURS)}}
    dark = {**DARK, **{f"c{k}": c for k, c in enumerate(DARK_COLOURS)}}
    if theme == "auto":
        use = {name: f"var(--pf-{name})" for name in every}
        page = {name: f"var(--{name}, {{}})" for name in ("ink", "paper", "soft", "hair")}

        def setting(of: dict[str, str]) -> str:
            return ";".join(f"--pf-{name}:{page.get(name, '{}').format(c)}" for name, c in of.items())

        me = ".partita-figure"
        rules = [
            f"{me}{{{setting(every)}}}",
            f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]) {me},{me}:root{{{setting(dark)}}}}}",
            f":root[data-theme=dark] {me}{{{setting(dark)}}}",
        ]
    else:
        use, rules = (dark if theme == "dark" else every), []
    kinds = {
        "": f"font-family:{FONT};background:{use['paper']};max-width:100%;height:auto",
        " text": f"font-family:{FONT};font-size:12px;fill:{use['ink']}",
        " .title": "font-size:20px;font-weight:620",
        " .panel": "font-size:15px;font-weight:620",
        " .note": f"font-size:13px;fill:{use['soft']}",
        " .axis": f"fill:{use['soft']}",
        " .tick": f"font-size:11px;fill:{use['soft']};font-variant-numeric:tabular-nums",
        " path": "fill:none",
        " .hair": f"stroke:{use['hair']};stroke-width:1",
        " .edge": f"stroke:{use['soft']};stroke-width:1",
        " .line": "stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round",
        " .dash": "stroke-dasharray:5 4;stroke-width:1.5",
        " .lead": "stroke-width:0.8;stroke-opacity:0.5",
        " .band": "fill-opacity:0.16",
        " .dot": f"stroke:{use['paper']};stroke-width:0.8",
    }
    for name in ("soft", "context", *(f"c{k}" for k in range(len(COLOURS)))):
        kinds[f" .line.{name},.partita-figure .lead.{name}"] = f"stroke:{use[name]}"
        kinds[f" .dot.{name},.partita-figure .band.{name}"] = f"fill:{use[name]}"
        kinds[f" text.name.{name}"] = f"fill:{use['soft' if name == 'context' else name]}"
    return "".join([*rules, *(f".partita-figure{selector}{{{rule}}}" for selector, rule in kinds.items())])
