"""What a few bytes may make a receiver allocate."""

from __future__ import annotations

from typing import Any

import pytest

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.paths import Node
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from pipeline import LIMITS
from trees import manifest_of

BIG = 1 << 16


def _of(tag: str, *payload: Node) -> Node:
    return ["ext", tag, ["tuple", list(payload)]]


class TestAmplification:
    """A few bytes stay a few bytes."""

    @pytest.mark.parametrize(
        "leaf",
        [
            _of("numpy.ndarray", "u1", ["tuple", [BIG]], ["blob", 0]),
            _of("numpy.scalar", f"V{BIG}", ["blob", 0]),
            ["ext", "bytearray", ["blob", 0]],
        ],
    )
    def test_bytes_are_not_copied_again_and_again(self, leaf: Node) -> None:
        """Each byte that travelled pays for one that is allocated."""
        data = bytes(BIG)
        sent: dict[str, Any] = {"segment": data, "shape": (BIG,)}
        once = manifest_of(["list", [leaf]], **sent)
        often = manifest_of(["list", [leaf] * 3], **sent)
        tensors = tensors_over(once, memoryview(bytearray(data)))
        assemble(Frame.of(once), tensors, limits=LIMITS)
        with pytest.raises(RemoteProtocolError, match="again and again"):
            assemble(Frame.of(often), tensors, limits=LIMITS)
