"""What autograd must be told of memory that is written to without it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

__all__ = ["mark_changed"]

# Tensors per call into torch, which keeps the interpreter lock for all of them.
_SLICE: Final = 1000


def mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that the memory changes behind its back."""
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    for start in range(0, len(counted), _SLICE):
        torch.autograd.graph.increment_version(counted[start : start + _SLICE])
