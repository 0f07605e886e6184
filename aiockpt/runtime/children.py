"""Child processes: starts them, talks to them, notices their end, and cleans up.

A parent process sees its child as a `Child`, and the child sees the parent as a
`Parent`. A socket connects them, with the messages of `ipc`. Each also watches the
other's process. The socket alone does not reveal a death, because a process that the
dead one has forked may hold the socket open.

The last part is about forked children, such as the workers of a data loader.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Final

from aiockpt.errors import StagingError, WorkerError
from aiockpt.runtime.bridge import start_daemon
from aiockpt.runtime.ipc import Channel, close_all, pair, send

_CODE: Final = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from {module} import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_POLL_S: Final = 0.01  # between two looks for an exit code

_LONG_LIFE_S: Final = 60.0  # after such a life, a process is replaced at once
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.sep


_BEGUN_IN: Final = _working_directory()


class Pauses:
    """How long to wait before a process is replaced that may die again and again."""

    def __init__(self) -> None:
        self._deaths = 0

    def next(self, lived: float) -> float:
        """Return the pause, in seconds, after a process that lived so many seconds.

        There is none after a long life, or before the first replacement. Each further
        short life doubles it, up to a minute.
        """
        self._deaths = 0 if lived >= _LONG_LIFE_S else self._deaths + 1
        if self._deaths <= 1:
            return 0.0
        return float(min(_FIRST_PAUSE_S * 2 ** (self._deaths - 2), _MAX_PAUSE_S))


class Child:
    """A process of this interpreter that runs ``main(fd, pid)`` of a module.

    ``fd`` is its end of the socket, and ``pid`` is this process: see `Parent`. To make
    a child blocks until the process has begun, so it is made in a thread. The other
    methods are for one event loop, from :meth:`listen` on.

    Args:
        module: The module that has ``main``.
        greeting: The first message to the process, if any; the socket must hold it.
        fds: The descriptors that travel with the greeting; they stay the caller's.
        inherited: Descriptors that the process has under the same numbers.
        quiet: Whether the process has no standard output.
        program: The interpreter; None: the one that runs this process.

    Attributes:
        gone: Set when the process has ended or closed its end of the socket, and all
            of its messages were delivered.

    Raises:
        OSError: the system refuses another process, or a descriptor.
        WorkerError: nobody knows this program's interpreter.
    """

    def __init__(
        self,
        module: str,
        *,
        greeting: object = None,
        fds: Sequence[int] = (),
        inherited: Sequence[int] = (),
        quiet: bool = False,
        program: str | bytes | None = None,
    ) -> None:
        interpreter = _interpreter(program)
        self.gone = asyncio.Event()
        self._pidfd = -1
        self._is_left = False
        self._channel: Channel | None = None
        self._socket, theirs = pair()
        close_in_forks([self._socket, theirs])
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
        code = _CODE.format(module=module)
        arguments = [str(theirs.fileno()), str(os.getpid()), *_import_path()]
        try:
            if greeting is not None:
                send(self._socket, greeting, fds)
            self._popen = subprocess.Popen(  # noqa: S603 - this very interpreter
                [interpreter, *flags, "-c", code, *arguments],
                stdin=subprocess.DEVNULL,
                # A stream that is closed would become the first file that it opens.
                stdout=subprocess.DEVNULL if quiet or not _is_open(1) else None,
                stderr=None if _is_open(2) else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *inherited),
                # Ctrl-C, and what ends this process's group, must not end it. In a
                # session of its own, its niceness would not count (autogroups).
                process_group=0,
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()  # or the end of the process would not close the socket
        with suppress(OSError, AttributeError):  # an old kernel; the socket tells, too
            self._pidfd = os.pidfd_open(self._popen.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    # ------------------------------------------------------------------ messages

    def listen(
        self,
        on_message: Callable[[bytes], None],
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """Call back on this loop with each message, and once when it is ``gone``."""

        def hear(data: bytes, fds: list[int]) -> None:
            close_all(fds)  # a child sends none
            on_message(data)

        def end() -> None:
            if self.gone.is_set():
                return
            self.gone.set()
            if self._pidfd >= 0:
                loop.remove_reader(self._pidfd)
            channel.read()  # what it said last
            on_gone()

        loop = asyncio.get_running_loop()
        self._channel = channel = Channel(self._socket, hear, end)
        if self._pidfd >= 0:
            loop.add_reader(self._pidfd, end)

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message; see `Channel.send`."""
        assert self._channel is not None, "nobody listens to the process yet"
        self._channel.send(message, fds)

    def read(self) -> None:
        """Call back with everything that has arrived, without waiting for the loop."""
        assert self._channel is not None, "nobody listens to the process yet"
        self._channel.read()

    # ------------------------------------------------------------- life and death

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self._popen.kill()

    @property
    def starved(self) -> float:
        """Return for how many seconds its main thread has waited for a free core.

        0.0 if the system does not tell.
        """
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped all of its threads, so that it never answers."""
        look = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):  # it was reaped
            return os.waitid(os.P_PID, self.pid, look) is not None
        return False

    async def exitcode(self, timeout: float) -> int | None:
        """Wait for the end of a process that is gone, or was killed.

        Returns its exit code: minus the number of the signal that has ended it; None
        if it still runs after ``timeout`` seconds, inside a system call.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._popen.poll() is None:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(_POLL_S)
        return self._popen.poll()

    def close(self) -> None:
        """Release the child; a process that still runs goes on. Idempotent.

        A daemon thread waits for the end of that process, so that no zombie stays.
        """
        if self._channel is not None:
            self._channel.close()
        self._socket.close()
        if self._pidfd >= 0:
            if self._channel is not None:
                asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._popen.poll() is None and not self._is_left:
            self._is_left = True
            with suppress(StagingError):  # without a thread, a zombie may stay
                start_daemon("aiockpt-reaper", self._popen.wait)


def _interpreter(program: str | bytes | None) -> str | bytes:
    own = sys.executable
    found = program or own
    if found and not (getattr(sys, "frozen", False) and os.fsdecode(found) == own):
        return found
    raise WorkerError(
        "this program knows no Python interpreter that could run another process "
        "(sys.executable is empty, or a frozen program): save with use_process=False, "
        "and serve without process=True"
    )


def _import_path() -> list[str]:
    """Return ``sys.path`` for a process that begins in another directory."""
    found = [str(each) for each in sys.path]
    # This package last, which may have been found in some other way.
    found.append(str(Path(__file__).parents[2]))
    return [os.path.join(_BEGUN_IN, each) for each in found if "\0" not in each]


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


class Parent:
    """The process that started this one; create it on the event loop that serves it.

    Args:
        fd: This end of the socket, as ``main`` got it.
        pid: The parent's process id, as ``main`` got it.
        on_message: Called with each message and its descriptors, which it owns.
        on_gone: Called once when the parent has died, after its last message.
    """

    def __init__(
        self,
        fd: int,
        pid: int,
        on_message: Callable[[bytes, list[int]], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_gone = on_gone
        self._is_gone = False
        self._pidfd = -1
        self._channel = Channel(socket(fileno=fd), on_message, self._end)
        with suppress(OSError, AttributeError):
            self._pidfd = os.pidfd_open(pid)
            self._loop.add_reader(self._pidfd, self._end)
        if os.getppid() != pid:
            self._loop.call_soon(self._end)

    @property
    def full(self) -> bool:
        """Whether the next message would have to wait."""
        return self._channel.full

    def send(self, message: object) -> None:
        """Send a message, or nothing if the parent is gone."""
        self._channel.send(message)

    def close(self) -> None:
        """Close this end and stop watching the parent. Idempotent."""
        self._channel.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _end(self) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        self._channel.read()  # what it said last
        self.close()
        self._on_gone()


_OF_TRAINER = (
    *(signal.SIGINT, signal.SIGHUP),  # of a terminal
    *(signal.SIGUSR1, signal.SIGUSR2),  # of a scheduler, to all processes of a job
    *(signal.SIGTTIN, signal.SIGTTOU),  # no shell would ever continue this process
)


def ignore_signals_of_trainer() -> None:
    """Make this process ignore the signals that are meant for the trainer."""
    for each in _OF_TRAINER:
        signal.signal(each, signal.SIG_IGN)


# ----------------------------------------------------------- forked children
#
# A forked child, such as a worker of a data loader, must not keep listening sockets
# and connections open. If it did, the port would outlive the parent: a receiver that
# connects would not be refused, and one that reads would not be cut off; both would
# hang.


_sockets: weakref.WeakSet[socket] = weakref.WeakSet()


def close_in_forks(sockets: Iterable[socket]) -> None:
    """Close these sockets in every child that is forked from now on."""
    _sockets.update(sockets)


def _cut_off_child() -> None:
    # A child inherits the loop and never runs it. The loop would close a descriptor a
    # second time, when it may belong to somebody else, and uvloop keeps a socket from
    # closing. So the descriptors are made to point nowhere.
    found = [sock.fileno() for sock in tuple(_sockets)]
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in found:
        if descriptor >= 0:
            with suppress(OSError):
                os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cut_off_child)
