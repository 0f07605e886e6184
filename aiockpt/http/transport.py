"""HTTPTransport: a checkpoint served to, and fetched from, peers over HTTP."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TypeVar, cast
from urllib.parse import urlsplit

import aiohttp
import anyio

from aiockpt._bridge import Bridge
from aiockpt._deadline import Deadline
from aiockpt._device import port_for
from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    StepNotFoundError,
)
from aiockpt.http.client import CheckpointClient, ClientConfig
from aiockpt.http.credentials import find_credentials
from aiockpt.http.handlers import CheckpointService
from aiockpt.http.listen import advertised_address, open_sockets, url_host
from aiockpt.http.receive import Receive, ReceiveOptions
from aiockpt.http.server import CheckpointServer, ServerConfig
from aiockpt.http.shelf import Shelf
from aiockpt.observe import Progress, TransferEvent, emit
from aiockpt.staging import Snapshot, Stager
from aiockpt.transport import CheckpointTransport, Timeout, seconds
from aiockpt.wire.http import format_metadata, parse_metadata
from aiockpt.wire.limits import Limits

__all__ = ["HTTPTransport"]

T = TypeVar("T")

logger = logging.getLogger("aiockpt")

_THREADS = 2
_PREFIX = "/checkpoint"
_DEFAULT_WAIT = 5.0


class HTTPTransport(CheckpointTransport[T]):
    """Serves the last checkpoint that was sent, and receives from its like.

    Use it as an async context manager, or call :meth:`start` and :meth:`shutdown`.
    One transport both sends and receives; it belongs to the loop that first used it.

    Args:
        timeout: Default deadline of a send or a receive, and the longest time that
            an early request waits for its step.
        num_chunks: If not 0, how many ranges travel at once; the two ends need not
            agree (the name is torchft's).
        host: Address to bind; None binds every interface.
        port: Port to bind; 0 takes a free one.
        advertise: Host to tell the peers, or the whole base URL where a reverse
            proxy or an app of your own serves the routes.
        interface: Network interface whose address to tell. Without either, the
            variables ``AIOCKPT_IFNAME``, ``GLOO_SOCKET_IFNAME`` and
            ``NCCL_SOCKET_IFNAME`` are asked, then the routing table.
        chunk_bytes: Bytes of a chunk of what is sent, a multiple of 64.
        max_concurrency: How many ranges are fetched at once.
        max_readers: How many bodies are served at once; more are told to come back.
        stall_timeout: Seconds without a byte after which either side gives up on a
            connection.
        reconnect_timeout: Seconds for which a receive tries to reach a peer that no
            longer answers; 0 raises at once.
        grace: Seconds that readers get when a checkpoint is retracted.
        token: A secret that both ends know, instead of a capability in the metadata;
            ``AIOCKPT_TOKEN`` and ``AIOCKPT_TOKEN_PATH`` stand in for it.
        insecure: Let anybody read.
        ssl_context: Serve TLS with it.
        client_ssl_context: Verify (and answer) TLS peers with it.
        session: A ``ClientSession`` of the caller, which is used and never closed.
        limits: What a receive accepts.
        zero_copy: Serve contiguous host tensors from their own memory, under the
            lock, instead of a copy: mutate them only after ``disallow_checkpoint``.
        allow_pickle: Let leaves that nothing else carries travel as pickles, which
            run code when they are received. Both ends must say so.
        fast_path: Receive bodies straight into memory where the connection allows.
    """

    def __init__(
        self,
        timeout: Timeout = 60.0,
        num_chunks: int = 0,
        *,
        host: str | None = None,
        port: int = 0,
        advertise: str | None = None,
        interface: str | None = None,
        chunk_bytes: int = 16 << 20,
        max_concurrency: int = 4,
        max_readers: int = 1024,
        stall_timeout: float = 10.0,
        reconnect_timeout: float = 10.0,
        grace: float = 5.0,
        token: str | None = None,
        insecure: bool = False,
        ssl_context: ssl.SSLContext | None = None,
        client_ssl_context: ssl.SSLContext | None = None,
        session: aiohttp.ClientSession | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        zero_copy: bool = False,
        allow_pickle: bool = False,
        fast_path: bool = True,
    ) -> None:
        self._timeout = seconds(timeout)
        self._insecure = insecure
        self._credentials = find_credentials(token, insecure=insecure, env=os.environ)
        if insecure:
            logger.warning("insecure=True: whoever reaches the port may read")
        self._bind = (host, port)
        self._advertise, self._interface = advertise, interface
        self._scheme = "https" if ssl_context else "http"
        self._ssl_context = ssl_context
        self._grace = grace
        self._max_readers = max_readers
        self._stall_timeout = stall_timeout
        self._limits = limits
        self._allow_pickle = allow_pickle
        self._bridge = Bridge(threads=_THREADS, name="aiockpt")
        self._stager = Stager(
            self._bridge,
            threads=_THREADS,
            chunk_bytes=chunk_bytes,
            zero_copy=zero_copy,
            allow_pickle=allow_pickle,
            limits=limits,
        )
        self._client = CheckpointClient(
            ClientConfig(
                max_concurrency=num_chunks or max_concurrency,
                stall_timeout=stall_timeout,
                connect_timeout=stall_timeout,
                reconnect_timeout=reconnect_timeout,
                token=self._credentials.token if self._credentials.shared else None,
                limits=limits,
                ssl_context=client_ssl_context,
                fast_path=fast_path,
            ),
            session=session,
            run=self._bridge.run,
        )
        self._shelf = Shelf()
        self._sending = anyio.Lock()
        self._sockets: list[socket.socket] = []
        self._server: CheckpointServer | None = None
        self._staged: Snapshot | None = None
        self._mounted = False
        self._closed = False

    def __repr__(self) -> str:
        now = self._shelf.statistics()
        return f"<HTTPTransport step={now.step} readers={now.readers}>"

    async def __aenter__(self) -> HTTPTransport[T]:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown(wait=error is None)

    def metadata(self) -> str:
        """Return the URL to fetch from, with the capability in its fragment.

        It works as soon as the transport exists: an early peer waits.

        Raises:
            ClosedError: after :meth:`shutdown`.
            OSError: the address cannot be bound.
        """
        return format_metadata(self._base_url(), self._credentials.in_metadata)

    def address(self) -> str:
        """Return the base URL without credentials, for logs and people."""
        return self._base_url()

    async def start(self) -> None:
        """Start serving; does nothing when it serves already or is mounted in an app.

        Raises:
            ClosedError: after :meth:`shutdown`.
            OSError: the address cannot be bound; the message names it.
        """
        self._listen()
        if self._server is None and not self._mounted:
            self._server = CheckpointServer(self._shelf, self._server_config())
            await self._server.start(self._sockets, ssl_context=self._ssl_context)

    async def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: Timeout | None = None,
    ) -> None:
        """Stage ``state_dict`` and offer it as ``step``; peers come and fetch it.

        ``dst_ranks`` is not needed here: whoever holds the metadata may fetch.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; what was offered stays.
            StagingError: a copy failed.
            TransferTimeoutError: staging took longer than ``timeout``.
        """
        limit = self._timeout if timeout is None else seconds(timeout)
        started = time.monotonic()
        async with Deadline(limit, stop="stage") as deadline:
            await self.start()
            async with self._sending:
                snapshot = await self._stager.stage(state_dict, step=step)
                deadline.stop = "publish"
                await self._publish(snapshot)
        nbytes, elapsed = snapshot.manifest.segment_bytes, time.monotonic() - started
        emit(TransferEvent(stop="publish", step=step, nbytes=nbytes, seconds=elapsed))

    async def allow_checkpoint(self, step: int) -> None:
        """Offer what was sent last as ``step``, without staging it again.

        Raises:
            StepNotFoundError: nothing is offered; send first.
        """
        async with self._sending:
            offered = self._shelf.latest
            if offered is None or self._staged is None:
                raise StepNotFoundError(step)
            if offered.step != step:
                await self._publish(await self._stager.relabel(self._staged, step=step))

    async def disallow_checkpoint(self) -> None:
        """Stop offering; readers get the grace, then their connections are cut."""
        retracted = self._shelf.latest
        await self._shelf.retract(grace=self._grace)
        self._stager.trim()
        if retracted is not None:
            emit(TransferEvent(stop="retract", step=retracted.step))

    async def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: Timeout | None = None,
        *,
        into: T | None = None,
        direct: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> T:
        """Fetch ``step`` from the transport that ``metadata`` names.

        Waits for a step that is not there yet, resumes after broken connections, and
        returns only bytes whose digests matched the manifest.

        Args:
            src_rank: Not needed here; named in events.
            metadata: What the sender's :meth:`metadata` returned.
            step: The step that the sender was given.
            timeout: Deadline of the whole call, in seconds or as a ``timedelta``.
            into: A state dict whose tensors are filled; it is checked before a byte
                moves, and touched only when everything has been verified.
            direct: With ``into``: receive straight into its memory. A receive that
                fails then says in a note whether the template was modified.
            progress: Called with :class:`Progress` as bytes arrive.

        Raises:
            TransferTimeoutError: the deadline passed.
            StepNotFoundError: a newer step has taken its place.
            TemplateMismatchError: ``into`` does not fit.
            TransportError, ProtocolError, AuthenticationError: see the error tree.
        """
        if self._closed:
            raise ClosedError("the transport")
        source = parse_metadata(metadata)
        limit = self._timeout if timeout is None else seconds(timeout)
        deadline = Deadline(limit, stop="fetch_manifest")
        options = ReceiveOptions(
            into=into,
            direct=direct,
            progress=progress,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            ports=port_for,
        )
        receive = Receive(self._client, self._bridge, options, deadline)
        started = time.monotonic()
        try:
            async with deadline:
                state, manifest = await receive.run(source, step)
        except AiockptError as error:
            receive.annotate(error)
            raise
        emit(
            TransferEvent(
                stop="recv",
                step=step,
                peer=source.base_url,
                nbytes=manifest.segment_bytes,
                seconds=time.monotonic() - started,
                level=logging.INFO,
            )
        )
        return cast("T", state)

    async def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Stop serving and close everything; ``wait=False`` gives readers no grace."""
        if self._closed:
            return
        self._closed = True
        async with AsyncExitStack() as closing:  # every line runs, whatever one raises
            closing.callback(self._bridge.close, wait=wait)
            closing.callback(self._stager.trim)
            closing.push_async_callback(self._client.aclose)
            for each in self._sockets:
                closing.callback(each.close)
            if self._server is not None:
                closing.push_async_callback(self._server.stop)
            closing.push_async_callback(self._shelf.close)
            await self._shelf.retract(grace=self._grace if wait else 0.0)

    def mount(self, prefix: str) -> CheckpointService:
        """Return the handlers for an application that serves them below ``prefix``.

        From then on no socket of our own is opened; see :func:`aiockpt.http.setup`.
        """
        self._mounted = True
        return CheckpointService(self._shelf, self._server_config(prefix))

    def _server_config(self, prefix: str = _PREFIX) -> ServerConfig:
        host = urlsplit(self._advertise or "").hostname or self._advertise
        return ServerConfig(
            token=self._credentials.token,
            insecure=self._insecure,
            stall_timeout=self._stall_timeout,
            default_wait=min(self._timeout, _DEFAULT_WAIT),
            max_wait=max(self._timeout, _DEFAULT_WAIT),
            max_readers=self._max_readers,
            hosts=frozenset({host} if host else ()),
            prefix=prefix,
        )

    def _listen(self) -> None:
        if self._closed:
            raise ClosedError("the transport")
        if not self._sockets and not self._mounted:
            self._sockets = open_sockets(*self._bind)

    def _base_url(self) -> str:
        if self._advertise and "://" in self._advertise:
            return self._advertise.rstrip("/") + "/"
        if self._mounted:
            raise LocalProtocolError(
                "mounted in an application, the transport does not know its address: "
                'pass advertise="https://host/prefix/"'
            )
        self._listen()
        host = advertised_address(
            advertise=self._advertise,
            interface=self._interface,
            host=self._bind[0],
            env=os.environ,
        )
        port = self._sockets[0].getsockname()[1]
        return f"{self._scheme}://{url_host(host)}:{port}{_PREFIX}/"

    async def _publish(self, snapshot: Snapshot) -> None:
        """Offer a snapshot; from now on the shelf holds it, and we know which it is."""
        self._staged = snapshot
        try:
            await self._shelf.publish(snapshot, grace=self._grace)
        finally:
            snapshot.release()
