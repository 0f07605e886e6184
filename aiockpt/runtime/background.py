"""Proxies whose verbs block, made from an object whose verbs are coroutines.

A class of proxies names each verb once: ``save = blocking(AsyncCheckpointer.save)``.
The proxy's verb has the signature, the types and the docstring of the original. It runs
the original on the proxy's own loop, and blocks until that has ended.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import partial, update_wrapper
from types import MappingProxyType
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    get_type_hints,
)

from aiockpt.errors import ClosedError, LocalProtocolError
from aiockpt.runtime.sync_facade import Last, SyncFacade
from aiockpt.transport import Timeout, seconds

A = TypeVar("A", bound=AbstractAsyncContextManager[Any])
S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")

_CLOSING_S: Final = 5.0


class Background(AbstractContextManager[Any], Generic[A]):
    """The base of the proxies: owns the object, and the thread that runs its loop.

    Args:
        source: The object whose verbs are coroutines. Nothing else may use it.
        what: The name of the object, for messages.
        at_exit: Awaited for up to half a second when the interpreter ends, if nobody
            has closed the proxy.
        entered: Returns a context for each call, which the calling thread enters. Its
            context variables reach the verb.
    """

    def __init__(
        self,
        source: A,
        what: str,
        *,
        at_exit: Last,
        entered: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._source = source
        self._entered = entered
        self._facade = SyncFacade(what, at_exit=at_exit)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._source!r}>"

    def __del__(self) -> None:
        facade: SyncFacade | None = getattr(self, "_facade", None)
        if facade is not None and facade.is_ours and not facade.is_closed:
            name = type(self).__name__
            warnings.warn(
                f"a {name} was dropped and never closed, so its thread runs on until "
                "the program ends: use it in a 'with' block",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} belongs to this process: make one in each process")

    def __enter__(self) -> Self:
        try:
            self._run(self._source.__aenter__, math.inf, "start")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._facade.is_ours:  # or it is a forked child, which must end nothing
            self._end(partial(self._source.__aexit__, kind, error, trace))

    def _run(
        self, fn: Callable[[], Coroutine[Any, Any, R]], timeout: float, verb: str
    ) -> R:
        with self._entered():
            return self._facade.call(fn, timeout=timeout, phase=verb)

    def _end(self, end: Callable[[], Coroutine[Any, Any, R]]) -> R | None:
        """Await ``end()`` and end the thread. Idempotent.

        If interrupted, the end goes on, and a later call waits for it.
        """
        try:
            found = self._run(end, math.inf, "close")
        except Exception as error:  # such as a failed save, with `raise_on_failure`
            if isinstance(error, ClosedError) and self._facade.is_closed:
                return None  # an earlier call has ended it, or the interpreter's exit
            self._facade.close(_nothing, wait=_CLOSING_S)
            raise
        self._facade.close(_nothing, wait=_CLOSING_S)
        return found


class BlockingIterator(Iterator[R]):
    """An ordinary iterator, whose ``next()`` blocks until there is another value.

    Between two values nothing runs in the background, so you may leave the loop by
    ``break``, ``return`` or an exception, and drop the iterator. One thread at a time
    may use it.
    """

    def __init__(self, owner: Background[Any], source: AsyncIterator[R], verb: str):
        self._owner = owner
        self._source = source
        self._verb = verb
        self._waiting: asyncio.Task[Any] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<BlockingIterator {self._verb}{' closed' if self._closed else ''}>"

    def __next__(self) -> R:
        if self._closed:
            raise StopIteration
        try:
            return self._owner._run(self._advance, math.inf, self._verb)  # noqa: SLF001 - its own module
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the iterator. Idempotent.

        Another thread that waits in ``next()`` leaves its loop, as at the end of the
        values.
        """
        self._closed = True
        with suppress(ClosedError):
            self._owner._run(self._end, math.inf, self._verb)  # noqa: SLF001 - its own module

    async def _advance(self) -> R:
        if self._waiting is not None:
            raise LocalProtocolError(
                f"two threads use the same iterator: call {self._verb}() for each"
            )
        self._waiting = asyncio.current_task()
        try:
            return await anext(self._source)
        except asyncio.CancelledError:
            if self._closed:
                raise StopAsyncIteration from None
            raise
        finally:
            self._waiting = None

    async def _end(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
        if isinstance(self._source, AsyncGenerator):
            await self._source.aclose()


# ------------------------------------------------------------------------- the verbs


class _Bound:
    """A verb with its arguments. Its repr, in a traceback, must not show a token."""

    __slots__ = ("_args", "_options", "_source", "_verb")

    def __init__(self, source: Any, verb: Any, args: Any, options: Any) -> None:
        self._source = source
        self._verb = verb
        self._args = args
        self._options = options

    def __call__(self) -> Any:
        return self._verb(self._source, *self._args, **self._options)


def blocking(
    verb: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], **defaults: object
) -> Callable[Concatenate[Any, P], R]:
    """Return a verb of a `Background` that returns what ``await verb()`` does.

    If a signal's handler raises an exception, as Ctrl-C does, the coroutine is
    cancelled, and the call ends when the coroutine has ended.

    Args:
        verb: The coroutine function. If it takes ``**keywords``, its ``self`` must be
            positional-only: they might have one of that name.
        defaults: Defaults that differ from the original's, of keyword-only arguments.
    """
    names = [*inspect.signature(verb).parameters]
    timeout_at = names.index("timeout") - 1 if "timeout" in names else math.inf

    def call(self: Background[Any], /, *args: Any, **options: Any) -> Any:
        given: Timeout | None = options.get("timeout")
        if timeout_at < len(args):
            given = args[int(timeout_at)]
        bound = _Bound(self._source, verb, args, {**defaults, **options})
        del args, options  # a traceback with local variables would show the token
        limit = math.inf if given is None else seconds(given)
        return self._run(bound, limit, verb.__name__)

    return _dressed(call, verb, defaults)


def direct(
    verb: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Return a verb of a `Background` that returns what a plain ``verb()`` does.

    The verb runs on the loop, so that nothing changes meanwhile.
    """

    def call(self: Background[Any], /, *args: Any, **options: Any) -> Any:
        bound = _Bound(self._source, verb, args, options)
        del args, options
        return self._facade.ask(bound)

    return _dressed(call, verb)


def iterating(
    verb: Callable[Concatenate[S, P], AsyncIterator[R]],
) -> Callable[Concatenate[Any, P], BlockingIterator[R]]:
    """Return a verb of a `Background` that returns an ordinary iterator."""

    def call(self: Background[Any], /, *args: Any, **options: Any) -> Any:
        bound = _Bound(self._source, verb, args, options)
        del args, options
        return BlockingIterator(self, self._facade.ask(bound), verb.__name__)

    return _dressed(call, verb)


def takes_arguments_of(
    make: Callable[P, Any],
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function that passes all its arguments to ``make`` the signature of it."""

    def dressed(function: Callable[..., R]) -> Callable[P, R]:
        named: Any = function  # a type checker knows no attributes of a callable
        origin = vars(make)["__init__"] if isinstance(make, type) else make
        returned = get_type_hints(function)["return"]
        # What reads annotations finds their names where the origin was defined.
        named.__wrapped__ = origin
        named.__annotations__ = {**origin.__annotations__, "return": returned}
        signature = inspect.signature(make)
        named.__signature__ = signature.replace(return_annotation=returned)
        return function

    return dressed


def _dressed(
    call: Callable[..., Any],
    verb: Callable[..., Any],
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Give a proxy's verb the name, the docstring and the signature of the original."""
    update_wrapper(call, verb)
    signature = inspect.signature(verb)
    returned = str(signature.return_annotation)
    for kind in ("AsyncGenerator[", "AsyncIterator["):
        returned = returned.replace(kind, "BlockingIterator[")
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            each.replace(default=defaults.get(each.name, each.default))
            for each in signature.parameters.values()
        ],
        return_annotation=returned,
    )
    return call


async def _nothing() -> None:
    return
