"""``aiockpt serve``: what can be served, and the commands that it prints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trustme
from safetensors.torch import load_file, save_file

from tests.support.commandline import (
    CHUNK,
    ENVIRONMENT,
    PATIENCE,
    Commands,
    Serving,
    aiockpt_command,
    run_shell,
    serving,
)
from tests.support.network import Link
from tests.support.proofs import proves
from tests.support.saving import save, save_by_two
from tests.support.shortages import FaultUnavailableError

pytestmark = pytest.mark.timeout(180)

HAS_CURL = shutil.which("curl") is not None


def certificate(place: Path) -> tuple[object, ...]:
    """Return the options for TLS with a certificate of this host."""
    cert, key = place / "cert.pem", place / "key.pem"
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    for part in issued.cert_chain_pems:
        part.write_to_path(cert, append=True)
    return ("--tls-cert", cert, "--tls-key", key)


def run_here(running: Serving, cli: Commands, place: Path) -> None:
    """Run the command that fetches in this process."""
    with contextlib.chdir(place):
        cli(*shlex.split(running.fetch)[1:])


def run_curl(running: Serving, cli: Commands, place: Path) -> None:
    """Run the command for a host without this package."""
    done = run_shell(running.curl, cwd=place)
    assert done.returncode == 0, done.stderr


FETCHES = [run_here, run_curl] if HAS_CURL else [run_here]


class TestPrintedCommands:
    """Pasted into another shell, they fetch what is served."""

    @proves("cell aiockpt fetch: success")
    @pytest.mark.parametrize("tool", ["fetch", "curl"])
    def test_they_make_the_file_that_they_name(
        self, server: Serving, file: Path, model: Path, tmp_path: Path, tool: str
    ) -> None:
        """Any tool that reads safetensors finds the tensors under their paths."""
        if tool == "curl" and not HAS_CURL:
            pytest.skip("curl is not installed")
        done = run_shell(getattr(server, tool), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (made,) = tmp_path.iterdir()
        assert made.name == "model-step7.safetensors"
        assert made.read_bytes() == file.read_bytes()
        expected, found = torch.load(model, weights_only=True), load_file(made)
        assert torch.equal(found["model.weight"], expected["model"]["weight"])
        assert torch.equal(found["model.bias"], expected["model"]["bias"])

    def test_over_tls_they_trust_the_certificate(
        self, cli: Commands, tmp_path: Path
    ) -> None:
        """Another tool's file is served; who does not trust it fetches nothing."""
        save_file({"a": torch.arange(1000)}, tmp_path / "a.safetensors")
        options = (*certificate(tmp_path), "--token=-secret")
        with serving(tmp_path / "a.safetensors", *options) as running:
            assert running.base.startswith("https://")
            made = tmp_path / "a-step0.safetensors"
            for fetch in FETCHES:
                fetch(running, cli, tmp_path)
                assert torch.equal(load_file(made)["a"], torch.arange(1000))
                made.unlink()
            where = ("--token=-secret", "-o", tmp_path / "b")
            assert "certificate" in cli.error("fetch", running.base, *where)
        assert not (tmp_path / "b").exists()

    @pytest.mark.parametrize("variable", ["AIOCKPT_TOKEN", "AIOCKPT_TOKEN_PATH"])
    def test_a_token_of_the_environment_stays_there(
        self,
        cli: Commands,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        variable: str,
    ) -> None:
        """They take it from where it is."""
        save_file({"a": torch.arange(1000)}, tmp_path / "a.safetensors")
        (tmp_path / "the token").write_text("not-to-be-seen")
        path = variable.endswith("PATH")
        value = str(tmp_path / "the token") if path else "not-to-be-seen"
        monkeypatch.setitem(ENVIRONMENT, variable, value)
        monkeypatch.setenv(variable, value)
        with serving(tmp_path / "a.safetensors") as running:
            assert "not-to-be-seen" not in running.announcement
            made = tmp_path / "a-step0.safetensors"
            for fetch in FETCHES:
                fetch(running, cli, tmp_path)
                made.unlink()

    def test_they_name_what_another_host_needs(
        self, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files and variables of this host, and the program without its path."""
        monkeypatch.setitem(ENVIRONMENT, "AIOCKPT_TOKEN", "not-to-be-seen")
        elsewhere = ("--advertise", "trainer.example")
        with serving(small, *certificate(tmp_path), *elsewhere) as running:
            pass
        assert running.fetch.startswith("aiockpt fetch ")
        assert "//trainer.example:" in running.fetch
        assert "from this host only" not in running.announcement
        needs = f"(another host needs a copy of {tmp_path}/cert.pem, and AIOCKPT_TOKEN)"
        assert needs in running.announcement
        (tmp_path / "token").write_text("not-to-be-seen")
        monkeypatch.delitem(ENVIRONMENT, "AIOCKPT_TOKEN")
        monkeypatch.setitem(ENVIRONMENT, "AIOCKPT_TOKEN_PATH", str(tmp_path / "token"))
        with serving(small, *elsewhere) as running:
            pass
        assert "(another host needs AIOCKPT_TOKEN_PATH)" in running.announcement
        assert '$(cat "$AIOCKPT_TOKEN_PATH")' in running.curl

    @pytest.mark.nightly
    @pytest.mark.asyncio
    async def test_they_work_on_another_host(self, small: Path, tmp_path: Path) -> None:
        """The other host has its own network, and a link to the sender."""
        async with AsyncExitStack() as stack:
            try:
                link = await stack.enter_async_context(Link())
            except FaultUnavailableError as error:
                pytest.skip(str(error))
            # A later --host counts; nothing but loopback and the link is bound here.
            with link.far.entered(), serving(small, "--host", "0.0.0.0") as running:
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


def test_a_fetched_file_is_served_again_as_it_was(cli: Commands, file: Path) -> None:
    """Same step, same snapshot; and an interrupt ends it without another word."""
    expected = json.loads(cli("inspect", file, "--json")[0])
    with serving(file) as again:
        found = json.loads(cli("inspect", again.metadata, "--json")[0])
        refusal = cli.error("inspect", f"{again.base}#wrong")
        assert again.end(signal.SIGINT) == f"Reading {file} (41.9 MB) ...\n"
    assert found["step"] == 7
    assert found["snapshot"] == expected["snapshot"]
    assert again.token not in again.announcement + refusal
    assert "wrong" not in refusal
    assert "from this host only" in again.announcement


def test_the_digests_are_those_that_were_chosen(
    cli: Commands, small: Path, tmp_path: Path
) -> None:
    """The file that was fetched keeps them, and can be verified."""
    algorithm = "blake3"
    with serving(small, "--digest", algorithm) as running:
        shown = cli("inspect", running.metadata)[0]
        cli("fetch", running.metadata, "-o", tmp_path / "f")
    ids = r"^  step \d+, snapshot [0-9a-f]{64}$"
    assert re.search(ids, shown, re.MULTILINE)
    assert re.search(rf"^Digests: .+, {algorithm}$", shown, re.MULTILINE)
    assert re.search(r"^    0  [0-9a-f]{64}$", shown, re.MULTILINE)
    assert shown.splitlines()[1:] == cli("inspect", tmp_path / "f")[0].splitlines()[1:]
    report = json.loads(cli("inspect", tmp_path / "f", "--json")[0])
    assert report["algorithm"] == algorithm
    assert {len(each) for each in report["digests"]} == {64}
    assert "intact" in cli("verify", tmp_path / "f")[0]
    data = bytearray((tmp_path / "f").read_bytes())
    data[-1] ^= 1
    (tmp_path / "f").write_bytes(data)
    cli("verify", tmp_path / "f", code=1)


def one_step(place: Path) -> None:
    """Make a checkpoint."""
    save(place, {"a": torch.ones(3)})


def steps(place: Path) -> None:
    """Make a directory of checkpoints."""
    for step in (9, 20):
        one_step(place / f"step-{step}")


def two_ranks(place: Path) -> None:
    """Make a checkpoint of two ranks."""
    save_by_two(place, {"a": torch.zeros(1000)})


def shards(place: Path) -> None:
    """Make a directory as other tools do, of two files for one state dict."""
    place.mkdir()
    for number, key in enumerate("ab", 1):
        path = place / f"model-0000{number}-of-00002.safetensors"
        save_file({key: torch.ones(number)}, path)


@pytest.mark.parametrize(
    ("make", "options", "announced", "keys"),
    [
        (one_step, [], ["as step 9 "], {"a"}),
        (steps, [], ["step-20", "the latest of 2"], {"a"}),
        (two_ranks, ["--rank", "1"], ["as step 9 "], set()),
        (shards, [], [], {"a", "b"}),
    ],
)
def test_a_directory(
    cli: Commands,
    tmp_path: Path,
    make: Callable[[Path], None],
    options: list[str],
    announced: list[str],
    keys: set[str],
) -> None:
    """A checkpoint keeps its step; of several the latest is served."""
    make(tmp_path / "step-9")
    with serving(tmp_path / "step-9", *options) as running:
        assert all(words in running.announcement for words in announced)
        run_here(running, cli, tmp_path)
    (made,) = tmp_path.glob("*.safetensors")
    assert set(load_file(made)) == keys


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"a": {"b": [torch.per_tensor_affine]}}, "a.b[0] is a torch.qscheme: convert"),
        ({"a": SimpleNamespace()}, "it holds a types.SimpleNamespace"),
        (b"PK\3\4 but no zip", "{path}: torch cannot read it"),
        (b"\x80\x02 no pickle", "{path}: torch cannot read it"),
        (b"neither", "{path}: it cannot be read: this is no safetensors header"),
        (None, "{path}: No such file or directory"),
        ("logs/", "no checkpoint"),
    ],
    ids=str,
)
def test_what_cannot_be_served(
    cli: Commands, tmp_path: Path, content: object, reason: str
) -> None:
    """The file is named, and what is wrong with it."""
    path = tmp_path / "f"
    if isinstance(content, dict):
        torch.save(content, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        (path / content).mkdir(parents=True)
    error = cli.error("serve", path)
    assert reason.format(path=path) in error
    assert "weights_only" not in error  # torch's advice to run the file's code


def test_a_damaged_file(cli: Commands, file: Path, tmp_path: Path) -> None:
    """It is not served: its new digests would hide the damage for ever."""
    data, bad = bytearray(file.read_bytes()), tmp_path / "bad.safetensors"
    data[CHUNK + 5] ^= 1
    bad.write_bytes(data)
    assert f"chunk 0 from {bad} has digest" in cli.error("serve", bad)


def test_ranks_of_which_none_is_chosen(cli: Commands, tmp_path: Path) -> None:
    """Each rank wrote its own part, so the user has to choose one."""
    two_ranks(tmp_path / "step-9")
    error = cli.error("serve", tmp_path / "step-9", code=2)
    assert "choose one with --rank" in error


def test_the_port_is_checked_before_the_file_is_read(
    cli: Commands, tmp_path: Path
) -> None:
    """A taken port is an error at once, since reading may take minutes."""
    (tmp_path / "model.pt").write_bytes(b"PK\3\4 but no zip")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = ("--host", "127.0.0.1", "--port", port)
        error = cli.error("serve", tmp_path / "model.pt", *where)
    expected = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert error.startswith(expected)
