"""A trainer refreshes two engines while they serve; an engine and it are killed."""

import asyncio
import json
import os
import secrets
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import create_server

PARTS = Path(__file__).with_name("rl_refresh_parts")
os.environ["PYTHONPATH"] = f"{PARTS}:{os.environ.get('PYTHONPATH', PARTS)}"
TOKEN = secrets.token_urlsafe()  # all of them know it


@asynccontextmanager
async def running(part: str, *args: str) -> AsyncIterator[tuple[Process, str]]:
    call = (sys.executable, str(PARTS / f"{part}.py"), *args)
    process = await asyncio.create_subprocess_exec(*call, stdin=PIPE, stdout=PIPE)
    try:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def until_version(name: str, engine: Process, version: int) -> int:
    assert engine.stdin is not None
    assert engine.stdout is not None
    while True:
        engine.stdin.write(b"\n")
        answer = json.loads(await engine.stdout.readline())
        assert answer["whole"], "this request was served by a torn model"
        if answer["version"] >= version:
            pause = 1e3 * answer["pause"]
            print(f"{name}: version {answer['version']}, paused {pause:.1f} ms")
            return int(answer["version"])


async def losses(trainer: Process, count: int) -> tuple[int, float]:
    assert trainer.stdout is not None
    for _ in range(count):
        line = (await trainer.stdout.readline()).decode().split()
    return int(line[1]), float(line[-1])


async def main() -> None:
    with create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryDirectory() as tmp:
        how = (str(free.getsockname()[1]), TOKEN, f"{tmp}/save")
        free.close()
        async with (
            running("trainer", *how) as (trainer, metadata),
            running("engine", metadata, TOKEN) as (kept, _),
        ):
            async with running("engine", metadata, TOKEN) as (killed, _):
                version, first = await losses(trainer, 1)
                await until_version("engine 1", kept, version)
                await until_version("engine 2", killed, version)
            async with running("engine", metadata, TOKEN) as (new, _):
                version, _ = await losses(trainer, 2)
                await until_version("engine 2, which was killed", new, version)
                trainer.kill()
                print("the trainer was killed; version", version, "serves on")
                await until_version("engine 1", kept, version)
                async with running("trainer", *how) as (again, _):
                    version, last = await losses(again, 4)
                    print(f"it came back; loss {first:.2f} -> {last:.2f}")
                    await until_version("engine 1", kept, version)
                    await until_version("engine 2", new, version)
                    assert last < first


if __name__ == "__main__":
    asyncio.run(main())
