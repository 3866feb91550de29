"""Rows -> one self-contained HTML file that opens offline."""

from __future__ import annotations

import html as _html
from dataclasses import asdict
from pathlib import Path
from typing import Any

from partita.monitor.files import replace_file
from partita.monitor.findings import Finding, Series, Thresholds, find, verdicts
from partita.monitor.record import Record, clean
from partita.monitor.report import pack, studies
from partita.monitor.report.html import asset, page
from partita.monitor.report.verdict import fallback, sentence

__all__ = ["notebook", "render", "write"]

SCRIPTS = (
    *("base.js", "chart.js", "data.js", "atlas.js", "head.js", "views.js", "advice.js"),
    *("studies.js", "method.js", "main.js"),
)
# what a head is judged by, and what its own section shows: one number for one name
NUMBERS = ("normalized_entropy", "normalized_entropy_p50", "effective_width", "max_score", "sink_first", "sink_top")
NAME_LENGTH = 300  # a module name of 10,000 characters is cut in the page; the record keeps it


def render(
    record: Record,
    *,
    other: Record | None = None,
    title: str | None = None,
    thresholds: Thresholds | None = None,
    links: dict[str, str] | None = None,
) -> str:
    """The page as text; `links` are names and relative addresses of neighbouring pages."""
    limits = thresholds or Thresholds()
    run, findings = _run(record, title, limits)
    run["links"] = list((links or {}).items())
    data = {"run": run, "other": _run(other, None, limits)[0] if other else None}
    return page(
        title=f"{run['title']} · partita",
        style=asset(__name__, "base.css", "report.css"),
        script=asset(__name__, *SCRIPTS),
        data=data,
        fallback=fallback(record, findings, run["sentence"]),
    )


def _run(record: Record, title: str | None, limits: Thresholds) -> tuple[dict[str, Any], list[Finding]]:
    findings = find(record, limits)
    (phase, record), *others = record.by_phase()  # curves and numbers are of one phase
    run = pack.pack(record)
    look = verdicts(findings)
    series = Series(record)
    for site in run["sites"]:
        site["name"] = _short(site["name"])
    coverage = dict(clean(record.coverage))
    coverage["missed"] = [{**m, "name": _short(m["name"])} for m in (coverage.get("missed") or [])[:200]]
    first = next((f.heads[0] for f in findings if f.heads), None)
    run.update(
        title=_short(title or str(record.provenance.get("title") or record.provenance.get("model") or "a run")),
        sentence=sentence(record, findings),
        findings=[
            clean({**f.as_dict(), "where": _short(f.where), "heads": [list(h) for h in f.heads[:64]]})
            for f in findings[:300]
        ],
        verdicts={
            f"{layer},{head}": {"severity": found[0].severity, "codes": [f.code for f in found]}
            for (layer, head), found in look.items()
        },
        numbers={f"{w[0]},{w[1]}": clean([series.late(w, name) for name in NUMBERS]) for w in series.heads},
        window=series.window + (f", {phase} alone: frame() has {', '.join(p for p, _ in others)}" if others else ""),
        frozen=record.frozen,
        unit=record.unit,
        focus=f"L{first[0]}H{first[1]}" if first else "L0H0",
        thresholds=asdict(limits),
        provenance=_shorten(clean(record.provenance)),
        options=clean(record.provenance.get("options") or {}),
        coverage=coverage,
        overhead=clean(record.overhead),
        experiments=studies.packed(clean(record.studies)),
    )
    return run, findings


def _short(given: Any) -> str:
    text = str(given)
    return text if len(text) <= NAME_LENGTH else text[: NAME_LENGTH // 2] + "…" + text[-NAME_LENGTH // 2 :]


def _shorten(value: Any) -> Any:
    if isinstance(value, dict):
        return {_short(k): _shorten(v) for k, v in value.items()}
    return _short(value) if isinstance(value, str) else value


def write(record: Record, path: str | Path, **options: Any) -> Path:
    """Write the page; the folder is made."""
    return replace_file(path, render(record, **options))


def notebook(record: Record, height: int = 640) -> str:
    """The page in a sandboxed frame: scripts run, nothing of the notebook can be reached."""
    text = _html.escape(render(record), quote=True)
    look = f'width="100%" height="{height}" frameborder="0"'
    return f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{text}" {look}></iframe>'
