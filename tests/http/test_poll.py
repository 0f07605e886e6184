"""Which of several answers counts, and when that is settled."""

from __future__ import annotations

import pytest

from aiockpt.errors import PeerUnreachableError
from aiockpt.http.poll import PATIENCE, Poll

pytestmark = pytest.mark.torch_free

LOST = PeerUnreachableError("http://h/")


def poll_of(voters: int) -> Poll[str]:
    """Return a poll whose answers are words; of equal parties the longer word wins."""
    return Poll(voters, key=str.lower, rank=len)


def chosen(poll: Poll[str]) -> str:
    """Return what was chosen."""
    return poll.parties()[0].value


def test_a_majority_settles_it_at_once() -> None:
    """Whatever those say who have not spoken."""
    poll = poll_of(3)
    poll.vote(2, "a", 0.0)
    assert not poll.is_settled(0.0)
    poll.vote(0, "A", 0.0)
    assert poll.is_settled(0.0)
    assert chosen(poll) == "a"
    assert poll.parties()[0].voters == [2, 0]


def test_a_liar_that_is_quick_is_outvoted() -> None:
    """The answer of one of three settles nothing."""
    poll = poll_of(3)
    poll.vote(0, "lie", 0.0)
    poll.vote(1, "a", 0.1)
    assert not poll.is_settled(0.1)
    poll.vote(2, "a", 0.2)
    assert poll.is_settled(0.2)
    assert chosen(poll) == "a"


def test_the_silent_are_not_waited_for_long() -> None:
    """From the first answer on."""
    poll = poll_of(2)
    assert poll.left(0.0) is None
    poll.vote(1, "a", 5.0)
    assert not poll.is_settled(5.0)
    assert poll.left(5.0) == PATIENCE
    assert poll.is_settled(5.0 + PATIENCE)
    assert poll.left(9.0) == 0


@pytest.mark.parametrize("trouble", ["fail", "doubt"])
def test_who_has_trouble_is_not_waited_for(trouble: str) -> None:
    """Whether for good or for a while; in the latter case a vote still counts."""
    poll = poll_of(3)
    poll.vote(1, "a", 0.0)
    for voter in (0, 2):
        if trouble == "fail":
            poll.fail(voter, LOST)
        else:
            poll.doubt(voter)
    assert poll.is_settled(0.0)
    poll.vote(0, "b", 0.0)
    poll.vote(2, "b", 0.0)
    assert chosen(poll) == "b"


def test_nobody_has_an_answer() -> None:
    """That settles it, too, but not before everybody has failed."""
    poll = poll_of(2)
    poll.fail(0, LOST)
    poll.doubt(1)
    assert not poll.is_settled(100.0)
    poll.fail(1, LOST)
    assert poll.is_settled(100.0)
    assert poll.parties() == []


def test_equal_parties() -> None:
    """The higher rank, then the one of whom the caller named first."""
    poll = poll_of(4)
    poll.vote(3, "a", 0.0)
    poll.vote(0, "b", 0.0)
    assert chosen(poll) == "b"
    poll.vote(2, "aa", 0.0)
    assert chosen(poll) == "aa"
