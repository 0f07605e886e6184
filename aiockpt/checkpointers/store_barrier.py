"""Ranks meet in a TCP store: no process group is needed, and any process can come.

Nothing depends on what a process remembers, so a writer that died may be replaced.
For each meeting the store has the *rounds* in which ranks have tried it; a round ends
by one decision that all of its ranks read: all came, or who failed and why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from aiockpt.checkpointers.barriers import Barrier, Meeting, register_barrier
from aiockpt.errors import PeerFailedError, TransferTimeoutError, TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["TCPStoreBarrier", "default_store_arguments"]

_ALL_CAME: Final = "all came"
_LATE: Final = "late"
_LEGACY: Final = 600.0
_OF_A_ROUND: Final = ("begun", "arrived", "decision", "read")

_POLL: Final = 0.005


@register_barrier
class TCPStoreBarrier(Barrier):
    """Meets in a ``torch.distributed.TCPStore``, which rank 0 hosts.

    Args:
        global_rank: This rank.
        global_world_size: How many there are.
        barrier_prefix: Keeps the keys apart from those of others in the same store.
        timeout_barrier_init_secs: How long the store is tried to be reached.
        use_checkpoint_barrier_tcpstore_libuv: Let the host use libuv.
        tcpstore_port: The store's port; by default ``MASTER_PORT``.
        master_address: Its host; by default ``MASTER_ADDR``.
        timeout_secs: Waits no longer than this, if the writer would.
        timeout_parting_secs: How long the host, when it is closed, stays for those who
            have not read how the last meeting went; for those who were given up there
            it does not stay.
        is_master: Whether this process hosts the store; by default rank 0 does, unless
            torchrun's agent hosts it at that address already.
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
        timeout_parting_secs: float = 5,
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
        self._parting = timeout_parting_secs
        self._is_master = (
            not (global_rank or hosted) if is_master is None else is_master
        )
        self._store: Store | None = None
        self._done: list[tuple[str, int]] = []
        self._begun: dict[str, int] = {}
        if self._is_master:
            self._connect()

    def __repr__(self) -> str:
        where = f"{self._address}:{self._port}"
        return f"<TCPStoreBarrier {where} rank={self._rank}/{self._world_size}>"

    def execute_barrier(self) -> None:
        """Block until every rank has called this."""
        self.meet(
            Meeting(
                name="execute_barrier",
                step=0,
                phase="committed",
                place=Path(),
                timeout=_LEGACY,
            )
        )

    def expect(self, meeting: Meeting) -> None:
        """Begin another round where the last one was certainly about an earlier save.

        That is one in which this rank was, one that was given up before this save
        began, and any meeting to commit: all ranks come to the other one first. A round
        in which another rank has failed stays, since that may be about this save.
        """
        with self._talking():
            store = self._connect()
            key = f"{self._prefix}/{meeting}"
            number = int(_text(store.compare_set(f"{key}/round", "", "1")))
            decision = self._decision(store, f"{key}/{number}")
            if decision and (
                meeting.phase == "committed"
                or decision.startswith(_LATE)
                or self._rank in self._arrived(store, f"{key}/{number}/arrived")
            ):
                number += 1
                self._raise(store, f"{key}/round", number)
            # For a successor, if this process dies: others may be a round ahead then.
            store.append(f"{key}/{number}/begun", f"{self._rank},")  # type: ignore[attr-defined]
            self._begun[key] = number

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        """Block until every rank is there; with ``failure``, tell them and go on."""
        with self._talking():
            if failure is None:
                self._meet(meeting)
            else:
                self._tell(meeting, failure)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except TransportError:  # a timeout is a RuntimeError, too
            raise
        except RuntimeError as error:
            self._store = None  # the next meeting connects again
            where = f"{self._address}:{self._port}"
            raise TransportError(f"the store at {where} failed: {error}") from error

    def close(self) -> None:
        """Disconnect. The host lets the others read the last decision first."""
        if self._is_master and self._store is not None and self._done:
            with suppress(RuntimeError):
                self._wait_for_readers(self._store)
        self._store = None

    def _wait_for_readers(self, store: Store) -> None:
        key, number = self._done[-1]
        until = time.monotonic() + self._parting
        while store.add(f"{key}/{number}/read", 0) < self._expected(store, key, number):
            if time.monotonic() > until:
                return
            time.sleep(_POLL)

    def _expected(self, store: Store, key: str, number: int) -> int:
        """Return how many ranks will read how a round went."""
        if _text(store.get(f"{key}/{number}/decision")).startswith(_LATE):
            return len(self._arrived(store, f"{key}/{number}/arrived"))
        return self._world_size

    def _connect(self) -> Store:
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

    def _meet(self, meeting: Meeting) -> None:
        store = self._connect()
        key = f"{self._prefix}/{meeting}"
        number = int(_text(store.compare_set(f"{key}/round", "", "1")))
        number = self._begun.pop(key, number)
        while self._rank in self._arrived(store, f"{key}/{number}/arrived"):
            number += 1  # this rank was in that one already, perhaps in another life
        self._raise(store, f"{key}/round", number)
        decision = self._arrive(store, key, number)
        if len(self._arrived(store, f"{key}/{number}/arrived")) == self._world_size:
            self._decide(store, decision, _ALL_CAME)
        limits = (meeting.timeout, self._longest)
        timeout = min(limit for limit in limits if limit is not None)
        with suppress(dist.DistStoreError):
            store.wait([decision], timedelta(seconds=timeout))
        late = f"{_LATE}:{self._rank}:rank {self._rank} waited for {timeout:.3g} s"
        found = self._decide(store, decision, late)
        self._read(store, decision)
        if found == late:
            raise TransferTimeoutError(f"the barrier ({meeting})", timeout)
        if found != _ALL_CAME:
            _, rank, reason = found.split(":", 2)
            raise PeerFailedError(int(rank), reason)
        if meeting.phase == "written" and not self._rank:
            self._forget(store, meeting)

    def _tell(self, meeting: Meeting, failure: str) -> None:
        """Decide the round that is on, in which this rank may be: in another life."""
        store = self._connect()
        key = f"{self._prefix}/{meeting}"
        number = self._begun.pop(key, 0) or self._begun_before(store, key)
        before = self._decision(store, f"{key}/{number}")
        if before and self._rank in self._arrived(store, f"{key}/{number}/arrived"):
            # All know how that one ended. If all had come, they wait for this rank at
            # the next one now.
            if before == _ALL_CAME and meeting.phase == "written":
                self._tell(replace(meeting, phase="committed"), failure)
            return
        # Before it arrives, or the last one to come would find that all have come.
        decision = f"{key}/{number}/decision"
        self._decide(store, decision, f"failed:{self._rank}:{failure}")
        self._arrive(store, key, number)
        self._read(store, decision)

    @staticmethod
    def _read(store: Store, decision: str) -> None:
        """Say that this rank needs the store no longer, for the time being."""
        store.add(f"{decision.removesuffix('decision')}read", 1)

    def _arrive(self, store: Store, key: str, number: int) -> str:
        """Take part in a round; return the key of its decision."""
        arrived = f"{key}/{number}/arrived"
        store.append(arrived, f"{self._rank},")  # type: ignore[attr-defined]
        self._done.append((key, number))
        return f"{key}/{number}/decision"

    @staticmethod
    def _decide(store: Store, key: str, decision: str) -> str:
        """End a round, unless it has ended; return how it has."""
        found = _text(store.compare_set(key, "", decision))
        if found == decision:
            store.set(key, decision)  # without libuv, only this wakes those who wait
        return found

    @staticmethod
    def _decision(store: Store, of_round: str) -> str:
        """Return how a round has ended; nothing while it is on."""
        key = f"{of_round}/decision"
        return _text(store.get(key)) if store.check([key]) else ""

    def _begun_before(self, store: Store, key: str) -> int:
        """Return the round in which this rank was to meet in its life before."""
        now = int(_text(store.compare_set(f"{key}/round", "", "1")))
        number = now
        while number and store.check([f"{key}/{number}/begun"]):
            if self._rank in self._arrived(store, f"{key}/{number}/begun"):
                return number
            number -= 1
        return now

    @staticmethod
    def _arrived(store: Store, key: str) -> set[int]:
        text = _text(store.get(key)) if store.check([key]) else ""
        return {int(rank) for rank in text.split(",") if rank}

    @staticmethod
    def _raise(store: Store, key: str, number: int) -> None:
        now = _text(store.get(key))
        while int(now) < number:
            now = _text(store.compare_set(key, now, str(number)))

    def _forget(self, store: Store, meeting: Meeting) -> None:
        """Remove the keys of earlier meetings: all ranks have come from there."""
        *past, now = self._done
        self._done = [now]
        # Another rank may have come to the second meeting of this save already.
        both = (meeting, replace(meeting, phase="committed"))
        kept = {f"{self._prefix}/{each}" for each in both}
        for key, number in past:
            for name in _OF_A_ROUND:
                store.delete_key(f"{key}/{number}/{name}")
            if key not in kept:
                store.delete_key(f"{key}/round")


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def default_store_arguments() -> dict[str, object]:
    """Return what a barrier is made with that meets where the default group did.

    Raises:
        ValueError: that was no TCP store.
    """
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
