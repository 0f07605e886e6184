"""``aiockpt fetch`` of joined metadata: the shards of several senders as one file.

It has full tensors, as what ``aiockpt convert`` makes of the files of several ranks.
The state dict is put together in memory, which needs torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path

from aiockpt.checkpointers.config import CheckpointWriterConfig
from aiockpt.cli.convert import differing, new_file
from aiockpt.cli.paths import for_a_command
from aiockpt.cli.peer import SenderClient
from aiockpt.cli.text import ProgressBar, counted, format_bytes
from aiockpt.errors import (
    AiockptError,
    RankValuesError,
    StateDictError,
    StepNotFoundError,
)
from aiockpt.events import Progress
from aiockpt.format.manifest import Manifest
from aiockpt.http.follow import CURRENT_STEP_WAIT_S
from aiockpt.http.joined import RankOptions, receive_joined
from aiockpt.http.peers import Peers, name_of
from aiockpt.http.protocol import Lease, Origin
from aiockpt.memory.arena import ArenaPool
from aiockpt.runtime.words import printable
from aiockpt.state.reshard import RankValues
from aiockpt.storage.write import write_file
from aiockpt.transfer.live import LiveState
from aiockpt.transfer.options import ReceiveOptions


async def save_joined(
    peer: SenderClient,
    senders: Sequence[Sequence[Origin]],
    step: int,
    target: Path,
    bar: ProgressBar,
    *,
    overwrite: bool,
    rank_values: RankValues,
) -> str:
    """Fetch a step of several senders into a file; return how that went.

    If it fails or is cancelled, nothing is left behind.

    Args:
        peer: How the senders are asked.
        senders: The senders of each rank, in the order of the ranks.
        step: The step.
        target: The file.
        bar: Shows the progress.
        overwrite: Whether to replace the file if there is one.
        rank_values: Which value to take of those that differ by rank.

    Raises:
        StateDictError: the ranks have different values at some paths.
        StorageError: the file cannot be written.
    """
    loop, started = asyncio.get_running_loop(), time.monotonic()
    last = loop.time() + max(peer.wait, CURRENT_STEP_WAIT_S)
    lease = Lease.begin(peer.deadline.when)

    def give_up(error: AiockptError) -> None:
        peer.deadline.note(error)
        # The client itself would wait for the step until it is cancelled.
        if isinstance(error, StepNotFoundError) and loop.time() >= last:
            raise error

    def report(progress: Progress) -> None:
        peer.deadline.phase = progress.stop
        bar(progress)

    def write() -> Manifest:
        live = LiveState(
            state,
            step=step,
            chunk_bytes=CheckpointWriterConfig().chunk_bytes,
            allow_pickle=False,
            pool=ArenaPool(keep=0),
        )
        with live, new_file(target, replace=overwrite) as (path, fd):
            return write_file(path, fd, live, durable=True)

    reconnect = max(peer.wait, peer.options.reconnect_timeout)
    options = ReceiveOptions(
        limits=peer.options.limits, allow_pickle=False, progress=report
    )
    async with aclosing(peer.client(reconnect=reconnect)) as client:
        until = min(last, peer.deadline.when)
        peers = [
            Peers.at(client, leased, give_up, deadline=until)
            for origins in senders
            for leased in [[replace(origin, lease=lease) for origin in origins]]
        ]
        ranks = RankOptions.of(rank_values, full=True)
        peer.deadline.what = f"step {step} from {name_of(peers)}"
        with _saying_what_helps(), peer.naming_max_size():
            found = await receive_joined(
                peers, step, options, ranks, peer.bridge, peer.deadline
            )
    state = found.state_dict
    report(replace(bar.last, stop="write"))
    header = await peer.bridge.run(write)
    elapsed = time.monotonic() - started
    return (
        f"{printable(str(target))}: step {step}, snapshot {header.snapshot_id}, full "
        f"tensors of {counted(len(senders), 'sender')}\n"
        f"{format_bytes(header.segment_bytes)} verified; on the disk after "
        f"{elapsed:.2f} s"
    )


@contextmanager
def _saying_what_helps() -> Iterator[None]:
    """Name the options of the command where the shards cannot be put together."""
    try:
        with for_a_command("fetch"):
            yield
    except RankValuesError as error:
        raise StateDictError(
            f"the senders have different values at {differing(error)}: take those of "
            "one rank with --rank-values 0, or fetch the metadata of one sender alone"
        ) from error
