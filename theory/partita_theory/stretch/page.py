"""The result as one HTML file: what to do, loss against length, every number, the heads. No script, no request."""

from __future__ import annotations

import base64
import html
import math
from typing import Any

from partita.monitor.report.html import asset, static_page
from partita_theory.figure import Figure, Line, Panel, svg

__all__ = ["figures", "render"]

_FIELDS = (
    ("entropy", "entropy (nats)"),
    ("spread", "standard deviation of scores"),
    ("critical", "critical scale / present scale"),
)
_EMPTY = "<div class='empty'>No head was seen: the model's attention does not pass where it can be watched.</div>"
_SHOWN = 3  # settings in colour beside the model's own reading
_STYLE = """
.answer { font-size: 18px; line-height: 27px; max-width: 78ch; }
pre { background: var(--wash); border-radius: 6px; padding: 10px 14px; overflow-x: auto; font: 14px/21px var(--mono); }
.scroll { overflow-x: auto; }
img { max-width: 100%; border-radius: 6px; background: #ffffff; }
table { border-collapse: collapse; font-size: 13px; line-height: 19px; }
th, td { text-align: right; padding: 4px 10px; border-top: 1px solid var(--hair); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr.best td { font-weight: 600; }
"""


def render(found: dict[str, Any]) -> str:
    """The whole page."""
    loss, heads = figures(found)
    title = f"{found['model']}: reading {found['lengths'][-1]} tokens"
    code = f"<pre>{html.escape('import partita' + chr(10) + found['code'])}</pre>" if found["code"] else ""
    body = f"""
<div class="top"><span>partita stretch</span></div>
<h1>{html.escape(title)}</h1>
<p class="answer">{html.escape(found["says"])}</p>
{code}
<p class="soft small">{html.escape(_method(found))}</p>
<section><h2>Loss against length</h2>{_image(loss)}</section>
<section><h2>Every setting</h2><p class="soft small">Nats per token, with 95 % intervals over windows; in brackets how
much lower than unmodified at the same length, window by window.</p><div class="scroll">{_table(found)}</div></section>
<section><h2>What the heads do as the text grows</h2>{_image(heads) if heads else _EMPTY}</section>
"""
    style = asset("partita.monitor.report", "base.css") + _DARK + _STYLE
    return static_page(title=title, style=style, body=body)


# base.css knows the dark colours by an attribute that a script sets; here the reader's preference alone decides
_DARK = """
@media (prefers-color-scheme: dark) { :root { color-scheme: dark; --ink: #e6e8eb; --paper: #14171a; --accent: #7aa7e6;
  --hair: rgba(230, 232, 235, 0.14); --soft: rgba(230, 232, 235, 0.64); --wash: rgba(230, 232, 235, 0.05); } }
"""


def _method(found: dict[str, Any]) -> str:
    where = "end of passages" if found["kind"] == "causal" else "middle of passages, hidden"
    return (
        f"Trained at {found['trained']} tokens. {found['targets']} tokens at the {where} from {found['trained']} to "
        f"{found['lengths'][-1]} tokens, the same ones at every length and for every setting, in {found['windows']} "
        f"windows: half of them chose the setting, the other half are shown."
    )


def figures(found: dict[str, Any]) -> tuple[Figure, Figure | None]:
    """Loss against length and gain on the unmodified model; entropy, spread and critical scale of the heads."""
    own, *others = found["settings"]
    order = sorted(others, key=lambda s: (s["name"] != found["best"], _number(s["at"][-1]["loss"]["mean"])))
    coloured = order[:_SHOWN]
    lines = [_line(s, "loss", "") for s in order[_SHOWN:]]
    lines += [_line(s, "loss", s["name"]) for s in (own, *coloured)]
    short, ends = own["at"][0]["loss"]["mean"], [float(n) for n in (found["lengths"][0], found["lengths"][-1])]
    lines.append(Line(f"last {found['trained']} tokens alone", ends, [short, short], kind="theory"))
    gains = [_line(s, "gain", s["name"], band=True) for s in coloured]
    gains.append(Line("unmodified", ends, [0.0, 0.0], kind="theory"))
    panels = [
        Panel("Mean over the judging windows", "tokens read", "nats per token", lines, log_x=True),
        Panel("Gained on the unmodified model", "tokens read", "nats, window by window", gains, log_x=True),
    ]
    note = (
        f"{found['targets']} tokens, {found['windows'] // 2} windows judge; trained at {found['trained']}; 95 % bands"
    )
    return Figure("Which reading carries further?", panels, note), _heads(found["heads"])


def _line(setting: dict[str, Any], field: str, label: str, *, band: bool = False) -> Line:
    """Lengths at which the number is one; a setting without a label is context."""
    at = [row for row in setting["at"] if row[field]["mean"] is not None]
    mean = [row[field]["mean"] for row in at]
    half = [_number(row[field]["half"], 0.0) for row in at]
    low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] if band else None for sign in (-1, 1))
    return Line(label, [float(row["length"]) for row in at], mean, low, high, "data" if label else "context")


def _number(x: float | None, other: float = math.inf) -> float:
    return other if x is None else x


def _heads(rows: list[dict[str, Any]]) -> Figure | None:
    if not rows:
        return None
    lengths = sorted({row["length"] for row in rows})
    named = sorted({(row["layer"], row["head"]) for row in rows})
    panels = []
    for field, label in _FIELDS:
        table = {(r["layer"], r["head"], r["length"]): _number(r[field], math.nan) for r in rows}
        each = {head: [table.get((*head, n), math.nan) for n in lengths] for head in named}
        x = [float(n) for n in lengths]
        lines = [Line("", x, y, kind="context") for y in each.values()]
        layers = sorted({layer for layer, _ in named})
        for layer in {layers[0], layers[len(layers) // 2], layers[-1]}:
            own = [y for (one, _), y in each.items() if one == layer]
            mean = [sum(v) / len(v) for v in zip(*own, strict=True)]
            lines.append(Line(f"layer {layer}", x, mean))
        if field == "entropy":
            lines.append(Line("log n", x, [math.log(n) for n in lengths], kind="theory"))
        if field == "critical":
            lines.append(Line("critical", x, [1.0 for _ in x], kind="theory"))
        panels.append(Panel(f"mean over rows, {len(named)} heads in grey", "tokens read", label, lines, log_x=True))
    return Figure("Does attention widen?", panels, "unmodified, as the text grows")


def _table(found: dict[str, Any]) -> str:
    head = "".join(f"<th>{n}</th>" for n in found["lengths"])
    rows = []
    for setting in found["settings"]:
        cells = "".join(f"<td class='num'>{_cell(row, setting is found['settings'][0])}</td>" for row in setting["at"])
        mark = " class='best'" if setting["name"] == found["recommended"] else ""
        rows.append(f"<tr{mark}><td>{html.escape(setting['name'])}</td>{cells}</tr>")
    return f"<table><tr><th>reading</th>{head}</tr>{''.join(rows)}</table>"


def _cell(row: dict[str, Any], own: bool) -> str:
    loss, gain = row["loss"], row["gain"]
    if loss["mean"] is None:
        return "not finite"
    text = f"{loss['mean']:.3f} &plusmn; {_number(loss['half'], 0.0):.3f}"
    if own or gain["mean"] is None:
        return text
    return f"{text} [{gain['mean']:+.3f} &plusmn; {_number(gain['half'], 0.0):.3f}]"


def _image(figure: Figure) -> str:
    """A figure as an image, in which a browser runs nothing and for which it loads nothing."""
    data = base64.b64encode(svg(figure).encode()).decode()
    about = html.escape(figure.title)
    return f"<figure><div class='body'><img alt='{about}' src='data:image/svg+xml;base64,{data}'></div></figure>"
