"""The senders that a command's URLs name; needs aiohttp, and no torch."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import secrets
import ssl
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.text import format_bytes
from aiockpt.errors import (
    Advice,
    AiockptError,
    LimitExceededError,
    StepNotFoundError,
    StorageError,
    advice,
)
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.http.auth import find_credentials
from aiockpt.http.client import CheckpointClient
from aiockpt.http.download import ReceiveExtension
from aiockpt.http.follow import CURRENT_STEP_WAIT_S, chase
from aiockpt.http.handlers import ServerConfig
from aiockpt.http.listen import Endpoint
from aiockpt.http.manifests import LatestInfo
from aiockpt.http.options import (
    READER_CONNECTIONS,
    READER_STALL_TIMEOUT_S,
    READER_THREADS,
    Auth,
    Receive,
    Server,
    Swarm,
)
from aiockpt.http.peers import Peers, distinct
from aiockpt.http.protocol import Address, Lease, Origin
from aiockpt.http.retry import poll
from aiockpt.http.server import CheckpointServer
from aiockpt.http.store import Store
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.storage.files import open_regular
from aiockpt.swarm.endpoint import SwarmEndpoint
from aiockpt.swarm.membership import Membership, RelayHost

V = TypeVar("V")


class FoundCheckpoint(NamedTuple):
    """A checkpoint, and who has it; ``headers`` authenticate the manifest."""

    manifest: Manifest
    peers: Peers
    headers: Mapping[str, str]


class CommandReading(NamedTuple):
    """Who has a checkpoint, and what takes part besides them: the sender's swarm."""

    peers: Peers
    extension: ReceiveExtension


@dataclass(frozen=True, slots=True)
class SenderClient:
    """One sender of a checkpoint, or several, and how they are asked.

    Attributes:
        origins: Where they are.
        step: Which step was named; None: what is served now.
        wait: Seconds that a sender, or a step, may take to appear.
        options, auth: How clients behave that read a checkpoint.
        bridge: Threads for what blocks.
        deadline: Of the whole command.
        joins: Whether it joins the sender's swarm.
    """

    origins: list[Origin]
    step: int | None
    wait: float
    options: Receive
    auth: Auth
    bridge: Bridge
    deadline: Deadline
    joins: bool = False

    async def receive(self, receive: Callable[[int], Awaitable[V]]) -> V:
        """Await ``receive`` with the step that was named, or with what is served now.

        When the sender replaces what is served now, ``receive`` is called with the
        newest step.
        """
        if self.step is not None:
            return await receive(self.step)
        return (await chase(self._newest, receive, pause=asyncio.sleep))[1]

    async def find(
        self, step: int, *, keep: bool = False, late: float = 0.0
    ) -> FoundCheckpoint:
        """Return a checkpoint; ``keep`` asks the senders not to drop it meanwhile.

        A step that is not there yet is waited for as long as ``wait`` says, and for
        ``late`` seconds if it is about to be published. The deadline's message then
        says what was looked for, and what went wrong.

        Raises:
            StepNotFoundError: it is not served by then, or a newer step is.
            LimitExceededError: it is larger than ``--max-size``, or absurd.
        """
        last = _now() + max(self.wait, late)
        lease = Lease.begin(self.deadline.when, joins=self.joins) if keep else None

        def give_up(error: AiockptError) -> None:
            self.deadline.note(error)
            # The client itself would wait for the step until it is cancelled.
            if isinstance(error, StepNotFoundError) and _now() >= last:
                raise error

        async with aclosing(self.client(reconnect=self.wait)) as client:
            leased = [replace(each, lease=lease) for each in self.origins]
            until = min(last, self.deadline.when)
            peers = Peers.at(client, leased, give_up, deadline=until)
            self.deadline.what = f"step {step} from {peers.name}"
            try:
                with self.naming_max_size():
                    answer = await peers.manifest(step, step_wait=late or None)
            finally:
                await peers.let_go()  # `reading` goes on with a client of its own
        return FoundCheckpoint(answer.manifest, peers, answer.headers)

    @contextmanager
    def naming_max_size(self) -> Iterator[None]:
        """Name ``--max-size`` where the checkpoint is larger than that."""
        try:
            yield
        except LimitExceededError as error:
            if error.limit != self.options.limits.max_bytes:
                raise
            limit, actual = error.limit, error.actual
            raise _TooLargeError(error.what, limit=limit, actual=actual) from error

    @asynccontextmanager
    async def reading(self, found: FoundCheckpoint) -> AsyncIterator[CommandReading]:
        """Give what reads the chunks of a checkpoint; end its lease afterwards.

        At the end of the block, nothing is served any more.
        """
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(aclosing(self.client()))
            peers = replace(found.peers, client=client, on_retry=self.deadline.note)
            stack.push_async_callback(peers.let_go)
            peers.keep(found.manifest.step)
            extension = ReceiveExtension()
            if self.joins:
                host = await stack.enter_async_context(aclosing(_host(self.bridge)))
                extension = Membership(client, host)
            extension.receives(found.manifest, found.headers)
            stack.push_async_callback(extension.leave)

            async def end() -> None:
                await peers.let_go()
                await extension.leave(max(self.deadline.when - _now(), 0.0))
                await peers.end_lease(found.manifest.step)

            try:
                yield CommandReading(peers, extension)
            except AiockptError as error:
                if Advice.LOST not in advice(error):
                    await end()
                raise
            await end()

    def client(self, *, reconnect: float | None = None) -> CheckpointClient:
        """Return a client that tries for ``reconnect`` seconds to reach the peer."""
        options = self.options
        if reconnect is not None:
            options = replace(options, reconnect_timeout=reconnect)
        return CheckpointClient(
            options, self.auth, stall_timeout=READER_STALL_TIMEOUT_S, bridge=self.bridge
        )

    async def _newest(self) -> int:
        last = _now() + self.wait

        async with aclosing(self.client(reconnect=self.wait)) as client:
            peers = Peers.at(client, self.origins, self.deadline.note)
            self.deadline.what = f"a checkpoint from {peers.name}"

            async def ask() -> LatestInfo | None:
                left = max(last - _now(), 0.0)
                try:
                    return await peers.latest(wait=left)
                except StepNotFoundError as error:
                    self.deadline.note(error)
                    if _now() >= last:
                        raise
                return None

            return (await poll(ask, pause=asyncio.sleep)).step


def _host(bridge: Bridge) -> RelayHost:
    """Return what serves what this command receives, from the first relay on."""
    config = ServerConfig(
        options=Server(),
        token=secrets.token_urlsafe(),  # of what is served besides: nothing
        insecure=False,
        stall_timeout=READER_STALL_TIMEOUT_S,
        default_wait=0.0,
        max_wait=READER_STALL_TIMEOUT_S,
        hosts=frozenset(),
    )
    endpoint = Endpoint(Server(), advertise=None, tls=False)
    store = Store(config.options)
    server = CheckpointServer(config, store, SwarmEndpoint(config, bridge, store))
    return RelayHost(endpoint, server, bridge, Swarm())


class _TooLargeError(LimitExceededError):
    """The limit is the person's own, who raises it by an option."""

    def __str__(self) -> str:
        return (
            f"the checkpoint has {self.actual} bytes ({format_bytes(self.actual)}), "
            f"more than the {self.limit} ({format_bytes(self.limit)}) of --max-size; "
            "raise it if the sender is trusted"
        )


@asynccontextmanager
async def open_peer(
    addresses: Sequence[Address], arguments: argparse.Namespace
) -> AsyncIterator[SenderClient]:
    """Give the peer that URLs name, until the deadline of ``--timeout``.

    Raises:
        UsageError: the arguments contradict each other.
        StorageError: there is no certificate to trust.
    """
    options = vars(arguments)  # not all commands have all options
    step = _step_of(addresses, options.get("step"))
    step_wait = CURRENT_STEP_WAIT_S if step is None else math.inf
    origins = distinct(each.origin for each in addresses)
    timeout = options.get("timeout", math.inf)
    try:
        known = find_credentials(arguments.token, insecure=False, env=os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None
    receive = Receive(
        limits=Limits(max_bytes=options.get("max_size")),
        connections=READER_CONNECTIONS,
        reconnect_timeout=arguments.reconnect,
    )
    auth = Auth(token=known.to_send, client_ssl_context=_trusting(arguments.cafile))
    bridge = Bridge(threads=READER_THREADS, name="aiockpt")
    try:
        async with Deadline(timeout, phase="fetch_manifest") as deadline:
            yield SenderClient(
                [replace(each, step_wait=step_wait) for each in origins],
                step,
                options.get("wait", 0.0),
                receive,
                auth,
                bridge,
                deadline,
                joins=options.get("swarm", False),
            )
    finally:
        bridge.close()


def _step_of(given: Sequence[Address], step: int | None) -> int | None:
    named = sorted({each.step for each in given if each.step is not None})
    if len(named) > 1:
        raise UsageError(f"the URLs name steps {named[0]} and {named[1]}")
    if named and step not in (None, *named):
        raise UsageError(
            f"the URL names step {named[0]} and --step says {step}; leave one out"
        )
    return named[0] if named else step


def _trusting(cafile: str | None) -> ssl.SSLContext | None:
    if cafile is None:
        return None
    try:
        os.close(open_regular(Path(cafile)))  # a FIFO would block for ever
        context = ssl.create_default_context(cafile=cafile)
    except StorageError:
        raise
    except OSError as error:
        detail = f"it holds no usable certificate: {error.strerror or error}"
        raise StorageError(cafile, detail) from error
    # The sender's own certificate will do; it need not be that of an authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _now() -> float:
    return asyncio.get_running_loop().time()
