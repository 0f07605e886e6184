"""What is served changes, is somebody else's, or is not who it says: never mixed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from aiockpt import AiockptError
from aiockpt.testing import Answer, CutAfter, FaultProxy, assert_same
from tests.support.faultpeers import Hold, next_faults, noise, outcome
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.servers import cached
from tests.support.transports import (
    MIB,
    Transport,
    pair,
    port_of,
    proxied,
    through,
    transport,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]


KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@proves("fault 22", "threat T2")
@pytest.mark.parametrize("grace", [0.0, 5.0], ids=["no_grace", "grace"])
@pytest.mark.parametrize("act", ["send", "retract", "again"])
async def test_a_step_that_changes_in_the_middle_is_never_mixed(
    record: Record, act: str, grace: float
) -> None:
    """The old bits exactly, or a typed error."""
    old, new, size = noise(1), noise(1, step=2), MIB
    async with transport(grace=grace, chunk_bytes=64 << 10) as sender:
        for percent in record.part_of(range(100), few=5):
            await sender.send_checkpoint([], 1, old)
            async with (
                transport(connections=1, reconnect_timeout=0, timeout=30) as receiver,
                proxied(sender) as proxy,
            ):
                hold = Hold(size * percent // 100 + 1)
                next_faults(proxy, hold)
                fetch = receiver.recv_checkpoint(0, through(proxy, sender), 1)
                receiving = asyncio.create_task(fetch)
                await hold.reached.wait()
                changing = asyncio.create_task(changed(sender, act, new))
                # Where a retraction waits for the reader, they run beside each other.
                await (changing if act == "send" or not grace else asyncio.sleep(0))
                hold.go_on.set()
                allowed = [old, new] if act == "again" else [old]
                if not await outcome(receiving, *allowed):
                    record.note("some end with a typed error")
                await changing
            record.ran()


async def changed(sender: Transport, act: str, new: Any) -> None:
    """Do what a trainer does to a sender while somebody reads."""
    if act != "send":
        await sender.disallow_checkpoint()
    if act == "send":
        await sender.send_checkpoint([], 2, new)
    elif act == "again":  # the same step of another run
        await sender.send_checkpoint([], 1, new)


@proves("fault 32")
@pytest.mark.parametrize("other", ["content", "token", "key", "nothing", "stranger"])
async def test_another_jobs_server_on_the_port_is_told_apart(
    record: Record, other: str
) -> None:
    """The receiver notices it before a transfer, and in the middle of one."""
    mine, theirs = noise(1), noise(1, step=2)
    shared = {
        "token": "t",
        "chunk_bytes": 64 << 10,
        "manifest_key": KEY,
    }
    options: dict[str, Any] = dict(shared)
    if other == "token":
        options["token"] = "of-another-job"
    if other == "key":
        options["manifest_key"] = OTHER_KEY
    async with transport(**shared) as sender, transport(**options) as usurper:
        await sender.send_checkpoint([], 1, mine)
        if other in ("content", "token", "key"):
            await usurper.send_checkpoint([], 1, mine if other == "token" else theirs)
        for percent in [None, *record.part_of(range(0, 100, 5), few=3)]:
            async with (
                transport(**shared, connections=1, reconnect_timeout=0.2) as receiver,
                proxied(sender) as proxy,
            ):
                url = through(proxy, sender)
                take_over = usurping(proxy, usurper, other)
                if percent is None:
                    if other in ("content", "nothing"):
                        continue  # who has our secrets is who it says
                    take_over()
                    with pytest.raises(AiockptError):
                        await receiver.recv_checkpoint(0, url, 1, 1)
                else:
                    hold = Hold(MIB * percent // 100 + 1)
                    next_faults(proxy, hold)
                    fetch = receiver.recv_checkpoint(0, url, 1, 1.5)
                    receiving = asyncio.create_task(fetch)
                    await hold.reached.wait()
                    take_over()
                    await proxy.cut_all()
                    if other == "content":  # before the manifest, it is a good one
                        await outcome(receiving, mine, theirs)
                    else:
                        assert not await outcome(receiving, mine)
            record.ran()


def usurping(proxy: FaultProxy, usurper: Transport, other: str) -> Callable[[], None]:
    """Return what lets another server take the port."""

    def take_over() -> None:
        if other == "stranger":
            proxy.otherwise = Answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        proxy.target = ("127.0.0.1", port_of(usurper))

    return take_over


def certificate(
    authority: trustme.CA, **options: Any
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a server's context and one of a client that trusts the authority."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", **options).configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


@proves("fault 34")
@pytest.mark.parametrize("wrong", ["authority", "expired", "name"])
async def test_a_certificate_that_is_not_good_is_a_typed_error(
    record: Record, wrong: str
) -> None:
    """The message says what is wrong with it."""
    authority = trustme.CA()
    expired = datetime.now(UTC) - timedelta(days=1)
    options = {"not_after": expired} if wrong == "expired" else {}
    server, client = certificate(authority, **options)
    if wrong == "authority":
        _, client = certificate(trustme.CA())
    if wrong == "name":
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("elsewhere.invalid").configure_cert(server)
    async with (
        transport(ssl_context=server) as sender,
        transport(client_ssl_context=client, reconnect_timeout=0) as receiver,
    ):
        await sender.send_checkpoint([], 1, noise(1))
        with pytest.raises(AiockptError, match="certificate"):
            await receiver.recv_checkpoint(0, sender.metadata(), 1)
        record.ran()


@proves("fault 34")
@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_a_tls_stream_that_ends_early_is_a_body_that_ended_early(
    record: Record, reset: bool
) -> None:
    """Without close_notify, the receive resumes where the stream broke off."""
    server, client = certificate(trustme.CA())
    chance, state = record.chance(), noise(1)
    options = {"ssl_context": server, "client_ssl_context": client, "connections": 1}
    async with pair(**options, reconnect_timeout=10) as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        async with proxied(sender) as proxy:
            for _ in record.part_of(range(50), few=8):
                await proxy.cut_all()
                cut = CutAfter(chance.randrange(MIB), reset=reset)
                next_faults(proxy, cut)
                url = through(proxy, sender)
                assert_same(await receiver.recv_checkpoint(0, url, 1), state)
                record.ran()


@proves("fault 33")
async def test_a_cache_never_mixes_two_runs_of_a_step(
    record: Record, tmp_path: Path
) -> None:
    """It keeps slices of an old run; the sender has a new one under the same step."""
    chance = record.chance()
    states = {number: noise(2, step=number) for number in (1, 2)}
    async with (
        transport(token="t", chunk_bytes=64 << 10, grace=0.0) as sender,
        cached(tmp_path, sender.address()) as port,
    ):
        url = sender.metadata().replace(str(port_of(sender)), str(port))
        for _ in record.part_of(range(15), few=3):
            number = chance.choice([1, 2])
            await sender.send_checkpoint([], 1, states[number])
            async with transport(
                token="t", connections=2, reconnect_timeout=0.2, timeout=20
            ) as receiver:
                receiving = asyncio.create_task(receiver.recv_checkpoint(0, url, 1))
                await asyncio.sleep(chance.uniform(0, 0.02))
                if chance.random() < 0.5:
                    await sender.send_checkpoint([], 1, states[3 - number])
                if not await outcome(receiving, states[1], states[2]):
                    record.note("some end with a typed error")
            record.ran()
