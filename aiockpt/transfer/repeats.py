"""Notices a checkpoint with the same tensors as the checkpoint before it.

A faulty trainer may save or publish its first step over and over. New files appear, so
nobody notices that all progress would be lost. Digests are computed anyway, so
comparing them costs nothing. The checkpoint process imports this module without torch.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from hashlib import sha256

from aiockpt.events import TransferEvent
from aiockpt.format.manifest import Manifest


def content_of(manifest: Manifest) -> str:
    """Return a key that is equal for checkpoints whose tensors hold the same bytes.

    Plain values, such as a step, do not count. Without tensors, the key is empty.
    """
    if not manifest.segment_bytes:
        return ""
    told = f"{manifest.segment_bytes} {manifest.chunk_bytes} {manifest.algorithm} "
    return sha256((told + "".join(manifest.digests)).encode()).hexdigest()


class Repeats:
    """Compares each checkpoint with the one before it.

    Args:
        what: The kind of the events: "save" or "publication".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._content = self._path = ""
        self._step: int | None = None

    def told(self, event: TransferEvent, content: str, path: str = "") -> TransferEvent:
        """Return the event of a checkpoint, marked if its tensors are unchanged.

        A marked event is a warning. If the checkpoint has the same step, and another
        path or no path, the copy is intended, and the event is not marked.
        """
        unchanged = bool(content) and content == self._content
        before = _named(self._step, self._path)
        copied = event.step == self._step and (not path or path != self._path)
        self._content, self._path, self._step = content, path, event.step
        if not unchanged:
            return event
        said = (
            f"all tensors of {_named(event.step, path)} hold the same bytes as in the "
            f"{self._what} before it, {before}"
        )
        return replace(
            event,
            detail="; ".join(filter(None, (event.detail, said))),
            level=event.level if copied else max(event.level, logging.WARNING),
            unchanged=True,
        )


def _named(step: int | None, path: str) -> str:
    return f"{path} (step {step})" if path else f"step {step}"
