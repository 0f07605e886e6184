"""Which checkpoint a request is answered from: a published one, or an early one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from aiockpt.errors import CheckpointChangedError, RemoteProtocolError
from aiockpt.http.awaiting import Awaiting
from aiockpt.http.guard import RefusedError
from aiockpt.http.published import Published
from aiockpt.http.shelf import Shelf
from aiockpt.http.unsealed import Unsealed
from aiockpt.wire.chunks import parse_range
from aiockpt.wire.http import Resource, ResourceKind, parse_resource
from aiockpt.wire.unsealed import UNSEALED_HEADER, accepts, wanted_tag

__all__ = ["Choice", "Choosing", "resource_of"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request is answered from.

    Attributes:
        published: The checkpoint.
        tag: What the answer calls it: the snapshot id, or that of an early one.
        headers: What of the request is still to be considered.
    """

    published: Published
    tag: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, published: Published, headers: Mapping[str, str]) -> Choice:
        """Return that of a checkpoint by its own name."""
        return cls(published, published.snapshot_id, headers)


class Choosing:
    """Finds what a request is answered from; waits as long as the request may."""

    def __init__(self, shelf: Shelf, awaiting: Awaiting) -> None:
        self._shelf = shelf
        self._awaiting = awaiting

    def __repr__(self) -> str:
        return f"<Choosing from {self._shelf}>"

    async def choose(self, request: web.Request, resource: Resource) -> Choice | None:
        """Return what it is answered from; None: an early one is not that far yet.

        Raises:
            StepNotFoundError, PeerFailedError: it is not there, and will not be.
            CheckpointChangedError: there is nothing of that tag; or nothing but
                ranges of the data segment, and no such range is asked for.
        """
        said = request.headers.get(UNSEALED_HEADER)
        tag = wanted_tag(said)
        if tag is not None:
            return await self._by_tag(request, resource, tag)
        found: Published | Unsealed
        if accepts(said) and _is_for_manifest(request, resource):
            found = await self._awaiting.early(request, resource.step)
        else:
            found = await self._awaiting.step(request, resource.step)
        if isinstance(found, Unsealed):
            found.receivers += 1
            return Choice(found.published, found.tag, {})
        return Choice.of(found, request.headers)

    async def _by_tag(
        self, request: web.Request, resource: Resource, tag: str
    ) -> Choice | None:
        early = self._shelf.early.find(tag)
        if early is None or early.published.step != resource.step:
            raise self._changed(tag)
        if resource.kind is ResourceKind.METADATA:
            await self._awaiting.until(request, early, lambda: bool(early.sealed))
            sealed = early.sealed
            return None if sealed is None else Choice.of(sealed, {})
        stop = _stop_of(request, resource, early.published)
        if stop is None:  # not from us: a cache has made another request of it
            raise self._changed(tag)
        there = await self._awaiting.until(request, early, lambda: early.has(stop))
        return Choice(early.published, tag, request.headers) if there else None

    def _changed(self, tag: str) -> CheckpointChangedError:
        now = self._shelf.latest
        actual = None if now is None else now.snapshot_id
        return CheckpointChangedError(expected=tag, actual=actual)


def _is_for_manifest(request: web.Request, resource: Resource) -> bool:
    return resource.kind is ResourceKind.METADATA and request.method == "GET"


def resource_of(request: web.Request) -> Resource:
    """Return what is asked for.

    Raises:
        RefusedError: there is no such thing.
    """
    try:
        return parse_resource(request.match_info["step"], request.match_info["what"])
    except RemoteProtocolError as error:
        raise RefusedError(HTTPStatus.NOT_FOUND, str(error)) from None


def _stop_of(
    request: web.Request, resource: Resource, published: Published
) -> int | None:
    """Return where in the data segment the range ends that is asked for, if one is."""
    manifest = published.servable.manifest
    wanted = None
    if resource.kind is ResourceKind.FULL and request.method == "GET":
        wanted = parse_range(request.headers.get("Range"), manifest.total_bytes)
    if wanted is None or wanted[0] < manifest.header_bytes:
        return None
    return wanted[1] - manifest.header_bytes
