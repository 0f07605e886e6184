"""Fingerprints of tensors on a device; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

import aiockpt
from tests.primitives.test_multilinear import CUTS, DTYPES, drawn

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def test_a_device_has_the_fingerprint_of_a_host() -> None:
    """Every shape and dtype has the same sums where it is and in host memory."""
    state = {f"{shape}": drawn(shape, torch.float64) for shape, *_ in CUTS}
    state |= {
        f"{dtype}": drawn((40, 320), torch.uint8).view(dtype) for dtype in DTYPES[1:]
    }
    state["turned"] = drawn((300, 700), torch.float32).t()
    state["long"] = drawn((9_000_000,), torch.bfloat16)
    there = {name: each.to("cuda") for name, each in state.items()}
    assert aiockpt.fingerprint(there) == aiockpt.fingerprint(state)
    there["long"].view(torch.int16)[8_999_999] ^= 1
    with pytest.raises(
        aiockpt.errors.FingerprintMismatchError, match=r"^long differs$"
    ):
        aiockpt.fingerprint(there).require(aiockpt.fingerprint(state))
