"""One of two ranks in a store that outlives them, as torchrun's does.

``restarted_rank.py RANK PORT ATTEMPT DIRECTORY`` joins the group of an attempt, and
saves step 1. Before the commit it prints ``complete`` and waits for a line.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import aiockpt
from aiockpt.checkpointers import WriterHook


class Waits(WriterHook):
    """Waits for a line when the rank's file is complete."""

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        print("complete", flush=True)
        sys.stdin.readline()

    def post_commit(self, path: str, **kwargs: Any) -> None:
        pass


def main(rank: int, port: int, attempt: str, directory: str) -> None:
    """Be one rank."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=False
    )
    prefix = f"/worker/attempt_{attempt}"
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(prefix, store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    with aiockpt.make_sync_checkpointer(commit_hook=Waits()) as made:
        dist.barrier()
        made.save({"attempt": attempt, "rank": rank}, f"{directory}/step-1")
        print("saved", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
