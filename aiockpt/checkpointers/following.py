"""A save from staging to submission, with the writer close behind if it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiockpt.checkpointers.handle import SaveHandle, meter
from aiockpt.checkpointers.stager import CheckpointStager, StagedState
from aiockpt.checkpointers.submission import BackgroundWriter, Submission
from aiockpt.observe import Progress

__all__ = ["release", "stage_and_submit"]


async def stage_and_submit(
    stager: CheckpointStager,
    writer: BackgroundWriter,
    state_dict: Any,
    handle: SaveHandle,
    keywords: Mapping[str, Any],
    progress: Callable[[Progress], None] | None,
) -> tuple[Any, Submission]:
    """Stage a state dict and hand it over; return both when it is wholly staged.

    If it fails or is cancelled, nothing is staged, and nothing will be written.
    """
    given: list[Submission] = []

    async def submit(staged: Any) -> None:
        nbytes = staged.nbytes if isinstance(staged, StagedState) else 0
        told = meter(progress, nbytes)
        given.append(await writer.submit(staged, handle.path, keywords, told))
        handle.handed_over = True

    async def follow(staged: StagedState) -> None:
        if writer.follows(staged.snapshot):
            await submit(staged)

    known = {"step": handle.step, **keywords}
    staged = await stager.stage_followed(state_dict, follow, **known)
    if not given:
        try:
            await submit(staged)
        except BaseException:
            release(staged)
            raise
    return staged, given[0]


def release(staged: Any) -> None:
    """Let go of what a stager has returned, if that is ours to do."""
    if isinstance(staged, StagedState):
        staged.release()
