"""What names a checkpoint at a peer: a transport's metadata, or the URL of a step."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiockpt.http.protocol import Source, parse_metadata
from aiockpt.runtime.secrets import discreet

__all__ = ["Address", "parse_address"]

_OF_STEP = re.compile(r"(.*/)(0|[1-9][0-9]{0,18})(?:/(?:full|metadata))?/")
_LATEST = re.compile(r"(.*/)latest(?:/(?:full|metadata))?/")
_BARE = re.compile(r"[a-z]+://[^/]+")


@dataclass(frozen=True, slots=True)
class Address:
    """A peer, and the step that the URL names, if any."""

    source: Source
    step: int | None


@discreet
def parse_address(text: str) -> Address:
    """Parse what names a checkpoint: metadata, ``.../100`` or ``.../100/full``.

    Metadata always ends with a slash before its token, so a prefix that ends in
    a number is not taken for a step.

    Raises:
        LocalProtocolError: it is no such URL.
    """
    location, mark, token = text.partition("#")
    if _BARE.fullmatch(location):
        location += "/checkpoint/"  # just host and port: the prefix by default
    source = parse_metadata(f"{location}{mark}{token}")
    if location.endswith("/"):
        return Address(source, None)
    if found := _OF_STEP.fullmatch(source.base_url):
        return Address(Source(found[1], source.token), int(found[2]))
    if found := _LATEST.fullmatch(source.base_url):
        return Address(Source(found[1], source.token), None)
    return Address(source, None)
