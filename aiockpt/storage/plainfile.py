"""A flat state dict as a safetensors file with nothing of ours in it."""

from __future__ import annotations

from typing import Any, Final

from aiockpt.errors import StateDictError
from aiockpt.format.entries import encode_entries
from aiockpt.format.header import LENGTH_BYTES
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.format.references import tensor_paths
from aiockpt.transfer.live import LiveState

__all__ = ["PlainSource"]

_METADATA: Final = {"format": "pt"}
_START: Final = b'{"__metadata__":{"format":"pt"}'
_PADDING: Final = 8


class PlainSource:
    """A live state as a `storage.write.Source` of a plain file.

    Raises:
        StateDictError: it is no dict of names and tensors, or one of the tensors is
            more than a dtype, a shape and bytes of its own.
    """

    def __init__(self, live: LiveState, state: Any) -> None:
        self._live = live
        manifest = live.seal()
        _check(manifest, state)
        text = bytearray(_START)
        for piece in encode_entries(manifest.entries):
            text += piece
        text += b"}"
        text += b" " * (-len(text) % _PADDING)
        header = len(text).to_bytes(LENGTH_BYTES, "little") + text
        self._header = ForeignHeader(manifest.entries, _METADATA, bytes(header))
        self.header_bytes = self._header.header_bytes
        self.segment_bytes = live.segment_bytes

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return ``[start, stop)``."""
        return self._live.views(start, stop)

    def seal(self) -> ForeignHeader:
        """Return the header."""
        return self._header


def _check(manifest: Manifest, state: Any) -> None:
    if type(state) is not dict:
        kind = type(state).__name__
        detail = f"a plain safetensors file holds a dict of tensors, this is a {kind}"
        raise StateDictError(detail)
    for name, value in state.items():
        if type(name) is not str or not hasattr(value, "dtype"):
            kind = type(value).__name__
            fault = f"{name!r} has the type {kind}, not Tensor"
            if type(name) is not str:
                fault = f"the key {name!r} has the type {type(name).__name__}, not str"
            raise StateDictError(
                f"{fault}: a plain safetensors file has no place for it"
            )
    paths = tensor_paths(manifest.tree)
    entries = len(manifest.entries)
    for number, path in paths.items():
        if number >= entries:
            raise StateDictError(
                f"{path} shares memory, is a parameter, or is not contiguous, which a "
                "plain safetensors file cannot say"
            )
    if sorted(manifest.names) != sorted(state):
        raise StateDictError("a plain safetensors file cannot hold all of its names")
