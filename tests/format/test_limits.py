"""Limits are exact, and name what exceeded them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import LimitExceededError
from aiockpt.format.limits import Limits, enforce, enforce_values


def test_the_defaults_fit_a_large_model() -> None:
    """They bound a hostile peer and are out of the way of a real one."""
    limits = Limits()
    assert limits.max_header_bytes == 64 << 20
    assert limits.max_tensors == 100_000
    assert limits.max_nodes == 500_000
    assert limits.max_bytes is None


def test_a_limit_may_be_reached() -> None:
    """Only what is above it is refused."""
    enforce("it", 5, 5)
    enforce("it", 10**100, None)
    with pytest.raises(LimitExceededError, match="it is 6, more than the limit of 5"):
        enforce("it", 6, 5)


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)


def count(value: object) -> int:
    """Return the number of JSON values (keys are part of their members)."""
    if isinstance(value, dict):
        return 1 + sum(map(count, value.values()))
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(JSON)
def test_no_document_holds_more_values_than_are_counted(value: object) -> None:
    """The bound is never below the truth, so it can be trusted before decoding."""
    text = msgspec.json.encode(value)
    with pytest.raises(LimitExceededError) as caught:
        enforce_values("it", text, -1)
    assert caught.value.actual >= count(value)
    enforce_values("it", text, caught.value.actual)
    if count(value) > 1:
        with pytest.raises(LimitExceededError):
            enforce_values("it", text, count(value) - 1)
