"""Dtypes by name; `test_agreement` holds the table to torch's own."""

from __future__ import annotations

import pytest

from aiockpt.errors import RemoteProtocolError
from aiockpt.format import dtypes


def test_a_dtype_without_a_code_is_entered_as_bytes() -> None:
    """Safetensors has no complex128."""
    assert dtypes.code_of("complex128") == "U8"
    assert dtypes.code_of("complex64") == "C64"


def test_each_code_names_a_dtype_of_its_size() -> None:
    """Elements smaller than a byte come in pairs."""
    for code, name in dtypes.CODES.items():
        pair = 2 if code == "F4" else 1
        assert dtypes.CODE_BITS[code] * pair == 8 * dtypes.itemsize(name)


@pytest.mark.parametrize("ask", [dtypes.itemsize, dtypes.code_of, dtypes.torch_name])
def test_an_unknown_dtype_is_the_peers_fault(ask: object) -> None:
    """A name is looked up in the table and nowhere else."""
    with pytest.raises(RemoteProtocolError, match="unknown"):
        ask("__class__" * 100)  # type: ignore[operator]
