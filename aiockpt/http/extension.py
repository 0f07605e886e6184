"""The seam between the handlers and what is served beside plain checkpoints.

A `ServiceExtension` answers resources of its own, adds headers to the answers of the
handlers, and admits the bodies that they send. An implementation of `Lends` offers
memory instead of bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

from aiohttp import web

from aiockpt.http import protocol as http
from aiockpt.http.body_writer import BodySender
from aiockpt.http.responses import Reply
from aiockpt.http.status import ShownSwarm
from aiockpt.http.store import HasViews, Publication


class PlainStream(web.StreamResponse):
    """A response that no application compresses: its length and digest are given."""

    def enable_compression(self, *_: object, **__: object) -> None:
        """Do nothing: receivers accept no coding, and ranges are of the plain bytes."""


class PlainResponse(PlainStream, web.Response):
    """A `PlainStream` with its whole body."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what it names.

    Attributes:
        request: The request.
        resource: What is asked for.
        publication: The checkpoint that has it.
        lease: The lease of the receive that asks. None: the request names none, or the
            checkpoint is a relay, on which no lease holds.
        identity: The headers that go with each answer of this server.
    """

    request: web.Request
    resource: http.Resource
    publication: Publication
    lease: http.Lease | None
    identity: Mapping[str, str]

    def wait(self, most: float, *, unasked: float = 0.0) -> float:
        """Return how many seconds the request may wait until it is served.

        Args:
            most: The longest time, whatever the request asks for.
            unasked: The time if the request asks for none.
        """
        asked = http.parse_prefer_wait(self.request.headers.get("Prefer"))
        return min(unasked if asked is None else asked, most)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How an extension has one body sent.

    Attributes:
        unsent: The most bytes that the kernel may hold. With few of them, the sending
            ends when the transfer does. 0: the kernel decides.
        rate: Bytes per second; None: no limit.
        is_quiet: No warning is logged if the body ends early.
        copy: The handlers send it instead of the memory of the checkpoint.
    """

    unsent: int = 0
    rate: int | None = None
    is_quiet: bool = False
    copy: HasViews | None = None


UNLIMITED: Final = BodyLimits()


class ServiceExtension:
    """Extends what a service answers and limits; this one adds nothing.

    Attributes:
        methods: The resources of a step that the extension answers, and the methods
            of each.
    """

    methods: Mapping[str, Sequence[str]] = {}

    async def answer(self, asked: Asked) -> web.StreamResponse:
        """Answer a request for one of its resources."""
        raise NotImplementedError(asked.resource)

    def headers(self, asked: Asked, reply: Reply) -> Mapping[str, str]:
        """Return further headers of a planned reply, before a lease is taken.

        Raises:
            RefusedError: the request is not answered in this way.
        """
        return {}

    def sending(
        self, asked: Asked, reply: Reply, body: BodySender
    ) -> AbstractAsyncContextManager[BodyLimits]:
        """Admit a body, whose bytes are sent during the block.

        Raises:
            PeerBusy: it cannot be sent soon.
        """
        return nullcontext(UNLIMITED)

    def status(self, publication: Publication) -> ShownSwarm | None:
        """Return what the status shows of the swarm of a publication, if any."""
        return None


class Lends(Protocol):
    """Lends what a store publishes to processes of this host, as memory.

    Attributes:
        count: How many checkpoints they took.
    """

    count: int

    async def offer(
        self,
        publication: Publication,
        probe: str | None,
        receiver: str,
        lease: http.Lease | None,
    ) -> str | None:
        """Return the header that offers a checkpoint to the sender of a probe, or None.

        None if the probe is not from this host, or the memory cannot be lent.
        """

    async def aclose(self) -> None:
        """Lend nothing more. Idempotent."""


def transport_of(request: web.Request) -> asyncio.Transport:
    """Return a request's connection.

    Raises:
        ConnectionResetError: its client has left.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has left")
    return transport
