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

from receivers import COUNT, MIB_SENT
from transports import Transport, transport, weights

MIB_OFFERED = 16

CALLS: dict[str, Callable[[Transport], Coroutine[Any, Any, object]]] = {
    "": lambda it: it.start(),
    "start": lambda it: it.start(),
    "send_checkpoint": lambda it: it.send_checkpoint([], 2, weights()),
    "send_checkpoint, zero_copy=True": lambda it: it.send_checkpoint([], 2, weights()),
    "allow_checkpoint": lambda it: it.allow_checkpoint(2),
    "disallow_checkpoint": lambda it: it.disallow_checkpoint(),
    "shutdown": lambda it: it.shutdown(),
}
"""What each of them is in the middle of; the one without a name is received from."""


def made(name: str) -> Transport:
    """Make a transport that waits for its readers, as those of live memory do."""
    zero_copy = name not in ("", "start", "send_checkpoint")
    return transport(grace=600, insecure=True, zero_copy=zero_copy, timeout=600)


def stage_for_ever(sender: Transport) -> None:
    """Let whatever is sent from now on be looked at for ever."""
    sender._offering._stager._describe = lambda _: time.sleep(600)  # type: ignore[assignment,method-assign,return-value]


async def main() -> None:
    """Offer, wait for a word, and make the calls."""
    senders = {name: made(name) for name in CALLS}
    for name, sender in senders.items():
        if not name:
            await sender.send_checkpoint([], 1, weights(mib=MIB_SENT, count=COUNT))
        elif name != "start":
            await sender.send_checkpoint([], 1, weights(mib=MIB_OFFERED))
    stage_for_ever(senders["send_checkpoint"])
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
