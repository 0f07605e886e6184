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

import pytest
from aiohttp import web

from aiockpt import Swarm
from aiockpt.http import status
from tests.support.commandline import (
    ENVIRONMENT,
    PATIENCE,
    Commands,
    aiockpt_command,
    the_error,
)
from tests.support.servers import TOKEN, Memory, Site, running, serving
from tests.wire.test_members import CHUNKS, SAID, A, B, memory, post

PAGE = Path(status.__file__).with_name("status.html")

pytestmark = [pytest.mark.timeout(180), pytest.mark.torch_free]


async def top(url: str, *options: str) -> tuple[int | None, str, str]:
    """Run it without a terminal; return the exit code and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *aiockpt_command("top", url, *options),
        env=ENVIRONMENT,
        stdout=PIPE,
        stderr=PIPE,
    )
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def announce(site: Site, have: int) -> None:
    """Have two members, of which the second one complains of the first one."""
    first = await post(site, A, {**SAID, "zone": "r\x1b[31m", "have": have})
    bad = [json.loads(first.body)["id"]]
    second = {"url": "http://h:10/", "have": CHUNKS, "bad": bad}
    await post(site, B, second, host="127.0.0.2")


@pytest.mark.asyncio
async def test_one_snapshot_without_a_terminal() -> None:
    """The table lists the members, and no word of theirs controls a terminal."""
    async with serving(memory(), swarm=Swarm()) as site:
        await announce(site, 4)
        code, out, err = await top(f"{site.url}#{TOKEN}")
    assert (code, err) == (0, "")
    assert TOKEN not in out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == f"aiockpt  {site.url}"
    assert lines[1].startswith("step 7  size 6")
    assert lines[2] == "readers 0  waiting 0  sent 0 B  requests 3, 0 refused"
    assert lines[3] == "chunks given once 0 of 10  members 2"
    heads, first, second = lines[5:]
    assert " ".join(heads.split()) == "MEMBER ADDRESS ZONE HAS RECEIVES COMPLAINTS"
    place = "http://127.0.0.1:9/checkpoint/"
    bar = "[########------------]"
    assert first.split() == ["m1", place, r"r\x1b[31m", bar, "40%", "1"]
    place = "http://127.0.0.2:10/checkpoint/"
    assert second.split() == ["m2", place, f"[{'#' * 20}]", "100%", "0"]


@pytest.mark.asyncio
async def test_without_a_swarm_or_a_checkpoint() -> None:
    """The page is shorter, and says what is not there."""
    async with serving(Memory(1000)) as site:
        assert (await top(f"{site.url}#{TOKEN}"))[1].count("\n") == 3
    async with serving(swarm=Swarm()) as site:
        code, out, _ = await top(f"{site.url}#{TOKEN}")
    assert code == 0
    assert "nothing is served now" in out


@pytest.mark.asyncio
async def test_a_terminal_is_drawn_again_until_it_is_interrupted() -> None:
    """The command draws once a second, with rates."""
    ours, its = os.openpty()
    os.set_blocking(ours, False)
    async with serving(memory(), swarm=Swarm()) as site:
        await announce(site, 4)
        process = await asyncio.create_subprocess_exec(
            *aiockpt_command("top", f"{site.url}#{TOKEN}"),
            env=ENVIRONMENT,
            stdout=its,
            stderr=PIPE,
        )
        os.close(its)
        seen = b""
        try:
            async with asyncio.timeout(PATIENCE):
                while seen.count(b"\x1b[2J") < 3 or seen.count(b"B/s") < 4:
                    await announce(site, min(5 + seen.count(b"\x1b[2J"), CHUNKS))
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


@pytest.mark.asyncio
async def test_what_is_no_sender() -> None:
    """One line, as of the other commands."""

    async def hello(_: web.Request) -> web.Response:
        return web.json_response({"serving": None, "paths": {}})

    app = web.Application()
    app.router.add_get("/checkpoint/", hello)
    async with running(app) as host:
        code, _, err = await top(f"{host.url}/checkpoint/")
        assert (code, "does not show its status" in the_error(err)) == (1, True)
    async with serving(memory()) as site:
        code, _, err = await top(f"{site.url}#wrong")
        assert (code, "the token" in the_error(err)) == (1, True)


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


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        json.dumps({"serving": None, "status": {**STATUS, "bytes_sent": 10**400}}),
        swarm(members=[{**MEMBER, "have": -(10**400)}]),
        swarm(more=-3),
    ],
    ids=["deep", "huge", "negative", "fewer than none"],
)
async def test_an_absurd_status(body: str) -> None:
    """The command refuses it in one line."""

    async def absurd(_: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/checkpoint/", absurd)
    async with running(app) as host:
        code, _, err = await top(f"{host.url}/checkpoint/")
    assert (code, "does not show its status" in the_error(err)) == (1, True)


def test_a_step_means_nothing(cli: Commands) -> None:
    """A URL with a step is refused, since the sender has one status."""
    assert "leave it out" in cli.error("top", "http://h/7", code=2)
