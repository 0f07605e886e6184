"""``Server(keep_base=True)``: a receiver fetches the elements that have changed."""

from __future__ import annotations

import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from typing import Any

import pytest

from aiockpt import HTTPTransport, Progress, Server
from aiockpt.errors import LocalProtocolError, MissingExtraError
from aiockpt.testing import assert_same
from tests.support.transports import (
    MIB,
    Transport,
    receive,
    transport,
    weights_of,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("no_blocking"),
]

SENDER = {"keep_base": True}
NBYTES = 4 * MIB


class Exchange:
    """A sender that keeps a base, and a receiver; each on loopback, by sockets."""

    def __init__(self, sender: Transport, receiver: Transport) -> None:
        self.sender, self.receiver, self.step = sender, receiver, 0

    async def send(self, state: Any) -> None:
        """Publish the next step."""
        self.step += 1
        await self.sender.send_checkpoint(step=self.step, state_dict=state)

    async def receive(self, **options: Any) -> tuple[Any, int]:
        """Receive the step; return it, and the bytes of the segment that came."""
        seen: list[Progress] = []
        state = await receive(
            self.sender, self.receiver, self.step, progress=seen.append, **options
        )
        last = seen[-1]
        assert last.bytes_done == last.bytes_total
        assert last.chunks_done == last.chunks_total
        return state, last.bytes_done - last.bytes_reused


def given(how: str, held: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a receive by one that holds ``held``."""
    if how == "new":
        return {"have": held}
    if how == "into another":
        return {"into": weights_of(0, seed=9), "have": held}
    return {"into": held, "have": True, "direct": how == "into itself, direct"}


@pytest.mark.parametrize(
    ("how", "process"),
    [
        ("new", False),
        ("into another", False),
        ("into itself", True),
        ("into itself, direct", False),
    ],
)
async def test_only_changed_elements_are_fetched(how: str, process: bool) -> None:
    """Each of several steps takes less than two percent of the bytes."""
    async with (
        transport(process=process, **SENDER) as sender,
        transport(same_host=False) as receiver,
    ):
        link = Exchange(sender, receiver)
        await link.send(weights_of(0))
        held, nbytes = await link.receive()
        assert nbytes >= NBYTES
        for step in (1, 2):
            await link.send(weights_of(step))
            held, nbytes = await link.receive(**given(how, held))
            assert_same(held, weights_of(step))
            assert nbytes < 0.02 * NBYTES


async def test_a_receiver_of_another_model_gets_the_bytes() -> None:
    """Its first chunks show that deltas do not help."""
    async with transport(**SENDER) as sender, transport(same_host=False) as receiver:
        link = Exchange(sender, receiver)
        await link.send(weights_of(0))
        await link.send(weights_of(1))
        got, nbytes = await link.receive(into=weights_of(0, seed=5), have=True)
        assert_same(got, weights_of(1))
        assert NBYTES <= nbytes < 1.05 * NBYTES


@pytest.mark.parametrize("missed", [False, True])
async def test_unchanged_chunks_are_left_alone(missed: bool) -> None:
    """Those of a frozen layer, also if the receiver does not hold the base."""
    async with (
        transport(chunk_bytes=64 << 10, **SENDER) as sender,
        transport(same_host=False) as receiver,
    ):
        link = Exchange(sender, receiver)
        state = weights_of(0)
        await link.send(state)
        held, _ = await link.receive()
        frozen = {name: state[name] for name in ("layer1", "layer3")}
        for step in (1, 2) if missed else (1,):
            state = {**weights_of(step), **frozen}
            await link.send(state)
        metadata = sender.metadata()
        prepared = await receiver.prepare(metadata, into=held, have=True)
        thawed = sum(each.nbytes for name, each in state.items() if name not in frozen)
        assert prepared.nbytes <= thawed + (2 * len(frozen) << 16)
        prepared.apply()
        assert_same(held, state)


async def test_everything_changed_costs_no_more_than_a_full_receive() -> None:
    """The sender answers with the range itself."""
    async with transport(**SENDER) as sender, transport(same_host=False) as receiver:
        link = Exchange(sender, receiver)
        await link.send(weights_of(0))
        held, full = await link.receive()
        await link.send(weights_of(1, seed=1))
        got, nbytes = await link.receive(into=held, have=True)
        assert_same(got, weights_of(1, seed=1))
        assert nbytes <= 1.05 * full


async def test_a_changed_element_of_the_receiver_costs_one_chunk() -> None:
    """The receiver fetches this chunk whole, and the others by deltas."""
    async with (
        transport(chunk_bytes=64 << 10, **SENDER) as sender,
        transport(same_host=False) as receiver,
    ):
        link = Exchange(sender, receiver)
        await link.send(weights_of(0))
        held, _ = await link.receive()
        held["layer2"][1000] += 1
        await link.send(weights_of(1))
        got, nbytes = await link.receive(into=held, have=True)
        assert_same(got, weights_of(1))
        assert nbytes < 0.05 * NBYTES


async def test_a_base_of_another_layout_is_not_used() -> None:
    """An added tensor moves the others to other chunks."""
    async with transport(**SENDER) as sender, transport(same_host=False) as receiver:
        link = Exchange(sender, receiver)
        await link.send(weights_of(0))
        held, _ = await link.receive()
        state = {"added": weights_of(0, seed=3)["layer0"], **weights_of(1)}
        await link.send(state)
        got, _ = await link.receive(have=held)
        assert_same(got, state)


async def test_a_retraction_drops_the_base() -> None:
    """Nothing of a withdrawn checkpoint stays in memory."""
    async with transport(**SENDER) as sender, transport(same_host=False) as receiver:
        link = Exchange(sender, receiver)
        await link.send(weights_of(0))
        held, _ = await link.receive()
        await sender.disallow_checkpoint()
        await link.send(weights_of(1))
        got, nbytes = await link.receive(into=held, have=True)
        assert_same(got, weights_of(1))
        assert nbytes >= NBYTES


async def test_several_sources_give_deltas() -> None:
    """Each source has a base of its own."""
    async with (
        transport(**SENDER) as one,
        transport(**SENDER) as other,
        transport(same_host=False) as receiver,
    ):
        for step in range(2):
            for sender in (one, other):
                await sender.send_checkpoint(step=step, state_dict=weights_of(step))
        sources = [one.metadata(), other.metadata()]
        got = await receiver.recv_checkpoint(
            metadata=sources, step=1, into=weights_of(0), have=True
        )
        assert_same(got, weights_of(1))
        sent = one.statistics().bytes_sent + other.statistics().bytes_sent
        assert sent < 0.02 * NBYTES


async def test_zero_copy_cannot_keep_a_base() -> None:
    """The memory of the previous step is the state's own, and has changed."""
    with pytest.raises(LocalProtocolError, match="leave out zero_copy"):
        HTTPTransport(zero_copy=True, server=Server(keep_base=True))


async def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor of a sender says so."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"aiockpt\[delta\]"):
        HTTPTransport(server=Server(keep_base=True))


async def test_a_receiver_without_the_library_fetches_the_bytes() -> None:
    """It does not ask for what it cannot read."""
    program = (
        "import asyncio, sys, torch\n"
        "sys.modules['zstandard'] = None\n"
        "from tests.support.transports import transport, weights_of\n"
        "async def main():\n"
        "    async with transport(same_host=False) as receiver:\n"
        "        into, seen = weights_of(0), []\n"
        "        options = {'into': into, 'have': True, 'progress': seen.append}\n"
        "        await receiver.recv_checkpoint(0, sys.argv[1], 2, **options)\n"
        "        same = [torch.equal(v, into[k]) for k, v in weights_of(1).items()]\n"
        "        print(all(same), seen[-1].bytes_reused < 1000)\n"
        "asyncio.run(main())\n"
    )
    async with transport(**SENDER) as sender:
        for step in (1, 2):
            await sender.send_checkpoint(step=step, state_dict=weights_of(step - 1))
        command = (sys.executable, "-c", program, sender.metadata())
        process = await create_subprocess_exec(*command, stdout=PIPE)
        out, _ = await process.communicate()
    assert out == b"True True\n"
