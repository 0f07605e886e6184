"""``aiockpt top``: it shows a sender and its members, once or until interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

import aiockpt.http
from tests.support.commandline import (
    ENVIRONMENT,
    PATIENCE,
    Commands,
    aiockpt_command,
)
from tests.support.servers import running
from tests.support.transports import CHUNK, TOKEN, Transport, transport

PAGE = Path(aiockpt.http.__file__).with_name("status.html")
CHUNKS = 10
STATE = {"w": torch.zeros(CHUNKS * CHUNK, dtype=torch.uint8)}

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio]


async def announce(sender: Transport, have: int) -> None:
    """Have two members, of which the second one complains of the first one."""

    async def post(lease: str, host: str, said: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}", "Aiockpt-Lease": lease}
        there = aiohttp.TCPConnector(local_addr=(host, 0))
        async with (
            aiohttp.ClientSession(connector=there, headers=headers) as session,
            session.post(f"{sender.address()}7/members", json=said) as answer,
        ):
            return await answer.json(content_type=None)

    member = {"url": "http://127.0.0.1:9/", "zone": "r\x1b[31m", "have": have}
    first = await post(f"{'a' * 32}; ttl=60", "127.0.0.1", member)
    member = {"url": "http://h:10/", "have": CHUNKS, "bad": [first["id"]]}
    await post(f"{'b' * 32}; ttl=60", "127.0.0.2", member)


async def test_one_snapshot_without_a_terminal(cli: Commands) -> None:
    """The table lists the members, and no word of theirs controls a terminal."""
    async with transport(token=TOKEN) as sender:
        await sender.send_checkpoint([], 7, STATE)
        await announce(sender, 4)
        url = sender.address()
        out, err = await asyncio.to_thread(cli, "top", f"{url}#{TOKEN}")
        refusal = await asyncio.to_thread(cli.error, "top", f"{url}#wrong")
    assert "the token" in refusal
    assert err == ""
    assert TOKEN not in out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == f"aiockpt  {url}"
    assert lines[1].startswith("step 7  size 6")
    assert lines[2] == "readers 0  waiting 0  sent 0 B  requests 3, 0 refused"
    assert lines[3] == "chunks given once 0 of 10  members 2"
    heads, first, second = lines[5:]
    assert " ".join(heads.split()) == "MEMBER ADDRESS ZONE HAS RECEIVES COMPLAINTS"
    bar = "[########------------]"
    place = "http://127.0.0.1:9/checkpoint/"
    assert first.split() == ["m1", place, r"r\x1b[31m", bar, "40%", "1"]
    place = "http://127.0.0.2:10/checkpoint/"
    assert second.split() == ["m2", place, f"[{'#' * 20}]", "100%", "0"]


async def test_without_a_swarm_or_a_checkpoint(cli: Commands) -> None:
    """The page is shorter, and says what is not there."""
    async with transport(swarm=False) as sender:
        await sender.start()
        shown, _ = await asyncio.to_thread(cli, "top", sender.metadata())
        assert "nothing is served now" in shown
        await sender.send_checkpoint([], 7, STATE)
        shown, _ = await asyncio.to_thread(cli, "top", sender.metadata())
        assert shown.count("\n") == 3


async def test_a_terminal_is_drawn_again_until_it_is_interrupted() -> None:
    """The command draws once a second, with rates."""
    ours, its = os.openpty()
    os.set_blocking(ours, False)
    async with transport(token=TOKEN) as sender:
        await sender.send_checkpoint([], 7, STATE)
        await announce(sender, 4)
        process = await asyncio.create_subprocess_exec(
            *aiockpt_command("top", f"{sender.address()}#{TOKEN}"),
            env=ENVIRONMENT,
            stdout=its,
            stderr=PIPE,
        )
        os.close(its)
        seen = b""
        try:
            async with asyncio.timeout(PATIENCE):
                while seen.count(b"\x1b[2J") < 3 or seen.count(b"B/s") < 4:
                    await announce(sender, min(5 + seen.count(b"\x1b[2J"), CHUNKS))
                    await asyncio.sleep(0.05)
                    try:
                        seen += os.read(ours, 1 << 16)
                    except BlockingIOError:
                        assert process.returncode is None
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
            os.close(ours)
    assert process.returncode == 130
    assert err == b""
    last = seen.decode().rpartition("\x1b[2J")[0].rpartition("\x1b[2J")[2]
    page = PAGE.read_text()
    facts = re.findall(r"fact\('([\w ]+)'", page)
    heads = re.findall(r"<th[^>]*>(\w+)", page)
    assert (len(facts), len(heads)) == (10, 6)
    at = [last.find(f"{name} ") for name in facts]  # the same names in the same order
    at += [last.find(head.upper()) for head in heads]
    assert at[0] > 0
    assert at == sorted(set(at))


STATUS: dict[str, Any] = {
    **dict.fromkeys(("readers", "waiting", "bytes_sent", "requests", "refused"), 0),
    "swarm": None,
}
SERVING = {"step": 1, "snapshot_id": "id", "total_bytes": 1}
MEMBER = {"id": "m1", "url": "http://h/", "zone": "", "have": 0, "complaints": 0}


def swarm(**changes: Any) -> str:
    """Return a status with a member and these changes."""
    found = {"chunks": 1, "given": 0, "members": [MEMBER], **changes}
    return json.dumps({"serving": SERVING, "status": {**STATUS, "swarm": found}})


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"serving": None, "paths": {}}),
        "[" * 100_000,
        json.dumps({"serving": None, "status": {**STATUS, "bytes_sent": 10**400}}),
        swarm(members=[{**MEMBER, "have": -(10**400)}]),
        swarm(more=-3),
    ],
    ids=["no status", "deep", "huge", "negative", "fewer than none"],
)
async def test_what_is_no_status(cli: Commands, body: str) -> None:
    """The command refuses it in one line."""

    async def absurd(_: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/checkpoint/", absurd)
    async with running(app) as host:
        url = f"{host.url}/checkpoint/"
        error = await asyncio.to_thread(cli.error, "top", url)
    assert "does not show its status" in error
