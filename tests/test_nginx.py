"""The configurations of nginx that the documentation shows, as they stand there."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

import aiockpt.http
from aiockpt import AuthenticationError, StepNotFoundError
from aiockpt.testing import assert_same
from hosting import running
from serving import settle
from transports import MIB, receive, transport, weights

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

DOCS = Path(__file__).parents[1] / "docs" / "howto"
MAIN = """
daemon off; master_process off; pid {place}/pid; error_log {place}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log {place}/access.log;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi;
    scgi_temp_path {place}/scgi;
    {http}
}}
"""


def documented(page: str) -> str:
    """Return the configuration that a page shows."""
    found = re.search(r"```nginx\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def listening_port() -> int:
    """Return a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@asynccontextmanager
async def nginx(place: Path, http: str, port: int) -> AsyncIterator[Path]:
    """Run nginx in the foreground; skip where it is not installed."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        pytest.skip("nginx is not installed")
    config = place / "nginx.conf"
    config.write_text(MAIN.format(place=place, http=http))
    process = await asyncio.create_subprocess_exec(
        *(found, "-p", place, "-c", config, "-e", place / "error.log"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )

    def is_there() -> bool:
        assert process.returncode is None, (place / "error.log").read_text()
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    try:
        await settle(is_there)
        yield place / "access.log"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_an_app_behind_it_is_reached_by_its_public_path(tmp_path: Path) -> None:
    """Early receives wait, errors arrive, nothing secret is in its log."""
    port = listening_port()
    sender = transport(advertise=f"http://127.0.0.1:{port}/run-7/weights/")
    app = web.Application()
    aiockpt.http.setup(app, sender, prefix="/checkpoint")
    async with running(app) as host, transport() as receiver:
        location = documented("embedding.md").replace("http://10.0.0.5:8080", host.url)
        http = f"server {{ listen 127.0.0.1:{port}; {location} }}"
        async with nginx(tmp_path, http, port) as log:
            early = asyncio.create_task(receive(sender, receiver, 7))
            await settle(lambda: sender.statistics().waiting)
            await sender.send_checkpoint([], 7, weights(mib=32))
            assert_same(await early, weights(mib=32))
            with pytest.raises(StepNotFoundError) as caught:
                await receive(sender, receiver, 6)
            assert caught.value.serving == 7
            with pytest.raises(AuthenticationError):
                await receiver.recv_checkpoint(0, sender.address(), 7)
            token = sender.metadata().partition("#")[2]
            assert token not in log.read_text()


async def test_a_cache_makes_several_receivers_cost_one_read(tmp_path: Path) -> None:
    """Every one gets the right bytes, and none without a credential gets any."""
    size, port = 48 * MIB, listening_port()
    url = f"http://127.0.0.1:{port}/checkpoint/"
    async with transport(chunk_bytes=MIB) as sender, transport() as receiver:
        await sender.send_checkpoint([], 7, weights(7.0, mib=48))
        http = documented("tuning.md")
        for shown, here in {
            "/var/cache/nginx": str(tmp_path),
            "8080": f"127.0.0.1:{port}",
            "http://10.0.0.5:29400/checkpoint/": sender.address(),
        }.items():
            assert shown in http
            http = http.replace(shown, here)
        metadata = f"{url}#{sender.metadata().partition('#')[2]}"
        async with nginx(tmp_path, http, port):
            found = await asyncio.gather(
                *(receiver.recv_checkpoint(0, metadata, 7) for _ in range(3))
            )
            found.append(await receiver.recv_checkpoint(0, metadata, 7))
            for each in found:
                assert_same(each, weights(7.0, mib=48))
            assert size < sender.statistics().bytes_sent < 1.5 * size
            with pytest.raises(AuthenticationError):
                await receiver.recv_checkpoint(0, url, 7)
            await sender.send_checkpoint([], 8, weights(8.0))
            assert_same(await receiver.recv_checkpoint(0, metadata, 8), weights(8.0))
