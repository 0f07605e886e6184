"""The ranks of a trainer publish their own shards for vLLM, of which there is none.

The engines, the transports and the mirror of the host are real. The ranks are threads,
whose process group is a stand-in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from aiockpt import Server
from aiockpt.errors import PeerFailedError
from tests.support.vllm_stand_in import (
    Declared,
    GatheringSource,
    StandInSource,
    engines_on_a_stand_in,
)

NAMES = ("a", "b")


class Meeting:
    """Two ranks that exchange bytes."""

    def __init__(self) -> None:
        self.said, self.barrier = [b"", b""], Barrier(2, timeout=30)


class Rank(NamedTuple):
    """A group, as one of its ranks has it."""

    rank: int
    meeting: Meeting


def gathered(mine: bytes, group: Rank) -> list[bytes]:
    """Return what both ranks say."""
    meeting = group.meeting
    meeting.said[group.rank] = mine
    meeting.barrier.wait()
    found = [*meeting.said]
    meeting.barrier.wait()
    return found


class Source(StandInSource):
    """A source of two parameters; each rank has the one of its number."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value, self.extra = rank, 0.0, False
        self.shape: tuple[int, ...] = (3,)

    def metadata(self) -> list[Declared]:
        return [Declared(name, torch.float32, (3,)) for name in NAMES]

    def held_names(self) -> Any:
        return {NAMES[self.rank]}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for rank, name in enumerate(NAMES):
            held = rank == self.rank
            yield name, torch.full(self.shape, self.value) if held else None
        if self.extra:
            yield "c", torch.zeros(3)


class Model:
    """Keeps what is loaded into it."""

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: float(tensor[0]) for name, tensor in weights}


class Client:
    """Drives one engine, and keeps the versions."""

    def __init__(self, module: Any) -> None:
        self.module, self.versions = module, list[str | None]()
        self.model, self.fails = Model(), False
        self.engine = module.ReceivingEngine(
            None, None, torch.device("cpu"), self.model
        )

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.module.InitInfo(**info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        if self.fails:
            raise ConnectionError("no engine is there")
        self.engine.receive_weights(self.module.UpdateInfo(**info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()
        self.versions.append(weight_version)


class Job:
    """Two ranks of a trainer, and an engine that follows them."""

    def __init__(self, module: Any) -> None:
        self.module, self.client, self.meeting = module, Client(module), Meeting()
        self.sources = [Source(0), Source(1)]
        self.ranks = self.both(self.started)

    def started(self, rank: int, **options: Any) -> Any:
        """Make the engine of a rank; the other one must make one, or announce."""
        given = {
            "rank": rank,
            "server": Server(host="127.0.0.1"),
            "timeout": 20,
            "shards": True,
            "group": Rank(rank, self.meeting),
            "source": self.sources[rank],
            **options,
        }
        source = given.pop("source")
        info = self.module.TrainerInitInfo(**given)
        return self.module.TrainerEngine.trainer_init(
            info, client=self.client if rank == 0 else None, source=source
        )

    def both(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what both ranks return or raise."""
        with ThreadPoolExecutor(2) as threads:
            found = [threads.submit(work, rank) for rank in (0, 1)]
            return [each.exception() or each.result() for each in found]

    def send(self, *steps: int | None) -> Sequence[Any]:
        """Send the weights of both ranks, as given steps."""
        given = steps or (None, None)
        return self.both(lambda rank: self.ranks[rank].send_weights(given[rank]))

    def close(self) -> None:
        """Shut everything down."""
        self.client.engine.shutdown()
        for each in self.ranks:
            each.shutdown()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Give the module of our engines, whose ranks meet in a `Meeting`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with engines_on_a_stand_in(monkeypatch) as found:
        found.gathered = gathered
        found.dist = SimpleNamespace(
            is_initialized=lambda: True,
            get_rank=lambda group: group.rank,
            get_world_size=lambda group: 2,
        )
        yield found


@pytest.fixture
def job(module: Any) -> Iterator[Job]:
    """Give two ranks that serve."""
    made = Job(module)
    try:
        yield made
    finally:
        made.close()


def test_the_engine_gets_what_all_ranks_have(job: Job) -> None:
    """Rank 0 drives the client; each rank knows the version."""
    for step in (1, 2, 3):
        for source in job.sources:
            source.value = step + source.rank / 2
        assert job.send() == [None, None]
        assert job.client.model.weights == {"a": step, "b": step + 0.5}
        assert [each.version for each in job.ranks] == [step, step]
    assert job.client.versions == ["1", "2", "3"]
    assert job.ranks[0].metadata == job.ranks[1].metadata
    assert job.ranks[0].metadata.count("http://") == 2


def test_a_rank_that_fails_fails_all_of_them(job: Job) -> None:
    """The old weights stay, and the next step is the same everywhere."""
    job.send()
    job.sources[1].extra = True
    other, own = job.send()
    assert isinstance(own, ValueError)
    assert isinstance(other, PeerFailedError)
    assert (other.rank, other.reason) == (1, str(own))
    assert [each.version for each in job.ranks] == [1, 1]
    job.sources[1].extra = False
    job.sources[1].value = 7.0
    assert job.send() == [None, None]
    assert job.client.model.weights == {"a": 0, "b": 7}
    assert [each.version for each in job.ranks] == [3, 3]


def test_a_client_that_fails_fails_all_ranks(job: Job) -> None:
    """No rank says that the engines have the step."""
    job.client.fails = True
    own, other = job.send()
    assert isinstance(own, ConnectionError)
    assert isinstance(other, PeerFailedError)
    assert other.rank == 0
    assert [each.version for each in job.ranks] == [None, None]
    job.client.fails = False
    assert job.send() == [None, None]
    assert [each.version for each in job.ranks] == [2, 2]


def test_ranks_send_the_same_step(job: Job) -> None:
    """Different steps are an error on each rank, before the engines hear of them."""
    for each in job.send(5, 7):
        assert isinstance(each, ValueError)
        assert "[5, 7]" in str(each)
    for each in job.send(6, 6):
        assert "step 6 is not later than step 7" in str(each)
    assert not job.client.versions
    assert job.send(8, 8) == [None, None]
    assert job.client.versions == ["8"]


def test_a_rank_that_restarts(job: Job) -> None:
    """It has a new address, and takes the step from the others."""
    job.send()
    job.ranks[1].shutdown()
    before = job.ranks[0].metadata
    _, job.ranks[1] = job.both(
        lambda rank: job.started(1) if rank else job.ranks[0].announce()
    )
    assert job.ranks[0].metadata == job.ranks[1].metadata != before
    job.sources[1].value = 4.0
    assert job.send() == [None, None]
    assert job.client.model.weights == {"a": 0, "b": 4}
    assert job.client.versions == ["1", "2"]


def test_bare_local_tensors_are_refused(job: Job) -> None:
    """They do not say where in the full tensor they are."""
    job.sources[0].shape = (2,)
    own, other = job.send()
    assert isinstance(own, ValueError)
    assert "DTensors" in str(own)
    assert isinstance(other, PeerFailedError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swarm": True}, "swarm=True"),
        ({"source": GatheringSource()}, "ShardSource"),
        ({"group": Rank(1, Meeting())}, "rank 1 of its group"),
    ],
)
def test_what_does_not_fit_is_refused(
    module: Any, options: dict[str, Any], message: str
) -> None:
    """No rank has to wait for that."""
    given = {"rank": 0, "shards": True, "group": Rank(0, Meeting()), **options}
    source = given.pop("source", Source(0))
    info = module.TrainerInitInfo(**given)
    with pytest.raises(ValueError, match=message):
        module.TrainerEngine.trainer_init(info, client=None, source=source)
    module.dist.is_initialized = lambda: False
    info = module.TrainerInitInfo(rank=0, shards=True)
    with pytest.raises(ValueError, match=r"torch\.distributed"):
        module.TrainerEngine.trainer_init(info, client=None, source=Source(0))
