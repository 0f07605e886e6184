"""``aiockpt serve``: offer a file's state dict until interrupted."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import math
import os
import shlex
import signal
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiockpt.cli.options import Commands, UsageError, local_path, port, step
from aiockpt.cli.serving import Chosen, choose
from aiockpt.cli.text import format_bytes, printable
from aiockpt.errors import LocalProtocolError, StorageError
from aiockpt.http.protocol import parse_metadata
from aiockpt.runtime.secrets import Token

if TYPE_CHECKING:
    from aiockpt.http.transport import HTTPTransport

__all__ = ["configure", "run"]


def configure(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a checkpoint",
        description="Serve a checkpoint until interrupted: a checkpoint directory, the "
        "latest of a directory of such, a file (.safetensors, aiockpt's or any other; "
        ".pt with tensors and plain values), or a directory of another tool's "
        "safetensors files. Prints the commands that fetch it; whoever has them may.",
    )
    parser.add_argument("path", metavar="PATH", type=local_path)
    parser.add_argument(
        "--step", type=step, metavar="N", help="the step to serve it as (its own, or 0)"
    )
    parser.add_argument(
        "--rank", type=step, metavar="N", help="of a checkpoint by several ranks"
    )
    _add_network_options(parser.add_argument_group("where"))
    _add_access_options(parser.add_argument_group("who may fetch"))
    parser.set_defaults(run=run)


def _add_network_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", help="address to bind (every interface)")
    group.add_argument("--port", type=port, default=0, help="port to bind (a free one)")
    group.add_argument("--advertise", metavar="HOST", help="host name to tell others")
    group.add_argument("--interface", help="network interface whose address to tell")


def _add_access_options(group: argparse._ArgumentGroup) -> None:
    who = group.add_mutually_exclusive_group()
    who.add_argument(
        "--token", type=Token, help="a token of your own, in place of a random one"
    )
    who.add_argument("--insecure", action="store_true", help="let anybody fetch")
    group.add_argument("--tls-cert", metavar="FILE", help="serve https with it (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="its key, if kept apart")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    context = _tls_of(arguments)  # what is wrong with the arguments shows at once
    chosen = choose(arguments.path, arguments.rank)
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
        context.load_cert_chain(cert, key)
    except OSError as error:
        names = cert if key is None else f"{cert} and {key}"
        detail = f"no usable certificate with its key: {error.strerror or error}"
        raise StorageError(names, detail) from error
    return context


async def _serve(
    arguments: argparse.Namespace,
    transport: HTTPTransport[Any],
    chosen: Chosen,
    state: object,
    number: int,
) -> None:
    try:
        await transport.send_checkpoint([], number, state, timeout=math.inf)
        stop = _stop_signal()
        text = _announcement(arguments, chosen, transport.metadata(), number)
        print(text, flush=True)
        await stop.wait()
        _die_of_the_next_signal()
    finally:
        await transport.shutdown()


def _transport(
    arguments: argparse.Namespace, context: ssl.SSLContext | None
) -> HTTPTransport[Any]:
    from aiockpt.http.options import Auth, Server
    from aiockpt.http.transport import HTTPTransport

    try:
        return HTTPTransport(
            advertise=arguments.advertise,
            server=Server(
                host=arguments.host, port=arguments.port, interface=arguments.interface
            ),
            auth=Auth(
                token=arguments.token, insecure=arguments.insecure, ssl_context=context
            ),
        )
    except (ValueError, LocalProtocolError) as error:
        raise UsageError(str(error)) from None


def _stop_signal() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


def _die_of_the_next_signal() -> None:
    """Readers get a grace now; who interrupts again does not want to wait for it."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)


def _announcement(
    arguments: argparse.Namespace, chosen: Chosen, metadata: str, number: int
) -> str:
    """Return what is served, and the commands that fetch it, ready to be pasted.

    They hold the token, a random one or the one that was typed here, since the person
    who reads them is the one to hand it on. A token of the environment stays there.
    """
    output = f"{chosen.name_for(number)}.safetensors"
    source = parse_metadata(metadata)
    fetch, curl = ["fetch", metadata], ["curl", "-f"]
    if arguments.token is not None:
        fetch += ["--token", arguments.token]
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
        f"  {shlex.join(['aiockpt', *fetch])}\n"
        f"  {shlex.join(curl)}{header}"
    )


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
