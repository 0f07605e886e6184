"""A peer that says for ever that it will answer (HTTP 1xx) is refused at once."""

from __future__ import annotations

import asyncio

import pytest

import aiockpt
from aiockpt.errors import RemoteProtocolError
from aiockpt.testing import Fault, FaultProxy, assert_same
from aiockpt.testing.faults import Pipe
from tests.support.hostile import CONTINUE, HINTS, flooding, stalls
from tests.support.proofs import proves
from tests.support.transports import pair, proxied, through, transport, weights

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]

EMPTY = b"\r\n" * 50_000  # lines in front of an answer, which HTTP lets clients ignore


@proves("threat D4", "fault 50")
@pytest.mark.parametrize(
    ("piece", "asked"),
    [
        *((piece, True) for piece in (CONTINUE * 4000, HINTS * 400, CONTINUE)),
        *((piece, False) for piece in (CONTINUE, EMPTY)),
    ],
)
async def test_a_flood_ends_the_receive_and_leaves_the_loop_alone(
    piece: bytes, asked: bool
) -> None:
    """It does not wait for its deadline, and says that the peer is at fault."""
    with flooding(piece, asked=asked) as port:
        async with transport(reconnect_timeout=0, token="t") as receiver:
            url = f"http://127.0.0.1:{port}/checkpoint/"
            async with stalls() as longest:
                with pytest.raises(aiockpt.AiockptError) as caught:
                    await receiver.recv_checkpoint(0, url, 1, timeout=50)
    assert isinstance(caught.value, RemoteProtocolError), caught.value
    assert str(port) in str(caught.value)
    assert longest[0] < 0.5, "the loop stood still"


async def test_a_slow_flood_is_no_sign_of_life() -> None:
    """The stall timeout ends it, as it ends silence; the deadline otherwise."""
    with flooding(CONTINUE, pause=0.05) as port:
        async with transport(reconnect_timeout=0, stall_timeout=1) as receiver:
            url = f"http://127.0.0.1:{port}/checkpoint/#t"
            with pytest.raises(aiockpt.TransportError):
                await receiver.recv_checkpoint(0, url, 1, timeout=2)


class Announcing(Fault):
    """Puts informational answers in front of the first answer of a connection."""

    def __init__(self, piece: bytes, size: int) -> None:
        self._piece, self._size = piece, size

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Send them in small pieces, and then what was to be sent."""
        if at == 0:
            for start in range(0, len(self._piece), self._size):
                await pipe.send(self._piece[start : start + self._size])
                await asyncio.sleep(0)
        await pipe.send(data)


@pytest.mark.parametrize(
    ("piece", "size"),
    [(CONTINUE, 10_000), (CONTINUE * 3 + HINTS, 7), (b"\r\n" + CONTINUE, 1)],
)
async def test_a_few_of_them_are_allowed(piece: bytes, size: int) -> None:
    """A proxy may send some in any pieces, and HTTP allows it."""
    async with pair(state=weights(mib=4), connections=2) as (sender, receiver):
        proxy: FaultProxy
        async with proxied(sender, otherwise=Announcing(piece, size)) as proxy:
            for _ in range(2):
                got = await receiver.recv_checkpoint(0, through(proxy, sender), 1)
                assert_same(got, weights(mib=4))
