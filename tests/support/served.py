"""A process that serves a state dict until it is killed: ``served.py PORT TOKEN``."""

from __future__ import annotations

import asyncio
import sys

from transports import transport, weights

MIB_SERVED = 64


async def main(port: int, token: str) -> None:
    """Serve step 1, and say so."""
    async with transport(port=port, token=token) as sender:
        await sender.send_checkpoint([], 1, weights(mib=MIB_SERVED))
        print(sender.address(), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
