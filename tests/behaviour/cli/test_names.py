"""Names from files, peers and people: what a terminal and a shell make of them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.commandline import Commands, run_shell, serving
from tests.support.proofs import proves
from tests.support.saving import save

pytestmark = pytest.mark.timeout(180)


def test_the_commands_to_paste_work_for_an_odd_name(tmp_path: Path) -> None:
    """The pasted commands work, and no command takes the new file for an option."""
    name = "-\x1b]0;E\x07  '$(touch PWNED)\n1"
    save(tmp_path / name, {"w": torch.ones(3)})
    with serving(tmp_path / name) as running:
        assert running.announcement.isprintable()
        done = run_shell(f"bash -c {shlex.quote(running.fetch)}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(line.isprintable() for line in done.stderr.splitlines())
    made = {each.name for each in tmp_path.iterdir()}
    assert made == {name, f"{name}-step1.safetensors"}


def test_what_is_said_of_odd_names(cli: Commands, tmp_path: Path) -> None:
    """Warnings, errors and lists escape them; a command of `ls` can be pasted."""
    below = tmp_path / "a  b\x1b[31m"
    save(below / "step-1", {"w": torch.ones(3)})
    (below / "step-2").mkdir()
    (below / "step-2" / "commit.json").write_text("{")
    err = cli("ls", tmp_path)[1]
    assert "\x1b" not in err
    command = err.splitlines()[-1].partition(": ")[2].strip()
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, check=True
    ).stdout.decode()
    assert words.splitlines() == ["aiockpt", "ls", str(below)]
    torch.save({"w": 1}, below / "x.pt")
    error = cli.error("inspect", below / "x.pt")
    assert "\x1b" not in error
    assert "aiockpt convert" in error


def test_a_long_name_in_a_header(cli: Commands, tmp_path: Path) -> None:
    """One long name among many is no reason for as many wide lines."""
    state = {"n" * 100_000: {f"t{index}": torch.ones(1) for index in range(200)}}
    path = save(tmp_path / "s-1", state)
    out, _ = cli("inspect", path)
    assert len(out) < 100_000
    assert "200 tensors" in out
    tensors = json.loads(cli("inspect", path, "--json")[0])["tensors"]
    assert len(tensors) == 200


def test_a_link_to_itself_is_one_entry_of_many(
    cli: Commands, small: Path, tmp_path: Path
) -> None:
    """A list leaves it out, and a command that is given it says what it is."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop.name)
    save(tmp_path / "s-1", {"w": torch.ones(1)})
    assert "s-1" in cli("ls", tmp_path)[0]
    error = cli.error("fetch", "http://127.0.0.1:9/checkpoint/#t", "-o", loop)
    assert error == f"{loop}: it is a link to itself"
    assert "symbolic links" in cli.error("serve", loop)


@pytest.mark.parametrize(
    "command",
    [
        ["serve", ""],
        ["ls", ""],
        ["inspect", ""],
        ["verify", ""],
        ["convert", "", "x"],
        ["convert", "x", ""],
        ["fetch", "http://127.0.0.1:9/checkpoint/#t", "-o", ""],
        ["follow", "http://127.0.0.1:9/checkpoint/#t", "-o", ""],
        ["serve", "x", "--tls-cert", ""],
        ["top", "http://127.0.0.1:9/checkpoint/#t", "--cafile", ""],
    ],
)
def test_an_empty_path_is_not_this_directory(cli: Commands, command: list[str]) -> None:
    """It is a variable of the shell that has no value."""
    assert "the path is empty" in cli.error(*command, code=2)


def test_what_the_encoding_of_a_terminal_lacks_is_escaped(tmp_path: Path) -> None:
    """A host without a locale gets escapes instead of an error."""
    save(tmp_path / "m\u00f6del-1", {"w": torch.ones(1)})
    done = run_shell(f"PYTHONIOENCODING=ascii aiockpt ls {tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "m\\xf6del-1" in done.stdout


@proves("threat D25")
@pytest.mark.parametrize(
    "command",
    [
        ["serve", "{small}", "--tls-cert", "{fifo}"],
        ["fetch", "https://127.0.0.1:1/#t", "-o", "{place}/f", "--cafile", "{fifo}"],
        ["inspect", "{fifo}"],
        ["convert", "{fifo}", "{place}/step-1"],
        ["serve", "{fifo}"],
        ["serve", "{place}/shards"],
        ["verify", "{place}/step-9"],
    ],
)
def test_nothing_waits_for_a_fifo(
    cli: Commands, small: Path, tmp_path: Path, command: list[str]
) -> None:
    """Nobody may ever write to a FIFO that a directory or a person has named."""
    fifo, marker = tmp_path / "fifo", tmp_path / "step-9" / "commit.json"
    index = tmp_path / "shards" / "m.safetensors.index.json"
    os.mkfifo(fifo)
    for each in (marker, index):
        each.parent.mkdir()
        os.mkfifo(each)
    words = [word.format(small=small, fifo=fifo, place=tmp_path) for word in command]
    assert cli.error(*words)


@proves("threat D25")
def test_a_token_file_is_a_file(
    cli: Commands, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may have no end, and a FIFO no beginning, so both are refused."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        monkeypatch.setenv("AIOCKPT_TOKEN_PATH", str(path))
        assert cli.error("serve", small) == f"{path}: it is not a regular file"
