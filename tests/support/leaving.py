"""A program that ends in the middle: ``leaving.py HOW METADATA TOKEN``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from transports import transport, weights

CODE = 7


async def main(how: str, metadata: str, token: str) -> None:
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
    asyncio.run(main(*sys.argv[1:]))
