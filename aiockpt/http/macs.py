"""MACs of the manifests that are served, computed in the loop's small change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiockpt.format.manifest import Manifest
from aiockpt.http.tokens import MAC_HEADER, format_mac, manifest_mac

__all__ = ["ManifestMacs"]

_SLICE = 256 << 10  # a fraction of a millisecond
_KEPT = 4


class ManifestMacs:
    """Knows the MACs of the last few manifests."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._known: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<ManifestMacs known={len(self._known)}>"

    async def headers_of(self, manifest: Manifest) -> Mapping[str, str]:
        """Return the header that authenticates a manifest; none without a key."""
        if self._key is None:
            return {}
        name = manifest.snapshot_id
        if name not in self._known:
            self._known[name] = await self._compute(self._key, manifest)
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return {MAC_HEADER: self._known[name]}

    async def _compute(self, key: bytes, manifest: Manifest) -> str:
        mac = manifest_mac(key)
        header = memoryview(manifest.header)
        for start in range(0, len(header), _SLICE):
            mac.update(header[start : start + _SLICE])
            await asyncio.sleep(0)
        return format_mac(mac)
