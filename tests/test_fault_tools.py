"""A network of one's own, a bad link, and too few descriptors and ports."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import aiockpt
from aiockpt.testing import FaultUnavailableError
from tests.support.link import Link
from tests.support.namespaces import Namespace, few_ports

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]

PLACES = Path(aiockpt.__file__).parents[1], Path(__file__).parent / "support"
SPEECH = random.Random(0).randbytes(1 << 20)


@pytest.fixture(autouse=True)
def permitted() -> None:
    """Skip, with the reason, where there can be no network of one's own."""
    try:
        Namespace().close()
    except FaultUnavailableError as error:
        pytest.skip(str(error))


def interfaces() -> set[str]:
    """Return the network interfaces that the thread sees."""
    return {name for _, name in socket.if_nameindex()}


async def speech_over(link: Link) -> bytes:
    """Say a speech at the far end, and return what the near end hears."""

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SPEECH)
        writer.close()

    with link.far.entered():
        server = await asyncio.start_server(speak, link.far_address, 7000)
    try:
        with link.near.entered():
            reader, writer = await asyncio.open_connection(link.far_address, 7000)
        heard = await reader.read(-1)
        writer.close()
        return heard
    finally:
        server.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"loss": 0.02}, {"corruption": 0.02}, {"delay": 0.005, "jitter": 0.003}],
    ids=["good", "lossy", "damaging", "late"],
)
async def test_tcp_gets_through_a_bad_link(options) -> None:
    """Late, lost and damaged packets are counted; the bytes are right."""
    async with Link(**options) as link:
        assert await speech_over(link) == SPEECH
        now = link.statistics()
        assert now.packets > len(SPEECH) / 9000
        assert bool(now.lost) == ("loss" in options)
        assert bool(now.damaged) == ("corruption" in options)
        assert repr(link) == f"<Link whole packets={link.statistics().packets}>"


async def test_a_delay_is_that_of_each_way() -> None:
    """So a connection takes at least two."""
    async with Link(delay=0.05) as link:
        start = asyncio.get_running_loop().time()
        await speech_over(link)
        assert asyncio.get_running_loop().time() - start >= 0.1


async def test_a_link_that_is_cut_says_nothing_until_it_is_mended() -> None:
    """Neither end hears an error; then what was said arrives."""
    async with Link() as link:
        link.cut()
        hearing = asyncio.create_task(speech_over(link))
        while not link.statistics().lost:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.001)
        assert not hearing.done()
        link.mend()
        assert await hearing == SPEECH


async def test_a_namespace_has_a_loopback_and_nothing_else() -> None:
    """The thread is back in its own network after the block; so it is after errors."""
    before = interfaces()
    with Namespace() as namespace:
        with namespace.entered():
            assert interfaces() == {"lo"}
        with pytest.raises(KeyError), namespace.entered():
            raise KeyError
        assert interfaces() == before


async def test_a_link_leaves_no_interface_behind() -> None:
    """Neither in this network nor in one of its own."""
    before = interfaces()
    async with Link() as link:
        with link.near.entered():
            assert interfaces() == {"lo", "tun0"}
    assert interfaces() == before


async def test_few_ports_are_few() -> None:
    """The next connection is one too many."""
    with few_ports(4), socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        full = pytest.raises(OSError, match="assign requested address")
        with connections(address, 3), full:  # the server has the fourth
            socket.create_connection(address)


@contextmanager
def connections(address: tuple[str, int], count: int) -> Iterator[None]:
    """Have so many connections."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(address))
        yield


NOBODY = """
import os
from aiockpt.testing import FaultUnavailableError
from tests.support.namespaces import Namespace
os.setgid(65534)
os.setuid(65534)
try:
    Namespace()
except FaultUnavailableError as error:
    print(error)
"""


async def test_who_is_not_root_is_told_so() -> None:
    """Nothing is left half made."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", NOBODY),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert b"needs root (CAP_SYS_ADMIN" in said
