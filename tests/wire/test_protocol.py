"""Routes, conditional requests and the metadata string, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import LocalProtocolError, RemoteProtocolError
from aiockpt.http.protocol import (
    MAX_METADATA,
    Origin,
    Resource,
    ResourceKind,
    format_digest,
    format_etag,
    format_latest,
    format_metadata,
    format_prefer_wait,
    format_resource,
    if_match,
    if_none_match,
    if_range,
    parse_after,
    parse_busy,
    parse_digest,
    parse_etag,
    parse_metadata,
    parse_prefer_wait,
    parse_resource,
)

pytestmark = pytest.mark.torch_free

ID = "0123456789abcdef" * 2
OTHER = "f" * 32

RESOURCES = st.one_of(
    st.builds(
        Resource,
        st.sampled_from([ResourceKind.METADATA, ResourceKind.FULL]),
        st.integers(0, 10**19 - 1),
    ),
    st.builds(
        Resource,
        st.just(ResourceKind.CHUNK),
        st.integers(0, 10**19 - 1),
        st.integers(0, 10**19 - 1),
    ),
)


@given(RESOURCES)
def test_a_resource_round_trips(resource: Resource) -> None:
    """What the client asks for is what the server serves."""
    assert parse_resource(*format_resource(resource).split("/")) == resource


@pytest.mark.parametrize(
    ("step", "what"),
    [
        ("", "full"), ("-1", "full"), ("+1", "full"), ("01", "full"), ("1.0", "full"),
        ("1_0", "full"), (" 1", "full"), ("1\n", "full"), ("\u0661", "full"),
        ("latest", "full"), ("9" * 20, "full"), ("9" * 10_000, "full"), ("1", ""),
        ("1", "Full"), ("1", "chunk"), ("1", "-1"), ("1", "00"), ("1", "../2"),
        ("1", "0x0"),
    ],
)  # fmt: skip
def test_another_path_is_refused(step: str, what: str) -> None:
    """One resource has one path, or caches and logs would know two."""
    with pytest.raises(RemoteProtocolError, match="no such resource"):
        parse_resource(step, what)


@given(st.none() | st.integers(0, 10**19 - 1))
def test_the_step_after_which_to_wait_round_trips(after: int | None) -> None:
    """What the client asks for is what the server waits for."""
    path, _, query = format_latest(after).partition("?")
    assert path == "latest"
    assert parse_after([query.removeprefix("after=")] if query else []) == after


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("http://h:80/checkpoint/", Origin("http://h:80/checkpoint/")),
        ("http://h:80/checkpoint", Origin("http://h:80/checkpoint/")),
        ("https://h", Origin("https://h/")),
        ("http://10.0.0.7:1/a/b/", Origin("http://10.0.0.7:1/a/b/")),
        ("http://[::1]:80/", Origin("http://[::1]:80/")),
        ("http://[fe80::1%25eth0]:80/", Origin("http://[fe80::1%25eth0]:80/")),
        ("HTTP://h/", Origin("http://h/")),
        ("http://h/#t0k.en~_-+/==", Origin("http://h/", "t0k.en~_-+/==")),
        ("http://h/#", Origin("http://h/")),
    ],
)
def test_metadata_names_a_source(text: str, source: Origin) -> None:
    """The base URL ends with a slash; the fragment is the token."""
    assert parse_metadata(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "", "h:80", "//h/", "ftp://h/", "file:///etc/passwd", "javascript:alert(1)",
        "http://", "http:///path", "http://:80/", "http://h:0/", "http://h:99999/",
        "http://h:port/", "http://[::1/", "http://user@h/", "http://user:secret@h/",
        "http://@h/", "http://h/?a=b", "http://h/ ", " http://h/",
        "http://h/\r\nHost: x", "http://h\n/", "http://h/\x00", "http://hé/",
        "http://h/#a#b", "http://h/#a b", "http://h/#a?b", "http://h/#%41",
    ],
)  # fmt: skip
def test_other_metadata_is_refused(text: str) -> None:
    """The message says what is wrong and what to pass, and repeats no secret."""
    with pytest.raises(LocalProtocolError, match=r"metadata\(\)") as caught:
        parse_metadata(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("rest", ["/", "", "/#token"])
def test_metadata_has_a_length_that_every_server_takes(rest: str) -> None:
    """The longest round-trips, with the slash that it may lack."""
    room = MAX_METADATA - len("http://h/") - len(rest.removeprefix("/"))
    longest = f"http://h/{'a' * (room - 1)}{rest}"
    source = parse_metadata(longest)
    assert parse_metadata(format_metadata(source.base_url, source.token)) == source
    with pytest.raises(LocalProtocolError, match="4097 characters"):
        parse_metadata(longest.replace("a", "aa", 1))


def test_a_token_that_would_not_arrive_is_refused() -> None:
    """The sender learns of it, not the receiver."""
    with pytest.raises(LocalProtocolError):
        format_metadata("http://h/", "no spaces")


def test_a_source_does_not_show_its_token() -> None:
    """A repr ends up in logs."""
    assert "secret" not in repr(Origin("http://h/", "secret"))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("wait=10", 10.0), ("wait=0", 0.0), ("wait=0.25", 0.25), ('wait="5"', 5.0),
        ("Wait = 5", 5.0), ("respond-async, wait=5", 5.0), ("wait=5;foo=bar", 5.0),
        ("wait=5, wait=6", 5.0), (None, None), ("", None), ("wait", None),
        ("wait=", None), ("wait=-1", None), ("wait=inf", None), ("wait=nan", None),
        ("wait=1e9", None), ("wait=9999999999", None), ("await=5", None),
        ("return=minimal", None),
    ],
)  # fmt: skip
def test_prefer_wait(value: str | None, seconds: float | None) -> None:
    """RFC 7240 section 4.3, with fractions; the first one counts."""
    assert parse_prefer_wait(value) == seconds


@given(st.floats(0, 1e9))
def test_a_wait_round_trips(seconds: float) -> None:
    """Short waits are exact to a millisecond, and long ones to a second."""
    parsed = parse_prefer_wait(format_prefer_wait(seconds))
    assert parsed == pytest.approx(seconds, abs=0.001, rel=0.06)


@pytest.mark.parametrize("seconds", [-1.0, float("-inf")])
def test_no_time_left_is_no_wait(seconds: float) -> None:
    """A deadline may have passed."""
    assert parse_prefer_wait(format_prefer_wait(seconds)) == 0


def test_a_digest_round_trips() -> None:
    """The digest of an unknown algorithm, or of another length, is none."""
    for digest in ("xxh3-128", ID), ("sha256", 2 * ID), ("blake3", 2 * ID):
        assert parse_digest(format_digest(*digest)) == digest
    for other in (
        None,
        "",
        ID,
        f"crc32={ID}",
        f"xxh3-128={ID}0",
        f"xxh3-128={ID}{ID}",
        f"sha256={ID}",
        f"blake3={ID}{ID}0",
        "xxh3-128=" + "G" * 32,
    ):
        assert parse_digest(other) is None


def test_an_etag_round_trips() -> None:
    """A weak tag does not promise equal bytes, so it is none."""
    assert parse_etag(format_etag(ID)) == ID
    for other in (None, "", ID, f'W/"{ID}"', f'"{ID}', f'"{ID}" ', '"a" "b"'):
        assert parse_etag(other) is None


TAG, WEAK, OTHER_TAG = f'"{ID}"', f'W/"{ID}"', f'"{OTHER}"'


@pytest.mark.parametrize(
    ("header", "proceed"),
    [
        (None, True), ("*", True), (TAG, True), (f"{OTHER_TAG}, {TAG}", True),
        (f"{OTHER_TAG},{TAG}", True), (f" , {TAG} ,, ", True), (OTHER_TAG, False),
        (WEAK, False), (ID, False), ("", False), (f"{TAG} {TAG}", False),
        (f"{TAG}, nonsense", False), ('"a, b"', False), (f'"{ID}, "', False),
    ],
)  # fmt: skip
def test_if_match(header: str | None, proceed: bool) -> None:
    """RFC 9110 section 13.1.1: strong comparison; what is odd matches nothing."""
    assert if_match(header, ID) is proceed


@given(st.text(max_size=50) | st.from_regex(r'[W/", \t0a*]{0,60}', fullmatch=True))
def test_any_condition_is_decided(header: str) -> None:
    """No header makes a parser fail, or slow."""
    assert if_match(header, ID) in (True, False)
    assert if_none_match(header, ID) in (True, False)
    assert if_range(header, ID) in (True, False)


@pytest.mark.parametrize("value", ["", "nice=10", "nice=10; load=x; cores=2", "x" * 9])
def test_other_values_of_a_busy_host_say_nothing(value: str) -> None:
    """A peer may send any value there, and the receiver ignores it."""
    assert not parse_busy(value)
