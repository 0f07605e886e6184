"""The command line: what it prints, writes, imports, and how it fails."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trustme
from safetensors.torch import load_file, save_file

from aiockpt.cli import main
from aiockpt.testing.faults import Answer, CutAfter, Fault, FaultProxy, Pipe, StallAfter
from tests.support.commandline import (
    ENVIRONMENT,
    PATIENCE,
    OnlyTheEnd,
    Serving,
    aiockpt_command,
    beside,
    run_aiockpt,
    run_shell,
    serving,
)
from tests.support.disks import small_disk
from tests.support.proofs import proves

pytestmark = pytest.mark.timeout(
    180
)  # of processes that import torch, on slow machines

CHUNK = 16 << 20
HEAVY = ("torch", "aiohttp", "anyio", "numpy")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a torch file of two and a half chunks, some values, and tied weights."""
    torch.manual_seed(0)
    weight = torch.randn(2 * CHUNK // 4 + CHUNK // 8)
    state = {
        "model": OrderedDict(weight=weight, tied=weight, bias=torch.ones(3)),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1},
        "step": 7,
    }
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Serving]:
    """Serve the model as step 7."""
    with serving(model, "--step", 7) as running:
        yield running


@pytest.fixture(scope="module")
def file(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what fetching the model gives."""
    path = tmp_path_factory.mktemp("fetched") / "model.safetensors"
    done = run_aiockpt("fetch", server.metadata, "-o", path)
    assert done.returncode == 0, done.stderr
    return path


def error_of(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 1
) -> str:
    """Run a command that fails; return its only line on stderr."""
    assert main([*map(str, arguments)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    return the_error(err)


def the_error(err: str) -> str:
    """Return the message of the one line that an error is, after those on progress."""
    shown = ("waiting", "fetching", "Reading ")
    lines = [line for line in err.splitlines() if not line.startswith(shown)]
    assert len(lines) == 1, err
    assert lines[0].startswith("aiockpt: error: ")
    return lines[0].removeprefix("aiockpt: error: ")


@pytest.mark.usefixtures("fresh_interpreters")
class TestImports:
    """What a command costs before it works."""

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--help"],
            ["--version"],
            ["nonsense"],
            *([command, "--help"] for command in ("serve", "fetch", "inspect")),
            *([command, "--help"] for command in ("verify", "demo", "doctor")),
            ["fetch", "ftp://host/", "-o", "f"],
            ["inspect", "/nonexistent"],
        ],
        ids=" ".join,
    )
    def test_help_and_parsing_load_no_framework(self, arguments: list[str]) -> None:
        """They answer at once."""
        assert loaded_by(arguments) == set()

    def test_fetch_loads_no_torch(self, server: Serving, tmp_path: Path) -> None:
        """A host without torch can fetch."""
        loaded = loaded_by(["fetch", server.metadata, "-o", str(tmp_path / "f")])
        assert "torch" not in loaded
        assert "aiohttp" in loaded
        assert (tmp_path / "f").exists()

    def test_inspect_and_verify_load_no_torch(
        self, server: Serving, file: Path
    ) -> None:
        """Neither of a peer's checkpoint nor of a file's."""
        assert "torch" not in loaded_by(["inspect", server.metadata])
        assert loaded_by(["verify", str(file)]) == set()


def loaded_by(arguments: list[str]) -> set[str]:
    """Return the frameworks that a command loads in a fresh interpreter."""
    program = (
        "import sys\n"
        "from aiockpt.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print('LOADED', *(n for n in {HEAVY!r} if n in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return set(done.stdout.split("LOADED")[1].split())


class TestServe:
    """A file is served, and the commands that are printed fetch it."""

    def test_the_printed_fetch_command_works(
        self, server: Serving, file: Path, tmp_path: Path
    ) -> None:
        """Pasted into another shell, it makes the file that it names."""
        done = run_shell(server.fetch, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (made,) = tmp_path.iterdir()
        assert made.name == "model-step7.safetensors"
        assert made.read_bytes() == file.read_bytes()

    @pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
    def test_the_printed_curl_command_works(
        self, server: Serving, file: Path, tmp_path: Path
    ) -> None:
        """With nothing of ours on the receiving host."""
        done = run_shell(server.curl, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        made = tmp_path / "model-step7.safetensors"
        assert made.read_bytes() == file.read_bytes()

    @proves("cell aiockpt fetch: success")
    def test_what_was_fetched_is_the_state_dict(self, model: Path, file: Path) -> None:
        """Any tool that reads safetensors finds the tensors under their paths."""
        expected = torch.load(model, weights_only=True)
        found = load_file(file)
        assert torch.equal(found["model.weight"], expected["model"]["weight"])
        assert torch.equal(found["model.bias"], expected["model"]["bias"])

    def test_a_fetched_file_is_served_again_as_it_was(
        self, file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Same step, same snapshot; and an interrupt ends it without another word."""
        assert main(["inspect", str(file), "--json"]) == 0
        expected = json.loads(capsys.readouterr().out)
        with serving(file) as again:
            assert main(["inspect", again.metadata, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            assert main(["inspect", f"{again.base}#wrong"]) == 1
            refusal = capsys.readouterr().err
            assert again.end(signal.SIGINT).startswith("Reading ")
        assert found["step"] == 7
        assert found["snapshot"] == expected["snapshot"]
        assert again.token not in again.announcement + refusal
        assert "wrong" not in refusal

    def test_another_tools_file_over_tls(self, tmp_path: Path) -> None:
        """The printed commands trust the certificate that is served."""
        save_file({"a": torch.arange(1000)}, tmp_path / "a.safetensors")
        cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        issued = trustme.CA().issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(key)
        for part in issued.cert_chain_pems:
            part.write_to_path(cert, append=True)
        options = ("--tls-cert", cert, "--tls-key", key, "--token=-secret")
        with serving(tmp_path / "a.safetensors", *options) as running:
            assert running.base.startswith("https://")
            done = run_shell(running.fetch, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            made = tmp_path / "a-step0.safetensors"
            assert torch.equal(load_file(made)["a"], torch.arange(1000))
            if shutil.which("curl"):
                made.unlink()
                assert run_shell(running.curl, cwd=tmp_path).returncode == 0
                assert main(["verify", str(made)]) == 0
            distrusting = run_aiockpt(
                "fetch", running.base, "--token=-secret", "-o", tmp_path / "b"
            )
        assert "certificate" in the_error(distrusting.stderr)
        assert not (tmp_path / "b").exists()

    @pytest.mark.parametrize("variable", ["AIOCKPT_TOKEN", "AIOCKPT_TOKEN_PATH"])
    def test_a_secret_of_the_environment_stays_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        """The printed commands take it from where it is, and work."""
        save_file({"a": torch.arange(1000)}, tmp_path / "a.safetensors")
        (tmp_path / "the token").write_text("not-to-be-seen")
        path = variable.endswith("PATH")
        value = str(tmp_path / "the token") if path else "not-to-be-seen"
        monkeypatch.setitem(ENVIRONMENT, variable, value)
        with serving(tmp_path / "a.safetensors") as running:
            assert "not-to-be-seen" not in running.announcement
            made = tmp_path / "a-step0.safetensors"
            for command in (running.fetch, running.curl):
                if command is running.curl and not shutil.which("curl"):
                    continue
                done = run_shell(command, cwd=tmp_path)
                assert done.returncode == 0, done.stderr
                assert torch.equal(load_file(made)["a"], torch.arange(1000))
                made.unlink()

    def test_a_port_in_use(
        self, server: Serving, file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Is named."""
        options = ("--host", "127.0.0.1", "--port", server.port)
        error = error_of(capsys, "serve", file, *options)
        where = f"127.0.0.1:{server.port}"
        assert error.startswith(f"cannot listen on {where}: Address already in use")

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (torch.per_tensor_affine, "a.b[0] is a torch.qscheme: convert it"),
            (SimpleNamespace(), "it holds a types.SimpleNamespace"),
        ],
    )
    def test_a_torch_file_with_more_than_a_state_dict(
        self,
        value: object,
        reason: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """What cannot travel is named, and where it is."""
        torch.save({"a": {"b": [value]}, "t": torch.ones(2)}, tmp_path / "bad.pt")
        assert reason in error_of(capsys, "serve", tmp_path / "bad.pt")

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"PK\3\4 but no zip", "torch cannot read it"),
            (b"\x80\x02 no pickle", "torch cannot read it"),
            (b"neither", "it cannot be read: this is no safetensors header"),
            (None, "No such file or directory"),
        ],
    )
    def test_a_file_of_no_known_kind(
        self,
        content: bytes | None,
        reason: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The file is named, and what is wrong with it."""
        path = tmp_path / "f"
        if content is not None:
            path.write_bytes(content)
        assert error_of(capsys, "serve", path).startswith(f"{path}: {reason}")

    def test_a_damaged_file_is_not_served(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Its new digests would hide the damage for ever."""
        bad = damaged(file, tmp_path, CHUNK + 5)
        assert f"chunk 0 from {bad} has digest" in error_of(capsys, "serve", bad)


def damaged(file: Path, directory: Path, *positions: int) -> Path:
    """Return a copy of a file with single bits flipped."""
    data = bytearray(file.read_bytes())
    for position in positions:
        data[position] ^= 1
    path = directory / "damaged.safetensors"
    path.write_bytes(data)
    return path


class TestFetch:
    """A checkpoint arrives whole, or not at all."""

    @pytest.mark.parametrize(
        ("form", "options"),
        [
            ("{base}#{token}", []),
            ("{base}#{token}", ["--step", "7"]),
            ("{base}7#{token}", []),
            ("{base}7/full#{token}", ["--step", "7"]),
            ("{base}7/metadata", ["--token={token}"]),
            ("{base}latest#{token}", []),
            ("{root}#{token}", ["--timeout", "60"]),
        ],
    )
    def test_every_way_to_name_a_checkpoint(
        self,
        server: Serving,
        file: Path,
        tmp_path: Path,
        form: str,
        options: list[str],
    ) -> None:
        """The metadata, or what a browser's address bar would show."""
        root = server.base.removesuffix("/checkpoint/")
        names = {"base": server.base, "token": server.token, "root": root}
        url, *rest = (each.format(**names) for each in [form, *options])
        assert main(["fetch", url, "-q", "-o", str(tmp_path / "f"), *rest]) == 0
        assert (tmp_path / "f").read_bytes() == file.read_bytes()

    def test_the_environment_may_hold_the_token(
        self, server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that it is in no list of processes."""
        (tmp_path / "token").write_text(f"{server.token}\n")
        monkeypatch.setenv("AIOCKPT_TOKEN_PATH", str(tmp_path / "token"))
        assert main(["fetch", server.base, "-q", "-o", str(tmp_path / "f")]) == 0

    def test_a_size_that_is_allowed(self, server: Serving, tmp_path: Path) -> None:
        """The limit itself is no limit to a checkpoint below it."""
        target = tmp_path / "f"
        fetch = ["fetch", server.metadata, "-o", str(target), "--max-size", "1GiB"]
        assert main(fetch) == 0
        assert main(["verify", str(target)]) == 0

    def test_a_summary_where_nobody_watches(
        self, server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Plain lines, and no control characters; nothing at all if quiet."""
        assert main(["fetch", server.metadata, "-o", str(tmp_path / "f")]) == 0
        out, err = capsys.readouterr()
        assert out == ""
        assert re.search(r"f: step 7, snapshot [0-9a-f]{32}\n41.9 MB at .*/s", err)
        assert "\r" not in err
        assert main(["fetch", server.metadata, "-q", "-o", str(tmp_path / "g")]) == 0
        assert capsys.readouterr() == ("", "")

    def test_a_bar_on_a_terminal(self, server: Serving, tmp_path: Path) -> None:
        """With the stop's name, the share, the bytes and the rate."""
        ours, theirs = pty.openpty()
        try:
            process = subprocess.Popen(
                aiockpt_command("fetch", server.metadata, "-o", tmp_path / "f"),
                env=ENVIRONMENT,
                stderr=theirs,
            )
            os.close(theirs)
            shown = read_terminal(ours)
            assert process.wait(PATIENCE) == 0
        finally:
            os.close(ours)
        assert "waiting" in shown
        assert re.search(r"\[#{9,}\] 100%  41.9 MB of 41.9 MB  .*/s  ETA 0:00", shown)

    def test_an_early_fetch_waits(self, file: Path, tmp_path: Path) -> None:
        """For a sender that is not there yet; one that lets anybody fetch."""
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        url, target = f"http://127.0.0.1:{port}/checkpoint/", tmp_path / "f"
        command = aiockpt_command("fetch", url, "-q", "--wait", 60, "-o", target)
        with (
            subprocess.Popen(command, env=ENVIRONMENT) as early,
            serving(file, "--port", port, "--insecure") as running,
        ):
            assert early.wait(PATIENCE) == 0
            assert "#" not in running.fetch
            assert "Bearer" not in running.curl
        assert target.read_bytes() == file.read_bytes()


def read_terminal(fd: int) -> str:
    """Return all that a program shows on the terminal of which ``fd`` is one end."""
    shown = b""
    while True:
        try:
            data = os.read(fd, 4096)
        except OSError:  # Linux says so when the program has ended
            return shown.decode()
        shown += data


class FlipAlways(Fault):
    """A bit of every larger piece arrives inverted."""

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        if len(data) > 10_000:  # headers are smaller
            data = bytes([*data[:-1], data[-1] ^ 1])
        await pipe.send(data)


class TestFetchThroughFaults:
    """A bad way to the sender costs time, never a wrong byte."""

    @proves("cell aiockpt fetch: timeout")
    def test_a_fetch_goes_on_where_the_last_one_failed(
        self,
        server: Serving,
        file: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """What was verified is not fetched again, and the old file stays till then."""
        target = tmp_path / "f"
        target.write_text("old")
        fetch = ["fetch", "--overwrite", "-o", str(target)]
        fault = OnlyTheEnd(2 * CHUNK)
        with beside(FaultProxy("127.0.0.1", server.port, otherwise=fault)) as proxy:
            url = proxy.url(f"/checkpoint/#{server.token}")
            assert main([*fetch, url, "--timeout", "3"]) == 1
        assert (
            "timed out after 3 s while fetching step 7 from http"
            in capsys.readouterr().err
        )
        assert target.read_text() == "old"
        assert main([*fetch, server.metadata]) == 0
        assert "were there already) at " in capsys.readouterr().err
        assert target.read_bytes() == file.read_bytes()
        assert [*tmp_path.iterdir()] == [target]

    def test_connections_that_break_are_made_again(
        self, server: Serving, file: Path, tmp_path: Path
    ) -> None:
        """Within one fetch."""
        cuts = [CutAfter(CHUNK // 2, reset=bool(n % 2)) for n in range(4)]
        with beside(FaultProxy("127.0.0.1", server.port, faults=cuts)) as proxy:
            url = proxy.url(f"/checkpoint/#{server.token}")
            assert main(["fetch", url, "-q", "-o", str(tmp_path / "f")]) == 0
        assert (tmp_path / "f").read_bytes() == file.read_bytes()

    @proves("cell aiockpt fetch: error")
    def test_a_bit_that_always_flips(
        self, server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Is an error that names the chunk, and no file."""
        fault = FlipAlways()
        with beside(FaultProxy("127.0.0.1", server.port, otherwise=fault)) as proxy:
            url = proxy.url(f"/checkpoint/#{server.token}")
            error = error_of(capsys, "fetch", url, "-o", tmp_path / "f")
        assert re.match(
            r"chunk \d from http://127.0.0.1:\d+/checkpoint/ has dig", error
        )
        assert not (tmp_path / "f").exists()

    @proves("cell aiockpt fetch: the other one dies")
    def test_a_sender_that_dies(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Is an error as soon as it is not expected back."""
        with serving(file) as running:
            fault = StallAfter(CHUNK // 4)
            proxy = FaultProxy("127.0.0.1", running.port, otherwise=fault)
            with beside(proxy):
                url = proxy.url(f"/checkpoint/#{running.token}")
                target = tmp_path / "f"
                fetch = subprocess.Popen(
                    aiockpt_command("fetch", url, "--reconnect", 0.5, "-o", target),
                    env=ENVIRONMENT,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                wait_for(tmp_path / "f.part")
                running.process.kill()
            _, err = fetch.communicate(timeout=PATIENCE)
            running.process.wait()
        assert fetch.returncode == 1
        assert "is the sender running there?" in the_error(err)
        assert not target.exists()

    @proves("cell aiockpt fetch: cancel")
    def test_an_interrupt(self, server: Serving, tmp_path: Path) -> None:
        """Ends it at once, without a traceback."""
        fault = StallAfter(CHUNK // 4)
        with beside(FaultProxy("127.0.0.1", server.port, otherwise=fault)) as proxy:
            url = proxy.url(f"/checkpoint/#{server.token}")
            fetch = subprocess.Popen(
                aiockpt_command("fetch", url, "-o", tmp_path / "f"),
                env=ENVIRONMENT,
                stderr=subprocess.PIPE,
                text=True,
                # A shell starts what runs in its background deaf to interrupts.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )
            wait_for(tmp_path / "f.part")
            fetch.send_signal(signal.SIGINT)
            _, err = fetch.communicate(timeout=PATIENCE)
        assert fetch.returncode == 130
        assert "Traceback" not in err
        assert not (tmp_path / "f").exists()


def wait_for(path: Path) -> None:
    """Wait until another process has made a file."""
    pause = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        if path.exists():
            return
        pause.wait(0.01)
    raise AssertionError(f"{path} did not appear")


class TestFetchErrors:
    """One line that names the thing; nothing is left behind."""

    @pytest.fixture(autouse=True)
    def _nothing_is_written(self, tmp_path: Path) -> Iterator[None]:
        before = sorted(tmp_path.iterdir())
        yield
        assert sorted(tmp_path.iterdir()) == before

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("{base}8#{token}", "step 8 is not published at "),
            ("{base}6#{token}", "step 6 is not published at "),
            ("{base}#not-the-token", "refused the token"),
            ("{base}", "refused the token"),
            ("http://127.0.0.1:1/checkpoint/", "cannot reach http://127.0.0.1:1/"),
            ("http://no-such-host.invalid/", "cannot reach http://no-such-host.inv"),
            ("http://127.0.0.1:{port}/other/#{token}", "aiockpt server?"),
        ],
    )
    def test_a_url_that_leads_nowhere(
        self,
        server: Serving,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        url: str,
        reason: str,
    ) -> None:
        """Wrong step, wrong token, nobody there, no such host, not ours."""
        names = {"base": server.base, "token": server.token, "port": server.port}
        error = error_of(capsys, "fetch", url.format(**names), "-o", tmp_path / "f")
        assert reason in error
        assert server.token not in error
        assert "not-the-token" not in error

    def test_a_checkpoint_that_is_too_large(
        self, server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It is refused before it takes any space, and the way out is named."""
        fetch = ("fetch", server.metadata, "-o", tmp_path / "f", "--max-size")
        error = error_of(capsys, *fetch, "1MiB")
        assert "more than the 1048576 (1.0 MB) of --max-size; raise it if" in error

    def test_a_step_that_does_not_come(
        self, server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It is waited for as long as asked, not longer; then the error is the same."""
        options = ("--step", 8, "--wait", 0.5, "-o", tmp_path / "f")
        error = error_of(capsys, "fetch", server.metadata, *options)
        assert error.startswith("step 8 is not published at ")
        assert error.endswith("step 7")

    @pytest.mark.parametrize(
        "answer",
        [
            b"SSH-2.0-OpenSSH_9.2\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
        ],
    )
    def test_a_server_of_another_kind(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: bytes
    ) -> None:
        """It is asked whether it is one of ours, and no redirect is followed."""
        with beside(FaultProxy("127.0.0.1", 1, otherwise=Answer(answer))) as proxy:
            url = proxy.url("/checkpoint/")
            assert url in error_of(capsys, "fetch", url, "-o", tmp_path / "f")

    @pytest.mark.parametrize(
        ("output", "reason"),
        [
            ("missing/f", "there is no directory"),
            (".", "it is a directory; name a file in it"),
            ("/dev/null", "it is not a regular file"),
        ],
    )
    def test_a_file_that_cannot_be(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        output: str,
        reason: str,
    ) -> None:
        """It is found out before anybody is asked."""
        url = "http://127.0.0.1:1/checkpoint/"
        assert reason in error_of(capsys, "fetch", url, "-o", tmp_path / output)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_directory_that_is_not_ours(
        self, server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The system's own words do."""
        tmp_path.chmod(0o500)
        error = error_of(capsys, "fetch", server.metadata, "-o", tmp_path / "f")
        assert error == f"{tmp_path}/f.part: Permission denied"

    def test_a_full_disk(
        self, server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It names the free space, and the old file is intact."""
        disk = tmp_path / "disk"
        with small_disk(disk, 1 << 20):
            (disk / "f").write_text("old")
            fetch = ("fetch", server.metadata, "--overwrite", "-o", disk / "f")
            error = error_of(capsys, *fetch)
            assert "No space left on device: 41.9 MB are needed and 1.0 MB are" in error
            assert (disk / "f").read_text() == "old"
            assert [*disk.iterdir()] == [disk / "f"]
        disk.rmdir()

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["http://h/1", "--step", "2"], "the URL names step 1 and --step says 2"),
            (["http://h/", "--token", "two words"], "the token must be printable"),
            (["http://h/", "--cafile", "/nonexistent"], "/nonexistent: it holds no us"),
        ],
    )
    def test_arguments_that_cannot_be(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        reason: str,
    ) -> None:
        """Contradictions, and files that are not there."""
        code = 1 if "--cafile" in arguments else 2  # a file is no wrong usage
        fetch = ("fetch", *arguments, "-o", tmp_path / "f")
        assert error_of(capsys, *fetch, code=code).startswith(reason)


class TestUsage:
    """Wrong usage is one line, and exit code 2."""

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["nonsense"],
            ["fetch", "http://host/"],
            ["fetch", "ftp://host/#secret", "-o", "f"],
            ["fetch", "http://host:port/#secret", "-o", "f"],
            ["fetch", "http://user:secret@host/", "-o", "f"],
            ["fetch", "http://host/", "-o", "f", "--step", "-1"],
            ["fetch", "http://host/", "-o", "f", "--timeout", "nan"],
            ["fetch", "http://host/", "-o", "f", "--max-size", "10G"],
            ["serve", "f", "--port", "99999"],
            ["serve", "f", "--insecure", "--token", "secret"],
            ["verify"],
        ],
        ids=" ".join,
    )
    def test_one_line_without_the_secret(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It says what is wrong and where the help is."""
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        error = the_error(capsys.readouterr().err)
        assert "--help)" in error
        assert "secret" not in error

    def test_a_reader_that_leaves(self, file: Path) -> None:
        """As ``head`` does; it is no error to speak of."""
        done = run_shell(f"{' '.join(aiockpt_command('inspect', file))} | true")
        assert done.stderr == ""


class TestVerify:
    """Every byte of our files has a digest."""

    def test_an_intact_file(
        self, file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Exit code 0, and what it is."""
        assert main(["verify", str(file)]) == 0
        assert "3 chunks of 16.8 MB and the header are intact; step 7, snapshot" in (
            capsys.readouterr().out
        )

    def test_damaged_chunks(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """They are named, all of them."""
        bad = damaged(file, tmp_path, CHUNK + CHUNK // 2, 2 * CHUNK + CHUNK // 4)
        error = error_of(capsys, "verify", bad)
        assert error.startswith(f"{bad}: chunk 1 of 3 (bytes 16")
        assert error.endswith("; 1 more are damaged: 2")

    def test_a_damaged_header(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The header has a digest, too."""
        bad = damaged(file, tmp_path, 300)
        assert f"the header from {bad} has digest" in error_of(capsys, "verify", bad)

    def test_a_truncated_file(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It says by how much."""
        bad = damaged(file, tmp_path)
        os.truncate(bad, 1 << 20)
        assert "it is truncated: 1048576 bytes where" in error_of(capsys, "verify", bad)

    def test_another_tools_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """There is nothing to verify, which is not the same as intact."""
        save_file({"a": torch.ones(2)}, tmp_path / "f")
        assert "no digests to verify" in error_of(capsys, "verify", tmp_path / "f")

    def test_a_peer(self, server: Serving, capsys: pytest.CaptureFixture[str]) -> None:
        """What it serves is read and not kept; the name holds no token."""
        assert main(["verify", server.metadata]) == 0
        assert capsys.readouterr().out.startswith(
            f"{server.base}: 3 chunks of 16.8 MB and the header are intact; step 7, "
        )
        assert main(["verify", server.metadata, "--step", "8"]) == 1
        assert "step 8 is not published" in capsys.readouterr().err

    def test_a_peer_that_sends_what_is_damaged(
        self, server: Serving, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The chunk is named."""
        fault = FlipAlways()
        with beside(FaultProxy("127.0.0.1", server.port, otherwise=fault)) as proxy:
            url = proxy.url(f"/checkpoint/#{server.token}")
            error = error_of(capsys, "verify", url)
        assert re.match(r"chunk \d from http://127.0.0.1:\d+/checkpoint/ has", error)

    def test_a_step_of_a_file(
        self, file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A file holds one."""
        error = error_of(capsys, "verify", file, "--step", 7, code=2)
        assert error.startswith("--step is for URLs")


class TestInspect:
    """What a checkpoint holds, for people and for programs."""

    def test_a_file_and_a_peer_show_the_same(
        self, server: Serving, file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """But for the name."""
        assert main(["inspect", str(file)]) == 0
        of_file = capsys.readouterr().out.splitlines()
        assert main(["inspect", server.metadata]) == 0
        of_peer = capsys.readouterr().out.splitlines()
        assert of_file[1:] == of_peer[1:]
        assert of_peer[0] == f"{server.base}:"

    def test_the_table(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Step, tree, digests, and each tensor with its dtype, shape and size."""
        assert main(["inspect", str(file)]) == 0
        shown = capsys.readouterr().out
        for expected in (
            r"  step 7, snapshot [0-9a-f]{32}",
            r"  dict of 3",
            r"    model      OrderedDict of 3: 3 tensors",
            r"    optimizer  dict of 2: 1 tensor, 1 value",
            r"    step       int 7",
            r"Digests: 3 chunks of 16.8 MB, xxh3-128",
            r"    2  [0-9a-f]{32}",
            r"model\.weight +float32 +10485760 +41\.9 MB",
            r"model\.tied +float32 +10485760 +41\.9 MB  in model\.weight",
            r"optimizer\.state\[0\]\.step +float32 +scalar +4 B",
        ):
            assert re.search(f"^{expected}$", shown, re.MULTILINE), expected

    def test_json_is_complete(
        self, file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Digests, tree and tensors, in plain types."""
        assert main(["inspect", str(file), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["format"] == "aiockpt"
        assert len(report["digests"]) == 3
        assert report["segment_bytes"] + report["header_bytes"] == file.stat().st_size
        bias = next(t for t in report["tensors"] if t["path"] == "model.bias")
        assert bias == {
            "path": "model.bias",
            "dtype": "float32",
            "shape": [3],
            "bytes": 12,
            "entry": "model.bias",
            "flags": [],
        }

    def test_another_tools_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With its metadata; a name cannot control the terminal."""
        tensors = {"a\x1b[31m": torch.ones(2, dtype=torch.bfloat16)}
        save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
        assert main(["inspect", str(tmp_path / "f")]) == 0
        shown = capsys.readouterr().out
        assert "not written by aiockpt" in shown
        assert "format: pt" in shown
        assert re.search(r"^a\\x1b\[31m +bfloat16 +2 +4 B$", shown, re.MULTILINE)

    def test_what_is_no_checkpoint(
        self, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A torch file is not read: that could run code."""
        error = error_of(capsys, "inspect", model)
        assert error.startswith(f"{model}: it is a file of torch.save")
