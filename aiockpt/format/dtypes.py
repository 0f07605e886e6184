"""Torch's dtypes by name, without torch, and the codes that safetensors has for them.

A dtype without a code travels as ``U8`` bytes, and a view in the manifest names the
real dtype. Newer safetensors releases have two codes that their own ``load(bytes)``
cannot read: ``F8_E8M0`` and ``F4``. Files with these codes are read, but no checkpoint
is written with them. For the codes ``F6_E2M3`` and ``F6_E3M2`` torch has no dtype.
"""

from __future__ import annotations

from typing import Final

from aiockpt.errors import RemoteProtocolError

DTYPES: Final[dict[str, tuple[int, str | None]]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "uint16": (2, "U16"),
    "int16": (2, "I16"),
    "uint32": (4, "U32"),
    "int32": (4, "I32"),
    "uint64": (8, "U64"),
    "int64": (8, "I64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "complex32": (4, None),
    "complex64": (8, "C64"),
    "complex128": (16, None),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": (1, None),
    "float4_e2m1fn_x2": (1, None),
    "bits8": (1, None),
    "bits16": (2, None),
    "bits1x8": (1, None),
    "bits2x4": (1, None),
    "bits4x2": (1, None),
    **{f"{sign}int{bits}": (1, None) for sign in ("", "u") for bits in range(1, 8)},
}
"""Torch dtype name -> (bytes per element, safetensors code or None).

Torch's quantized dtypes are left out. A quantized tensor over received bytes has no
quantizer, and using it crashes the process.
"""

CODES: Final[dict[str, str]] = {
    **{code: name for name, (_, code) in DTYPES.items() if code is not None},
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
"""Safetensors code -> torch dtype name, for each code that torch has a dtype for."""

CODE_BITS: Final[dict[str, int]] = {
    **{code: 8 * size for size, code in DTYPES.values() if code is not None},
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Safetensors code -> bits per element, for every code of safetensors 0.8."""

COMPLEX: Final = frozenset(name for name in DTYPES if name.startswith("complex"))
DIFFERENTIABLE: Final = COMPLEX | {name for name in DTYPES if "float" in name}


def itemsize(name: str) -> int:
    """Return the bytes per element of a torch dtype (``"float32"`` -> 4)."""
    try:
        return DTYPES[name][0]
    except KeyError:
        raise RemoteProtocolError(f"unknown dtype {name[:40]!r}") from None


def torch_name(code: str) -> str:
    """Return the torch dtype name of a safetensors code (``"F32"`` -> "float32")."""
    try:
        return CODES[code]
    except KeyError:
        raise RemoteProtocolError(f"unknown safetensors dtype {code[:40]!r}") from None
