"""A controller trains in one process; others answer requests with what it learns."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import ClientSession

PARTS = Path(__file__).with_name("orchestrator_parts")


@asynccontextmanager
async def running(part: str, *lines: str) -> AsyncIterator[tuple[Process, str]]:
    call = (sys.executable, str(PARTS / f"{part}.py"))
    process = await asyncio.create_subprocess_exec(*call, stdin=PIPE, stdout=PIPE)
    try:
        yield process, await say(process, *lines)
    finally:  # also if a deadline or a cancel ends the block
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def say(process: Process, *lines: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.writelines(f"{line}\n".encode() for line in lines)
    return (await process.stdout.readline()).decode().strip()


async def until_served(session: ClientSession, url: str, step: int) -> int:
    served = 0
    while served != step:
        async with session.post(url, json=[1.0] * 64) as answer:
            served = (await answer.json())["step"]
    return served


async def main() -> None:
    async with (
        asyncio.timeout(90),
        ClientSession() as session,
        running("trainer") as (trainer, metadata),
        running("worker", metadata) as (_, kept),
    ):
        async with running("worker", metadata) as (_, other):
            for step in (1, 2, 3):
                print(await say(trainer, ""))
                for url in (kept, other):
                    print(url, "serves step", await until_served(session, url, step))
        print(await say(trainer, ""), "while a worker is gone")
        async with running("worker", metadata) as (_, again):
            print(again, "is new, and serves", await until_served(session, again, 4))


if __name__ == "__main__":
    asyncio.run(main())
