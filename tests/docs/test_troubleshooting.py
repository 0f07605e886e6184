"""The messages on the page of troubleshooting are those that the code gives."""

from __future__ import annotations

import builtins
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

import aiockpt
from aiockpt import errors
from aiockpt.checkpointers import RankInfo
from tests.support.mesh_ranks import assembled

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "troubleshooting.md"
MESSAGE = re.compile(r"^(\w+(?:Error)): (.+)$", re.MULTILINE)
LOOPBACK = aiockpt.Server(host="127.0.0.1")
STATE = {"w": torch.ones(4)}
IMPATIENT = aiockpt.Receive(reconnect_timeout=0)


def plain(message: str) -> str:
    """Replace what differs from host to host: addresses, paths, names and numbers."""
    message = re.sub(r"'?\b\d+\.\d+\.\d+\.\d+'?(, |:)?(\d+)?", "HOST", message)
    message = re.sub(r"//[\w.-]+(:\d+)?/", "//HOST/", message)
    message = re.sub(r"//HOST:?\d*/", "//HOST/", message)
    message = re.sub(r"[\w/.-]+(?=: (it holds|its ranks|there is no))", "PATH", message)
    message = re.sub(r"interfaces here: [^)]*", "interfaces here", message)
    message = re.sub(r"(missing keys:) \S+", r"\1 KEY", message)
    return re.sub(r"\d+(\.\d+)?", "N", message)


TEXT = "\n".join(re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL))
ON_PAGE = {(kind, plain(message)) for kind, message in MESSAGE.findall(TEXT)}


async def shows(action: Callable[[], Awaitable[object]]) -> None:
    """Assert that what ``action`` raises is on the page, by its class and message."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - the page says which
        await action()
    assert (raised.type.__name__, plain(str(raised.value))) in ON_PAGE


def test_every_class_on_the_page_exists() -> None:
    """A message begins with the name of a class."""
    named = {kind for kind, _ in ON_PAGE}
    assert len(named) > 12
    for name in named:
        assert hasattr(errors, name) or hasattr(builtins, name), name


@pytest.mark.asyncio
async def test_receives_that_fail() -> None:
    """Nobody is there, a wrong token, another step, a template of another shape."""
    async with (
        aiockpt.HTTPTransport(server=LOOPBACK) as sender,
        aiockpt.HTTPTransport(server=LOOPBACK, receive=IMPATIENT) as receiver,
    ):
        await sender.send_checkpoint(step=3, state_dict=STATE)
        metadata = sender.metadata()
        address, _, _ = metadata.partition("#")

        def receive(metadata: str = metadata, **options: Any) -> Awaitable[Any]:
            return receiver.recv_checkpoint(metadata=metadata, **options)

        await shows(lambda: receive("http://127.0.0.1:1/checkpoint/#token"))
        await shows(lambda: receive("http://trainer-0.invalid:1/checkpoint/#token"))
        await shows(lambda: receive(f"{address}#wrong"))
        await shows(lambda: receive(address))
        await shows(lambda: receive(step=2))
        await shows(lambda: receive(step=9, timeout=0.2))
        await shows(lambda: receive(metadata.replace("/checkpoint/", "/other/")))
        await shows(lambda: receive(metadata.replace("http:", "https:")))
        await shows(lambda: receive(into={"w": torch.ones(4, dtype=torch.bfloat16)}))
        await shows(lambda: receive(select=["adapters"]))
        await sender.disallow_checkpoint()
        await shows(lambda: receive(timeout=0.2))


@pytest.mark.asyncio
async def test_a_sender_that_is_silent() -> None:
    """It takes the connection and says nothing, or does not answer the connection."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.listen(0)
        address = listening.getsockname()
        url = f"http://127.0.0.1:{address[1]}/checkpoint/#token"
        async with aiockpt.HTTPTransport(
            server=LOOPBACK, receive=IMPATIENT, stall_timeout=0.3
        ) as receiver:

            async def receive() -> None:
                await receiver.recv_checkpoint(metadata=url, step=3)

            await shows(receive)
            for _ in range(4):  # now the kernel drops what asks for a connection
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(address)
            await shows(receive)


@pytest.mark.asyncio
async def test_receives_that_this_side_refuses() -> None:
    """A limit, hosts that are not allowed, a manifest without a MAC."""
    async with aiockpt.HTTPTransport(server=LOOPBACK) as sender:
        await sender.send_checkpoint(step=3, state_dict=STATE)
        for options in (
            {"receive": aiockpt.Receive(limits=aiockpt.Limits(max_bytes=8))},
            {"auth": aiockpt.Auth(peers=["10.0.0.0/8"])},
            {"auth": aiockpt.Auth(manifest_key="0123456789abcdef")},
        ):
            async with aiockpt.HTTPTransport(server=LOOPBACK, **options) as receiver:
                await shows(
                    lambda receiver=receiver: receiver.recv_checkpoint(  # type: ignore[misc]
                        metadata=sender.metadata()
                    )
                )


@pytest.mark.asyncio
async def test_tls_that_is_not_trusted() -> None:
    """A certificate of an unknown authority, and a port that speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    auth = aiockpt.Auth(ssl_context=context)
    async with (
        aiockpt.HTTPTransport(server=LOOPBACK, auth=auth) as sender,
        aiockpt.HTTPTransport(server=LOOPBACK) as receiver,
    ):
        await sender.send_checkpoint(step=1, state_dict=STATE)
        metadata = sender.metadata()
        await shows(lambda: receiver.recv_checkpoint(metadata=metadata))
        plainly = metadata.replace("https", "http")
        await shows(lambda: receiver.recv_checkpoint(metadata=plainly, timeout=1))


@pytest.mark.asyncio
async def test_sends_that_fail() -> None:
    """Leaves that cannot travel, a port that is taken, a transport that is closed."""
    async with aiockpt.HTTPTransport(server=LOOPBACK) as sender:
        for state in (
            {"model": {"hook": object()}},
            {"model": {"emb": torch.eye(3).to_sparse()}},
            torch.nn.Linear(2, 2),
        ):
            await shows(
                lambda state=state: sender.send_checkpoint(step=4, state_dict=state)  # type: ignore[misc]
            )
        port = int(sender.address().split(":")[2].split("/")[0])
        taken = aiockpt.Server(host="127.0.0.1", port=port)
        second: aiockpt.HTTPTransport[Any] = aiockpt.HTTPTransport(server=taken)
        await shows(second.start)
        await second.shutdown()
    await shows(lambda: sender.send_checkpoint(step=5, state_dict=STATE))


@pytest.mark.asyncio
async def test_addresses_that_are_not_there() -> None:
    """An interface that the host does not have."""
    sender = aiockpt.HTTPTransport[Any](server=aiockpt.Server(interface="ib0"))
    await shows(sender.start)
    await sender.shutdown()


@pytest.mark.asyncio
async def test_saves_and_loads_that_fail(tmp_path: Path) -> None:
    """Nothing to load, other files in the way, ranks that cannot meet or agree."""

    async def load() -> None:
        aiockpt.load(tmp_path / "step-9")

    async def save() -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with aiockpt.make_sync_checkpointer() as checkpointer:
            checkpointer.save(STATE, tmp_path)

    async def meet() -> None:
        with aiockpt.make_sync_checkpointer(rank_info=RankInfo(0, 2)) as checkpointer:
            checkpointer.save(STATE, tmp_path / "step-1")

    async def choose() -> None:
        def state_of(rank: int) -> dict[str, Any]:
            return {**STATE, "random": torch.full((8,), rank), "position": rank}

        aiockpt.load(assembled(tmp_path / "step-2", 2, state_of))

    for action in (load, save, meet, choose):
        await shows(action)
