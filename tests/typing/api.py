"""The public face as a strict type checker sees it; checked, never run.

``nox -s types`` reads this file. Each ``assert_type`` is a promise to users; each
``type: ignore`` is a mistake that they must be told about.
"""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

import aiockpt


class InMemory(aiockpt.CheckpointTransport[dict[str, int]]):
    """A transport of one's own needs the five verbs and nothing else."""

    def metadata(self) -> str:
        return ""

    async def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: dict[str, int],
        timeout: float | timedelta,
    ) -> None:
        pass

    async def disallow_checkpoint(self) -> None:
        pass

    async def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: float | timedelta
    ) -> dict[str, int]:
        return {}

    async def shutdown(self, wait: bool = True) -> None:
        pass


async def any_transport(transport: aiockpt.CheckpointTransport[dict[str, int]]) -> None:
    """The state dict's type travels with the transport."""
    assert_type(transport.metadata(), str)
    await transport.send_checkpoint([1], 7, {"a": 1}, timedelta(seconds=1))
    state = await transport.recv_checkpoint(0, transport.metadata(), 7, 1.5)
    assert_type(state, dict[str, int])
    await transport.send_checkpoint([1], 7, {"a": ""}, 1)  # type: ignore[dict-item]
    await transport.shutdown(wait=False)


def facts_of_errors(error: aiockpt.AiockptError) -> None:
    """An exception's facts are typed."""
    if isinstance(error, aiockpt.StepNotFoundError):
        assert_type(error.step, int | None)
        assert_type(error.serving, int | None)
    if isinstance(error, aiockpt.IntegrityError):
        assert_type(error.chunk, int | None)
    if isinstance(error, aiockpt.TransferTimeoutError):
        assert_type(error.timeout, float)
        handle(error)


def handle(error: TimeoutError) -> None:
    """An error is also the builtin one that a caller would guess."""


def hooks(progress: aiockpt.Progress, event: aiockpt.TransferEvent) -> None:
    """Progress and events are frozen data."""
    assert_type(progress.bytes_done, int)
    assert_type(event.step, int | None)
    progress.bytes_done = 1  # type: ignore[misc]


def misspelled() -> object:
    """The lazy names hide no typo."""
    return aiockpt.HTTPTransprot  # type: ignore[attr-defined]


assert_type(aiockpt.__version__, str)
assert_type(aiockpt.Limits().max_depth, int)
