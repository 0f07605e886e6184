"""``aiockpt serve``: offer a file's state dict until interrupted."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import math
import os
import re
import signal
import ssl
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiockpt.checkpointers.config import RankInfo
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.cli.arguments import UsageError
from aiockpt.cli.paths import for_a_command, holds_shards, one_file
from aiockpt.cli.text import format_bytes
from aiockpt.errors import (
    CheckpointNotFoundError,
    LocalProtocolError,
    StateDictError,
    StorageError,
)
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.http.options import Auth, Server
from aiockpt.http.protocol import parse_metadata
from aiockpt.http_transport import HTTPTransport
from aiockpt.runtime.words import command_line, printable
from aiockpt.storage.files import named, open_regular
from aiockpt.storage.interface import find_checkpoint, list_checkpoints
from aiockpt.storage.statefile import StateFile, read_state_file

_MAX_NAME_BYTES = 200  # suffixes follow, and a file system takes 255
_ENDS = (signal.SIGINT, signal.SIGTERM)
_READABLE = re.compile(r".*\.safetensors|checkpoint_[0-9]+\.pt")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    context = _tls_of(arguments)  # what is wrong with the arguments shows at once
    chosen = _choose(arguments.path, arguments.rank)
    transport = _transport(arguments, context)
    try:
        transport.address()  # listens: that the port is taken shows at once, too
        shown = f"{printable(str(chosen.path))} ({format_bytes(chosen.nbytes)})"
        print(f"Reading {shown} ...", file=sys.stderr, flush=True)
        found = chosen.read()
    except BaseException:
        asyncio.run(transport.shutdown(wait=False))
        raise
    number = (found.step or 0) if arguments.step is None else arguments.step
    asyncio.run(_serve(arguments, transport, chosen, found.state, number))
    return 0


def _tls_of(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    cert, key = arguments.tls_cert, arguments.tls_key
    if cert is None:
        if key is not None:
            raise UsageError("--tls-key needs --tls-cert, too")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for each in filter(None, (cert, key)):
            os.close(open_regular(Path(each)))  # a FIFO would block for ever
        context.load_cert_chain(cert, key)
    except StorageError:
        raise
    except OSError as error:
        names = cert if key is None else f"{cert} and {key}"
        detail = f"no usable certificate with its key: {error.strerror or error}"
        raise StorageError(names, detail) from error
    return context


async def _serve(
    arguments: argparse.Namespace,
    transport: HTTPTransport[Any],
    chosen: _Chosen,
    state: object,
    number: int,
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    try:
        await transport.send_checkpoint(step=number, state_dict=state, timeout=math.inf)
        for each in _ENDS:
            loop.add_signal_handler(each, stop.set)
        text = _announcement(arguments, chosen, transport.metadata(), number)
        print(text, flush=True)
        await stop.wait()
        for each in _ENDS:  # readers get a grace now; the next signal ends that, too
            loop.remove_signal_handler(each)
    finally:
        await transport.shutdown()


def _transport(
    arguments: argparse.Namespace, context: ssl.SSLContext | None
) -> HTTPTransport[Any]:
    try:
        return HTTPTransport(
            advertise=arguments.advertise,
            server=Server(
                host=arguments.host, port=arguments.port, interface=arguments.interface
            ),
            auth=Auth(
                token=arguments.token, insecure=arguments.insecure, ssl_context=context
            ),
            digest=arguments.digest,
        )
    except (ValueError, LocalProtocolError) as error:
        raise UsageError(str(error)) from None


def _announcement(
    arguments: argparse.Namespace, chosen: _Chosen, metadata: str, number: int
) -> str:
    """Return what is served, and the commands that fetch it, ready to be pasted.

    They hold the token, a random one or the one that was typed here, since the person
    who reads them is the one to hand it on. A token of the environment stays there.
    """
    output = _output(chosen.name_for(number))
    source = parse_metadata(metadata)
    fetch, curl = ["fetch", metadata], ["curl", "-f"]
    if arguments.token is not None:
        fetch.append(f"--token={arguments.token}")  # it may begin with a hyphen
    cert = ""
    if arguments.tls_cert is not None:
        cert = str(Path(arguments.tls_cert).resolve())
        fetch += ["--cafile", cert]
        curl += ["--cacert", cert]
    fetch += ["--step", str(number), "-o", output]
    curl += ["--noproxy", "*", "-o", output, f"{source.base_url}{number}/full"]
    header = ""
    if not arguments.insecure:
        bearer = _shown(source.token or arguments.token)
        header = f' -H "Authorization: Bearer {bearer}"'
    size = f"{chosen.remark}{format_bytes(chosen.nbytes)}"
    only = " from this host only" if _is_loopback(source.base_url) else ""
    needed = [] if arguments.tls_cert is None else [f"a copy of {cert}"]
    if not arguments.insecure and not (source.token or arguments.token):
        needed.append(_token_variable())
    needs = f" (another host needs {', and '.join(needed)})"
    if only or not needed:
        needs = ""
    return (
        f"Serving {printable(str(chosen.path))} ({size}) as step {number} at "
        f"{source.base_url} until interrupted. To fetch it{only}{needs}:\n"
        f"  {command_line('aiockpt', *fetch)}\n"
        f"  {command_line(*curl)}{header}"
    )


def _output(name: str) -> str:
    """Return the name of a file that no command takes for an option or a home."""
    while len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = name[1:]  # the step is at its end
    file = f"{name}.safetensors"
    return f"./{file}" if file.startswith(("-", "~", "@")) else file


def _is_loopback(url: str) -> bool:
    with suppress(ValueError):
        host = urlsplit(url).hostname or ""
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


def _token_variable() -> str:
    """Return the variable that the token comes from, if it is of the environment."""
    known = os.environ.get("AIOCKPT_TOKEN")
    return "AIOCKPT_TOKEN" if known else "AIOCKPT_TOKEN_PATH"


def _shown(token: str | None) -> str:
    """Return a token between double quotes of a shell: where it comes from, if None."""
    if token is None:
        variable = f"${_token_variable()}"
        return f'$(cat "{variable}")' if variable.endswith("PATH") else variable
    return "".join(f"\\{char}" if char in '$`"\\' else char for char in token)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is to be served: one file, or a directory of another tool's.

    Attributes:
        path: Where it is, as the person named it.
        file: What to read.
        rank: Whose file of a directory; None where ``file`` says it.
        remark: Why it was chosen, if a directory held several.
    """

    path: Path
    file: Path
    rank: int | None
    remark: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of its files."""
        with named(self.file):
            files = [*self.file.iterdir()] if self.file.is_dir() else [self.file]
            return sum(each.stat().st_size for each in files if each.is_file())

    def name_for(self, step: int) -> str:
        """Return how to call what is fetched: it names the step once."""
        stem = self.path.stem if self.path == self.file else self.path.resolve().name
        return stem if stem.endswith(f"step-{step}") else f"{stem}-step{step}"

    def read(self) -> StateFile:
        """Return the state dict in memory of its own, with verified digests if ours."""
        with for_a_command("serve"):
            if not self.file.is_dir():
                return read_state_file(self.file, limits=FILE_LIMITS)
            reader = CheckpointReader(RankInfo(0, 1))
            return StateFile(reader.read(self.file, rank=self.rank)[0], None)


def _choose(path: Path, rank: int | None) -> _Chosen:
    """Return what to serve of a path.

    Raises:
        StorageError: there is nothing, or nothing that could be served.
        UsageError: several ranks wrote it, and none was chosen.
    """
    with named(path):
        path.stat()
    if not path.is_dir() or find_checkpoint(path):
        return _Chosen(path, _one_file(path, rank), None)
    if found := list_checkpoints(path):
        last = found[-1].path
        remark = f"the latest of {len(found)} there, " if len(found) > 1 else ""
        return _Chosen(last, _one_file(last, rank), None, remark)
    with named(path):
        names = [each.name for each in path.iterdir()]
    if not any(_READABLE.fullmatch(name) for name in names):
        detail = "there is no checkpoint and no safetensors file in it"
        raise CheckpointNotFoundError(str(path), detail)
    return _Chosen(path, path, rank)


def _one_file(path: Path, rank: int | None) -> Path:
    """Return the file of one rank, unless it holds only a part of each tensor.

    Raises:
        StateDictError: it does.
    """
    found = find_checkpoint(path)
    file = one_file(path, rank if found is None else rank or 0)
    if holds_shards(file):
        whole = path if path.is_dir() else path.parent
        joined = whole.with_name(f"{whole.name}-joined")
        raise StateDictError(
            f"{path}: a file of it has only one rank's shards of tensors, and serve "
            "offers one file: join the files of all ranks with "
            f"{command_line('aiockpt', 'convert', f'{whole}', f'{joined}')}, and serve "
            "that"
        )
    return one_file(path, rank)
