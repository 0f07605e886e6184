"""One running checkpoint process as the event loop knows it: messages and deadlines."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from aiockpt.checkpointers.config import CheckpointProcessConfig
from aiockpt.checkpointers.failures import raised
from aiockpt.checkpointers.messages import (
    Begun,
    Dropped,
    Ended,
    Progressed,
    Ready,
    Write,
    decode_from_worker,
)
from aiockpt.checkpointers.process_launch import Child
from aiockpt.checkpointers.submission import Submission
from aiockpt.checkpointers.writer import Written
from aiockpt.errors import AiockptError
from aiockpt.runtime.channel import Channel

__all__ = ["Sent", "Watched"]


@dataclass(slots=True)
class Sent:
    """A submission with its message, which may have to be sent again."""

    submission: Submission
    message: Write
    parcel: int
    deadline: float = float("inf")
    tries: int = 0

    def end(self, failure: BaseException) -> None:
        """Fail it."""
        os.close(self.parcel)
        self.submission.finish(failure)


class Watched:
    """A process that runs, as far as the loop knows."""

    def __init__(
        self, child: Child, sent: dict[int, Sent], config: CheckpointProcessConfig
    ) -> None:
        self.child = child
        self.changed = asyncio.Event()
        self.prepared = asyncio.Event()
        self.ready = False
        self.ended = asyncio.Event()
        self.failure: AiockptError | None = None
        self._sent = sent
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._ready_by = self._heard + config.subprocess_init_timeout_secs
        self._posted: set[int] = set()
        self.channel = Channel(child.socket, self._hear, self._end)
        if child.pidfd >= 0:
            self._loop.add_reader(child.pidfd, self._end)

    def __repr__(self) -> str:
        return f"<Watched {self.child!r} ready={self.ready} gone={self.gone}>"

    @property
    def gone(self) -> bool:
        """Whether it has ended, or is not listened to any more."""
        return self.ended.is_set()

    def post(self, sent: Sent) -> None:
        """Send a write to the process."""
        arena = sent.submission.snapshot.arena
        assert arena is not None
        if not self._posted:
            self._heard = self._loop.time()
        sent.tries += 1
        self._posted.add(sent.submission.number)
        self.channel.send(sent.message, [sent.parcel, arena.fd])
        self.changed.set()

    def overdue(self, close_by: float) -> tuple[str, float]:
        """Return what did not happen in time, and when to look again."""
        self.channel.read()  # the loop may have stood still, and not the process
        config, waits = self._config, []
        if not self.ready:
            waits.append((self._ready_by, "did not start", "subprocess_init"))
        elif self._posted:
            silent = self._heard + config.hang_timeout_secs
            waits.append((silent, "hung", "hang"))
        for number in self._posted:
            late = self._sent[number].deadline
            waits.append((late, "did not finish a write", "write"))
        waits.append((close_by, "did not end", "subprocess_shutdown"))
        when, what, option = min(waits)
        if self._loop.time() < when:
            return "", when
        limit = getattr(config, f"{option}_timeout_secs")
        return f"{what} within {limit:g} s ({option}_timeout_secs)", when

    def leave(self) -> None:
        """Let go of the process."""
        self.channel.read()
        self._end()
        self.channel.close()
        self.child.close()

    def _end(self) -> None:
        if not self.gone:
            self.ended.set()
            if self.child.pidfd >= 0:
                self._loop.remove_reader(self.child.pidfd)
            self.channel.read()  # what it said last
            self.changed.set()

    def _hear(self, data: bytes, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        self._heard = self._loop.time()
        message = decode_from_worker(data)
        if isinstance(message, Ready):
            self.ready = True
            self.prepared.set()
        elif isinstance(message, Ended) and not message.number:
            assert message.failure is not None
            self.failure = raised(message.failure, "the subprocess's init function")
        elif isinstance(message, Begun | Progressed | Dropped | Ended):
            self._heard_of(message)
        self.changed.set()

    def _heard_of(self, message: Begun | Progressed | Dropped | Ended) -> None:
        sent = self._sent.get(message.number)
        if sent is None:
            return
        if isinstance(message, Begun):
            sent.deadline = self._heard + self._config.write_timeout_secs
            sent.submission.begin()
        elif isinstance(message, Progressed):
            sent.submission.advance(message.nbytes)
        else:
            self._posted.discard(message.number)
            del self._sent[message.number]
            os.close(sent.parcel)
            _settle(sent.submission, message)


def _settle(submission: Submission, message: Dropped | Ended) -> None:
    if isinstance(message, Dropped):
        submission.finish(written=False)
        return
    submission.seconds = message.seconds
    submission.outcome = Written(message.warning, message.content)
    failure = message.failure
    doing = f"writing {submission.path}"
    submission.finish(None if failure is None else raised(failure, doing))
