"""The page at the prefix: what is being served, for programs and for people."""

from __future__ import annotations

import json
from html import escape
from typing import Any, Final

from aiockpt.format.manifest import Manifest
from aiockpt.http.protocol import LATEST, ResourceKind
from aiockpt.http.replies import describe, no_news_headers

__all__ = ["landing_reply"]

_HTML: Final = "text/html"
# Nothing may run, be loaded, be framed or be sent, whatever gets into the page.
_POLICY: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE: Final = """\
<!DOCTYPE html>
<html lang="en">
<title>aiockpt</title>
<h1>aiockpt</h1>
{body}
"""


def landing_reply(
    manifest: Manifest | None, accept: str
) -> tuple[dict[str, str], bytes]:
    """Return headers and body: a page for a browser, JSON for everybody else.

    Paths are relative to the address of the page, which ends with a slash: a proxy may
    show it under another name. No token is in it.
    """
    headers = no_news_headers(None if manifest is None else manifest.step)
    headers["Vary"] = "Accept"
    serving = None if manifest is None else describe(manifest)
    paths = {} if manifest is None else _paths(manifest.step)
    if _HTML not in accept.lower():
        headers["Content-Type"] = "application/json"
        return headers, json.dumps({"serving": serving, "paths": paths}).encode()
    headers["Content-Type"] = f"{_HTML}; charset=utf-8"
    headers["Content-Security-Policy"] = _POLICY
    headers["Referrer-Policy"] = "no-referrer"
    body = "<p>Nothing is served now." if serving is None else _table(serving, paths)
    return headers, _PAGE.format(body=body).encode()


def _paths(step: int) -> dict[str, str]:
    full, metadata = ResourceKind.FULL.value, ResourceKind.METADATA.value
    return {
        LATEST: LATEST,
        full: f"{step}/{full}",
        metadata: f"{step}/{metadata}",
        "newest": f"{LATEST}/{full}",
    }


def _table(serving: dict[str, Any], paths: dict[str, str]) -> str:
    facts = [f"<dt>{escape(name)}<dd>{escape(str(serving[name]))}" for name in serving]
    links = [
        f'<li><a href="{escape(path)}">{escape(path)}</a>' for path in paths.values()
    ]
    return "\n".join(["<dl>", *facts, "</dl>", "<ul>", *links, "</ul>"])
