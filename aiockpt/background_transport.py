"""BackgroundTransport: the HTTP transport for programs without an event loop."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic

from aiockpt.http_transport import HTTPTransport
from aiockpt.memory.device import PortFor, marked, port_for
from aiockpt.runtime.background import (
    Background,
    blocking,
    direct,
    iterating,
    takes_arguments_of,
)
from aiockpt.transport import T


class BackgroundTransport(Background[HTTPTransport[T]], Generic[T]):
    """Sends and receives without an event loop; any thread may use it.

    It serves from its own thread, for as long as the program runs or until
    :meth:`shutdown`. Use it as a context manager: the end of the block shuts it down.
    If an exception ends the block, receivers get no grace period.

    The verbs are those of :class:`.HTTPTransport`, and each one blocks until it is
    done. What their descriptions say of a cancelled call is true of a call that Ctrl-C
    interrupts. ``progress`` is called in the transport's thread. :meth:`follow` and
    :meth:`steps` return a :class:`.BlockingIterator`. Call :meth:`.Prepared.apply` in
    your own thread. A forked child needs a transport of its own.

    Args:
        transport: The transport that does the work. Nothing else may use it.
    """

    def __init__(
        self, transport: HTTPTransport[T], *, ports: PortFor = port_for
    ) -> None:
        super().__init__(
            transport,
            "the transport",
            at_exit=partial(transport.shutdown, wait=False),
            entered=lambda: marked(ports),
        )

    start = blocking(HTTPTransport[T].start)
    metadata = direct(HTTPTransport[T].metadata)
    grant = direct(HTTPTransport[T].grant)
    address = direct(HTTPTransport[T].address)
    send_checkpoint = blocking(HTTPTransport[T].send_checkpoint)
    allow_checkpoint = blocking(HTTPTransport[T].allow_checkpoint)
    disallow_checkpoint = blocking(HTTPTransport[T].disallow_checkpoint)
    recv_checkpoint = blocking(HTTPTransport[T].recv_checkpoint)
    prepare = blocking(HTTPTransport[T].prepare)
    fingerprint = blocking(HTTPTransport[T].fingerprint)
    follow = iterating(HTTPTransport[T].follow)
    steps = iterating(HTTPTransport[T].steps)
    statistics = direct(HTTPTransport[T].statistics)

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Stop serving, close everything, and end the thread. Idempotent.

        Calls that still run in other threads fail with ``ClosedError``. If interrupted,
        the shutdown continues, and a later call waits for it.

        Args:
            wait: Give receivers that still read the grace period.
        """
        self._end(partial(self._source.shutdown, wait=wait))


@takes_arguments_of(HTTPTransport)
def make_background_transport(
    *arguments: Any, **options: Any
) -> BackgroundTransport[Any]:
    """Return a transport for programs without an event loop.

    The arguments and errors are those of :class:`.HTTPTransport`.
    """
    return BackgroundTransport(HTTPTransport(*arguments, **options))
