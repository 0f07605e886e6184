"""``aiockpt fetch`` after a crash of either end, and from several senders at once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aiockpt.cli import main
from aiockpt.testing.faults import Drip, FaultProxy, StallAfter
from tests.support.commandline import (
    ENVIRONMENT,
    PATIENCE,
    Serving,
    aiockpt_command,
    beside,
    run_aiockpt,
    serving,
    until,
)

pytestmark = pytest.mark.timeout(180)

CHUNK = 16 << 20
SLACK = CHUNK // 2  # headers, and what was on its way to a connection that was stopped
"""Heads, manifests, and what a connection that breaks has in its buffers."""

TOKEN = ("--token", "a-secret")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two and a half chunks."""
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    torch.save({"w": torch.randn(2 * CHUNK // 4 + CHUNK // 8)}, place / "model.pt")
    with serving(place / "model.pt", "--step", 7) as running:
        done = run_aiockpt("fetch", running.metadata, "-o", place / "f.safetensors")
    assert done.returncode == 0, done.stderr
    return place / "f.safetensors"


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Serving]:
    """Serve it."""
    with serving(file) as running:
        yield running


@pytest.fixture(scope="module")
def other(file: Path) -> Iterator[Serving]:
    """Serve it once more, with a token of its own."""
    with serving(file) as running:
        yield running


def fetching(url: str, target: Path, *options: object) -> subprocess.Popen[str]:
    """Start to fetch in another process."""
    return subprocess.Popen(
        aiockpt_command("fetch", url, "-o", target, *options),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends_with(path: Path, data: bytes) -> bool:
    """Say whether a file is there, and ends with certain bytes."""
    return path.exists() and path.read_bytes()[-len(data) :] == data


class TestResume:
    """What has been verified is not fetched again, whoever dies."""

    def test_a_receiver_that_is_killed(
        self, server: Serving, file: Path, tmp_path: Path
    ) -> None:
        """The next fetch takes the rest, and no byte more."""
        last = file.read_bytes()[-(CHUNK // 2) :]
        fault = StallAfter(CHUNK // 4 * 3)  # only the last chunk is shorter
        target = tmp_path / "f"
        with beside(FaultProxy("127.0.0.1", server.port, otherwise=fault)) as proxy:
            url = proxy.url(f"/checkpoint/#{server.token}")
            fetch = fetching(url, target)
            until(lambda: ends_with(tmp_path / "f.part", last))
            fetch.kill()
            fetch.communicate()
        assert not target.exists()
        with beside(FaultProxy("127.0.0.1", server.port)) as proxy:
            url = proxy.url(f"/checkpoint/#{server.token}")
            assert main(["fetch", url, "-q", "-o", str(target)]) == 0
            sent = proxy.statistics().bytes_down
        assert target.read_bytes() == file.read_bytes()
        assert 2 * CHUNK < sent < 2 * CHUNK + SLACK

    def test_a_sender_that_is_killed_and_comes_back(
        self, file: Path, tmp_path: Path
    ) -> None:
        """The fetch under way goes on in the middle of a chunk."""
        target = tmp_path / "f"
        with serving(file, *TOKEN) as first:
            slow = Drip(8e6, burst=1 << 16)
            proxy = FaultProxy("127.0.0.1", first.port, otherwise=slow)
            with beside(proxy):
                url = proxy.url("/checkpoint/")
                fetch = fetching(url, target, *TOKEN, "--reconnect", PATIENCE)
                until(lambda: proxy.statistics().bytes_down > CHUNK)
                first.process.kill()
                first.process.wait()
                proxy.otherwise = Drip(1e9, burst=1 << 20)
                with serving(file, *TOKEN) as second:
                    proxy.target = ("127.0.0.1", second.port)
                    _, err = fetch.communicate(timeout=PATIENCE)
                sent = proxy.statistics().bytes_down
        assert fetch.returncode == 0, err
        assert target.read_bytes() == file.read_bytes()
        assert sent < len(file.read_bytes()) + SLACK

    def test_both_are_killed(self, file: Path, tmp_path: Path) -> None:
        """What the first pair has brought is there for the second."""
        last = file.read_bytes()[-(CHUNK // 2) :]
        target = tmp_path / "f"
        with serving(file) as first:
            fault = StallAfter(CHUNK // 4 * 3)
            proxy = FaultProxy("127.0.0.1", first.port, otherwise=fault)
            with beside(proxy):
                fetch = fetching(proxy.url(f"/checkpoint/#{first.token}"), target)
                until(lambda: ends_with(tmp_path / "f.part", last))
                fetch.kill()
                fetch.communicate()
            first.process.kill()
            first.process.wait()
        with (
            serving(file) as second,
            beside(FaultProxy("127.0.0.1", second.port)) as clean,
        ):
            url = clean.url(f"/checkpoint/#{second.token}")
            assert main(["fetch", url, "-q", "-o", str(target)]) == 0
            assert clean.statistics().bytes_down < 2 * CHUNK + SLACK
        assert target.read_bytes() == file.read_bytes()


class TestSeveral:
    """A file from several senders of the same checkpoint."""

    def test_each_gives_a_part(
        self,
        server: Serving,
        other: Serving,
        file: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """With its own token; the summary says how much."""
        urls = [server.metadata, other.metadata]
        assert main(["fetch", *urls, "-o", str(tmp_path / "f")]) == 0
        assert (tmp_path / "f").read_bytes() == file.read_bytes()
        err = capsys.readouterr().err
        assert f"of it from {server.base}\n" in err
        assert f"of it from {other.base}\n" in err
        assert server.token not in err

    def test_one_that_is_not_there_is_told(
        self,
        server: Serving,
        file: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """And the file comes all the same."""
        nobody = "http://127.0.0.1:9/checkpoint/"
        target = str(tmp_path / "f")
        assert main(["fetch", nobody, server.metadata, "-o", target]) == 0
        assert (tmp_path / "f").read_bytes() == file.read_bytes()
        assert f"0 B of it from {nobody}" in capsys.readouterr().err

    def test_nobody_is_there(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One line says so of the first one."""
        urls = ["http://127.0.0.1:9/checkpoint/", "http://127.0.0.1:10/checkpoint/"]
        assert main(["fetch", *urls, "-o", str(tmp_path / "f")]) == 1
        assert "cannot reach http://127.0.0.1:9/" in capsys.readouterr().err
        assert [*tmp_path.iterdir()] == []

    def test_urls_of_different_steps(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Contradict each other."""
        urls = ["http://127.0.0.1:9/checkpoint/7", "http://127.0.0.1:9/checkpoint/8"]
        assert main(["fetch", *urls, "-o", str(tmp_path / "f")]) == 2
        assert "the URLs name steps 7 and 8" in capsys.readouterr().err
