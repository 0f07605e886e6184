"""Nothing that a receiver gets is executed, imported, or written elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from tests.support import mutations
from tests.support.hostile import Payload, senders
from tests.support.proofs import proves
from tests.support.rangepeer import RangePeer

SUPPORT = Path(mutations.__file__).parent
PATHS = [str(Path(aiockpt.__file__).parents[1]), str(SUPPORT)]
ENVIRONMENT = dict(os.environ)


async def told(peers: dict[str, RangePeer], directory: Path) -> list[dict[str, Any]]:
    """Let a guarded process receive from every sender; return what it says."""
    good = peers["good"].base_url
    lines: list[dict[str, Any]] = [
        *({"metadata": good, "into": into} for into in (False, True)),
        {"fetch": good},
        *({"metadata": good, "into": into} for into in (False, True)),
        {"fetch": good},
    ]
    for name, peer in list(peers.items())[1:]:
        lines += [{"metadata": peer.base_url, "into": False}]
        # A tree matters to a template, and all else to what writes a file.
        tree = {"metadata": peer.base_url, "into": True}
        lines += [tree if name.startswith("tree") else {"fetch": peer.base_url}]
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-W",
            "ignore",
            str(SUPPORT / "auditing.py"),
            "receive",
            directory,
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    text = "\n".join(map(json.dumps, lines))
    out, _ = await process.communicate(text.encode())
    assert process.returncode == 0
    return [
        line | json.loads(said)
        for line, said in zip(lines, out.splitlines(), strict=True)
    ]


@proves("threat D6", "threat E1", "threat E2", "invariant 2")
@pytest.mark.timeout(240)
def test_no_sender_makes_a_receiver_run_anything(tmp_path: Path) -> None:
    """Pickles, dangerous tags, absurd manifests, redirects, odd ranges: 60 ways."""
    mark = tmp_path / "mark"
    target = tmp_path / "target"
    target.mkdir()

    async def attack() -> tuple[list[str], list[dict[str, Any]]]:
        async with senders(Payload(str(mark))) as peers:
            names = [name for name in peers if name != "good"]
            return names, await told(peers, target)

    names, said = asyncio.run(attack())
    good, bad = said[:6], said[6:]
    assert [each["came"][:6] for each in good] == ["dict", "dict", "exit 0"] * 2
    assert not [each for each in said if each["events"]]
    assert len(names) > 60
    # A fetch writes to its target what it got, whatever that says, and reads it not.
    harmless = ("device", "exit 0", "exit 1")
    for name, both in zip(names, zip(*[iter(bad)] * 2, strict=True), strict=True):
        for each in both:
            assert "Error: " in each["came"] or each["came"].startswith(harmless), name
            assert "must not" not in each["came"], name
    assert not mark.exists()
    assert {each.name for each in target.iterdir()} <= {"fetched", "fetched.part"}


def test_the_guard_sees_what_it_is_for(tmp_path: Path) -> None:
    """Proofs by a guard that sleeps would prove nothing."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "auditing.py", "probe", tmp_path / "mark"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    assert all(said.values()), said
    assert not (tmp_path / "mark").exists()


@proves("threat E1")
@pytest.mark.timeout(120)
def test_no_mutation_is_executed() -> None:
    """A thousand hostile headers, trees and fields: ``nox -s fuzz`` has a million."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(SUPPORT / "mutations.py")),
            *("--inputs", "1000", "--seed", "6"),
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["executed"] == []
    assert report["grown_mib"] < 64
    assert report["outcomes"]["accepted"] < report["inputs"] / 5
