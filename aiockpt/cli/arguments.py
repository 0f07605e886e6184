"""The arguments of all commands: one table of commands, one of their arguments.

`parse` needs neither torch nor aiohttp, so help and wrong usage are answered at once.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from aiockpt import __version__
from aiockpt.errors import LocalProtocolError, StorageError
from aiockpt.format.chunks import ALGORITHM, ALGORITHMS
from aiockpt.http.protocol import (
    MAX_JOINED,
    Address,
    parse_address,
    parse_addresses,
)
from aiockpt.runtime.secrets import Token
from aiockpt.runtime.words import command_line, printable
from aiockpt.storage.directory import expanded, is_address, local_path


class UsageError(LocalProtocolError):
    """The arguments contradict each other, or do not fit what they name."""


# ------------------------------------------------------------------- kinds of values

FLOATS: Final = ("bfloat16", "float16", "float32", "float64")
"""What ``--dtype`` casts tensors from and to."""

_IN_FILE = "@"  # begins the name of a file that holds metadata
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_SIZE = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?:(?:([KMGT])(I?))?B)?", re.IGNORECASE
)
_PREFIXES = ["", "K", "M", "G", "T"]
_SUFFIX = re.compile(r"\.[a-z][a-z0-9_]*")  # "llama-3.1" has none


def is_url(text: str) -> bool:
    """Say whether an argument is meant as a URL, rather than as a path."""
    return _URL.match(text) is not None and not is_address(text)


def address(text: str) -> Address:
    """Parse what names a checkpoint at a peer; see `parse_address`."""
    with _blaming(text):
        return parse_address(_metadata(text))


def addresses(text: str) -> list[Address]:
    """Parse what names a checkpoint at a peer, or its shards at several peers."""
    with _blaming(text):
        return parse_addresses(_metadata(text))


def _metadata(text: str) -> str:
    """Return an argument, or what the file holds that it names after an ``@``."""
    if not text.startswith(_IN_FILE):
        return text
    # It may be a pipe, as that of a shell's <(COMMAND).
    with open(text[1:], "rb") as file:
        content = file.read(MAX_JOINED + 2)
    # No decoding that could fail: such an error would carry the content.
    return content.decode("ascii", "replace").strip()


@contextmanager
def _blaming(text: str) -> Iterator[None]:
    """Name the file of an argument in what is wrong with it."""
    named = f"{text[1:]}: " if text.startswith(_IN_FILE) else ""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
    except LocalProtocolError as error:
        why = str(error)
    else:
        return
    raise argparse.ArgumentTypeError(f"{named}{why}")


def _local_path(text: str) -> Path:
    """Parse a path of a file system."""
    _refuse_url(text)
    return _path(text)


def _stored_path(text: str) -> Path:
    """Parse a path, or an address of an object store."""
    _refuse_url(text)
    return _path(text, stored=True)


def _stored_text(text: str) -> str:
    """Parse a path, or an address; `Path` would drop one of the address's slashes."""
    return expanded(_stored_path(text))


def _refuse_url(text: str) -> None:
    """Complain about a URL, without repeating it: it holds a token."""
    if is_url(text):
        raise argparse.ArgumentTypeError(
            "it is a URL, and this command reads files; get the file first: "
            "aiockpt fetch URL -o FILE"
        )


def _path(text: str, *, stored: bool = False) -> Path:
    try:
        path = local_path(text)
    except StorageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if is_address(text) and not stored:
        raise argparse.ArgumentTypeError(
            f"{expanded(text)} is in an object store, and this command needs a path of "
            "a file system"
        )
    return path


def _text(text: str) -> str:
    return str(_path(text))


def _path_or_address(text: str) -> Path | Address:
    return address(text) if _names_peers(text) else _path(text, stored=True)


def _path_or_addresses(text: str) -> Path | list[Address]:
    return addresses(text) if _names_peers(text) else _path(text, stored=True)


def _names_peers(text: str) -> bool:
    return is_url(text) or text.startswith(_IN_FILE)


def _converted(text: str) -> Path:
    """Parse what ``convert`` writes; refuse a suffix that means nothing."""
    path = _path(text, stored=True)
    suffix = path.suffix.lower()
    known = suffix in (".pt", ".safetensors") or _SUFFIX.fullmatch(suffix) is None
    if known or text.endswith("/"):
        return path
    raise argparse.ArgumentTypeError(
        f"{text!r} has the suffix of no known kind of file: name a file .pt or "
        f".safetensors, or write {command_line(text + '/')} for a checkpoint directory"
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def size(text: str) -> int:
    """Parse a number of bytes: ``10GiB`` in powers of 1024, ``10GB`` of 1000."""
    found = _SIZE.fullmatch(text)
    if found is None:
        detail = f"{text!r} is no size: write 10GiB, 500MB, or a number of bytes"
        raise argparse.ArgumentTypeError(detail)
    number, prefix, binary = found.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** _PREFIXES.index((prefix or "").upper()))


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 65535")
    return value


def _prefixes(text: str) -> tuple[str, str]:
    """Parse ``OLD=NEW``: prefixes of names, without the dot behind them."""
    old, equals, new = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not OLD=NEW, such as model=transformer"
        )
    return old.removesuffix("."), new.removesuffix(".")


def _step(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: use a whole number")
    return int(text)


def _count(text: str) -> int:
    if not 1 <= (count := int(text)) <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 1000")
    return count


# ------------------------------------------------------------------------ the tables

_FLAG: Final = {"action": "store_true"}
_TIME: Final = {"type": _seconds}

_ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "path PATH": {"type": _local_path},
    "what URL|PATH": {"type": _path_or_address},
    "checkpoint URL|PATH": {"type": _path_or_addresses},
    "senders URL": {"type": addresses},
    "urls URL": {
        "nargs": "+",
        "type": addresses,
        "help": "the sender's metadata(), or a URL with a step (.../checkpoint/100), "
        "or @FILE with it; several senders of the same checkpoint each deliver a "
        "part",
    },
    "directory DIR": {"type": _stored_path},
    "source FROM": {"type": _stored_text},
    "target TO": {"type": _converted},
    "--step N": {"type": _step},
    "--rank N": {"type": _step},
    "--rank-values N": {
        "type": _step,
        "help": "take the values of this rank where the ranks saved different ones, "
        "such as the states of random number generators",
    },
    "--select PATH": {
        "action": "append",
        "help": "convert this dotted path and what is below it, such as model; may be "
        "given several times",
    },
    "--hf": {
        "help": "write a Hugging Face directory: model.safetensors, or several files "
        "and their index, and config.json and tokenizer files from beside FROM",
        **_FLAG,
    },
    "--dtype NAME": {
        "choices": FLOATS,
        "help": "with --hf, cast floating tensors of 16 bits and more to bfloat16, "
        "float16, float32 or float64",
    },
    "--rename OLD=NEW": {
        "type": _prefixes,
        "action": "append",
        "help": "with --hf, write NEW where a name begins with OLD; model= leaves out "
        "that prefix; may be given several times",
    },
    "--max-shard-size SIZE": {
        "type": size,
        "help": "with --hf, the size of a file (default: 5GB)",
    },
    "--json": _FLAG,
    "--import MODULE": {
        "dest": "imports",
        "action": "append",
        "default": [],
        "help": "import this module first, from here or the environment: it calls "
        "aiockpt.register_leaf for types of your own; may be given several times",
    },
    "--output FILE": {"type": _path, "required": True},
    "--output DIR": {"type": _local_path, "required": True},
    "--overwrite": {
        "help": "replace an existing file or directory once the new one is complete",
        **_FLAG,
    },
    "--quiet": {"help": "report errors only", **_FLAG},
    "--max-size SIZE": {
        "type": size,
        "help": "refuse a larger checkpoint before any byte is fetched, for example "
        "10GiB or 500MB (default: the free space of the disk)",
    },
    "--token TOKEN": {
        "type": Token,
        "help": "the sender's token, if the URL has none; AIOCKPT_TOKEN and "
        "AIOCKPT_TOKEN_PATH keep it out of the process list",
    },
    "--cafile FILE": {
        "type": _text,
        "help": "trust this certificate, or certificate authority, of an https sender",
    },
    "--no-swarm": {
        "dest": "swarm",
        "action": "store_false",
        "help": "fetch from the sender only; by default, commands that fetch the same "
        "checkpoint at the same time serve each other, on a free port",
    },
    "--wait SECONDS": {
        "default": 0.0,
        "help": "how long to wait for a sender or a step to appear (%(default)g)",
        **_TIME,
    },
    "--timeout SECONDS": {
        "default": math.inf,
        "help": "deadline of the whole command (default: none; a silent sender is "
        "given up nevertheless)",
        **_TIME,
    },
    "--reconnect SECONDS": {
        "default": 10.0,
        "help": "how long to try to reach a sender that became silent (%(default)g)",
        **_TIME,
    },
    "--host HOST": {"help": "address to listen on (default: every interface)"},
    "--port PORT": {
        "type": _port,
        "default": 0,
        "help": "port to listen on (default: any free port)",
    },
    "--advertise HOST": {"help": "host name for the receivers"},
    "--interface NAME": {"help": "network interface that the receivers connect to"},
    "--insecure": {"help": "serve everybody who reaches the port", **_FLAG},
    "--tls-cert FILE": {"type": _text, "help": "certificate to serve https with (PEM)"},
    "--digest NAME": {
        "choices": ALGORITHMS,
        "default": ALGORITHM,
        "help": "algorithm of the digests: xxh3-128 finds faults (default); sha256 and "
        "blake3 also protect against forgery, where others pass the bytes on",
    },
    "--tls-key FILE": {
        "type": _text,
        "help": "key of the certificate, if it is in another file",
    },
    "--size SIZE": {
        "type": size,
        "default": 256 << 20,
        "help": "size of the state dict (default: 256MiB)",
    },
    "--repeat N": {
        "type": _count,
        "default": 3,
        "help": "the most rounds (default: 3)",
    },
    "--url URL": {
        "type": address,
        "help": "measure receives from another host: the URL that aiockpt serve "
        "prints there",
    },
}
"""The options of arguments, by the name and the metavariable."""

_SHORT: Final = {"--output": ["-o"], "--quiet": ["-q"]}

_TRUST: Final = ("--token TOKEN", "--cafile FILE")
_PEER: Final = (*_TRUST, "--wait SECONDS", "--timeout SECONDS", "--reconnect SECONDS")


class _Command(NamedTuple):
    """A command's help, and its arguments, some with their own help."""

    summary: str
    description: str
    arguments: Sequence[str | tuple[str, str]]


_COMMANDS: Final = {
    "serve": _Command(
        "serve a checkpoint",
        "Serve a checkpoint until interrupted. PATH is a checkpoint directory, a "
        "directory of such (the latest one is served), a file (.safetensors of any "
        "tool, or .pt with tensors and plain values), or a directory of safetensors "
        "files. The command prints the commands that fetch the checkpoint; they "
        "contain the token.",
        (
            "path PATH",
            ("--step N", "the step to serve (default: that of the checkpoint, or 0)"),
            ("--rank N", "the rank whose file to serve"),
            *("--host HOST", "--port PORT", "--advertise HOST", "--interface NAME"),
            ("--token TOKEN", "your own token (default: a random one)"),
            *("--insecure", "--tls-cert FILE", "--tls-key FILE", "--digest NAME"),
            "--import MODULE",
        ),
    ),
    "fetch": _Command(
        "fetch a checkpoint into a file",
        "Fetch a checkpoint into a safetensors file. Every chunk is verified. FILE "
        "appears when all of it is on the disk. After a failed fetch, the verified "
        "chunks stay in FILE.part, and the next fetch continues from there. Of joined "
        "metadata, the shards of all senders are put together in memory, and FILE gets "
        "full tensors.",
        (
            "urls URL",
            *("--output FILE", "--overwrite"),
            ("--step N", "the step to fetch (default: the one served now)"),
            *("--max-size SIZE", *_PEER, "--no-swarm", "--quiet"),
            *("--rank-values N", "--import MODULE"),
        ),
    ),
    "follow": _Command(
        "fetch each newer step of a trainer",
        "Fetch the step that a trainer serves now into DIR/step-N.safetensors, and "
        "then each newer step, until interrupted. A step that is replaced before it is "
        "fetched is skipped. The command waits for a trainer that is away, and follows "
        "a restarted one from its new step. Of joined metadata, each file has the "
        "full tensors of all senders.",
        (
            ("senders URL", "metadata(), also joined metadata, or @FILE with it"),
            *("--output DIR", "--overwrite", "--max-size SIZE"),
            *(*_TRUST, "--reconnect SECONDS", "--no-swarm", "--quiet"),
            *("--rank-values N", "--import MODULE"),
        ),
    ),
    "top": _Command(
        "watch a sender and its receivers",
        "Show what a sender serves, how much it has sent, and how far the members of "
        "its swarm are, once a second until interrupted. If the output is no terminal, "
        "the command shows that once. Joined metadata shows all of its senders.",
        (
            ("senders URL", "metadata(), also joined metadata, or @FILE with it"),
            *(*_TRUST, "--reconnect SECONDS"),
        ),
    ),
    "ls": _Command(
        "list the checkpoints of a directory",
        "List the complete checkpoints of a directory in the order of their commits. "
        "Incomplete ones, which a save did not finish, are named on stderr.",
        ("directory DIR", ("--json", "print one JSON document")),
    ),
    "inspect": _Command(
        "show what a checkpoint holds",
        "Show the tensors, the tree and the digests of a checkpoint at a peer, in a "
        "checkpoint directory or in a safetensors file of any tool. Only the header "
        "is read.",
        (
            (
                "what URL|PATH",
                "a peer's URL, @FILE with it, a directory, or a file",
            ),
            ("--rank N", "the rank, for a directory"),
            ("--step N", "the step at a peer"),
            ("--json", "print one JSON document"),
            "--import MODULE",
            *_PEER,
        ),
    ),
    "verify": _Command(
        "verify every chunk of a checkpoint",
        "Verify the header and every chunk of a file that aiockpt wrote, of all files "
        "of a checkpoint directory, or of the checkpoint that a peer serves. Joined "
        "metadata names several peers, which are verified one after the other. The "
        "command fails if something is damaged. It also fails for files of other "
        "tools, because they have no digests.",
        (
            (
                "checkpoint URL|PATH",
                "a peer's URL, joined metadata, @FILE with it, a directory, a file",
            ),
            ("--step N", "the step at a peer"),
            *_PEER,
        ),
    ),
    "convert": _Command(
        "convert a checkpoint to or from .pt, safetensors, Hugging Face",
        "Convert a checkpoint. FROM is a checkpoint directory of any number of ranks, "
        "any safetensors file, a directory of such files, or a file of torch.save. The "
        "name of TO decides the format: .pt for torch.save, .safetensors for a plain "
        "file, and a name without a suffix, or with a slash at the end, for a "
        "checkpoint directory, or with --hf for a Hugging Face directory. The result "
        "is read back and compared, so a conversion is exact or refused.",
        (
            *("source FROM", "target TO", "--overwrite"),
            ("--rank N", "convert the part of this rank alone (default: join all)"),
            *("--rank-values N", "--select PATH"),
            ("--step N", "the step (default: the number in the directory's name)"),
            *("--hf", "--dtype NAME", "--rename OLD=NEW", "--max-shard-size SIZE"),
            "--import MODULE",
        ),
    ),
    "bench": _Command(
        "measure this machine, or the line to another host",
        "Measure receives on this machine beside a raw socket and memcpy, or from "
        "another host beside a plain GET. The command prints a conclusion in three "
        "lines, and takes less than a minute.",
        (
            *("--size SIZE", "--repeat N", "--url URL"),
            ("--json", "print all samples as one JSON object"),
        ),
    ),
    "doctor": _Command(
        "show what limits transfers on this machine",
        "Show which settings limit transfers on this machine. A line marked with ! has "
        "a remedy below. The command changes nothing and measures nothing; aiockpt "
        "bench measures.",
        (("--json", "print everything as one JSON object"),),
    ),
}
_EXITS = """\
exit codes:
  0    success        1    failure; the reason is on stderr    2    wrong usage
  130  interrupted    141  the reader of the output has gone
"""


_TOKEN_OF_URL: Final = re.compile(r"(://[^\s#]*)#\S*")


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the tokens of URLs in it."""

    def error(self, message: str) -> NoReturn:
        message = _TOKEN_OF_URL.sub(r"\1#...", message)
        self.exit(2, f"aiockpt: error: {printable(message)} (see {self.prog} --help)\n")


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; ``command`` is the name of the command's module.

    Raises:
        SystemExit: help was asked for, or the usage is wrong.
    """
    parser = _Parser(
        prog="aiockpt",
        description="Move checkpoints between processes: verified, at wire speed.",
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (summary, description, arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=description)
        for argument in arguments:
            key, words = (argument, "") if isinstance(argument, str) else argument
            facts = _ARGUMENTS[key] | ({"help": words} if words else {})
            flag, _, value = key.partition(" ")
            if value:
                facts["metavar"] = value
            command.add_argument(*_SHORT.get(flag, ()), flag, **facts)
    if not given:
        parser.exit(2, parser.format_help())
    found, unknown = parser.parse_known_args(given)
    if unknown:  # the word after an unknown option may be a token
        options = [each.partition("=")[0] for each in unknown if each.startswith("-")]
        parser.error(f"unrecognized arguments: {' '.join(options or unknown)}")
    if found.command == "serve" and found.insecure and found.token is not None:
        parser.error("argument --insecure: not allowed with argument --token")
    return found
