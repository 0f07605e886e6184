"""Metadata in a file, and joined metadata, as arguments of the commands."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import aiockpt
from aiockpt import BackgroundTransport, join_metadata
from aiockpt.testing import assert_same
from tests.support.commandline import (
    Commands,
    Serving,
    run_shell,
    serving,
    start_aiockpt,
)
from tests.support.mesh_ranks import as_rank, distributed
from tests.support.ports import free_port

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
    """Serve something else as step 7."""
    path = tmp_path_factory.mktemp("shard") / "shard.safetensors"
    save_file({"w": torch.ones(5)}, path)
    with serving(path, "--step", 7) as running:
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
            (b"x" * (8 << 20), "its scheme is"),
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
        assert [line[:6] for line in lines if line.startswith("step")] == ["step 7"] * 2

    def test_a_sender_that_is_away_hides_no_other(
        self, cli: Commands, server: Serving
    ) -> None:
        """Its error is in its place; if none answers, the command fails."""
        away = f"http://127.0.0.1:{free_port()}/checkpoint/"
        text = join_metadata([f"{away}#{SECRET}", server.metadata])
        lines = cli("top", text, "--reconnect", 0)[0].splitlines()
        assert lines[:3:2] == [f"aiockpt  {away}", f"aiockpt  {server.base}"]
        assert lines[1].startswith(f"error: cannot reach {away}")
        assert lines[3].startswith("step 7")
        text = join_metadata([away, f"http://127.0.0.1:{free_port()}/"])
        assert f"cannot reach {away}" in cli.error("top", text, "--reconnect", 0)

    @pytest.mark.parametrize(
        "command",
        [("inspect",), ("bench", "--url")],
        ids=lambda command: command[0],
    )
    def test_a_command_for_one_sender_says_so(
        self, cli: Commands, command: tuple[str, ...]
    ) -> None:
        """The message counts the senders, and names what takes joined metadata."""
        text = f"http://a/#{SECRET}|http://b/#{SECRET}"
        error = cli.error(*with_url(command, text), code=2)
        assert "the joined metadata of 2 senders" in error
        assert "fetch, follow, verify and top" in error
        assert SECRET not in error

    def test_one_step_is_verified(self, cli: Commands) -> None:
        """It is the newest one, which a sender may lack, or the one that is named."""
        with trainers(2) as transports:
            text = publish(transports)
            first, second = (each.metadata().partition("#")[0] for each in transports)
            with as_rank(1, 2):
                transports[1].send_checkpoint(step=8, state_dict=state_of(1, 2, 8))
            for options, last, intact in (
                ((), first, second),
                (("--step", 7), second, first),
            ):
                out, err = cli("verify", text, *options, code=1)
                assert out.startswith(f"{intact}: 1 chunk of")
                assert out.count("\n") == 1
                assert f"aiockpt: error: {last}: step" in err
            with as_rank(0, 2):
                transports[0].send_checkpoint(step=8, state_dict=state_of(0, 2, 8))
            assert cli("verify", text)[0].count("step 8, snapshot") == 2

    def test_trainers_that_publish_meanwhile(self, cli: Commands) -> None:
        """All senders keep the step that is verified, or a newer one is verified."""
        with trainers(3) as transports:
            text = publish(transports)
            with training(transports):
                for _ in range(3):
                    steps = steps_in(cli("verify", text)[0])
                    assert len(steps) == 3
                    assert len({*steps}) == 1

    def test_a_sender_that_is_away(self, cli: Commands) -> None:
        """The others keep the step while the command waits for that one."""
        with trainers(3) as transports:
            text = publish(transports)
            away = transports[0].metadata().partition("#")[0]
            transports[0].shutdown()
            with training(transports[1:]):
                out, err = cli("verify", text, "--wait", 1, code=1)
            assert f"aiockpt: error: {away}: " in err
            steps = steps_in(out)
            assert len(steps) == 2
            assert len({*steps}) == 1


ROWS = torch.arange(24.0).view(8, 3)


def state_of(rank: int, ranks: int, step: int, seed: int | None = None) -> Any:
    """Return what one rank of an FSDP job has; with a seed, a value of its own."""
    mesh = init_device_mesh("cpu", (ranks,))
    whole = ROWS + step
    model = {
        "w": distributed(whole, mesh, Shard(0)),
        "b": distributed(whole[:3, 0], mesh, Shard(0)),
        "all": distributed(whole[0], mesh, Replicate()),
    }
    values = {} if seed is None else {"seed": seed}
    return {"model": model, "lr": [0.1, 0.2], "step": step, **values}


@contextmanager
def trainers(ranks: int) -> Iterator[list[BackgroundTransport[Any]]]:
    """Give a transport for each rank of a job, in this process."""
    server = aiockpt.Server(host="127.0.0.1")
    with ExitStack() as stack:
        yield [
            stack.enter_context(aiockpt.make_background_transport(server=server))
            for _ in range(ranks)
        ]


def publish(transports: Sequence[BackgroundTransport[Any]], **options: Any) -> str:
    """Publish a step of all ranks; return the joined metadata."""
    step, ranks = options.pop("step", 7), len(transports)
    for rank, transport in enumerate(transports):
        with as_rank(rank, ranks):
            own = {name: of(rank) for name, of in options.items()}
            transport.send_checkpoint(
                step=step, state_dict=state_of(rank, ranks, step, **own)
            )
    return join_metadata([each.metadata() for each in transports])


@contextmanager
def training(transports: Sequence[BackgroundTransport[Any]]) -> Iterator[None]:
    """Publish one step after the other until the block ends."""
    over = threading.Event()

    def train() -> None:
        for step in count(8):
            publish(transports, step=step)
            if over.wait(0.1):
                return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def steps_in(out: str) -> list[str]:
    """Return the step of each line that ``aiockpt verify`` printed."""
    return [line.partition("step ")[2].split(",")[0] for line in out.splitlines()]


class TestFetch:
    """`fetch` puts the shards of all senders together."""

    def test_full_tensors(self, cli: Commands, tmp_path: Path) -> None:
        """The file has what the ranks have in common, and is one that fetch resumes.

        It has a limit, and replaces nothing unless told to.
        """
        target = tmp_path / "copy.safetensors"
        with trainers(3) as transports:
            text = publish(transports)
            error = cli.error("fetch", text, "-o", target, "--max-size", 100)
            assert "more than the 100 (100 B) of --max-size" in error
            assert not [*tmp_path.iterdir()]
            _, err = cli("fetch", text, "-o", target, "--max-size", "1kB")
            made = target.read_bytes()
            target.write_bytes(b"mine")
            assert "--overwrite" in cli.error("fetch", text, "-o", target)
            assert target.read_bytes() == b"mine"
            cli("fetch", text, "-o", target, "--overwrite", "--step", 7)
        assert target.read_bytes() == made
        assert "step 7, snapshot" in err
        assert "full tensors of 3 senders" in err
        found = aiockpt.load(target)
        whole = ROWS + 7
        expected = {"w": whole, "b": whole[:3, 0].clone(), "all": whole[0].clone()}
        assert_same(found, {"model": expected, "lr": [0.1, 0.2], "step": 7})
        assert cli("verify", target)[0].startswith(f"{target}: 1 chunk of")
        assert [*tmp_path.iterdir()] == [target]

    def test_values_that_differ_by_rank(self, cli: Commands, tmp_path: Path) -> None:
        """The error names their paths and the option that chooses a rank."""
        target = tmp_path / "copy.safetensors"
        with trainers(2) as transports:
            text = publish(transports, seed=lambda rank: 10 + rank)
            error = cli.error("fetch", text, "-o", target)
            assert "different values at seed: take those of one rank" in error
            assert not [*tmp_path.iterdir()]
            cli("fetch", text, "-o", target, "--rank-values", 1)
        assert aiockpt.load(target)["seed"] == 11

    def test_a_step_that_one_sender_lacks(self, cli: Commands, tmp_path: Path) -> None:
        """The error names the step and the sender, and comes soon."""
        target = tmp_path / "copy.safetensors"
        with trainers(2) as transports:
            text = publish(transports)
            with as_rank(0, 2):
                transports[0].send_checkpoint(step=8, state_dict=state_of(0, 2, 8))
            error = cli.error("fetch", text, "-o", target, "--step", 8)
        assert "step 8" in error
        assert not [*tmp_path.iterdir()]

    def test_a_sender_that_is_away(self, cli: Commands, tmp_path: Path) -> None:
        """The error names it."""
        target = tmp_path / "copy.safetensors"
        with trainers(2) as transports:
            text = publish(transports)
            address = transports[1].metadata().partition("#")[0]
            transports[1].shutdown()
            error = cli.error("fetch", text, "-o", target, "--reconnect", 0.1)
        assert address in error
        assert not [*tmp_path.iterdir()]

    def test_replicas(self, cli: Commands, tmp_path: Path) -> None:
        """Several joined strings are replicas, and one of them is enough."""
        target = tmp_path / "copy.safetensors"
        with trainers(2) as first, trainers(2) as second:
            texts = [publish(first), publish(second)]
            first[0].shutdown()
            second[1].shutdown()
            cli("fetch", *texts, "-o", target)
        assert torch.equal(aiockpt.load(target)["model"]["w"], ROWS + 7)

    def test_wrong_usage(self, cli: Commands, tmp_path: Path) -> None:
        """Strings that name no replicas; options that mean nothing."""
        target = tmp_path / "copy.safetensors"
        both = "http://a/#|http://b/"
        error = cli.error("fetch", both, "http://c/", "-o", target, code=2)
        assert "2 and 1 senders" in error
        for option in (["--rank-values", 0], ["--import", "json"]):
            for command in ("fetch", "follow"):
                error = cli.error(command, "http://c/", "-o", target, *option, code=2)
                assert "are for joined metadata" in error


class TestFollow:
    """`follow` makes such a file of each newer step."""

    @contextmanager
    def following(self, *arguments: object) -> Iterator[IO[str]]:
        """Give what the command prints, and interrupt it."""
        process = start_aiockpt("follow", *arguments, "-q", stdout=PIPE)
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()
        assert process.returncode == 130

    def test_it_goes_on_where_it_was(self, cli: Commands, tmp_path: Path) -> None:
        """A command that is started again keeps the step that it has fetched."""
        own: dict[str, Any] = {"seed": lambda rank: 10 + rank}
        options = ("-o", tmp_path, "--rank-values", 1)
        with trainers(2) as transports:
            text = publish(transports, **own)
            file, newer = (tmp_path / f"step-{step}.safetensors" for step in (7, 8))
            cli("fetch", text, "-o", file, "--rank-values", 1)
            before = file.stat().st_mtime_ns
            with self.following(text, *options) as printed:
                assert printed.readline() == f"{file}\n"
                publish(transports, step=8, **own)
                assert printed.readline() == f"{newer}\n"
            assert file.stat().st_mtime_ns == before
            file.rename(newer)
            command = ("follow", text, *options, "-q")
            assert f"{newer}: it is there already" in cli.error(*command)
            with self.following(text, *options, "--overwrite") as printed:
                assert printed.readline() == f"{newer}\n"
        found = aiockpt.load(newer)
        assert torch.equal(found["model"]["w"], ROWS + 8)
        assert (found["step"], found["seed"]) == (8, 11)
        assert [*tmp_path.iterdir()] == [newer]
