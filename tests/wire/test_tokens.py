"""A receiver's token says who, which step, until when; nobody else can make one."""

from __future__ import annotations

import base64
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import make_token
from aiockpt.errors import AuthenticationError, ForgedManifestError
from aiockpt.http.protocol import format_metadata, parse_metadata
from aiockpt.http.tokens import (
    CLOCK_SKEW,
    Grant,
    check_manifest_mac,
    format_mac,
    manifest_mac,
    read_token,
)
from tests.support.proofs import proves

pytestmark = pytest.mark.torch_free

SECRET = "a-secret-of-the-job"
NAMES = st.from_regex(r"[\x21-\x7e]{1,100}", fullmatch=True)


@given(NAMES, st.none() | st.integers(0, 2**63 - 1))
def test_a_token_comes_back(receiver: str, step: int | None) -> None:
    """The token fits into metadata."""
    token = make_token(SECRET, receiver, step=step, expires=1000.5)
    assert read_token(token, SECRET) == Grant(receiver, step, 1001)
    metadata = format_metadata("http://h:1/checkpoint/", token)
    assert parse_metadata(metadata).token == token
    assert SECRET not in token


@proves("threat S2")
def test_every_other_token_is_none() -> None:
    """A changed character, another secret or a part grants nothing."""
    token = make_token(SECRET, "rank-3", step=7, expires=1000)
    assert read_token(token, SECRET + "x") is None
    for at, letter in enumerate(token):
        for other in "A.9-":
            changed = token[:at] + other + token[at + 1 :]
            assert letter == other or read_token(changed, SECRET) is None
        assert read_token(token[:at], SECRET) is None
    assert read_token(token + "A", SECRET) is None
    assert read_token("", SECRET) is None


@given(st.text())
def test_any_text_is_none(text: str) -> None:
    """Other text is no token, and raises nothing."""
    assert read_token(text, SECRET) is None


def test_the_secret_of_one_use_is_none_for_the_other() -> None:
    """A MAC of a manifest never passes for one of a token."""
    token = make_token(SECRET, "r", expires=1)
    payload, _, _ = token.rpartition(".")
    mac = manifest_mac(SECRET.encode())
    mac.update(payload.encode())
    digits = base64.urlsafe_b64encode(mac.digest()).rstrip(b"=").decode()
    assert read_token(f"{payload}.{digits}", SECRET) is None


@pytest.mark.parametrize(
    ("grant", "step", "now", "fault"),
    [
        (Grant("r", None, 1000), "7", 1000, None),
        (Grant("r", None, 1000), None, 1000 + CLOCK_SKEW, None),
        (Grant("r", 7, 1000), "7", 999, None),
        (Grant("r", None, 1000), "7", 1001 + CLOCK_SKEW, "expired 31 s ago"),
        (Grant("r", 7, 1000), "8", 999, "for step 7 only"),
        (Grant("r", 7, 1000), "07", 999, "for step 7 only"),
        (Grant("r", 7, 1000), None, 999, "for step 7 only"),
    ],
)
def test_a_grant_has_a_step_and_an_end(grant, step, now, fault) -> None:
    """Clocks may differ by the skew."""
    expected = (
        pytest.raises(AuthenticationError, match=fault) if fault else nullcontext()
    )
    with expected:
        grant.check(step, now=now)


@pytest.mark.parametrize(
    ("receiver", "expires", "step"),
    [("", 1, None), ("two words", 1, None), ("line\nend", 1, None), ("é", 1, None),
     ("x" * 101, 1, None), ("r", 0, None), ("r", float("nan"), None),
     ("r", 1e13, None), ("r", 1, -1), ("r", 1, 1 << 63)],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(receiver, expires, step) -> None:
    """The constructor of a token refuses it."""
    with pytest.raises(ValueError, match=r"receiver|time or step"):
        make_token(SECRET, receiver, expires=expires, step=step)


def test_only_the_mac_of_the_whole_header_passes() -> None:
    """Wrong, missing, of another key or header: each is an error of its own kind."""
    key, header = b"k" * 16, bytes(range(256)) * 10
    mac = manifest_mac(key)
    for start in range(0, len(header), 700):
        mac.update(header[start : start + 700])
    good = format_mac(mac)
    check_manifest_mac(key, header, good, url="u")
    for bad_key, bad_header, value in (
        (b"x" * 16, header, good),
        (key, header[:-1], good),
        (key, header, good[:-1]),
        (key, header, good.upper()),
        (key, header, "é\udc80"),
        (key, header, ""),
    ):
        with pytest.raises(ForgedManifestError, match="another key"):
            check_manifest_mac(bad_key, bad_header, value, url="u")
    with pytest.raises(ForgedManifestError, match="no MAC") as caught:
        check_manifest_mac(key, header, None, url="u")
    assert caught.value.missing
