"""Updates of the offline ``LLM`` class by a trainer in the same process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from aiockpt import HTTPTransport, Server, StepNotFoundError, TemplateMismatchError
from aiockpt.errors import LocalProtocolError, TransferTimeoutError
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.testing import Fault, FaultProxy, assert_same
from aiockpt.testing.faults import Pipe
from aiockpt.vllm import TrainerEngine, TrainerInitInfo
from tests.support.ports import free_port
from tests.vllm.conftest import Engine, Make, Model, answers, checksums
from tests.vllm.trainer import double

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's and torch's own
    pytest.mark.timeout(600),
]


class Client:
    """Drives all engines of this process, as the Ray client; remembers the versions."""

    def __init__(self, *engines: Engine) -> None:
        self.engines, self.versions = engines, list[str | None]()

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        request = WeightTransferInitRequest(init_info=info)
        self._call("init_weight_transfer_engine", request)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, info: Any) -> None:
        request = WeightTransferUpdateRequest(update_info=info)
        self._call("update_weights", request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")
        self.versions.append(weight_version)

    def _call(self, name: str, *args: Any) -> None:
        errors = []
        for each in self.engines:
            try:
                getattr(each, name)(*args)
            except Exception as error:  # noqa: BLE001 - whichever it is, raised below
                errors.append(error)
        if errors:
            raise errors[0]


def trainer(model: Model, client: Client, **options: Any) -> Any:
    """Return a trainer's engine on loopback."""
    server = Server(host="127.0.0.1", keep_base=True)
    info = TrainerInitInfo(rank=0, server=server, timeout=10, **options)
    source = ModuleSource(model.module)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def test_twenty_updates_equal_a_freshly_loaded_engine(
    model: Model, make: Make, tmp_path: Path
) -> None:
    """Tokens and checksums, after each of them."""
    engine = make(model.save(tmp_path / "old"))
    client = Client(engine)
    sender = trainer(model, client)
    try:
        for step in range(1, 21):
            model.step(step)
            sender.send_weights()
            assert sender.version == step
            fresh = make(model.save(tmp_path / f"step-{step}"))
            assert checksums(engine) == checksums(fresh)
            assert answers(engine) == answers(fresh)
            del fresh
        assert client.versions == [str(step) for step in range(1, 21)]
    finally:
        sender.shutdown()


def test_two_engines_and_a_wrong_step(model: Model, make: Make, tmp_path: Path) -> None:
    """An error leaves the old weights, and the next update reaches both engines."""
    path = model.save(tmp_path / "old")
    engines = make(path), make(path)
    client = Client(*engines)
    sender = trainer(model, client, step=6)
    try:
        model.step(1)
        sender.send_weights()
        assert client.versions == ["7"]
        before = [answers(each) for each in engines]
        assert before[0] == before[1]
        assert checksums(engines[0]) == checksums(engines[1])
        for step, error in ((6, StepNotFoundError), (99, TransferTimeoutError)):
            client.start_weight_update()
            with pytest.raises(error):
                client.update_weights({"step": step})
            assert [answers(each) for each in engines] == before
        model.step(2)
        sender.send_weights(step=20)
        fresh = make(model.save(tmp_path / "new"))
        assert checksums(engines[0]) == checksums(engines[1]) == checksums(fresh)
        with pytest.raises(ValueError, match="not later"):
            sender.send_weights(step=20)
        assert sender.version == 20
        engines[0].collective_rpc("shutdown_weight_transfer_engine")
        with pytest.raises(LocalProtocolError, match="follows no trainer"):
            sender.send_weights()
        assert sender.version == 20
        sender.announce()
        sender.send_weights()
        assert sender.version == 22
        assert client.versions[-1] == "22"
        assert checksums(engines[0]) == checksums(engines[1]) == checksums(fresh)
    finally:
        sender.shutdown()


def test_other_parameters_are_refused(model: Model, make: Make, tmp_path: Path) -> None:
    """A step of another model is refused before the live one is touched."""
    engine = make(model.save(tmp_path / "old"))
    client = Client(engine)
    sender = trainer(model, client)
    try:
        sender.send_weights()
        before = answers(engine)
        right = sender.source
        sender.source = ModuleSource(torch.nn.Linear(3, 3))
        with pytest.raises(TemplateMismatchError):
            sender.send_weights()
        assert answers(engine) == before
        assert sender.version == 1
        sender.source = right
        model.step(1)
        sender.send_weights()
        assert sender.version == 3
        assert checksums(engine) == checksums(make(model.save(tmp_path / "new")))
    finally:
        sender.shutdown()


def test_every_rank_joins_the_collectives(model: Model) -> None:
    """A rank that publishes nothing still asks for metadata and for each tensor."""
    asked: list[str] = []

    class Source(ModuleSource):
        def metadata(self) -> list[Any]:
            asked.append("metadata")
            return super().metadata()

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for each in super().__iter__():
                asked.append("tensor")
                yield each

    client = Client()
    other = TrainerEngine.trainer_init(
        TrainerInitInfo(rank=1), client=client, source=Source(model.module)
    )
    other.send_weights()
    other.shutdown()
    assert asked == ["metadata"] + ["tensor"] * len([*model.module.parameters()])
    assert not client.versions


def test_the_shards_of_fsdp_are_gathered(model: Model) -> None:
    """Both ranks gather each tensor, and rank 0 publishes it whole."""

    async def received(metadata: str) -> dict[str, torch.Tensor]:
        async with HTTPTransport[dict[str, torch.Tensor]]() as receiver:
            return await receiver.recv_checkpoint(metadata=metadata, step=1)

    port = free_port()
    with trainer_process(0, port) as first, trainer_process(1, port) as second:
        metadata = heard(first)
        tell(second, "1")
        assert told(first, "1") == "1"
        found = asyncio.run(received(metadata))
    double(model.module)
    assert_same(found, {n: p.detach() for n, p in model.module.named_parameters()})


def test_two_ranks_publish_their_shards(
    model: Model, make: Make, tmp_path: Path
) -> None:
    """20 updates equal freshly loaded engines; a rank is killed and replaced."""
    engine = make(model.save(tmp_path / "old"))
    client, port = Client(engine), free_port()

    def update(*ranks: subprocess.Popen[str]) -> None:
        """Take the next step on both ranks, and load it."""
        step = len(taken) + 1
        for each in ranks:
            tell(each, f"step {step}")
        number = heard(ranks[0])
        assert [heard(each) for each in ranks] == ["done", "done"]
        load(client, number)
        model.step(step)
        taken.append(number)
        fresh.clear()  # the end of an engine would end the groups of the one after it
        fresh.append(make(model.save(tmp_path / f"step-{step}")))
        assert checksums(engine) == checksums(fresh[0])
        assert answers(engine) == answers(fresh[0])

    taken, fresh = list[str](), list[Engine]()
    with shards_process(0, port, 0) as first:
        with shards_process(1, port, 0) as second:
            follow(client, heard(first))
            for _ in range(10):
                update(first, second)
            assert taken == [str(step) for step in range(1, 11)]
            before = checksums(engine), answers(engine)
        # The second rank is killed: the first one cannot send alone.
        tell(first, "step 11")
        assert heard(first) not in {"done", "11"}
        assert (checksums(engine), answers(engine)) == before
        port = free_port()
        tell(first, f"meet {port} 10")
        with shards_process(1, port, 10) as second:
            follow(client, heard(first))
            assert heard(first) == "done"
            for _ in range(10):
                update(first, second)
            # Step 11 was that of the first rank alone.
            assert taken[10:] == [str(step) for step in range(12, 22)]


def follow(client: Client, metadata: str) -> None:
    """Have the engines follow two ranks."""
    assert metadata.count("http://") == 2
    client.init_weight_transfer_engine({"metadata": metadata, "timeout": 15.0})


def load(client: Client, step: str) -> None:
    """Have the engines load a step."""
    client.start_weight_update()
    client.update_weights({"step": int(step)})
    client.finish_weight_update(step)


def test_a_trainer_that_is_killed_in_the_middle_of_a_send(
    model: Model, make: Make, tmp_path: Path
) -> None:
    """The old weights serve on, and a new trainer takes over."""
    engine = make(model.save(tmp_path / "old"))
    client = Client(engine)
    killed_in_the_middle(client, model)
    assert client.versions == ["1"]
    sender = trainer(model, client)
    try:
        model.step(3)
        sender.send_weights()
        fresh = make(model.save(tmp_path / "new"))
        assert checksums(engine) == checksums(fresh)
        assert answers(engine) == answers(fresh)
    finally:
        sender.shutdown()


def killed_in_the_middle(client: Client, model: Model) -> None:
    """Load a step of a trainer, then kill it while the next one arrives."""
    (engine,) = client.engines
    with trainer_process() as process:
        metadata = heard(process)
        with stalling(metadata, after=150_000) as (slow, stall):
            client.init_weight_transfer_engine({"metadata": slow, "timeout": 15.0})
            assert told(process, "1") == "1"
            load(client, "1")
            model.step(1)
            before = checksums(engine), answers(engine)
            stall.set()
            assert told(process, "2") == "2"
            time.sleep(1)  # the engine prefetches, until the bytes stop
            process.kill()
            client.start_weight_update()
            with pytest.raises(TransferTimeoutError):
                client.update_weights({"step": 2})
            assert (checksums(engine), answers(engine)) == before


def told(process: subprocess.Popen[str], line: str) -> str:
    """Send a line to a trainer; return its answer."""
    tell(process, line)
    return heard(process)


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Send a line to a trainer."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> str:
    """Return the trainer's next line, and leave out what libraries print."""
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("> "):
        assert line, "the trainer has ended"
    return line[2:].strip()


@contextmanager
def trainer_process(
    *args: int, module: str = "tests.vllm.trainer"
) -> Iterator[subprocess.Popen[str]]:
    """Run a trainer in a process of its own; kill it at the end."""
    command = [sys.executable, "-m", module, *map(str, args)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


shards_process = partial(trainer_process, module="tests.vllm.shards_trainer")


@contextmanager
def stalling(metadata: str, after: int) -> Iterator[tuple[str, threading.Event]]:
    """Give metadata by way of a proxy, and an event that lets answers stall."""
    stall = threading.Event()

    class Stall(Fault):
        left = after

        async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
            self.left -= len(data) if stall.is_set() else 0
            await (pipe.send(data) if self.left > 0 else pipe.stall())

    host, _, path = metadata.removeprefix("http://").partition("/")
    proxy = FaultProxy("127.0.0.1", int(host.rpartition(":")[2]), otherwise=Stall())
    facade = SyncFacade("the proxy", at_exit=proxy.aclose)
    facade.call(proxy.listen, timeout=10, phase="start")
    try:
        yield f"{proxy.url()}{path}", stall
    finally:
        facade.close(proxy.aclose, wait=10)
