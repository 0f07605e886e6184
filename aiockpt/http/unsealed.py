"""Checkpoints that are read while they are being staged, as a shelf has them.

Whoever accepts an unsealed manifest is given a tag, under which ranges are served as
soon as their bytes are there, and at the end the sealed manifest. Both serve the same
memory, so both leave the shelf together. What is not staged to its end is told, under
its tag, to everybody who has begun to read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

from aiockpt._frontier import Frontier
from aiockpt._tasks import News
from aiockpt.errors import AiockptError, PeerFailedError, StepNotFoundError
from aiockpt.http.failing import Failure
from aiockpt.http.published import Published, Servable
from aiockpt.wire.unsealed import make_tag

__all__ = ["Early", "Staged", "Unsealed"]


class Staged(Servable, Protocol):
    """A checkpoint that is being staged; its manifest has no digests yet."""

    @property
    def frontier(self) -> Frontier | None:
        """How far that has come."""


class Unsealed:
    """One checkpoint that is, or was, read while it is being staged.

    Attributes:
        tag: What readers call it.
        published: It, for those who read by its tag.
        sealed: The same, once it is published.
        receivers: How many were given its manifest.
    """

    def __init__(self, staged: Staged) -> None:
        assert staged.frontier is not None, "nobody says how far it is"
        self.tag = make_tag(os.urandom(16))
        self.published = Published(staged)
        self.sealed: Published | None = None
        self.receivers = 0
        self._frontier = staged.frontier
        self._loss: Callable[[], AiockptError] | None = None
        self._news = News()
        self._frontier.watch(self._news.tell)

    def __repr__(self) -> str:
        return f"<Unsealed step={self.published.step} {self._frontier}>"

    @property
    def pending(self) -> bool:
        """Whether it is being staged."""
        return self.sealed is None and self._loss is None

    def has(self, stop: int) -> bool:
        """Whether the data segment is there up to ``stop``."""
        return self._frontier.done or self._frontier.nbytes >= stop

    def seal(self, sealed: Published) -> None:
        """Note that it has been published."""
        self.sealed = sealed
        self._news.tell()

    def lose(self, loss: Callable[[], AiockptError]) -> None:
        """Note that it will not be published, or no longer is, and what to say."""
        self._loss = loss
        self._news.tell()

    async def wait_until(self, holds: Callable[[], bool], *, wait: float) -> bool:
        """Return once it holds, or, saying so, when ``wait`` seconds may have passed.

        Raises:
            PeerFailedError: it cannot be staged.
            StepNotFoundError: it was withdrawn.
        """
        if self._loss is None and not holds():
            await self._news.wait(wait)
        if self._loss is not None:
            raise self._loss()
        return holds()


class Early:
    """What is being staged, and what was read so and is still there. For one loop."""

    def __init__(self) -> None:
        self._all: list[Unsealed] = []

    def __repr__(self) -> str:
        return f"<Early {self._all}>"

    def open(self, staged: Staged) -> None:
        """Let it be read. What was lost before is forgotten."""
        self._all = [each for each in self._all if each.published.on_shelf]
        self._all.append(Unsealed(staged))

    def find(self, tag: str) -> Unsealed | None:
        """Return what has this tag."""
        return next((each for each in self._all if each.tag == tag), None)

    def pending(self, step: int | None = None) -> Unsealed | None:
        """Return what is being staged, if it is ``step``; there is one at most."""
        for each in self._all:
            if each.pending and step in (None, each.published.step):
                return each
        return None

    def seal(self, sealed: Published) -> None:
        """Note that what is being staged has been published."""
        pending = self.pending(sealed.step)
        if pending is not None:
            pending.seal(sealed)

    def fail(self, failure: Failure) -> Published | None:
        """Tell those who read what is being staged that it does not come.

        They do not count among those who are still to be told. Returns what has to
        leave the shelf.
        """
        pending = self.pending()
        if pending is None:
            return None
        failure.told(pending.receivers)
        pending.lose(partial(PeerFailedError, None, failure.reason))
        return pending.published

    def end(self, sealed: Published | None) -> Published | None:
        """Return what leaves the shelf together with ``sealed``.

        None stands for what is being staged, and is withdrawn.
        """
        for each in self._all:
            if each.sealed is sealed and each.published.on_shelf:
                each.lose(partial(StepNotFoundError, each.published.step))
                return each.published
        return None

    def held(self) -> list[Published]:
        """Return what is read by its tag."""
        return [each.published for each in self._all if each.published.on_shelf]
