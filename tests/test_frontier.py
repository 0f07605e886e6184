"""Frontier: how far staging has come, as its readers see it."""

from __future__ import annotations

from threading import Thread

import pytest

from aiockpt._frontier import Frontier
from aiockpt.errors import StagingError


class TestRanges:
    """Pieces are copied in any order; what counts is the run from the first byte on."""

    def test_a_gap_holds_it_back(self) -> None:
        """Until it is filled: then it reaches behind all that follows."""
        made = Frontier()
        made.add(10, 20)
        made.add(20, 25)
        assert made.nbytes == 0
        made.add(0, 10)
        assert made.nbytes == 25
        made.add(25, 26)
        assert made.nbytes == 26

    def test_it_never_goes_back(self) -> None:
        """A message that is late changes nothing."""
        made = Frontier()
        made.advance(20)
        made.advance(10)
        assert made.nbytes == 20


class TestWaiting:
    """A reader stays behind it, in a thread of its own."""

    def test_a_reader_goes_on_when_enough_is_there(self) -> None:
        """And not when everything is."""
        made = Frontier()
        reader = Thread(target=made.wait, args=(10,))
        reader.start()
        made.advance(9)
        assert reader.is_alive()
        made.advance(10)
        reader.join(10)
        assert not reader.is_alive()

    def test_all_bytes_are_not_the_end(self) -> None:
        """Whoever stages may still change its mind."""
        made = Frontier()
        made.advance(10)
        ended: list[str] = []

        def wait() -> None:
            try:
                made.wait_until_done()
            except StagingError as error:
                ended.append(str(error))

        reader = Thread(target=wait)
        reader.start()
        made.fail("the device is gone")
        reader.join(10)
        assert ended == ["staging did not end: the device is gone"]
        with pytest.raises(StagingError):
            made.wait(10)

    def test_the_first_end_counts(self) -> None:
        """Well or not."""
        made = Frontier()
        made.finish()
        made.fail("too late")
        made.wait_until_done()
        assert (made.ended, made.failure) == (True, "")
        made.wait(1 << 40)

    def test_who_watches_is_told_of_each_change(self) -> None:
        """By the thread that makes it, when it is made."""
        made, seen = Frontier(), []
        made.watch(lambda: seen.append((made.nbytes, made.ended, bool(made.failure))))
        made.add(5, 9)
        made.add(0, 5)
        made.fail("")
        assert seen == [(9, False, False), (9, True, True)]
