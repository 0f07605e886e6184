"""The command line as a whole: its usage errors, exit codes and imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commandline import (
    ENVIRONMENT,
    PATIENCE,
    Commands,
    Serving,
    aiockpt_command,
    run_shell,
)

HEAVY = ("torch", "aiohttp", "anyio", "numpy")

USAGE = [
    (["nonsense"], "invalid choice"),
    (["fetch", "http://host/"], "required"),
    (["fetch", "ftp://host/#secret", "-o", "f"], "http://host:port"),
    (["fetch", "http://host:port/#secret", "-o", "f"], "http://host:port"),
    (["fetch", "http://user:secret@host/", "-o", "f"], "http://host:port"),
    (["fetch", "http://host/", "-o", "f", "--step", "-1"], "--step"),
    (["fetch", "http://host/", "-o", "f", "--timeout", "nan"], "--timeout"),
    (["fetch", "http://host/", "-o", "f", "--max-size", "10G"], "--max-size"),
    (["serve", "f", "--port", "99999"], "--port"),
    (["serve", "f", "--digest", "md5"], "sha256"),
    (["serve", "f", "--insecure", "--token", "secret"], "not allowed with"),
    (["verify"], "required"),
    (["top", "http://h/#secret|http://i/#secret", "http://h/#secret"], "ed arguments"),
    (["verify", "http://h/#secret", "--bogus", "http://h/c/#secret"], "ments: --bogus"),
    (["verify", "f", "--tokens", "secret", "--tokens=secret"], ": --tokens --tokens"),
    (["http://h/#secret|http://i/#secret"], "invalid choice: 'http://h/#..."),
    (["verify", "f", "--timeout", "http://h/#secret"], "http://h/#..."),
]
"""What the parser refuses; its message names the help."""

CONTRADICTIONS = [
    (["fetch", "http://h/1", "--step", "2", "-o", "f"], "the URL names step 1 and"),
    (["fetch", "http://h/7", "http://h/8", "-o", "f"], "the URLs name steps 7 and 8"),
    (["fetch", "http://h/", "--token", "two words", "-o", "f"], "must be printable"),
    (["serve", "f", "--tls-key", "k"], "--tls-cert"),
    (["inspect", "ftp://host/"], "http://host:port"),
    (["inspect", "http://host/", "--rank", "0"], "--rank"),
    (["inspect", "f", "--step", "0"], "--step is for URLs"),
    (["follow", "http://h/1", "-o", "d"], "step 1"),
    (["top", "http://h/1"], "step 1"),
    (["ls", "http://host:1/c/#secret"], "it is a URL"),
    (["serve", "http://host:1/c/#secret"], "aiockpt fetch"),
    (["convert", "http://host:1/c/#secret", "copy.pt"], "aiockpt fetch"),
]


@pytest.mark.parametrize(
    ("arguments", "reason", "helps"),
    [
        *((*each, True) for each in USAGE),
        *((*each, False) for each in CONTRADICTIONS),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    cli: Commands, arguments: list[str], reason: str, helps: bool
) -> None:
    """The message comes from any part of the command, and does not repeat a secret."""
    error = cli.error(*arguments, code=2)
    assert reason in error
    assert not helps or "--help)" in error
    assert "secret" not in error


def test_no_arguments_are_answered_with_help(cli: Commands) -> None:
    """The command prints help, and exits as after wrong usage."""
    out, err = cli(code=2)
    assert out == ""
    assert err == cli("--help")[0]


def test_a_reader_that_leaves(file: Path) -> None:
    """The command ends without an error if its reader leaves, as ``head`` does."""
    done = run_shell(f"{' '.join(aiockpt_command('inspect', file))} | true")
    assert done.stderr == ""


LOADED = f"""
import json, sys
from aiockpt.cli import main
for command in json.loads(sys.argv[1]):
    try: main(command.split())
    except SystemExit: pass
    print("LOADED", *(name for name in {HEAVY!r} if name in sys.modules))
"""
"""Runs commands, and says after each what this interpreter has imported."""


@pytest.mark.usefixtures("fresh_interpreters")
@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (
            [
                "--help",
                "nonsense",
                "fetch ftp://host/ -o f",
                "inspect /nonexistent",
                "doctor --help",
                "verify {file}",
            ],
            set(),
        ),
        (
            ["inspect {url}", "fetch {url} -o {place}/f", "top {url}"],
            {"aiohttp", "anyio"},
        ),
    ],
)
def test_a_command_imports_what_it_needs(
    server: Serving,
    file: Path,
    tmp_path: Path,
    commands: list[str],
    expected: set[str],
) -> None:
    """Help and errors come at once, and a host without torch can fetch."""
    words = {"url": server.metadata, "file": file, "place": tmp_path}
    given = json.dumps([each.format(**words) for each in commands])
    done = subprocess.run(
        [sys.executable, "-c", LOADED, given],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    lines = [each for each in done.stdout.splitlines() if each.startswith("LOADED")]
    assert [{*each.split()[1:]} for each in lines] == [expected] * len(commands)


def test_the_doctor_of_this_machine(cli: Commands) -> None:
    """Every finding is there, for programs and for people."""
    facts = json.loads(cli("doctor", "--json")[0])
    assert {"cores", "kernel", "Python"} <= facts["machine"].keys()
    found = {each["name"] for each in facts["findings"]}
    assert {"cores", "memory", "open files"} <= found
    assert all(each["limits"] == bool(each["remedy"]) for each in facts["findings"])
    assert cli("doctor")[0].startswith(("! cores ", "  cores "))
