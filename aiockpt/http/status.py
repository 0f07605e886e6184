"""The status of a sender: one model, as JSON for programs and as a page for people.

``aiockpt top`` shows the same model. A browser that opens an address sends no token. So
everybody gets the page ``status.html``, which has no data and is the same for all
servers. Its script takes the token from the fragment of the address, polls the same
address as a program does, and shows what comes. Text gets into the page as textContent
only, and the policy makes sure of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from aiockpt.format.manifest import Manifest
from aiockpt.http import protocol as http
from aiockpt.http.responses import describe, no_news_headers

_HTML: Final = "text/html"
_REFUSED: Final = re.compile(r"q=0(\.0*)?")
_PAGE: Final = Path(__file__).with_name("status.html").read_bytes()

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ShownStep(msgspec.Struct):
    """The checkpoint that is served."""

    step: int
    snapshot_id: str
    total_bytes: Count


class ShownMember(msgspec.Struct):
    """A member of the swarm.

    Attributes:
        id: The beginning of what members know it by.
        have: How many chunks it has.
        complaints: How many hosts complained.
    """

    id: str
    url: str
    zone: str
    have: Count
    complaints: Count


class ShownSwarm(msgspec.Struct, omit_defaults=True):
    """The swarm of the served checkpoint.

    Attributes:
        chunks: How many chunks the checkpoint has.
        given: How many of them the source has given at least once to receivers that can
            join.
        members: At most 200 of them.
        more: How many further members there are.
    """

    chunks: Count
    given: Count
    members: list[ShownMember]
    more: Count = 0


class ShownCounters(msgspec.Struct):
    """What the server does, for people and monitors.

    Attributes:
        readers: Bodies that are being sent, and processes that read shared memory.
        waiting: Requests that wait for a step.
        bytes_sent: Bytes since the server started, also of bodies that have not ended.
        requests: Requests since then.
        refused: Requests that were answered with an error.
        swarm: None if nothing is served, or no swarm is offered.
    """

    readers: Count
    waiting: Count
    bytes_sent: Count
    requests: Count
    refused: Count
    swarm: ShownSwarm | None


class ShownStatus(msgspec.Struct, kw_only=True):
    """What is served, the URLs of it relative to the prefix, and how it goes."""

    serving: ShownStep | None
    paths: dict[str, str] = {}
    status: ShownCounters


def wants_page(accept: str) -> bool:
    """Return whether a request with this ``Accept`` is that of a browser."""
    for each in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        if kind == _HTML:
            return not any(_REFUSED.fullmatch(part) for part in parameters)
    return False


def status_reply(
    manifest: Manifest | None, counters: ShownCounters
) -> tuple[dict[str, str], bytes]:
    """Return the headers and the JSON at the prefix.

    Paths are relative to the address, which ends with a slash, since a proxy may show
    it under another name.
    """
    status = ShownStatus(serving=None, status=counters)
    if manifest is not None:
        status.serving = ShownStep(**describe(manifest))
        status.paths = _paths(manifest.step)
    headers = no_news_headers(None if manifest is None else manifest.step)
    headers |= {"Content-Type": "application/json", "Vary": "Accept"}
    return headers, json.dumps(msgspec.to_builtins(status)).encode()


def _paths(step: int) -> dict[str, str]:
    full, metadata = http.ResourceKind.FULL.value, http.ResourceKind.METADATA.value
    return {
        http.LATEST: http.LATEST,
        full: f"{step}/{full}",
        metadata: f"{step}/{metadata}",
        "newest": f"{http.LATEST}/{full}",
    }


def page_reply() -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of the status page."""
    return {**no_news_headers(None), **_PAGE_HEADERS}, _PAGE


def _source(tag: str) -> str:
    """Return the source of the policy that allows what is in one element."""
    text = _PAGE.partition(f"<{tag}>".encode())[2].partition(f"</{tag}>".encode())[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


_PAGE_HEADERS: Final = {
    "Content-Type": f"{_HTML}; charset=utf-8",
    # Nothing may run, be loaded, be framed or be sent but what is in the page.
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_source('style')}; "
        f"script-src {_source('script')}; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
}
