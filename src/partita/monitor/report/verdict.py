"""The one-sentence verdict of a run, and the page without scripts."""

from __future__ import annotations

import html
from collections import Counter
from typing import Any

from partita.monitor.findings import HABITS, Finding, verdicts
from partita.monitor.record import Record
from partita.monitor.report.studies import KIND

WORDS = {
    "HEAD_COLLAPSED": "collapsed",
    "HEAD_UNIFORM": "select nothing",
    "LOGIT_GROWTH": "have runaway scores",
    "ENTROPY_DROP": "lost entropy suddenly",
    "DUPLICATE_HEADS": "duplicate another",
    "NONFINITE": "produced NaN or infinity",
}
ONE = {
    "HEAD_UNIFORM": "selects nothing",
    "LOGIT_GROWTH": "has runaway scores",
    "DUPLICATE_HEADS": "duplicates another",
}


def sentence(record: Record, findings: list[Finding]) -> str:
    heads = len({(b.layer, h) for b in record.blocks for h in range(b.heads)})
    there = sum(s.heads for s in record.sites)
    if not heads:
        but = ", but the losses were" if record.losses else ""
        if there:
            return f"None of {there} heads was recorded{but}: nothing can be said about them."
        return f"No attention was seen{but}."
    part = f" of {there}" if there > heads else ""
    watched = f"{heads}{part} head{'s' if max(heads, there) != 1 else ''} watched"
    faults = [f for f in findings if f.severity != "info"]
    look = verdicts(findings)
    parts = []
    for code, words in WORDS.items():
        found = [where for f in faults if f.code == code for where in f.heads]
        if found:
            layers, count = Counter(layer for layer, _ in found), len(set(found))
            wording = ONE.get(code, words) if count == 1 else words
            most = layers.most_common(1)[0][0]
            parts.append(f"{count} {wording}{' in' if len(layers) == 1 else ', most in'} layer {most}")
    dilution = next((f for f in faults if f.code == "LENGTH_DILUTION"), None)
    if dilution:
        parts.append("attention dilutes with length: " + dilution.evidence.split(" (")[0])
    other = [f for f in faults if f.code not in WORDS and f.code not in (*HABITS, "COVERAGE")]
    if other:
        parts.append(f"{len(other)} finding{'s' if len(other) > 1 else ''} on the output side")
    if any(f.code == "SINK_HEAD" for f in faults):
        parts.append("most heads park their mass on one key")
    if not parts:
        missed = len(record.coverage.get("missed") or [])
        unseen = f"; {missed} attention module{'s were' if missed > 1 else ' was'} not seen" if missed else ""
        return f"{watched}, none needs a look{unseen}."
    start = f"{watched}, {len(look)} need{'s' if len(look) == 1 else ''} a look: " if look else f"{watched}: "
    return start + "; ".join(parts[:3]) + "."


def fallback(record: Record, findings: list[Finding], text: str) -> str:
    """Escaped markup for readers without scripts: the sentence, the findings, a mean per layer at the last step."""
    rows = "".join(f"<li>{_safe(f)}</li>" for f in findings[:20])
    last = max((b.step for b in record.blocks), default=None)
    cells = ""
    for b in record.blocks:
        if b.step == last:
            mean = b.overall("normalized_entropy")
            shown = "no value" if mean is None else f"{mean:.4f}"
            cells += f"<tr><td>{b.layer}</td><td>{_safe(record.sites[b.layer].name)}</td><td>{shown}</td></tr>"
    head = "<tr><th>layer</th><th>name</th><th>mean H / log(visible)</th></tr>"
    studies = "".join(
        f"<li>{_safe(r.get('question'))} {_safe(r.get('answer'))}: {_safe(r.get('evidence'))}</li>"
        for r in record.studies
        if r.get("study") == KIND
    )
    note = "<p>The figures need scripts; they run offline.</p>"
    return f"<h1>{html.escape(text)}</h1><ul>{rows}</ul><table>{head}{cells}</table><ul>{studies}</ul>{note}"


def _safe(value: Any) -> str:
    """As escaped text of at most 400 characters."""
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return html.escape(text if len(text) <= 400 else text[:399] + "…")
