"""HTTPTransport: a checkpoint served to, and fetched from, peers over HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Self

from aiockpt.http.auth import find_credentials
from aiockpt.http.client import CheckpointClient, ClientConfig
from aiockpt.http.handlers import CheckpointService
from aiockpt.http.offering import Offering
from aiockpt.http.options import Auth, Receive, Server, require_type
from aiockpt.http.protocol import format_metadata
from aiockpt.http.receiver import Receiver
from aiockpt.http.security import Security
from aiockpt.http.server import EndpointConfig
from aiockpt.http.server_process import endpoint_for
from aiockpt.http.statistics import TransportStatistics, survey
from aiockpt.memory.arena import CAN_LEND, ArenaPool
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.transfer.stager import Stager, StagerOptions
from aiockpt.transport import REQUIRED, T, Timeout, require_given, seconds

__all__ = ["HTTPTransport"]

_THREADS = 2
_CLOSING = 5.0  # for what is under way, and then for the threads


class HTTPTransport(Receiver[T]):
    """Serves the last checkpoint that was sent, and receives from its like.

    Use it as an async context manager, or call :meth:`start` and :meth:`shutdown`.
    It both sends and receives, and belongs to the loop that first used it: a call on
    another one raises ``LocalProtocolError``.

    Args:
        timeout: Default deadline of a send or a receive, and the longest time that
            an early request waits for its step.
        advertise: The host that the metadata names, or the whole base URL where a
            reverse proxy or an app of your own serves the routes.
        server: Where and how to serve.
        auth: Who may read, and which senders to trust.
        receive: What to accept, and how to fetch.
        same_host: Lend what is sent to processes of this user on this host, which then
            take the memory instead of a copy through a socket. None takes what others
            lend, and lends nothing, because memory that can be lent is slower when it
            is new. False does neither.
        stall_timeout: Seconds without a byte after which either side gives up on a
            connection.
        chunk_bytes: Bytes of a chunk of what is sent, a multiple of 64.
        zero_copy: Serve contiguous host tensors from their own memory, under the
            lock, instead of a copy. Mutate them only after ``disallow_checkpoint``.
        allow_pickle: Let leaves that nothing else carries travel as pickles, which
            run code when they are received. Both ends must say so.
    """

    def __init__(
        self,
        timeout: Timeout = 60.0,
        *,
        advertise: str | None = None,
        server: Server = Server(),  # noqa: B008 - frozen
        auth: Auth = Auth(),  # noqa: B008 - frozen
        receive: Receive = Receive(),  # noqa: B008 - frozen
        same_host: bool | None = None,
        stall_timeout: float = 10.0,
        chunk_bytes: int = 16 << 20,
        zero_copy: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        require_type(Server, server=server)
        require_type(Auth, auth=auth)
        require_type(Receive, receive=receive)
        self._credentials = find_credentials(
            auth.token, insecure=auth.insecure, env=os.environ
        )
        security = Security(manifest_key=auth.manifest_key, peers=auth.peers)
        self._timeout, self._limits = seconds(timeout), receive.limits
        self._same_host, lends = same_host, bool(same_host) and CAN_LEND
        self._bridge = Bridge(threads=_THREADS, name="aiockpt")
        self._lifetime = Lifetime("the transport")
        self._allow_pickle = allow_pickle
        self._warm = ArenaPool(keep=1, staging=False) if receive.keep_arena else None
        config = EndpointConfig(
            options=server,
            advertise=advertise,
            ssl_context=auth.ssl_context,
            token=self._credentials.token,
            manifest_key=security.key,
            timeout=self._timeout,
            stall_timeout=stall_timeout,
            lends=lends,
        )
        self._endpoint = endpoint_for(config, self._bridge, zero_copy=zero_copy)
        stager = Stager(
            self._bridge,
            threads=_THREADS,
            chunk_bytes=chunk_bytes,
            zero_copy=zero_copy,
            allow_pickle=allow_pickle,
            limits=receive.limits,
            options=StagerOptions(shared=lends or server.process),
        )
        self._offering = Offering(stager, self._endpoint, grace=server.grace)
        self._client = CheckpointClient(
            ClientConfig(
                max_concurrency=receive.connections,
                stall_timeout=stall_timeout,
                connect_timeout=stall_timeout,
                reconnect_timeout=receive.reconnect_timeout,
                token=self._credentials.to_send,
                limits=receive.limits,
                ssl_context=auth.client_ssl_context,
                security=security,
            ),
            session=receive.session,
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
        dst_ranks: Sequence[int] = (),
        step: int = REQUIRED,
        state_dict: T = REQUIRED,
        timeout: Timeout | None = None,
    ) -> None:
        """Stage ``state_dict`` and offer it as ``step``; peers come and fetch it.

        Whoever holds the metadata may fetch, and begin at once. When it returns, the
        caller may change the state dict. If this fails, those who wait for ``step``
        are told: as many as there are ``dst_ranks``, or all. If cancelled, what was
        offered stays.

        Args:
            dst_ranks: Means nothing over HTTP.
            step: The number of the checkpoint.
            state_dict: What to send.
            timeout: Deadline of the call, in seconds or as a ``timedelta``.

        Raises:
            UnsupportedLeafError: a leaf cannot travel; what was offered stays.
            StagingError: a copy failed.
            StepNotFoundError: :meth:`disallow_checkpoint` was called meanwhile.
            TransferTimeoutError: staging took longer than ``timeout``.
            ClosedError: after :meth:`shutdown`.
        """
        require_given("send_checkpoint", step=step, state_dict=state_dict)
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
