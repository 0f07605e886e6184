"""The tracker: who is a member, who is named, and what was given to nobody."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from math import inf
from typing import Any

import pytest

from aiockpt.errors import RemoteProtocolError
from aiockpt.http.problems import PeerBusy
from aiockpt.http.security import plain_address
from aiockpt.http.tuning import SlowAfter, Usual
from aiockpt.runtime import deadlines
from aiockpt.swarm import tracker as module
from aiockpt.swarm.messages import Announcement, AnnounceResponse
from aiockpt.swarm.tracker import Tracker
from tests.support.proofs import proves
from tests.support.servers import settle

pytestmark = [pytest.mark.asyncio, pytest.mark.torch_free]


def lease_of(number: int) -> str:
    """Return an id as long as real ones."""
    return f"{number + (1 << 124):032x}"


def announce(
    tracker: Tracker, number: int, *, trusts_url: bool = False, **said: Any
) -> AnnounceResponse:
    """Announce a member of a host of its own, unless it says otherwise."""
    address = said.pop("address", f"10.0.{number // 250}.{number % 250}")
    url = said.pop("url", f"http://host:{1000 + number}/checkpoint/")
    seen = {name: said.pop(name, "") for name in ("link", "grant")}
    return tracker.announce(
        lease_of(number),
        Announcement(url, **said),
        address=address,
        trusts_url=trusts_url,
        **seen,
    )


async def test_members_of_the_same_zone_are_named_first() -> None:
    """Those of other zones have their part, too."""
    tracker = Tracker(8)
    for number in range(60):
        announce(tracker, number, zone="rack" if number < 2 else "elsewhere")
    named = announce(tracker, 60, zone="rack").members
    assert sorted(each.zone for each in named) == [*["elsewhere"] * 10, *["rack"] * 2]


@pytest.mark.parametrize("gone", [0, 1199])
async def test_a_member_that_is_silent_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    """Its lease is over; those that joined a larger swarm have longer ones."""
    tracker, now = Tracker(8), asyncio.get_running_loop().time()
    for number in range(gone + 1):
        announce(tracker, number)
    for number in range(gone):
        tracker.leave(lease_of(number))
    monkeypatch.setattr(module, "_now", lambda: now)
    lease = announce(tracker, 2000).lease
    now += lease - 0.1
    assert len(tracker) == 2
    now += 1.2
    assert len(tracker) == (gone > 0)
    assert len(announce(tracker, 2001).members) == (gone > 0)


@proves("threat D14")
async def test_many_members_announce_themselves_less_often() -> None:
    """The tracker's work does not grow with the members."""
    tracker = Tracker(8)
    leases = [announce(tracker, number).lease for number in range(1000)]
    assert leases[0] == 6
    assert leases[-1] == pytest.approx(50, abs=1)


@proves("threat D15")
async def test_a_host_has_a_bounded_number_of_members() -> None:
    """A host may join any number of times, and can renew its members."""
    tracker = Tracker(8)
    for number in range(64):
        announce(tracker, number, address="10.9.9.9")
    with pytest.raises(PeerBusy):
        announce(tracker, 64, address="10.9.9.9")
    announce(tracker, 0, address="10.9.9.9")
    announce(tracker, 65)
    tracker.leave(lease_of(5))
    announce(tracker, 66, address="10.9.9.9")
    assert len(tracker) == 65


async def test_all_hosts_together_have_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Further members have to wait."""
    monkeypatch.setattr(module, "_MAX_MEMBERS", 3)
    tracker = Tracker(8)
    for number in range(3):
        announce(tracker, number)
    with pytest.raises(PeerBusy):
        announce(tracker, 3)


def is_named(tracker: Tracker, member: AnnounceResponse) -> bool:
    """Return whether another member is told of this one."""
    return member.id in [each.id for each in announce(tracker, 999).members]


@proves("threat T10")
async def test_two_hosts_have_to_complain() -> None:
    """One could lie; a host counts once, and a member under any id and any path."""
    tracker = Tracker(8)
    bad = announce(tracker, 1)
    announce(tracker, 1, bad=(bad.id,))
    announce(tracker, 5, bad=(bad.id,), address="10.0.0.1")
    for number in (2, 3):
        announce(tracker, number, bad=(bad.id,), address="10.0.0.2")
        assert is_named(tracker, bad)
    announce(tracker, 4, bad=(bad.id,))
    assert not is_named(tracker, bad)
    assert announce(tracker, 1, url="http://host:1001/other/").id == bad.id
    assert not is_named(tracker, bad)
    tracker.leave(lease_of(1))
    again = announce(tracker, 77, url="http://host:1001/third", address="10.0.0.1")
    assert again.id != bad.id
    assert not is_named(tracker, again)
    (found,) = [each for each in tracker.statistics() if each.complaints]
    assert again.id.startswith(f"{found.id}-")
    assert found.complaints == 2


async def test_complaints_of_an_earlier_start_accuse_nobody() -> None:
    """A tracker that starts again numbers its members anew."""
    before, now = Tracker(8), Tracker(8)
    bad, good = announce(before, 1), announce(now, 1)
    for number in (2, 3):
        announce(now, number, bad=(bad.id,), known=(bad.id,))
    assert is_named(now, good)
    assert not any(each.complaints for each in now.statistics())


async def test_complaints_count_although_the_port_changes_soon_after() -> None:
    """They are about the server that lied, not about the next one."""
    tracker = Tracker(8)
    bad = announce(tracker, 1)
    for number in (2, 3):
        announce(tracker, number, bad=(bad.id,))
    other = announce(tracker, 1, url="http://host:5/")
    assert is_named(tracker, other)
    again = announce(tracker, 1)
    assert not is_named(tracker, again)


@proves("threat T10")
@pytest.mark.parametrize("trusts_url", [False, True])
async def test_a_host_cannot_fill_the_list_of_complaints(trusts_url: bool) -> None:
    """Neither about itself, nor about others, so that no more are noted."""
    tracker = Tracker(8)
    bad = announce(tracker, 1)
    for number in range(600):
        said: dict[str, Any] = {"url": f"http://host{number}:{1000 + number}/"}
        said |= {"address": "10.9.9.9", "trusts_url": trusts_url}
        own = announce(tracker, 2, **said)
        announce(tracker, 2, **said, bad=(own.id, of(bad, 3000 + number)))
    for number in (3, 4):
        assert is_named(tracker, bad)
        announce(tracker, number, bad=(bad.id,))
    assert not is_named(tracker, bad)


def of(member: AnnounceResponse, number: int) -> str:
    """Return the id that the tracker of a member gives to one with this number."""
    return f"m{number}-{member.id.partition('-')[2]}"


async def test_complaints_about_members_that_left_are_forgotten() -> None:
    """Such complaints are dropped before complaints about others are refused."""
    tracker = Tracker(8)
    for number in range(9):
        gone = [
            announce(tracker, 100 + each, url=f"http://host:{each + 1}/").id
            for each in range(64)
        ]
        for each in range(64):
            tracker.leave(lease_of(100 + each))
        announce(tracker, number, bad=tuple(gone), address=f"10.1.1.{number}")
    bad = announce(tracker, 98)
    for number in (96, 97):
        assert is_named(tracker, bad)
        announce(tracker, number, bad=(bad.id,), address=f"10.2.2.{number}")
    assert not is_named(tracker, bad)


@proves("threat S8")
@pytest.mark.parametrize(
    ("member", "asker", "named"),
    [
        ("127.0.0.1", "127.0.0.1", True), ("127.0.0.2", "::1", True),
        ("::1", "127.0.0.1", True), ("127.0.0.1", "10.0.0.2", False),
        ("::1", "2001:db8::2", False), ("127.0.0.1", "169.254.1.2", False),
        ("169.254.1.1", "169.254.1.2", True), ("169.254.1.1", "10.0.0.2", False),
        ("169.254.1.1", "127.0.0.1", False), ("fe80::1", "fe80::2", False),
        ("0.0.0.0", "0.0.0.0", False), ("10.0.0.1", "127.0.0.1", True),
    ],
)  # fmt: skip
async def test_a_member_is_named_where_its_address_leads_to_it(
    member: str, asker: str, named: bool
) -> None:
    """A loopback address leads to the host of whoever asks."""
    tracker = Tracker(8)
    announce(tracker, 1, address=member)
    found = announce(tracker, 2, address=asker).members
    assert bool(found) is named


@proves("threat S8")
async def test_hosts_are_told_apart_that_come_through_a_tunnel() -> None:
    """Their announcements come from the loopback address of the tunnel's end."""
    tracker = Tracker(8)
    here: dict[str, Any] = {"address": "127.0.0.1", "local": "127.0.0.1"}
    announce(tracker, 1, **here, host="a")
    assert announce(tracker, 2, **here, host="a").members
    assert not announce(tracker, 3, **here, host="b").members
    assert not announce(tracker, 4, **here).members
    listed = {**here, "url": "http://127.0.0.1:5/", "trusts_url": True}
    assert announce(tracker, 5, **listed, host="c").seen is None
    assert len(announce(tracker, 6, **here, host="b").members) == 1  # the third


async def test_links_are_told_apart() -> None:
    """Two networks of the source may have the same link-local addresses."""
    tracker = Tracker(8)
    here: dict[str, Any] = {"address": "169.254.1.1", "link": "169.254.7.9"}
    there = {**here, "link": "169.254.8.9"}
    announce(tracker, 1, **here)
    assert announce(tracker, 2, **here).members
    assert not announce(tracker, 3, **there).members


@proves("threat S8")
@pytest.mark.parametrize(
    ("url", "address", "named"),
    [
        ("http://127.0.0.1:5/", "10.0.0.1", "http://10.0.0.1:5/checkpoint/"),
        ("http://localhost:5/", "10.0.0.1", "http://10.0.0.1:5/checkpoint/"),
        ("http://[::1]:5/", "10.0.0.1", "http://10.0.0.1:5/checkpoint/"),
        ("http://169.254.1.1:5/", "10.0.0.1", "http://10.0.0.1:5/checkpoint/"),
        ("http://169.254.169.254:5/", "10.0.0.1", "http://10.0.0.1:5/checkpoint/"),
        ("http://127.1:5/", "10.0.0.1", "http://10.0.0.1:5/checkpoint/"),
        ("http://2130706433:5/", "10.0.0.1", "http://10.0.0.1:5/checkpoint/"),
        ("http://10.0.0.9:5/x/y/", "10.0.0.1", "http://10.0.0.9:5/checkpoint/"),
        ("http://host.job.svc:5/#x", "10.0.0.1", "http://host.job.svc:5/checkpoint/"),
    ],
)
async def test_a_list_of_hosts_makes_nobody_ask_itself(
    url: str, address: str, named: str
) -> None:
    """The source lists the host of the URL, and too many others with it."""
    tracker = Tracker(8)
    announce(tracker, 1, url=url, address=address, trusts_url=True)
    assert [each.url for each in announce(tracker, 2).members] == [named]


@proves("threat T10", "threat T13")
@pytest.mark.parametrize(
    ("bad", "votes", "named"),
    [
        ("10.0.0.9", ["10.0.0.1", "10.0.0.2"], False),
        ("10.0.0.9", ["10.0.0.1", "::ffff:10.0.0.1"], True),
        ("10.0.0.9", ["10.0.0.1", "2001:db8::1"], True),
        ("10.0.0.9", ["10.0.0.1", "127.0.0.1", "2001:db8::1"], True),
        ("10.0.0.9", ["2001:db8::1", "2001:db8::2"], True),
        ("10.0.0.9", ["2001:db8::1", "2001:db8:0:1::1"], False),
        ("10.0.0.9", ["10.0.0.1", "2001:db8::1", "10.0.0.2"], False),
        ("127.0.1.9", ["127.0.0.1", "127.0.0.2", "::1"], True),
        ("127.0.1.9", ["10.0.0.1", "10.0.0.2"], False),
        ("2001:db8::9", ["2001:db8::1", "2001:db8::2"], True),
        ("10.0.0.9", ["fe80::1", "2001:db8::1"], True),
        ("10.0.0.9", ["fe80::1", "fe80::2", "2001:db8::1"], True),
        ("10.0.0.9", ["fd00::1", "2600::1"], True),
        ("10.0.0.9", ["169.254.1.1", "169.254.1.2"], True),
        ("10.0.0.9", ["169.254.1.1", "10.0.0.1"], True),
        ("10.0.0.9", ["100.64.0.1", "9.0.0.1"], True),
        ("10.0.0.9", ["10.0.0.1", "9.0.0.1"], True),
        ("10.0.0.9", ["9.0.0.1", "9.0.0.2"], False),
        ("10.0.0.9", ["fd00::1", "fd00:0:0:1::1"], False),
    ],
)
async def test_a_host_votes_once(bad: str, votes: list[str], named: bool) -> None:
    """All addresses of a host have one vote, as far as they can be known."""
    tracker = Tracker(8)
    accused = announce(tracker, 1, address=bad)
    for number, text in enumerate(votes, 2):
        address = plain_address(text)
        announce(tracker, number, bad=(accused.id,), address=address)
    where = "127.0.0.1" if bad.startswith("127") else "10.0.0.200"
    told = announce(tracker, 99, address=where).members
    assert (accused.id in [each.id for each in told]) is named


@proves("threat T13")
async def test_a_grant_votes_once() -> None:
    """A grant has one vote, from however many hosts it is used."""
    tracker = Tracker(8)
    accused = announce(tracker, 1)
    for number in range(2, 5):
        announce(tracker, number, bad=(accused.id,), grant="rank-3")
    assert is_named(tracker, accused)
    announce(tracker, 5, bad=(accused.id,), grant="rank-4")
    assert not is_named(tracker, accused)


@proves("threat I11")
async def test_a_grant_that_lapses_changes_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All members hear of it within a lease, and nobody asks with a token too new."""
    tracker, now = Tracker(8), asyncio.get_running_loop().time()
    monkeypatch.setattr(module, "_now", lambda: now)
    lease = announce(tracker, 1).lease

    def told(after: float, lapses: float = inf) -> tuple[int, ...]:
        nonlocal now
        now += after
        return tracker.tokens(lapses, now=now)

    assert told(0) == (0,)
    assert told(0, now + 100) == (0,)
    assert told(99) == (0,)
    assert told(2) == (0, 1)
    assert told(lease - 0.1, now + 2) == (0, 1)  # it learns the new one
    assert told(0.2) == (1, 0)
    assert told(lease - 0.2) == (1, 0)
    assert told(0.2) == (1, 2)  # that grant has lapsed, too
    assert told(lease + 0.1) == (2, 1)
    assert told(lease) == (2,)
    assert told(1000) == (2,)


@pytest.mark.parametrize(
    "url", ["", "ftp://host/", "http://user@host/", "http://host/?q", "http:///"]
)
async def test_a_url_that_names_no_server(url: str) -> None:
    """The tracker refuses such a URL."""
    with pytest.raises(RemoteProtocolError, match="the URL of the member is bad"):
        announce(Tracker(8), 1, url=url)


async def test_each_chunk_is_promised_to_one_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The promise holds until the chunk is given or the member leaves."""
    monkeypatch.setattr(module, "_MIN_LAPSE_S", 60.0)
    tracker = Tracker(8)
    promised = [announce(tracker, number).next for number in range(10)]
    assert sorted(each for each in promised[:8] if each is not None) == [*range(8)]
    assert promised[8:] == [None, None]
    tracker.promises.give(range(3))
    tracker.promises.give(range(5, 8))
    assert tracker.promises.given == 6
    assert [announce(tracker, number).next for number in (8, 9)] == [None, None]
    tracker.leave(lease_of(promised.index(3)))
    assert announce(tracker, 9).next == 3
    tracker.promises.give(range(3, 5))
    assert [announce(tracker, number).next for number in range(10)] == [None] * 10


async def test_a_member_is_told_the_same_chunk_until_it_requests_it() -> None:
    """It may not have got the answer."""
    tracker, lease = Tracker(8), lease_of(1)
    chunk = announce(tracker, 1).next
    assert chunk is not None
    assert announce(tracker, 1).next == tracker.promise(lease) == chunk
    other = tracker.promise(lease, range(chunk, chunk + 1))
    assert other not in (None, chunk)
    assert announce(tracker, 1).next == other
    assert announce(tracker, 1, have=8).next is None
    assert tracker.promise(lease_of(2)) is None


async def test_a_promise_ends_when_its_member_requests_another_chunk() -> None:
    """Another member may then have the promised chunk."""
    tracker = Tracker(2)
    chunk = announce(tracker, 1).next
    assert chunk is not None
    other = 1 - chunk
    assert tracker.promise(lease_of(1), range(other, other + 1)) == chunk
    tracker = Tracker(3)
    first, second = announce(tracker, 1).next, announce(tracker, 2).next
    assert first is not None
    assert second is not None
    tracker.promise(lease_of(1), range(second, second + 1))
    tracker.leave(lease_of(1))
    assert announce(tracker, 3).next is not None
    assert announce(tracker, 4).next is not None


async def test_a_promise_that_has_lapsed_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lapsed promise does not revive, also if another member has had it."""
    tracker = Tracker(1)
    assert announce(tracker, 1).next == 0
    monkeypatch.setattr(module, "_PROMISE_LAPSES", SlowAfter(3.0, unknown_s=0.05))
    tracker.promises._usual = Usual()
    await settle(lambda: announce(tracker, 2).next == 0)
    monkeypatch.setattr(module, "_PROMISE_LAPSES", SlowAfter(3.0, unknown_s=60.0))
    monkeypatch.setattr(module, "_MIN_LAPSE_S", 60.0)
    assert announce(tracker, 1).next is None
    tracker.leave(lease_of(1))
    assert announce(tracker, 3).next is None
    tracker.leave(lease_of(2))
    assert announce(tracker, 3).next == 0


async def test_a_member_is_not_told_of_those_that_it_knows() -> None:
    """If it knows enough, it is told of a few that few others know."""
    tracker = Tracker(8)
    one = announce(tracker, 0)
    for number in range(20):
        announce(tracker, number, known=tuple(of(one, n) for n in range(64)))
    found = announce(tracker, 20).members
    assert len(found) == 12
    known = tuple(each.id for each in found)
    more = announce(tracker, 20, known=known).members
    assert len(more) == 4
    assert not {each.id for each in more}.intersection(known)
    known += tuple(each.id for each in more)
    assert (
        len(announce(tracker, 20, known=(*known, of(one, 99), "no", "m", "m1")).members)
        == 4
    )
    assert not announce(tracker, 20, have=8).members


async def test_a_member_takes_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member takes at most 400 bytes, half of them for the end of its lease."""
    monkeypatch.setattr(module, "heartbeat", lambda _: 600.0)  # tracing is slow
    tracker, count = Tracker(2048), 250
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(count):
            announce(tracker, number)
        gc.collect()
        here = [
            tracemalloc.Filter(inclusive=True, filename_pattern=each)
            for each in (module.__file__, deadlines.__file__)
        ]
        taken = tracemalloc.take_snapshot().filter_traces(here)
    finally:
        tracemalloc.stop()
    assert len(tracker) == count
    assert sum(each.size for each in taken.statistics("filename")) / count < 400
