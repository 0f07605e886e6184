"""A manifest and its bytes as a state dict; whatever a hostile sender writes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.entries import Entries, Entry
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from tests.support.proofs import proves
from tests.support.states import LIMITS, manifest_of, value_of, view

if TYPE_CHECKING:
    from aiockpt.format.manifest import (
        Manifest,
    )
    from aiockpt.format.paths import Node


class TestTensors:
    """Tensors over the bytes."""

    def test_a_matrix_is_no_view_of_something_else(self) -> None:
        """A second tensor for each would weigh as much again."""
        entry = Entry("F32", (2, 1, 2), (0, 16))
        memory = memoryview(bytearray(16))
        (tensor,) = tensors_over(_with_entry(entry), memory)
        assert tensor.shape == (2, 1, 2)
        assert tensor._base is None
        tensor[1, 0, 1] = 1
        assert bytes(memory) == bytes(12) + b"\0\0\x80\x3f"

    def test_a_size_that_overflows_is_the_sender_s_fault(self) -> None:
        """Torch's own error would blame the receiver."""
        entry = Entry("U8", (2**62, 2**62, 0), (0, 0))
        with pytest.raises(RemoteProtocolError, match="a tensor of the manifest"):
            tensors_over(_with_entry(entry), memoryview(bytearray(16)))

    def test_a_code_without_a_dtype_is_named(self) -> None:
        """A newer safetensors may have codes that torch does not know."""
        entry = Entry("F6_E2M3", (4,), (0, 3))
        with pytest.raises(RemoteProtocolError, match="F6_E2M3"):
            tensors_over(_with_entry(entry), memoryview(bytearray(16)))


def _with_entry(entry: Entry) -> Manifest:
    return replace(manifest_of(None), entries=Entries.of({"w": entry}))


ENDLESS: Node = ["ext", "range", ["tuple", [0, 1 << 52, 1]]]
LIES: dict[str, Node] = {
    "unknown dtype": ["ext", "torch.dtype", "float33"],
    "dtype of another type": ["ext", "torch.dtype", ["list", []]],
    "unknown device": ["ext", "torch.device", "toaster:7"],
    "size of text": ["ext", "torch.Size", ["tuple", ["x"]]],
    "objects of numpy": ["ext", "numpy.ndarray", ["tuple", ["|O", ["tuple", [0]], ""]]],
    "an expression for numpy": [
        "ext",
        "numpy.ndarray",
        ["tuple", ["(2,3)f8", ["tuple", []], ["bytes", "AAAA"]]],
    ],
    "too few bytes": [
        "ext",
        "numpy.ndarray",
        ["tuple", ["<f8", ["tuple", [1 << 40]], ["bytes", "AAAA"]]],
    ],
    "negative shape": [
        "ext",
        "numpy.ndarray",
        ["tuple", ["<f8", ["tuple", [-1, -1]], ["bytes", "AAAAAAAAAAA="]]],
    ],
    "huge dtype": [
        "ext",
        "numpy.scalar",
        ["tuple", ["V9223372036854775807", ["bytes", ""]]],
    ],
    "negative size": ["ext", "torch.Size", ["tuple", [-1]]],
    "size without an end": ["ext", "torch.Size", ENDLESS],
    "count without an end": ["ext", "Counter", ENDLESS],
    "shape without an end": [
        "ext",
        "numpy.ndarray",
        ["tuple", ["<f8", ENDLESS, ["bytes", ""]]],
    ],
    "bytes of floats": ["blob", 1],
    "bytes of a view": ["blob", 5],
    "no such tensor": ["tensor", 99],
    "no such bytes": ["blob", 99],
    "unknown tag": ["ext", "os.system", "true"],
}


class TestAssemble:
    """The tree, with the tensors put in."""

    @pytest.mark.parametrize("kind", LIES)
    def test_a_lie_is_the_sender_s_fault(self, kind: str) -> None:
        """Nothing crashes, and no bare error of torch or numpy comes out."""
        views = [
            view(),
            view(dtype="int64", shape=(1, 2), stride=(2, 1)),
            view(dtype="int64", shape=(0, 1 << 40), stride=(1 << 40, 1)),
            view(shape=(1 << 40, 0), stride=(1, 1)),
            view(dtype="uint8", shape=(16,)),
        ]
        with pytest.raises(RemoteProtocolError):
            value_of(["list", [LIES[kind]]], views=views)

    @proves("threat E3")
    def test_a_pickle_runs_only_with_permission(self) -> None:
        """The error says how to give it."""
        data = pickle.dumps(frozenset)
        tree: Node = ["ext", "pickle", ["blob", 0]]
        options: dict[str, Any] = {"segment": data, "shape": (len(data),)}
        manifest = manifest_of(tree, **options)
        tensors = tensors_over(manifest, memoryview(bytearray(data)))
        with pytest.raises(RemoteProtocolError, match="allow_pickle=True"):
            assemble(Frame.of(manifest), tensors, limits=LIMITS)
        found = assemble(Frame.of(manifest), tensors, limits=LIMITS, allow_pickle=True)
        assert found is frozenset

    def test_a_broken_pickle_is_the_sender_s_fault(self) -> None:
        """The error blames the sender, also where pickles are allowed."""
        with pytest.raises(RemoteProtocolError):
            value_of(["ext", "pickle", ["blob", 0]], allow_pickle=True)


BIG = 1 << 16


def _of(tag: str, *payload: Node) -> Node:
    return ["ext", tag, ["tuple", list(payload)]]


class TestAmplification:
    """A few bytes stay a few bytes."""

    @proves("threat D1")
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
