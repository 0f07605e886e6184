"""Barriers at which ranks wait for each other, to commit a checkpoint together.

Ranks meet twice in a save: when every file is written, and when rank 0 has committed.
A rank that fails reports that at the barrier, so that the other ranks fail at once.

`Barrier` is the interface. `TCPStoreBarrier` meets in a key-value store, which any
process can reach. `DistBarrier` meets in a process group, inside the trainer only.

This module loads ``torch.distributed`` only when a barrier is made, because a
checkpoint process of one rank does not need torch.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias, TypeVar

from aiockpt.checkpointers.config import BarrierConfig, RankInfo
from aiockpt.errors import (
    PeerFailedError,
    ProcessGroupError,
    TransferTimeoutError,
    TransportError,
)

if TYPE_CHECKING:
    import torch.distributed
    from torch._C._distributed_c10d import Store

__all__ = [
    "Barrier",
    "DistBarrier",
    "Meeting",
    "Phase",
    "TCPStoreBarrier",
    "barrier_config_for",
    "create_barrier_from_config",
    "default_rank_info",
    "register_barrier",
]

B = TypeVar("B", bound="type[Barrier]")

Phase: TypeAlias = Literal["written", "committed"]

_LEGACY_TIMEOUT: Final = 600.0  # of `execute_barrier`, which is given none
_POLL: Final = 0.005

_ALL_CAME: Final = "all came"
_LATE: Final = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The purpose of a meeting, by which ranks of the same save find each other.

    Attributes:
        name: The name of the checkpoint's directory.
        step: The checkpoint's step.
        phase: ``written`` (every rank's file is durable) or ``committed``.
        place: The directory in which the checkpoint is built.
        timeout: How many seconds to wait for the other ranks.
    """

    name: str
    step: int
    phase: Phase
    place: Path
    timeout: float

    def __str__(self) -> str:
        return f"{self.name}/{self.step}/{self.phase}"


_LEGACY: Final = Meeting(
    name="execute_barrier",
    step=0,
    phase="committed",
    place=Path(),
    timeout=_LEGACY_TIMEOUT,
)


class Barrier(ABC):
    """Blocks each rank until all ranks have arrived.

    A subclass needs only :meth:`execute_barrier`. With :meth:`meet` it can also tell
    the other ranks of a failure. `register_barrier` makes it available by name.
    """

    barrier_type: ClassVar[str]

    @abstractmethod
    def execute_barrier(self) -> None:
        """Block until every rank has called this. A save calls it twice."""

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        """Block until every rank has arrived; with ``failure``, report it and return.

        Raises:
            PeerFailedError: another rank failed, or stopped waiting.
            TransferTimeoutError: not all ranks arrived in time, so no rank continues.
            TransportError: not all ranks arrived, or this rank cannot find out.
        """
        del meeting
        if failure is None:
            self.execute_barrier()

    def expect(self, meeting: Meeting) -> None:
        """Note that a save has begun whose ranks will meet.

        The writer calls this before the first byte. An earlier save of the same name
        and step may have left a meeting unfinished, which must not be joined.

        Raises:
            TransportError: the store of the meeting cannot be reached.
        """
        del meeting

    def close(self) -> None:
        """Release the barrier's connections and groups."""
        return


# ------------------------------------------------------------------- which barrier

_classes: Final[dict[str, type[Barrier]]] = {}


def register_barrier(barrier: B) -> B:
    """Let a `BarrierConfig` name this class by its ``barrier_type``. A decorator."""
    _classes[barrier.barrier_type] = barrier
    return barrier


def create_barrier_from_config(
    config: BarrierConfig, rank_info: RankInfo
) -> Barrier | None:
    """Make the barrier that ``config`` names, in the process that will wait at it.

    A constructor with parameters ``global_rank`` and ``global_world_size`` gets them,
    unless ``barrier_args`` has them. Without a type, see `barrier_config_for`.

    Raises:
        ValueError: the type is unknown, or several ranks have nowhere to meet.
    """
    config = barrier_config_for(config, rank_info, in_process=False)
    if config.barrier_type is None:
        return None
    if config.barrier_type not in _classes:
        known = ", ".join(sorted(_classes))
        raise ValueError(
            f"there is no barrier type {config.barrier_type!r}; known are {known}"
        )
    make = _classes[config.barrier_type]
    ranks: dict[str, object] = {
        "global_rank": rank_info.global_rank,
        "global_world_size": rank_info.global_world_size,
    }
    accepted = inspect.signature(make).parameters
    given = {name: value for name, value in ranks.items() if name in accepted}
    return make(**(given | dict(config.barrier_args)))


def barrier_config_for(
    config: BarrierConfig, rank_info: RankInfo, *, in_process: bool
) -> BarrierConfig:
    """Choose how ranks meet if ``config`` does not. Call it in the trainer's process.

    One rank needs no barrier. If torch.distributed is initialized, several ranks meet
    in a process group. Checkpoint processes (``in_process``) meet in the TCP store
    that the default process group was made with.

    Raises:
        ValueError: there are several ranks, and nowhere to meet.
    """
    if config.barrier_type is not None or rank_info.global_world_size == 1:
        return config
    if not _distributed_is_initialized():
        raise ValueError(
            f"{rank_info.global_world_size} ranks need somewhere to meet: name it by "
            "BarrierConfig, or initialize torch.distributed first"
        )
    if not in_process:
        return BarrierConfig("dist_barrier")
    return BarrierConfig("tcp_store", _default_store_arguments())


def default_rank_info() -> RankInfo:
    """Return this process's rank in torch's default process group, or 0 of 1."""
    if not _distributed_is_initialized():
        return RankInfo(0, 1)
    distributed = sys.modules["torch.distributed"]
    return RankInfo(distributed.get_rank(), distributed.get_world_size())


def _distributed_is_initialized() -> bool:
    # If the program has initialized it, the program has imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized())


def _default_store_arguments() -> dict[str, object]:
    """Return the arguments of a barrier that meets in the default group's store.

    Raises:
        ValueError: that store is not a TCP store.
    """
    from torch import distributed as dist

    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no other way
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        raise ValueError(
            f"torch.distributed was initialized with a {type(store).__name__}, where "
            "other processes cannot meet: name a tcp_store by BarrierConfig"
        )
    return {
        "master_address": store.host,
        "tcpstore_port": store.port,
        "is_master": False,
    }


# ----------------------------------------------------------------------- TCP store


@register_barrier
class TCPStoreBarrier(Barrier):
    """Meets in a ``torch.distributed.TCPStore``, which rank 0 hosts.

    The ranks need no process group. All state of a meeting is in the store, so a
    writer that died can be replaced. The store has one or more *rounds*, or attempts,
    for each meeting. One decision ends a round, and all of its ranks read it: either
    all ranks arrived, or a named rank failed for a stated reason.

    Args:
        global_rank: This rank.
        global_world_size: How many ranks there are.
        barrier_prefix: Keeps these keys apart from other keys in the same store.
        timeout_barrier_init_secs: How long to try to reach the store.
        use_checkpoint_barrier_tcpstore_libuv: Let the host use libuv.
        tcpstore_port: The store's port; by default ``MASTER_PORT``.
        master_address: The store's host; by default ``MASTER_ADDR``.
        timeout_secs: Wait no longer than this, even if the writer would.
        timeout_exit_secs: How long a closing host stays for ranks that have not read
            the last decision yet. It does not stay for ranks that never came.
        is_master: Whether this process hosts the store. By default rank 0 does, unless
            torchrun's agent already hosts it at that address.
    """

    barrier_type = "tcp_store"

    def __init__(
        self,
        global_rank: int,
        global_world_size: int,
        barrier_prefix: str = "aiockpt",
        timeout_barrier_init_secs: float = 30,
        use_checkpoint_barrier_tcpstore_libuv: bool = True,  # noqa: FBT001, FBT002 - the seed's
        tcpstore_port: int | None = None,
        master_address: str | None = None,
        timeout_secs: float | None = None,
        *,
        timeout_exit_secs: float = 5,
        is_master: bool | None = None,
    ) -> None:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        hosted = agent and tcpstore_port is None
        self._rank, self._world_size = global_rank, global_world_size
        self._prefix = barrier_prefix
        self._address = master_address or os.environ.get("MASTER_ADDR", "localhost")
        port = os.environ.get("MASTER_PORT") if tcpstore_port is None else tcpstore_port
        if port is None:
            raise ValueError("tcp_store needs tcpstore_port, or MASTER_PORT to be set")
        self._port = int(port)
        self._init_timeout = timeout_barrier_init_secs
        self._libuv = use_checkpoint_barrier_tcpstore_libuv
        self._longest = timeout_secs
        self._exit_timeout = timeout_exit_secs
        self._is_master = (
            not (global_rank or hosted) if is_master is None else is_master
        )
        self._store: Store | None = None
        self._done: list[tuple[str, int]] = []  # the rounds that this rank was in
        self._begun: dict[str, int] = {}  # the round in which it will be, by meeting
        if self._is_master:
            self._connect()

    def __repr__(self) -> str:
        where = f"{self._address}:{self._port}"
        return f"<TCPStoreBarrier {where} rank={self._rank}/{self._world_size}>"

    def execute_barrier(self) -> None:
        """Block until every rank has called this."""
        self.meet(_LEGACY)

    def expect(self, meeting: Meeting) -> None:
        """Begin another round if the last one certainly belongs to an earlier save.

        Three kinds of rounds do: a round that this rank took part in, a round that was
        given up before this save began, and any meeting to commit, because all ranks
        come to the other meeting first. A round in which another rank has failed stays,
        because it may belong to this save.
        """
        with self._translating_errors():
            store, key = self._connect(), self._key(meeting)
            number = _current(store, key)
            last = _Round(store, key, number)
            decision = last.decision
            if decision and (
                meeting.phase == "committed"
                or decision.startswith(_LATE)
                or self._rank in last.ranks("arrived")
            ):
                number += 1
                _advance_to(store, key, number)
            # If this process dies, its replacement reads this: the other ranks may
            # be a round ahead by then.
            _Round(store, key, number).add("begun", self._rank)
            self._begun[key] = number

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        """Wait for all ranks; with ``failure``, report it and return."""
        with self._translating_errors():
            if failure is None:
                self._meet(meeting)
            else:
                self._tell(meeting, failure)

    def close(self) -> None:
        """Disconnect. The host first lets the other ranks read the last decision."""
        if self._is_master and self._store is not None and self._done:
            last = _Round(self._store, *self._done[-1])
            with suppress(RuntimeError):
                late = last.decision.startswith(_LATE)
                readers = len(last.ranks("arrived")) if late else self._world_size
                until = time.monotonic() + self._exit_timeout
                while last.readers < readers and time.monotonic() <= until:
                    time.sleep(_POLL)
        self._store = None

    def _meet(self, meeting: Meeting) -> None:
        from torch import distributed as dist

        store, key = self._connect(), self._key(meeting)
        number = self._begun.pop(key, _current(store, key))
        while self._rank in _Round(store, key, number).ranks("arrived"):
            number += 1  # this rank was in it, perhaps before its process was replaced
        _advance_to(store, key, number)
        now = self._arrive(_Round(store, key, number))
        if len(now.ranks("arrived")) == self._world_size:
            now.decide(_ALL_CAME)
        limits = (meeting.timeout, self._longest)
        timeout = min(limit for limit in limits if limit is not None)
        with suppress(dist.DistStoreError):
            now.wait(timeout)
        late = f"{_LATE}:{self._rank}:rank {self._rank} waited for {timeout:.3g} s"
        found = now.decide(late)
        now.note_read()
        if found == late:
            raise TransferTimeoutError(f"the barrier ({meeting})", timeout)
        if found != _ALL_CAME:
            _, rank, reason = found.split(":", 2)
            raise PeerFailedError(int(rank), reason)
        if meeting.phase == "written" and not self._rank:
            self._forget(store, meeting)

    def _tell(self, meeting: Meeting, failure: str) -> None:
        """Decide the current round; this rank may be in it from before a restart."""
        store, key = self._connect(), self._key(meeting)
        number = self._begun.pop(key, 0) or self._begun_before(store, key)
        now = _Round(store, key, number)
        before = now.decision
        if before and self._rank in now.ranks("arrived"):
            # All ranks know how that round ended. If all came, they wait for this rank
            # at the next meeting now.
            if before == _ALL_CAME and meeting.phase == "written":
                self._tell(replace(meeting, phase="committed"), failure)
            return
        # Decide first: after this rank arrives, the last rank to come would decide
        # that all have come.
        now.decide(f"failed:{self._rank}:{failure}")
        self._arrive(now)
        now.note_read()

    def _arrive(self, now: _Round) -> _Round:
        now.add("arrived", self._rank)
        self._done.append((now.key, now.number))
        return now

    def _begun_before(self, store: Store, key: str) -> int:
        """Return the round that this rank's dead predecessor had chosen."""
        current = number = _current(store, key)
        while number and (begun := _Round(store, key, number).ranks("begun")):
            if self._rank in begun:
                return number
            number -= 1
        return current

    def _forget(self, store: Store, meeting: Meeting) -> None:
        """Remove the keys of earlier meetings, which all ranks have left."""
        *past, now = self._done
        self._done = [now]
        # Another rank may have come to the second meeting of this save already.
        both = (meeting, replace(meeting, phase="committed"))
        kept = {self._key(each) for each in both}
        for key, number in past:
            _Round(store, key, number).delete()
            if key not in kept:
                store.delete_key(f"{key}/round")

    def _key(self, meeting: Meeting) -> str:
        return f"{self._prefix}/{meeting}"

    def _connect(self) -> Store:
        from torch import distributed as dist

        if self._store is None:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self._address,
                self._port,
                timeout=timedelta(seconds=self._init_timeout),
                is_master=self._is_master,
                wait_for_workers=False,
                use_libuv=self._libuv,
            )
        return self._store

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except TransportError:  # a timeout is a RuntimeError, too
            raise
        except RuntimeError as error:
            self._store = None  # the next meeting connects again
            where = f"{self._address}:{self._port}"
            raise TransportError(f"the store at {where} failed: {error}") from error


@dataclass(frozen=True, slots=True)
class _Round:
    """One attempt of the ranks to meet: its keys in the store."""

    store: Store
    key: str
    number: int

    def _name(self, name: str) -> str:
        return f"{self.key}/{self.number}/{name}"

    def _get(self, name: str) -> str:
        found = self._name(name)
        return _text(self.store.get(found)) if self.store.check([found]) else ""

    def ranks(self, name: Literal["begun", "arrived"]) -> set[int]:
        return {int(rank) for rank in self._get(name).split(",") if rank}

    def add(self, name: Literal["begun", "arrived"], rank: int) -> None:
        self.store.append(self._name(name), f"{rank},")  # type: ignore[attr-defined]

    @property
    def decision(self) -> str:
        """How the round has ended; empty while it goes on."""
        return self._get("decision")

    def decide(self, decision: str) -> str:
        """End the round unless it has ended; return how it has ended."""
        key = self._name("decision")
        found = _text(self.store.compare_set(key, "", decision))
        if found == decision:
            # Without libuv, only a plain set wakes the ranks that wait.
            self.store.set(key, decision)
        return found

    def wait(self, timeout: float) -> None:
        self.store.wait([self._name("decision")], timedelta(seconds=timeout))

    def note_read(self) -> None:
        """Note that this rank does not need the store until its next meeting."""
        self.store.add(self._name("read"), 1)

    @property
    def readers(self) -> int:
        return self.store.add(self._name("read"), 0)

    def delete(self) -> None:
        for name in ("begun", "arrived", "decision", "read"):
            self.store.delete_key(self._name(name))


def _current(store: Store, key: str) -> int:
    """Return the number of a meeting's current round; the first one is 1."""
    return int(_text(store.compare_set(f"{key}/round", "", "1")))


def _advance_to(store: Store, key: str, number: int) -> None:
    """Make ``number`` the current round, unless a later one is."""
    now = _text(store.get(f"{key}/round"))
    while int(now) < number:
        now = _text(store.compare_set(f"{key}/round", now, str(number)))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# ------------------------------------------------------------------- process group


@register_barrier
class DistBarrier(Barrier):
    """Meets in a gloo group beside the default one, so that training is not disturbed.

    All ranks must make it, in the same order as their other groups. It works in the
    process that has the default process group, and not in a checkpoint process.

    Args:
        group: The group to meet in; its backend must reduce host memory. None makes
            one.
    """

    barrier_type = "dist_barrier"

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        from torch import distributed as dist

        if not dist.is_initialized():
            raise ValueError(
                "dist_barrier needs torch.distributed to be initialized in the process "
                "that writes; a checkpoint process meets by tcp_store"
            )
        self._own = group is None
        self._group = dist.new_group(backend="gloo") if group is None else group
        self._rank = dist.get_rank(self._group)
        self._world_size = dist.get_world_size(self._group)
        self._broken = ""

    def __repr__(self) -> str:
        return f"<DistBarrier rank={self._rank}/{self._world_size}>"

    def execute_barrier(self) -> None:
        """Block until every rank has called this."""
        self.meet(_LEGACY)

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        """Block until every rank has arrived; with ``failure``, report it first.

        Raises:
            ProcessGroupError: the group failed, now or at an earlier meeting. After a
                rank has missed one meeting, the ranks are out of step for good.
        """
        import torch

        if self._broken:
            raise ProcessGroupError(self._broken)
        label = zlib.crc32(str(meeting).encode())
        failed = self._world_size if failure is None else self._rank
        # One reduction says who failed first, and whether all meet for the same.
        said = torch.tensor([failed, label, -label], dtype=torch.int64)
        self._reduce(said, meeting)
        first, low, high = said.tolist()
        if low != -high:
            self._broken = "the ranks met for different checkpoints"
            raise ProcessGroupError(self._broken)
        if first < self._world_size and failure is None:
            raise PeerFailedError(first, "its log says why")

    def close(self) -> None:
        """Destroy the group, if the barrier made it."""
        from torch import distributed as dist

        if self._own and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._own = False

    def _reduce(self, said: torch.Tensor, meeting: Meeting) -> None:
        from torch import distributed as dist

        try:
            work = dist.all_reduce(
                said, op=dist.ReduceOp.MIN, group=self._group, async_op=True
            )
            assert work is not None
            work.wait(timedelta(seconds=meeting.timeout))
        except RuntimeError as error:
            self._broken = f"an earlier meeting failed: {error}"
            raise ProcessGroupError(str(error)) from error
