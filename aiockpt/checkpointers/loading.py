"""A load that can be cancelled: the thread that reads is told, and is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.errors import MissingKeysError
from aiockpt.runtime.bridge import Bridge

__all__ = ["load"]


class _CalledOffError(Exception):
    """Ends the reading from within; nobody but this module sees it."""


class _Switch:
    """Passes on how many bytes were read, until the load is called off."""

    def __init__(self, report: Callable[[int], None] | None) -> None:
        self.off = False
        self._report = report

    def __call__(self, nbytes: int) -> None:
        if self.off:
            raise _CalledOffError
        if self._report is not None:
            self._report(nbytes)


async def load(
    bridge: Bridge,
    reader: CheckpointReader,
    path: Any,
    state_dict: Any,
    *,
    strict: bool,
    on_bytes: Callable[[int], None] | None = None,
    **options: Any,
) -> Any:
    """Return what the reader reads in a thread.

    If cancelled, it ends when the thread has ended, which is soon: nothing is written
    to the caller's tensors afterwards.
    """
    switch = _Switch(on_bytes)
    read = partial(
        reader.read, path, state_dict, strict=strict, on_bytes=switch, **options
    )
    loop = asyncio.get_running_loop()
    reading = loop.create_task(bridge.run(read))
    try:
        await asyncio.wait({reading})
    except asyncio.CancelledError:
        switch.off = True
        await _outlast(reading)
        raise
    loaded, missing = reading.result()
    if strict and missing:  # a reader of one's own may leave that to us
        raise MissingKeysError(str(path), missing)
    return loaded


async def _outlast(reading: asyncio.Task[Any]) -> None:
    while not reading.done():
        try:
            await asyncio.wait({reading})
        except asyncio.CancelledError:
            continue  # the first one is raised in the end
    if not reading.cancelled():
        reading.exception()  # it counts as seen
