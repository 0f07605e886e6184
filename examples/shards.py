"""4 FSDP ranks train; 2 engines of another mesh follow them, and check each version."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from socket import create_server

import aiockpt

PARTS = Path(__file__).with_name("shards_parts")
TRAINERS, ENGINES, VERSIONS = 4, 2, 4


def stop(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


async def started(
    stack: AsyncExitStack, part: str, ranks: int, *args: str
) -> list[Process]:
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # no trace for each lost connection
    call = (sys.executable, str(PARTS / f"{part}.py"), *args)
    found = []
    for rank in range(ranks):
        process = await asyncio.create_subprocess_exec(
            *call, env=env | {"RANK": f"{rank}"}, stdin=PIPE, stdout=PIPE
        )
        stack.push_async_callback(process.communicate)
        stack.callback(stop, process)
        found.append(process)
    return found


async def said(ranks: list[Process]) -> list[str]:
    lines = []
    for each in ranks:
        assert each.stdout is not None
        lines.append((await each.stdout.readline()).decode().strip())
    assert all(lines), "a rank has ended"
    return lines


async def main() -> None:
    async with AsyncExitStack() as stack:
        trainers = await started(stack, "trainer", TRAINERS)
        # One string names all trainers. Nobody gathers anything.
        joined = aiockpt.join_metadata(await said(trainers))
        engines = await started(stack, "engine", ENGINES, joined, f"{VERSIONS}")
        for version in range(1, VERSIONS + 1):
            print("trained:", (await said(trainers))[0])
            for number, line in enumerate(await said(engines), 1):
                print(f"  engine {number}: {line}")
            for each in trainers if version < VERSIONS else ():
                assert each.stdin is not None
                each.stdin.write(b"\n")  # the next version, please
        for number, line in enumerate(await said(engines), 1):
            print(f"then a bit of engine 2 flips; engine {number}: {line}")


if __name__ == "__main__":
    asyncio.run(main())
