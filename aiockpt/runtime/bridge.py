"""Threads: the only module of the package that starts any.

`Bridge.run` returns when its thread has ended, never before. ``asyncio.to_thread`` and
executors differ: a cancelled await returns while the thread goes on. A thread that
fills a buffer would then write into memory that its caller has already given back.

`obtain` gets a resource from a thread, and releases it if the caller is cancelled.
`SerialThread` and `share_out` are for callers that block. `leave_behind` lets the
interpreter exit beside a thread that waits for something that nothing can end.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import ctypes
import functools
import logging
import sys
import threading
from concurrent.futures import Future as Future  # noqa: PLC0414 - for other modules
from concurrent.futures import InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar, TypeVarTuple
from weakref import WeakSet

import anyio

from aiockpt.errors import ClosedError, StagingError
from aiockpt.format.limits import IS_CANCELLED, WorkCancelledError, raise_if_cancelled
from aiockpt.runtime.system import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
Args = TypeVarTuple("Args")

logger = logging.getLogger(__name__)

_NO_THREAD: Final = "can't start new thread"
_MAX_COPY_THREADS: Final = 4  # more hardly copy memory faster
_ASKED_EVERY_S: Final = 0.2  # whether the caller is cancelled
_TO_END_S: Final = 0.7  # for a call that nobody waits for any more

_SLEEPS_BY_ITSELF: Final = sys.version_info >= (3, 14)  # such a thread sleeps by itself

_left: WeakSet[threading.Thread] = WeakSet()


def start_daemon(
    name: str, fn: Callable[[*Args], object], *args: *Args
) -> threading.Thread:
    """Call ``fn(*args)`` in a thread that does not delay the interpreter's exit.

    Raises:
        StagingError: the system refuses another thread.
    """
    thread = threading.Thread(target=fn, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if (failure := _no_thread(error)) is None:
            raise
        raise failure from error
    return thread


def leave_behind(thread: threading.Thread) -> None:
    """Let the interpreter exit beside a daemon thread that nobody waits for.

    Before Python 3.14, a thread that returns from C++ while the interpreter ends is
    ended by ``pthread_exit``. That unwinds the C++ frames of pybind11, which must not
    be unwound, so ``std::terminate`` aborts the process. A job that was about to exit
    with status 0 dies of SIGABRT because a peer closed its connection at that moment.
    Therefore, where such threads exist at the exit, a thread that terminates sleeps
    until the process has gone. It holds no lock by then.
    """
    if not _left:
        atexit.unregister(_spare_the_process)
        atexit.register(_spare_the_process)
    _left.add(thread)


def _spare_the_process() -> None:
    if _SLEEPS_BY_ITSELF or not any(thread.is_alive() for thread in _left):
        return
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libstdc++.so.6")
        # ``pause`` is a function of the C library; it needs no interpreter.
        library["_ZSt13set_terminatePFvvE"](ctypes.CDLL(None).pause)


class BridgeStatistics(NamedTuple):
    """A bridge at one moment: its number of threads, and its calls by state.

    ``cancelling`` counts the running calls whose caller was cancelled and waits for
    the thread to end.
    """

    threads: int
    running: int
    waiting: int
    cancelling: int


class CallResult(Generic[T]):
    """The result or error of a call in another thread, until its caller clears it.

    In a future, an error and its traceback would refer to each other. The objects of
    its frames, such as a state dict, would stay in memory until a garbage collection.
    """

    __slots__ = ("_result", "error")

    def __init__(self) -> None:
        self._result: list[T] = []
        self.error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """Keep what the call has returned."""
        self._result.append(result)

    def result(self) -> T:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self._result[0]

    def clear(self) -> None:
        """Drop the result and the error, even if something still refers to this."""
        self.error = None
        self._result.clear()


class _Call(CallResult[T]):
    """A function on its way through the pool, and its outcome.

    A worker refers to its work item for a moment after it has reported the end. So the
    caller clears the call, and may then close or reuse its memory at once.
    """

    __slots__ = ("_todo", "called_off")

    def __init__(self, todo: Callable[[], T]) -> None:
        super().__init__()
        self._todo: Callable[[], T] | None = todo
        self.called_off = False  # its caller was cancelled

    @classmethod
    def of(cls, fn: Callable[[*Args], T], *args: *Args) -> _Call[T]:
        """Return a call whose function can ask whether its caller was cancelled."""
        context = contextvars.copy_context()
        call = cls(functools.partial(context.run, fn, *args))
        context.run(IS_CANCELLED.set, lambda: call.called_off)
        return call

    def __call__(self) -> None:
        assert self._todo is not None
        try:
            self.set_result(self._todo())
        except BaseException as error:  # noqa: BLE001 - it travels to the caller
            self.error = error

    def clear(self) -> None:
        self._todo = None
        super().clear()


class Bridge:
    """Runs blocking functions in its own threads, for any event loop.

    Threads are reused, and only context variables follow the caller. So a function that
    needs other thread-local state (grad mode, the current device) sets it itself.
    """

    def __init__(self, *, threads: int, name: str) -> None:
        self._name = name
        self._threads = threads
        # Starts a thread only when work comes and none is idle.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._works: set[Future[None]] = set()
        self._cancelling = 0
        self._closed = False

    @property
    def free(self) -> bool:
        """Whether a thread could begin with another call at once."""
        return not self._closed and len(self._works) < self._threads

    async def run(self, fn: Callable[[*Args], T], *args: *Args) -> T:
        """Call ``fn(*args)`` in a thread; return or raise what it does.

        If cancelled before a thread has taken the call, the call is never made. If
        cancelled later, this waits until the thread has ended, then drops its result;
        an exception becomes the cancellation's cause. Further cancels in between are
        absorbed. Either way the bridge keeps no reference to the arguments.

        Raises:
            ClosedError: the bridge is closed, or was closed before the call's turn.
        """
        call = _Call.of(fn, *args)
        del fn, args  # or an error raised from here would hold them
        work = self._submit(call)
        cancel = None
        try:
            try:
                await _end_of(work)
            except asyncio.CancelledError as error:
                call.called_off = True
                # A call that no thread has taken yet can still be withdrawn.
                cancel = error if work.cancel() else await self._absorb(work, error)
            if cancel is not None:
                if call.error is not None:
                    told = "%s: a cancelled call failed"
                    logger.debug(told, self._name, exc_info=call.error)
                raise cancel from call.error
            if work.cancelled():
                raise ClosedError(self._name)
            return call.result()
        finally:
            work.cancel()  # only a coroutine that its loop has dropped still has work
            self._works.discard(work)
            call.clear()
            del cancel  # or it would keep itself alive through this frame

    async def run_apart(self, fn: Callable[[*Args], T], *args: *Args) -> T:
        """Call ``fn(*args)``, a wait that nothing can end, in its own daemon thread.

        If cancelled, or when the bridge closes, this ends at once. The thread is left
        behind with its arguments, and its result is dropped.

        Raises:
            ClosedError: the bridge is closed, or was closed before the thread ended.
        """
        if self._closed:
            raise ClosedError(self._name)
        call = _Call(functools.partial(contextvars.copy_context().run, fn, *args))
        ended: Future[None] = Future()
        thread = start_daemon(f"{self._name}-apart", _end_into, call, ended)
        self._works.add(ended)
        try:
            await _end_of(ended)
            if ended.cancelled():
                raise ClosedError(self._name)
            return call.result()
        finally:
            self._works.discard(ended)
            if ended.cancel():
                leave_behind(thread)
            else:
                call.clear()

    def post(self, fn: Callable[[*Args], object], *args: *Args) -> None:
        """Call ``fn(*args)`` in a thread without waiting; log its failure.

        The call is made in any case. Threads still make the calls that `close` finds in
        the queue. After that a new thread makes the call, or the calling thread if it
        runs no event loop.
        """
        once: list[Callable[[], object]] = [functools.partial(fn, *args)]

        def todo() -> None:
            # Where no thread can be started, it is in the queue all the same.
            while once:
                call = once.pop()
                try:
                    call()
                except Exception:
                    logger.exception("%s: posted work failed", self._name)

        try:
            self._pool.submit(todo)
        except RuntimeError:  # shut down
            with suppress(RuntimeError, StagingError):
                asyncio.get_running_loop()
                start_daemon(f"{self._name}-late", todo)
                return
            todo()  # no loop runs here, or no thread can be started

    def begin(self, fn: Callable[[*Args], T], *args: *Args) -> Future[T]:
        """Call ``fn(*args)`` as `post` does; return what will have its result or error.

        No cancel loses the result: ``await run(future.result)`` waits for it.
        """
        begun: Future[T] = Future()

        def call() -> None:
            try:
                begun.set_result(fn(*args))
            except BaseException as error:  # noqa: BLE001 - it travels to the caller
                begun.set_exception(error)

        self.post(call)
        return begun

    def refuse(self) -> None:
        """Refuse new calls, and fail those that no thread has taken; posts go on."""
        self._closed = True
        for work in tuple(self._works):
            work.cancel()

    def close(self, *, wait: bool = True) -> None:
        """Refuse new calls, fail those that no thread has taken, let the rest end.

        With ``wait``, block until the last thread has ended.
        """
        self.refuse()
        # Not cancel_futures: it would drop what was posted.
        self._pool.shutdown(wait=wait)

    async def aclose(self, *, timeout: float) -> None:
        """Close without blocking the loop; threads still make the posted calls.

        Returns when the last thread has ended. After ``timeout`` seconds it returns
        with a warning that a thread is left. If cancelled, the bridge closes as well.
        """
        self.refuse()
        ended: Future[None] = Future()
        close = _Call(self.close)
        closer = start_daemon(f"{self._name}-closer", _end_into, close, ended)
        try:
            async with asyncio.timeout(timeout):
                await _end_of(ended)
        except TimeoutError:
            logger.warning(
                "%s: a thread still works; it was not waited for", self._name
            )
        else:
            while closer.is_alive():  # noqa: ASYNC110 - a moment; joining it would block
                await asyncio.sleep(0)

    def statistics(self) -> BridgeStatistics:
        """Count the calls that run and those that wait for a thread."""
        works = tuple(self._works)
        running = sum(work.running() for work in works)
        done = sum(work.done() for work in works)
        waiting = max(0, len(works) - running - done)
        return BridgeStatistics(self._threads, running, waiting, self._cancelling)

    def _submit(self, call: _Call[T]) -> Future[None]:
        if self._closed:
            raise ClosedError(self._name)
        try:
            work = self._pool.submit(call)
        except RuntimeError as error:
            call.clear()  # it may be in the queue all the same
            if (failure := _no_thread(error)) is not None:
                raise failure from error
            # Shut down, or the interpreter is ending.
            raise ClosedError(self._name) from error
        self._works.add(work)
        return work

    async def _absorb(
        self, work: Future[None], cancel: asyncio.CancelledError
    ) -> asyncio.CancelledError:
        """Wait until ``work`` has ended; return the last cancel that came meanwhile."""
        self._cancelling += 1
        try:
            # A cancelled anyio scope repeats its cancel on every iteration of the
            # loop; shielded from it, the loop sleeps. So a later cancel is a native
            # one, and is the one to raise: the scope would swallow its own, and some
            # versions of anyio the native one with it.
            with anyio.CancelScope(shield=True):
                while not work.done():
                    try:
                        await _end_of(work)
                    except asyncio.CancelledError as again:
                        cancel = again
            return cancel
        finally:
            self._cancelling -= 1
            del cancel  # or it would keep itself alive through this frame


async def obtain(
    bridge: Bridge, make: Callable[[], T], drop: Callable[[T], object]
) -> T:
    """Return the result of ``make()``, a resource that must be released.

    ``make`` runs in a thread of the bridge. `Bridge.run` drops the result of a call
    whose caller was cancelled. This function passes it to ``drop``, on the event loop.
    """
    made: list[T] = []
    try:
        await bridge.run(lambda: made.append(make()))
    except BaseException:
        for each in made:
            drop(each)
        made.clear()  # or the error's traceback would keep it
        raise
    return made.pop()


def run_in_thread(name: str, fn: Callable[[*Args], T], *args: *Args) -> T:
    """Return or raise what ``fn(*args)`` does in a new thread; blocks meanwhile."""
    call = _Call(functools.partial(fn, *args))
    try:
        start_daemon(name, call).join()
        return call.result()
    finally:
        call.clear()  # or an error would refer to itself, through this frame


def run_interruptibly(name: str, fn: Callable[[], T], left: threading.Event) -> T:
    """Return or raise what ``fn()`` does in a new thread, for a caller that may block.

    If a signal's handler raises, or the caller is cancelled (see `IS_CANCELLED`), the
    call may ask for that, and has a second to end. After that, the thread is left
    behind, and its result is dropped.

    Args:
        name: The thread's name.
        fn: The call.
        left: Set when the thread is left behind. Then all calls with this event end.

    Raises:
        WorkCancelledError: the caller is cancelled, or ``left`` is set.
    """
    call, ended = _Call.of(fn), Future[None]()
    thread: threading.Thread | None = None
    try:
        try:
            thread = start_daemon(name, _end_into, call, ended)
            while wait([ended], _ASKED_EVERY_S).not_done:
                raise_if_cancelled()
                if left.is_set():
                    raise WorkCancelledError("another call was interrupted")
        except StagingError:  # the system refuses threads
            ended.set_result(None)
            return fn()
        except BaseException:
            call.called_off = True
            if not left.is_set():
                wait([ended], _TO_END_S)
            raise
        return call.result()
    finally:
        if ended.cancel():
            left.set()
            if thread is not None:  # or an interrupt came while it was started
                leave_behind(thread)
        else:
            call.clear()


class SerialThread:
    """One thread that makes calls in order, for a caller that may block."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._calls: list[Future[object]] = []

    def call(self, fn: Callable[[*Args], object], *args: *Args) -> None:
        """Call ``fn(*args)`` in the thread, after all earlier calls."""
        self._calls.append(self._pool.submit(fn, *args))

    def wait(self) -> None:
        """Wait for all calls; raise the error of the first one that failed."""
        calls, self._calls = self._calls, []
        for each in calls:
            each.result()

    def close(self) -> None:
        """Drop the calls that have not begun, and end the thread. Idempotent."""
        self._pool.shutdown(cancel_futures=True)


def share_out(
    work: Callable[[T], object], items: Sequence[T], *, at_once: int | None = None
) -> None:
    """Call ``work(item)`` for every item in a few threads, and wait for them.

    It is for a caller that may block, and for work that releases the interpreter lock.
    There are up to four threads, and no more than cores, or else ``at_once``.
    If the system refuses threads, fewer of them do all the work, or the caller does.

    Raises:
        BaseException: what ``work`` raised, or an interrupt of the caller. No thread
            works any more then. After an interrupt all items are done, unless it came
            while threads were being started.
    """
    waiting, errors = iter(items), list[BaseException]()
    most = at_once or min(_MAX_COPY_THREADS, usable_cores())
    threads = list[threading.Thread]()
    called_off, interrupted = threading.Event(), threading.Event()
    outer = IS_CANCELLED.get() or bool  # which is False

    def run() -> None:
        IS_CANCELLED.set(lambda: interrupted.is_set() or outer())
        try:
            for item in waiting:
                if called_off.is_set():
                    return
                work(item)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    try:
        for _ in range(min(most, len(items))):
            with suppress(StagingError, RuntimeError):
                threads.append(start_daemon("aiockpt-share", run))
    except BaseException as interrupt:  # noqa: BLE001 - raised below
        called_off.set()  # for a thread that has just begun, and is not in the list
        errors.append(interrupt)
    if not threads and not errors:
        contextvars.copy_context().run(run)
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as interrupt:  # noqa: BLE001 - raised below
                errors.append(interrupt)
                interrupted.set()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # or its traceback and this frame would keep each other


def _no_thread(error: RuntimeError) -> StagingError | None:
    """Return the error to raise if the system has refused a thread, else None."""
    if _NO_THREAD not in str(error) or "shutdown" in str(error):
        return None
    return StagingError(
        f"no thread can be started on this host: {error}; raise `ulimit -u`, or "
        "pids.max of the cgroup"
    )


def _end_into(call: _Call[T], ended: Future[None]) -> None:
    call()
    try:
        ended.set_result(None)
    except InvalidStateError:  # nobody waits any more
        call.clear()


def _end_of(work: Future[None]) -> asyncio.Future[None]:
    """Return a future of the running loop that is done when ``work`` has ended."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: Future[None]) -> None:
        # A closed loop has nobody to wake.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, woken)

    work.add_done_callback(wake)
    return woken


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
