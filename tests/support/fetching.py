"""A process that receives what ``served.py`` serves: ``fetching.py METADATA TOKEN``.

It says so when a tenth has arrived, and how it ended.
"""

from __future__ import annotations

import asyncio
import sys

from aiockpt import AiockptError, Progress
from aiockpt.testing import assert_same
from served import MIB_SERVED
from transports import transport, weights


class Telling:
    """A ``progress`` that says once that there is some."""

    said = False

    def __call__(self, progress: Progress) -> None:
        if not self.said and progress.bytes_done > progress.bytes_total / 10:
            self.said = True
            print("receiving", flush=True)


async def main(metadata: str, token: str, stall_timeout: float) -> None:
    """Receive, and look at every byte."""
    async with transport(token=token, stall_timeout=stall_timeout) as receiver:
        got = await receiver.recv_checkpoint(0, metadata, 1, 60, progress=Telling())
    assert_same(got, weights(mib=MIB_SERVED))
    print("received", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
    except AiockptError as error:
        print(f"failed {type(error).__name__}", flush=True)
