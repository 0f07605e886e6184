"""A template and the manifest that it is matched with."""

from __future__ import annotations

import asyncio

from aiockpt.format.manifest import Manifest
from aiockpt.state.template import Match, Template
from pipeline import LIMITS, stager


def staged(state: object) -> tuple[Manifest, bytes]:
    """Return what a sender says, and the data segment."""

    async def stage() -> tuple[Manifest, bytes]:
        async with stager() as staging:
            snapshot = await staging.stage(state, step=1)
            views = snapshot.views(0, snapshot.manifest.segment_bytes)
            return snapshot.manifest, b"".join(views)

    return asyncio.run(stage())


def match(state: object, template: object) -> Match:
    """Match a template with a checkpoint of ``state``."""
    manifest, _ = staged(state)
    return Template(template, limits=LIMITS, allow_pickle=False).match(manifest)
