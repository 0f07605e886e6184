"""The tracker: the source's list of those that receive one snapshot, and serve it on.

A member announces itself at the source, and repeats that before its lease ends. The
answer names other members. The tracker connects to nobody, and it waits for nothing:
an answer at each change of the membership would cost the square of their number.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from aiockpt.errors import RemoteProtocolError
from aiockpt.http.problems import PeerBusy
from aiockpt.http.protocol import Announcement, AnnounceResponse, MemberInfo, url_fault
from aiockpt.http.security import endpoint
from aiockpt.http.swarm import (
    LEASE,
    Member,
    average,
    heartbeat,
    neighbours,
    next_chunk,
    patience,
)

__all__ = ["MemberStatistics", "Tracker"]

_SAMPLE: Final = 64  # members of which some are named
_MOST: Final = 16_384  # members
_MOST_OF_HOST: Final = 64  # members; a host has a few receivers
_BUCKETS: Final = 1 << 14  # of hosts, whose members are counted together
_COMPLAINTS: Final = 2  # hosts that complained, after which a member is not named
_MOST_COMPLAINTS: Final = 64  # of one host, and about one server
_MOST_ACCUSED: Final = 1024
_RETRY_AFTER: Final = 2.0
_SOONEST: Final = 0.1  # seconds after which a promise may lapse
_AT_FIRST: Final = 5.0  # seconds; the same before any promise was kept
_NOTHING: Final = -1


class _Member(msgspec.Struct, array_like=True):
    """A member; the tracker keeps it packed, since there may be thousands.

    ``promised`` is the chunk that it should request next, since the period ``turn``.
    """

    number: int
    url: str
    zone: str
    have: int
    named: int
    until: float
    promised: int = _NOTHING
    turn: int = 0


class MemberStatistics(NamedTuple):
    """A member as the status page shows it; ``complaints`` counts hosts."""

    id: str
    url: str
    zone: str
    have: int
    complaints: int


class Tracker:
    """The members of one snapshot's swarm, and what the source has given them.

    Args:
        chunks: How many chunks the snapshot has.
    """

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        # By lease. Those that announced themselves last come last, so those that expire
        # first come first.
        self._members: dict[int, bytes] = {}
        # The hosts that complained, by the number of a member until `_complaints_about`
        # files them by its server: an index of all numbers would take too much memory.
        self._accused: dict[int | tuple[str, int], set[str]] = {}
        self._crowds = bytearray(_BUCKETS)  # members, by the hash of their host
        self._numbers = 0
        self._new = self._unpromised = (1 << chunks) - 1
        # Chunks promised or requested in this period, and in the one before it.
        self._recent = self._older = 0
        self._turns, self._turned = 0, _now()
        self._sample: tuple[int, float] | None = None  # a chunk, and its promise
        self._usual = 0.0  # seconds from a promise until the chunk is given
        self._chance = random.Random()  # noqa: S311 - spreads load, guards nothing

    def __repr__(self) -> str:
        return f"<Tracker members={len(self._members)}>"

    def __len__(self) -> int:
        """Return how many members there are."""
        self._forget_expired()
        return len(self._members)

    def has(self, lease: str) -> bool:
        """Return whether the receive with this lease is a member."""
        return int(lease, 16) in self._members

    def announce(
        self, lease: str, said: Announcement, *, address: str, trusts_url: bool
    ) -> AnnounceResponse:
        """Add or renew a member; return what to answer.

        Args:
            lease: The id of the receive's lease.
            said: What the member says.
            address: The host from which the announcement came.
            trusts_url: Whether others connect to the host in the URL. If not, they
                connect to ``address``.

        Raises:
            RemoteProtocolError: the URL names no server.
            PeerBusy: there are too many members, of this host or at all.
        """
        url = _reachable(said.url, None if trusts_url else address)
        now, key = _now(), int(lease, 16)
        self._forget_expired()
        packed = self._members.get(key)
        member = None if packed is None else _unpack(packed)
        if member is not None and endpoint(member.url) != endpoint(url):
            self.leave(lease)  # another server is another member
            member = None
        if member is None:
            self._admit(url)
            self._numbers += 1
            member = _Member(self._numbers, url, said.zone, 0, 0, 0.0)
        member.url, member.zone = url, said.zone
        member.have = min(said.have, self._chunks)
        is_complete = member.have == self._chunks
        self._members.pop(key, None)  # it comes last now
        seconds = LEASE * heartbeat(len(self._members))
        member.until = now + seconds
        self._members[key] = _pack(member)
        self._accuse(address, said.bad)
        return AnnounceResponse(
            id=_id(member),
            lease=seconds,
            members=() if is_complete else self._name(member, said.known),
            next=None if is_complete else self.promise(lease),
        )

    def leave(self, lease: str) -> None:
        """Forget a member."""
        packed = self._members.pop(int(lease, 16), None)
        if packed is not None:
            self._forget(_unpack(packed))

    def promise(self, lease: str, taken: range = range(0)) -> int | None:
        """Return the chunk that a member should request next; None if there is none.

        Nobody has been given that chunk, and nobody else is promised it. The member
        keeps the promise until it requests a chunk, or for some time.

        Args:
            lease: The id of the receive's lease.
            taken: The chunks that it requests now.
        """
        self._turn_over()
        if len(taken) == 1:  # more are a long run, which the members will share
            bit = 1 << taken.start
            self._unpromised &= ~bit
            self._older &= ~bit
            self._recent |= bit
        packed = self._members.get(int(lease, 16))
        if packed is None:
            return None
        member = _unpack(packed)
        if not taken and self._holds(member):
            return member.promised
        if member.promised not in taken:
            self._take_back(member)  # perhaps it has that chunk
        chosen = next_chunk(self._new & self._unpromised, (), self._chance)
        if chosen is not None:
            self._unpromised &= ~(1 << chosen)
            self._recent |= 1 << chosen
            self._sample = self._sample or (chosen, _now())
        member.promised = _NOTHING if chosen is None else chosen
        member.turn = self._turns
        self._members[int(lease, 16)] = _pack(member)
        return chosen

    def _turn_over(self) -> None:
        """Let promises lapse that were not kept in a whole period."""
        now = _now()
        period = max(patience(self._usual), _SOONEST) if self._usual else _AT_FIRST
        if now - self._turned <= period:
            return
        self._unpromised |= self._older & self._new
        if self._sample is not None:
            chunk, since = self._sample
            self._usual = average(self._usual, max(now - since, self._usual))
            if self._older >> chunk & 1:
                self._sample = None
        self._recent, self._older = 0, self._recent
        self._turns, self._turned = self._turns + 1, now

    def _holds(self, member: _Member) -> bool:
        """Return whether what a member was promised is still its own."""
        if member.promised == _NOTHING or self._turns - member.turn > 1:
            return False
        return bool(self._new & ~self._unpromised & 1 << member.promised)

    def _take_back(self, member: _Member) -> None:
        """Let the chunk that a member was promised be promised again."""
        if not self._holds(member):
            return
        bit = 1 << member.promised
        self._recent &= ~bit
        self._older &= ~bit
        self._unpromised |= bit
        if self._sample is not None and self._sample[0] == member.promised:
            self._sample = None

    def give(self, chunks: range) -> None:
        """Note that a receiver has got these chunks from the source."""
        self._new &= ~(((1 << len(chunks)) - 1) << chunks.start)
        if self._sample is not None and self._sample[0] in chunks:
            self._usual = average(self._usual, _now() - self._sample[1])
            self._sample = None

    def renew(self) -> None:
        """Give all chunks anew, because those that got them are gone."""
        self._new = self._unpromised = (1 << self._chunks) - 1
        self._recent = self._older = 0
        self._sample = None

    @property
    def given(self) -> int:
        """How many chunks the source has given at least once."""
        return self._chunks - self._new.bit_count()

    def statistics(self, most: int = _MOST) -> list[MemberStatistics]:
        """Return the first ``most`` members, in the order in which they came."""
        self._forget_expired()
        members = map(_unpack, self._members.values())
        return [
            MemberStatistics(
                _id(each),
                each.url,
                each.zone,
                each.have,
                len(self._complaints_about(each)),
            )
            for each in heapq.nsmallest(most, members, key=lambda one: one.number)
        ]

    def _name(self, asker: _Member, known: Sequence[str]) -> tuple[MemberInfo, ...]:
        numbers = {_number(each) for each in known} | {asker.number}
        leases = [*self._members]
        if len(leases) > _SAMPLE:
            leases = self._chance.sample(leases, _SAMPLE)
        others = dict[int, _Member]()
        for lease in leases:
            each = _unpack(self._members[lease])
            is_bad = len(self._complaints_about(each)) >= _COMPLAINTS
            if each.number not in numbers and not is_bad:
                others[lease] = each
        leases = [*others]
        seen = [*map(_seen, others.values())]
        found = []
        for at in neighbours(_seen(asker), seen, known=len(known), chance=self._chance):
            each = others[leases[at]]
            each.named += 1
            self._members[leases[at]] = _pack(each)
            found.append(MemberInfo(_id(each), each.url, each.zone, each.have))
        return tuple(found)

    def _accuse(self, address: str, ids: Sequence[str]) -> None:
        """Note complaints; a host counts once, however many members it has."""
        made = sum(address in hosts for hosts in self._accused.values()) if ids else 0
        for number in map(_number, ids[: max(_MOST_COMPLAINTS - made, 0)]):
            if number is None or not 0 < number <= self._numbers:
                continue
            hosts = self._accused.setdefault(number, set())
            if len(hosts) < _MOST_COMPLAINTS:
                hosts.add(address)
            if len(self._accused) > _MOST_ACCUSED:  # some are about members that left
                del self._accused[next(iter(self._accused))]

    def _complaints_about(self, member: _Member) -> set[str]:
        """File what is new about a member; return the other hosts that complained.

        Complaints are about its server, so they count if it comes back.
        """
        if not self._accused:
            return set()
        server = endpoint(member.url)  # not the path, which a member may choose freely
        found = self._accused.get(server, set())
        new = self._accused.pop(member.number, set()) - {server[0]}
        if new and len(found) < _MOST_COMPLAINTS:
            found = self._accused[server] = found | new
        return found

    def _admit(self, url: str) -> None:
        """Count another member at the host of this URL, or raise if there is no room.

        A host may share its count with another one. Then a few of its receivers may
        have to do without the swarm, but a join costs the same in swarms of any size.
        """
        bucket = _bucket(url)
        is_full = self._crowds[bucket] >= _MOST_OF_HOST
        if is_full or len(self._members) >= _MOST:
            raise PeerBusy(retry_after=_RETRY_AFTER)
        self._crowds[bucket] += 1

    def _forget(self, member: _Member) -> None:
        """Undo what a member that leaves has taken; complaints outlive it."""
        self._take_back(member)
        self._complaints_about(member)
        self._crowds[_bucket(member.url)] -= 1

    def _forget_expired(self) -> None:
        now = _now()
        while self._members:
            lease, packed = next(iter(self._members.items()))
            member = _unpack(packed)
            if member.until > now:
                break
            del self._members[lease]
            self._forget(member)


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Member).decode


def _seen(member: _Member) -> Member:
    return Member(member.zone, member.have, member.named)


def _id(member: _Member) -> str:
    return f"m{member.number}"


def _number(name: str) -> int | None:
    digits = name.removeprefix("m")
    return int(digits) if digits.isdecimal() else None


def _bucket(url: str) -> int:
    return hash(endpoint(url)[0]) % _BUCKETS


def _reachable(url: str, host: str | None) -> str:
    """Return a member's URL with a slash at its end, and with this host.

    Raises:
        RemoteProtocolError: it names no server.
    """
    if fault := url_fault(url):
        raise RemoteProtocolError(f"the URL of the member is bad: {fault}")
    parts = urlsplit(url)
    place = parts.netloc
    if host is not None:
        name = f"[{host}]" if ":" in host else host
        place = name if parts.port is None else f"{name}:{parts.port}"
    return f"{parts.scheme}://{place}{parts.path.rstrip('/')}/"


def _now() -> float:
    return asyncio.get_running_loop().time()
