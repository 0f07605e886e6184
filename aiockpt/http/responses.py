"""What to answer to a request for a checkpoint: pure decisions.

Conditional and range requests follow RFC 9110, sections 13 and 14, in the RFC's order:
``If-Match``, ``If-None-Match``, then ``Range`` unless ``If-Range`` forbids it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from aiockpt.errors import CheckpointChangedError
from aiockpt.format.manifest import Manifest
from aiockpt.http import protocol as http
from aiockpt.http.problems import RefusedError

COMMON_HEADERS: Final[Mapping[str, str]] = {
    "Server": "aiockpt",  # but not the versions of what it runs on
    "X-Content-Type-Options": "nosniff",
}

# A step may be published again with other bytes, so a cache has to ask each time. It
# gets a 304 if the bytes are the same.
_CACHE: Final = "no-cache, no-transform"


@dataclass(slots=True)
class Reply:
    """A response without its body, which is ``[start, stop)`` of the file."""

    status: int
    headers: dict[str, str]
    start: int
    stop: int


def plan_reply(
    resource: http.Resource,
    manifest: Manifest,
    headers: Mapping[str, str],
    method: str,
) -> Reply:
    """Return the answer to ``GET`` or ``HEAD`` of a resource that is being served.

    Raises:
        CheckpointChangedError: ``If-Match`` names another snapshot.
        RangeNotSatisfiable: the range holds no byte.
        RefusedError: 404, there is no such chunk, or no such resource here.
    """
    start, stop = _extent(resource, manifest)
    answer = _headers(resource, manifest)
    tag = manifest.snapshot_id
    if not _is_news(headers, tag):
        return Reply(HTTPStatus.NOT_MODIFIED, answer, start, start)
    wanted = None
    if method == "GET" and http.if_range(headers.get("If-Range"), tag):
        wanted = http.parse_range(headers.get("Range"), stop - start)
    if wanted is None:
        answer["Content-Length"] = str(stop - start)
        return Reply(HTTPStatus.OK, answer, start, stop)
    first, last = wanted
    answer["Content-Range"] = http.format_content_range(first, last, stop - start)
    answer["Content-Length"] = str(last - first)
    return Reply(HTTPStatus.PARTIAL_CONTENT, answer, start + first, start + last)


def fingerprint_reply(
    resource: http.Resource, manifest: Manifest, headers: Mapping[str, str]
) -> Reply:
    """Return the answer to a request for a fingerprint, whose body is JSON.

    Raises:
        CheckpointChangedError: ``If-Match`` names another snapshot.
    """
    answer = _headers(resource, manifest)
    del answer["Accept-Ranges"]
    answer["Content-Type"] = "application/json"
    is_news = _is_news(headers, manifest.snapshot_id)
    status = HTTPStatus.OK if is_news else HTTPStatus.NOT_MODIFIED
    return Reply(status, answer, 0, 0)


def _is_news(headers: Mapping[str, str], tag: str) -> bool:
    """Say whether a request gets the snapshot, and does not have it already.

    Raises:
        CheckpointChangedError: ``If-Match`` names another snapshot.
    """
    if not http.if_match(headers.get("If-Match"), tag):
        raise CheckpointChangedError(
            expected=headers["If-Match"].strip('"')[:64], actual=tag
        )
    return http.if_none_match(headers.get("If-None-Match"), tag)


def chunks_of(reply: Reply, manifest: Manifest) -> range:
    """Return the chunks of which a reply has bytes."""
    size, head = manifest.chunk_bytes, manifest.header_bytes
    first, last = max(reply.start - head, 0), max(reply.stop - head, 0)
    return range(first // size, -(-last // size))


def latest_reply(manifest: Manifest) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body that name the served checkpoint."""
    headers = {
        **no_news_headers(manifest.step),
        "Content-Type": "application/json",
        "ETag": http.format_etag(manifest.snapshot_id),
    }
    return headers, json.dumps(describe(manifest)).encode()


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return what answers in JSON say of the served checkpoint."""
    return {
        "step": manifest.step,
        "snapshot_id": manifest.snapshot_id,
        "total_bytes": manifest.total_bytes,
    }


def no_news_headers(serving: int | None) -> dict[str, str]:
    """Return the headers that say which step is served, when there is no newer one."""
    headers = {**COMMON_HEADERS, "Cache-Control": "no-store"}
    if serving is not None:
        headers[http.STEP_HEADER] = str(serving)
    return headers


def _extent(resource: http.Resource, manifest: Manifest) -> tuple[int, int]:
    if resource.kind is http.ResourceKind.METADATA:
        return 0, manifest.header_bytes
    if resource.kind is http.ResourceKind.FULL:
        return 0, manifest.total_bytes
    if resource.chunk is None:
        detail = f"this server has no {resource.kind.value!r}"
        raise RefusedError(HTTPStatus.NOT_FOUND, detail)
    try:
        start, stop = manifest.grid.range(resource.chunk)
    except IndexError:
        raise RefusedError(
            HTTPStatus.NOT_FOUND,
            f"no chunk {resource.chunk}; step {manifest.step} has {len(manifest.grid)}",
        ) from None
    return start + manifest.header_bytes, stop + manifest.header_bytes


def _headers(resource: http.Resource, manifest: Manifest) -> dict[str, str]:
    answer = {
        **COMMON_HEADERS,
        "ETag": http.format_etag(manifest.snapshot_id),
        "Accept-Ranges": "bytes",
        "Cache-Control": _CACHE,
        "Content-Type": "application/octet-stream",
        http.STEP_HEADER: str(manifest.step),
    }
    if resource.chunk is not None and resource.chunk < len(manifest.digests):
        # The digest of the whole chunk, whatever range of it is asked for.
        digest = manifest.digests[resource.chunk]
        answer[http.DIGEST_HEADER] = http.format_digest(manifest.algorithm, digest)
    return answer
