"""What ``aiockpt fetch`` leaves behind when it is killed."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aiockpt.cli import main
from aiockpt.testing import FaultProxy, StallAfter
from tests.support.commandline import ENVIRONMENT, aiockpt_command, beside
from tests.support.proofs import Cell, each_cell
from tests.support.transports import MIB, port_of, transport, weights
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

MIB_OFFERED = 8


@asynccontextmanager
async def offered() -> AsyncIterator[int]:
    """Offer step 1; give the port."""
    async with transport(chunk_bytes=MIB, insecure=True) as sender:
        await sender.send_checkpoint([], 1, weights(mib=MIB_OFFERED))
        yield port_of(sender)


def has_a_chunk(part: Path) -> bool:
    """Tell whether the first of the chunks has arrived, which are full of ones."""
    if not part.exists():
        return False
    ones = part.read_bytes()[: MIB + (8 << 10)].count(0x3F)
    return ones >= MIB // 4


@each_cell("aiockpt fetch: this process dies")
def test_a_fetch_dies(
    cell: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is the old one, and the next fetch goes on where this one was."""
    target, part = tmp_path / "f", tmp_path / "f.part"
    target.write_text("old")
    with beside(offered()) as port:
        silent = StallAfter(MIB + MIB // 2)  # of what each connection has to bring
        with beside(FaultProxy("127.0.0.1", port, otherwise=silent)) as proxy:
            url = proxy.url("/checkpoint/1")
            fetch = subprocess.Popen(
                aiockpt_command("fetch", url, "-q", "--overwrite", "-o", target),
                env=ENVIRONMENT,
            )
            wait_until(lambda: has_a_chunk(part), "the first chunk")
            fetch.kill()
            fetch.wait()
        assert target.read_text() == "old"
        assert part.exists()
        url = f"http://127.0.0.1:{port}/checkpoint/1"
        assert main(["fetch", url, "--overwrite", "-o", str(target)]) == 0
        assert "were there already" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [target]
    assert cell.left == "part / one"
