"""One string names several senders of shards; it is parsed without a server."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiockpt
from aiockpt.errors import LocalProtocolError
from aiockpt.http.peers import Peers, name_of, senders_of
from aiockpt.http.protocol import (
    MAX_JOINED,
    MAX_METADATA,
    MAX_SENDERS,
    Origin,
    parse_joined,
    parse_metadata,
)

pytestmark = pytest.mark.torch_free

A, B, C = (f"http://{name}:1/checkpoint/" for name in "abc")
SECRET = "s3cret-0f-a-sender"

OLDER_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""What a receiver that knows no joined metadata takes as a fragment."""

TOKENS = st.none() | st.from_regex(OLDER_TOKEN, fullmatch=True)
URLS = st.builds(
    "{}://{}:{}/{}".format,
    st.sampled_from(["http", "https"]),
    st.sampled_from(["h", "10.0.0.7", "[::1]", "[fe80::1%25eth0]"]),
    st.integers(1, 65535),
    st.sampled_from(["", "checkpoint/", "a/7/"]),
)
SENDERS = st.dictionaries(URLS, TOKENS, min_size=1, max_size=6)


def text_of(url: str, token: str | None) -> str:
    """Return what ``metadata()`` of a sender returns."""
    return url if token is None else f"{url}#{token}"


@pytest.mark.parametrize(
    ("texts", "joined"),
    [
        ([f"{A}#t1", f"{B}#t2"], f"{A}#t1|{B}#t2"), ([A, B], f"{A}#|{B}"),
        ([A, f"{B}#t2", C], f"{A}#|{B}#t2|{C}"), ([f"{A}#t1", B], f"{A}#t1|{B}"),
        ([f"{A[:-1]}#t1", B[:-1]], f"{A}#t1|{B}"), ([f"{A}#t1"], f"{A}#t1"), ([A], A),
    ],
)  # fmt: skip
def test_senders_are_joined_in_order(texts: list[str], joined: str) -> None:
    """Further senders follow the first ``#``; a string of one is the plain one."""
    assert aiockpt.join_metadata(texts) == joined
    assert parse_joined(joined) == tuple(map(parse_metadata, texts))


@given(SENDERS)
def test_joined_metadata_round_trips(senders: dict[str, str | None]) -> None:
    """Every sender and token that plain metadata can carry comes back, in order."""
    texts = [text_of(*sender) for sender in senders.items()]
    expected = tuple(Origin(url, token) for url, token in senders.items())
    assert parse_joined(aiockpt.join_metadata(texts)) == expected


@given(SENDERS.filter(lambda senders: len(senders) > 1))
def test_an_older_receiver_refuses_the_string(senders: dict[str, str | None]) -> None:
    """It takes all after the first ``#`` as a token, which has forbidden characters."""
    joined = aiockpt.join_metadata([text_of(*sender) for sender in senders.items()])
    fragment = joined.partition("#")[2]
    assert fragment
    assert OLDER_TOKEN.fullmatch(fragment) is None


def test_the_parser_of_one_sender_says_what_takes_joined_metadata() -> None:
    """The error names the number of senders and the verbs."""
    with pytest.raises(LocalProtocolError, match=r"3 senders.*recv_checkpoint, prep"):
        parse_metadata(f"{A}#t1|{B}|{C}")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"{A}#{SECRET}|", "sender 2 of 2: its scheme is ''"),
        (f"{A}#|{SECRET}", "sender 2 of 2: its scheme is ''"),
        (f"{A}#{SECRET}|ftp://b/", "sender 2 of 2: its scheme is 'ftp'"),
        (f"{A}#{SECRET}|{B}#a|{C}#{SECRET}?", "sender 3 of 3: its token contains"),
        (f"{A}#{SECRET}|{B}#{SECRET}#x", "sender 2 of 2: its token contains"),
        (f"{A}#{SECRET}?|{B}", "sender 1 of 2: its token contains"),
        (f"{A}#{SECRET}|http://u:{SECRET}@b/", "sender 2 of 2: .* user information"),
        (f"{A}#{SECRET}|{B}?a={SECRET}", "sender 2 of 2: it contains a query"),
        (f"{A}#{SECRET}| {B}", "sender 2 of 2: it contains blanks"),
        (f"{A}|b/#{SECRET}|{B}", r"sender 1 of 2: its address contains \|"),
        (f"{A}#{SECRET}|{B}|{A}#other", f"of its 3 senders are {A};"),
        (f"{A}#{SECRET}|{A[:-1]}", f"of its 2 senders are {A};"),
        (f"{A}#{SECRET}|{B}{'a' * MAX_METADATA}", "sender 2 of 2: 41.. characters"),
    ],
)
def test_other_joined_metadata_is_refused(text: str, fault: str) -> None:
    """The message names the sender's number and the fault, and repeats no token."""
    with pytest.raises(LocalProtocolError, match=fault) as caught:
        parse_joined(text)
    assert SECRET not in str(caught.value)
    assert "join_metadata()" in str(caught.value)


@pytest.mark.parametrize("text", [A, f"{A}#", f"{A}#t1", "http://a/x|y/"])
def test_plain_metadata_is_that_of_one_sender(text: str) -> None:
    """No second function is needed for it."""
    assert parse_joined(text) == (parse_metadata(text),)


D = "http://d:1/checkpoint/"


@pytest.mark.parametrize(
    ("metadata", "shards"),
    [
        (A, [[A]]), ([A, B], [[A, B]]), ([A, B, A], [[A, B]]),
        ([A, B, A.replace(":1", ":01")], [[A, B]]), (f"{A}#|{B}", [[A], [B]]),
        ([f"{A}#|{B}"], [[A], [B]]), ([f"{A}#|{B}", f"{C}#|{D}"], [[A, C], [B, D]]),
        ([f"{A}#|{B}", f"{A}#|{D}"], [[A], [B, D]]),
    ],
)  # fmt: skip
def test_a_list_names_replicas_and_a_joined_string_shards(
    metadata: str | list[str], shards: list[list[str]]
) -> None:
    """Each shard has the senders that hold it, each address once."""
    found = [[each.base_url for each in rank] for rank in senders_of(metadata)]
    assert found == shards


@pytest.mark.parametrize(
    ("metadata", "kind", "fault"),
    [
        ([], ValueError, "empty list"),
        (7, TypeError, "type int"),
        ([A, 7], TypeError, "type int"),
        ([f"{A}#|{B}", C], LocalProtocolError, "strings 1 and 2 .* 2 and 1 senders"),
        ([A, B, f"{C}#|{D}"], LocalProtocolError, "strings 1 and 3 .* 1 and 2 send"),
        ([f"{A}#|{B}", f"{B}#|{A}"], LocalProtocolError, f"{B} is sender 1 of one"),
        ([A, "ftp://b/"], LocalProtocolError, "bad metadata"),
    ],
)
def test_strings_that_name_no_replicas_are_refused(
    metadata: Any, kind: type[Exception], fault: str
) -> None:
    """Each string of a list names the same shards, in the same order."""
    with pytest.raises(kind, match=fault):
        senders_of(metadata)


def test_a_message_names_the_first_senders_only() -> None:
    """A line of the log would have 4,096 addresses otherwise."""
    client: Any = None
    senders = [Peers.at(client, [Origin(f"http://h{at}/", SECRET)]) for at in range(9)]
    assert name_of(senders[:2]) == "http://h0/ http://h1/"
    assert name_of(senders[:8]).endswith(" http://h7/")
    assert name_of(senders).endswith(" http://h7/ and 1 more")


def many(count: int, path: str = "") -> list[str]:
    """Return the metadata of so many senders."""
    return [f"http://h:1/{number}/{path}#t" for number in range(count)]


def test_joined_metadata_has_bounds() -> None:
    """There is a most of senders and of characters; both are errors at both ends."""
    joined = aiockpt.join_metadata(many(MAX_SENDERS))
    assert len(parse_joined(joined)) == MAX_SENDERS
    more = f"{joined}|{A}"
    with pytest.raises(LocalProtocolError, match=r"4097 senders in .* more than 4096"):
        parse_joined(more)
    with pytest.raises(LocalProtocolError, match="4097 senders"):
        aiockpt.join_metadata([*many(MAX_SENDERS), A])
    long = many(MAX_JOINED // 4000 + 1, "a" * 4000)
    with pytest.raises(LocalProtocolError, match=r"263 senders in .* 1048576"):
        aiockpt.join_metadata(long)
    with pytest.raises(LocalProtocolError, match=r"263 senders in .* 1048576"):
        parse_joined(f"{long[0]}|{'|'.join(long[1:])}")


def test_the_bounds_leave_room_for_long_tokens() -> None:
    """An IPv6 address with a grant takes less than a sender's part of the limit."""
    token = aiockpt.make_token("x", "rank-4095.node-1023", expires=1e11, step=1 << 62)
    address = "http://[2001:0db8:85a3:0000:0000:8a2e:0370:7334]:65535/checkpoint/"
    assert len(f"|{address}#{token}") < MAX_JOINED // MAX_SENDERS


def test_joined_strings_are_not_joined_again() -> None:
    """The caller collects plain strings, so that the order of the ranks is known."""
    joined = f"{A}#{SECRET}|{B}"
    with pytest.raises(LocalProtocolError, match="string 2 of 2 joins 2") as caught:
        aiockpt.join_metadata([C, joined])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ("http://a/", TypeError),
        (b"http://a/", TypeError),
        ([], ValueError),
        ([1], TypeError),
        ({A, B}, TypeError),
        ({A: 1, B: 2}, TypeError),
        (iter([A, B]), TypeError),
        (["http://h:1/", "http://H:1/"], LocalProtocolError),
        (["http://h/#a", "http://h:80#b"], LocalProtocolError),
        (["https://h/", "https://h:443/"], LocalProtocolError),
        (["http://h:1/", "http://h:01/"], LocalProtocolError),
    ],
)
def test_other_arguments_are_refused(metadata: object, kind: type[Exception]) -> None:
    """One string is not a list, a set has no order, an address has many spellings."""
    with pytest.raises(kind):
        aiockpt.join_metadata(metadata)  # type: ignore[arg-type]
