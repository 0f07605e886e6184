"""The tracker: the source's list of those that receive one snapshot, and serve it on.

A member announces itself at the source, and repeats that before its lease ends. The
answer names other members. The tracker connects to nobody, and it waits for nothing:
an answer at each change of the membership would cost the square of their number.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from aiockpt.errors import RemoteProtocolError
from aiockpt.http.problems import PeerBusy
from aiockpt.http.protocol import (
    LONGEST_URL,
    Announcement,
    AnnounceResponse,
    MemberInfo,
    url_fault,
)
from aiockpt.http.security import endpoint, network_of
from aiockpt.http.swarm import (
    LEASE,
    Member,
    average,
    heartbeat,
    neighbours,
    next_chunk,
    patience,
)
from aiockpt.runtime.deadlines import Deadlines

__all__ = ["MemberStatistics", "Tracker"]

_SAMPLE: Final = 64  # members of which some are named
_MOST: Final = 16_384  # members
_MOST_OF_HOST: Final = 64  # members; a host has a few receivers
_BUCKETS: Final = 1 << 14  # of hosts, whose members are counted together
_ENOUGH: Final = 2  # hosts that complained, after which a member is not named
_MOST_COMPLAINTS: Final = 64  # of one host, and about one server
_MOST_ACCUSED: Final = 512
_DIGITS: Final = 8  # of a member's number, at most
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
    promised: int = _NOTHING
    turn: int = 0


class MemberStatistics(NamedTuple):
    """A member as the status page shows it.

    Attributes:
        id: The beginning of what members know it by.
        complaints: How many hosts complained.
    """

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
        self._members: dict[int, bytes] = {}  # by lease; those that came first, first
        self._ends = Deadlines[int]()  # of the leases
        self._leases: list[int] = []  # of them, and of some that have left since
        # Another start of the source numbers its members anew, and they meet these.
        self._suffix = f"-{secrets.token_hex(3)}"
        self._complaints = _Complaints()
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
            member = _Member(self._numbers, url, said.zone, 0, 0)
        member.url, member.zone = url, said.zone
        member.have = min(said.have, self._chunks)
        is_complete = member.have == self._chunks
        seconds = LEASE * heartbeat(len(self._members))
        self._ends.set(key, now + seconds)
        if key not in self._members:
            self._leases.append(key)
        self._members[key] = _pack(member)
        bad = [number for each in said.bad if (number := self._number(each))]
        self._complaints.add(address, bad)
        return AnnounceResponse(
            id=self._id(member),
            lease=seconds,
            members=() if is_complete else self._name(member, said.known),
            next=None if is_complete else self.promise(lease),
        )

    def leave(self, lease: str) -> None:
        """Forget a member."""
        self._forget(int(lease, 16))

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
                f"m{each.number}",
                each.url,
                each.zone,
                each.have,
                len(self._complaints.about(each)),
            )
            for each in islice(members, most)
        ]

    def _name(self, asker: _Member, known: Sequence[str]) -> tuple[MemberInfo, ...]:
        numbers = {self._number(each) for each in known} | {asker.number}
        leases = [*self._members] if len(self._members) <= _SAMPLE else self._some()
        others = dict[int, _Member]()
        for lease in leases:
            each = _unpack(self._members[lease])
            is_bad = len(self._complaints.about(each)) >= _ENOUGH
            if each.number not in numbers and not is_bad:
                others[lease] = each
        leases = [*others]  # those that may be named
        seen = [*map(_seen, others.values())]
        found = []
        for at in neighbours(_seen(asker), seen, known=len(known), chance=self._chance):
            each = others[leases[at]]
            each.named += 1
            self._members[leases[at]] = _pack(each)
            found.append(MemberInfo(self._id(each), each.url, each.zone, each.have))
        return tuple(found)

    def _some(self) -> list[int]:
        """Return the leases of some members; about as many as a sample."""
        count = min(2 * _SAMPLE, len(self._leases))
        drawn = self._chance.sample(self._leases, count)
        found = (lease for lease in dict.fromkeys(drawn) if lease in self._members)
        return [*islice(found, _SAMPLE)]

    def _admit(self, url: str) -> None:
        """Count another member at the host of this URL, or raise if there is no room.

        A host may share its count with another one. Then a few of its receivers may
        have to do without the swarm, but no join has to look at all members for it.
        """
        bucket = _bucket(url)
        is_full = self._crowds[bucket] >= _MOST_OF_HOST
        if is_full or len(self._members) >= _MOST:
            raise PeerBusy(retry_after=_RETRY_AFTER)
        self._crowds[bucket] += 1

    def _forget(self, lease: int) -> None:
        """Undo what a member that leaves has taken; complaints outlive it."""
        packed = self._members.pop(lease, None)
        if packed is None:
            return
        self._ends.forget(lease)
        if len(self._leases) > 2 * len(self._members) + _SAMPLE:
            self._leases = [*self._members]
        member = _unpack(packed)
        self._take_back(member)
        self._complaints.about(member)  # so that they are filed by its server
        self._crowds[_bucket(member.url)] -= 1

    def _forget_expired(self) -> None:
        for lease in self._ends.expired(_now()):
            self._forget(lease)

    def _id(self, member: _Member) -> str:
        return f"m{member.number}{self._suffix}"

    def _number(self, name: str) -> int:
        """Return the number of the member that an id names; 0 if it names none."""
        digits = name.removeprefix("m").removesuffix(self._suffix)
        is_ours = name.endswith(self._suffix) and digits.isdecimal()
        number = int(digits) if is_ours and len(digits) <= _DIGITS else 0
        return number if number <= self._numbers else 0


class _Complaints:
    """Which hosts complained about which member's server.

    A complaint names a member by its number. It is filed by its server when the member
    is looked at, or leaves, so that it counts if the server comes back. An index of all
    numbers would take too much memory.
    """

    def __init__(self) -> None:
        self._new: dict[int, set[str]] = {}
        self._filed: dict[tuple[str, int], set[str]] = {}

    def add(self, address: str, numbers: Sequence[int]) -> None:
        """Note the complaints of a host; it counts once, with all its members."""
        if not numbers:
            return
        all_hosts = (*self._new.values(), *self._filed.values())
        made = sum(address in hosts for hosts in all_hosts)
        for number in numbers[: max(_MOST_COMPLAINTS - made, 0)]:
            hosts = self._new.setdefault(number, set())
            if len(hosts) < _MOST_COMPLAINTS:
                hosts.add(address)
            if len(self._new) > _MOST_ACCUSED:  # some are about members that left
                del self._new[next(iter(self._new))]

    def about(self, member: _Member) -> set[str]:
        """Return the hosts, other than its own, that complained about a member."""
        if not (self._new or self._filed):
            return set()
        server = endpoint(member.url)  # not the path, which a member may choose freely
        found = self._filed.get(server, set())
        new = self._new.pop(member.number, set()) - {server[0]}
        if new and len(found) < _MOST_COMPLAINTS:
            found = self._filed[server] = found | new
            if len(self._filed) > _MOST_ACCUSED:
                del self._filed[next(iter(self._filed))]
        return found


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Member).decode


def _seen(member: _Member) -> Member:
    return Member(member.zone, member.have, member.named)


def _bucket(url: str) -> int:
    return hash(network_of(endpoint(url)[0])) % _BUCKETS


def _reachable(url: str, host: str | None) -> str:
    """Return a member's URL with a slash at its end, and with this host.

    Raises:
        RemoteProtocolError: it names no server, or gets too long by that.
    """
    if fault := url_fault(url):
        raise RemoteProtocolError(f"the URL of the member is bad: {fault}")
    parts = urlsplit(url)
    place = parts.netloc
    if host is not None:
        name = f"[{host}]" if ":" in host else host
        place = name if parts.port is None else f"{name}:{parts.port}"
    found = f"{parts.scheme}://{place}{parts.path.rstrip('/')}/"
    if len(found) > LONGEST_URL:
        detail = f"{len(found)} characters, with the host from which it came"
        raise RemoteProtocolError(f"the URL of the member is bad: it has {detail}")
    return found


def _now() -> float:
    return asyncio.get_running_loop().time()
