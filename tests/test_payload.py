"""What a few bytes may make a receiver read and allocate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiockpt._payload import Allowance
from aiockpt.errors import RemoteProtocolError
from aiockpt.rebuild import Frame, assemble, tensors_over
from aiockpt.wire.manifest import TensorSpec
from aiockpt.wire.paths import Node
from pipeline import LIMITS, file_of, rebuilt, stager
from trees import SIZE, manifest_of, value_of, view

HUGE, BIG = 1 << 50, 1 << 16


def _expanded(dtype: str, *shape: int) -> TensorSpec:
    return view(dtype=dtype, shape=(*shape, HUGE), stride=(0,) * (len(shape) + 1))


def _of(tag: str, *payload: Node) -> Node:
    return ["ext", tag, ["tuple", list(payload)]]


ONE: Node = ["ext", "torch.Size", ["tuple", [1]]]
QINT8: Node = ["ext", "torch.dtype", "qint8"]
REPEATING: dict[str, tuple[list[TensorSpec], Node]] = {
    "sparse": (
        [_expanded("int64", 1), _expanded("float32")],
        _of("torch.sparse_coo", ["tensor", 1], ["tensor", 2], ONE, False),
    ),
    "compressed": (
        [view(dtype="int64", shape=(2,)), _expanded("int64"), _expanded("float32")],
        _of("torch.sparse_csr", ["tensor", 1], ["tensor", 2], ["tensor", 3], SIZE),
    ),
    "quantized": (
        [_expanded("int8")],
        _of("torch.quantized", ["tensor", 1], QINT8, 1.0, 0),
    ),
    "quantized per channel": (
        [_expanded("int8", 1), view(dtype="float64", shape=(1,))],
        _of(
            "torch.quantized_per_channel",
            ["tensor", 1],
            QINT8,
            ["tensor", 2],
            ["tensor", 2],
            0,
        ),
    ),
}


class TestAmplification:
    """A few bytes stay a few bytes."""

    @pytest.mark.parametrize("kind", REPEATING)
    @pytest.mark.timeout(20)
    def test_elements_that_repeat_are_refused_unread(self, kind: str) -> None:
        """2**50 of them would take an hour to look at, or a petabyte."""
        views, tree = REPEATING[kind]
        with pytest.raises(RemoteProtocolError, match="repeats a few"):
            value_of(tree, views=views)

    @pytest.mark.parametrize(
        "leaf",
        [
            _of("torch.quantized", ["tensor", 1], QINT8, 1.0, 0),
            _of("numpy.ndarray", "u1", ["tuple", [BIG]], ["blob", 0]),
            _of("numpy.scalar", f"V{BIG}", ["blob", 0]),
            ["ext", "bytearray", ["blob", 0]],
        ],
    )
    def test_bytes_are_not_copied_again_and_again(self, leaf: Node) -> None:
        """Each byte that travelled pays for one that is allocated."""
        data = bytes(BIG)
        views = [view(dtype="int8", shape=(BIG,))]
        sent: dict[str, Any] = {"segment": data, "shape": (BIG,), "views": views}
        once = manifest_of(["list", [leaf]], **sent)
        often = manifest_of(["list", [leaf] * 3], **sent)
        tensors = tensors_over(once, memoryview(bytearray(data)))
        assemble(Frame.of(once), tensors, limits=LIMITS)
        with pytest.raises(RemoteProtocolError, match="again and again"):
            assemble(Frame.of(often), tensors, limits=LIMITS)

    def test_a_tied_leaf_is_accepted(self) -> None:
        """A sparse tensor may stand in several places."""
        leaf = _of("torch.sparse_coo", ["tensor", 1], ["tensor", 2], ONE, False)
        index = view(dtype="int64", shape=(1, 1), stride=(1, 1), offset=1)
        views = [index, view(shape=(1,))]
        manifest = manifest_of(["tuple", [leaf, leaf]], views=views)
        tensors = tensors_over(manifest, memoryview(bytearray(16)))
        got: Any = assemble(Frame.of(manifest), tensors, limits=LIMITS)
        assert torch.equal(got[0].to_dense(), got[1].to_dense())


def test_it_says_what_is_left() -> None:
    """The repr is for people."""
    assert repr(Allowance(10)) == "<Allowance bytes=10>"


def test_a_sender_spells_out_what_repeats() -> None:
    """A sparse tensor over expanded values can be received."""
    indices, values = torch.tensor([[0, 2, 3]]), torch.ones(1).expand(3)
    sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)

    async def file() -> bytes:
        async with stager() as staging:
            return file_of(await staging.stage([sparse], step=1))

    (got,) = rebuilt(asyncio.run(file()))
    assert torch.equal(got.to_dense(), sparse.to_dense())
