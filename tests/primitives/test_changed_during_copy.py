"""A template that changes while the copies to its device are enqueued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aiockpt.errors import LocalProtocolError
from aiockpt.memory.device import Event
from tests.behaviour.test_changed_memory import (
    CHANGES,
    PATHS,
    WAYS,
    Once,
    state_of,
)
from tests.support.accelerators import FakeAccelerator

pytestmark = pytest.mark.asyncio


class Late(FakeAccelerator):
    """A device whose copies are enqueued just before a state dict changes."""

    def __init__(self, change: Any, state: dict[str, Any]) -> None:
        super().__init__(held=False)
        self.change, self.state = change, state

    def mark(self) -> Event:
        """Mark the end of the copies, as the last step of a load."""
        self.change(self.state)
        return super().mark()


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("http", "replaced"), ("http", "alike"), ("http", "moved on"),
        ("http", "shorter"), ("prepare", "alike"), ("prepare, async", "shorter"),
    ],
)  # fmt: skip
async def test_a_template_that_changes_during_the_copy_is_no_success(
    way: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lack bytes of the checkpoint."""
    template = state_of(1.0)
    device = Late(CHANGES[name], template)
    monkeypatch.setattr("aiockpt.http_transport.port_for", device.port_for)
    seen = Once(lambda _: None, template)
    with pytest.raises(LocalProtocolError, match=PATHS[name]) as caught:
        await WAYS[way](template, seen, tmp_path)
    seen.check()
    assert "the template was modified" in caught.value.__notes__
    assert template["step"] == 1
