"""Frames: what is said arrives as it was said, and nonsense is refused."""

from __future__ import annotations

import pytest

from aiockpt.errors import RemoteProtocolError
from aiockpt.pg.conversation import FRAME_BYTES, Frame, Kind


@pytest.mark.parametrize("kind", Kind)
def test_a_frame_survives(kind: Kind) -> None:
    """Every kind, with all that it can say."""
    frame = Frame(kind, 2**63 - 1, 123456789, "why: …")
    assert len(frame.encode()) == FRAME_BYTES
    assert Frame.decode(frame.encode()) == frame


def test_a_long_text_is_cut() -> None:
    """Its beginning arrives; a character that the cut goes through is replaced."""
    text = Frame.decode(Frame(Kind.FAILED, 1, text="ä" * 5000).encode()).text
    assert text.startswith("ä" * 400)
    assert len(text) < FRAME_BYTES


@pytest.mark.parametrize("step", [-5, 2**63, 10**30])
def test_a_step_that_no_checkpoint_has_is_no_step(step: int) -> None:
    """Whoever fails because of it can still say so."""
    assert Frame.decode(Frame(Kind.FAILED, step).encode()).step == -1


def test_a_text_cannot_move_the_cursor() -> None:
    """It ends up in logs and terminals."""
    text = "first\nsecond\x1b[2J\x00"
    assert "\n" not in Frame.decode(Frame(Kind.FAILED, 1, text=text).encode()).text
    assert "\x1b" not in Frame.decode(Frame(Kind.FAILED, 1, text=text).encode()).text


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"torchft.", "no aiockpt.PGTransport"),
        (8, b"\x02\x00", "version 2"),
        (10, b"\x63\x00", "malformed"),
        (20, b"\xff" * 8, "malformed"),
        (28, b"\xff\xff\xff\x7f", "malformed"),
    ],
    ids=["magic", "version", "kind", "negative length", "longer than the frame"],
)
def test_nonsense_is_refused(at: int, value: bytes, words: str) -> None:
    """It names the peer's mistake."""
    frame = Frame(Kind.OFFER, 1, 64).encode()
    frame[at : at + len(value)] = value
    with pytest.raises(RemoteProtocolError, match=words):
        Frame.decode(frame)
