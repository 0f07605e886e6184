"""The file format, without I/O: bytes in, bytes out.

A checkpoint is a manifest and one run of bytes, the data segment; together they are a
valid safetensors file. This package turns a manifest into the bytes of a header and
back, and a state dict's structure into a JSON tree and back. It imports only the
standard library, msgspec, xxhash and perhaps blake3, so each malformed input is a
one-line test. Everything that a peer sent is checked here before anything is allocated
for it. The path begins in `header` (`build_manifest`, `decode_header`) and in `tree`.
"""

from __future__ import annotations
