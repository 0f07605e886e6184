"""``aiockpt inspect``: what a checkpoint holds, from its header alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from aiockpt.cli.options import Commands, UsageError, add_client_options, address, step
from aiockpt.cli.rankfiles import one_file
from aiockpt.cli.report import as_json, as_text
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.storage.checkpoint_file import read_header

__all__ = ["configure", "run"]


def configure(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Show the tensors, the tree and the digests of a checkpoint, at a "
        "peer, in a checkpoint directory or in a file; any safetensors file will do. "
        "Only its header is read.",
    )
    parser.add_argument(
        "what", metavar="URL|PATH", help="a peer's URL, a directory, or a file"
    )
    parser.add_argument("--rank", type=step, metavar="N", help="of a directory")
    parser.add_argument("--step", type=step, metavar="N", help="the step at a peer")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_client_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    name, header = _read(arguments)
    if arguments.json:
        json.dump(as_json(name, header), sys.stdout, indent=2)
        print()
    else:
        print(as_text(name, header))
    return 0


def _read(arguments: argparse.Namespace) -> tuple[str, Manifest | ForeignHeader]:
    """Return the header, and a name for it that holds no token."""
    what: str = arguments.what
    if "://" not in what:
        if arguments.step is not None:
            raise UsageError("--step is for URLs: a file holds one step")
        path = one_file(Path(what), arguments.rank)
        return str(path), read_header(path, limits=FILE_LIMITS)
    try:
        peer = address(what)
    except argparse.ArgumentTypeError as error:
        raise UsageError(str(error)) from None
    if arguments.rank is not None:
        raise UsageError("--rank is for checkpoint directories")
    arguments.urls = [peer]
    return peer.source.base_url, asyncio.run(_ask(arguments))


async def _ask(arguments: argparse.Namespace) -> Manifest:
    from aiockpt.cli.remote import peer_of
    from aiockpt.runtime.lifetime import Deadline

    async with (
        Deadline(arguments.timeout, stop="fetch_manifest") as deadline,
        peer_of(arguments) as peer,
    ):

        async def find(step: int) -> Manifest:
            return (await peer.find(step, deadline, wait=arguments.wait)).manifest

        return await peer.receive(find, deadline, wait=arguments.wait)
