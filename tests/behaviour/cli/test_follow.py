"""``aiockpt follow``: each newer step becomes a file, whatever the trainer does."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aiockpt import Auth, HTTPTransport, Server
from tests.support.commandline import ENVIRONMENT, PATIENCE, Commands, aiockpt_command
from tests.support.ports import free_port
from tests.support.saving import names

TOKEN = ("--token", "both-know-it")

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio]


@asynccontextmanager
async def trainer(port: int = 0) -> AsyncIterator[HTTPTransport[object]]:
    """Give a sender that has the same token each time."""
    server = Server(host="127.0.0.1", port=port)
    auth = Auth(token=TOKEN[1])
    async with HTTPTransport[object](server=server, auth=auth) as sender:
        yield sender


async def publish(sender: HTTPTransport[object], step: int, value: int) -> None:
    """Publish a tensor of one value."""
    state = {"w": torch.full((1000,), value)}
    await sender.send_checkpoint(step=step, state_dict=state)


@asynccontextmanager
async def following(
    sender: HTTPTransport[object], place: Path, *options: str
) -> AsyncIterator[Process]:
    """Give a process that follows a sender; interrupt it."""
    process = await asyncio.create_subprocess_exec(
        *aiockpt_command("follow", sender.metadata(), "-o", place, *TOKEN, *options),
        env=ENVIRONMENT,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.communicate()


async def told(process: Process) -> Path:
    """Return the file that is complete now."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        line = await process.stdout.readline()
    assert line, await process.communicate()
    return Path(line.decode().rstrip("\n"))


async def test_each_step_is_a_file_until_it_is_interrupted(
    cli: Commands, tmp_path: Path
) -> None:
    """The one that is served, and the newer ones; nothing else is left behind."""
    place = tmp_path / "steps"
    async with trainer() as sender:
        await publish(sender, 3, 30)
        async with following(sender, place) as process:
            for step in (3, 5):
                if step > 3:
                    await publish(sender, step, 10 * step)
                file = await told(process)
                assert file == place / f"step-{step}.safetensors"
                assert load_file(file)["w"].unique().tolist() == [10 * step]
                await asyncio.to_thread(cli, "verify", file)
        assert process.returncode == 130
    assert names(place) == ["step-3.safetensors", "step-5.safetensors"]


async def test_a_trainer_that_starts_again_is_followed(tmp_path: Path) -> None:
    """The command goes on from the lower step of a restarted trainer."""
    port = free_port()
    async with trainer(port) as sender:
        await publish(sender, 7, 1)
        async with following(sender, tmp_path) as process:
            assert (await told(process)).name == "step-7.safetensors"
            await sender.shutdown(wait=False)
            async with trainer(port) as again:
                await publish(again, 4, 2)
                assert (await told(process)).name == "step-4.safetensors"


async def test_what_is_there_is_kept_or_refused(tmp_path: Path) -> None:
    """The same snapshot is not fetched twice; another one needs ``--overwrite``."""
    async with trainer() as sender:
        await publish(sender, 1, 1)
        async with following(sender, tmp_path) as process:
            file = await told(process)
        before = file.stat().st_mtime_ns
        async with following(sender, tmp_path) as process:
            assert await told(process) == file
        assert file.stat().st_mtime_ns == before
        await publish(sender, 1, 2)
        async with following(sender, tmp_path) as process:
            _, errors = await process.communicate()
        assert process.returncode == 1
        assert f"{file}: it is there already" in errors.decode()
        assert load_file(file)["w"].unique().tolist() == [1]
        async with following(sender, tmp_path, "--overwrite", "-q") as process:
            assert await told(process) == file
        assert load_file(file)["w"].unique().tolist() == [2]
