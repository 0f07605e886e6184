"""Lend snapshots to other processes of this host, as memory instead of bytes.

The answer to a request for a manifest that proves to come from this host has a ticket.
The guest shows the ticket at a Unix socket, where the kernel names its user: a process
of another user gets nothing. A guest is a reader like any other: the store counts it,
keeps the snapshot for it, and evicts it. It reads without a sign of life, so it has a
deadline, too.

A guest ends its visit by hanging up. The memory stays mapped and valid in the guest,
however the visit ends. A guest that compares the digests of what it has copied may
find the bytes of a later checkpoint there. For a guest that reads without comparing
(`AttachRequest.keep`), the memory never changes: the sender does not stage into it
again, unless the guest has said that nothing of it is mapped any more.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import secrets
import socket
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final

import anyio
import msgspec

from aiockpt.errors import AiockptError
from aiockpt.events import LogLimit, TransferEvent, emit
from aiockpt.http.audit import Access, Auditor
from aiockpt.http.handlers import ServerConfig
from aiockpt.http.protocol import Lease
from aiockpt.http.store import Publication, Store
from aiockpt.local.attach import (
    MAX_MESSAGE,
    RETURNED,
    AttachReply,
    AttachRequest,
    Offer,
    format_offer,
)
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import close_in_forks
from aiockpt.runtime.ipc import allow_descriptors, arrival, is_ours, owner_of, receive
from aiockpt.runtime.same_host import identity, is_probe_of

_TICKET_LIFETIME_S: Final = 30.0
_TICKET_TIMEOUT_S: Final = 5.0  # in which a guest must show its ticket
_MIN_RATE: Final = 256 << 20  # bytes per second that a guest must read
_MAC_BYTES: Final = 32
_ACCEPT_PAUSE_S: Final = 1.0  # until the next try to accept, if no descriptor is left

logger = logging.getLogger("aiockpt")


class _Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The snapshot that was offered, to whom, and until when; a MAC covers this.

    ``lease`` keeps the snapshot for the receive, if it is superseded.
    """

    step: int
    snapshot_id: str
    receiver: str
    until: float
    lease: Lease | None


_REQUEST: Final = msgspec.json.Decoder(AttachRequest)
_TICKET: Final = msgspec.msgpack.Decoder(_Ticket)


class Lender:
    """Lends what a store publishes; it listens from the first offer on.

    Args:
        config: How to serve. There are as many guests at a time as there may be
            readers. A guest may take the stall timeout in addition to the time that
            its bytes take.
        bridge: Runs what blocks.
        store: Holds the publications that may be lent.

    Attributes:
        count: How often it has lent a checkpoint.
    """

    def __init__(self, config: ServerConfig, bridge: Bridge, store: Store) -> None:
        self.count = 0
        self._store = store
        self._bridge = bridge
        self._most, self._stall_timeout = config.options.readers, config.stall_timeout
        self._name = secrets.token_hex(16)
        self._key = secrets.token_bytes(32)
        self._turn = asyncio.Lock()
        self._is_listening = self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._auditor = Auditor()
        self._log_limit = LogLimit()

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
        if self._closed or not self._listens():
            return None
        step, snapshot_id = publication.step, publication.snapshot_id
        ticket = _Ticket(
            step, snapshot_id, receiver, _now() + _TICKET_LIFETIME_S, lease
        )
        said = msgspec.msgpack.encode(ticket)
        text = base64.urlsafe_b64encode(self._mac(said) + said).rstrip(b"=").decode()
        return format_offer(Offer(self._name, text))

    async def aclose(self) -> None:
        """Lend nothing more, and end all visits. Idempotent."""
        self._closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ---------------------------------------------------------------- listening

    def _listens(self) -> bool:
        """Return whether guests can come; listen from now on if possible."""
        if self._is_listening:
            return True
        try:
            with ExitStack() as unless_listening:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                unless_listening.callback(listener.close)
                listener.settimeout(0)
                allow_descriptors(listener, allow=False)
                listener.bind(Offer(self._name, "").address)
                listener.listen(self._most)
                unless_listening.pop_all()
        except OSError as error:
            self._warn("nothing is lent to this host's processes", error)
            return False
        self._is_listening = True
        self._begin(listener, self._accept(listener))
        return True

    def _begin(self, sock: socket.socket, work: Coroutine[None, None, None]) -> None:
        """Run a task that reads a socket, and close the socket when it has ended."""

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            sock.close()

        close_in_forks([sock])
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(end)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await arrival(listener)
            try:
                guest, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError as error:  # no descriptor: it would come again at once
                self._warn("a process of this host has to wait", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if not is_ours(guest):
                await self._turn_away(guest)
            elif len(self._tasks) > self._most:  # one of them is this one
                guest.close()
            else:
                guest.settimeout(0)
                self._begin(guest, self._receive(guest))

    def _warn(self, what: str, error: OSError) -> None:
        if self._log_limit.passes(what):
            logger.warning("%s: %s", what, error)

    async def _turn_away(self, guest: socket.socket) -> None:
        """Hang up on another user's process; accept nobody until that is done.

        It takes as long as closing the descriptors that this process may have sent.
        """
        try:
            await self._bridge.run_apart(guest.close)
        except AiockptError:  # without a thread
            guest.close()

    # ------------------------------------------------------------------ lending

    async def _receive(self, guest: socket.socket) -> None:
        with suppress(OSError, msgspec.MsgspecError, AiockptError):
            async with asyncio.timeout(_TICKET_TIMEOUT_S):
                said = await _heard(guest)
            request = _REQUEST.decode(said)
            ticket = self._read(request.ticket)
            if ticket is not None:
                await self._lend(guest, ticket, keep=request.keep)

    def _mac(self, said: bytes) -> bytes:
        return hmac.digest(self._key, said, "sha256")

    def _read(self, text: str) -> _Ticket | None:
        """Return a ticket of ours, unless it is too old."""
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except ValueError:
            return None
        mac, said = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(said)):
            return None
        ticket = _TICKET.decode(said)
        return ticket if ticket.until >= _now() else None

    def _find(self, ticket: _Ticket) -> Publication | None:
        """Return the publication of a ticket, if it is served or a lease keeps it."""
        lease, found = ticket.lease, self._store.latest
        if lease and (found is None or found.snapshot_id != ticket.snapshot_id):
            found = self._store.leased(lease, ticket.step)
        is_same = found is not None and found.snapshot_id == ticket.snapshot_id
        return found if is_same else None

    async def _lend(self, guest: socket.socket, ticket: _Ticket, *, keep: bool) -> None:
        """Lend the memory until the guest hangs up, is evicted, or takes too long."""
        offered, lease = self._find(ticket), ticket.lease
        if offered is None:
            return
        arena, nbytes = offered.servable.arena, offered.servable.manifest.segment_bytes
        assert arena is not None, "what was offered has an arena"
        left = self._stall_timeout + nbytes / _MIN_RATE
        if lease is not None:
            left = min(left, lease.until - _now())
        event = TransferEvent(
            stop="serve",
            step=offered.step,
            peer=f"pid:{owner_of(guest)[0]}",
            nbytes=nbytes,
            medium="shared memory",
        )
        with anyio.move_on_after(left) as visit:
            async with self._store.reading(offered, evict=visit.cancel, lease=lease):
                async with self._turn:
                    fd = await self._bridge.run(arena.lend)
                reply = AttachReply(offered.snapshot_id, nbytes)
                socket.send_fds(guest, [msgspec.json.encode(reply)], [fd])
                said = b""
                try:
                    self.count += 1
                    self._auditor.note(
                        Access(
                            peer=event.peer,
                            receiver=ticket.receiver,
                            method="LEND",
                            path="",
                            step=event.step,
                            status=200,
                            nbytes=nbytes,
                            outcome="lent",
                        )
                    )
                    emit(replace(event, detail="kept" if keep else ""))
                    said = await _heard(guest)
                finally:
                    if keep and said != RETURNED:
                        arena.spent = True
            if lease is not None:  # the guest asks for nothing more
                self._store.end_lease(lease)
        if visit.cancelled_caught:
            level = logging.WARNING if self._log_limit.passes("evict") else logging.INFO
            emit(replace(event, stop="evict", detail="the loan has ended", level=level))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _heard(guest: socket.socket) -> bytes:
    """Return the next packet, or no bytes at the end; refuse descriptors."""
    await arrival(guest)
    return receive(guest, MAX_MESSAGE, 0)[0]
