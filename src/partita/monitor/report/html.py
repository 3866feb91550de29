"""One HTML file from parts: styles, scripts, data. No request leaves the page, and its policy forbids any.

Only the exact inline script and style are allowed to run (their hashes stand in the policy); data is JSON in a block
that browsers do not execute, with `<` escaped so that no name can close it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import Any

FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def asset(package: str, *names: str) -> str:
    """The text files of a package's `assets` folder, joined."""
    folder = resources.files(package) / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def embed(data: Any) -> str:
    """JSON that is safe inside a script block: no `<`, and no line separators that old parsers stumble over."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates in names
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def page(*, title: str, style: str, script: str, data: Any, fallback: str = "") -> str:
    """The whole file. `fallback` is markup for readers without scripts, and must be escaped already."""
    script = "(() => {\n'use strict';\n" + script + "\n})();"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    body = (
        f'<main id="app"><noscript>{fallback}</noscript></main>\n'
        f'<script type="application/json" id="record">{embed(data)}</script>\n'
        f"<script>{script}</script>"
    )
    return _file(title, policy, style, body)


def static_page(*, title: str, style: str, body: str) -> str:
    """A file without any script; `body` is markup, and must be escaped already."""
    policy = f"default-src 'none'; style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    return _file(title, policy, style, f"<main>{body}</main>")


def _file(title: str, policy: str, style: str, body: str) -> str:
    clean = html.escape(title.encode("utf-8", "replace").decode("utf-8"))
    return FRAME.format(policy=policy, title=clean, style=style, body=body)


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
