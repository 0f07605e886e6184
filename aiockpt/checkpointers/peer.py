"""Loading from a peer's URL: a receive for callers without an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import replace
from math import inf
from typing import Final

from aiockpt.errors import AiockptError
from aiockpt.events import Progress
from aiockpt.http.auth import find_credentials
from aiockpt.http.client import CheckpointClient
from aiockpt.http.follow import CURRENT_STEP_WAIT_S, chase
from aiockpt.http.options import (
    READER_CONNECTIONS,
    READER_STALL_TIMEOUT_S,
    READER_THREADS,
    Auth,
    Receive,
)
from aiockpt.http.peers import Peers
from aiockpt.http.protocol import Lease, parse_address
from aiockpt.http.source import HttpSource
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.sync_facade import run_blocking
from aiockpt.storage.read import OnBytes
from aiockpt.transfer.options import ReceiveOptions
from aiockpt.transfer.receive import Received, receive

_SILENT_CALL_EVERY_S: Final = 0.1

_IDLE_TIMEOUT_S: Final = 60.0
"""Seconds in which the manifest must come, and then each next byte of the chunks."""


def load_from_peer(
    url: str, options: ReceiveOptions, on_bytes: OnBytes | None
) -> Received:
    """Return the checkpoint that a peer serves.

    Args:
        url: The peer's address, with or without a token. If it names a step, that step
            is loaded, else the current one.
        options: The options of the receive.
        on_bytes: Called with the number of received bytes; its error ends the load.

    Raises:
        StepNotFoundError: the peer does not serve the step.
        TransferTimeoutError: no new bytes arrived for 60 seconds.
        LocalProtocolError: the URL is malformed.
        AiockptError: see `receive`.
    """
    return run_blocking(_load(url, options, on_bytes))


async def _load(
    url: str, options: ReceiveOptions, on_bytes: OnBytes | None
) -> Received:
    address = parse_address(url)
    # A sender that starts again within the load has time to publish the step again.
    wait = CURRENT_STEP_WAIT_S if address.step is None else inf
    origin = replace(address.origin, lease=Lease.begin(inf), step_wait=wait)
    asked = "a checkpoint" if address.step is None else f"step {address.step}"
    what = f"{asked} from {origin.base_url}"
    deadline = Deadline(_IDLE_TIMEOUT_S, phase="fetch_manifest", what=what)
    meter = _ByteReporter(on_bytes, deadline)
    options = replace(options, progress=meter.update)
    known = find_credentials(None, insecure=False, env=os.environ)
    with closing(Bridge(threads=READER_THREADS, name="aiockpt-peer")) as bridge:
        client = CheckpointClient(
            Receive(
                limits=options.limits,
                connections=READER_CONNECTIONS,
                reconnect_timeout=READER_STALL_TIMEOUT_S,
            ),
            Auth(token=known.to_send),
            stall_timeout=READER_STALL_TIMEOUT_S,
            bridge=bridge,
        )
        async with aclosing(client), deadline, meter.raising():
            peers = Peers.at(client, [origin], deadline.note)

            async def attempt(step: int) -> Received:
                deadline.what = f"step {step} from {peers.name}"
                meter.begin(step)
                http = HttpSource(peers, bridge, waits=False)
                try:
                    return await receive(http, step, options, bridge, deadline)
                except AiockptError as error:
                    deadline.note(error)
                    raise

            async def newest() -> int:
                return (await peers.latest()).step

            if address.step is not None:
                return await attempt(address.step)
            return (await chase(newest, attempt, pause=client.pause))[1]


class _ByteReporter:
    """Reports received bytes to a listener, whose error ends the fetch.

    While a peer is silent, the listener is called with 0 bytes, so that it can end the
    fetch. The deadline is renewed by bytes of a step beyond the highest count so far,
    and once by each phase of its receive. Bytes that are received again, because they
    were wrong, do not renew it.
    """

    def __init__(self, on_bytes: OnBytes | None, deadline: Deadline) -> None:
        self._on_bytes = on_bytes
        self._deadline = deadline
        self._received = self._highest = 0
        self._phases: set[str] = set()
        self._step: int | None = None
        self._task = asyncio.current_task()
        self._failure: BaseException | None = None

    def begin(self, step: int) -> None:
        """Note the step that is received from now on, perhaps again."""
        if step != self._step:
            self._step, self._highest = step, 0
            self._phases.clear()

    def update(self, progress: Progress) -> None:
        """Handle a progress report of the receive."""
        nbytes, self._received = (
            progress.bytes_done - self._received,
            progress.bytes_done,
        )
        if self._received > self._highest or progress.stop not in self._phases:
            self._highest = max(self._highest, self._received)
            self._phases.add(progress.stop)
            self._deadline.renew()
        if nbytes:
            self.tell(nbytes)

    def tell(self, nbytes: int) -> None:
        """Report so many more bytes to the listener."""
        if self._on_bytes is None or self._failure is not None:
            return
        try:
            self._on_bytes(nbytes)
        except BaseException as error:  # noqa: BLE001 - `raising` raises it
            self._failure = error
            assert self._task is not None
            self._task.cancel()

    @asynccontextmanager
    async def raising(self) -> AsyncIterator[None]:
        """Raise the listener's error in the block."""
        beat = asyncio.create_task(self._beat()) if self._on_bytes else None
        try:
            yield
        except asyncio.CancelledError:
            # Its traceback has this: a cycle would keep what was fetched into.
            failure, self._failure = self._failure, None
            if failure is None:
                raise
            try:
                raise failure from None
            finally:
                del failure
        finally:
            if beat is not None:
                beat.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_SILENT_CALL_EVERY_S)
            self.tell(0)
