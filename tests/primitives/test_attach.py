"""What two processes of one host say to share memory: a probe, an offer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.local.attach import Offer, format_offer, parse_offer
from aiockpt.runtime.same_host import format_probe, is_probe_of
from tests.support.proofs import proves

pytestmark = pytest.mark.torch_free

HERE, ELSEWHERE = b"h" * 32, b"e" * 32
NAME, TICKET = "0123456789abcdef" * 2, "f" * 32


def test_a_probe_is_recognised_by_its_host_only() -> None:
    """Another host cannot learn from it which host made it."""
    probe = format_probe(HERE, bytes(16))
    assert is_probe_of(probe, HERE)
    assert not is_probe_of(probe, ELSEWHERE)
    assert HERE.hex() not in probe
    assert format_probe(HERE, b"\1" * 16).split(".")[1] != probe.split(".")[1]


@given(st.text())
def test_any_other_text_is_no_probe(text: str) -> None:
    """Other text is not accepted, and raises nothing."""
    assert not is_probe_of(text, HERE)


def test_an_offer_is_parsed_as_it_was_written() -> None:
    """It leads into the abstract namespace, below a prefix of ours."""
    offer = parse_offer(format_offer(Offer(NAME, TICKET)))
    assert offer == Offer(NAME, TICKET)
    assert offer is not None
    assert offer.address == f"\0aiockpt-{NAME}"
    assert TICKET not in repr(offer)


@proves("threat I2")
@pytest.mark.parametrize(
    "text",
    [
        None, "", NAME, f"{NAME}.{TICKET}.", f"{NAME}.{TICKET}\n",
        f"/run/docker.sock.{TICKET}", f"../../{NAME}.{TICKET}",
        f"{NAME.upper()}.{TICKET}", f"{NAME}{NAME}.{TICKET}",
    ],
)  # fmt: skip
def test_no_offer_leads_elsewhere(text: str | None) -> None:
    """A peer cannot choose which socket is connected to."""
    assert parse_offer(text) is None
