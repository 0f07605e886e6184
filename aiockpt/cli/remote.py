"""A peer as the command line sees it; needs aiohttp, and no torch."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from aiockpt.cli.options import Address, UsageError
from aiockpt.cli.text import format_bytes
from aiockpt.errors import (
    AiockptError,
    LimitExceededError,
    StepNotFoundError,
    StorageError,
)
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.http.auth import find_credentials
from aiockpt.http.client import CheckpointClient, ClientConfig
from aiockpt.http.manifests import PATIENCE, LatestInfo, chase
from aiockpt.http.protocol import Lease, Source
from aiockpt.http.retry import poll
from aiockpt.http.sources import Sources, distinct
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline

__all__ = ["Found", "Peer", "peer_of"]

V = TypeVar("V")

_THREADS = 2
_CONNECTIONS = 4
_STALL_TIMEOUT = 10.0


class Found(NamedTuple):
    """A checkpoint, and who has it."""

    manifest: Manifest
    origin: Sources


@dataclass(frozen=True, slots=True)
class Peer:
    """Where to fetch, which step (None: what is served), and by what means."""

    sources: list[Source]
    step: int | None
    config: ClientConfig
    bridge: Bridge

    def client(self, *, reconnect: float) -> CheckpointClient:
        """Return a client that tries for ``reconnect`` seconds to reach the peer."""
        config = replace(self.config, reconnect_timeout=reconnect)
        return CheckpointClient(config, None, run=self.bridge.run)

    async def receive(
        self,
        receive: Callable[[int], Awaitable[V]],
        deadline: Deadline,
        *,
        wait: float,
    ) -> V:
        """Await ``receive`` with the step that was named, or with what is served now.

        When the sender replaces what is served now, ``receive`` is called with the
        newest step. A peer or a step may take ``wait`` seconds to appear.
        """
        if self.step is not None:
            return await receive(self.step)
        find = partial(self._newest, deadline, wait=wait)
        return (await chase(find, receive, pause=asyncio.sleep))[1]

    async def find(self, step: int, deadline: Deadline, *, wait: float) -> Found:
        """Return a checkpoint; the peer or the step may take ``wait`` seconds to come.

        ``deadline`` is told what is looked for, and what went wrong.

        Raises:
            StepNotFoundError: it is not served by then, or a newer step is.
            LimitExceededError: it is larger than ``--max-size``, or absurd.
        """
        last = _now() + wait

        def give_up(error: AiockptError) -> None:
            deadline.last_error = str(error)
            # The client itself would wait for the step until it is cancelled.
            if isinstance(error, StepNotFoundError) and _late(last):
                raise error

        async with aclosing(self.client(reconnect=wait)) as client:
            origin = Sources.of(client, self.sources)
            deadline.what = f"step {step} from {origin.name}"
            try:
                reply = await origin.fetch_manifest(
                    step, deadline=min(last, deadline.when), on_retry=give_up
                )
            except LimitExceededError as error:
                if error.limit != self.config.limits.max_bytes:
                    raise
                limit, actual = error.limit, error.actual
                raise _TooLargeError(error.what, limit=limit, actual=actual) from error
        return Found(reply.manifest, origin)

    async def _newest(self, deadline: Deadline, *, wait: float) -> int:
        last = _now() + wait

        def note(error: AiockptError) -> None:
            deadline.last_error = str(error)

        async with aclosing(self.client(reconnect=wait)) as client:
            origin = Sources.of(client, self.sources)
            deadline.what = f"a checkpoint from {origin.name}"

            async def ask() -> LatestInfo | None:
                left = max(last - _now(), 0.0)
                try:
                    return await origin.fetch_latest(wait=left, on_retry=note)
                except StepNotFoundError as error:
                    note(error)
                    if _late(last):
                        raise
                return None

            return (await poll(ask, pause=asyncio.sleep)).step


class _TooLargeError(LimitExceededError):
    """The limit is the person's own, who raises it by an option."""

    def __str__(self) -> str:
        return (
            f"the checkpoint has {self.actual} bytes ({format_bytes(self.actual)}), "
            f"more than the {self.limit} ({format_bytes(self.limit)}) of --max-size; "
            "raise it if the sender is trusted"
        )


@asynccontextmanager
async def peer_of(
    arguments: argparse.Namespace, lease: Lease | None = None
) -> AsyncIterator[Peer]:
    """Give the peer that a command's arguments name; end its threads afterwards.

    ``lease`` keeps what is received while newer steps are published.

    Raises:
        UsageError: the arguments contradict each other.
    """
    given: list[Address] = arguments.urls
    step = _step_of(given, getattr(arguments, "step", None))
    patience = PATIENCE if step is None else math.inf
    bridge = Bridge(threads=_THREADS, name="aiockpt")
    try:
        yield Peer(
            [
                replace(each, lease=lease, patience=patience)
                for each in distinct(a.source for a in given)
            ],
            step,
            _config_of(arguments),
            bridge,
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


def _config_of(arguments: argparse.Namespace) -> ClientConfig:
    try:
        known = find_credentials(arguments.token, insecure=False, env=os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return ClientConfig(
        max_concurrency=_CONNECTIONS,
        stall_timeout=_STALL_TIMEOUT,
        connect_timeout=_STALL_TIMEOUT,
        reconnect_timeout=arguments.reconnect,
        token=known.token if known.shared else None,
        limits=Limits(max_bytes=getattr(arguments, "max_size", None)),
        ssl_context=_trusting(arguments.cafile),
        fast_path=True,
    )


def _trusting(cafile: str | None) -> ssl.SSLContext | None:
    if cafile is None:
        return None
    try:
        context = ssl.create_default_context(cafile=cafile)
    except OSError as error:
        detail = f"it holds no usable certificate: {error.strerror or error}"
        raise StorageError(cafile, detail) from error
    # The sender's own certificate will do; it need not be that of an authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _now() -> float:
    return asyncio.get_running_loop().time()


def _late(deadline: float) -> bool:
    return _now() >= deadline
