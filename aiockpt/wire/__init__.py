"""The wire format: bytes in, bytes out, no I/O.

Everything that both ends must agree on lives here and nowhere else, and needs only
the standard library, msgspec and xxhash: no torch, no event loop, no sockets.

========== ==================================================================
manifest   build a header; decode and validate one
document   what stands in a header, as classes
layout     order and offsets of the data segment; encode a header
tree       the structure of a state dict as tagged JSON
registry   the types that the tree learns about (`register_leaf`)
references where a tree refers to tensors
dtypes     torch's dtypes by name, and their safetensors codes
chunks     the chunk grid, digests, ``Range`` and ``Content-Range``
http       routes, header names, conditional requests, the metadata string
problems   the one table between errors and HTTP statuses
limits     what a receiver is willing to accept
========== ==================================================================
"""
