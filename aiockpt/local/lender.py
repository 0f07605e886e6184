"""Lend snapshots to other processes of this host, as memory instead of bytes.

A request for a manifest that proves to come from this host is answered with a ticket.
The guest shows the ticket at a Unix socket, where the kernel names its user: a process
of another user gets nothing. A guest is a reader like any other: the store counts it,
keeps the snapshot for it, and evicts it. It reads without a sign of life, so its loan
has a deadline, too.

A loan ends by itself when the guest hangs up. However it ends, the memory stays mapped
and valid in the guest. A guest that compares the digests of what it has copied may
find the bytes of a later checkpoint there. For a guest that reads without comparing
(`Ask.keep`), the memory never changes: the sender does not stage into it again, unless
the guest has said that nothing of it is mapped any more.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import socket
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Final

import anyio
import msgspec

from aiockpt.errors import AiockptError
from aiockpt.events import LogLimit, TransferEvent, emit
from aiockpt.http.audit import Access, Auditor
from aiockpt.http.protocol import Lease
from aiockpt.http.store import Publication, Store
from aiockpt.local.attach import (
    MAX_MESSAGE,
    RETURNED,
    Ask,
    Lent,
    Offer,
    decode_ticket,
    encode_ticket,
    format_offer,
    identity,
    is_probe_of,
)
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.children import close_in_forks
from aiockpt.runtime.ipc import (
    allow_descriptors,
    arrival,
    is_ours,
    owner_of,
    receive,
)

_VALID: Final = 30.0  # seconds for which a ticket is valid
_SLOWEST: Final = 256 << 20  # bytes per second that a guest reads at least
_MAC_BYTES: Final = 32
_TICKET_TIMEOUT: Final = 5.0  # seconds in which a guest must show its ticket
_PAUSE: Final = 1.0  # seconds until the next try to accept, if no descriptor is left

logger = logging.getLogger("aiockpt")


class _Claim(msgspec.Struct, frozen=True, array_like=True):
    """What a ticket says: which snapshot was offered to whom, and ``until`` when.

    ``lease`` is the id of the lease that keeps the snapshot; it ends at ``ends``.
    """

    step: int
    snapshot_id: str
    receiver: str
    until: float
    lease: str = ""
    ends: float = math.inf


class Lender:
    """Lends what a store publishes; it listens from the first offer on.

    Args:
        store: Holds the publications that may be lent.
        bridge: Runs what blocks.
        most: How many guests it has at a time; it refuses more of them.
        stall_timeout: How long a loan lasts, in seconds, in addition to the time that
            its bytes take.
    """

    def __init__(
        self, store: Store, bridge: Bridge, *, most: int, stall_timeout: float
    ) -> None:
        self.count = 0
        self._store = store
        self._bridge = bridge
        self._turn = asyncio.Lock()
        self._most, self._stall_timeout = most, stall_timeout
        self._name = secrets.token_hex(16)
        self._key = secrets.token_bytes(32)
        self._listener: socket.socket | None = None
        self._visits: set[asyncio.Task[None]] = set()
        self._auditor = Auditor()
        self._log_limit = LogLimit()
        self._closed = False

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
        claim = _Claim(
            publication.step, publication.snapshot_id, receiver, _now() + _VALID
        )
        if lease is not None:
            claim = msgspec.structs.replace(claim, lease=lease.id, ends=lease.until)
        said = msgspec.msgpack.encode(claim)
        return format_offer(Offer(self._name, encode_ticket(self._mac(said) + said)))

    async def aclose(self) -> None:
        """Lend nothing more, and end all loans. Idempotent."""
        self._closed = True
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        visits = tuple(self._visits)
        for visit in visits:
            visit.cancel()
        if visits:
            await asyncio.wait(visits)

    def _is_listening(self) -> bool:
        if self._listener is None:
            try:
                listener = self._listen()
            except OSError as error:
                self._warn("nothing is lent to this host's processes", error)
                return False
            close_in_forks([listener])
            self._listener = listener
            self._resume()
        return True

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.settimeout(0)
            allow_descriptors(listener, allow=False)
            listener.bind(Offer(self._name, "").address)
            listener.listen(self._most)
        except BaseException:
            listener.close()
            raise
        return listener

    def _resume(self) -> None:
        if (listener := self._listener) is not None:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _warn(self, what: str, error: OSError) -> None:
        if self._log_limit.passes(what):
            logger.warning("%s: %s", what, error)

    def _accept(self, listener: socket.socket) -> None:
        try:
            guest, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # without a descriptor, it would come again at once
            self._warn("a process of this host has to wait", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_PAUSE, self._resume)
            return
        if not is_ours(guest):
            asyncio.get_running_loop().remove_reader(listener)
            self._begin(self._turn_away(guest))
        elif len(self._visits) >= self._most:
            guest.close()
        else:
            guest.settimeout(0)
            close_in_forks([guest])
            self._begin(self._receive(guest))

    def _begin(self, visit: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(visit)
        self._visits.add(task)
        task.add_done_callback(self._visits.discard)

    async def _turn_away(self, guest: socket.socket) -> None:
        """Hang up on another user's process, and accept nobody until that is done.

        It takes as long as closing the descriptors that this process may have sent.
        """
        try:
            await self._bridge.run_apart(guest.close)
        except AiockptError:  # without a thread
            guest.close()
        finally:
            self._resume()

    async def _receive(self, guest: socket.socket) -> None:
        with guest, suppress(OSError, msgspec.MsgspecError, AiockptError):
            async with asyncio.timeout(_TICKET_TIMEOUT):
                ask = msgspec.json.decode(await _heard(guest), type=Ask)
            claim = self._read(ask.ticket)
            lease = Lease(claim.lease, claim.ends) if claim and claim.lease else None
            publication = self._find(claim, lease)
            if claim is not None and publication is not None:
                await self._lend(guest, publication, claim, lease, keep=ask.keep)

    def _mac(self, said: bytes) -> bytes:
        return hmac.digest(self._key, said, "sha256")

    def _read(self, ticket: str) -> _Claim | None:
        """Return what a ticket of ours says, unless it is too old."""
        data = decode_ticket(ticket)
        mac, said = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(said)):
            return None
        claim = msgspec.msgpack.decode(said, type=_Claim)
        return claim if claim.until >= _now() else None

    def _find(self, claim: _Claim | None, lease: Lease | None) -> Publication | None:
        """Return the publication of a claim, if it is served or a lease keeps it."""
        if claim is None:
            return None
        found = self._store.latest
        if lease and (found is None or found.snapshot_id != claim.snapshot_id):
            found = self._store.leased(lease, claim.step)
        if found is None or found.snapshot_id != claim.snapshot_id:
            return None
        return found

    async def _lend(
        self,
        guest: socket.socket,
        publication: Publication,
        claim: _Claim,
        lease: Lease | None,
        *,
        keep: bool,
    ) -> None:
        """Lend the memory until the guest hangs up, is evicted, or takes too long."""
        arena = publication.servable.arena
        nbytes = publication.servable.manifest.segment_bytes
        assert arena is not None, "what was offered has an arena"
        left = self._stall_timeout + nbytes / _SLOWEST
        if lease is not None:
            left = min(left, lease.until - _now())
        with anyio.move_on_after(left) as loan:
            async with self._store.reading(publication, evict=loan.cancel, lease=lease):
                async with self._turn:
                    fd = await self._bridge.run(arena.lend)
                message = msgspec.json.encode(Lent(publication.snapshot_id, nbytes))
                socket.send_fds(guest, [message], [fd])
                said = b""
                try:
                    self._note(guest, publication, claim.receiver)
                    event = _event("serve", guest, publication)
                    emit(replace(event, detail="kept" if keep else ""))
                    said = await _heard(guest)
                finally:
                    if keep and said != RETURNED:
                        arena.spent = True
            if lease is not None:  # the guest asks for nothing more
                self._store.end_lease(lease)
        if loan.cancelled_caught:
            event = _event("evict", guest, publication)
            level = logging.WARNING if self._log_limit.passes("evict") else logging.INFO
            emit(replace(event, detail="the loan has ended", level=level))

    def _note(self, guest: socket.socket, publication: Publication, who: str) -> None:
        """Count and audit a loan."""
        self.count += 1
        self._auditor.note(
            Access(
                peer=_pid_of(guest),
                receiver=who,
                method="LEND",
                path="",
                step=publication.step,
                status=200,
                nbytes=publication.servable.manifest.segment_bytes,
                outcome="lent",
            )
        )


def _event(stop: str, guest: socket.socket, publication: Publication) -> TransferEvent:
    return TransferEvent(
        stop=stop,
        step=publication.step,
        peer=_pid_of(guest),
        nbytes=publication.servable.manifest.segment_bytes,
        medium="shared memory",
    )


def _pid_of(guest: socket.socket) -> str:
    return f"pid:{owner_of(guest)[0]}"


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _heard(guest: socket.socket) -> bytes:
    """Return the next packet; nothing at the end. Descriptors in it are refused."""
    await arrival(guest)
    return receive(guest, MAX_MESSAGE, 0)[0]
