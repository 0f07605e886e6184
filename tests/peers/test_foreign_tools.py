"""What everybody has on a machine gets the right bytes from us, and can read them."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.transports import transport

pytestmark = pytest.mark.asyncio

STATE = {"w": torch.arange(1_000_000.0), "b": torch.ones(7, dtype=torch.bfloat16)}
COMMANDS = {
    "curl, the whole file": ["curl -sSf -H {header} -o {file} {url}"],
    "curl, a range and the rest": [
        "curl -sSf -H {header} -o {file} -r 0-999999 {url}",
        "curl -sSf -H {header} -o {file} -C - {url}",
    ],
    "wget, and again what was cut off": [
        "wget -q --header {header} -O {file} {url}",
        "truncate -s 1000000 {file}",
        "wget -q -c --header {header} -P {folder} {url}",
    ],
    "aria2, over four connections": [
        "aria2c -q -x4 -s4 -k1M --header={header} --dir={folder} --out=full {url}"
    ],
}


@pytest.mark.parametrize("how", COMMANDS)
async def test_a_tool_fetches_the_file(how: str, tmp_path: Path) -> None:
    """The file is what was served, byte by byte, and safetensors reads it."""
    async with transport(chunk_bytes=1 << 20) as sender:
        await sender.send_checkpoint([1], 5, STATE)
        base, _, token = sender.metadata().partition("#")
        served = sender._store.latest.servable  # type: ignore[attr-defined]
        views = served.views(0, served.manifest.segment_bytes)
        expected = b"".join([served.manifest.header, *views])
        known = {
            "header": f"Authorization: Bearer {token}",
            "file": str(tmp_path / "full"),
            "folder": str(tmp_path),
            "url": f"{base}5/full",
        }
        for command in COMMANDS[how]:
            tool, *arguments = (word.format(**known) for word in command.split())
            if shutil.which(tool) is None:
                pytest.skip(f"{tool} is not installed")
            process = await asyncio.create_subprocess_exec(
                *(tool, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            output, _ = await process.communicate()
            assert process.returncode == 0, output.decode()
    file = tmp_path / "full"
    assert file.read_bytes() == expected
    read = load_file(file)
    assert read.keys() == STATE.keys()
    assert all(torch.equal(read[name], STATE[name]) for name in STATE)
