"""What everybody has on a machine gets the right bytes from us, and can read them."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aiockpt import HTTPTransport, Server

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

STATE = {"w": torch.arange(3_000_000.0), "b": torch.ones(7, dtype=torch.bfloat16)}


@dataclass(frozen=True)
class Site:
    """A checkpoint that is being served, and what its file must be."""

    url: str
    header: str
    sha256: str
    nbytes: int


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """Serve the state dict as step 5."""
    transport = HTTPTransport(60, chunk_bytes=1 << 20, server=Server(host="127.0.0.1"))
    async with transport:
        await transport.send_checkpoint([1], 5, STATE)
        base, _, token = transport.metadata().partition("#")
        published = transport._store.latest  # type: ignore[union-attr]
        assert published is not None
        manifest = published.servable.manifest
        views = published.servable.views(0, manifest.segment_bytes)
        file = b"".join([manifest.header, *views])
        yield Site(
            f"{base}5/full",
            f"Authorization: Bearer {token}",
            hashlib.sha256(file).hexdigest(),
            len(file),
        )


async def run(tool: str, *arguments: str | Path) -> str:
    """Run a program of the system; skip if it is not installed."""
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed")
    process = await asyncio.create_subprocess_exec(
        found,
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


def assert_whole(file: Path, there: Site) -> None:
    """The file is what was served, byte by byte, and safetensors reads it."""
    assert hashlib.sha256(file.read_bytes()).hexdigest() == there.sha256
    read = load_file(file)
    assert read.keys() == STATE.keys()
    assert all(torch.equal(read[name], STATE[name]) for name in STATE)


async def test_curl_fetches_the_whole_file(tmp_path: Path) -> None:
    """The command of the documentation."""
    file = tmp_path / "copy.safetensors"
    async with site() as there:
        await run("curl", "-sSf", "-H", there.header, "-o", file, there.url)
        assert_whole(file, there)


async def test_curl_joins_ranges_and_resumes(tmp_path: Path) -> None:
    """``-r`` gets a piece, and ``-C -`` what is missing behind it."""
    file = tmp_path / "copy.safetensors"
    common = ("curl", "-sSf", "-o", file, "-H")
    async with site() as there:
        await run(*common, there.header, "-r", "0-999999", there.url)
        assert file.stat().st_size == 1_000_000
        await run(*common, there.header, "-C", "-", there.url)
        assert_whole(file, there)


async def test_wget_continues_a_file(tmp_path: Path) -> None:
    """``wget -c`` asks for the rest of what it finds."""
    file = tmp_path / "full"
    async with site() as there:
        await run("wget", "-q", "--header", there.header, "-O", file, there.url)
        assert_whole(file, there)
        with file.open("r+b") as partial:
            partial.truncate(there.nbytes // 3)
        await run(
            "wget", "-q", "-c", "--header", there.header, "-P", tmp_path, there.url
        )
        assert_whole(file, there)


async def test_aria2_fetches_over_four_connections(tmp_path: Path) -> None:
    """Ranges of one file come at once and fit together."""
    async with site() as there:
        await run(
            "aria2c",
            "-q",
            "-x4",
            "-s4",
            "-k1M",
            f"--header={there.header}",
            f"--checksum=sha-256={there.sha256}",
            f"--dir={tmp_path}",
            "--out=copy.safetensors",
            there.url,
        )
        assert_whole(tmp_path / "copy.safetensors", there)
