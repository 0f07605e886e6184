"""State dicts from files: ours, other tools' safetensors, and torch's own."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiockpt.errors import IntegrityError, StorageError
from aiockpt.format.limits import Limits
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.flatten import describe
from aiockpt.storage.statefile import read_state_file
from aiockpt.transfer.stager import Stager, StagerOptions

LIMITS = Limits()


def read(path: Path) -> Any:
    """Return the state dict in a file."""
    return read_state_file(path, limits=LIMITS).state


def write_safetensors(path: Path, header: dict[str, Any], data: bytes) -> Path:
    """Write a file as another tool may: nothing in it is aligned."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


class TestForeign:
    """Files of other tools."""

    def test_every_tensor_is_there(self, tmp_path: Path) -> None:
        """Scalars, empty ones, and all sorts of dtypes."""
        tensors = {
            "half": torch.randn(3, 4).half(),
            "brain": torch.randn(5).bfloat16(),
            "flag": torch.tensor([True, False]),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "eight": torch.randn(4).to(torch.float8_e4m3fn),
        }
        save_file(tensors, tmp_path / "f")
        found = read(tmp_path / "f")
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert bytes_of(found[name]) == bytes_of(tensor)

    def test_unaligned_tensors_are_read(self, tmp_path: Path) -> None:
        """The format does not align; torch does not mind."""
        header = {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
        data = b"\x01" + struct.pack("<ff", 1.5, 2.5)
        found = read(write_safetensors(tmp_path / "f", header, data))
        assert found["b"].tolist() == [1.5, 2.5]

    def test_writing_to_a_tensor_leaves_the_file_alone(self, tmp_path: Path) -> None:
        """The mapping is private."""
        save_file({"a": torch.zeros(4)}, tmp_path / "f")
        before = (tmp_path / "f").read_bytes()
        read(tmp_path / "f")["a"].add_(1)
        assert (tmp_path / "f").read_bytes() == before

    @pytest.mark.parametrize("code", ["F4", "F6_E2M3"])
    def test_a_dtype_below_a_byte_is_refused(self, tmp_path: Path, code: str) -> None:
        """Neither torch nor the wire format has them."""
        nbytes = {"F4": 2, "F6_E2M3": 3}[code]
        header = {"a": {"dtype": code, "shape": [4], "data_offsets": [0, nbytes]}}
        path = write_safetensors(tmp_path / "f", header, bytes(nbytes))
        with pytest.raises(StorageError, match=f"tensor a has dtype {code}"):
            read(path)


def bytes_of(tensor: torch.Tensor) -> list[int]:
    """Return a tensor's bytes, whatever they mean."""
    return tensor.reshape(-1).view(torch.uint8).tolist()


def write(path: Path, state: object) -> Path:
    """Write what staging ``state`` gives."""
    path.write_bytes(asyncio.run(staged(state)))
    return path


async def staged(state: object) -> bytes:
    """Return a checkpoint as a file holds it."""
    bridge = Bridge(threads=1, name="test")
    stager = Stager(
        bridge,
        StagerOptions(
            threads=1, chunk_bytes=1 << 20, limits=LIMITS, allow_pickle=False
        ),
    )
    snapshot = await stager.stage(state, step=5)
    manifest = snapshot.manifest
    data = b"".join(snapshot.views(0, manifest.segment_bytes))
    snapshot.release()
    stager.trim()
    bridge.close()
    return bytes(manifest.header) + data


class TestOurs:
    """Files that aiockpt made."""

    def test_the_state_dict_comes_back(self, tmp_path: Path) -> None:
        """Its containers, values, tied tensors and parameters; and the step."""
        weight = torch.nn.Parameter(torch.randn(4, 4))
        state = {
            "model": OrderedDict(weight=weight, tied=weight, view=weight.detach()[1:]),
            "values": [1, 2.5, None, ("a", {3})],
        }
        found = read_state_file(write(tmp_path / "f", state), limits=LIMITS)
        assert found.step == 5
        model: Any = found.state["model"]  # type: ignore[index]
        assert isinstance(model["weight"], torch.nn.Parameter)
        assert torch.equal(model["weight"], weight)
        assert model["tied"] is model["weight"]
        assert model["view"].data_ptr() == model["weight"][1:].data_ptr()
        assert found.state["values"] == state["values"]  # type: ignore[index]

    def test_damage_is_found_before_it_is_used(self, tmp_path: Path) -> None:
        """Any chunk of it."""
        path = write(tmp_path / "f", {"a": torch.ones(1 << 19)})
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError) as caught:
            read(path)
        assert caught.value.chunk == 1


class TestTorch:
    """Files of torch.save."""

    @pytest.mark.parametrize("zipped", [True, False])
    def test_both_formats_are_read(self, tmp_path: Path, zipped: bool) -> None:
        """Tensors, containers and plain values; what cannot travel shows later."""
        state = {"m": OrderedDict(w=torch.ones(3)), "n": 1, "t": torch.ones(2)[::2]}
        torch.save(state, tmp_path / "f", _use_new_zipfile_serialization=zipped)
        found = read(tmp_path / "f")
        assert torch.equal(found["m"]["w"], torch.ones(3))
        assert found["n"] == 1
        assert describe(found, limits=LIMITS, allow_pickle=False).entries.nbytes == 16

    def test_code_is_not_run(self, tmp_path: Path) -> None:
        """A pickle that calls something is refused, and says what it would call."""
        torch.save({"a": Caller(tmp_path / "called")}, tmp_path / "f")
        with pytest.raises(StorageError, match=r"it holds a [\w.]+\.touch"):
            read(tmp_path / "f")
        assert not (tmp_path / "called").exists()

    @pytest.mark.filterwarnings("ignore:Detected pickle protocol")
    @pytest.mark.parametrize("data", [b"\x80\x02 no pickle", b"\x80\x04\x95\0"])
    def test_what_torch_cannot_read(self, tmp_path: Path, data: bytes) -> None:
        """The reason is given, and not torch's advice to run the file's code."""
        (tmp_path / "f").write_bytes(data)
        with pytest.raises(
            StorageError, match="torch cannot read it: Unsupp"
        ) as caught:
            read(tmp_path / "f")
        assert "weights_only" not in str(caught.value)


class Caller:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return touch, (str(self.path),)


def touch(path: str) -> None:
    """Do what a pickle may not."""
    Path(path).touch()


@pytest.mark.parametrize("opens", [1, 2, 3])
@pytest.mark.parametrize("kind", ["ours", "another tool's", "torch's"])
def test_a_file_that_is_replaced_meanwhile_is_read_as_it_was(
    tmp_path: Path, kind: str, opens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is verified is what is returned: the path is opened once."""

    def made(fill: float) -> Path:
        path, state = tmp_path / f"{fill}", {"w": torch.full((50_000,), fill)}
        if kind == "ours":
            return write(path, state)
        if kind == "torch's":
            torch.save(state, path)
        else:
            save_file(state, path)
        return path

    path, other = made(1.0), made(2.0)
    count = 0

    def open_and_replace(self: Path, *args: Any, **options: Any) -> Any:
        nonlocal count
        file = opened(self, *args, **options)
        count += self == path
        if count == opens and other.exists():
            other.replace(path)
        return file

    opened = Path.open
    monkeypatch.setattr(Path, "open", open_and_replace)
    state = read(path)
    assert torch.equal(state["w"], torch.ones(50_000))
