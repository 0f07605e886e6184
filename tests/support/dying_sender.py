"""Senders that are in the middle of a call when they are killed: ``dying_sender.py``.

It prints where they are, as JSON by the name of the call, and makes the calls when it
reads a line: what holds them up is a reader, or the look at a state dict. It prints
which of them have returned, and waits.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tests.support.transports import (
    COUNT,
    MIB_SENT,
    Transport,
    lends,
    transport,
    weights,
)

MIB_OFFERED = 16

Call = Callable[[Transport], Coroutine[Any, Any, object]]


def send(sender: Transport) -> Coroutine[Any, Any, object]:
    """Send something else."""
    return sender.send_checkpoint([], 2, weights())


CALLS: dict[str, Call] = {
    "": lambda it: it.start(),
    "share=True": lambda it: it.start(),
    "start": lambda it: it.start(),
    "send_checkpoint": send,
    "send_checkpoint, zero_copy=True": send,
    "send_checkpoint, Server(process=True)": send,
    "allow_checkpoint": lambda it: it.allow_checkpoint(2),
    "disallow_checkpoint": lambda it: it.disallow_checkpoint(),
    "shutdown": lambda it: it.shutdown(),
}
"""What each of them is in the middle of; the first two are received from."""

RECEIVED_FROM = ("", "share=True")


def made(name: str) -> Transport:
    """Make a transport that waits for its readers, as those of live memory do."""
    options: dict[str, Any] = {"grace": 600, "insecure": True, "timeout": 600}
    if "process" in name:
        options |= {"process": True, "keep_last": 60}
    elif name not in (*RECEIVED_FROM, "start", "send_checkpoint"):
        options["zero_copy"] = True
    return transport(same_host=lends(name), **options)


def stage_for_ever(sender: Transport) -> None:
    """Let whatever is sent from now on be looked at for ever."""
    sender._stager._describe = lambda _: time.sleep(600)  # type: ignore[assignment,method-assign,return-value]


async def main() -> None:
    """Offer, wait for a word, and make the calls."""
    senders = {name: made(name) for name in CALLS}
    for name, sender in senders.items():
        if name in RECEIVED_FROM:
            await sender.send_checkpoint([], 1, weights(mib=MIB_SENT, count=COUNT))
        elif name != "start":
            await sender.send_checkpoint([], 1, weights(mib=MIB_OFFERED))
    for name, sender in senders.items():
        if name.startswith("send_checkpoint") and "zero_copy" not in name:
            stage_for_ever(sender)
    urls = {name: sender.address() for name, sender in senders.items()}
    print(json.dumps(urls), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    calls = {
        name: asyncio.create_task(CALLS[name](sender))
        for name, sender in senders.items()
    }
    await asyncio.wait(calls.values(), timeout=0.2)
    returned = sorted(name for name, call in calls.items() if call.done())
    print(json.dumps(returned), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
