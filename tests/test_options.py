"""Options that cannot work are refused when the transport is made."""

from __future__ import annotations

from typing import Any

import pytest

from aiockpt import Auth, HTTPTransport, Receive
from tests.support.transports import transport


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("chunk_bytes", 100),
        ("chunk_bytes", 0),
        ("chunk_bytes", 65_537),
        ("connections", 0),
        ("readers", 0),
        ("stall_timeout", 0),
        ("stall_timeout", float("nan")),
        ("reconnect_timeout", -1),
        ("grace", -0.5),
        ("timeout", -1),
        ("nice", -1),
        ("nice", 20),
        ("token", ""),
        ("token", "two words"),
    ],
)
def test_an_impossible_option_is_named(option: str, value: Any) -> None:
    """The error names the option, so that the caller finds it at once."""
    with pytest.raises(ValueError, match=option):
        transport(**{option: value})


@pytest.mark.parametrize("limits", [None, 5, {}])
def test_limits_of_another_type_are_refused(limits: Any) -> None:
    """At once, and not by the first receive."""
    with pytest.raises(TypeError, match="limits must be of type Limits"):
        HTTPTransport(receive=Receive(limits=limits))


def test_a_token_and_no_token_contradict_each_other() -> None:
    """Nobody gets an open server by mistake."""
    with pytest.raises(ValueError, match="insecure"):
        HTTPTransport(auth=Auth(token="secret", insecure=True))
