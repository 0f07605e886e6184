"""The tracker: the source's list of those that receive one snapshot, and serve it on.

A member announces itself at the source, and repeats that before its lease ends. The
answer names other members. The tracker connects to nobody, and it waits for nothing:
an answer at each change of the membership would cost the square of their number.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from aiockpt.errors import RemoteProtocolError
from aiockpt.http.problems import PeerBusy
from aiockpt.http.protocol import MEMBER_PATH, url_fault
from aiockpt.http.rarest import next_chunk
from aiockpt.http.security import (
    Scope,
    endpoint,
    network_of,
    plain_address,
    scope_of,
    voter_of,
)
from aiockpt.http.status import ShownMember
from aiockpt.http.tuning import SlowAfter, Usual
from aiockpt.runtime.deadlines import Deadlines
from aiockpt.swarm.messages import (
    MAX_URL_CHARACTERS,
    Announcement,
    AnnounceResponse,
    MemberInfo,
)
from aiockpt.swarm.policy import HEARTBEATS_PER_LEASE, Candidate, heartbeat, neighbours

_SAMPLED_MEMBERS: Final = 64  # members of which the tracker names some
_MAX_MEMBERS: Final = 16_384
_MAX_MEMBERS_OF_HOST: Final = 64  # a host has a few receivers
_HOST_BUCKETS: Final = 1 << 14  # members of all hosts in a bucket are counted together
_COMPLAINTS_TO_HIDE: Final = 2  # hosts whose complaints hide a member
_MAX_COMPLAINTS: Final = 64  # of one host, and about one server
_MAX_ACCUSED: Final = 512  # members that were complained about
_MAX_DIGITS: Final = 8  # of a member's number
_RETRY_AFTER_S: Final = 2.0
_MIN_LAPSE_S: Final = 0.1  # a promise may lapse after so long, if others were kept
_PROMISE_LAPSES: Final = SlowAfter(times=3.0, unknown_s=5.0)
_NOTHING: Final = -1
_NOBODY: Final = "-"  # sees a member, or is where a member is


class _Member(msgspec.Struct, array_like=True):
    """A member. The tracker keeps it packed, because there may be thousands.

    It is named to all members, or only to those that are ``at`` its ``within``.
    ``promised`` is the chunk that it should request next, since the period ``turn``.
    """

    number: int
    url: str
    zone: str
    have: int
    named: int
    at: str = ""
    within: str = ""
    promised: int = _NOTHING
    turn: int = 0

    def is_for(self, other: _Member) -> bool:
        """Return whether another member may be told of this one."""
        return not self.within or self.within == other.at != _NOBODY


class Tracker:
    """The members of one snapshot's swarm, and what the source has given them.

    Args:
        chunks: How many chunks the snapshot has.
    """

    def __init__(self, chunks: int) -> None:
        self.promises = Promises(chunks)
        self._chunks = chunks
        self._members: dict[int, bytes] = {}  # by lease; those that came first, first
        self._ends = Deadlines[int]()  # of the leases
        self._leases: list[int] = []  # of them, and of some that have left since
        # Another start of the source numbers its members anew, and they meet these.
        self._suffix = f"-{secrets.token_hex(3)}"
        self._complaints = _Complaints()
        self._crowds = bytearray(_HOST_BUCKETS)  # members, by the hash of their host
        self._numbers = 0
        self._chance = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._tokens = _Tokens()

    def __len__(self) -> int:
        """Return how many members there are."""
        self._forget_expired()
        return len(self._members)

    def has(self, lease: str) -> bool:
        """Return whether the receive with this lease is a member."""
        return int(lease, 16) in self._members

    def announce(
        self,
        lease: str,
        said: Announcement,
        *,
        address: str,
        trusts_url: bool,
        link: str = "",
        grant: str = "",
    ) -> AnnounceResponse:
        """Add or renew a member; return what to answer.

        Args:
            lease: The id of the receive's lease.
            said: What the member says.
            address: The host from which the announcement came.
            trusts_url: Whether the source lists the host in the URL, so that others may
                connect to it. If not, they connect to ``address``.
            link: The address at which the announcement came in. Members with link-local
                addresses that share it are on one link.
            grant: The name of the receiver, if it has a token of its own.

        Raises:
            RemoteProtocolError: the URL names no server.
            PeerBusy: there are too many members, of this host or at all.
        """
        url, at, within = _placed(said, address, link, trusts_url=trusts_url)
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
        member.url, member.zone, member.at, member.within = url, said.zone, at, within
        member.have = min(said.have, self._chunks)
        is_complete = member.have == self._chunks
        seconds = HEARTBEATS_PER_LEASE * heartbeat(len(self._members))
        self._ends.set(key, now + seconds)
        if key not in self._members:
            self._leases.append(key)
        self._members[key] = _pack(member)
        bad = [number for each in said.bad if (number := self._number(each))]
        self._complaints.add(_Voter(*voter_of(address), grant, address), bad)
        return AnnounceResponse(
            id=self._id(member),
            lease=seconds,
            members=() if is_complete else self._name(member, said.known),
            next=None if is_complete else self.promise(lease),
            seen=address if within == _NOBODY else None,
        )

    def tokens(self, lapses: float, *, now: float) -> tuple[int, ...]:
        """Return the valid generations of the swarm's token, to tell them a receiver.

        Members send the first one, and accept all of them.

        Args:
            lapses: When the grant of the one that is told ends; infinity without one.
            now: The time, in seconds since 1970 as ``lapses`` is.
        """
        lease = HEARTBEATS_PER_LEASE * heartbeat(len(self._members))
        return self._tokens.told(lapses, now, _now(), lease)

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
        self.promises.request(taken)
        packed = self._members.get(int(lease, 16))
        if packed is None:
            return None
        member = _unpack(packed)
        chunk = self.promises.renew(member, taken)
        self._members[int(lease, 16)] = _pack(member)
        return chunk

    def statistics(self, most: int = _MAX_MEMBERS) -> list[ShownMember]:
        """Return the first ``most`` members, in the order in which they came."""
        self._forget_expired()
        members = map(_unpack, self._members.values())
        return [
            ShownMember(
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
        leases = (
            [*self._members] if len(self._members) <= _SAMPLED_MEMBERS else self._some()
        )
        others = dict[int, _Member]()
        for lease in leases:
            each = _unpack(self._members[lease])
            is_new = each.number not in numbers and each.is_for(asker)
            if is_new and self._complaints.votes(each) < _COMPLAINTS_TO_HIDE:
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
        """Return the leases of a random sample of members."""
        count = min(2 * _SAMPLED_MEMBERS, len(self._leases))
        drawn = self._chance.sample(self._leases, count)
        found = (lease for lease in dict.fromkeys(drawn) if lease in self._members)
        return [*islice(found, _SAMPLED_MEMBERS)]

    def _admit(self, url: str) -> None:
        """Count another member at the host of this URL.

        A host may share its count with another one. Then a few of its receivers may
        have to do without the swarm, but no join has to look at all members for it.
        """
        bucket = _bucket(url)
        is_full = self._crowds[bucket] >= _MAX_MEMBERS_OF_HOST
        if is_full or len(self._members) >= _MAX_MEMBERS:
            raise PeerBusy(retry_after=_RETRY_AFTER_S)
        self._crowds[bucket] += 1

    def _forget(self, lease: int) -> None:
        """Remove a member, and take back its promise; complaints about it stay."""
        packed = self._members.pop(lease, None)
        if packed is None:
            return
        self._ends.forget(lease)
        if len(self._leases) > 2 * len(self._members) + _SAMPLED_MEMBERS:
            self._leases = [*self._members]
        member = _unpack(packed)
        self.promises.take_back(member)
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
        number = int(digits) if is_ours and len(digits) <= _MAX_DIGITS else 0
        return number if number <= self._numbers else 0


class Promises:
    """Which chunk each member should request from the source next.

    Each chunk that the source has not given yet is promised to one member. The member
    keeps the promise until it requests a chunk, or until the promise lapses.

    Args:
        chunks: How many chunks the snapshot has.
    """

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self._new = self._unpromised = (1 << chunks) - 1
        # Chunks promised or requested in this period, and in the one before it.
        self._recent = self._older = 0
        self._turns, self._turned = 0, _now()
        self._sample: tuple[int, float] | None = None  # a chunk, and its promise
        self._usual = Usual()  # seconds from a promise until the chunk is given
        self._chance = random.Random()  # noqa: S311 - spreads load, guards nothing

    @property
    def given(self) -> int:
        """How many chunks the source has given at least once."""
        return self._chunks - self._new.bit_count()

    def request(self, taken: range) -> None:
        """Note which chunks a receiver requests now."""
        self._turn_over()
        if len(taken) == 1:  # more are a long run, which the members will share
            bit = 1 << taken.start
            self._unpromised &= ~bit
            self._older &= ~bit
            self._recent |= bit

    def renew(self, member: _Member, taken: range) -> int | None:
        """Promise a chunk to a member; return it, or None if there is none.

        A member that requests nothing now keeps the chunk that it was promised.
        """
        if not taken and self._holds(member):
            return member.promised
        if member.promised not in taken:
            self.take_back(member)  # perhaps it has that chunk
        chosen = next_chunk(self._new & self._unpromised, (), self._chance)
        if chosen is not None:
            self._unpromised &= ~(1 << chosen)
            self._recent |= 1 << chosen
            self._sample = self._sample or (chosen, _now())
        member.promised = _NOTHING if chosen is None else chosen
        member.turn = self._turns
        return chosen

    def take_back(self, member: _Member) -> None:
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
            self._usual.learn(1, _now() - self._sample[1])
            self._sample = None

    def reset(self) -> None:
        """Give all chunks again, because the receivers that got them are gone."""
        self._new = self._unpromised = (1 << self._chunks) - 1
        self._recent = self._older = 0
        self._sample = None

    def _turn_over(self) -> None:
        """Let promises lapse that were not kept in a whole period."""
        now = _now()
        usual = self._usual.seconds()
        least = 0.0 if usual is None else _MIN_LAPSE_S
        if now - self._turned <= max(_PROMISE_LAPSES.seconds(usual), least):
            return
        self._unpromised |= self._older & self._new
        if self._sample is not None:
            chunk, since = self._sample
            self._usual.learn(1, max(now - since, usual or 0.0))
            if self._older >> chunk & 1:
                self._sample = None
        self._recent, self._older = 0, self._recent
        self._turns, self._turned = self._turns + 1, now

    def _holds(self, member: _Member) -> bool:
        """Return whether what a member was promised is still its own."""
        if member.promised == _NOTHING or self._turns - member.turn > 1:
            return False
        return bool(self._new & ~self._unpromised & 1 << member.promised)


class _Tokens:
    """The tokens that members accept of each other. A grant that lapses renews them.

    All members hear of a new token within a lease. In the first lease they accept it,
    and send the old one. In the second lease they send it, and accept the old one. Then
    whoever was not told of it can read nothing any more.
    """

    def __init__(self) -> None:
        self._newest = 0
        self._since: float | None = None  # the beginning of a change, in loop time
        self._lease = 0.0  # the longest one
        self._lapses = inf  # the first grant that ends, of those told of the newest

    def told(
        self, lapses: float, wall: float, now: float, lease: float
    ) -> tuple[int, ...]:
        """Return the valid generations; members send the first one."""
        self._lease = max(self._lease, lease)
        if self._since is not None and now - self._since > 2 * self._lease:
            self._since = None
        if self._since is None and self._lapses < wall:
            self._newest, self._since, self._lapses = self._newest + 1, now, inf
        self._lapses = min(self._lapses, lapses)
        if self._since is None:
            return (self._newest,)
        both = (self._newest - 1, self._newest)
        return both if now - self._since <= self._lease else both[::-1]


class _Voter(NamedTuple):
    """A host that complains, as `voter_of` names it, and the name of its grant.

    The address tells receivers of this host apart; it does not make two hosts of one.
    """

    kind: str
    host: str
    grant: str
    address: str

    @property
    def counted_as(self) -> tuple[tuple[str, str], ...]:
        """What its complaints are counted by."""
        grants = (("grant", self.grant),) if self.grant else ()
        return self[:2], *grants


class _Complaints:
    """Which hosts complained about which member's server.

    A complaint names a member by its number. It is filed by its server when the member
    is looked at, or leaves, so that it counts if the server comes back. An index of all
    numbers would take too much memory.
    """

    def __init__(self) -> None:
        self._new: dict[int, set[_Voter]] = {}
        self._filed: dict[tuple[str, int], set[_Voter]] = {}
        self._made = Counter[tuple[str, str]]()  # those above, by host and by grant

    def add(self, voter: _Voter, numbers: Sequence[int]) -> None:
        """Note the complaints of a host; it counts once, with all its members."""
        made = max(self._made[each] for each in voter.counted_as)
        for number in numbers[: max(_MAX_COMPLAINTS - made, 0)]:
            voters = self._new.setdefault(number, set())
            if len(voters) < _MAX_COMPLAINTS and not _has_voted(voter, voters):
                voters.add(voter)
                self._count({voter}, 1)
            if len(self._new) > _MAX_ACCUSED:  # some are about members that left
                self._count(self._new.pop(next(iter(self._new))), -1)

    def about(self, member: _Member) -> set[_Voter]:
        """Return the voters at other addresses that complained about a member."""
        if not (self._new or self._filed):
            return set()
        server = endpoint(member.url)
        found, new = self._filed.get(server, set()), self._new.pop(member.number, set())
        self._count(new, -1)
        new = {
            each
            for each in new
            if each.address != server[0] and not _has_voted(each, found)
        }
        if new and len(found) < _MAX_COMPLAINTS:
            found = self._filed[server] = found | new
            self._count(new, 1)
            if len(self._filed) > _MAX_ACCUSED:
                self._count(self._filed.pop(next(iter(self._filed))), -1)
        return found

    def _count(self, voters: Iterable[_Voter], more: int) -> None:
        for key in (key for each in voters for key in each.counted_as):
            self._made[key] += more
            if not self._made[key]:
                del self._made[key]

    def votes(self, member: _Member) -> int:
        """Return how many other hosts certainly complained about a member.

        A host may have complained once from an address of each kind.
        """
        if not (voters := self.about(member)):
            return 0
        own = voter_of(endpoint(member.url)[0])
        kinds = Counter(each.kind for each in voters if each[:2] != own)
        return max(kinds.values(), default=0)


def _has_voted(voter: _Voter, voters: set[_Voter]) -> bool:
    """Return whether the voter's host, or its grant, has complained already."""
    return any(
        voter[:2] == each[:2] or (voter.grant and voter.grant == each.grant)
        for each in voters
    )


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Member).decode


def _seen(member: _Member) -> Candidate:
    return Candidate(member.zone, member.have, member.named)


def _bucket(url: str) -> int:
    return hash(network_of(endpoint(url)[0])) % _HOST_BUCKETS


def _placed(
    said: Announcement, address: str, link: str, *, trusts_url: bool
) -> tuple[str, str, str]:
    """Return a member's URL, its location, and the location of members that see it.

    The place is "" if it does not matter. The member chooses no more of the URL than
    its scheme and its port, and the host if the source lists that.

    Raises:
        RemoteProtocolError: the URL names no server, or gets too long.
    """
    if fault := url_fault(said.url):
        raise RemoteProtocolError(f"the URL of the member is bad: {fault}")
    parts = urlsplit(said.url)
    places = {
        Scope.EVERYWHERE: "",
        Scope.HOST: f"host {said.host}",  # others may come through a tunnel
        Scope.LINK: f"link {link}",
        Scope.NOWHERE: _NOBODY,
    }
    own, said_scope = scope_of(address), scope_of(parts.hostname or "")
    # Through a proxy or a NAT, all members have one address, at which none of them is.
    is_direct = not said.local or plain_address(said.local) == address
    at = places[own] if is_direct else _NOBODY
    if trusts_url and said_scope in (Scope.EVERYWHERE, own):
        host = parts.hostname or ""
        within = "" if said_scope is Scope.EVERYWHERE else at
    else:
        host, within = address, at
    name = f"[{host}]" if ":" in host else host
    place = name if parts.port is None else f"{name}:{parts.port}"
    url = f"{parts.scheme}://{place}{MEMBER_PATH}"
    if len(url) > MAX_URL_CHARACTERS:
        raise RemoteProtocolError(
            f"the URL of the member is bad: it has {len(url)} characters"
        )
    return url, at, within


def _now() -> float:
    return asyncio.get_running_loop().time()
