"""A controller trains in one process; others answer requests with what it learns."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from aiohttp import ClientSession

PARTS = Path(__file__).with_name("orchestrator_parts")


async def start(part: str, *lines: str) -> tuple[Process, str]:
    program = str(PARTS / f"{part}.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, stdin=PIPE, stdout=PIPE
    )
    return process, await say(process, *lines)


async def say(process: Process, *lines: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.writelines(f"{line}\n".encode() for line in lines)
    return (await process.stdout.readline()).decode().strip()


async def serves(session: ClientSession, url: str, step: int) -> int:
    """Return how many requests were answered before this step answered one."""
    asked = 0
    while True:
        async with session.post(url, json=[1.0] * 64) as answer:
            if (await answer.json())["step"] == step:
                return asked
        asked += 1


async def main() -> None:
    (trainer, metadata) = await start("trainer")
    starting = (start("worker", metadata) for _ in range(2))
    workers = dict(await asyncio.gather(*starting))
    async with ClientSession() as session, asyncio.timeout(60):
        for step in (1, 2, 3):
            print(await say(trainer, ""))
            asking = [serves(session, url, step) for url in workers.values()]
            print("answered meanwhile:", *await asyncio.gather(*asking))
        killed, _ = workers.popitem()
        killed.kill()
        await killed.wait()
        print(await say(trainer, ""))
        again, url = await start("worker", metadata)
        await serves(session, url, 4)
        print("a worker that was killed is back, with step 4")
    for process in (again, *workers, trainer):
        await process.communicate(b"")  # the end of its stdin ends it


if __name__ == "__main__":
    asyncio.run(main())
