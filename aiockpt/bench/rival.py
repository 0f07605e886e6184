"""torchft's HTTPTransport, where it is installed, behind the few calls needed here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

__all__ = ["CHUNKS", "Rival", "is_installed"]

CHUNKS = (0, 4, 8)
"""The values of ``num_chunks`` that are tried; the best one counts."""

_STEP = 1
_TIMEOUT = timedelta(seconds=300)


def is_installed() -> bool:
    """Whether torchft can be measured here."""
    return importlib.util.find_spec("torchft") is not None


class Rival:
    """One transport of torchft."""

    def __init__(self, num_chunks: int) -> None:
        module = import_module("torchft.checkpointing.http_transport")
        self._transport: Any = module.HTTPTransport(_TIMEOUT, num_chunks)

    def send(self, state_dict: Mapping[str, torch.Tensor]) -> str:
        """Offer the state dict itself, which is not copied; return the metadata."""
        self._transport.send_checkpoint([1], _STEP, state_dict, _TIMEOUT)
        metadata: str = self._transport.metadata()
        return metadata

    def receive(self, metadata: str) -> dict[str, torch.Tensor]:
        """Fetch what a peer offers."""
        state: dict[str, torch.Tensor] = self._transport.recv_checkpoint(
            0, metadata, _STEP, _TIMEOUT
        )
        return state

    def close(self) -> None:
        """Stop its server and its thread."""
        self._transport.disallow_checkpoint()
        self._transport.shutdown()
