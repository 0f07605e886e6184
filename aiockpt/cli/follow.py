"""``aiockpt follow``: each newer step of a trainer, as a file of its own."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aiockpt.cli.arguments import UsageError
from aiockpt.cli.fetch import rank_values_of, save
from aiockpt.cli.peer import open_peer
from aiockpt.cli.text import ProgressBar
from aiockpt.errors import Advice, StorageError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.http.follow import Follower
from aiockpt.runtime.lifetime import Lifetime
from aiockpt.runtime.words import printable
from aiockpt.storage.checkpoint_file import read_header
from aiockpt.storage.files import named
from aiockpt.storage.partfile import check_target

if TYPE_CHECKING:  # it needs torch
    from aiockpt.state.reshard import RankValues


def run(arguments: argparse.Namespace) -> int:
    """Fetch until interrupted; print the name of each file once it is complete."""
    if (step := arguments.senders[0].step) is not None:
        raise UsageError(f"the URL names step {step}; leave it out")
    ranks = rank_values_of(arguments, is_joined=len(arguments.senders) > 1)
    with named(arguments.output):
        arguments.output.mkdir(exist_ok=True)
    bar = ProgressBar(sys.stderr, quiet=arguments.quiet)
    try:
        asyncio.run(_follow(arguments, bar, ranks))
    finally:
        bar.close()
    raise AssertionError("it is endless")


async def _follow(
    arguments: argparse.Namespace, bar: ProgressBar, rank_values: RankValues
) -> None:
    """Fetch what is served, and then each newer step.

    If cancelled, what was verified of the last step stays in its part file.
    """
    async with (
        open_peer(arguments.senders, arguments) as peer,
        aclosing(peer.client()) as client,
    ):
        lifetime = Lifetime("the command")
        follower = Follower(client, peer.origins, lifetime, after=None)
        has_begun = False

        async def fetch(step: int) -> Path:
            target: Path = arguments.output / f"step-{step}.safetensors"
            if len(peer.origins) > 1:
                from aiockpt.cli.shards import save_joined  # needs torch

                # Nothing in the file tells which snapshots it was made of. A command
                # that starts again believes that the trainer has not gone back.
                if not (has_begun or arguments.overwrite):
                    header = await peer.bridge.run(_header, target)
                    if header is not None and header.step == step:
                        return target
                check_target(target, replace=arguments.overwrite)
                summary = await save_joined(
                    *(peer, [[each] for each in peer.origins], step, target, bar),
                    overwrite=arguments.overwrite,
                    rank_values=rank_values,
                )
            else:
                found = await peer.find(step, keep=True)
                header = await peer.bridge.run(_header, target)
                snapshot = found.manifest.snapshot_id
                if header is not None and header.snapshot_id == snapshot:
                    return target
                check_target(target, replace=arguments.overwrite)
                summary = await save(
                    *(peer, found, target, bar),
                    replace=arguments.overwrite,
                    final=Advice.REPLACED,
                )
            bar.note(summary)
            return target

        while True:
            _, target = await follower.receive(fetch)
            has_begun = True
            print(printable(str(target)), flush=True)


def _header(path: Path) -> Manifest | None:
    """Return the header of a file that an earlier run has fetched, if there is one."""
    with suppress(StorageError):  # it is missing, or none of ours
        header = read_header(path, limits=FILE_LIMITS)
        return header if isinstance(header, Manifest) else None
    return None
