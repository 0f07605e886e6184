"""The path of a transport whose group moves a device's memory, without the device."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import IntegrityError
from aiockpt.errors import (
    PeerFailedError,
    ProcessGroupError,
    RemoteProtocolError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from aiockpt.memory.arena import Arena
from aiockpt.memory.multilinear import ROW_BYTES, fold, keys
from aiockpt.pg.device import (
    DeviceChannel,
    MixedSegment,
    decode_placement,
    encode_placement,
)
from aiockpt.testing import assert_same
from aiockpt.testing.conformance.transports import sample
from tests.support.accelerators import (
    CPU,
    FakeAccelerator,
    FakeBoard,
    device_transports,
)
from tests.support.groups import both, flip_bits, moved, transports, watch_leaving
from tests.support.servers import settle
from tests.support.transports import weights

pytestmark = pytest.mark.usefixtures("no_blocking", "only_waits_left")

MIB = 1 << 20
KEYS = keys(CPU)


def idle_board(**options: Any) -> FakeBoard:
    """Return a device that does everything at once."""
    return FakeBoard(FakeAccelerator(held=False), **options)


def mixed(board: FakeBoard, fill: float) -> dict[str, Any]:
    """Return tensors of the device and of the host, large and small, side by side."""
    flat = board.put(torch.full((40, 10), fill))
    return {
        "large": board.put(torch.full((MIB,), fill)),
        "host large": torch.full((MIB // 2,), fill),
        **{f"small {n}": board.put(torch.full((n,), fill)) for n in range(20)},
        **{f"host small {n}": torch.full((n,), fill) for n in range(20)},
        "half": flat[:, ::2],
        "tied": flat.t(),
        "sparse": board.put(torch.full((64, 64), fill))[:, ::8],
        "bytes": b"of the host",
        "odd": board.put(torch.full((7,), 3, dtype=torch.uint8))[1:],
        "scalar": board.put(torch.full((), fill, dtype=torch.bfloat16)),
        "nothing": board.put(torch.empty(0, 3)),
    }


@pytest.fixture
def ours() -> FakeBoard:
    """Give the sender's device."""
    return idle_board()


@pytest.fixture
def theirs() -> FakeBoard:
    """Give the receiver's."""
    return idle_board()


@pytest.mark.asyncio
class TestMixed:
    """A state dict of which a part is on the device."""

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_decides_where_they_go(
        self,
        ours: FakeBoard,
        theirs: FakeBoard,
        monkeypatch: pytest.MonkeyPatch,
        direct: bool,
    ) -> None:
        """A tensor may be on one end's device and in the other's host memory."""
        state, into = mixed(ours, 1.5), mixed(theirs, 0.0)
        into["large"] = torch.zeros(MIB)
        into["host large"] = theirs.put(torch.zeros(MIB // 2))
        before = {key: value for key, value in into.items() if key != "bytes"}
        async with device_transports(monkeypatch, ours, theirs) as (sender, receiver):
            got = await moved(sender, receiver, state, into=into, direct=direct)
        assert all(got[key] is tensor for key, tensor in before.items())
        assert_same(got, state)

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_that_lacks_tensors(
        self,
        ours: FakeBoard,
        theirs: FakeBoard,
        monkeypatch: pytest.MonkeyPatch,
        direct: bool,
    ) -> None:
        """They get new memory on the kind of device that they come from."""
        state, own = mixed(ours, 1.5), mixed(theirs, 0.0)
        for name in ("large", "host large", "half", "small 3", "host small 4"):
            del own[name]
        before = {key: value for key, value in own.items() if key != "bytes"}
        async with device_transports(
            monkeypatch, ours, theirs, state_dict=lambda: own
        ) as (sender, receiver):
            got = await moved(sender, receiver, state, direct=direct)
        assert_same(got, state)
        # "tied" shares memory with "half", so it is new with it.
        assert not before.pop("tied").any()
        assert all(got[key] is tensor for key, tensor in before.items())
        tensors = [key for key in state if key != "bytes"]
        assert {k: theirs.owns(got[k]) for k in tensors} == {
            k: ours.owns(state[k]) for k in tensors
        }

    async def test_large_ones_are_sent_from_their_memory(
        self, ours: FakeBoard, theirs: FakeBoard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Large tensors need no copy at either end; small ones share one."""
        sent, received = watched(monkeypatch)
        state: dict[str, Any] = {
            "large": ours.put(torch.ones(MIB)),
            "small": [ours.put(torch.ones(1000)) for _ in range(100)],
        }
        into: dict[str, Any] = {
            "large": theirs.put(torch.zeros(MIB)),
            "small": [theirs.put(torch.zeros(1000)) for _ in range(100)],
        }
        async with device_transports(monkeypatch, ours, theirs) as (sender, receiver):
            await moved(sender, receiver, state, into=into, direct=True)
        assert_same(into, state)
        assert [nbytes for _, nbytes in sent] == [4 * MIB, 400_000]
        assert sent[0][0] == state["large"].data_ptr()
        assert received[0][0] == into["large"].data_ptr()
        assert ours.allocated == theirs.allocated == 0

    async def test_what_lies_on_the_host_takes_little_of_the_device(
        self, ours: FakeBoard, theirs: FakeBoard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It crosses in messages of 4 MiB at most, of which few are under way."""
        buffers: list[int] = []
        buffer = MixedSegment.buffer

        def counted(segment: MixedSegment, nbytes: int) -> torch.Tensor:
            buffers.append(nbytes)
            return buffer(segment, nbytes)

        monkeypatch.setattr(MixedSegment, "buffer", counted)
        state = {"w": torch.ones(5 * MIB)}
        async with device_transports(
            monkeypatch, ours, theirs, chunk_bytes=8 * MIB
        ) as (sender, receiver):
            got = await moved(sender, receiver, state)
        assert_same(got, state)
        assert not theirs.owns(got["w"])
        assert ours.allocated == theirs.allocated == 0
        assert max(buffers) <= DeviceChannel.message_bytes
        assert DeviceChannel.window * DeviceChannel.message_bytes <= 64 * MIB

    async def test_damage_is_noticed(
        self, ours: FakeBoard, theirs: FakeBoard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On the device too: the template is untouched, and both ends hear of it."""
        state, into = mixed(ours, 1.5), mixed(theirs, 0.0)
        async with device_transports(monkeypatch, ours, theirs) as (sender, receiver):
            with monkeypatch.context() as patch:
                flip_bits(patch)
                sent, got = await both(sender, receiver, state, into=into)
            assert isinstance(got, IntegrityError)
            assert isinstance(sent, PeerFailedError)
            assert_same(into, mixed(idle_board(), 0.0))
            assert_same(await moved(sender, receiver, sample()), sample())


@pytest.mark.asyncio
class TestStreams:
    """The device has much to do before."""

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_receive_waits_for_what_still_uses_the_template(
        self, monkeypatch: pytest.MonkeyPatch, direct: bool
    ) -> None:
        """It is not written to before that has run."""
        ours, theirs = idle_board(), FakeBoard(device := FakeAccelerator())
        into = {"w": theirs.put(torch.zeros(MIB))}
        seen: list[float] = []
        device.produce(lambda: seen.append(into["w"].max().item()))
        device.produce(lambda: into["w"].fill_(5))
        state = {"w": ours.put(torch.full((MIB,), 7.0))}
        async with device_transports(monkeypatch, ours, theirs) as (sender, receiver):
            moving = asyncio.create_task(
                moved(sender, receiver, state, into=into, direct=direct)
            )
            await settle(lambda: bool(device.events))
            await asyncio.sleep(0.05)
            assert into["w"].max() == 0
            device.held = False
            device.run()
            await moving
        assert seen == [0]
        assert into["w"].unique().tolist() == [7]

    async def test_a_receiver_that_is_not_there(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A communicator has an order only: it is waited for, and in vain.

        What is raised is what is wrong with the state all the same.
        """
        boards = idle_board(), idle_board()
        async with device_transports(monkeypatch, *boards) as (sender, _):
            with pytest.raises(UnsupportedLeafError) as caught:
                await sender.send_checkpoint([1], 1, {"bad": object()}, 0.5)
            assert "could not be told in time" in caught.value.__notes__[0]

    async def test_one_conversation_at_a_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A communicator has an order and no tags: two destinations take turns."""
        boards = [idle_board(all_its_own=True) for _ in range(3)]
        ranks: list[int] = []
        watch_leaving(
            monkeypatch, lambda channel, _: ranks.append(channel.rank), DeviceChannel
        )
        state = {"w": torch.ones(3 * MIB)}
        async with device_transports(monkeypatch, *boards) as (sender, *receivers):
            _, *got = await asyncio.gather(
                sender.send_checkpoint([1, 2], 1, state),
                *(each.recv_checkpoint(0, "", 1) for each in receivers),
            )
        assert ranks == sorted(ranks)
        assert len(ranks) == 2 * 12 * MIB // DeviceChannel.message_bytes
        for each in got:
            assert_same(each, state)


def open_arenas() -> set[int]:
    """Return the host memory that holds, or held, a checkpoint."""
    gc.collect()
    return {
        id(each) for each in gc.get_objects() if type(each) is Arena and each.nbytes
    }


@pytest.mark.asyncio
class TestHostGroup:
    """A group that moves host memory only, and a template on the device."""

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_is_filled_and_leaves_no_copy(
        self, monkeypatch: pytest.MonkeyPatch, *, direct: bool
    ) -> None:
        """Its tensors are filled where they are."""
        others = open_arenas()  # of waits that tests before this one left behind
        device = FakeAccelerator(held=False)
        monkeypatch.setattr("aiockpt.pg.transport.port_for", device.port_for)
        state, into = weights(1.0), weights(0.0)
        home = into["w0"].data_ptr()
        async with transports() as (sender, receiver):
            got = await moved(sender, receiver, state, into=into, direct=direct)
            assert got["w0"] is into["w0"]
            assert got["w0"].data_ptr() == home
            assert_same(into, state)
            assert device.copied == into["w0"].nbytes
            del got
            # A thread may still be on its way out of what it did.
            await settle(lambda: open_arenas() <= others)
            assert not device.pinned

    async def test_memory_outlives_the_copies_of_a_cancelled_receive(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The device reads it until the template has it all."""
        device = FakeAccelerator()
        monkeypatch.setattr("aiockpt.pg.transport.port_for", device.port_for)
        state, into = weights(1.0), weights(0.0)
        async with transports() as (sender, receiver):
            sending = asyncio.create_task(sender.send_checkpoint([1], 1, state))
            call = receiver.recv_checkpoint(0, "", 1, into=into)
            receiving = asyncio.create_task(call)
            del call
            await settle(lambda: device.run(copies=0) >= 0 and not device.idle)
            receiving.cancel()
            await asyncio.wait({receiving, sending})
            assert receiving.cancelled()
            del receiving
            gc.collect()
            device.held = False
            device.run()  # which raises if it was freed
        assert_same(into, state)


@pytest.mark.asyncio
@pytest.mark.allow_leaks("threads", "fds")  # gloo waits on, as the device would
async def test_what_is_under_way_is_kept_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device may still write to it; so it must not become somebody else's."""
    boards = [idle_board(), idle_board()]
    async with device_transports(monkeypatch, *boards) as (_, receiver):
        with pytest.raises(TransferTimeoutError):
            await receiver.recv_checkpoint(0, "", 1, timeout=0.2)
        with pytest.raises(ProcessGroupError):
            await receiver.recv_checkpoint(0, "", 1)
        (channel,) = receiver._ranks.remains
        assert isinstance(channel, DeviceChannel)
        assert [message.tensor.nbytes for message in channel._under_way.values()] == [
            1024
        ]


class TestFolding:
    """A device computes the digests of chunks."""

    @given(st.integers(1, 3 * ROW_BYTES), st.integers(0, 5), st.integers(0))
    def test_it_is_what_the_text_says(self, size: int, lead: int, seed: int) -> None:
        """The digest is right for any length and any first byte."""
        make = torch.Generator().manual_seed(seed % 2**63)
        data = torch.randint(256, (lead + size,), generator=make, dtype=torch.uint8)
        row = fold(data[lead:], KEYS)[-1]
        last = (size - 1) // ROW_BYTES * ROW_BYTES
        rest = bytes(data[lead + last :].tolist())
        words = [
            int.from_bytes(rest[at : at + 4].ljust(4, b"\0"), "little", signed=True)
            for at in range(0, len(rest), 4)
        ]
        for found, key in zip(row.tolist(), KEYS.tolist(), strict=True):
            total = sum(map(int.__mul__, words, key)) % 2**64
            assert found % 2**64 == total


@given(st.sets(st.integers(0, 40)))
def test_a_placement_survives_the_way(own: set[int]) -> None:
    """The message has one bit for each entry."""
    data = encode_placement(41, own)
    assert decode_placement(data, 41) == sorted(own)
    with pytest.raises(RemoteProtocolError, match="one bit for each tensor"):
        decode_placement(data, 49)


def watched(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return where large messages are sent from, and received into."""
    sent: list[tuple[int, int]] = []
    received: list[tuple[int, int]] = []
    incoming = DeviceChannel._incoming

    def out(_: object, tensor: torch.Tensor) -> None:
        sent.append((tensor.data_ptr(), tensor.nbytes))

    def into(channel: DeviceChannel, memory: Any) -> Any:
        found = incoming(channel, memory)
        expect = found.expect

        def noted(start: int, stop: int) -> tuple[torch.Tensor, int]:
            tensor, copied = expect(start, stop)
            received.append((tensor.data_ptr(), tensor.nbytes))
            return tensor, copied

        monkeypatch.setattr(found, "expect", noted)
        return found

    watch_leaving(monkeypatch, out, DeviceChannel)
    monkeypatch.setattr(DeviceChannel, "_incoming", into)
    return sent, received
