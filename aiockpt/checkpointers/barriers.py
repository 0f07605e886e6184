"""The meeting of ranks: they wait for each other in a TCP store, to commit together.

Ranks meet twice in a save: when every file is written, and when rank 0 has committed.
A rank that fails reports that at the meeting, so that the other ranks fail at once. The
store is the one of torch.distributed's default group, or the one whose address
`BarrierConfig` gives. All state is in the store, so a writer that died can be replaced.
These keys follow the prefix, the number of ranks, and `Meeting.key`:

================================= ====================================================
``round``                         the number of the current round, from 1
``NUMBER/written/begun``          the ranks whose saves have begun in this round
``NUMBER/PHASE/arrived``          the ranks that have come, each with its snapshot
``NUMBER/PHASE/count``, ``ready`` how many have come; set to wake rank 0
``NUMBER/PHASE/decision``         how the meeting has ended, by one compare-and-set
``NUMBER/PHASE/read``             how many ranks have read the decision
================================= ====================================================

A *round* is one attempt to save a step to a path. Rank 0 begins another round with each
save, and only rank 0 decides that all ranks have arrived. Ranks that came to the round
before it follow. So no rank that has died with an earlier attempt of the job counts,
although the store still has its arrival.

This module loads ``torch.distributed`` only when ranks meet, because a checkpoint
process of one rank does not need torch.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from aiockpt.checkpointers.config import BarrierConfig, GroupStore, RankInfo
from aiockpt.checkpointers.ranks import ALONE, default_store
from aiockpt.errors import PeerFailedError, TransferTimeoutError, TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("aiockpt")

Phase: TypeAlias = Literal["written", "committed"]

_PHASES: Final[tuple[Phase, ...]] = ("written", "committed")
_POLL_S: Final = 0.005
_SAY_AFTER_S: Final = 30.0
"""Seconds after which a waiting rank logs for whom it waits; half its time if less."""

_KEPT_SAVES: Final = 32
"""How many saves that have failed stay in the store, for ranks that come late."""

_SHOWN_RANKS: Final = 8

# How a meeting ends: one of these. The last two are followed by a rank and a reason.
_ALL_CAME: Final = "all came"
_NEXT: Final = "next"  # rank 0 has begun the next round
_LATE: Final = "late"
_FAILED: Final = "failed"

_PREFIX: Final = "aiockpt"


def create_barrier_from_config(
    config: BarrierConfig, rank_info: RankInfo, store: GroupStore | None = None
) -> TCPStoreBarrier | None:
    """Make the barrier of several ranks, in the process that will wait at it.

    Args:
        config: The address of the store, and other arguments of `TCPStoreBarrier`.
        rank_info: The rank that will wait.
        store: Where the ranks meet if ``config`` has no address. By default the
            store of torch.distributed's default group.

    Returns:
        None for a single rank.

    Raises:
        ValueError: several ranks have nowhere to meet.
        TransportError: rank 0 cannot host the store.
    """
    size = rank_info.global_world_size
    if size == 1:
        return None
    found: dict[str, object] = {"global_rank": rank_info.global_rank}
    found |= {"global_world_size": size, **config.barrier_args}
    if not config.names_store:
        store = store or default_store(size)
        found |= {"master_address": store.host, "tcpstore_port": store.port}
        found.setdefault("is_master", False)
        prefix = found.get("barrier_prefix", _PREFIX)
        found["barrier_prefix"] = f"{prefix}/{store.group}"
    return TCPStoreBarrier(**found)  # type: ignore[arg-type]


# ------------------------------------------------------------------------ the meeting


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What ranks meet for. Those of the same save find each other by it.

    Attributes:
        directory: The checkpoint's absolute path as it was given to the save. Links
            are not followed, because they may differ from rank to rank.
        step: The checkpoint's step.
        phase: ``written`` (every rank's file is durable) or ``committed``.
        timeout: How many seconds to wait for the other ranks.
        snapshot: The identity of this rank's file, which rank 0 gets.
    """

    directory: str
    step: int
    phase: Phase
    timeout: float
    snapshot: str = ""

    def __str__(self) -> str:
        return f"{os.path.basename(self.directory)}/{self.step}/{self.phase}"

    @property
    def key(self) -> str:
        """The name of this save, whatever characters the directory has."""
        where = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:32]
        return f"{where}/{self.step}"


class TCPStoreBarrier:
    """Meets in a ``torch.distributed.TCPStore``.

    One decision ends each meeting, and all ranks read it. It says that all ranks
    arrived, or which rank failed and why.

    Args:
        global_rank: This rank.
        global_world_size: How many ranks there are.
        barrier_prefix: Keeps these keys apart from other keys in the same store.
        timeout_barrier_init_secs: How long to try to reach the store.
        use_checkpoint_barrier_tcpstore_libuv: Let the host use libuv.
        tcpstore_port: The store's port.
        master_address: The store's host.
        timeout_secs: Wait no longer than this, even if the writer would.
        timeout_exit_secs: How long a closing host, or rank 0, stays for ranks that have
            not read the last decision yet. It does not stay for ranks that never came.
        is_master: Whether this process hosts the store, unless another process of its
            host does. By default rank 0 does.
    """

    def __init__(
        self,
        global_rank: int,
        global_world_size: int,
        barrier_prefix: str = _PREFIX,
        timeout_barrier_init_secs: float = 30,
        use_checkpoint_barrier_tcpstore_libuv: bool = True,  # noqa: FBT001, FBT002 - the seed's
        tcpstore_port: int | None = None,
        master_address: str | None = None,
        timeout_secs: float | None = None,
        *,
        timeout_exit_secs: float = 5,
        is_master: bool | None = None,
    ) -> None:
        if tcpstore_port is None or master_address is None:
            raise ValueError(
                "a TCP store has an address: give master_address and tcpstore_port, or "
                "neither by BarrierConfig to meet in torch.distributed's own store"
            )
        self._rank, self._world_size = global_rank, global_world_size
        self._prefix = f"{barrier_prefix}/{global_world_size}"
        self._address, self._port = master_address, int(tcpstore_port)
        self._init_timeout = timeout_barrier_init_secs
        self._libuv = use_checkpoint_barrier_tcpstore_libuv
        self._longest = math.inf if timeout_secs is None else timeout_secs
        self._exit_timeout = timeout_exit_secs
        self._is_master = not global_rank if is_master is None else is_master
        self._hosts = False
        self._store: Store | None = None
        # The last saves, and the round of each. Rank 0 removes their keys later.
        self._rounds: dict[str, int] = {}
        self._last: _MeetingKeys | None = None  # the last one that this rank came to
        if self._is_master:
            with self._translating_errors():
                self._connect()

    def expect(self, meeting: Meeting) -> None:
        """Note that a save has begun whose ranks will meet twice.

        The writer calls this before the first byte. It chooses the round: the current
        one may belong to an earlier save of the same directory and step.

        Raises:
            TransportError: the store cannot be reached.
        """
        with self._translating_errors():
            self._choose_round(self._keys_of(meeting))

    def meet(self, meeting: Meeting) -> dict[int, str]:
        """Block until every rank has arrived.

        Returns:
            Rank 0 gets the ``snapshot`` of each rank; other ranks get nothing.

        Raises:
            PeerFailedError: another rank failed, or stopped waiting.
            TransferTimeoutError: not all ranks arrived in time, so no rank continues.
            TransportError: the store cannot be reached.
        """
        with self._translating_errors():
            save = self._keys_of(meeting)
            timeout = min(meeting.timeout, self._longest)
            until = time.monotonic() + timeout
            number = self._rounds.get(save.key) or self._choose_round(save)
            while True:
                now = save.meeting(number, meeting.phase)
                self._arrive(now, meeting)
                missing = self._wait(now, meeting, until)
                late = f"{_LATE}:{self._rank}:it waited {timeout:.3g} s for {missing}"
                decision = now.decide(late if missing else _ALL_CAME)
                if decision != _NEXT or not self._rank:
                    break
                number = self._join(save, number + 1)
            now.note_read()
            if decision == late:
                raise TransferTimeoutError(
                    f"the barrier ({meeting}), which waited for {missing}", timeout
                )
            if decision == _NEXT:
                raise PeerFailedError(0, "it has begun another save of the same path")
            if decision != _ALL_CAME:
                _, rank, reason = decision.split(":", 2)
                raise PeerFailedError(int(rank), reason)
            if self._rank:
                return {}
            if meeting.phase == "written":
                self._forget_others(save)
            return now.arrived

    def report(self, meeting: Meeting, failure: str) -> None:
        """End a meeting with a failure; this rank may have died at it before.

        Raises:
            TransportError: the store cannot be reached.
        """
        with self._translating_errors():
            save, phase = self._keys_of(meeting), meeting.phase
            # Its predecessor may have died before it left its mark. Without the mark,
            # the next save of this rank would join this round, and get this failure.
            number = self._rounds.get(save.key) or self._join(
                save, self._predecessors_round(save)
            )
            failed = f"{_FAILED}:{self._rank}:{failure}"
            while True:
                now = save.meeting(number, phase)
                # Decide first: this rank may be the last one to arrive.
                decision = now.decide(failed)
                if decision == _NEXT and self._rank:
                    number = self._join(save, number + 1)
                elif decision == _ALL_CAME and phase == "written":
                    phase = "committed"  # there the other ranks wait for this one
                else:
                    break
            if decision == failed or self._rank not in now.arrived:
                self._arrive(now, meeting)
                now.note_read()

    def close(self) -> None:
        """Disconnect. The host first lets the other ranks read the last decision.

        So does rank 0, whose program may host the store of the default group.
        """
        last, stays = self._last, self._hosts or not self._rank
        if stays and self._store is not None and last is not None:
            with suppress(RuntimeError):
                late = last.decision.startswith(_LATE)
                readers = len(last.arrived) if late else self._world_size
                until = time.monotonic() + self._exit_timeout
                while last.readers < readers and time.monotonic() <= until:
                    time.sleep(_POLL_S)
        self._store = self._last = None

    # ------------------------------------------------------------ which round it is

    def _choose_round(self, save: _SaveKeys) -> int:
        """Choose and join the round of a save that begins now.

        Rank 0 ends the current round, and begins the next one. Another rank joins the
        current round while it is open. Any rank also joins a round that has failed,
        unless it has begun a save there: that failure may belong to this save.
        """
        number = save.current
        last = save.meeting(number, "written")
        has_begun = self._rank in last.begun
        decision = last.decision if self._rank else last.decide(_NEXT)
        if not has_begun and (not decision or decision.startswith(_FAILED)):
            return self._join(save, number)
        self._join(save, number + 1)
        save.advance_to(number + 1)
        return number + 1

    def _predecessors_round(self, save: _SaveKeys) -> int:
        """Return the round that this rank's dead predecessor had chosen."""
        current = save.current
        # It may have died before its round became the current one.
        has_next = not self._rank and save.meeting(current, "written").decision == _NEXT
        numbers: list[int] = [current + 1, *range(current, 0, -1)]
        for number in numbers:
            begun = save.meeting(number, "written").begun
            if self._rank in begun or (has_next and number > current):
                save.advance_to(number)
                return number
            if not begun and number <= current:
                break
        return current

    def _join(self, save: _SaveKeys, number: int) -> int:
        """Leave this rank's mark in a round, for the process that may replace it."""
        save.meeting(number, "written").add("begun", self._rank)
        self._rounds.pop(save.key, None)
        self._rounds[save.key] = number
        while len(self._rounds) > _KEPT_SAVES:
            oldest = next(iter(self._rounds))
            del self._rounds[oldest]
            if not self._rank:
                _SaveKeys(save.store, oldest).remove()
        return number

    def _forget_others(self, save: _SaveKeys) -> None:
        """Remove earlier saves and earlier rounds, which all ranks have left."""
        number = self._rounds[save.key]
        for earlier in self._rounds.keys() - {save.key}:
            _SaveKeys(save.store, earlier).remove()
        self._rounds = {save.key: number}
        save.remove_rounds(number - 1)

    # ------------------------------------------------------------------ the meeting

    def _arrive(self, now: _MeetingKeys, meeting: Meeting) -> None:
        self._last = now
        now.add("arrived", self._rank, meeting.snapshot)
        if now.count() == self._world_size:
            now.wake()

    def _wait(self, now: _MeetingKeys, meeting: Meeting, until: float) -> str:
        """Wait until the meeting can end; say once for whom, and return it."""
        from torch import distributed as dist

        name = "decision" if self._rank else "ready"
        with suppress(dist.DistStoreError):
            now.wait(name, min(_SAY_AFTER_S, (until - time.monotonic()) / 2))
            return ""
        missing = self._missing(now, meeting)
        logger.warning("saving %s waits for %s", meeting.directory, missing)
        with suppress(dist.DistStoreError):
            now.wait(name, until - time.monotonic())
            return ""
        return self._missing(now, meeting)

    def _missing(self, now: _MeetingKeys, meeting: Meeting) -> str:
        """Say which ranks have not come, and what to do if they never will."""
        lost = sorted({*range(self._world_size)} - now.arrived.keys())
        named = f"{_listed(lost)} of {self._world_size}"
        if meeting.phase == "committed":
            return named
        return (
            f"{named}; every rank must save {meeting.directory} by this path, or one "
            f"process for all of them with {ALONE}"
        )

    # -------------------------------------------------------------------- the store

    def _keys_of(self, meeting: Meeting) -> _SaveKeys:
        return _SaveKeys(self._connect(), f"{self._prefix}/{meeting.key}")

    def _connect(self) -> Store:
        from torch import distributed as dist

        if self._store is None:
            try:
                self._store = self._opened(hosts=self._is_master)
            except dist.DistNetworkError as error:
                if not self._is_master or "in use" not in str(error).lower():
                    raise
                # Another checkpointer of this job is the host.
                self._store = self._opened(hosts=False)
        return self._store

    def _opened(self, *, hosts: bool) -> Store:
        from torch import distributed as dist

        self._hosts = hosts
        return dist.TCPStore(  # type: ignore[attr-defined]
            self._address,
            self._port,
            timeout=timedelta(seconds=self._init_timeout),
            is_master=hosts,
            wait_for_workers=False,
            use_libuv=self._libuv,
        )

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


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{more}"


@dataclass(frozen=True, slots=True)
class _SaveKeys:
    """The rounds of a save: their keys in the store."""

    store: Store
    key: str

    @property
    def current(self) -> int:
        """The number of the current round; the first one is 1."""
        return int(self.store.compare_set(f"{self.key}/round", "", "1"))

    def advance_to(self, number: int) -> None:
        """Make ``number`` the current round, unless a later one is."""
        now = self.store.get(f"{self.key}/round")
        while int(now) < number:
            now = self.store.compare_set(f"{self.key}/round", now.decode(), str(number))

    def meeting(self, number: int, phase: Phase) -> _MeetingKeys:
        """Return a meeting of a round."""
        return _MeetingKeys(self.store, f"{self.key}/{number}/{phase}")

    def remove(self) -> None:
        """Remove all rounds of the save."""
        if self.store.check([f"{self.key}/round"]):
            self.remove_rounds(self.current)
            self.store.delete_key(f"{self.key}/round")

    def remove_rounds(self, last: int) -> None:
        """Remove the rounds up to ``last``; none before a missing one."""
        while last > 0:
            if not sum(self.meeting(last, each).delete() for each in _PHASES):
                return
            last -= 1


@dataclass(frozen=True, slots=True)
class _MeetingKeys:
    """One meeting of a round: its keys in the store."""

    store: Store
    key: str

    @property
    def begun(self) -> dict[int, str]:
        """The ranks whose saves have begun in this round."""
        return self._ranks("begun")

    @property
    def arrived(self) -> dict[int, str]:
        """What each rank said that has arrived."""
        return self._ranks("arrived")

    @property
    def decision(self) -> str:
        """How the meeting has ended; empty while it goes on."""
        return self._get("decision")

    @property
    def readers(self) -> int:
        """How many ranks do not need the store until their next meeting."""
        return self.store.add(f"{self.key}/read", 0)

    def add(self, name: Literal["begun", "arrived"], rank: int, said: str = "") -> None:
        """Add a rank, with what it says, to those that have begun or arrived."""
        self.store.append(f"{self.key}/{name}", f"{rank}:{said},")  # type: ignore[attr-defined]

    def count(self) -> int:
        """Count an arrival; return how many there are."""
        return self.store.add(f"{self.key}/count", 1)

    def decide(self, decision: str) -> str:
        """End the meeting unless it has ended; return how it has ended."""
        key = f"{self.key}/decision"
        found = self.store.compare_set(key, "", decision).decode()
        if found == decision:
            # Without libuv, only a plain set wakes the ranks that wait.
            self.store.set(key, decision)
            self.wake()
        return found

    def wake(self) -> None:
        """Wake rank 0, which decides."""
        self.store.set(f"{self.key}/ready", "1")

    def wait(self, name: str, timeout: float) -> None:
        """Wait for ``ready`` or ``decision``."""
        limit = timedelta(seconds=max(timeout, _POLL_S))
        self.store.wait([f"{self.key}/{name}"], limit)

    def note_read(self) -> None:
        """Note that this rank does not need the store until its next meeting."""
        self.store.add(f"{self.key}/read", 1)

    def delete(self) -> bool:
        """Remove the keys; return whether there was one."""
        names = ("begun", "arrived", "count", "ready", "decision", "read")
        return bool(sum(self.store.delete_key(f"{self.key}/{name}") for name in names))

    def _get(self, name: str) -> str:
        key = f"{self.key}/{name}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _ranks(self, name: str) -> dict[int, str]:
        said = (each.split(":") for each in self._get(name).split(",") if each)
        return {int(rank): text for rank, text in said}
