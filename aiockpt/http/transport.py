"""HTTPTransport: a checkpoint served to, and fetched from, peers over HTTP."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Sequence,
)
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self, cast

import anyio
import msgspec

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    StepNotFoundError,
    TransportError,
)
from aiockpt.events import Progress, TransferEvent, emit
from aiockpt.http.auth import find_credentials
from aiockpt.http.client import CheckpointClient
from aiockpt.http.handlers import CheckpointService, ServerConfig
from aiockpt.http.listen import Endpoint
from aiockpt.http.manifests import PATIENCE, SUPERSEDED, Steps, chase
from aiockpt.http.options import Auth, Receive, Server, require_type
from aiockpt.http.peers import Peers, origins_of
from aiockpt.http.protocol import Lease, Origin, format_metadata, parse_metadata
from aiockpt.http.server import CheckpointServer
from aiockpt.http.server_process import ServerProcess
from aiockpt.http.source import HttpSource, Sharing
from aiockpt.http.store import Failure, Store
from aiockpt.memory.arena import CAN_LEND, ArenaPool
from aiockpt.memory.device import port_for
from aiockpt.runtime.bridge import Bridge, BridgeStatistics
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.state.selection import Select, listed
from aiockpt.transfer.destination import Terms
from aiockpt.transfer.receive import Received, ReceiveOptions
from aiockpt.transfer.receive import receive as receive_from
from aiockpt.transfer.repeats import Repeats, content_of
from aiockpt.transfer.stager import Snapshot, Stager, StagerOptions
from aiockpt.transport import (
    REQUIRED,
    CheckpointTransport,
    T,
    Timeout,
    exact_step,
    require_given,
    seconds,
)

__all__ = ["HTTPTransport", "TransportStatistics"]

_THREADS = 2
_DEFAULT_WAIT = 5.0  # seconds for which a server waits for a step
_CLOSING = 5.0  # for what is under way, and then for the threads


class TransportStatistics(NamedTuple):
    """The state of a transport at one moment; counters count from its beginning.

    Attributes:
        step: The published step; None if there is none.
        readers: Bodies that are being sent, of any checkpoint.
        oldest_reader: Seconds since the oldest of them began.
        superseded: Checkpoints that were replaced and are still being read.
        waiting: Requests that wait for a step.
        requests: Requests that came.
        refused: Requests that were answered with an error.
        bytes_sent: Bytes of bodies that were sent.
        gone: Bodies whose client left, or whose connection broke.
        stalled: Bodies that were aborted because nothing moved.
        evicted: Readers that were cut off when their grace was over.
        lent: Checkpoints that processes of this host took as memory.
        threads: The calls in the threads that stage, verify and load.
    """

    step: int | None
    readers: int
    oldest_reader: float
    superseded: int
    waiting: int
    requests: int
    refused: int
    bytes_sent: int
    gone: int
    stalled: int
    evicted: int
    lent: int
    threads: BridgeStatistics


class HTTPTransport(CheckpointTransport[T]):
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
        self._timeout, self._limits = seconds(timeout), receive.limits
        self._same_host, lends = same_host, bool(same_host) and CAN_LEND
        self._bridge = Bridge(threads=_THREADS, name="aiockpt")
        self._lifetime = Lifetime("the transport")
        self._allow_pickle = allow_pickle
        self._warm = ArenaPool(keep=1, staging=False) if receive.keep_arena else None
        tls, token = auth.ssl_context, self._credentials.token
        self._endpoint = Endpoint(server, advertise=advertise, tls=tls is not None)
        config = ServerConfig(
            options=server,
            token=token,
            insecure=token is None,
            stall_timeout=stall_timeout,
            default_wait=min(self._timeout, _DEFAULT_WAIT),
            max_wait=max(self._timeout, _DEFAULT_WAIT),
            hosts=self._endpoint.hosts(),
            manifest_key=auth.key,
            lends=lends,
            incarnation=secrets.token_hex(16),
        )
        _check_together(server, auth, zero_copy=zero_copy)
        self._server: CheckpointServer | ServerProcess
        self._store: Store | ServerProcess
        if server.process:
            self._server = self._store = ServerProcess(config, self._bridge)
        else:
            self._server = CheckpointServer(config, self._bridge, ssl_context=tls)
            self._store = self._server.store
        self._grace = server.grace
        self._turn = anyio.Lock()  # one send at a time
        self._offered: Snapshot | None = None
        self._repeats = Repeats("publication")
        self._stager = Stager(
            self._bridge,
            StagerOptions(
                threads=_THREADS,
                chunk_bytes=chunk_bytes,
                limits=receive.limits,
                allow_pickle=allow_pickle,
                zero_copy=zero_copy,
                shared=lends or server.process,
            ),
        )
        self._client = CheckpointClient(
            receive,
            replace(auth, token=self._credentials.to_send),
            stall_timeout=stall_timeout,
            bridge=self._bridge,
        )

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<HTTPTransport step={now.step} readers={now.readers}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    def statistics(self) -> TransportStatistics:
        """Return what is offered, what was served and what works, as one record."""
        store, served, lent = msgspec.structs.astuple(self._server.counters())
        return TransportStatistics(
            step=store.step,
            readers=store.readers,
            oldest_reader=store.oldest_reader,
            superseded=store.superseded,
            waiting=served.waiting,
            requests=served.requests,
            refused=served.refused,
            bytes_sent=served.bytes_sent,
            gone=served.gone,
            stalled=served.stalled,
            evicted=store.evicted,
            lent=lent,
            threads=self._bridge.statistics(),
        )

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
            await self._serve()

    async def _serve(self) -> None:
        """Serve, unless an application does; idempotent.

        If cancelled, the address stays ours, and a receiver that connects waits for a
        later start. A server process starts nevertheless.
        """
        self._endpoint.check()
        if not self._endpoint.is_mounted:
            await self._endpoint.prepare(self._bridge)
        self._endpoint.check()
        if not self._endpoint.is_mounted:
            await self._server.start(self._endpoint.listen())

    def mount(self, prefix: str) -> CheckpointService:
        """Return the handlers for an application that serves them below ``prefix``.

        From then on no socket of our own is opened; see :func:`aiockpt.http.setup`.
        Raises ``LocalProtocolError`` when it serves on a socket of its own already.
        """
        self._lifetime.check()
        service = self._server.mount()
        self._endpoint.mount(prefix)
        return service

    async def send_checkpoint(
        self,
        dst_ranks: Sequence[int] = (),
        step: int = REQUIRED,
        state_dict: T = REQUIRED,
        timeout: Timeout | None = None,
    ) -> None:
        """Stage ``state_dict`` and offer it as ``step``; peers come and fetch it.

        Whoever holds the metadata may fetch, and begin at once. When it returns, the
        caller may change the state dict. If this fails, the receivers that wait for
        ``step`` are told: as many of them as there are ``dst_ranks``, or all. If
        cancelled, the earlier offer stays.

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
        limit, began = self._limit(timeout), time.monotonic()
        deadline = Deadline(limit, stop="stage", what=f"step {step}")
        with self._lifetime.call():
            step, before = exact_step(step), self._store.retractions
            self._store.fail(None)
            try:
                async with deadline:
                    # Within the call, so that a withdrawal wins over the start as
                    # well, and waiting receivers are told if that fails.
                    await self._serve()
                    async with self._turn:
                        self._check_offer(step, before)
                        snapshot = await self._stager.stage(state_dict, step=step)
                        deadline.stop = "publish"
                        await self._publish(snapshot, before)
            except BaseException as error:
                if not self._lifetime.closed and self._store.retractions == before:
                    receivers = len(dst_ranks)
                    failure = Failure.of(error, step=step, receivers=receivers)
                    self._store.fail(failure)
                raise
        nbytes, elapsed = snapshot.manifest.segment_bytes, time.monotonic() - began
        event = TransferEvent(stop="publish", step=step, nbytes=nbytes, seconds=elapsed)
        emit(self._repeats.told(event, content_of(snapshot.manifest)))

    async def allow_checkpoint(self, step: int) -> None:
        """Offer what was sent last as ``step``, without staging it again.

        Raises:
            StepNotFoundError: nothing is offered; send first.
        """
        with self._lifetime.call():
            step, before = exact_step(step), self._store.retractions
            async with self._turn:
                self._check_offer(step, before)
                offered = self._offered
                if offered is None:
                    raise StepNotFoundError(step)
                await self._serve()
                if self._store.statistics().step is None:  # its server process has died
                    raise StepNotFoundError(step)
                self._check_offer(step, before)
                if offered.manifest.step == step:
                    return
                offered.acquire()  # a withdrawal must not free it meanwhile
                try:
                    renamed = await self._stager.relabel(offered, step=step)
                finally:
                    offered.release()
                await self._publish(renamed, before)

    async def disallow_checkpoint(self) -> None:
        """Stop offering; readers get the grace, then their connections are cut.

        A send that is under way is not waited for: it offers nothing, and raises
        ``StepNotFoundError``.
        """
        self._lifetime.bind()
        await self._withdraw(self._grace)

    async def _withdraw(self, grace: float) -> None:
        offered, self._offered = self._offered, None
        await self._store.retract(grace=grace)
        self._stager.trim()
        if offered is not None:
            emit(TransferEvent(stop="retract", step=offered.manifest.step))

    async def _publish(self, snapshot: Snapshot, before: int) -> None:
        """Publish a snapshot unless a withdrawal has come since; release it."""
        try:
            self._check_offer(snapshot.manifest.step, before)
            await self._store.publish(snapshot, grace=self._grace)
            self._offered = snapshot
        except StepNotFoundError:
            raise self._overtaken(snapshot.manifest.step) from None
        finally:
            snapshot.release()  # the store has taken a reference of its own

    def _check_offer(self, step: int, before: int) -> None:
        """Raise if a withdrawal or the end has come since ``before``."""
        if self._lifetime.closed or self._store.retractions != before:
            raise self._overtaken(step)

    def _overtaken(self, step: int) -> AiockptError:
        if self._lifetime.closed:
            return ClosedError("the transport")
        error = StepNotFoundError(step)
        error.add_note("the offer was withdrawn while this call was under way")
        return error

    async def recv_checkpoint(
        self,
        src_rank: int = 0,
        metadata: str | Sequence[str] = REQUIRED,
        step: int | None = None,
        timeout: Timeout | None = None,
        *,
        into: T | None = None,
        direct: bool = False,
        have: T | bool | None = None,
        select: Select | None = None,
        share: bool = False,
        verify_shared: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> T:
        """Fetch ``step`` from the transport, or the transports, of ``metadata``.

        Waits for a step that is not there yet, resumes after broken connections, and
        returns only bytes whose digests matched the manifest. The sender keeps the
        snapshot until the receive ends, even if it publishes newer ones meanwhile: see
        its ``keep_superseded``.

        Args:
            src_rank: Means nothing over HTTP.
            metadata: What the sender's :meth:`metadata` returned; or a list of what
                several returned that hold the same checkpoint. Each is asked for a
                share that fits its speed. The first that answers says which
                checkpoint it is. A source that fails for good, sends a wrong chunk, or
                has another checkpoint is dropped, and the receive goes on while one
                is left.
            step: The step that the sender was given. None: what is served now; when the
                sender replaces it meanwhile, the newest is received in its place, and
                ``progress`` begins anew.
            timeout: Deadline of the whole call, in seconds or as a ``timedelta``.
            into: A state dict to fill: its tensors in place, its dicts and lists with
                the other values. It is checked before a byte moves, touched only
                when everything has been verified, and returned.
            direct: With ``into``: receive straight into its memory. A receive that
                fails then says in a note whether the template was modified. What
                accelerators have of it is copied there chunk by chunk, as each is
                fetched and verified, while later ones travel, once the current stream
                has done what it was given before; leave it alone meanwhile. What comes
                from ``have``, or with values of a selection, is copied at the end.
            have: A state dict that holds some of it already, such as an earlier step;
                True: the template is one. Chunks of it that have the right digest are
                not fetched, and with True not even copied. What has another path,
                dtype or shape is fetched. It may be written to meanwhile only if it
                is not the template.
            select: Only these dotted paths, and what is below them; or a function of
                the path that is asked for each value. Chunks that hold none of it are
                not fetched. With ``into``, which may then have more or fewer keys,
                it is filled where selected, and returned; it is checked once the
                values that are no tensors have come.
            share: Return tensors in the sender's own memory, where it is a process of
                this user on this host that lends it (``same_host=True``). Nothing is
                copied but the pages that are written to, which then are this
                process's. The memory is sealed: it never changes, whatever the
                sender does. Elsewhere the bytes come over HTTP, as without it.
            verify_shared: Compare the digests of what is shared, too; that reads it
                all.
            progress: Called with :class:`.Progress` as bytes arrive.

        Raises:
            ValueError: ``share`` with ``into``, which has memory of its own.
            TransferTimeoutError: the deadline passed.
            StepNotFoundError: the sender has replaced ``step``, and keeps another
                snapshot that has been read longer.
            PeerFailedError: the sender could not send it.
            TemplateMismatchError: ``into`` does not fit.
            UnsupportedLeafError: ``into`` or ``have`` has what no checkpoint can hold.
            LocalProtocolError: ``have=True`` without a template.
            MissingKeysError: the checkpoint, or ``into``, lacks a path of ``select``.
            DeviceMeshError: a distributed tensor has no place among the ranks here.
            StagingError: this host cannot: a copy failed, or memory is short.
            TransportError, ProtocolError, AuthenticationError: see the error tree.
                Of several sources the most telling error, with the others as notes.
            ValueError: ``metadata`` is an empty list.
        """
        require_given("recv_checkpoint", metadata=metadata)
        try:
            origins = origins_of(metadata)
        finally:
            del metadata  # a traceback with local variables would show the token
        options, sharing = self._options(
            into=into,
            have=have,
            select=select,
            progress=progress,
            share=share,
            direct=direct,
            verify_shared=verify_shared,
        )
        limit = self._limit(timeout)
        return await self._receive(origins, step, options, sharing, limit)

    def follow(
        self,
        metadata: str,
        *,
        after: int | None = None,
        into: T | None = None,
        have: T | bool | None = None,
        select: Select | None = None,
        share: bool = False,
        timeout: Timeout | None = None,
        reconnect_timeout: Timeout | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> AsyncGenerator[tuple[int, T]]:
        """Return the newest checkpoint of a peer, as ``(step, state_dict)``, for ever.

        The iterator waits for a step newer than the last one, receives it and gives it.
        Steps that were published meanwhile are skipped. When the sender replaces the
        step during the receive, the iterator goes on to the newest one. When the sender
        is away, or a receive takes longer than ``timeout``, it tries again after random
        delays of 2 seconds at most; events and the log tell of each. No step is given
        twice, and none of which a part is missing.

        A sender that has started again, and goes on from a lower step, is followed from
        there; an event (``restart``) and a warning say so. Nobody is followed whose
        token has changed: give both ends the same ``token``.

        Between two steps nothing is under way. If cancelled while it waits or receives,
        the iterator has ended, the template is as it was or holds the whole step, and
        another iterator may go on with ``after``. It is for one task at a time.

        Args:
            metadata: What the sender's :meth:`metadata` returned.
            after: A step; only later ones are given. None: whatever is served first.
            into, have, select, share, progress: As of :meth:`recv_checkpoint`.
                ``progress`` begins anew with each receive. ``into`` is filled, and
                given, each time.
            timeout: Deadline of one receive, in seconds or as a ``timedelta``.
            reconnect_timeout: How long a sender that does not answer is asked for its
                next step, in seconds or as a ``timedelta``; None: for ever.

        Raises:
            ClosedError: after, or because of, :meth:`shutdown`.
            TransportError: the sender did not answer for ``reconnect_timeout``.
            AuthenticationError, ProtocolError, StateDictError, StagingError: as of
                :meth:`recv_checkpoint`.
        """
        try:
            origin = parse_metadata(metadata)
        finally:
            del metadata  # a traceback with local variables would show the token
        steps = self._steps(origin, after, reconnect_timeout)
        options, sharing = self._options(
            into=into, have=have, select=select, progress=progress, share=share
        )
        limit = self._limit(timeout)
        return self._follow(origin, steps, options, sharing, limit)

    def steps(
        self,
        metadata: str,
        after: int | None = None,
        *,
        reconnect_timeout: Timeout | None = None,
    ) -> AsyncIterator[int]:
        """Return the steps that a peer publishes, to be iterated over as they come.

        The peer tells of each one at once, and nothing is polled. Only the newest is
        given: those that were published while nobody asked are skipped, and one that
        was given may be gone when it is received (``StepNotFoundError``); the next
        one is there then. :meth:`follow` receives them, too.

        A sender that has started again, and goes on from a lower step, is noticed: the
        lower step is given, and an event (``restart``) and a warning say so.

        A peer that breaks off, is silent or starts again at the same address is asked
        again, after random delays of 2 seconds at most. Silent is who sends nothing
        for the stall timeout after the 30 seconds for which it was asked to wait. The
        waiting itself has no deadline: put ``asyncio.timeout`` around it. If that, or
        a cancel, ends it, no step is lost, and the iterator can be used again. It is
        for one task: a second one that waits gets a ``LocalProtocolError``.

        Args:
            metadata: What the peer's :meth:`metadata` returned.
            after: A step; only later ones are given. None: whatever is served first.
            reconnect_timeout: How long a peer that does not answer is asked again, in
                seconds or as a ``timedelta``; None: for ever.

        Raises:
            AuthenticationError: the peer refuses; one that has started again has
                another token in its metadata, unless both were given one (``token=``).
            TransportError: the peer did not answer for ``reconnect_timeout``.
            RemoteProtocolError: it is no aiockpt server, three times in a row.
            ClosedError: after, or because of, :meth:`shutdown`.
        """
        try:
            origin = parse_metadata(metadata)
        finally:
            del metadata  # a traceback with local variables would show the token
        return self._steps(origin, after, reconnect_timeout)

    async def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Stop serving and close everything; ``wait=False`` gives readers no grace.

        Calls under way fail. If cancelled, the closing goes on by itself.
        """
        self._lifetime.bind()
        if self._lifetime.closed and not wait:
            await self._withdraw(0.0)  # cut the grace of another call
        self._bridge.refuse()
        await self._lifetime.end(
            partial(self._keep_nothing, self._grace if wait else 0.0),
            self._stop_serving,
            self._client.aclose,
            partial(self._lifetime.calls_ended, timeout=_CLOSING),
            self._drop_warm,
            partial(self._bridge.aclose, timeout=_CLOSING),
        )

    async def _keep_nothing(self, grace: float) -> None:
        self._stager.close()
        await self._withdraw(grace)

    async def _stop_serving(self) -> None:
        self._endpoint.refuse()
        try:
            await self._server.stop()
        finally:
            self._endpoint.close()  # a hung process keeps copies of the sockets

    async def _drop_warm(self) -> None:
        if self._warm is not None:
            self._bridge.post(self._warm.close)

    def _limit(self, timeout: Timeout | None) -> float:
        return self._timeout if timeout is None else seconds(timeout)

    def _steps(
        self, origin: Origin, after: int | None, reconnect_timeout: Timeout | None
    ) -> Steps:
        silent = math.inf if reconnect_timeout is None else seconds(reconnect_timeout)
        after = None if after is None else exact_step(after)
        self._lifetime.check()
        return Steps(
            self._client,
            origin,
            self._lifetime,
            after=after,
            reconnect_timeout=silent,
        )

    async def _follow(
        self,
        origin: Origin,
        steps: Steps,
        options: ReceiveOptions,
        sharing: Sharing,
        limit: float,
    ) -> AsyncGenerator[tuple[int, T]]:
        survives = (*SUPERSEDED, TransportError)
        origin = replace(origin, patience=PATIENCE)

        async def attempt(step: int) -> T:
            try:
                return await self._receive([origin], step, options, sharing, limit)
            except survives:
                steps.again()
                raise

        pause = self._client.pause
        while True:
            yield await chase(steps.__anext__, attempt, pause=pause, survives=survives)

    def _options(
        self,
        *,
        into: T | None,
        have: T | bool | None,
        select: Select | None,
        progress: Callable[[Progress], None] | None,
        share: bool,
        direct: bool = False,
        verify_shared: bool = False,
    ) -> tuple[ReceiveOptions, Sharing]:
        if share and into is not None:
            raise ValueError("share=True returns new tensors: leave out into=")
        if share and have is not None:
            raise ValueError("share=True moves no bytes: leave out have=")
        terms = Terms(
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            direct=direct,
            ports=port_for,
            warm=self._warm,
        )
        sharing = Sharing(
            wanted=self._same_host is not False and have is None,
            keep=share,
            through=into is not None and not direct,
            verify=verify_shared,
        )
        options = ReceiveOptions(
            into=into,
            have=_known(have, into),
            select=listed(select),
            progress=progress,
            terms=terms,
        )
        return options, sharing

    async def _receive(
        self,
        origins: Sequence[Origin],
        step: int | None,
        options: ReceiveOptions,
        sharing: Sharing,
        limit: float,
    ) -> T:
        """Receive ``step``, or what is served now, within ``limit`` seconds."""
        until = asyncio.get_running_loop().time() + limit
        lease = Lease.begin(until, receiver=self._client.name)
        leased = [replace(origin, lease=lease) for origin in origins]
        if step is None:
            leased = [replace(origin, patience=PATIENCE) for origin in leased]
        deadline = Deadline(limit, stop="fetch_manifest")
        peers = Peers.at(self._client, leased, deadline.note, deadline=until)
        asked = "a checkpoint" if step is None else f"step {step}"
        deadline.what = f"{asked} from {peers.name}"

        def attempt(step: int) -> Awaitable[Received]:
            deadline.what = f"step {step} from {peers.name}"
            source = HttpSource(peers, self._bridge, sharing)
            return receive_from(source, step, options, self._bridge, deadline)

        with self._lifetime.call():
            async with deadline:
                if step is not None:
                    received = await attempt(step)
                else:
                    pause = self._client.pause
                    _, received = await chase(peers.newest, attempt, pause=pause)
                return cast("T", received.state_dict)


def _check_together(server: Server, auth: Auth, *, zero_copy: bool) -> None:
    """Refuse options that contradict each other.

    Raises:
        LocalProtocolError: some do.
    """
    if server.keep_last and not server.process:
        raise LocalProtocolError("keep_last= needs process=True")
    if server.process and zero_copy:
        raise LocalProtocolError(
            "process=True serves from memory of its own: leave out zero_copy=True"
        )
    if server.process and auth.ssl_context is not None:
        raise LocalProtocolError(
            "an ssl_context cannot be handed to the server process: leave out "
            "process=True, or let a proxy speak TLS"
        )


def _known(have: object, into: object) -> object:
    """Return the state dict that is meant by ``have``."""
    if not isinstance(have, bool):
        return have
    if not have:
        return None
    if into is None:
        raise LocalProtocolError(
            "have=True says that the template holds some of it: there is no into="
        )
    return into
