"""Ends of a transfer in processes of their own, which may be killed and stopped.

``senders.py serve PORT TOKEN`` serves a state dict until it is killed; ``senders.py
fetch METADATA TOKEN STALL_TIMEOUT`` receives it, and says when a tenth has arrived and
how it ended; ``senders.py leave HOW METADATA TOKEN`` ends in the middle of that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiockpt import AiockptError, Progress
from aiockpt.testing import assert_same
from tests.support.ranks import process
from tests.support.transports import transport, weights

__all__ = ["CODE", "MIB_SERVED", "TOKEN", "serving_process"]

CODE = 7
MIB_SERVED = 64
TOKEN = "secret"


@asynccontextmanager
async def serving_process(port: int = 0) -> AsyncIterator[tuple[Process, str]]:
    """Start a sender; yield it and its address when it serves."""
    async with process(__file__, "serve", str(port), TOKEN) as started:
        assert started.stdout is not None
        address = (await started.stdout.readline()).decode().strip()
        assert address, "the sender did not start"
        yield started, address


# What the processes do.


async def serve(port: str, token: str) -> None:
    """Serve step 1, and say so."""
    async with transport(port=int(port), token=token) as sender:
        await sender.send_checkpoint([], 1, weights(mib=MIB_SERVED))
        print(sender.address(), flush=True)
        await asyncio.Event().wait()


class Telling:
    """A ``progress`` that says once that there is some."""

    said = False

    def __call__(self, progress: Progress) -> None:
        if not self.said and progress.bytes_done > progress.bytes_total / 10:
            self.said = True
            print("receiving", flush=True)


async def fetch(metadata: str, token: str, stall_timeout: str) -> None:
    """Receive, and look at every byte."""
    options = {"token": token, "stall_timeout": float(stall_timeout)}
    async with transport(**options) as receiver:
        got = await receiver.recv_checkpoint(0, metadata, 1, 60, progress=Telling())
    assert_same(got, weights(mib=MIB_SERVED))
    print("received", flush=True)


async def leave(how: str, metadata: str, token: str) -> None:
    """Be in the middle of a receive, offer something, and leave."""
    peer = transport(token=token)
    await peer.send_checkpoint([], 2, weights(mib=8))
    started = asyncio.Event()
    receiving = asyncio.create_task(
        peer.recv_checkpoint(0, metadata, 1, progress=lambda _: started.set())
    )
    await started.wait()
    print("leaving", flush=True)
    match how:
        case "exit":
            sys.exit(CODE)
        case "raise":
            raise LookupError("the program's own")
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            await receiving
        case "shutdown":
            await peer.shutdown()
            await asyncio.wait({receiving})
            receiving.exception()
    # else it just returns: nothing was shut down


if __name__ == "__main__":
    does: dict[str, Any] = {"serve": serve, "fetch": fetch, "leave": leave}
    try:
        asyncio.run(does[sys.argv[1]](*sys.argv[2:]))
    except AiockptError as error:
        print(f"failed {type(error).__name__}", flush=True)
