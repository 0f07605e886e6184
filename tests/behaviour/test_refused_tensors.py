"""Tensors that do not travel: sparse and quantized ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from aiockpt import register_leaf
from aiockpt.errors import UnsupportedLeafError
from aiockpt.testing import assert_same
from tests.support.saving import names, save
from tests.support.transports import pair, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own

QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def _per_channel() -> torch.Tensor:
    scales, zeros = torch.ones(3), torch.zeros(3)
    return torch.quantize_per_channel(torch.ones(3), scales, zeros, 0, torch.qint8)


ODD: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {
    "sparse COO": ("sparse_coo", lambda: torch.eye(3).to_sparse()),
    "sparse CSR": ("sparse_csr", lambda: torch.eye(3).to_sparse_csr()),
    "sparse CSC": ("sparse_csc", lambda: torch.eye(3).to_sparse_csc()),
    "sparse BSR": ("sparse_bsr", lambda: torch.eye(4).to_sparse_bsr((2, 2))),
    "sparse BSC": ("sparse_bsc", lambda: torch.eye(4).to_sparse_bsc((2, 2))),
    "a sparse parameter": (
        "sparse_coo",
        lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    ),
    "quantized": ("qint8", _quantized),
    "quantized per channel": ("qint8", _per_channel),
    **{
        f"bytes seen as {dtype}": (
            dtype,
            lambda dtype=dtype: torch.zeros(8, dtype=torch.uint8).view(  # type: ignore[misc]
                getattr(torch, dtype)
            ),
        )
        for dtype in QUANTIZED
    },
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ODD)
async def test_a_sender_refuses_it(kind: str, tmp_path: Path) -> None:
    """The error has the path, the kind and the remedy; nothing is offered or left."""
    name, make = ODD[kind]
    row = {f"w{n}": torch.ones(2) for n in range(20)}
    async with pair() as (sender, receiver):
        for state in ({"a": [{"b": make()}]}, {"a": [row | {"b": make()}]}):
            with pytest.raises(UnsupportedLeafError, match=name) as caught:
                await sender.send_checkpoint([], 1, state)
            assert caught.value.path in {"a[0].b", "a[0][0].b"}
            assert "register_leaf" in str(caught.value)
        await sender.send_checkpoint([], 1, {"a": torch.ones(3, 3), "w": torch.ones(2)})
        into = {"a": make(), "w": torch.zeros(2)}  # None in its place would do
        with pytest.raises(UnsupportedLeafError) as caught:
            await receive(sender, receiver, into=into)
        assert caught.value.path == "a"
        assert not into["w"].any()
    with pytest.raises(UnsupportedLeafError, match="register_leaf"):
        save(tmp_path / "step-1", {"a": make()})
    assert not names(tmp_path)


@dataclass
class Sparse:
    """A sparse tensor, taken apart: what the error's remedy looks like."""

    indices: torch.Tensor
    values: torch.Tensor
    size: torch.Size

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sparse:
        """Take one apart."""
        tensor = tensor.coalesce()
        return cls(tensor.indices(), tensor.values(), tensor.size())

    def tensor(self) -> torch.Tensor:
        """Put it together."""
        return torch.sparse_coo_tensor(
            self.indices, self.values, self.size, check_invariants=True
        )


@pytest.mark.asyncio
async def test_the_remedy_works() -> None:
    """A registered class around the parts travels."""
    register_leaf(Sparse, tag="tests.Sparse")
    state = {"a": Sparse.of(torch.eye(3).to_sparse())}
    async with pair(state=state) as (sender, receiver):
        got = await receive(sender, receiver)
    assert_same(got["a"].tensor().to_dense(), torch.eye(3))
