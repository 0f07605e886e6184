"""HTTPTransport: serve a checkpoint over HTTP, and fetch it from a peer."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Sequence,
)
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Never, Self, cast, overload

import anyio
import msgspec

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    LocalProtocolError,
    StepNotFoundError,
)
from aiockpt.events import Progress, TransferEvent, emit
from aiockpt.format.chunks import Algorithm
from aiockpt.format.fingerprint import Fingerprint
from aiockpt.http.auth import find_credentials
from aiockpt.http.client import CheckpointClient
from aiockpt.http.fingerprints import fetch_fingerprints
from aiockpt.http.follow import CURRENT_STEP_WAIT_S, Follower, chase
from aiockpt.http.handlers import CheckpointService, ServerConfig
from aiockpt.http.host import Front
from aiockpt.http.joined import RankOptions, receive_joined
from aiockpt.http.listen import Endpoint
from aiockpt.http.options import Auth, Receive, Server, Swarm
from aiockpt.http.peers import Peers, name_of, newest_of, senders_of
from aiockpt.http.protocol import Lease, Origin, format_metadata, parse_joined
from aiockpt.http.server import CheckpointServer
from aiockpt.http.source import AttachOptions, HttpSource
from aiockpt.http.store import Failure, Publisher, Store
from aiockpt.local.attach import attach
from aiockpt.local.lender import Lender
from aiockpt.local.server_process import ServerProcess
from aiockpt.memory.arena import CAN_LEND, ArenaPool
from aiockpt.memory.device import Marks, port_for
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge, BridgeStatistics
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.runtime.system import copying_threads
from aiockpt.state.fingerprinting import fingerprint_of_snapshot
from aiockpt.state.reshard import RankValues
from aiockpt.state.selection import Select, listed
from aiockpt.swarm.endpoint import SwarmEndpoint
from aiockpt.swarm.membership import Membership, RelayHost
from aiockpt.transfer.deltas import check_available
from aiockpt.transfer.options import ReceiveOptions
from aiockpt.transfer.prepared import Prepared
from aiockpt.transfer.receive import Received
from aiockpt.transfer.receive import receive as receive_from
from aiockpt.transfer.repeats import Repeats, content_of
from aiockpt.transfer.stager import Stager, StagerOptions
from aiockpt.transport import (
    REQUIRED,
    CheckpointTransport,
    T,
    Timeout,
    exact_step,
    names_its_options,
    refuse_unknown,
    require,
    require_given,
    require_type,
    seconds,
)

_DEFAULT_WAIT_S = 5.0  # for which a server waits for a step
_SHUTDOWN_S = 5.0  # for running calls to end, and then for the threads

ELSEWHERE: Final = {
    "num_chunks": "HTTPTransport(receive=Receive(connections=...)), the number of "
    "parallel ranges, or chunk_bytes=, the size of a chunk",
    **{
        option.name: f"HTTPTransport({argument}={record.__name__}({option.name}=...))"
        for argument, record in {
            "server": Server,
            "auth": Auth,
            "receive": Receive,
            "swarm": Swarm,
        }.items()
        for option in fields(record)
    },
}
"""Options of the records, and of torchft's class -> where they are given."""


class TransportStatistics(NamedTuple):
    """The state of a transport at one moment. Counters start at zero with it.

    Attributes:
        step: The published step, or None.
        readers: Response bodies that the server is sending now, of any checkpoint, and
            processes of this host that read the shared memory of one.
        oldest_reader: Seconds since the oldest of these began.
        superseded: Replaced checkpoints that receivers still read.
        waiting: Requests that wait for a step.
        requests: Requests that have arrived.
        refused: Requests that the server answered with an error.
        bytes_sent: Bytes of response bodies that the server has sent.
        gone: Bodies that ended early because the client left or its connection broke.
        stalled: Bodies that the server aborted because no byte moved.
        evicted: Readers whose connection was cut at the end of the grace period.
        lent: Checkpoints that processes of this host took as shared memory.
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
    """Serves the latest checkpoint that you send, and receives from other transports.

    Use it as an async context manager, or call :meth:`start` and :meth:`shutdown`.
    One transport can both send and receive. It belongs to the event loop that uses it
    first; a call on another loop raises ``LocalProtocolError``.

    Args:
        timeout: The default deadline of a send or a receive, in seconds or as a
            ``timedelta``. It is also the longest time that the server lets a request
            wait for a step that is not published yet.
        advertise: The host name in the metadata. If a reverse proxy or your own
            application serves the routes: the whole base URL.
        server: Where and how to serve.
        auth: Who may read, and which senders to trust.
        receive: What to accept, and how to fetch.
        same_host: True: processes of the same user on this host may map the memory of
            a sent checkpoint, so no byte passes a socket. None: this transport maps
            the memory that others offer, but offers none, because new memory that can
            be shared is slower. False: neither.
        swarm: True, or how: while this transport receives a checkpoint that others
            receive, too, it serves them what it has, and fetches from them. None: it
            does not, but as a sender it lets its receivers do so. False: neither.
        stall_timeout: Seconds without a byte after which either side gives up on a
            connection.
        chunk_bytes: The size in bytes of the chunks that this transport sends, the unit
            of verification and retry; a multiple of 64. Try 1 to 4 MiB if connections
            break often, or receivers fetch small parts.
        digest: The algorithm of the chunks' digests that this transport sends:
            ``"xxh3-128"``, ``"sha256"`` or ``"blake3"``. A receiver accepts all of
            them. The first is the fastest, and finds faults. The others are
            cryptographic: they also protect against forgery, where others than the
            sender pass bytes on. ``"blake3"`` needs the extra ``aiockpt[blake3]`` at
            both ends.
        zero_copy: Serve contiguous host tensors from their own memory instead of a
            copy. Do not change these tensors until :meth:`disallow_checkpoint` has
            returned.
        allow_pickle: Send and accept leaves as pickles if no other encoding fits them.
            A pickle runs code in the receiver. Both ends need this option.
    """

    @names_its_options
    def __init__(
        self,
        timeout: Timeout = 60.0,
        *,
        advertise: str | None = None,
        server: Server = Server(),  # noqa: B008 - frozen
        auth: Auth = Auth(),  # noqa: B008 - frozen
        receive: Receive = Receive(),  # noqa: B008 - frozen
        same_host: bool | None = None,
        swarm: Swarm | bool | None = None,
        stall_timeout: float = 10.0,
        chunk_bytes: int = 16 << 20,
        digest: Algorithm = "xxh3-128",
        zero_copy: bool = False,
        allow_pickle: bool = False,
        **unknown: Never,
    ) -> None:
        refuse_unknown(HTTPTransport, unknown, elsewhere=ELSEWHERE)
        require_type(Server, server=server)
        require_type(Auth, auth=auth)
        require_type(Receive, receive=receive)
        if swarm is not None:
            require_type((Swarm, bool), swarm=swarm)
        if same_host is not None:
            require_type(bool, same_host=same_host)
        require_type(bool, zero_copy=zero_copy, allow_pickle=allow_pickle)
        require_type(int, chunk_bytes=chunk_bytes)
        require(stall_timeout=stall_timeout)
        self._credentials = find_credentials(
            auth.token, insecure=auth.insecure, env=os.environ
        )
        self._credentials.warn_if_short()
        self._timeout, lends = seconds(timeout), bool(same_host) and CAN_LEND
        threads = copying_threads()
        self._bridge = Bridge(threads=threads, name="aiockpt")
        self._lifetime = Lifetime("the transport")
        self._attach = None if same_host is False else attach
        self._defaults = ReceiveOptions(
            limits=receive.limits,
            allow_pickle=allow_pickle,
            warm=ArenaPool(keep=1, staging=False) if receive.keep_arena else None,
        )
        joining = Swarm() if swarm is True else swarm or None
        tls, token = auth.ssl_context, self._credentials.token
        endpoint = Endpoint(server, advertise=advertise, tls=tls is not None)
        config = ServerConfig(
            options=server,
            token=token,
            insecure=token is None,
            stall_timeout=stall_timeout,
            default_wait=min(self._timeout, _DEFAULT_WAIT_S),
            max_wait=max(self._timeout, _DEFAULT_WAIT_S),
            hosts=endpoint.hosts(),
            manifest_key=auth.key,
            lends=lends,
            incarnation=secrets.token_hex(16),
            swarm=None if swarm is False else joining or Swarm(),
            peers=None if auth.peers is None else tuple(auth.peers),
        )
        _check_together(server, auth, zero_copy=zero_copy)
        self._store: Publisher
        self._front: Front
        store = Store(server)
        extension = SwarmEndpoint(config, self._bridge, store)

        async def compute(snapshot: Snapshot) -> bytes:
            sums = partial(fingerprint_of_snapshot, snapshot, limits=receive.limits)
            return await self._bridge.run(sums)

        if server.process:
            process = self._store = ServerProcess(config, self._bridge, compute)
            self._front = Front(endpoint, process, self._bridge)
            # A member serves from its own loop, at any free port.
            name = advertise if advertise and "://" not in advertise else None
            where = Endpoint(replace(server, port=0), advertise=name, tls=False)
            relays = CheckpointServer(config, store, extension)
            self._host = RelayHost(where, relays, self._bridge, joining)
        else:
            lender = Lender(config, self._bridge, store) if lends else None
            local = CheckpointServer(
                config, store, extension, lender, compute, ssl_context=tls
            )
            self._store = store
            self._host = RelayHost(endpoint, local, self._bridge, joining)
            self._front = self._host
        self._grace = server.grace
        self._turn = anyio.Lock()  # one send at a time
        self._repeats = Repeats("publication")
        self._stager = Stager(
            self._bridge,
            StagerOptions(
                threads=threads,
                chunk_bytes=chunk_bytes,
                algorithm=digest,
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

    def __del__(self) -> None:
        lifetime: Lifetime | None = getattr(self, "_lifetime", None)
        if lifetime is not None and lifetime.is_open:
            warnings.warn(
                "an HTTPTransport was used and never shut down: use it in 'async with "
                "aiockpt.HTTPTransport(...) as transport:', or await its shutdown()",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    def statistics(self) -> TransportStatistics:
        """Return the published step, the counters and the state of the threads."""
        now = self._front.server.statistics()
        if self._host is not self._front:
            now += self._host.server.statistics()
        figures = msgspec.structs.asdict(now)
        return TransportStatistics(**figures, threads=self._bridge.statistics())

    def metadata(self) -> str:
        """Return the URL to fetch from, with the token in its fragment.

        This works as soon as the transport exists. The exception is a ``host`` that is
        a name: :meth:`start` resolves it in a thread, so call this afterwards.

        Raises:
            ClosedError: after :meth:`shutdown`.
            LocalProtocolError: ``host`` is a name that is not resolved yet.
            OSError: the address cannot be bound.
        """
        return format_metadata(self.address(), self._credentials.in_metadata)

    def grant(
        self, receiver: str, *, step: int | None = None, lifetime: Timeout = 3600.0
    ) -> str:
        """Return metadata with a token for one receiver.

        Hand it out in place of :meth:`metadata`.

        Args:
            receiver: A name for the audit log, such as a rank.
            step: The only step that the receiver may fetch. None: all steps.
            lifetime: How long the token is valid by this host's clock, in seconds or
                as a ``timedelta``; see :func:`.make_token`.

        Raises:
            LocalProtocolError: the transport is ``insecure`` and asks for no token.
            ValueError: ``receiver`` is empty or too long, or has a character that a
                token cannot hold.
        """
        expires = time.time() + seconds(lifetime, "lifetime")
        token = self._credentials.granted(receiver, step=step, expires=expires)
        return format_metadata(self.address(), token)

    def address(self) -> str:
        """Return the base URL without the token, for logs and people."""
        self._lifetime.check()
        return self._front.url()

    async def start(self) -> None:
        """Start to serve. Do nothing if the transport serves or is mounted in an app.

        If cancelled, the address stays reserved for a later start.

        Raises:
            ClosedError: after :meth:`shutdown`.
            LocalProtocolError: ``Server(interface=)`` does not exist on this host.
            OSError: the address cannot be bound; the message names it.
        """
        with self._lifetime.call():
            await self._front.start()

    def mount(self, prefix: str) -> CheckpointService:
        """Return the handlers for an application that serves them below ``prefix``.

        From then on the transport opens no socket of its own; see
        :func:`aiockpt.http.setup`.

        Raises:
            LocalProtocolError: the transport serves on a socket of its own already.
            ClosedError: after :meth:`shutdown`.
        """
        self._lifetime.check()
        return self._front.mount(prefix)

    @names_its_options
    async def send_checkpoint(
        self,
        /,
        dst_ranks: Sequence[int] = (),
        step: int = REQUIRED,
        state_dict: T = REQUIRED,
        timeout: Timeout | None = None,
        **unknown: Never,
    ) -> None:
        """Stage ``state_dict`` and publish it as ``step``.

        Receivers that hold the metadata can fetch it at once. The copy waits for the
        device work that the current streams have when this call begins to run, and for
        no later work. You may change the state dict as soon as the call returns.

        If the call fails, the server tells receivers that wait for ``step``: as many
        as there are ``dst_ranks``, or all of them. If the call fails or is cancelled,
        the earlier checkpoint stays published.

        Args:
            dst_ranks: Has no meaning over HTTP.
            step: The number of the checkpoint.
            state_dict: The state to send.
            timeout: The deadline of the call, in seconds or as a ``timedelta``.

        Raises:
            UnsupportedLeafError: a leaf has a type that no checkpoint can hold.
            StagingError: a copy failed, or the host lacks memory.
            StepNotFoundError: :meth:`disallow_checkpoint` was called meanwhile.
            TransferTimeoutError: staging took longer than ``timeout``.
            ClosedError: after :meth:`shutdown`.
        """
        refuse_unknown(HTTPTransport.send_checkpoint, unknown)
        require_given("send_checkpoint", step=step, state_dict=state_dict)
        marks = self._stager.mark()
        limit, began = self._limit(timeout), time.monotonic()
        deadline = Deadline(limit, phase="stage", what=f"step {step}")
        with self._lifetime.call():
            step, before = exact_step(step), self._store.retractions
            self._store.fail(None)
            try:
                async with deadline:
                    # Within the call, so that a withdrawal wins over the start as
                    # well, and waiting receivers are told if that fails.
                    await self._front.start()
                    async with self._turn:
                        self._check_offer(step, before)
                        snapshot = await self._stager.stage(
                            state_dict, step=step, marks=marks
                        )
                        deadline.phase = "publish"
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
        """Publish the latest sent checkpoint as ``step``, without staging it again.

        If cancelled, the checkpoint keeps its earlier step.

        Raises:
            StepNotFoundError: nothing is published; call :meth:`send_checkpoint` first.
            ClosedError: after :meth:`shutdown`.
        """
        with self._lifetime.call():
            step, before = exact_step(step), self._store.retractions
            async with self._turn:
                self._check_offer(step, before)
                if self._store.published is not None:
                    await self._front.start()
                snapshot = self._store.published
                if snapshot is None:  # perhaps its server process has died
                    raise StepNotFoundError(step)
                self._check_offer(step, before)
                if snapshot.manifest.step == step:
                    return
                snapshot.acquire()  # a withdrawal must not free it meanwhile
                try:
                    renamed = await self._stager.relabel(snapshot, step=step)
                finally:
                    snapshot.release()
                await self._publish(renamed, before)

    async def disallow_checkpoint(self) -> None:
        """Retract the checkpoint. Receivers that still read get the grace period.

        After the grace period the server cuts their connections. A send that runs at
        this moment publishes nothing and raises ``StepNotFoundError``. If cancelled,
        the checkpoint is retracted, and a later call waits for the remaining readers.
        """
        self._lifetime.bind()
        await self._withdraw(self._grace)

    async def _withdraw(self, grace: float) -> None:
        snapshot = self._store.published
        step = None if snapshot is None else snapshot.manifest.step
        del snapshot  # nobody may hold its memory while the store retracts it
        await self._store.retract(grace=grace)
        self._stager.trim()
        if step is not None:
            emit(TransferEvent(stop="retract", step=step))

    async def _publish(self, snapshot: Snapshot, before: int) -> None:
        """Publish a snapshot unless it was retracted meanwhile; release it."""
        try:
            self._check_offer(snapshot.manifest.step, before)
            await self._store.publish(snapshot, grace=self._grace)
        except StepNotFoundError:
            raise self._overtaken(snapshot.manifest.step) from None
        finally:
            snapshot.release()  # the store has taken a reference of its own

    def _check_offer(self, step: int, before: int) -> None:
        """Raise if the transport was retracted or closed since ``before``."""
        if self._lifetime.closed or self._store.retractions != before:
            raise self._overtaken(step)

    def _overtaken(self, step: int) -> AiockptError:
        if self._lifetime.closed:
            return ClosedError("the transport")
        error = StepNotFoundError(step)
        error.add_note("the checkpoint was retracted while this call was running")
        return error

    @names_its_options
    async def recv_checkpoint(
        self,
        /,
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
        rank_values: RankValues = "error",
        full: bool = False,
        progress: Callable[[Progress], None] | None = None,
        **unknown: Never,
    ) -> T:
        """Fetch ``step`` from the transport, or the transports, of ``metadata``.

        The call waits for a step that is not published yet, resumes after broken
        connections, and returns only bytes whose digests match the manifest. The
        sender keeps the snapshot until the receive ends, even if it publishes newer
        ones meanwhile: see its ``keep_superseded``. If cancelled, a template is
        unchanged or filled completely (but see ``direct``), and nothing else of what
        was received is kept.

        Args:
            src_rank: Has no meaning over HTTP.
            metadata: The string that the sender's :meth:`metadata` returned. Pass a
                list of such strings to fetch from several replicas of one checkpoint
                in parallel. Each replica delivers a share that fits its speed. The
                first one that answers decides which checkpoint it is. A replica that
                fails for good, sends a wrong chunk or has another checkpoint is
                dropped; the receive succeeds as long as one replica remains.
                The string of :func:`.join_metadata` names senders of shards: each has
                what one rank of a job holds. The receive takes what it needs of each.
                A distributed tensor of ``into`` may be on any mesh. A list of such
                strings names replicas of all shards.
            step: The step to fetch. None: the step that the sender serves now. If the
                sender replaces that step during the receive, the receive starts again
                with the newest one, and so does ``progress``.
            timeout: The deadline of the whole call, in seconds or as a ``timedelta``.
            into: A template: a state dict to fill and return. Its tensors are filled
                in place, its dicts and lists get the other values. It is compared with
                the header before tensors are fetched, and changed only after all bytes
                are verified.
            direct: With ``into``: receive straight into the memory of the template. If
                such a receive fails, a note of the error says whether the template was
                changed. Tensors on accelerators are filled chunk by chunk, each as soon
                as it is verified, after the work that the current stream has already.
                Do not use the template meanwhile. Nothing may resize its storages: no
                thread, task or progress callback. Bytes from ``have``, and values of a
                selection, are copied at the end.
            have: A state dict that holds some of the bytes already, such as an earlier
                step. True: the template does. Chunks of it with the right digest are
                not fetched, and with True not even copied. Tensors with another path,
                dtype or shape are fetched. You may change a ``have`` that is not the
                template during the call.
            select: The dotted paths to receive, each with everything below it; or a
                function that is called with each path and returns a bool. Chunks
                without selected bytes are not fetched. With ``into``, only the selected
                parts are filled, and the template may have more or fewer keys.
            share: Return tensors in the memory of the sender, if it is a process of the
                same user on this host and was made with ``same_host=True``. Only pages
                that you write to are copied. The sender stages nothing into it again,
                and no other process can write to it. From any other sender the bytes
                come over HTTP.
            verify_shared: Also compare the digests of shared memory, which reads all
                of it. With ``into``, copy it to memory of this process first, so that
                a sender that writes to it meanwhile is noticed.
            rank_values: What to do with a value, or a tensor that is not distributed,
                if the senders of joined metadata have different ones, and this process
                is not one of as many ranks. ``error``: raise ``RankValuesError``.
                ``keep``: the template keeps its own. A number: take the value of that
                sender, counted from 0. If as many ranks receive as sent, each takes
                the value of its own number.
            full: Receive full tensors where the template has no place for distributed
                ones, although this process has a process group. Without a group, this
                is the default.
            progress: Called with :class:`.Progress` as bytes arrive.

        Raises:
            ValueError: ``share`` together with ``into``, ``have`` or joined metadata;
                or ``metadata`` is an empty list.
            TransferTimeoutError: the deadline passed.
            StepNotFoundError: the sender has replaced ``step`` and does not keep it.
            PeerFailedError: the sender's :meth:`send_checkpoint` failed.
            TemplateMismatchError: ``into`` does not fit the checkpoint, or lacks a path
                of ``select``.
            UnsupportedLeafError: a tensor of ``into`` cannot be filled; or ``have``
                has a leaf of a type that no checkpoint can hold.
            LocalProtocolError: ``have=True`` without a template; or joined metadata
                together with ``swarm``.
            RankValuesError: the senders of joined metadata have different values.
            MissingKeysError: the checkpoint lacks a path of ``select``.
            DeviceMeshError: a distributed tensor has no place among the ranks here.
            StagingError: a copy failed, or this host lacks memory.
            TransportError, ProtocolError, AuthenticationError: see the error tree.
                With several sources: the most specific error, with the others as notes.
        """
        try:
            refuse_unknown(HTTPTransport.recv_checkpoint, unknown)
            require_given("recv_checkpoint", metadata=metadata)
            senders = senders_of(metadata)
        finally:
            del metadata  # a traceback with local variables would show the token
        options, attaching = self._options(
            into=into,
            have=have,
            select=select,
            progress=progress,
            share=share,
            direct=direct,
            verify_shared=verify_shared,
        )
        ranks = RankOptions.of(rank_values, full=full)
        limit = self._limit(timeout)
        return await self._receive(senders, step, options, attaching, ranks, limit)

    @names_its_options
    async def prepare(
        self,
        /,
        metadata: str | Sequence[str],
        step: int | None = None,
        *,
        into: T,
        have: T | bool | None = None,
        select: Select | None = None,
        rank_values: RankValues = "error",
        full: bool = False,
        timeout: Timeout | None = None,
        progress: Callable[[Progress], None] | None = None,
        **unknown: Never,
    ) -> Prepared[T]:
        """Fetch and verify ``step`` beside the template ``into``, to apply it later.

        The template is not touched, so a model may serve from it meanwhile. When you
        can pause the model, call :meth:`.Prepared.apply`, which takes as long as a copy
        of the changed chunks. The checkpoint takes the memory of one more copy of the
        state until then. With ``Receive(keep_arena=True)``, the next call uses the same
        memory.

        If it fails or is cancelled, the template is unchanged, and nothing is kept.

        Args:
            metadata, step, timeout, progress: As in :meth:`recv_checkpoint`.
            rank_values, full: As in :meth:`recv_checkpoint`.
            into: The template. The checkpoint must fit it.
            have: A state dict that holds some of the bytes already. True: the template
                does. Then :meth:`.Prepared.apply` copies only the chunks that differ,
                and nobody may write to the template before it. If it has tensors of
                inference mode, whose changes nobody counts, all chunks are copied.
                None: fetch everything.
            select: As in :meth:`recv_checkpoint`.

        Raises:
            AiockptError: as in :meth:`recv_checkpoint`.
        """
        try:
            refuse_unknown(HTTPTransport.prepare, unknown)
            senders = senders_of(metadata)
        finally:
            del metadata  # a traceback with local variables would show the token
        options, attaching = self._options(
            into=into, have=have, select=select, progress=progress, hold=True
        )
        ranks = RankOptions.of(rank_values, full=full)
        limit = self._limit(timeout)
        return cast(
            "Prepared[T]",
            await self._receive(senders, step, options, attaching, ranks, limit),
        )

    @names_its_options
    async def fingerprint(
        self,
        /,
        metadata: str | Sequence[str],
        step: int | None = None,
        timeout: Timeout | None = None,
        **unknown: Never,
    ) -> Fingerprint:
        """Return the fingerprint of a step that a sender serves.

        The sender computes it from its snapshot when somebody asks first, in a thread.
        Compare it with that of your own state: see :func:`aiockpt.fingerprint`. If
        cancelled, nothing is left behind.

        Args:
            metadata: The string that the sender's :meth:`metadata` returned; or what
                :func:`aiockpt.join_metadata` made of those of several senders of
                shards, whose fingerprints are added. A sender that cannot be reached,
                or serves nothing, is left out if the others have all that it had, as in
                a receive without a template. A list of strings names replicas, of which
                the first one that answers counts.
            step: The step. None: the step that the sender serves now; of several, the
                newest one.
            timeout: The deadline of the call, in seconds or as a ``timedelta``.

        Raises:
            TransferTimeoutError: the deadline passed.
            StepNotFoundError: the sender has replaced ``step`` and does not keep it,
                perhaps while it computed.
            UnavailableError: the sender's version has no fingerprints.
            PeerFailedError: the sender cannot compute it. Another call helps only if
                the sender lacked something, such as memory.
            TransportError, ProtocolError, AuthenticationError: see the error tree.
        """
        try:
            refuse_unknown(HTTPTransport.fingerprint, unknown)
            senders = senders_of(metadata)
        finally:
            del metadata  # a traceback with local variables would show the token
        limit = self._limit(timeout)
        step = None if step is None else exact_step(step)
        until = asyncio.get_running_loop().time() + limit
        lease = Lease.begin(until, receiver=self._client.name)
        deadline = Deadline(limit, phase="fingerprint")
        wait = math.inf if step is not None else CURRENT_STEP_WAIT_S
        peers = [
            Peers.at(
                self._client,
                [replace(each, lease=lease, step_wait=wait) for each in origins],
                deadline.note,
                deadline=until,
            )
            for origins in senders
        ]
        names = " ".join(each.name for each in peers)
        asked = "a checkpoint" if step is None else f"step {step}"
        deadline.what = f"{asked} from {names}"
        with self._lifetime.call():
            async with deadline:
                if step is not None:
                    return await fetch_fingerprints(peers, step)

                newest = partial(newest_of, peers)

                fetch, pause = partial(fetch_fingerprints, peers), self._client.pause
                _, found = await chase(newest, fetch, pause=pause)
                return found

    @overload
    def follow(
        self,
        metadata: str,
        *,
        after: int | None = None,
        into: T,
        have: T | bool | None = None,
        select: Select | None = None,
        rank_values: RankValues = "error",
        full: bool = False,
        prepare: Literal[True],
        timeout: Timeout | None = None,
        reconnect_timeout: Timeout | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> AsyncGenerator[Prepared[T]]: ...

    @overload
    def follow(
        self,
        metadata: str,
        *,
        after: int | None = None,
        into: T | None = None,
        have: T | bool | None = None,
        select: Select | None = None,
        share: bool = False,
        rank_values: RankValues = "error",
        full: bool = False,
        prepare: Literal[False] = False,
        timeout: Timeout | None = None,
        reconnect_timeout: Timeout | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> AsyncGenerator[tuple[int, T]]: ...

    @names_its_options
    def follow(
        self,
        metadata: str,
        *,
        after: int | None = None,
        into: T | None = None,
        have: T | bool | None = None,
        select: Select | None = None,
        share: bool = False,
        rank_values: RankValues = "error",
        full: bool = False,
        prepare: bool = False,
        timeout: Timeout | None = None,
        reconnect_timeout: Timeout | None = None,
        progress: Callable[[Progress], None] | None = None,
        **unknown: Never,
    ) -> AsyncGenerator[tuple[int, T]] | AsyncGenerator[Prepared[T]]:
        """Yield each newer checkpoint of a sender as ``(step, state_dict)``, for ever.

        The iterator waits for a step newer than the last one, receives it and yields
        it. It skips steps that the sender publishes meanwhile. If the sender replaces
        the step during the receive, the iterator goes on to the newest one. If the
        sender is away, or a receive takes longer than ``timeout``, the iterator tries
        again after a random delay of at most 2 seconds; an event and a log line report
        each attempt. It yields no step twice, and no incomplete one.

        If the sender goes back to a lower step, or restarts and continues from one, the
        iterator follows it from there; an event (``restart``) and a warning say so. A
        restarted sender needs its old token to be followed: give both ends the same
        ``token``.

        Between two steps nothing runs in the background. If cancelled, the iterator
        ends, and the template is unchanged or holds a whole step. A new iterator can
        continue with ``after``. One task at a time may use the iterator.

        Args:
            metadata: The string that the sender's :meth:`metadata` returned, or that
                of :func:`.join_metadata`. Each step then comes whole, from all senders.
            after: Yield only steps later than this one. None: begin with the step that
                is served now.
            into, have, select, share, progress: As in :meth:`recv_checkpoint`.
            rank_values, full: As in :meth:`recv_checkpoint`.
                ``progress`` starts again with each receive. ``into`` is filled and
                yielded each time.
            prepare: Yield a :class:`.Prepared` of each step instead, as
                :meth:`prepare` returns it. ``into`` is then required, and you fill it
                by :meth:`.Prepared.apply`. A step that you do not apply is freed when
                the iterator goes on.
            timeout: The deadline of one receive, in seconds or as a ``timedelta``.
            reconnect_timeout: How long to ask a sender that does not answer, in seconds
                or as a ``timedelta``. None: for ever. A receive that has begun asks for
                ``Receive(reconnect_timeout=)`` first.

        Raises:
            ClosedError: after, or because of, :meth:`shutdown`.
            TransportError: the sender did not answer for ``reconnect_timeout``.
            AuthenticationError, ProtocolError, StateDictError, StagingError: as in
                :meth:`recv_checkpoint`.
        """
        try:
            refuse_unknown(HTTPTransport.follow, unknown)
            origins = parse_joined(metadata)
        finally:
            del metadata  # a traceback with local variables would show the token
        follower = self._follower(origins, after, reconnect_timeout)
        options, attaching = self._options(
            into=into,
            have=have,
            select=select,
            progress=progress,
            share=share,
            hold=prepare,
        )
        ranks = RankOptions.of(rank_values, full=full)
        limit = self._limit(timeout)
        return self._follow(origins, follower, options, attaching, ranks, limit)

    @names_its_options
    def steps(
        self,
        /,
        metadata: str,
        after: int | None = None,
        *,
        reconnect_timeout: Timeout | None = None,
        **unknown: Never,
    ) -> AsyncIterator[int]:
        """Yield the number of each newer step that a sender publishes.

        The sender answers as soon as it publishes a step; nothing is polled. The
        iterator yields the newest step only, and skips those that were published while
        you did not ask. A step may be gone when you receive it
        (``StepNotFoundError``); then a newer one is there. :meth:`follow` also
        receives the steps.

        If the sender goes back to a lower step, or restarts and continues from one, the
        iterator yields that step; an event (``restart``) and a warning say so.

        If the connection breaks, or the sender is silent or restarts at the same
        address, the iterator asks again after a random delay of at most 2 seconds. A
        sender is silent if it has sent nothing for the stall timeout after the
        30 seconds that it was asked to wait. Waiting has no deadline of its own: use
        ``asyncio.timeout``. If that, or a cancellation, ends the wait, no step is lost,
        and you can go on with the same iterator. One task at a time may use it; a
        second one gets a ``LocalProtocolError``.

        Args:
            metadata: The string that the sender's :meth:`metadata` returned, or that
                of :func:`.join_metadata`. Each step then comes whole, from all senders.
            after: Yield only steps later than this one. None: begin with the step that
                is served now.
            reconnect_timeout: How long to ask a sender that does not answer, in seconds
                or as a ``timedelta``. None: for ever.

        Raises:
            AuthenticationError: the sender refuses the token. A restarted sender makes
                a new one, unless you give both ends the same (``token=``).
            TransportError: the sender did not answer for ``reconnect_timeout``.
            RemoteProtocolError: three answers in a row were not those of an aiockpt
                server.
            ClosedError: after, or because of, :meth:`shutdown`.
        """
        try:
            refuse_unknown(HTTPTransport.steps, unknown)
            origins = parse_joined(metadata)
        finally:
            del metadata  # a traceback with local variables would show the token
        return self._follower(origins, after, reconnect_timeout)

    async def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Stop serving and close everything. Idempotent.

        Calls that still run fail with ``ClosedError``. If cancelled, the shutdown
        continues in the background.

        Args:
            wait: Give receivers that still read the grace period.
        """
        self._lifetime.bind()
        if self._lifetime.closed and not wait:
            await self._withdraw(0.0)  # cut the grace of another call
        self._bridge.refuse()
        await self._lifetime.end(
            self._host.say_goodbye,
            partial(self._keep_nothing, self._grace if wait else 0.0),
            self._front.stop,
            self._host.stop,
            self._client.aclose,
            partial(self._lifetime.calls_ended, timeout=_SHUTDOWN_S),
            self._host.say_goodbye,
            self._free_warm,
            partial(self._bridge.aclose, timeout=_SHUTDOWN_S),
        )

    async def _keep_nothing(self, grace: float) -> None:
        self._stager.close()
        await self._withdraw(grace)

    async def _free_warm(self) -> None:
        if self._defaults.warm is not None:
            self._bridge.post(self._defaults.warm.close)

    def _limit(self, timeout: Timeout | None) -> float:
        return self._timeout if timeout is None else seconds(timeout)

    def _follower(
        self,
        origins: Sequence[Origin],
        after: int | None,
        reconnect_timeout: Timeout | None,
    ) -> Follower:
        silent = math.inf
        if reconnect_timeout is not None:
            silent = seconds(reconnect_timeout, "reconnect_timeout")
        after = None if after is None else exact_step(after)
        self._lifetime.check()
        return Follower(
            self._client,
            origins,
            self._lifetime,
            after=after,
            reconnect_timeout=silent,
        )

    async def _follow(
        self,
        origins: Sequence[Origin],
        follower: Follower,
        options: ReceiveOptions,
        attaching: AttachOptions,
        ranks: RankOptions,
        limit: float,
    ) -> AsyncGenerator[Any]:
        wait = CURRENT_STEP_WAIT_S
        senders = [[replace(origin, step_wait=wait)] for origin in origins]
        late: dict[int, float] = {}

        async def attempt(step: int) -> Any:
            how = now, attaching, ranks, limit
            return await self._receive(senders, step, *how, late=late)

        while True:
            now = replace(options, marks=Marks.of_caller(port_for))
            found = await follower.receive(attempt)
            if not options.hold:
                yield found
                continue
            _, prepared = found
            del found
            yield prepared
            prepared.discard()
            del prepared

    def _options(
        self,
        *,
        into: T | None,
        have: T | bool | None,
        select: Select | None,
        progress: Callable[[Progress], None] | None,
        share: bool = False,
        direct: bool = False,
        verify_shared: bool = False,
        hold: bool = False,
    ) -> tuple[ReceiveOptions, AttachOptions]:
        if hold and into is None:
            raise ValueError("prepare=True needs a template: pass into=")
        if share and into is not None:
            raise ValueError("share=True returns new tensors: leave out into=")
        if have is True and into is None:
            raise LocalProtocolError(
                "have=True reuses the bytes of the template: pass into= as well"
            )
        if isinstance(have, bool):
            have = into if have else None
        if share and have is not None:
            raise ValueError("share=True moves no bytes: leave out have=")
        attaching = AttachOptions(
            attach=self._attach if have is None else None,
            keep=share,
            through=into is not None and not (direct or hold or verify_shared),
            verify=verify_shared,
        )
        options = replace(
            self._defaults,
            into=into,
            direct=direct,
            hold=hold,
            have=have,
            select=listed(select),
            progress=progress,
            ports=port_for,
            marks=Marks.of_caller(port_for),
        )
        return options, attaching

    async def _receive(
        self,
        senders: Sequence[Sequence[Origin]],
        step: int | None,
        options: ReceiveOptions,
        attaching: AttachOptions,
        ranks: RankOptions,
        limit: float,
        *,
        late: dict[int, float] | None = None,
    ) -> T:
        """Receive ``step``, or the one served now, within ``limit`` seconds.

        ``late`` is that of `Peers`, if it is shared by several calls.
        """
        late = {} if late is None else late
        until = asyncio.get_running_loop().time() + limit
        joins = self._host.options is not None
        lease = Lease.begin(until, receiver=self._client.name, joins=joins)
        deadline = Deadline(limit, phase="fetch_manifest")
        wait = math.inf if step is not None else CURRENT_STEP_WAIT_S

        def leased(origin: Origin) -> Origin:
            return replace(origin, lease=lease, step_wait=min(origin.step_wait, wait))

        named: dict[str, Any] = {"deadline": until, "late": late}
        peers = [
            Peers.at(self._client, map(leased, origins), deadline.note, **named)
            for origins in senders
        ]
        name = name_of(peers)
        asked = "a checkpoint" if step is None else f"step {step}"
        deadline.what = f"{asked} from {name}"
        is_one = len(peers) == 1 and ranks == RankOptions()
        if not is_one and joins:
            raise LocalProtocolError(
                "joined metadata, rank_values= and full= do not work together with "
                "swarm= yet: receive with a transport that has no swarm="
            )
        if not is_one and attaching.keep:
            raise ValueError(
                "share=True returns tensors in the memory of one sender: leave it out, "
                "or joined metadata, rank_values= and full="
            )

        def attempt(step: int) -> Awaitable[Received]:
            deadline.what = f"step {step} from {name}"
            bridge = self._bridge
            if not is_one:
                shared = options, ranks, bridge, deadline
                return receive_joined(peers, step, *shared)
            swarm = Membership(self._client, self._host) if joins else None
            source = HttpSource(peers[0], bridge, attaching, swarm)
            return receive_from(source, step, options, bridge, deadline)

        newest = partial(newest_of, peers)

        with self._lifetime.call():
            async with deadline:
                await self._host.end_lingering()
                if step is not None:
                    received = await attempt(step)
                else:
                    pause = self._client.pause
                    _, received = await chase(newest, attempt, pause=pause)
                return cast("T", received.state_dict)


def _check_together(server: Server, auth: Auth, *, zero_copy: bool) -> None:
    """Refuse options that contradict each other.

    Raises:
        LocalProtocolError: two options exclude each other.
        MissingExtraError: a library for ``keep_base`` is not installed.
    """
    if server.keep_base and zero_copy:
        raise LocalProtocolError(
            "keep_base=True needs a copy of the previous step: leave out zero_copy=True"
        )
    if server.keep_base:
        check_available()
    if server.keep_last and not server.process:
        raise LocalProtocolError("keep_last= needs process=True")
    if server.process and zero_copy:
        raise LocalProtocolError(
            "process=True serves a copy in shared memory: leave out zero_copy=True"
        )
    if server.process and auth.ssl_context is not None:
        raise LocalProtocolError(
            "an ssl_context cannot be passed to the server process: leave out "
            "process=True, or let a proxy speak TLS"
        )
