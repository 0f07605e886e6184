"""A received checkpoint that waits beside its template until it is applied."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from aiockpt.errors import LocalProtocolError
from aiockpt.events import TransferEvent, emit
from aiockpt.transfer.destination import Destination

T = TypeVar("T")


class Prepared(Generic[T]):
    """A verified checkpoint in host memory, to be copied into its template later.

    `HTTPTransport.prepare` and ``follow(prepare=True)`` return it. Until it is applied,
    the template is unchanged and may serve. After that, or after `discard`, the memory
    is free again. It also becomes free if you drop the object.

    Attributes:
        step: The step of the checkpoint.
        nbytes: The bytes that `apply` copies. Chunks that the template has already do
            not count. Of a template with DTensors, or with tensors of inference mode,
            all chunks count.
    """

    def __init__(
        self, step: int, template: T, destination: Destination, writes: Sequence[int]
    ) -> None:
        self.step = step
        self.nbytes = destination.nbytes_to_load
        self._waiting: tuple[Destination, T] | None = destination, template
        self._writes = writes  # to the template, when it was compared
        self._turn = threading.Lock()  # two threads may apply it at once
        destination.reuse = None  # frees the description of what the receiver held

    def __repr__(self) -> str:
        done = "" if self._waiting is not None else " (applied or discarded)"
        return f"<Prepared step={self.step} nbytes={self.nbytes}{done}>"

    def apply(self) -> T:
        """Copy the checkpoint into the template; return the template.

        Blocks for about as long as a copy of `nbytes` takes, and waits for the copies
        to devices. Call it from any thread while nothing uses the template. Only a
        device that fails can interrupt it half way, or an exception that a signal's
        handler raises, as Ctrl-C does; a note of the error says so.

        After an error the checkpoint is discarded, so prepare it again.

        Raises:
            LocalProtocolError: it was applied or discarded before; or a tensor of the
                template was replaced, or has other memory; or the template was written
                to since the checkpoint was prepared with ``have=True``. The template
                is unchanged, unless another thread replaced the tensor during the
                copy. PyTorch does not count what is written through ``.data``.
            StagingError: a device has failed during the copy.
        """
        with self._applying() as (destination, template):
            destination.load_now()
        return template

    async def apply_async(self) -> T:
        """Do what `apply` does without blocking the event loop.

        If cancelled while it waits for the devices' earlier work, the template is
        unchanged and the checkpoint is discarded. If cancelled later, the copy goes on
        to its end.

        Raises:
            ClosedError: the transport was shut down.
            LocalProtocolError, StagingError: see `apply`.
        """
        with self._applying() as (destination, template):
            await destination.load()
        return template

    def discard(self) -> None:
        """Free the memory; the template stays as it is. Idempotent."""
        if (waiting := self._taken()) is not None:
            destination, _ = waiting
            destination.abandon()
            destination.discard(late=False)

    def _taken(self) -> tuple[Destination, T] | None:
        with self._turn:
            waiting, self._waiting = self._waiting, None
        return waiting

    @contextmanager
    def _applying(self) -> Iterator[tuple[Destination, T]]:
        if (waiting := self._taken()) is None:
            raise LocalProtocolError(f"{self!r} has nothing to apply any more")
        destination, _ = waiting
        started = time.monotonic()
        try:
            # Chunks that were found in the template must still be there.
            load = destination.template_load
            if load and load.loaded and destination.writes() != self._writes:
                raise LocalProtocolError(
                    f"the template was changed after step {self.step} was compared "
                    "with it: prepare the step again"
                )
            yield waiting
        except BaseException as error:
            done = "was modified" if destination.touched else "was not modified"
            error.add_note(f"the template {done}")
            destination.abandon()
            destination.discard(late=True)
            raise
        emit(
            TransferEvent(
                stop="apply",
                step=self.step,
                nbytes=self.nbytes,
                seconds=time.monotonic() - started,
                level=logging.INFO,
            )
        )
