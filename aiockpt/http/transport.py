"""HTTPTransport: a checkpoint served to, and fetched from, peers over HTTP."""

from __future__ import annotations

import os
import ssl
import time
from functools import partial
from typing import Self

import aiohttp

from aiockpt.format.limits import Limits
from aiockpt.http.auth import find_credentials
from aiockpt.http.client import CheckpointClient, ClientConfig
from aiockpt.http.handlers import CheckpointService
from aiockpt.http.offering import Offering
from aiockpt.http.protocol import format_metadata
from aiockpt.http.receiver import Receiver
from aiockpt.http.security import Security
from aiockpt.http.server import EndpointConfig
from aiockpt.http.server_process import ProcessOptions, Server, endpoint_for
from aiockpt.http.statistics import TransportStatistics, survey
from aiockpt.memory.arena import CAN_LEND, WarmArena
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.transfer.stager import Stager, StagerOptions
from aiockpt.transport import T, Timeout, seconds

__all__ = ["HTTPTransport"]

_THREADS = 2
_CONCURRENCY = min(4, os.cpu_count() or 4)
_CLOSING = 5.0  # for what is under way, and then for the threads


class HTTPTransport(Receiver[T]):
    """Serves the last checkpoint that was sent, and receives from its like.

    Use it as an async context manager, or call :meth:`start` and :meth:`shutdown`.
    It both sends and receives, and belongs to the loop that first used it: a call on
    another one raises ``LocalProtocolError``.

    Args:
        timeout: Default deadline of a send or a receive, and the longest time that
            an early request waits for its step.
        num_chunks: If not 0, how many ranges travel at once; the two ends need not
            agree (the name is torchft's).
        host, port: Where to listen: None is every interface, and 0 any free port.
        advertise: Host to tell the peers, or the whole base URL where a reverse
            proxy or an app of your own serves the routes.
        interface: Network interface whose address to tell. Without either, the
            variables ``AIOCKPT_IFNAME``, ``GLOO_SOCKET_IFNAME`` and
            ``NCCL_SOCKET_IFNAME`` are asked, then the routing table.
        chunk_bytes: Bytes of a chunk of what is sent, a multiple of 64.
        max_concurrency: How many ranges are fetched at once from each source; by
            default 4 at most.
        max_readers: How many bodies are served at once; more are told to come back.
        stall_timeout: Seconds without a byte after which either side gives up on a
            connection.
        reconnect_timeout: Seconds for which a receive tries to reach a peer that no
            longer answers; 0 raises at once.
        grace: Seconds that readers get when a checkpoint is retracted.
        keep_superseded: How many snapshots stay, after a newer one was published, for
            the receivers that have begun to read them; each takes as much memory as a
            checkpoint, only while it is read. If more are being read, those that have
            been read longest stay, and the other receivers must begin anew.
        token: One that both ends know, instead of a random one in the metadata;
            ``AIOCKPT_TOKEN`` and ``AIOCKPT_TOKEN_PATH`` stand in for it.
        insecure: Let anybody read.
        ssl_context, client_ssl_context: Serve TLS with it, and verify peers with it.
        session: A ``ClientSession`` of the caller, which is used and never closed.
        security: A key that authenticates manifests, and whom to connect to.
        limits: What a receive accepts.
        zero_copy: Serve contiguous host tensors from their own memory, under the
            lock, instead of a copy: mutate them only after ``disallow_checkpoint``.
        same_host: Lend what is sent to processes of this user on this host, which then
            take the memory instead of a copy through a socket. None takes what others
            lend, and lends nothing: memory that can be lent is slower when it is new.
            False does neither.
        allow_pickle: Let leaves that nothing else carries travel as pickles, which
            run code when they are received. Both ends must say so.
        keep_arena: Keep the memory of one receive for the next one, once none of its
            tensors lives: what was touched before is faster to receive into.
        server: ``"process"`` serves from a process of its own, which a busy trainer
            cannot slow down, nor it the trainer. It is started with the transport,
            replaced if it dies, and serves from the memory that was staged into.
            Without ``ssl_context`` and ``zero_copy`` only.
        keep_last: Seconds for which that process outlives a trainer that dies, after
            its last request, so that a successor can fetch what was offered last from
            the same URL. An orderly end ends it at once.
        server_nice: Added to its niceness: 19 for what the trainer leaves of the cores,
            0 for as much as any other thread has.
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
        max_concurrency: int = _CONCURRENCY,
        max_readers: int = 256,
        stall_timeout: float = 10.0,
        reconnect_timeout: float = 10.0,
        grace: float = 5.0,
        keep_superseded: int = 1,
        token: str | None = None,
        insecure: bool = False,
        ssl_context: ssl.SSLContext | None = None,
        client_ssl_context: ssl.SSLContext | None = None,
        session: aiohttp.ClientSession | None = None,
        security: Security = Security(),  # noqa: B008 - frozen
        limits: Limits = Limits(),  # noqa: B008 - frozen
        zero_copy: bool = False,
        same_host: bool | None = None,
        allow_pickle: bool = False,
        keep_arena: bool = False,
        server: Server = "loop",
        keep_last: float = 0.0,
        server_nice: int = 19,
    ) -> None:
        try:
            credentials = find_credentials(token, insecure=insecure, env=os.environ)
        finally:
            del token  # a traceback with local variables would show it
        self._credentials = credentials
        self._timeout, self._limits = seconds(timeout), limits
        self._same_host, lends = same_host, bool(same_host) and CAN_LEND
        self._bridge = Bridge(threads=_THREADS, name="aiockpt")
        self._lifetime = Lifetime("the transport")
        self._allow_pickle = allow_pickle
        self._warm = WarmArena() if keep_arena else None
        config = EndpointConfig(
            host=host,
            port=port,
            advertise=advertise,
            interface=interface,
            ssl_context=ssl_context,
            token=self._credentials.token,
            timeout=self._timeout,
            stall_timeout=stall_timeout,
            max_readers=max_readers,
            keep_superseded=keep_superseded,
            manifest_key=security.key,
        )
        process = ProcessOptions(keep_last, server_nice, lends)
        self._endpoint = endpoint_for(
            server, config, self._bridge, process, zero_copy=zero_copy
        )
        stager = Stager(
            self._bridge,
            threads=_THREADS,
            chunk_bytes=chunk_bytes,
            zero_copy=zero_copy,
            allow_pickle=allow_pickle,
            limits=limits,
            options=StagerOptions(shared=lends or server != "loop"),
        )
        self._offering = Offering(stager, self._endpoint, grace=grace)
        self._client = CheckpointClient(
            ClientConfig(
                max_concurrency=num_chunks or max_concurrency,
                stall_timeout=stall_timeout,
                connect_timeout=stall_timeout,
                reconnect_timeout=reconnect_timeout,
                token=self._credentials.to_send,
                limits=limits,
                ssl_context=client_ssl_context,
                security=security,
            ),
            session=session,
            run=self._bridge.run,
        )

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<HTTPTransport step={now.step} readers={now.readers}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    def statistics(self) -> TransportStatistics:
        """Return what is offered, what was served and what works, as one record."""
        return survey(self._endpoint, self._bridge)

    def metadata(self) -> str:
        """Return the URL to fetch from, with the token in its fragment.

        It works as soon as the transport exists; where ``host`` is a name, from the end
        of :meth:`start` on, which looks the name up beside the event loop. Raises
        ``ClosedError`` after :meth:`shutdown`, ``LocalProtocolError`` before such a
        name was looked up, and ``OSError`` when the address cannot be bound.
        """
        return format_metadata(self.address(), self._credentials.in_metadata)

    def grant(
        self, receiver: str, *, step: int | None = None, lifetime: Timeout = 3600.0
    ) -> str:
        """Return metadata with a token for one receiver, to hand out instead.

        Args:
            receiver: A name for the audit log, such as a rank.
            step: The only step that it may fetch; None: all.
            lifetime: For how long, by this host's clock; see :func:`.make_token`.

        Raises:
            LocalProtocolError: the transport is ``insecure`` and asks for no token.
            ValueError: a name that cannot be written.
        """
        expires = time.time() + seconds(lifetime)
        token = self._credentials.granted(receiver, step=step, expires=expires)
        return format_metadata(self.address(), token)

    def address(self) -> str:
        """Return the base URL without the token, for logs and people."""
        self._lifetime.check()
        return self._endpoint.url()

    async def start(self) -> None:
        """Start serving; does nothing when it serves already or is mounted in an app.

        Raises:
            ClosedError: after :meth:`shutdown`.
            OSError: the address cannot be bound; the message names it.
        """
        with self._lifetime.call():
            await self._endpoint.start()

    def mount(self, prefix: str) -> CheckpointService:
        """Return the handlers for an application that serves them below ``prefix``.

        From then on no socket of our own is opened; see :func:`aiockpt.http.setup`.
        Raises ``LocalProtocolError`` when it serves on a socket of its own already.
        """
        self._lifetime.check()
        return self._endpoint.mount(prefix)

    async def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: Timeout | None = None,
    ) -> None:
        """Stage ``state_dict`` and offer it as ``step``; peers come and fetch it.

        Whoever holds the metadata may fetch, and begin at once. If this fails, those
        who wait for ``step`` are told: as many as there are ``dst_ranks``, or all.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; what was offered stays.
            StagingError: a copy failed.
            StepNotFoundError: :meth:`disallow_checkpoint` was called meanwhile.
            TransferTimeoutError: staging took longer than ``timeout``.
            ClosedError: after :meth:`shutdown`.
        """
        limit = self._timeout if timeout is None else seconds(timeout)
        deadline = Deadline(limit, stop="stage", what=f"step {step}")
        with self._lifetime.call():
            await self._offering.offer(state_dict, step, deadline, len(dst_ranks))

    async def allow_checkpoint(self, step: int) -> None:
        """Offer what was sent last as ``step``, without staging it again.

        Raises:
            StepNotFoundError: nothing is offered; send first.
        """
        with self._lifetime.call():
            await self._offering.rename(step)

    async def disallow_checkpoint(self) -> None:
        """Stop offering; readers get the grace, then their connections are cut.

        A send that is under way is not waited for: it offers nothing, and raises
        ``StepNotFoundError``.
        """
        self._lifetime.bind()
        await self._offering.withdraw()

    async def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Stop serving and close everything; ``wait=False`` gives readers no grace.

        Calls under way fail. If cancelled, the closing goes on by itself.
        """
        self._lifetime.bind()
        if self._lifetime.closed and not wait:
            await self._offering.withdraw(grace=0.0)  # cut the grace of another call
        self._bridge.refuse()
        await self._lifetime.end(
            partial(self._offering.close, grace=None if wait else 0.0),
            self._endpoint.stop,
            self._client.aclose,
            partial(self._lifetime.calls_ended, timeout=_CLOSING),
            self._keep_nothing,
            partial(self._bridge.aclose, timeout=_CLOSING),
        )

    async def _keep_nothing(self) -> None:
        if self._warm is not None:
            self._bridge.post(self._warm.close)
