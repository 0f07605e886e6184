"""Lend snapshots to other processes of this host, as memory instead of bytes.

A request for a manifest that proves to come from this host is answered with a ticket.
The receiver shows the ticket at a Unix socket, where the kernel names its user: a
process of another user gets nothing. A receiver that only copies gives the memory
back, and the sender may stage the next checkpoint into it. A receiver that keeps the
memory, or dies without a word, has it for good: the sender never stages into it
again, and waits for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from aiockpt.errors import ClosedError
from aiockpt.events import TransferEvent, emit
from aiockpt.http.audit import Access, Auditor
from aiockpt.http.protocol import Lease
from aiockpt.http.shared_memory import (
    MAX_MESSAGE,
    RETURNED,
    Ask,
    Lent,
    Offer,
    format_offer,
    identity,
    is_probe_of,
)
from aiockpt.http.store import Publication, Store
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import close_in_forks
from aiockpt.runtime.ipc import arrival, is_ours, owner_of, receive

__all__ = ["Lender"]

_TICKETS: Final = 1024  # the most that are valid at a time
_VALID: Final = 30.0  # seconds
_TICKET_TIMEOUT: Final = 5.0  # seconds in which a guest must show its ticket
_PAUSE: Final = 1.0  # seconds until the next try to accept, if no descriptor is left

logger = logging.getLogger("aiockpt")


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What was offered to which receiver; ``lease`` keeps it ``until`` then."""

    step: int
    snapshot_id: str
    receiver: str
    until: float
    lease: Lease | None


class Lender:
    """Lends what a store publishes; it listens from the first offer on.

    Args:
        store: Holds the publications that may be lent.
        bridge: Runs what blocks.
        most: How many guests it has at a time; it refuses more of them.
    """

    def __init__(self, store: Store, bridge: Bridge, *, most: int) -> None:
        self.count = 0
        self._store = store
        self._bridge = bridge
        self._turn = asyncio.Lock()
        self._most = most
        self._name = secrets.token_hex(16)
        self._tickets: dict[str, _Ticket] = {}
        self._listener: socket.socket | None = None
        self._visits: set[asyncio.Task[None]] = set()
        self._auditor = Auditor()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Lender guests={len(self._visits)} lent={self.count}>"

    async def offer(
        self,
        publication: Publication,
        probe: str | None,
        receiver: str,
        lease: Lease | None,
    ) -> str | None:
        """Return the header that offers a checkpoint to the sender of a probe, or None.

        None if the probe is not from this host, or the memory cannot be lent.
        """
        arena = publication.servable.arena
        if probe is None or arena is None or arena.fd < 0:
            return None
        here = await self._bridge.run(identity)
        if here is None or not is_probe_of(probe, here):
            return None
        if self._closed or not self._is_listening():
            return None
        ticket = secrets.token_hex(16)
        self._forget_old()
        until = time.monotonic() + _VALID
        made = _Ticket(
            publication.step, publication.snapshot_id, receiver, until, lease
        )
        self._tickets[ticket] = made
        return format_offer(Offer(self._name, ticket))

    async def aclose(self) -> None:
        """Lend nothing more; receivers keep what they have. Idempotent."""
        self._closed = True
        self._tickets.clear()
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        visits = tuple(self._visits)
        for visit in visits:
            visit.cancel()
        if visits:
            await asyncio.wait(visits)

    def _forget_old(self) -> None:
        now = time.monotonic()
        old = [key for key, ticket in self._tickets.items() if ticket.until < now]
        surplus = [*self._tickets][: max(len(self._tickets) - _TICKETS + 1, 0)]
        for key in {*old, *surplus}:
            del self._tickets[key]

    def _is_listening(self) -> bool:
        if self._listener is None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                listener.settimeout(0)
                listener.bind(Offer(self._name, "").address)
                listener.listen(self._most)
            except OSError as error:
                listener.close()
                logger.warning("nothing is lent to this host's processes: %s", error)
                return False
            close_in_forks([listener])
            self._listener = listener
            self._resume()
        return True

    def _resume(self) -> None:
        if (listener := self._listener) is not None:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            guest, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except (
            OSError
        ) as error:  # if no descriptor is left, it would come again at once
            logger.warning("a process of this host has to wait: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_PAUSE, self._resume)
            return
        if len(self._visits) >= self._most or not is_ours(guest):
            guest.close()
            return
        guest.settimeout(0)
        close_in_forks([guest])
        visit = asyncio.get_running_loop().create_task(self._receive(guest))
        self._visits.add(visit)
        visit.add_done_callback(self._visits.discard)

    async def _receive(self, guest: socket.socket) -> None:
        with guest, suppress(OSError, msgspec.MsgspecError, TimeoutError, ClosedError):
            async with asyncio.timeout(_TICKET_TIMEOUT):
                ask = msgspec.json.decode(await _heard(guest), type=Ask)
            ticket = self._tickets.pop(ask.ticket, None)
            publication = self._find(ticket)
            if ticket is not None and publication is not None:
                await self._lend(guest, publication, ticket, keep=ask.keep)

    def _find(self, ticket: _Ticket | None) -> Publication | None:
        if ticket is None or ticket.until < time.monotonic():
            return None
        found = self._store.latest
        if found is None or found.snapshot_id != ticket.snapshot_id:
            lease = ticket.lease
            found = None if lease is None else self._store.leased(lease, ticket.step)
        if found is None or found.snapshot_id != ticket.snapshot_id:
            return None
        return found

    async def _lend(
        self,
        guest: socket.socket,
        publication: Publication,
        ticket: _Ticket,
        *,
        keep: bool,
    ) -> None:
        servable, arena = publication.servable, publication.servable.arena
        assert arena is not None, "what was offered has an arena"
        servable.acquire()
        given = returned = False
        try:
            async with self._turn:
                fd = await self._bridge.run(arena.lend)
            if self._find(ticket) is not publication:
                return  # it was retracted meanwhile
            nbytes = servable.manifest.segment_bytes
            message = msgspec.json.encode(Lent(ticket.snapshot_id, nbytes))
            socket.send_fds(guest, [message], [fd])
            given = True
            if ticket.lease is not None:  # the receiver will ask for no range
                self._store.end_lease(ticket.lease)
            self._tell(guest, publication, ticket, kept=keep)
            returned = not keep and await _heard(guest) == RETURNED
        finally:
            if given and not returned:
                arena.spent = True
            servable.release()

    def _tell(
        self,
        guest: socket.socket,
        publication: Publication,
        ticket: _Ticket,
        *,
        kept: bool,
    ) -> None:
        self.count += 1
        pid, _ = owner_of(guest)
        nbytes = publication.servable.manifest.segment_bytes
        self._auditor.note(
            Access(
                peer=f"pid:{pid}",
                receiver=ticket.receiver,
                method="LEND",
                path="",
                step=publication.step,
                status=200,
                nbytes=nbytes,
                outcome="lent",
            )
        )
        emit(
            TransferEvent(
                stop="serve",
                step=publication.step,
                peer=f"pid:{pid}",
                nbytes=nbytes,
                detail="kept" if kept else "",
                medium="shared memory",
            )
        )


async def _heard(guest: socket.socket) -> bytes:
    """Return the next packet; nothing at the end. Descriptors in it are refused."""
    await arrival(guest)
    return receive(guest, MAX_MESSAGE, 0)[0]
