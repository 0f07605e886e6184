"""Who takes which chunks next, and who is relieved of what it has in hand."""

from __future__ import annotations

import pytest

from aiockpt.format.chunks import digest
from aiockpt.http.board import Board, Hand, Lane
from aiockpt.http.stretch import MAX_RUN, Part

pytestmark = pytest.mark.torch_free

MIB = 1 << 20
ZEROS = bytes(MIB)
DIGEST = digest([ZEROS])


def board_of(chunks: int, lanes: int = 1) -> tuple[Board, list[Lane]]:
    """Return a board of chunks of a mebibyte, and lanes of a peer each."""
    parts = [Part(n, n * MIB, (n + 1) * MIB, DIGEST) for n in range(chunks)]
    board = Board(parts, on_verified=lambda *_: None)
    board.lanes += [Lane(peer) for peer in range(lanes)]
    return board, board.lanes


def take(board: Board, lane: Lane, now: float = 0.0) -> Hand:
    """Take what there must be."""
    hand = board.take(lane, now)
    assert hand is not None
    return hand


def receive(hand: Hand, nbytes: int) -> None:
    """Have some bytes arrive, all of them right."""
    while nbytes:
        piece = min(nbytes, MIB)
        hand.stretch.take(memoryview(ZEROS)[:piece])
        hand.stretch.placed()
        hand.stretch.note()
        nbytes -= piece


def chunks(hand: Hand) -> list[int]:
    """Return what a lane has in hand."""
    return [part.chunk for part in hand.parts]


class TestTake:
    """The faster a lane is, the more it takes."""

    def test_a_lane_that_is_not_known_gets_a_chunk(self) -> None:
        """It has to show how fast it is."""
        board, (lane,) = board_of(100)
        assert chunks(take(board, lane)) == [0]

    def test_a_run_takes_about_a_quarter_of_a_second(self) -> None:
        """Or one chunk, if that takes longer."""
        board, (slow, fast) = board_of(400, lanes=2)
        slow.rate, fast.rate = MIB / 10, 40 * MIB
        assert chunks(take(board, slow)) == [0]
        assert chunks(take(board, fast)) == [*range(1, 11)]

    def test_runs_are_bounded_and_get_shorter_towards_the_end(self) -> None:
        """So that all lanes end at about the same time."""
        board, lanes = board_of(4800, lanes=2)
        sizes = []
        while not board.done:
            for lane in lanes:
                lane.rate = 1e12
                if hand := board.take(lane, 0.0):
                    sizes.append(hand.size)
                    receive(hand, hand.size)
                    board.put_back(hand, 1.0)
        assert sizes[0] == MAX_RUN
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-4:] == [MIB] * 4
        assert sum(sizes) == 4800 * MIB

    def test_a_run_is_consecutive(self) -> None:
        """One request asks for it."""
        parts = [Part(n, n * MIB, (n + 1) * MIB, DIGEST) for n in (0, 1, 5, 6, 7, 8)]
        board = Board(parts, on_verified=lambda *_: None)
        lane = Lane(0, rate=1e12)
        assert chunks(take(board, lane)) == [0, 1]


class TestPutBack:
    """What a lane has not verified is there for others."""

    def test_the_rest_is_fetched_by_the_next_one(self) -> None:
        """From the first byte of the chunk that was begun."""
        board, (lane, other) = board_of(8, lanes=2)
        lane.rate = other.rate = 1e12
        hand = take(board, lane)
        assert chunks(hand) == [0, 1]
        receive(hand, MIB + 10)
        assert board.put_back(hand, 1.0) == 10
        assert chunks(take(board, other))[0] == 1

    def test_a_bad_chunk_is_to_be_fetched_again(self) -> None:
        """The good ones beside it are not."""
        board, (lane,) = board_of(6)
        lane.rate = 1e12
        hand = take(board, lane)
        assert chunks(hand) == [0, 1, 2]
        receive(hand, MIB)
        hand.stretch.take(memoryview(b"\1" * MIB))
        hand.stretch.placed()
        hand.stretch.note()
        receive(hand, MIB)
        assert board.put_back(hand, 1.0) == MIB
        assert chunks(take(board, lane)) == [1]

    def test_it_is_done_when_nothing_is_left_and_nothing_in_hand(self) -> None:
        """Both."""
        board, (lane,) = board_of(1)
        hand = take(board, lane)
        assert board.take(lane, 0.0) is None
        states = [board.done]
        receive(hand, MIB)
        assert board.put_back(hand, 2.0) == 0
        assert [*states, board.done] == [False, True]
        assert lane.rate == MIB / 2


class TestOneIsLeft:
    """Its lanes may help each other then."""

    def test_it_alone_has_lanes_and_runs(self) -> None:
        """Who was dropped may not have let go yet."""
        board, (lane, other) = board_of(2, lanes=2)
        hand = take(board, other)
        states = [board.is_left_to(0)]
        board.lanes = [lane]
        states.append(board.is_left_to(0))
        board.put_back(hand, 1.0)
        assert [*states, board.is_left_to(0)] == [False, False, True]
        assert not board.is_left_to(1)

    def test_another_lane_goes_on_with_a_run(self) -> None:
        """What is not verified of it, it puts back."""
        board, (lane, *_) = board_of(1)
        hand = take(board, lane)
        heir = Hand(Lane(0), hand.parts, hand.stretch, hand.size, 0.0)
        board.pass_on(hand, heir)
        assert not board.done
        assert board.put_back(heir, 1.0) == 0
        assert chunks(take(board, lane)) == [0]


def test_it_is_told_who_gave_a_chunk() -> None:
    """By the number of the peer."""
    told: list[tuple[int, int]] = []
    parts = [Part(n, n * MIB, (n + 1) * MIB, DIGEST) for n in range(2)]
    board = Board(parts, on_verified=lambda *which: told.append(which))
    for peer in (3, 5):
        receive(take(board, Lane(peer)), MIB)
    assert told == [(3, 0), (5, 1)]


class TestSlowHand:
    """A free lane takes over from another peer's, if that is worth it."""

    def both(self, *, rate: float = 10.0 * MIB) -> tuple[Board, Hand, Lane]:
        """Return a hand of the first peer, begun at 0, and a free lane of another."""
        board, (lane, free) = board_of(1, lanes=2)
        free.rate = rate
        return board, take(board, lane), free

    def test_who_keeps_up_is_left_alone(self) -> None:
        """Half has come, in about the time that it takes."""
        board, hand, free = self.both()
        receive(hand, MIB // 2)
        assert board.slow_hand(free, 0.11) is None

    def test_who_is_much_slower_is_relieved(self) -> None:
        """It would need another nine seconds."""
        board, hand, free = self.both()
        receive(hand, MIB // 10)
        assert board.slow_hand(free, 1.0) is hand

    def test_who_was_fast_and_is_silent_is_relieved(self) -> None:
        """Almost everything has come, and the rest does not."""
        board, hand, free = self.both()
        receive(hand, MIB - 1)
        assert board.slow_hand(free, 0.2) is None
        assert board.slow_hand(free, 0.3) is None
        assert board.slow_hand(free, 0.6) is hand

    def test_nobody_is_judged_too_early(self) -> None:
        """A connection begins slowly."""
        board, hand, free = self.both()
        receive(hand, 1)
        assert board.slow_hand(free, 0.09) is None
        assert board.slow_hand(free, 0.2) is hand

    def test_who_lost_its_peer_is_relieved_at_once(self) -> None:
        """Unless it has found it again."""
        board, hand, free = self.both()
        receive(hand, MIB // 2)
        hand.lose_peer()
        assert board.slow_hand(free, 0.01) is hand
        receive(hand, 1)
        assert board.slow_hand(free, 0.01) is None

    def test_a_lane_that_never_fetched_is_careful(self) -> None:
        """It does not know whether it is faster."""
        board, hand, free = self.both(rate=0.0)
        assert board.slow_hand(free, 0.9) is None
        assert board.slow_hand(free, 1.2) is hand

    def test_the_own_peer_is_not_relieved(self) -> None:
        """Its lanes are alike."""
        board, _, free = self.both()
        free.peer = 0
        assert board.slow_hand(free, 100.0) is None

    def test_nobody_is_relieved_twice(self) -> None:
        """The first one who is free is on its way."""
        board, hand, free = self.both()
        assert board.slow_hand(free, 100.0) is hand
        hand.relieved = True
        assert board.slow_hand(free, 100.0) is None

    def test_who_was_relieved_rests(self) -> None:
        """Longer each time, until it has brought a whole run again."""
        board, (lane,) = board_of(3)
        rests = []
        for _ in range(8):
            hand = take(board, lane)
            hand.relieved = True
            board.put_back(hand, 1.0)
            rests.append(lane.rest)
        assert rests == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
        hand = take(board, lane)
        receive(hand, MIB)
        board.put_back(hand, 1.0)
        assert lane.reliefs == 0
