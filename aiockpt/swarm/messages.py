"""The messages of a swarm: announcements, and which chunks a member has.

Everything here is pure. Parsers of what a peer sent raise `RemoteProtocolError`.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from aiockpt.errors import RemoteProtocolError
from aiockpt.http.protocol import parse_invitation
from aiockpt.runtime.secrets import Token, discreet

MAX_URL_CHARACTERS = 512
"""Characters of a member's URL."""

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
_Url = Annotated[str, msgspec.Meta(max_length=MAX_URL_CHARACTERS)]
_Address = Annotated[str, msgspec.Meta(max_length=64)]
_Mark = Annotated[str, msgspec.Meta(max_length=32)]


class Announcement(msgspec.Struct, omit_defaults=True):
    """A member sends this to the source at least once per lease.

    Attributes:
        url: Where it serves: an ``http`` or ``https`` URL of at most 512 characters,
            without user information and query. Its path is ``/checkpoint/``. Required.
        zone: A name for its part of the network, of at most 64 characters.
        have: How many chunks it has.
        bad: The ids of at most 16 members that sent it wrong bytes since its last
            announcement.
        known: The ids of at most 64 members that it needs to hear no more of: it asks
            them for chunks, or they failed.
        local: The IP address from which it connects to the source, as it sees it
            itself, if known.
        host: A mark of at most 32 characters that only processes of its host can make.
            Members at loopback addresses are named to those with the same mark.
    """

    url: _Url
    zone: Annotated[str, msgspec.Meta(max_length=64)] = ""
    have: Annotated[int, msgspec.Meta(ge=0)] = 0
    bad: Annotated[tuple[_Id, ...], msgspec.Meta(max_length=16)] = ()
    known: Annotated[tuple[_Id, ...], msgspec.Meta(max_length=64)] = ()
    local: _Address = ""
    host: _Mark = ""

    def __post_init__(self) -> None:
        """Refuse a name as the address: an event advises to list that host."""
        if self.local:
            ipaddress.ip_address(self.local)


ANNOUNCEMENT: Final = msgspec.json.Decoder(Announcement)
"""Decodes an announcement."""


class MemberInfo(msgspec.Struct, omit_defaults=True):
    """A member as the source names it to another one; see `Announcement`."""

    id: _Id
    url: _Url
    zone: Annotated[str, msgspec.Meta(max_length=64)] = ""
    have: Annotated[int, msgspec.Meta(ge=0)] = 0


class AnnounceResponse(msgspec.Struct, omit_defaults=True):
    """The source's answer to an `Announcement`.

    Attributes:
        id: What others call this one in ``bad``: 1 to 16 characters, which are nobody's
            after a restart of the source. Required.
        lease: Seconds after which the source forgets the member, unless it announces
            itself again. Required.
        members: At most 64 of the others, each with ``id``, ``url``, ``zone`` and
            ``have``.
        next: The chunk that the member should request from the source next.
        seen: If no other member is told of this one: the address from which its
            announcement came.
        tokens: The tokens that members accept of each other, one or two; they send the
            first one. Without it, that of the invitation.
    """

    id: _Id
    lease: Annotated[float, msgspec.Meta(gt=0)]
    members: Annotated[tuple[MemberInfo, ...], msgspec.Meta(max_length=64)] = ()
    next: Annotated[int, msgspec.Meta(ge=0)] | None = None
    seen: _Address | None = None
    tokens: Annotated[tuple[Token, ...], msgspec.Meta(max_length=2)] = ()


def format_announce_response(answer: AnnounceResponse) -> bytes:
    """Return the JSON of an answer to an announcement."""
    return msgspec.json.encode(answer, enc_hook=lambda token: token[:])


def parse_announce_response(data: bytes | memoryview) -> AnnounceResponse:
    """Return the answer to an announcement.

    Raises:
        RemoteProtocolError: it is malformed.
    """
    try:
        return _RESPONSE.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"sent a malformed answer: {error}") from None


@discreet
def _token_of(_: type, value: object) -> Token:
    if not isinstance(value, str) or (token := parse_invitation(value)) is None:
        raise ValueError("a token of the swarm has another form")
    return token


# msgspec inspects a type when it is first used, which two threads must not do at once.
_RESPONSE: Final = msgspec.json.Decoder(AnnounceResponse, dec_hook=_token_of)


def why_hidden(said: Announcement, seen: str) -> str:
    """Return why others are not told of a member, and what helps."""
    if said.local in ("", seen):
        return (
            f"others cannot use the address {seen!r}; list one that they can use at "
            "the sender, Auth(peers=[...]), and pass it as advertise="
        )
    return (
        f"it connects from {said.local!r}, and its announcement came from {seen!r}, so "
        "a proxy or a NAT is between them; list the hosts of the receivers at the "
        f"sender, as in Auth(peers=[{said.local!r}])"
    )


_NO_CHUNK = 0xFFFF_FFFF
_NOTHING_NEW = struct.pack("<I", _NO_CHUNK)


def format_have(have: int, count: int) -> bytes:
    """Return the bitmap of ``count`` chunks: bit i of the little-endian number."""
    return have.to_bytes((count + 7) // 8, "little")


def parse_have(data: bytes, count: int) -> int:
    """Return the bitmap of ``count`` chunks.

    Raises:
        RemoteProtocolError: it has bits of further chunks.
    """
    have = int.from_bytes(data, "little")
    if have >> count:
        raise RemoteProtocolError(f"the bitmap has bits beyond those of {count} chunks")
    return have


def format_chunks(chunks: Sequence[int]) -> bytes:
    """Return chunks that a member has got; without any, that it is still there."""
    return struct.pack(f"<{len(chunks)}I", *chunks) if chunks else _NOTHING_NEW


def parse_chunks(data: bytes, count: int) -> int:
    """Return the bitmap of the chunks in a whole number of 4-byte integers.

    Raises:
        RemoteProtocolError: there are only ``count`` chunks, or one is named twice.
    """
    have = 0
    for (chunk,) in struct.iter_unpack("<I", data):
        if chunk == _NO_CHUNK:
            continue
        if chunk >= count or have >> chunk & 1:
            why = "is named twice" if chunk < count else "does not exist"
            raise RemoteProtocolError(f"chunk {chunk} of {count} {why}")
        have |= 1 << chunk
    return have
