"""The command line guides: what it refuses it names, and it says how to go on."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
import trustme
from safetensors.torch import load_file, save_file

from aiockpt.testing import FaultUnavailableError
from aiockpt.testing.faults import FaultProxy
from tests.support.commandline import (
    ENVIRONMENT,
    PATIENCE,
    OnlyTheEnd,
    aiockpt_command,
    beside,
    run_aiockpt,
    run_shell,
    serving,
    until,
)
from tests.support.link import Link
from tests.support.saved import names, save, save_by_two

pytestmark = pytest.mark.timeout(180)

CHUNK = 16 << 20


def said(code: int, *arguments: object) -> str:
    """Run a command that ends with ``code``; return the only line on its stderr."""
    done = run_aiockpt(*arguments)
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a torch file with a model and what trained it."""
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(3), "optimizer": {"lr": 0.1}}, path)
    return path


class TestConvert:
    """Nothing is written under a name that means something else."""

    @pytest.mark.parametrize("name", ["m.bin", "m.pth.tar", "m.safetensor", "m.NPZ"])
    def test_an_unknown_suffix(self, model: Path, name: str) -> None:
        """It is wrong usage; the known ones are listed."""
        line = said(2, "convert", model, model.with_name(name))
        for hint in (name, ".pt", ".safetensors", f"{name}/"):
            assert hint in line
        assert names(model.parent) == ["model.pt"]

    @pytest.mark.parametrize("name", ["step-7", "llama-3.1", "m.bin/"])
    def test_a_directory(self, model: Path, name: str) -> None:
        """A name without a suffix, a version number, and what ends with a slash."""
        done = run_aiockpt("convert", model, f"{model.parent}/{name}")
        assert done.returncode == 0, done.stderr
        assert (model.parent / name / "commit.json").exists()

    def test_what_a_plain_file_cannot_hold(self, model: Path) -> None:
        """The file, the key and its type are named, and what to do instead."""
        line = said(1, "convert", model, model.with_name("m.safetensors"))
        assert f"{model}: 'optimizer' has the type dict, not Tensor" in line
        assert "checkpoint directory" in line
        directory = shlex.split(line.rpartition(": ")[2])
        assert directory[0] == "aiockpt"
        assert run_aiockpt(*directory[1:]).returncode == 0

    @pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
    def test_a_missing_directory(self, model: Path, name: str) -> None:
        """It is named, and no temporary file."""
        target = model.parent / "missing" / name
        line = said(1, "convert", model, target)
        assert f"there is no directory {target.parent}; make it first" in line
        assert ".tmp" not in line


class TestExistingFiles:
    """``fetch`` and ``convert`` replace nothing, unless they are told to."""

    def test_convert(self, model: Path) -> None:
        """A file, and a checkpoint directory; never a directory of anything else."""
        save_file({"w": torch.zeros(2)}, model.with_name("n.safetensors"))
        for name in ("copy.pt", "copy"):
            target = model.with_name(name)
            first = run_aiockpt("convert", model, target)
            assert first.returncode == 0, first.stderr
            source = model.with_name("n.safetensors")
            line = said(1, "convert", source, target)
            assert f"{target}: it is there already" in line
            assert "--overwrite" in line
            again = run_aiockpt("convert", source, target, "--overwrite")
            assert again.returncode == 0, again.stderr
        assert torch.load(model.with_name("copy.pt"))["w"].shape == (2,)
        (model.parent / "precious").mkdir()
        (model.parent / "precious" / "file").touch()
        line = said(1, "convert", model, model.with_name("precious"), "--overwrite")
        assert "it is no checkpoint" in line
        assert (model.parent / "precious" / "file").exists()

    def test_fetch(self, model: Path) -> None:
        """Refused before anything is fetched; then replaced as a whole."""
        target = model.with_name("f.safetensors")
        target.write_text("precious")
        with serving(model) as running:
            line = said(1, "fetch", running.metadata, "-o", target)
            assert f"{target}: it is there already" in line
            assert "--overwrite" in line
            assert target.read_text() == "precious"
            done = run_aiockpt("fetch", running.metadata, "--overwrite", "-o", target)
            assert done.returncode == 0, done.stderr
        assert torch.equal(load_file(target)["w"], torch.ones(3))


class TestLs:
    """A directory without checkpoints says so."""

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        """The listing is empty, which is no failure."""
        assert said(0, "ls", tmp_path) == f"{tmp_path}: there is no checkpoint here"

    def test_a_level_below(self, tmp_path: Path) -> None:
        """Directories that hold some are named with the command that lists them."""
        for name in ("a run/step-1", "a run/step-2", "other/step-9"):
            save(tmp_path / name, {"w": 1})
        (tmp_path / "logs").mkdir()
        done = run_aiockpt("ls", tmp_path)
        assert done.returncode == 0
        assert done.stdout == ""
        first, *rest = done.stderr.splitlines()
        assert first.startswith(f"{tmp_path}: there is no checkpoint here")
        assert [line.split(":")[0].strip() for line in rest] == [
            "2 checkpoints",
            "1 checkpoint",
        ]
        command = rest[0].partition(": ")[2].removeprefix("aiockpt ")
        assert "step-2" in run_aiockpt(*shlex.split(command)).stdout

    def test_a_checkpoint_itself(self, tmp_path: Path) -> None:
        """It is listed."""
        save(tmp_path / "step-4", {"w": 1})
        assert "step-4" in run_aiockpt("ls", tmp_path / "step-4").stdout


class TestServe:
    """What can be fetched, and from where."""

    def test_a_checkpoint_directory(self, tmp_path: Path) -> None:
        """It keeps its step."""
        save(tmp_path / "step-9", {"w": torch.ones(3)})
        with serving(tmp_path / "step-9") as running:
            assert "as step 9 " in running.announcement
            done = run_shell(running.fetch, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        made = load_file(tmp_path / "step-9.safetensors")
        assert torch.equal(made["w"], torch.ones(3))

    def test_a_directory_of_checkpoints(self, tmp_path: Path) -> None:
        """The latest is served, and named."""
        for step in (9, 20):
            save(tmp_path / f"step-{step}", {"w": torch.ones(3)})
        with serving(tmp_path) as running:
            assert str(tmp_path / "step-20") in running.announcement
            assert "the latest of 2" in running.announcement

    def test_several_ranks(self, tmp_path: Path) -> None:
        """Each wrote its own part, so one is chosen."""
        path = save_by_two(tmp_path / "step-4", {"a": torch.zeros(CHUNK)})
        assert "choose one with --rank" in said(2, "serve", path)
        with serving(path, "--rank", 1) as running:
            assert "as step 4 " in running.announcement

    def test_another_tools_directory(self, tmp_path: Path) -> None:
        """Its files are one state dict."""
        (tmp_path / "hf").mkdir()
        for number, key in enumerate("ab", 1):
            name = f"model-0000{number}-of-00002.safetensors"
            save_file({key: torch.ones(number)}, tmp_path / "hf" / name)
        with serving(tmp_path / "hf") as running:
            done = run_shell(running.fetch, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert set(load_file(tmp_path / "hf-step0.safetensors")) == {"a", "b"}

    def test_a_directory_of_something_else(self, tmp_path: Path) -> None:
        """It holds nothing to serve."""
        (tmp_path / "logs").mkdir()
        assert "no checkpoint" in said(1, "serve", tmp_path)

    def test_it_says_what_it_does_before_it_serves(self, model: Path) -> None:
        """Staging takes a while if the file is large."""
        with serving(model) as running:
            assert running.end() == f"Reading {model} (1.6 kB) ...\n"

    def test_the_port_is_checked_first(self, tmp_path: Path) -> None:
        """Not after minutes of reading."""
        model = tmp_path / "model.pt"
        model.write_bytes(b"PK\3\4 but no zip")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            line = said(1, "serve", model, "--host", "127.0.0.1", "--port", port)
        assert f"cannot listen on 127.0.0.1:{port}: Address already" in line

    def test_only_this_host(self, model: Path) -> None:
        """Whoever binds loopback is told that no other host can fetch."""
        with serving(model) as running:
            pass
        assert "from this host only" in running.announcement

    def test_the_command_for_another_host(self, model: Path) -> None:
        """It names the program, not a path of this host, and what must be there."""
        with serving(model, "--advertise", "trainer.example") as running:
            pass
        assert running.fetch.startswith("aiockpt fetch ")
        assert "//trainer.example:" in running.fetch
        assert "from this host only" not in running.announcement

    def test_what_another_host_needs(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files and variables of this host, which the commands refer to."""
        monkeypatch.setitem(ENVIRONMENT, "AIOCKPT_TOKEN", "not-to-be-seen")
        cert, key = model.with_name("cert.pem"), model.with_name("key.pem")
        issued = trustme.CA().issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(key)
        for part in issued.cert_chain_pems:
            part.write_to_path(cert, append=True)
        options = ("--tls-cert", cert, "--tls-key", key, "--advertise", "t.example")
        with serving(model, *options) as running:
            pass
        needs = f"(another host needs a copy of {cert}, and AIOCKPT_TOKEN)"
        assert needs in running.announcement

    def test_another_host_needs_the_variable_that_is_used(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The printed commands read a token's file where the environment names one."""
        (model.parent / "token").write_text("not-to-be-seen")
        monkeypatch.setitem(
            ENVIRONMENT, "AIOCKPT_TOKEN_PATH", str(model.parent / "token")
        )
        with serving(model, "--advertise", "t.example") as running:
            pass
        assert "(another host needs AIOCKPT_TOKEN_PATH)" in running.announcement
        assert '$(cat "$AIOCKPT_TOKEN_PATH")' in running.curl


@pytest.mark.asyncio
async def test_the_printed_command_works_on_another_host(
    model: Path, tmp_path: Path
) -> None:
    """That host has a network of its own, and a link to the one that serves."""
    async with AsyncExitStack() as stack:
        try:
            link = await stack.enter_async_context(Link())
        except FaultUnavailableError as error:
            pytest.skip(str(error))
        # A later --host counts; nothing but loopback and the link is bound here.
        with link.far.entered(), serving(model, "--host", "0.0.0.0") as running:
            assert f"//{link.far_address}:" in running.fetch
            with link.near.entered():
                fetch = await asyncio.create_subprocess_exec(
                    *aiockpt_command(*shlex.split(running.fetch)[1:]),
                    cwd=tmp_path,
                    env=ENVIRONMENT,
                )
            async with asyncio.timeout(PATIENCE):
                assert await fetch.wait() == 0
    made = load_file(tmp_path / shlex.split(running.fetch)[-1])
    assert torch.equal(made["w"], torch.ones(3))


class TestFetch:
    """An end before the end can be gone on from."""

    @pytest.mark.parametrize("end", ["interrupt", "timeout"])
    def test_it_says_that_the_next_one_goes_on(self, tmp_path: Path, end: str) -> None:
        """Where what has been verified is, and what to do."""
        torch.save({"w": torch.randn(2 * CHUNK // 4 + CHUNK // 8)}, tmp_path / "m.pt")
        target = tmp_path / "f"
        fault = OnlyTheEnd(2 * CHUNK)
        with (
            serving(tmp_path / "m.pt") as running,
            beside(FaultProxy("127.0.0.1", running.port, otherwise=fault)) as proxy,
        ):
            url = proxy.url(f"/checkpoint/#{running.token}")
            timeout = ("--timeout", 8) if end == "timeout" else ()
            fetch = subprocess.Popen(
                aiockpt_command("fetch", url, "-q", "-o", target, *timeout),
                env=ENVIRONMENT,
                stderr=subprocess.PIPE,
                text=True,
                # A shell starts what runs in its background deaf to interrupts.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )
            if end == "interrupt":
                part = tmp_path / "f.part"
                until(lambda: part.exists() and any(part.read_bytes()[-CHUNK // 4 :]))
                fetch.send_signal(signal.SIGINT)
            _, err = fetch.communicate(timeout=PATIENCE)
            assert fetch.returncode == (130 if end == "interrupt" else 1)
            (line,) = err.splitlines()
            assert f"what was verified is in {target}.part" in line
            assert "run the same command again" in line
            again = run_aiockpt("fetch", running.metadata, "-o", target)
        assert "were there already" in again.stderr

    def test_nothing_to_go_on_from(self, model: Path) -> None:
        """Then nothing is promised."""
        line = said(1, "fetch", "http://127.0.0.1:9/", "-o", model.with_name("f"))
        assert ".part" not in line

    @pytest.mark.parametrize("how", ["2>&-", "2>&1 >&- | true", ">&- 2>&-"])
    def test_nobody_reads_its_messages(self, model: Path, how: str) -> None:
        """A closed stderr costs the messages, not the connection."""
        target = model.with_name("f")
        with serving(model) as running:
            # With a pipe the status is that of ``true``; the file tells.
            fetch = shlex.join(aiockpt_command("fetch", running.metadata, "-o", target))
            run_shell(f"sleep 0; {fetch} {how}")
        assert torch.equal(load_file(target)["w"], torch.ones(3))
        assert names(model.parent) == ["f", "model.pt"]


class TestInspectAndVerify:
    """They take one checkpoint, and say where there is one."""

    @pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
    def test_a_directory_of_checkpoints(self, tmp_path: Path, command: str) -> None:
        """One of them is named, which can be pasted."""
        for step in (8, 9):
            save(tmp_path / "all" / f"step-{step}", {"w": torch.ones(3)})
        more = [tmp_path / "out"] if command == "convert" else []
        line = said(1, command, tmp_path / "all", *more)
        assert "a directory of 2 checkpoints" in line
        named = line.rpartition("such as ")[2]
        assert named == str(tmp_path / "all" / "step-9")
        assert run_aiockpt(command, named, *more).returncode == 0

    def test_one_of_each(self, tmp_path: Path) -> None:
        """What there is once is in the singular."""
        path = save(tmp_path / "step-1", {"w": torch.ones(3), "of": {"lr": 1, "t": []}})
        shown = run_aiockpt("inspect", path).stdout
        assert "1 tensor " in shown
        assert "dict of 2: 1 value" in shown
        assert "1 rank wrote it" in said(1, "inspect", path, "--rank", 1)


class TestExitCodes:
    """2 means wrong usage, and nothing else."""

    def test_a_file_without_digests(self, tmp_path: Path) -> None:
        """It could not be verified, which is a failure."""
        save_file({"a": torch.ones(2)}, tmp_path / "f")
        assert "no digests to verify" in said(1, "verify", tmp_path / "f")

    def test_options_that_contradict_each_other(self, tmp_path: Path) -> None:
        """They are wrong usage, whoever finds it out."""
        for arguments in (
            ("fetch", "http://h/1", "--step", 2, "-o", tmp_path / "f"),
            ("serve", tmp_path / "f", "--tls-key", tmp_path / "k"),
            ("inspect", "ftp://host/"),
            ("inspect", "http://host/", "--rank", 0),
            ("inspect", tmp_path / "f", "--step", 0),
            ("follow", "http://h/1", "-o", tmp_path / "d"),
        ):
            said(2, *arguments)

    @pytest.mark.parametrize("command", ["ls", "serve", "convert"])
    def test_a_url_where_a_file_is_asked_for(self, command: str) -> None:
        """It is not taken for a missing file, and its token is not repeated."""
        more = ["copy.pt"] if command == "convert" else []
        line = said(2, command, "http://host:1/checkpoint/#not-to-be-seen", *more)
        assert "it is a URL" in line
        assert "aiockpt fetch" in line
        assert "not-to-be-seen" not in line


def test_a_progress_line_that_cannot_be_written(tmp_path: Path) -> None:
    """It is not blamed on the peer: the transfer goes on without it."""
    torch.save({"w": torch.randn(CHUNK // 4)}, tmp_path / "m.pt")
    ours, theirs = os.openpty()
    with serving(tmp_path / "m.pt") as running:
        fetch = subprocess.Popen(
            aiockpt_command("fetch", running.metadata, "-o", tmp_path / "f"),
            env=ENVIRONMENT,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(ours)  # what is written to a terminal that has gone is EIO
        assert fetch.wait(PATIENCE) == 0
    assert (tmp_path / "f").exists()
