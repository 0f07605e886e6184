"""nginx with the configurations that the documentation shows."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.serving import settle

__all__ = ["cached", "documented", "listening_port", "nginx"]

DOCS = Path(__file__).parents[2] / "docs" / "howto"
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


@asynccontextmanager
async def cached(place: Path, address: str) -> AsyncIterator[int]:
    """Run the documented cache in front of a sender; give its port."""
    port, http = listening_port(), documented("tuning.md")
    for shown, here in {
        "/var/cache/nginx": str(place),
        "8080": f"127.0.0.1:{port}",
        "http://10.0.0.5:29400/checkpoint/": address,
    }.items():
        assert shown in http
        http = http.replace(shown, here)
    async with nginx(place, http, port):
        yield port
