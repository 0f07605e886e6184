"""Checkpointer: what saves and loads state dicts, with or without an event loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["Checkpointer"]


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
