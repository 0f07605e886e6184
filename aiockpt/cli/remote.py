"""A peer as the command line sees it; needs aiohttp, and no torch."""

from __future__ import annotations

import argparse
import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from aiockpt._bridge import Bridge
from aiockpt._deadline import Deadline
from aiockpt.cli.options import Address, UsageError
from aiockpt.cli.text import format_bytes
from aiockpt.errors import (
    AiockptError,
    LimitExceededError,
    StepNotFoundError,
    StorageError,
)
from aiockpt.http.client import CheckpointClient, ClientConfig
from aiockpt.http.credentials import find_credentials
from aiockpt.http.origin import Origin, distinct, origin_of
from aiockpt.wire.http import Source
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import Manifest

__all__ = ["Found", "Peer", "peer_of"]

_THREADS = 2
_CONNECTIONS = 4
_STALL_TIMEOUT = 10.0
_POLL = 0.5


class Found(NamedTuple):
    """A checkpoint, and who has it."""

    manifest: Manifest
    origin: Origin


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

    async def find(self, deadline: Deadline, *, wait: float) -> Found:
        """Return the checkpoint; a peer or a step may take ``wait`` seconds to appear.

        ``deadline`` is told what is looked for, and what went wrong.

        Raises:
            StepNotFoundError: it is not served by then, or a newer step is.
            LimitExceededError: it is larger than ``--max-size``, or absurd.
        """
        last = _now() + wait
        async with aclosing(self.client(reconnect=wait)) as client:
            origin = origin_of(client, self.sources)
            which = "a checkpoint" if self.step is None else f"step {self.step}"
            deadline.what = f"{which} from {origin.name}"
            while True:
                try:
                    manifest = await self._ask(origin, last, deadline)
                    deadline.what = f"step {manifest.step} from {origin.name}"
                    return Found(manifest, origin)
                except StepNotFoundError as error:
                    deadline.last_error = str(error)
                    superseded = self.step is None and error.step is not None
                    if not superseded and (self.step is not None or _late(last)):
                        raise
                await asyncio.sleep(_POLL)

    async def _ask(self, origin: Origin, last: float, deadline: Deadline) -> Manifest:
        def give_up(error: AiockptError) -> None:
            deadline.last_error = str(error)
            # The client itself would wait for the step until it is cancelled.
            if isinstance(error, StepNotFoundError) and _late(last):
                raise error

        step = self.step
        if step is None:
            step = (await origin.fetch_latest()).step
        try:
            return await origin.fetch_manifest(
                step, deadline=min(last, deadline.when), on_retry=give_up
            )
        except LimitExceededError as error:
            if error.limit != self.config.limits.max_bytes:
                raise
            limit, actual = error.limit, error.actual
            raise _TooLargeError(error.what, limit=limit, actual=actual) from error


class _TooLargeError(LimitExceededError):
    """The limit is the person's own, who raises it by an option."""

    def __str__(self) -> str:
        return (
            f"the checkpoint has {self.actual} bytes ({format_bytes(self.actual)}), "
            f"more than the {self.limit} ({format_bytes(self.limit)}) of --max-size; "
            "raise it if the sender is trusted"
        )


@asynccontextmanager
async def peer_of(arguments: argparse.Namespace) -> AsyncIterator[Peer]:
    """Give the peer that a command's arguments name; end its threads afterwards.

    Raises:
        UsageError: the arguments contradict each other.
    """
    given: list[Address] = arguments.urls
    bridge = Bridge(threads=_THREADS, name="aiockpt")
    try:
        yield Peer(
            distinct(each.source for each in given),
            _step_of(given, getattr(arguments, "step", None)),
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
