"""What torch and safetensors themselves say about dtypes, strides, views and files."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Limits
from aiockpt.format import dtypes
from aiockpt.format.entries import Entries, Entry
from aiockpt.format.header import decode_header, header_length
from aiockpt.format.manifest import ForeignHeader, TensorSpec
from aiockpt.format.validate import views_fault

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors")
save = pytest.importorskip("safetensors.numpy").save
READABLE = pytest.importorskip("safetensors.torch")._TYPES

QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
KNOWN = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and str(dtype) not in {f"torch.{name}" for name in QUANTIZED}
}
WRITTEN = {code: size for size, code in dtypes.DTYPES.values() if code is not None}
NAMES = st.text(max_size=3).filter(lambda name: name != "__metadata__")


def test_every_dtype_of_torch_is_known() -> None:
    """All of torch's dtypes travel, each with its size, but for the quantized ones."""
    ours = {name: size for name, (size, _) in dtypes.DTYPES.items()}
    assert ours == {name: dtype.itemsize for name, dtype in KNOWN.items()}


def test_codes_are_those_that_safetensors_reads() -> None:
    """We write what its ``load`` can read; the two that it cannot, we only read."""
    ours = {code: KNOWN[name] for code, name in dtypes.CODES.items()}
    assert ours.keys() - READABLE.keys() == {"F8_E8M0", "F4"}
    assert {code: ours[code] for code in READABLE} == READABLE
    assert WRITTEN.keys() == READABLE.keys()


def test_flags_are_accepted_where_torch_accepts_them() -> None:
    """Complex dtypes have conjugates; some dtypes have no gradients."""
    assert {name for name in KNOWN if KNOWN[name].is_complex} == dtypes.COMPLEX
    assert {name for name in KNOWN if has_gradients(name)} == dtypes.DIFFERENTIABLE


def has_gradients(name: str) -> bool:
    """Whether torch lets a tensor of this dtype require gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # half of the dtypes are experimental
        tensor = torch.empty(0, dtype=KNOWN[name])
        try:
            tensor.requires_grad_()
        except RuntimeError:
            return False
        return True


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=3),
    st.integers(0, 20),
    st.sampled_from(["uint8", "int16", "float32", "complex64"]),
)
def test_a_view_is_accepted_as_torch_would(
    dims: list[tuple[int, int]], offset: int, dtype: str
) -> None:
    """What passes can be made; what torch makes of elements that exist passes."""
    shape, stride = tuple(size for size, _ in dims), tuple(step for _, step in dims)
    spec = TensorSpec(0, dtype, shape, stride, offset, 0)
    columns = Entries.of({"w": Entry("U8", (32,), (0, 32))})
    accepted = views_fault([spec], columns) is None
    try:
        torch.zeros(32 // KNOWN[dtype].itemsize, dtype=KNOWN[dtype]).as_strided(
            shape, stride, offset
        )
    except RuntimeError:
        assert not accepted
    else:
        assert accepted or 0 in shape


@given(st.dictionaries(NAMES, st.binary(max_size=9), max_size=5))
def test_we_read_what_safetensors_writes(tensors: dict[str, bytes]) -> None:
    """Every file of the reference implementation is a foreign header to us."""
    arrays = {name: numpy.frombuffer(tensors[name], numpy.uint8) for name in tensors}
    file = save(arrays, {"by": "safetensors"})
    length = header_length(file[:8], limits=Limits())
    header = decode_header(file[:length], limits=Limits())
    assert isinstance(header, ForeignHeader)
    assert header.metadata == {"by": "safetensors"}
    segment = file[header.header_bytes :]
    assert header.segment_bytes == len(segment)
    assert tensors == {
        name: segment[slice(*entry.data_offsets)]
        for name, entry in zip(header.names, header.entries, strict=True)
    }
