"""Checkpointer: what saves and loads state dicts, with or without an event loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from aiockpt.storage.directory import StrPath, step_of
from aiockpt.transport import exact_step

__all__ = ["Checkpointer", "step_for"]


class Checkpointer(ABC):
    """Saves state dicts to directories, and loads those that are whole.

    The methods of an asynchronous one are coroutines.
    """

    @abstractmethod
    def save(self, state_dict: Any, path: Any, **kwargs: Any) -> Any:
        """Save ``state_dict`` to the directory ``path``.

        ``kwargs`` are for the hooks, and for a writer of one's own.
        """

    @abstractmethod
    def load(
        self,
        path: Any,
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the state dict at ``path``; with ``state_dict``, that one, filled.

        Args:
            path: The checkpoint's directory.
            state_dict: What to fill; only its keys are read.
            default_map_location: Where tensors that are not filled in place go.
            strict: Refuse a checkpoint that lacks keys of ``state_dict``.
            kwargs: The reader's other options.
        """

    @abstractmethod
    def close(self) -> Any:
        """Let go of everything. Idempotent."""


def step_for(path: StrPath, keywords: Mapping[str, object]) -> int:
    """Return the step of a save: its ``step`` keyword, else :func:`step_of` its path.

    Raises:
        TypeError, ValueError: what was given is no step.
    """
    given = keywords.get("step")
    return step_of(path) if given is None else exact_step(given)
