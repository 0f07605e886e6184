"""What other process-group transports get wrong, and this one does not."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest
import torch

from aiockpt import Progress, StepNotFoundError, TemplateMismatchError
from aiockpt.errors import (
    PeerFailedError,
    ProcessGroupError,
    RemoteProtocolError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from aiockpt.memory.arena import Arena
from aiockpt.pg import transport as room
from aiockpt.pg.conversation import FRAME_BYTES
from aiockpt.pg.messages import Channel
from aiockpt.testing import assert_same
from tests.support.accelerators import FakeAccelerator
from tests.support.groups import (
    Transport,
    both,
    gloo_groups,
    moved,
    transports,
    watch_leaving,
)
from tests.support.proofs import proves
from tests.support.serving import settle
from tests.support.transports import weights

pytestmark = pytest.mark.asyncio


class Bomb:
    """An object whose pickle would do something when it is loaded."""

    def __reduce__(self) -> Any:
        return (print, ("executed",))


class Counted:
    """A group that counts its messages and their bytes."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.messages: list[int] = []

    def size(self) -> int:
        """Pass on."""
        return int(self.group.size())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Count, and pass on."""
        self.messages.append(tensors[0].nbytes)
        return self.group.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Pass on."""
        return self.group.recv(tensors, rank, tag)


async def sent_messages(state: object) -> list[int]:
    """Move a state; return the lengths of what the sender sent."""
    ours, theirs = await gloo_groups(2)
    counted = Counted(ours)
    async with Transport(counted) as sender, Transport(theirs) as receiver:
        assert_same(await moved(sender, receiver, state), state)
    return counted.messages


class TestWhatTravels:
    """Values arrive as they are, and cost what they must."""

    @proves("invariant 2")
    async def test_nothing_is_executed(self, capsys: pytest.CaptureFixture) -> None:
        """P1: an object that only a pickle could carry is refused by the sender."""
        async with transports() as (sender, receiver):
            sent, got = await both(sender, receiver, {"x": Bomb()})
        assert "Bomb" in str(sent)
        assert isinstance(got, PeerFailedError)
        assert "executed" not in capsys.readouterr().out

    async def test_a_pickle_is_not_loaded(self, capsys: pytest.CaptureFixture) -> None:
        """P1: what a sender pickled all the same is refused by the receiver."""
        ours, theirs = await gloo_groups(2)
        async with (
            Transport(ours, allow_pickle=True) as sender,
            Transport(theirs) as receiver,
        ):
            sent, got = await both(sender, receiver, {"x": Bomb()})
            assert isinstance(got, RemoteProtocolError)
            assert isinstance(sent, PeerFailedError)
            assert_same(await moved(sender, receiver, weights()), weights())
        assert "executed" not in capsys.readouterr().out

    async def test_parameters_and_flags_survive(self) -> None:
        """P2, P3, P4: parameters, the conjugate bit, and requires_grad."""
        state = {
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
            "wants grad": torch.ones(3, requires_grad=True),
            "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        }
        async with transports() as (sender, receiver):
            assert_same(await moved(sender, receiver, state), state)

    async def test_an_odd_storage_travels(self) -> None:
        """P5: its size is no multiple of the element size."""
        odd = torch.empty(0, dtype=torch.float32)
        odd.set_(torch.UntypedStorage(10), 0, (2,), (1,))
        odd.copy_(torch.tensor([1.0, 2.0]))
        async with transports() as (sender, receiver):
            assert_same(await moved(sender, receiver, {"odd": odd}), {"odd": odd})

    async def test_a_small_view_travels_alone(self) -> None:
        """P6: 40 bytes do not drag their storage along."""
        storage = torch.zeros(4 << 20)
        views = {f"v{n}": storage[n * 1000 : n * 1000 + 10] for n in range(16)}
        assert sum(await sent_messages(views)) < 64 << 10

    async def test_a_tied_weight_travels_once(self) -> None:
        """P6: and is tied where it arrives."""
        weight = torch.zeros(1 << 18)
        sent = sum(await sent_messages({"a": weight, "b": weight, "c": weight[7:]}))
        assert sent < weight.nbytes + (64 << 10)

    async def test_small_tensors_share_messages(self) -> None:
        """P13: 5,000 tensors are a handful of messages, not 5,000 waits."""
        state = {f"t{n}": torch.full((1024,), float(n)) for n in range(5000)}
        assert len(await sent_messages(state)) < 30

    async def test_a_large_tensor_is_sent_from_its_own_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """P14: and, with ``direct``, received into the template's."""
        seen: list[int] = []

        watch_leaving(monkeypatch, lambda _, data: seen.append(data.data_ptr()))
        state = {"w": torch.zeros(1 << 20)}
        async with transports() as (sender, receiver):
            await moved(sender, receiver, state)
        assert seen == [state["w"].data_ptr()]


class TestTemplates:
    """What is received into is checked first, and only then written."""

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize(
        "mine",
        [
            torch.zeros(3, 2),
            torch.zeros(2, 3, dtype=torch.int32),
            torch.zeros(3, 2).t(),
        ],
        ids=["size", "dtype", "stride"],
    )
    async def test_what_does_not_fit_is_refused_by_both(
        self, mine: torch.Tensor, *, direct: bool
    ) -> None:
        """P7, P8, P9: before the tensor in front of it is written."""
        into = {"first": torch.zeros(5), "second": mine}
        state = {"first": torch.ones(5), "second": torch.ones(2, 3)}
        async with transports() as (sender, receiver):
            sent, got = await both(sender, receiver, state, into=into, direct=direct)
            assert isinstance(got, TemplateMismatchError)
            assert isinstance(sent, PeerFailedError)
            assert not into["first"].any()
            assert not into["second"].any()
            await moved(sender, receiver, state)

    @pytest.mark.parametrize("direct", [False, True])
    async def test_memory_beside_a_view_is_untouched(self, *, direct: bool) -> None:
        """P10."""
        whole = torch.zeros(10)
        async with transports() as (sender, receiver):
            state = {"w": torch.ones(4)}
            into = {"w": whole[3:7]}
            await moved(sender, receiver, state, into=into, direct=direct)
        assert whole.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_on_another_device_leaves_no_copy(
        self, monkeypatch: pytest.MonkeyPatch, *, direct: bool
    ) -> None:
        """P16: its tensors are filled where they are; what was beside them is gone."""
        others = open_arenas()  # of waits that tests before this one left behind
        device = FakeAccelerator(held=False)
        monkeypatch.setattr(room, "port_for", device.port_for)
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
            await settle(lambda: set(map(id, open_arenas())) <= set(map(id, others)))
            assert not device.pinned

    async def test_memory_outlives_the_copies_of_a_cancelled_receive(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The device reads it until the template has it all."""
        device = FakeAccelerator()
        monkeypatch.setattr(room, "port_for", device.port_for)
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

    async def test_a_template_without_memory_is_refused(self) -> None:
        """P16: rather than given some, where nobody asked for it."""
        into = {"w0": torch.empty(1 << 18, device="meta")}
        async with transports() as (sender, receiver):
            sent, got = await both(sender, receiver, weights(), into=into)
            assert isinstance(got, UnsupportedLeafError)
            assert got.path == "w0"
            assert isinstance(sent, PeerFailedError)


def open_arenas() -> list[Arena]:
    """Return the host memory that holds, or held, a checkpoint."""
    gc.collect()
    return [
        each for each in gc.get_objects() if type(each) is Arena and bool(each.nbytes)
    ]


class TestOrder:
    """Who sends what, and when, is checked before anything large moves."""

    async def test_another_step_costs_a_frame(self) -> None:
        """P15: the step is offered by itself, before even the header is sent."""
        ours, theirs = await gloo_groups(2)
        counted = Counted(ours)
        async with Transport(counted) as sender, Transport(theirs) as receiver:
            _, got = await both(sender, receiver, weights(), 7, wanted=5)
        assert isinstance(got, StepNotFoundError)
        assert counted.messages == [FRAME_BYTES] * 2, "the offer, and the farewell"

    async def test_a_misfit_costs_the_header(self) -> None:
        """P7, P8, P9: no byte of the data segment is sent."""
        ours, theirs = await gloo_groups(2)
        counted = Counted(ours)
        into = {"w0": torch.zeros(3)}
        async with Transport(counted) as sender, Transport(theirs) as receiver:
            _, got = await both(sender, receiver, weights(), into=into)
        assert isinstance(got, TemplateMismatchError)
        assert sum(counted.messages) < 8 << 10

    async def test_a_late_receiver_holds_up_no_other(self) -> None:
        """P12: nor what is sent to the other one next."""
        async with transports(3) as (sender, first, second):
            calls = [
                sender.send_checkpoint([2, 1], 1, weights(1.0)),
                sender.send_checkpoint([1], 2, weights(2.0)),
                sender.send_checkpoint([1, 2], 3, weights(3.0)),
            ]
            sends = [asyncio.create_task(call) for call in calls]
            for step in (1, 2, 3):
                got = await first.recv_checkpoint(0, "", step)
                assert_same(got, weights(float(step)))
            await sends[1]
            assert not sends[0].done()
            assert not sends[2].done()
            for step in (1, 3):
                got = await second.recv_checkpoint(0, "", step)
                assert_same(got, weights(float(step)))
            await asyncio.gather(*sends)


class TestDeadlines:
    """One for the whole call, and nobody waits for another."""

    @pytest.mark.allow_leaks("threads", "fds")  # the waiting ones
    async def test_the_timeout_of_the_constructor_holds(self) -> None:
        """P15: where a call gives none."""
        async with transports(timeout=0.3) as (_, receiver):
            started = time.monotonic()
            with pytest.raises(TransferTimeoutError):
                await receiver.recv_checkpoint(0, "", 1)
            assert time.monotonic() - started < 5  # 20 without it

    @pytest.mark.allow_leaks("threads", "fds")  # the waiting ones
    async def test_a_deadline_is_for_all_waits_together(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """P15: a sender that is slow at every message does not stretch it."""
        watch_leaving(monkeypatch, lambda *_: time.sleep(0.2))
        state = {f"w{n}": torch.zeros(1 << 18) for n in range(20)}
        async with transports() as (sender, receiver):
            sending = asyncio.create_task(sender.send_checkpoint([1], 1, state))
            started = time.monotonic()
            with pytest.raises(TransferTimeoutError):
                await receiver.recv_checkpoint(0, "", 1, 1)
            assert time.monotonic() - started < 3  # the messages take 4
            with pytest.raises(ProcessGroupError):
                await sending  # it is told, and does not wait for its own

    async def test_progress_is_told(self) -> None:
        """P18."""
        seen: list[Progress] = []
        async with transports() as (sender, receiver):
            state = {"w": torch.zeros(1 << 18)}
            await moved(sender, receiver, state, progress=seen.append)
        assert seen[-1].bytes_done == seen[-1].bytes_total == 1 << 20
        assert len({progress.bytes_done for progress in seen}) > 2


async def test_a_first_word_that_fails_is_known_to_both_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the peer may have heard it, and waits for the next one."""
    send = Channel.send

    def fail(channel: Channel, *arguments: Any) -> None:
        send(channel, *arguments)
        raise ProcessGroupError("on purpose", rank=channel.rank)

    async with transports(timeout=60) as (sender, receiver):
        sending = asyncio.create_task(sender.send_checkpoint([1], 1, weights()))
        with monkeypatch.context() as patched:
            patched.setattr(Channel, "send", fail)
            with pytest.raises(ProcessGroupError):
                async with asyncio.timeout(20):
                    await receiver.recv_checkpoint(0, "", 1)
        with pytest.raises(ProcessGroupError):
            async with asyncio.timeout(20):
                await sending


async def test_receives_from_one_rank_keep_the_order_of_their_calls() -> None:
    """Though the template of the first takes longer to describe than the second."""
    state = {f"w{n}": torch.full((4,), float(n)) for n in range(3000)}
    into = {name: torch.zeros(4) for name in state}
    async with transports() as (sender, receiver):

        async def send() -> None:
            await sender.send_checkpoint([1], 1, state)
            await sender.send_checkpoint([1], 2, state)

        _, first, second = await asyncio.gather(
            send(),
            receiver.recv_checkpoint(0, "", 1, into=into),
            receiver.recv_checkpoint(0, "", 2),
        )
    assert_same(first, state)
    assert_same(second, state)


@pytest.mark.allow_leaks("threads", "fds")  # the wait for a sender that never comes
async def test_a_cancel_while_a_sender_is_refused_gives_the_turn_back() -> None:
    """The receive that waits for it hears at once that the group is broken."""
    sparse = {"w": torch.ones(4).to_sparse()}
    async with transports(timeout=60) as (_, receiver):
        refusing = asyncio.create_task(receiver.recv_checkpoint(0, "", 1, into=sparse))
        waiting = asyncio.create_task(receiver.recv_checkpoint(0, "", 2))
        await asyncio.sleep(0.5)  # one waits for the sender, to tell it; one for a turn
        refusing.cancel()
        with pytest.raises(asyncio.CancelledError) as kept:  # with all of its frames
            await refusing
        with pytest.raises(ProcessGroupError):
            async with asyncio.timeout(20):
                await waiting
    del kept
