"""Metadata in a file, and joined metadata, as arguments of the commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aiockpt import join_metadata
from aiockpt.http.protocol import MAX_JOINED
from tests.support.commandline import Commands, Serving, run_shell, serving

pytestmark = pytest.mark.timeout(180)

SECRET = "s3cret-0f-a-sender"
COMMANDS = [
    ("fetch", "-o", "f"),
    ("follow", "-o", "d"),
    ("top",),
    ("inspect",),
    ("verify",),
    ("bench", "--url"),
]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Serve something else as step 8."""
    path = tmp_path_factory.mktemp("shard") / "shard.safetensors"
    save_file({"w": torch.ones(5)}, path)
    with serving(path, "--step", 8) as running:
        yield running


@pytest.fixture
def joined(server: Serving, shard: Serving) -> str:
    """Return the joined metadata of two senders."""
    return join_metadata([server.metadata, shard.metadata])


def with_url(command: tuple[str, ...], text: str) -> list[str]:
    """Return a command line of which ``text`` is the URL."""
    if command[0] == "bench":
        return [*command, text]
    return [command[0], text, *command[1:]]


class TestInAFile:
    """``@FILE`` stands for what the file holds, so no process list shows the token."""

    @pytest.mark.parametrize("end", ["", "\n", "\r\n"])
    def test_it_may_stand_for_a_url(
        self, cli: Commands, server: Serving, tmp_path: Path, end: str
    ) -> None:
        """With the end of line that an editor leaves."""
        named = tmp_path / "trainer.url"
        named.write_bytes(f"{server.metadata}{end}".encode())
        for command in ("inspect", "verify"):
            assert cli(command, f"@{named}")[0].startswith(server.base)

    def test_it_may_be_a_pipe(self, server: Serving, tmp_path: Path) -> None:
        """A program prints the metadata, and no file ever holds it."""
        target = tmp_path / "copy.safetensors"
        given = shlex.quote(server.metadata)
        line = f"aiockpt fetch @<(echo {given}) -q -o {shlex.quote(str(target))}"
        done = run_shell(f"bash -c {shlex.quote(line)}")
        assert done.returncode == 0, done.stderr
        assert target.exists()

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            (None, "No such file or directory"),
            (b"", "bad metadata: its scheme is ''"),
            (b"ftp://h/#" + SECRET.encode(), "bad metadata: its scheme is 'ftp'"),
            (b"http://h/#\xff" + SECRET.encode(), "bad metadata: it contains blanks"),
            (b"http://h/#a\nhttp://i/#" + SECRET.encode(), "it contains blanks"),
            (b"http://h/#" + SECRET.encode() * 300, "are more than 4096"),
            (b"x" * 2 * MAX_JOINED, "its scheme is"),
        ],
    )
    def test_what_is_wrong_with_it_names_the_file(
        self,
        cli: Commands,
        tmp_path: Path,
        command: tuple[str, ...],
        content: bytes | None,
        fault: str,
    ) -> None:
        """The message does not repeat what the file holds."""
        named = tmp_path / "trainer.url"
        if content is not None:
            named.write_bytes(content)
        error = cli.error(*with_url(command, f"@{named}"), code=2)
        assert f"{named}: " in error
        assert fault in error
        assert SECRET not in error


class TestJoined:
    """The metadata of several senders, each of which serves its own shards."""

    def test_all_shards_are_verified(
        self,
        cli: Commands,
        joined: str,
        server: Serving,
        shard: Serving,
        tmp_path: Path,
    ) -> None:
        """There is a line for each sender, in the order of the ranks."""
        named = tmp_path / "trainer.url"
        named.write_text(joined)
        for text in (joined, f"@{named}"):
            first, second = cli("verify", text)[0].splitlines()
            assert first.startswith(f"{server.base}: 3 chunks")
            assert second.startswith(f"{shard.base}: 1 chunk")

    def test_a_sender_that_fails_keeps_no_other_from_being_verified(
        self, cli: Commands, server: Serving, shard: Serving
    ) -> None:
        """The error names it, and the exit code is 1."""
        wrong = f"{shard.base}#{SECRET}"
        text = join_metadata([wrong, server.metadata])
        out, err = cli("verify", text, code=1)
        assert out.startswith(f"{server.base}: 3 chunks")
        assert f"aiockpt: error: {shard.base}: " in err
        assert SECRET not in err

    def test_all_senders_are_shown(
        self, cli: Commands, joined: str, server: Serving, shard: Serving
    ) -> None:
        """One after the other, in the order of the ranks."""
        lines = cli("top", joined)[0].splitlines()
        heads = [line for line in lines if line.startswith("aiockpt  ")]
        assert heads == [f"aiockpt  {sender.base}" for sender in (server, shard)]
        assert [line[:6] for line in lines if line.startswith("step")] == [
            "step 7",
            "step 8",
        ]

    @pytest.mark.parametrize(
        "command",
        [("follow", "-o", "d"), ("inspect",), ("bench", "--url")],
        ids=lambda command: command[0],
    )
    def test_a_command_for_one_sender_says_so(
        self, cli: Commands, command: tuple[str, ...]
    ) -> None:
        """The message counts the senders, and names what takes joined metadata."""
        text = f"http://a/#{SECRET}|http://b/#{SECRET}"
        error = cli.error(*with_url(command, text), code=2)
        assert "the joined metadata of 2 senders" in error
        assert "fetch, verify and top" in error
        assert SECRET not in error
