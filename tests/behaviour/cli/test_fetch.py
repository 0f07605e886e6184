"""``aiockpt fetch``: a file arrives whole or not at all, and says why."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aiockpt.testing import Answer, Drip, Fault, FaultProxy, StallAfter
from tests.support.commandline import (
    CHUNK,
    PATIENCE,
    Commands,
    OnlyTheEnd,
    Serving,
    aiockpt_command,
    beside,
    run_shell,
    serving,
    start_aiockpt,
    the_error,
    until,
)
from tests.support.proofs import proves
from tests.support.saving import names
from tests.support.shortages import small_disk
from tests.support.transports import chunked, proxied, through, transport
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

SLACK = CHUNK // 2
"""Heads, and what was under way when a connection was cut or stopped."""

NOBODY = "http://127.0.0.1:9/checkpoint/"


@pytest.fixture(scope="module")
def replica(file: Path) -> Iterator[Serving]:
    """Serve what was fetched, which is the same snapshot."""
    with serving(file) as running:
        yield running


class FlipAlways(Fault):
    """A bit of every larger piece arrives inverted."""

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
        if len(data) > 10_000:  # headers are smaller
            data = bytes([*data[:-1], data[-1] ^ 1])
        await pipe.send(data)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("{base}7/full#{token}", ["--step", "7"]),
        ("{base}7/metadata", ["--token={token}", "--max-size", "1GiB"]),
        ("{root}#{token}", ["--timeout", "60"]),
    ],
)
def test_every_way_to_name_a_checkpoint(
    cli: Commands,
    server: Serving,
    file: Path,
    tmp_path: Path,
    form: str,
    options: list[str],
) -> None:
    """The metadata, or what a browser's address bar would show."""
    root = server.base.removesuffix("/checkpoint/")
    words = {"base": server.base, "token": server.token, "root": root}
    url, *rest = (each.format(**words) for each in [form, *options])
    assert cli("fetch", url, "-q", "-o", tmp_path / "f", *rest) == ("", "")
    assert (tmp_path / "f").read_bytes() == file.read_bytes()


class TestMessages:
    """The command shows its progress, and a summary at its end."""

    def test_a_summary_where_nobody_watches(
        self, cli: Commands, server: Serving, tmp_path: Path
    ) -> None:
        """Without a terminal, the summary has plain lines and no control characters."""
        out, err = cli("fetch", server.metadata, "-o", tmp_path / "f")
        assert out == ""
        assert re.search(r"f: step 7, snapshot [0-9a-f]{32}\n41.9 MB at .*/s", err)
        assert "\r" not in err

    @pytest.mark.parametrize("watched", [True, False])
    def test_a_bar_on_a_terminal(
        self, server: Serving, tmp_path: Path, watched: bool
    ) -> None:
        """A terminal that goes away is not blamed on the peer."""
        ours, theirs = os.openpty()
        command = ("fetch", server.metadata, "-o", tmp_path / "f")
        fetch = start_aiockpt(*command, stderr=theirs, start_new_session=True)
        os.close(theirs)
        shown = b""
        try:
            while watched:
                shown += os.read(ours, 4096)
        except OSError:  # Linux says so when the program has ended
            pass
        os.close(ours)
        assert fetch.wait(PATIENCE) == 0
        assert (tmp_path / "f").exists()
        if watched:
            bar = rb"\[#{9,}\] 100%  41.9 MB of 41.9 MB  .*/s  ETA 0:00"
            assert b"waiting" in shown
            assert not re.search(rb"fetch_|allocate|plan", shown)  # no functions
            assert re.search(bar, shown)

    def test_nobody_reads_them(self, server: Serving, tmp_path: Path) -> None:
        """A stderr that is closed, or has no reader, costs only the messages."""
        closed, unread = (
            ("fetch", server.metadata, "-o", tmp_path / "a"),
            tmp_path / "b",
        )
        run_shell(f"{shlex.join(aiockpt_command(*closed))} >&- 2>&-")
        fetch = start_aiockpt("fetch", server.metadata, "-o", unread)
        assert fetch.stderr is not None
        fetch.stderr.close()
        fetch.wait(PATIENCE)
        assert names(tmp_path) == ["a", "b"]


def test_an_early_fetch_waits(file: Path, tmp_path: Path) -> None:
    """The fetch waits for a sender that is not there yet."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    url, target = f"http://127.0.0.1:{port}/checkpoint/", tmp_path / "f"
    with (
        start_aiockpt("fetch", url, "-q", "--wait", 60, "-o", target) as early,
        serving(file, "--port", port, "--insecure") as running,
    ):
        assert early.wait(PATIENCE) == 0
        assert "#" not in running.fetch
        assert "Bearer" not in running.curl
    assert target.read_bytes() == file.read_bytes()


def test_an_interrupt_before_the_first_chunk(server: Serving, tmp_path: Path) -> None:
    """It says that nothing was kept, rather than nothing."""
    part = tmp_path / "f.part"
    nothing = FaultProxy("127.0.0.1", server.port, otherwise=OnlyTheEnd(1 << 60))
    with beside(nothing) as proxy:
        url = proxy.url(f"/checkpoint/#{server.token}")
        fetch = start_aiockpt("fetch", url, "-q", "--no-swarm", "-o", tmp_path / "f")
        until(part.exists)
        fetch.send_signal(signal.SIGINT)
        _, err = fetch.communicate(timeout=PATIENCE)
    assert fetch.returncode == 130
    kept = "no chunk had arrived whole, so nothing was kept"
    assert err == f"aiockpt: interrupted; {kept}\n"
    assert not [*tmp_path.iterdir()]


@proves("cell aiockpt fetch: timeout", "cell aiockpt fetch: cancel")
@pytest.mark.parametrize("end", ["timeout", "interrupt", "kill"])
def test_the_next_fetch_goes_on(
    cli: Commands,
    server: Serving,
    replica: Serving,
    file: Path,
    tmp_path: Path,
    end: str,
) -> None:
    """Verified chunks are not fetched again, and the old file stays until then.

    The next fetch is from another sender of the same checkpoint.
    """
    target, part = tmp_path / "f", tmp_path / "f.part"
    target.write_text("old")
    last = file.read_bytes()[-CHUNK // 4 :]
    fault = OnlyTheEnd(2 * CHUNK)
    with beside(FaultProxy("127.0.0.1", server.port, otherwise=fault)) as proxy:
        url = proxy.url(f"/checkpoint/#{server.token}")
        limit = ("--timeout", 6) if end == "timeout" else ()
        fetch = start_aiockpt("fetch", url, "-q", "--overwrite", "-o", target, *limit)
        if end != "timeout":
            until(lambda: part.exists() and part.read_bytes().endswith(last))
            fetch.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
        _, err = fetch.communicate(timeout=PATIENCE)
    assert fetch.returncode == {"timeout": 1, "interrupt": 130, "kill": -9}[end]
    assert target.read_text() == "old"
    if end != "kill":
        (line,) = err.splitlines()
        assert f"what was verified is in {part}" in line
        assert "run the same command again" in line
        assert end != "timeout" or "timed out after 6 s while fetching step 7" in line
    with beside(FaultProxy("127.0.0.1", replica.port)) as clean:
        url = clean.url(f"/checkpoint/#{replica.token}")
        _, err = cli("fetch", url, "--overwrite", "-o", target)
        assert 2 * CHUNK < clean.statistics().bytes_down < 2 * CHUNK + SLACK
    assert "were there already) at " in err
    assert target.read_bytes() == file.read_bytes()
    assert names(tmp_path) == ["f"]


@asynccontextmanager
async def a_slow_sender() -> AsyncIterator[tuple[Any, str]]:
    """Give a sender of 4 MiB in 64 chunks, and the metadata of slow connections."""
    async with transport() as sender:
        await sender.send_checkpoint([], 7, chunked(64))
        async with proxied(sender, otherwise=Drip(800_000, burst=8192)) as proxy:
            yield sender, through(proxy, sender)


@pytest.mark.parametrize(
    ("command", "joins"), [("fetch", True), ("follow", True), ("fetch", False)]
)
def test_commands_that_fetch_the_same_serve_each_other(
    tmp_path: Path, command: str, joins: bool
) -> None:
    """Commands join a swarm unless an option says that they do not."""
    places = [tmp_path / name for name in "abc"]
    one_step = command == "fetch"
    files = places if one_step else [each / "step-7.safetensors" for each in places]
    more = () if joins else ("--no-swarm",)
    with beside(a_slow_sender()) as (sender, url):
        running = [start_aiockpt(command, url, "-q", "-o", p, *more) for p in places]
        try:
            if not one_step:  # it never ends by itself
                wait_until(lambda: all(map(Path.exists, files)), "a file of each")
                for each in running:
                    each.kill()
            for each in running:
                _, err = each.communicate(timeout=PATIENCE)
                assert each.returncode == (0 if one_step else -signal.SIGKILL), err
        finally:
            for each in running:
                each.kill()
        sent = sender.statistics().bytes_sent
    one, *others = (each.read_bytes() for each in files)
    assert others == [one, one]
    assert names(tmp_path) == ["a", "b", "c"]
    assert (sent < 2.5 * len(one)) is joins


class TestBadConnections:
    """A bad way to the sender costs time, never a wrong byte."""

    @proves("cell aiockpt fetch: error")
    @pytest.mark.asyncio
    async def test_a_bit_that_always_flips(self, cli: Commands, tmp_path: Path) -> None:
        """The error names the chunk, there is no file, and the sender goes on.

        It hears of the end, and frees what it replaces.
        """
        async with (
            transport() as sender,
            proxied(sender, otherwise=FlipAlways()) as proxy,
        ):
            await sender.send_checkpoint([], 7, chunked(64))
            url = through(proxy, sender)
            for command in ("fetch", "verify"):
                more = ("-o", tmp_path / "f") if command == "fetch" else ()
                error = await asyncio.to_thread(cli.error, command, url, *more)
                chunk = r"chunk \d+ from http://127.0.0.1:\d+/checkpoint/ has digest"
                assert re.match(chunk, error)
            assert names(tmp_path) == []
            await sender.send_checkpoint([], 8, chunked(64))
            assert sender.statistics().superseded == 0

    @proves("cell aiockpt fetch: the other one dies")
    # The fetch may connect to the proxy again while its loop ends.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_sender_that_dies(self, file: Path, tmp_path: Path) -> None:
        """An error comes as soon as the sender is not expected back."""
        part, fault = tmp_path / "f.part", StallAfter(CHUNK // 4)
        with serving(file) as running:
            proxy = FaultProxy("127.0.0.1", running.port, otherwise=fault)
            with beside(proxy):
                url = proxy.url(f"/checkpoint/#{running.token}")
                command = ("fetch", url, "--reconnect", 0.5, "-o", tmp_path / "f")
                fetch = start_aiockpt(*command)
                until(part.exists)
                running.process.kill()
            _, err = fetch.communicate(timeout=PATIENCE)
            running.process.wait()
        assert fetch.returncode == 1
        assert "is the sender running there?" in the_error(err)
        assert not (tmp_path / "f").exists()

    def test_a_sender_that_dies_and_comes_back(
        self, file: Path, tmp_path: Path
    ) -> None:
        """The fetch goes on in the middle of a chunk."""
        target, token = tmp_path / "f", ("--token", "a-secret")
        with serving(file, *token) as first:
            slow = Drip(8e6, burst=1 << 16)
            proxy = FaultProxy("127.0.0.1", first.port, otherwise=slow)
            with beside(proxy):
                more = (*token, "--reconnect", PATIENCE)
                fetch = start_aiockpt(
                    "fetch", proxy.url("/checkpoint/"), "-o", target, *more
                )
                until(lambda: proxy.statistics().bytes_down > CHUNK // 2)
                first.process.kill()
                first.process.wait()
                proxy.otherwise = Drip(1e9, burst=1 << 20)
                with serving(file, *token) as second:
                    proxy.target = ("127.0.0.1", second.port)
                    _, err = fetch.communicate(timeout=PATIENCE)
                sent = proxy.statistics().bytes_down
        assert fetch.returncode == 0, err
        assert target.read_bytes() == file.read_bytes()
        assert sent < len(file.read_bytes()) + SLACK


class TestSeveralSenders:
    """A file from several senders of the same checkpoint."""

    def test_each_gives_a_part(
        self,
        cli: Commands,
        server: Serving,
        replica: Serving,
        file: Path,
        tmp_path: Path,
    ) -> None:
        """Each has its own token; the summary says how much came from whom."""
        target = tmp_path / "f"
        urls = [server.metadata, NOBODY, replica.metadata]
        _, err = cli("fetch", *urls, "-o", target)
        assert target.read_bytes() == file.read_bytes()
        assert f"of it from {server.base}\n" in err
        assert f"of it from {replica.base}\n" in err
        assert f"0 B of it from {NOBODY}" in err
        assert server.token not in err

    def test_nobody_is_there(self, cli: Commands, tmp_path: Path) -> None:
        """One line says so of the first one."""
        urls = [NOBODY, "http://127.0.0.1:10/checkpoint/"]
        error = cli.error("fetch", *urls, "-o", tmp_path / "f")
        assert "cannot reach http://127.0.0.1:9/" in error
        assert ".part" not in error  # nothing is there to go on from
        assert names(tmp_path) == []


class TestErrors:
    """One line that names the thing; nothing is left behind."""

    @pytest.fixture(autouse=True)
    def _nothing_is_written(self, tmp_path: Path) -> Iterator[None]:
        before = names(tmp_path)
        yield
        assert names(tmp_path) == before

    @pytest.mark.parametrize(
        ("url", "options", "reason"),
        [
            ("{base}8#{token}", "", "step 8 is not published at "),
            ("{base}6#{token}", "", "step 6 is not published at "),
            ("{base}#{token}", "--step 8 --wait 0.3", "being served is step 7"),
            (
                "{base}#{token}",
                "--step 8 --wait 9 --timeout 0.5",
                "timed out after 0.5 s while waiting for step 8 from http",
            ),
            ("{base}#not-the-token", "", "refused the token"),
            ("{base}", "", "refused the token"),
            ("http://127.0.0.1:1/checkpoint/", "", "cannot reach http://127.0.0.1:1/"),
            ("http://no-such-host.invalid/", "", "cannot reach http://no-such-host.in"),
            ("http://127.0.0.1:{port}/other/#{token}", "", "aiockpt server?"),
            ("{base}#{token}", "--max-size 1MiB", "1048576 (1.0 MB) of --max-size; "),
            ("http://h/", "--cafile /nonexistent", "/nonexistent: it holds no us"),
        ],
    )
    def test_what_cannot_be_fetched(
        self,
        cli: Commands,
        server: Serving,
        tmp_path: Path,
        url: str,
        options: str,
        reason: str,
    ) -> None:
        """The step, the token, the host, the path, or the size is wrong."""
        words = {"base": server.base, "token": server.token, "port": server.port}
        where = ("-o", tmp_path / "f")
        error = cli.error("fetch", url.format(**words), *options.split(), *where)
        assert reason in error
        assert server.token not in error
        assert "not-the-token" not in error

    @pytest.mark.parametrize(
        "answer",
        [
            b"SSH-2.0-OpenSSH_9.2\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
        ],
    )
    def test_a_server_of_another_kind(
        self, cli: Commands, tmp_path: Path, answer: bytes
    ) -> None:
        """It is asked whether it is one of ours, and no redirect is followed."""
        with beside(FaultProxy("127.0.0.1", 1, otherwise=Answer(answer))) as proxy:
            url = proxy.url("/checkpoint/")
            assert url in cli.error("fetch", url, "-o", tmp_path / "f")

    @pytest.mark.parametrize(
        ("output", "reason"),
        [
            ("missing/f", "there is no directory"),
            (".", "it is a directory; name a file in it"),
            ("/dev/null", "it is not a regular file"),
            ("x" * 300, "File name too long"),
        ],
    )
    def test_a_file_that_cannot_be(
        self, cli: Commands, tmp_path: Path, output: str, reason: str
    ) -> None:
        """It is found out before anybody is asked."""
        assert reason in cli.error("fetch", NOBODY, "-o", tmp_path / output)

    def test_a_full_disk(self, cli: Commands, server: Serving, tmp_path: Path) -> None:
        """The error names the free space, and the old file is intact."""
        disk = tmp_path / "disk"
        with small_disk(disk, 1 << 20):
            (disk / "f").write_text("old")
            command = ("fetch", server.metadata, "--overwrite", "-o", disk / "f")
            error = cli.error(*command)
            assert "No space left on device: 41.9 MB are needed and 1.0 MB are" in error
            assert (disk / "f").read_text() == "old"
            assert names(disk) == ["f"]
        disk.rmdir()


def test_nothing_is_replaced_unless_told_to(
    cli: Commands, server: Serving, file: Path, tmp_path: Path
) -> None:
    """The refusal comes before anything is fetched."""
    target = tmp_path / "f"
    target.write_text("precious")
    error = cli.error("fetch", server.metadata, "-o", target)
    assert f"{target}: it is there already" in error
    assert "--overwrite" in error
    assert target.read_text() == "precious"
    cli("fetch", server.metadata, "--overwrite", "-o", target)
    assert target.read_bytes() == file.read_bytes()
