"""Each public verb waits for its caller's device work, and for nobody else's.

Two tasks of one loop work on two streams of a device. The current stream belongs to the
thread, so it changes whenever the loop goes on to the other task.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import (
    contextmanager,
    nullcontext,
)
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import AsyncCheckpointer, BackgroundCheckpointer
from aiockpt.checkpointers import (
    CheckpointReader,
    CheckpointStager,
    CheckpointStagerConfig,
    CheckpointWriter,
    DefaultStager,
)
from aiockpt.checkpointers.thread import CheckpointThread
from aiockpt.checkpointers.writer import Writers
from aiockpt.memory import device as devices
from aiockpt.memory.arena import Arena, ArenaPool
from aiockpt.memory.device import Accelerator, Marks, OneQueue, port_for
from aiockpt.state.flatten import ready_for_threads
from aiockpt.testing import assert_same
from aiockpt.transfer.live import LiveState
from tests.support.accelerators import FakeAccelerator, FakeBoard, device_transports
from tests.support.saving import ALONE, config, loaded, save
from tests.support.states import file_of, rebuilt, stager
from tests.support.transports import CHUNK, receive, transport, weights

MINE, OTHER = "mine", "other"

Verb = Callable[[], Awaitable[Any]]
State = dict[str, Any]


class Device(FakeAccelerator):
    """Remembers the streams that the thread of the loop has marked."""

    def __init__(self) -> None:
        super().__init__()
        self.marked: list[str] = []
        self._thread = threading.current_thread()

    def marker(self) -> Callable[[], Any]:
        name, mark = self.current, super().marker()

        def noted() -> Any:
            if threading.current_thread() is self._thread:
                self.marked.append(name)
            return mark()

        return noted


async def beside_another_task(device: Device, verb: Verb) -> Any:
    """Call a verb on one stream; another task uses another one, which is stuck."""
    over = False

    async def disturb() -> None:
        while not over:
            with device.stream(OTHER):
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def call() -> Any:
        with device.stream(MINE):
            return await verb()

    with device.stream(OTHER):
        device.produce(lambda: pytest.fail("the other task's stream was run"))
    disturbing, calling = asyncio.create_task(disturb()), asyncio.create_task(call())
    try:
        async with asyncio.timeout(15):
            while not calling.done():
                await asyncio.sleep(0.001)
                device.run(only=MINE)
                device.run(only="default")  # of threads that allocate memory
        return calling.result()
    finally:
        over = True
        calling.cancel()
        await asyncio.wait({disturbing, calling})


async def sees_its_callers_work(
    device: Device, send: Callable[[State], Awaitable[State]]
) -> None:
    """Check that a verb copies what its caller's stream has computed by the call."""
    state = {**weights(0.0, count=4), "step": 3}

    async def verb() -> State:
        device.produce(lambda: [state[f"w{n}"].fill_(7) for n in range(4)])
        return await send(state)

    found = await beside_another_task(device, verb)
    assert {*device.marked} == {MINE}
    for name in ("w0", "w3"):
        assert found[name].unique().tolist() == [7]


async def waits_for_its_callers_work(
    device: Device, fill: Callable[[State], Awaitable[object]], *, new: float = 1.0
) -> None:
    """Check that a verb fills a template after its caller's stream has used it."""
    into, seen = {**weights(0.0, count=4), "step": 3}, list[float]()

    async def verb() -> object:
        device.produce(lambda: seen.append(float(into["w0"].sum() + into["w3"].sum())))
        return await fill(into)

    await beside_another_task(device, verb)
    assert {*device.marked} == {MINE}
    assert seen == [0.0]
    for name in ("w0", "w3"):
        assert into[name].unique().tolist() == [new]


def made_for(
    device: FakeAccelerator, stager: CheckpointStager | None = None
) -> AsyncCheckpointer:
    """Make a checkpointer whose writer is a thread."""
    writer = CheckpointThread(
        Writers(CheckpointWriter, {"config": config()}, ALONE),
        shutdown_timeout_secs=30,
        staging_config=CheckpointStagerConfig(),
    )
    reader = CheckpointReader(ALONE, ports=device.port_for)
    stager = stager or DefaultStager(ports=device.port_for)
    return AsyncCheckpointer(stager, writer, reader)


class Own(CheckpointStager):
    """Copies without a thought of streams, as a user's stager may."""

    def __init__(self, device: Device) -> None:
        self.ports = device.port_for

    async def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        return {key: each + 0 for key, each in state_dict.items()}

    async def close(self) -> None:
        pass


@pytest.mark.asyncio
class TestStaging:
    """The verbs that copy a state dict wait for the caller's streams."""

    async def test_a_stager(self) -> None:
        """A stager that a program uses by itself waits for the streams."""
        device = Device()
        made = DefaultStager(ports=device.port_for)

        async def send(state: State) -> State:
            with await made.stage(state, step=1) as staged:
                return copy.deepcopy(staged.state_dict())

        await sees_its_callers_work(device, send)
        await made.close()

    @pytest.mark.parametrize("own", [False, True], ids=["ours", "own"])
    async def test_a_background_save(self, tmp_path: Path, *, own: bool) -> None:
        """The save waits with any stager, and while another save is being staged."""
        device = Device()
        stager = Own(device) if own else None
        async with made_for(device, stager) as made, made._turn:

            async def send(state: State) -> State:
                asyncio.get_running_loop().call_later(0.02, made._turn.release)
                handle = await made.save(state, tmp_path / "7")
                assert await handle.written()
                await made._turn.acquire()
                return loaded(tmp_path / "7")

            await sees_its_callers_work(device, send)

    async def test_a_send_over_a_group_of_devices(self, monkeypatch) -> None:
        """A send from the state dict's own memory waits for the streams."""
        device, other = Device(), FakeAccelerator(held=False)
        boards = [FakeBoard(device, all_its_own=True), FakeBoard(other)]
        async with device_transports(monkeypatch, *boards) as (sender, receiver):

            async def send(state: State) -> State:
                got = asyncio.create_task(receiver.recv_checkpoint(0, "", 1))
                await sender.send_checkpoint([1], 1, state)
                return await got

            await sees_its_callers_work(device, send)

    async def test_a_blocking_save(self, tmp_path: Path) -> None:
        """A blocking save marks the streams in its caller's thread."""
        device, state = Device(), weights(0.0)
        device.held = False
        with device.stream(MINE):
            live = LiveState(
                state,
                step=1,
                chunk_bytes=CHUNK,
                allow_pickle=False,
                pool=ArenaPool(keep=0),
                ports=device.port_for,
            )
            live.__exit__(None, None, None)
        assert {*device.marked} == {MINE}


@pytest.mark.asyncio
class TestLoading:
    """The verbs that fill a template wait for the caller's streams."""

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        """Take all memory of templates for a device's."""
        device = Device()
        monkeypatch.setattr("aiockpt.http_transport.port_for", device.port_for)
        return device

    async def test_a_receive_compares_what_its_caller_has_computed(
        self, device: Device
    ) -> None:
        """A state dict that the device still computes may have the bytes."""
        async with transport() as sender, transport() as receiver:
            await sender.send_checkpoint([], 1, weights(7.0, count=4))

            async def send(state: State) -> State:
                return await receive(sender, receiver, have=state)

            await sees_its_callers_work(device, send)
            assert sender.statistics().bytes_sent < weights(0.0)["w0"].nbytes

    async def test_applying_marks_the_streams_of_that_moment(
        self, device: Device
    ) -> None:
        """What serves from the template meanwhile is another stream's work."""
        into, seen = weights(0.0), list[float]()
        async with transport() as sender, transport() as receiver:
            await sender.send_checkpoint([], 1, weights(1.0))
            prepared = await receiver.prepare(sender.metadata(), 1, into=into)
            device.run()
            device.marked.clear()

            async def verb() -> object:
                device.produce(lambda: seen.append(float(into["w0"].sum())))
                return await prepared.apply_async()

            await beside_another_task(device, verb)
        assert {*device.marked} == {MINE}
        assert seen == [0.0]

    async def test_a_follower(self, device: Device) -> None:
        """Each step has marks of its own."""
        async with transport() as sender, transport() as receiver:
            await sender.send_checkpoint([], 1, {**weights(1.0, count=4), "step": 4})

            async def fill(into: State) -> None:
                with device.stream("of the iterator"):
                    steps = receiver.follow(sender.metadata(), into=into)
                    device.marked.clear()
                await anext(steps)
                await steps.aclose()

            await waits_for_its_callers_work(device, fill)

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_receive_over_a_group_of_devices(
        self, monkeypatch, *, direct: bool
    ) -> None:
        """A receive waits, whether or not bytes go straight into the template."""
        device, other = Device(), FakeAccelerator(held=False)
        boards = [FakeBoard(other), FakeBoard(device, all_its_own=True)]
        async with device_transports(monkeypatch, *boards) as (sender, receiver):
            state = {**weights(1.0, count=4), "step": 4}

            async def fill(into: State) -> None:
                sending = asyncio.create_task(sender.send_checkpoint([1], 1, state))
                await receiver.recv_checkpoint(0, "", 1, into=into, direct=direct)
                await sending

            await waits_for_its_callers_work(device, fill)


@contextmanager
def running(device: FakeAccelerator) -> Iterator[None]:
    """Run the device's work in another thread."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.001):
            device.run(only=MINE)
            device.run(only="default")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class TestOtherThreads:
    """A facade calls from its own thread, which has other current streams."""

    @pytest.mark.parametrize("verb", ["save", "load"])
    def test_the_background_checkpointer(self, tmp_path: Path, verb: str) -> None:
        """It blocks until its caller's work has run; another thread runs it here."""
        device, state = FakeAccelerator(), weights(0.0)
        path = save(tmp_path / "1", weights(1.0))
        with (
            BackgroundCheckpointer(made_for(device)) as made,
            running(device),
            device.stream(MINE),
        ):
            seen: list[float] = []
            device.produce(lambda: seen.append(float(state["w0"].sum())))
            device.produce(lambda: state["w0"].fill_(7))
            if verb == "save":
                assert made.save(state, tmp_path / "2").result(30)
                assert loaded(tmp_path / "2")["w0"].unique().tolist() == [7]
            else:
                made.load(path, state)
                assert state["w0"].unique().tolist() == [1]
            assert seen == [0.0]

    @pytest.mark.parametrize("verb", ["send", "receive", "follow", "prepare"])
    def test_the_background_transport(
        self, monkeypatch: pytest.MonkeyPatch, verb: str
    ) -> None:
        """The copy waits for the streams of the thread that calls."""
        device, state = Device(), weights(0.0)
        monkeypatch.setattr("aiockpt.http_transport.port_for", device.port_for)
        sender, receiver = (
            aiockpt.BackgroundTransport(transport(), ports=ports)
            for ports in (port_for, device.port_for)
        )
        with sender, receiver, running(device), device.stream(MINE):
            device.marked.clear()
            seen: list[float] = []
            device.produce(lambda: seen.append(float(state["w0"].sum())))
            device.produce(lambda: state["w0"].fill_(7))
            if verb == "send":
                receiver._source._stager._ports = device.port_for
                receiver.send_checkpoint(step=1, state_dict=state)
                state = sender.recv_checkpoint(metadata=receiver.metadata())
                assert state["w0"].unique().tolist() == [7]
            else:
                sender.send_checkpoint(step=1, state_dict=weights(1.0))
                metadata = sender.metadata()
                if verb == "receive":
                    receiver.recv_checkpoint(metadata=metadata, into=state)
                elif verb == "prepare":
                    receiver.prepare(metadata, into=state).apply()
                else:
                    next(receiver.follow(metadata, into=state))
                assert state["w0"].unique().tolist() == [1]
            assert seen == [0.0]
            assert {*device.marked} == {MINE}

    def test_torchfts_classes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They wait in the caller's thread, for every device."""
        devices_ = [Device(), Device()]
        numbered = {torch.device("cuda", n): each for n, each in enumerate(devices_)}
        monkeypatch.setattr(devices, "_in_use", lambda: iter(numbered))
        for each in devices_:
            each.held = False
        state = weights()
        assert ready_for_threads(state, numbered.get) is state
        assert [each.marked for each in devices_] == [["default"], ["default"]]


class TestPorts:
    """Devices have marks if they have streams, and work without them."""

    def test_a_device_that_was_not_used_gets_no_context(self, monkeypatch) -> None:
        """It would cost hundreds of megabytes on each device of the host."""
        module = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 4)
        monkeypatch.setattr(devices, "_kind", lambda: "cuda")
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        monkeypatch.setattr(
            torch._C, "_cuda_hasPrimaryContext", lambda n: n in (1, 3), raising=False
        )
        fakes = {torch.device("cuda", n): Device() for n in range(4)}
        assert [each.index for each in Marks.of(fakes.get).events] == [1, 3]
        module.is_initialized = lambda: False
        assert not Marks.of(fakes.get).events

    def test_a_device_that_has_failed_is_reported_by_who_waits(self) -> None:
        """The waiting call raises, and a send still tells its receivers."""

        class Broken(FakeAccelerator):
            def marker(self):
                raise RuntimeError("device lost")

        marks = Marks.of(Broken().port_for)
        with pytest.raises(RuntimeError, match="device lost"):
            marks.wait()
        assert not isinstance(ready_for_threads({}, Broken().port_for), dict)

    def test_page_locked_memory_is_so_for_all_devices(self, monkeypatch) -> None:
        """The second device finds it locked already."""
        flags: list[int] = []

        def register(address: int, nbytes: int, flag: int) -> int:
            flags.append(flag)
            return 0

        runtime = SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=lambda address: flags.append(-1),
        )
        module = SimpleNamespace(
            Stream=lambda device: None, device=lambda device: nullcontext()
        )
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        arena = Arena(1 << 16)
        for number in range(2):
            arena.pin(Accelerator(torch.device("cuda", number)).pin)
        arena.close()
        assert flags == [1, -1]

    @pytest.mark.asyncio
    async def test_a_device_without_streams_is_copied_from_in_order(
        self, monkeypatch
    ) -> None:
        """A Mac's device module has no streams and no such events."""
        module = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        monkeypatch.setattr(devices, "_ports", {})
        port = port_for(torch.device("mps", 0))
        assert isinstance(port, OneQueue)
        state = {**weights(3.0), "transposed": torch.randn(30, 50).t()}
        async with stager(ports=lambda _: port) as made:
            snapshot = await made.stage(state, step=1)
            assert_same(rebuilt(file_of(snapshot)), state)
            snapshot.release()
        monkeypatch.setattr("aiockpt.http_transport.port_for", lambda _: port)
        async with transport() as sender, transport() as receiver:
            await sender.send_checkpoint([], 1, state)
            for how in ({}, {"direct": True}, {"have": True}):
                options: dict[str, Any] = how
                into = {name: torch.zeros_like(each) for name, each in state.items()}
                got = await receive(sender, receiver, into=into, **options)
                assert_same(got, state)
