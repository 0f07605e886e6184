"""The meeting of ranks: they wait for each other in a TCP store, to commit together.

Ranks meet twice in a save: when every file is written, and when rank 0 has committed.
A rank that fails reports that at the meeting, so that the other ranks fail at once.

The store is the one of torch.distributed's default group, or the one whose address
`BarrierConfig` gives. `RankLookup` finds out, at each save, who meets there.

This module loads ``torch.distributed`` only when ranks meet, because a checkpoint
process of one rank does not need torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from aiockpt.checkpointers.config import BarrierConfig, GroupStore, RankInfo, SaveRanks
from aiockpt.errors import PeerFailedError, TransferTimeoutError, TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "Meeting",
    "Phase",
    "RankLookup",
    "TCPStoreBarrier",
    "create_barrier_from_config",
    "default_rank_info",
]

logger = logging.getLogger("aiockpt")

Phase: TypeAlias = Literal["written", "committed"]

_PHASES: Final[tuple[Phase, ...]] = ("written", "committed")
_POLL: Final = 0.005
_SAY_AFTER: Final = 30.0
"""Seconds after which a waiting rank logs for whom it waits; half its time if less."""

_KEPT: Final = 32
"""How many meetings that have failed stay in the store, for ranks that come late."""

_SHOWN: Final = 8
_ALL_CAME: Final = "all came"
_LATE: Final = "late"

_ALONE: Final = "rank_info=RankInfo(0, 1)"

_PREFIX: Final = "aiockpt"


# ------------------------------------------------------------------- who saves together


class RankLookup:
    """Finds out the ranks of a checkpointer, again at each save and load.

    Args:
        given: This process's rank, if the caller has given one.
        config: How the ranks meet. None: a writer of the caller's own knows it.
    """

    def __init__(self, given: RankInfo | None, config: BarrierConfig | None) -> None:
        self._given, self._config = given, config
        self._warned = False

    def info(self) -> RankInfo:
        """Return this process's rank as it is now."""
        return self._given or default_rank_info()

    def at_start(self) -> SaveRanks | None:
        """Return the ranks as they are now; None if they have nowhere to meet yet."""
        with suppress(ValueError):
            return self._found(self.info())
        return None

    def of_save(self) -> SaveRanks:
        """Return the ranks of a save that begins now.

        Raises:
            ValueError: there are several ranks, and nowhere to meet.
        """
        info = self.info()
        if self._given is None and not _is_initialized():
            self._warn_if_alone()
        return self._found(info)

    def _found(self, info: RankInfo) -> SaveRanks:
        alone = info.global_world_size == 1
        if alone or self._config is None or self._config.names_store:
            return SaveRanks(info)
        return SaveRanks(info, _default_store(info.global_world_size))

    def _warn_if_alone(self) -> None:
        launched = os.environ.get("WORLD_SIZE", "")
        if self._warned or not launched.isdecimal() or int(launched) < 2:
            return
        self._warned = True
        logger.warning(
            "this process saves as the only rank, although WORLD_SIZE is %s: call "
            "torch.distributed.init_process_group before the first save, or give "
            "rank_info; %s says that this process saves for all",
            launched,
            _ALONE,
        )


def default_rank_info() -> RankInfo:
    """Return this process's rank in torch's default process group, or 0 of 1."""
    if not _is_initialized():
        return RankInfo(0, 1)
    distributed = sys.modules["torch.distributed"]
    return RankInfo(distributed.get_rank(), distributed.get_world_size())


def _is_initialized() -> bool:
    # If the program has initialized it, the program has imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized())


def _default_store(world_size: int) -> GroupStore:
    """Return the default group's store.

    Raises:
        ValueError: there is no such group, or its store has no address.
    """
    remedy = (
        "give the address of a TCP store by BarrierConfig('tcp_store', "
        "{'master_address': ..., 'tcpstore_port': ...}); if only one process saves, "
        f"give it {_ALONE}"
    )
    if not _is_initialized():
        raise ValueError(
            f"{world_size} ranks need somewhere to meet: initialize torch.distributed "
            f"before the save, or {remedy}"
        )
    from torch import distributed as dist

    given = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no other way
    store = given
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        raise ValueError(
            f"{world_size} ranks cannot meet in the {type(store).__name__} with which "
            "torch.distributed was initialized: initialize it by env:// or tcp://, or "
            f"{remedy}"
        )
    return GroupStore(store.host, store.port, _group_of(given))


_groups: Final[weakref.WeakKeyDictionary[Store, str]] = weakref.WeakKeyDictionary()


def _group_of(store: Store) -> str:
    """Return the name of the group, on which its ranks agree in its store.

    The group's own prefix, which is not known, keeps the name from other groups. If
    the store has failed, the meeting fails, too, and says so.
    """
    if store not in _groups:
        try:
            said = store.compare_set(f"{_PREFIX}/group", "", secrets.token_hex(8))
        except RuntimeError:
            return ""
        _groups[store] = _text(said)
    return _groups[store]


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
        store = store or _default_store(size)
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
    """

    directory: str
    step: int
    phase: Phase
    timeout: float

    def __str__(self) -> str:
        return f"{os.path.basename(self.directory)}/{self.step}/{self.phase}"

    @property
    def key(self) -> str:
        """The name of this meeting, whatever characters the directory has."""
        where = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:32]
        return f"{where}/{self.step}/{self.phase}"


class TCPStoreBarrier:
    """Meets in a ``torch.distributed.TCPStore``.

    All state of a meeting is in the store, so a writer that died can be replaced. The
    store has one or more *rounds*, or attempts, for each meeting. One decision ends a
    round, and all of its ranks read it: either all ranks arrived, or a named rank
    failed for a stated reason.

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
        self._longest = timeout_secs
        self._exit_timeout = timeout_exit_secs
        self._is_master = not global_rank if is_master is None else is_master
        self._hosts = False
        self._store: Store | None = None
        self._begun: dict[str, int] = {}  # the round in which it will be, by meeting
        self._past: dict[str, None] = {}  # the meetings whose keys rank 0 will remove
        self._last: _Round | None = None  # the last one that this rank was in
        if self._is_master:
            with self._translating_errors():
                self._connect()

    def __repr__(self) -> str:
        where = f"{self._address}:{self._port}"
        return f"<TCPStoreBarrier {where} rank={self._rank}/{self._world_size}>"

    def expect(self, meeting: Meeting) -> None:
        """Note that a save has begun whose ranks will meet twice.

        The writer calls this before the first byte. An earlier save of the same
        directory and step may have left a round unfinished, which must not be joined.
        So another round begins if the last one certainly belongs to an earlier save.

        Three kinds of rounds do: a round that this rank took part in, a round that was
        given up before this save began, and any meeting to commit, because all ranks
        come to the other meeting first. A round in which another rank has failed stays,
        because it may belong to this save.

        Raises:
            TransportError: the store cannot be reached.
        """
        with self._translating_errors():
            for phase in _PHASES:
                self._expect(self._connect(), self._key(meeting, phase), phase)

    def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
        """Block until every rank has arrived; with ``failure``, report it and return.

        Raises:
            PeerFailedError: another rank failed, or stopped waiting.
            TransferTimeoutError: not all ranks arrived in time, so no rank continues.
            TransportError: the store cannot be reached.
        """
        with self._translating_errors():
            if failure is None:
                self._meet(meeting)
            else:
                self._tell(meeting, failure)

    def close(self) -> None:
        """Disconnect. The host first lets the other ranks read the last decision.

        So does rank 0, whose program may host the store of the default group.
        """
        last, stays = self._last, self._hosts or not self._rank
        if stays and self._store is not None and last is not None:
            with suppress(RuntimeError):
                late = last.decision.startswith(_LATE)
                readers = len(last.ranks("arrived")) if late else self._world_size
                until = time.monotonic() + self._exit_timeout
                while last.readers < readers and time.monotonic() <= until:
                    time.sleep(_POLL)
        self._store = self._last = None

    def _expect(self, store: Store, key: str, phase: Phase) -> None:
        number = _current(store, key)
        last = _Round(store, key, number)
        decision = last.decision
        if decision and (
            phase == "committed"
            or decision.startswith(_LATE)
            or self._rank in last.ranks("arrived")
        ):
            number += 1
            _advance_to(store, key, number)
        # If this process dies, its replacement reads this: the other ranks may be a
        # round ahead by then.
        _Round(store, key, number).add("begun", self._rank)
        self._begun[key] = number
        while len(self._begun) > _KEPT:
            del self._begun[next(iter(self._begun))]
        self._note(store, key)

    def _meet(self, meeting: Meeting) -> None:
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
        missing = self._wait(now, meeting, timeout)
        waited = f"it waited {timeout:.3g} s for {missing}"
        late = f"{_LATE}:{self._rank}:{waited}"
        found = now.decide(late)
        now.note_read()
        if found == late:
            raise TransferTimeoutError(
                f"the barrier ({meeting}), which waited for {missing}", timeout
            )
        if found != _ALL_CAME:
            _, rank, reason = found.split(":", 2)
            raise PeerFailedError(int(rank), reason)
        if meeting.phase == "written" and not self._rank:
            self._forget(store, meeting, number)

    def _wait(self, now: _Round, meeting: Meeting, timeout: float) -> str:
        """Wait until the round has ended; say once for whom, and return it."""
        from torch import distributed as dist

        begun = time.monotonic()
        with suppress(dist.DistStoreError):
            now.wait(min(_SAY_AFTER, timeout / 2))
            return ""
        missing = self._missing(now, meeting)
        logger.warning("saving %s waits for %s", meeting.directory, missing)
        with suppress(dist.DistStoreError):
            now.wait(max(begun + timeout - time.monotonic(), _POLL))
            return ""
        return self._missing(now, meeting)

    def _missing(self, now: _Round, meeting: Meeting) -> str:
        """Say which ranks have not come, and what to do if they never will."""
        lost = sorted({*range(self._world_size)} - now.ranks("arrived"))
        named = f"{_listed(lost)} of {self._world_size}"
        if meeting.phase == "committed":
            return named
        return (
            f"{named}; every rank must save {meeting.directory} by this path, or one "
            f"process for all of them with {_ALONE}"
        )

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
        self._last = now
        self._note(now.store, now.key)
        return now

    def _begun_before(self, store: Store, key: str) -> int:
        """Return the round that this rank's dead predecessor had chosen."""
        current = number = _current(store, key)
        while number and (begun := _Round(store, key, number).ranks("begun")):
            if self._rank in begun:
                return number
            number -= 1
        return current

    def _note(self, store: Store, key: str) -> None:
        """Note that rank 0 has to remove the keys of a meeting later."""
        if self._rank:
            return
        self._past.pop(key, None)
        self._past[key] = None
        while len(self._past) > _KEPT:
            _remove(store, next(iter(self._past)))
            del self._past[next(iter(self._past))]

    def _forget(self, store: Store, meeting: Meeting, number: int) -> None:
        """Remove the keys of earlier meetings, which all ranks have left."""
        # Another rank may have come to the second meeting of this save already.
        written, committed = (self._key(meeting, phase) for phase in _PHASES)
        for key in [*self._past]:
            if key not in (written, committed):
                _remove(store, key)
                del self._past[key]
        _remove_rounds(store, written, number - 1)
        _remove_rounds(store, committed, self._begun.get(committed, 1) - 1)

    def _key(self, meeting: Meeting, phase: Phase | None = None) -> str:
        return f"{self._prefix}/{replace(meeting, phase=phase or meeting.phase).key}"

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
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{more}"


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

    def delete(self) -> bool:
        """Remove the keys; return whether there was one."""
        names = ("begun", "arrived", "decision", "read")
        return bool(sum(self.store.delete_key(self._name(name)) for name in names))


def _current(store: Store, key: str) -> int:
    """Return the number of a meeting's current round; the first one is 1."""
    return int(_text(store.compare_set(f"{key}/round", "", "1")))


def _advance_to(store: Store, key: str, number: int) -> None:
    """Make ``number`` the current round, unless a later one is."""
    now = _text(store.get(f"{key}/round"))
    while int(now) < number:
        now = _text(store.compare_set(f"{key}/round", now, str(number)))


def _remove(store: Store, key: str) -> None:
    """Remove a meeting from the store."""
    if store.check([f"{key}/round"]):
        _remove_rounds(store, key, _current(store, key))
        store.delete_key(f"{key}/round")


def _remove_rounds(store: Store, key: str, last: int) -> None:
    """Remove the rounds of a meeting up to ``last``; none before a missing one."""
    while last > 0 and _Round(store, key, last).delete():
        last -= 1


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
