"""Prefetches the steps of a trainer once per host, into memory that processes share.

The processes of one user on a host elect a leader by the lock of a file. The leader
follows the sender, or all senders of shards, and publishes each step to this host
(``same_host``). All of them, the leader too, map the published memory. If the leader
dies, another process takes its place.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio

from aiockpt.errors import (
    Advice,
    AiockptError,
    AuthenticationError,
    LocalProtocolError,
    StateDictError,
    StepNotFoundError,
    StorageError,
    TransportError,
    advice,
    kept,
)
from aiockpt.events import LogLimit
from aiockpt.http.options import Auth, Receive, Server
from aiockpt.http.protocol import parse_joined
from aiockpt.http.retry import backoff
from aiockpt.http_transport import HTTPTransport
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.secrets import Token
from aiockpt.runtime.tasks import Notifier, task_group
from aiockpt.storage import files

logger = logging.getLogger("aiockpt")

State = dict[str, Any]

_LEADER_TIMEOUT_S: Final = 2.0  # for which a process waits for a silent leader
_RETRY_PAUSE_S: Final = 0.1  # between two attempts to find a leader
_MAX_METADATA_BYTES: Final = 16 << 10  # of the leader, in its file


class HostMirror:
    """The newest checkpoint of a trainer, in memory that processes of this host share.

    Args:
        metadata: The string that the sender's ``metadata()`` returned, or that of
            `aiockpt.join_metadata`. The tensors of several senders are full ones.
        token: The sender's token, if the metadata does not contain it.
        swarm: Whether this host serves other receivers what it has verified. There is
            no swarm of several senders.
        place: The directory of the lock files. It must belong to this user alone.
            None: a directory in the system's temporary one.

    Attributes:
        step: The step that is there; None: none yet.
        is_leader: Whether this process fetches for the others.

    Raises:
        LocalProtocolError: the metadata is malformed, or ``swarm`` is asked for with
            several senders.
    """

    def __init__(
        self,
        metadata: str,
        *,
        token: str | None = None,
        swarm: bool = False,
        place: Path | None = None,
    ) -> None:
        self._metadata = Token(metadata)
        self._auth, self._swarm = Auth(token=token), swarm
        del metadata, token  # a traceback with local variables would show the token
        self._full = len(parse_joined(self._metadata)) > 1
        if self._full and swarm:
            raise LocalProtocolError(
                "joined metadata and swarm= do not work together yet: leave out swarm="
            )
        name = hashlib.sha256(self._metadata.encode()).hexdigest()[:32]
        self._path = (place or _default_place()) / name
        self._news = Notifier()
        self._state: State | None = None
        self._error: Exception | None = None
        self._fault: AiockptError | None = None
        self._faults = self._failures = 0
        self._log_limit = LogLimit()
        self.step: int | None = None
        self.is_leader = False

    def __repr__(self) -> str:
        return f"<HostMirror step={self.step}{' leader' if self.is_leader else ''}>"

    async def run(self) -> None:
        """Follow the sender until cancelled; then everything is released.

        An error that another attempt may mend, such as one of this host's memory, is
        raised by each `wait_for` that waits now, and the mirror goes on. An error that
        no attempt can mend ends this, and each `wait_for` raises it.
        """
        try:
            while True:
                await self._attempt()
                await asyncio.sleep(
                    _RETRY_PAUSE_S + (backoff(self._failures) if self._failures else 0)
                )
        except Exception as error:
            logger.warning("%s: %s", self, error)
            self._error = kept(error)
            if not isinstance(error, AiockptError):
                raise  # a fault of this module: the task shows where
        finally:
            self._state = None
            self._news.notify()

    async def _attempt(self) -> None:
        """Follow a leader, or lead, until that fails in a way that may pass."""
        before = self.step
        try:
            await self._follow()
        except TransportError as error:  # the leader is gone: elect another one
            logger.info("%s: %s", self, error)
        except AiockptError as error:
            if _is_final(error):
                raise
            if self._log_limit.passes(type(error)):
                logger.warning("%s: %s; it goes on", self, error)
            self._failures = self._failures + 1 if self.step == before else 1
            self._fault = kept(error)
            self._faults += 1
            self._news.notify()
        else:
            self._failures = 0

    async def wait_for(self, step: int, timeout: float) -> State:
        """Return the state dict of ``step``, in shared memory that never changes.

        If cancelled, the mirror goes on.

        Raises:
            StepNotFoundError: the sender has published a later step already.
            TransferTimeoutError: the step has not arrived within ``timeout`` seconds.
            AiockptError: an attempt to receive it failed, or the sender cannot be
                followed any more.
        """
        faults = self._faults
        async with Deadline(timeout, phase="recv", what=f"step {step}") as deadline:
            while True:
                if self._error is not None:
                    raise kept(self._error)  # a raise adds the caller's frames
                if self.step == step and self._state is not None:
                    return self._state
                if self._fault is not None and self._faults != faults:
                    raise kept(self._fault)
                if self.step is not None and self.step > step:
                    raise StepNotFoundError(step, serving=self.step)
                deadline.what = f"step {step} after step {self.step}"
                await self._news.wait(None)

    async def _follow(self) -> None:
        """Find the leader, or become it, and map what it publishes."""
        _make_private(self._path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with ExitStack() as stack:
            with files.named(self._path):
                fd = files.open_regular(self._path, flags, 0o600)
                stack.callback(os.close, fd)
                leads = files.lock(fd)
                # An old leader may have removed it.
                is_there = files.is_at(self._path, fd)
                # Damaged bytes are no address, as of a leader that is writing them.
                leader = os.pread(fd, _MAX_METADATA_BYTES, 0).decode(errors="replace")
            if leads and is_there:
                await self._lead(fd)
            elif not leads and leader:
                await self._map_of_another(leader)

    async def _map_of_another(self, leader: str) -> None:
        """Map what another process publishes, until it is gone.

        Raises:
            TransportError: it is gone, or another program answers in its place.
            StagingError, StorageError: this process lacks memory or descriptors.
        """
        try:
            await self._map(leader)
        except AiockptError as error:
            if Advice.LATER in advice(error):
                raise
            raise TransportError(f"no leader is at its address: {error}") from error

    async def _lead(self, fd: int) -> None:
        """Fetch for this host until cancelled; ``fd`` holds the lock."""
        server = Server(host="127.0.0.1")
        async with _open(HTTPTransport(same_host=True, server=server)) as local:
            await local.start()  # it answers before there is a step
            try:
                with files.named(self._path):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, local.metadata().encode(), 0)
                self.is_leader = True
                async with task_group() as group:
                    group.create_task(self._fetch(local))
                    group.create_task(self._map(local.metadata()))
            finally:
                self.is_leader = False
                with suppress(OSError):  # what is left is not locked, so it is nothing
                    self._path.unlink()

    async def _fetch(self, local: HTTPTransport[State]) -> None:
        """Publish each step of the sender to this host."""
        async with _open(HTTPTransport(auth=self._auth, swarm=self._swarm)) as remote:
            while True:
                await self._refresh(remote, local)
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _refresh(
        self, remote: HTTPTransport[State], local: HTTPTransport[State]
    ) -> None:
        """Publish the newest step, and then each further one that has its layout.

        Raises:
            StateDictError: the newest step is none that can be received.
        """
        first = remote.follow(self._metadata, full=self._full)
        async with aclosing(first) as newest:
            step, mirror = await anext(newest)
        await _publish(local, step, mirror)
        steps = remote.follow(
            self._metadata,
            after=step,
            into=mirror,
            have=True,
            full=self._full,
            prepare=True,
        )
        # A step of another layout does not fit the mirror: its caller begins again.
        with suppress(StateDictError):
            async with aclosing(steps):
                async for prepared in steps:
                    await prepared.apply_async()
                    await _publish(local, prepared.step, mirror)

    async def _map(self, leader: str) -> None:
        """Map each step that the leader publishes, until the leader is gone."""
        receive = Receive(reconnect_timeout=_LEADER_TIMEOUT_S)
        try:
            async with _open(HTTPTransport(receive=receive)) as here:
                steps = here.follow(
                    leader, share=True, reconnect_timeout=_LEADER_TIMEOUT_S
                )
                async with aclosing(steps):
                    async for step, state in steps:
                        self.step, self._state = step, state
                        self._news.notify()
        except AuthenticationError as error:  # another process has the port now
            raise TransportError(str(error)) from error


def _is_final(error: AiockptError) -> bool:
    """Return whether no further attempt can mend an error."""
    if isinstance(error, AuthenticationError):
        return error.by_sender  # a proxy may refuse a request, and pass the next one
    return Advice.MISUSE in advice(error)


@asynccontextmanager
async def _open(transport: HTTPTransport[State]) -> AsyncIterator[HTTPTransport[State]]:
    """Shut a transport down after the block, and wait for it though cancelled."""
    try:
        yield transport
    finally:
        # A cancelled scope of anyio repeats its cancel, which would end the wait.
        with anyio.CancelScope(shield=True):
            await transport.shutdown(wait=False)


async def _publish(local: HTTPTransport[State], step: int, state: State) -> None:
    """Publish a step to this host.

    Raises:
        TransportError: the sender went back to an earlier step. The processes follow
            only later steps of one leader, so there must be another one.
    """
    last = local.statistics().step
    if last is not None and step <= last:
        raise TransportError(f"the sender went back from step {last} to step {step}")
    await local.send_checkpoint(step=step, state_dict=state)


def _default_place() -> Path:
    return Path(tempfile.gettempdir()) / f"aiockpt-{os.getuid()}"


def _make_private(place: Path) -> None:
    """Make a directory for this user alone, or check that it is one.

    Raises:
        StorageError: others can write to it, or own it.
    """
    with files.named(place):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StorageError(str(place), "it is not a directory of this user")
    if found.st_mode & 0o077:
        raise StorageError(str(place), "others can enter it: chmod 700 it")
