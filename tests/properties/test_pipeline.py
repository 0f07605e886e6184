"""Properties of the whole way: describe, stage, encode, decode, rebuild."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Limits
from aiockpt.format.header import decode_header, header_length
from aiockpt.format.manifest import Manifest
from aiockpt.state.equality import elements
from aiockpt.testing import assert_same
from aiockpt.testing.leaves import LEAVES, every_dtype
from tests.support.states import State, file_of, rebuilt, stager, states


def staged(state: object, **options: Any) -> bytes:
    """Return the file that a state dict becomes."""

    async def stage() -> bytes:
        async with stager(**options) as staging:
            return file_of(await staging.stage(state, step=1))

    return asyncio.run(stage())


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd dtypes
@given(states())
def test_any_state_dict_survives(state: State) -> None:
    """Types, bits, strides, flags and shared memory come out as they went in."""
    assert_same(rebuilt(staged(dict(state))), dict(state))


ALIGNED_ANYWHERE = [torch.uint8, torch.int16, torch.float32, torch.int64]


@st.composite
def overlapping(draw: st.DrawFn) -> list[torch.Tensor]:
    """Make views of one buffer at any byte, each with a torch storage of its own.

    The elements that they use count up; the bytes beside them are all 255.
    """
    memory = bytearray(b"\xff" * 256)
    found = []
    for _ in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(ALIGNED_ANYWHERE))
        offset = draw(st.integers(0, 128))
        count = draw(st.integers(1, 128 // dtype.itemsize))
        step = draw(st.integers(1, 5))
        flat = torch.frombuffer(memory, dtype=dtype, offset=offset, count=count)
        found.append(flat[::step])
    for tensor in found:
        elements(tensor).copy_(elements(tensor).clone().random_(0, 255))
    return found


@pytest.mark.parametrize("zero_copy", [False, True])
@given(overlapping())
def test_buffers_that_overlap_at_any_byte_survive(
    zero_copy: bool,
    tensors: list[torch.Tensor],
) -> None:
    """Every value is exact, and no byte beside them is sent."""
    file = staged(tensors, zero_copy=zero_copy)
    for actual, expected in zip(rebuilt(file), tensors, strict=True):
        assert torch.equal(elements(actual), elements(expected))
    assert b"\xff" not in file[header_length(file[:8], limits=Limits()) :]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_memory_between_elements_travels_as_zeros(
    zero_copy: bool,
) -> None:
    """Nobody asked for it, and it may be anything."""
    secret = torch.full((10, 4), 0x55, dtype=torch.uint8)
    secret[:, :3] = 1
    file = staged(secret[:, :3], zero_copy=zero_copy)
    assert file.endswith(bytes([1, 1, 1, 0] * 9 + [1, 1, 1]))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd dtypes
@given(states())
def test_any_state_dict_is_a_safetensors_file(state: State) -> None:
    """Other tools see every plain tensor under its name."""
    sees_its_tensors(staged(dict(state)))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
@pytest.mark.parametrize("kind", LEAVES)
def test_every_kind_of_leaf_is_in_a_safetensors_file(kind: str) -> None:
    """The file may hold anything beside it."""
    sees_its_tensors(staged({"leaf": LEAVES[kind](), "plain": torch.arange(3)}))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd dtypes
def test_plain_tensors_have_the_dtype_that_other_tools_know() -> None:
    """Other tools do not see the bytes that dtypes without a code travel as."""
    tensors = every_dtype()
    loaded = safetensors.torch.load(staged(tensors))
    known = {name for name, tensor in loaded.items() if str(tensor.dtype) == name}
    assert {"torch.float32", "torch.bfloat16", "torch.float8_e4m3fn"} < known
    assert all(
        loaded[name].dtype is torch.uint8 for name in tensors if name not in known
    )


def test_plain_tensors_have_the_names_of_their_paths() -> None:
    """The names are those that a flat state dict would have in a file."""
    weight = torch.randn(3, 4)
    state = {"model": {"layers": [{"w": weight}, {"w": weight[0]}]}, "a.b": weight + 1}
    loaded = safetensors.torch.load(staged(state))
    assert_same(
        dict(sorted(loaded.items())), {"a.b": weight + 1, "model.layers[0].w": weight}
    )


def sees_its_tensors(file: bytes) -> None:
    """Assert that safetensors finds in a file what a receiver finds there."""
    loaded = safetensors.torch.load(file)
    start = header_length(file[:8], limits=Limits())
    manifest = decode_header(file[:start], limits=Limits())
    assert isinstance(manifest, Manifest)
    assert loaded.keys() == set(manifest.names)
    for number, name in enumerate(manifest.names):
        spec, tensor = manifest.tensor(number), loaded[name]
        assert str(tensor.dtype) == f"torch.{spec.dtype}"
        assert tuple(tensor.shape) == spec.shape
        low, high = (start + edge for edge in manifest.entries[number].data_offsets)
        assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == file[low:high]
