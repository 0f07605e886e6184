"""What the two ends say over HTTP: routes, headers, conditions, ranges, the metadata.

Everything here is pure. Parsers of what a peer sent raise `RemoteProtocolError`;
parsers of what the caller passed raise `LocalProtocolError`. Inside the package a range
is half-open, ``[start, stop)``. The inclusive form of RFC 9110 section 14 exists only
in the parsers and formatters below.
"""

from __future__ import annotations

import enum
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from aiockpt.errors import LocalProtocolError, RemoteProtocolError
from aiockpt.format.chunks import ALGORITHMS, digits_of
from aiockpt.runtime.secrets import Token, discreet

if TYPE_CHECKING:  # it loads aiohttp, which a command's help does not need
    from aiockpt.http.security import Scope

DIGEST_HEADER = "Aiockpt-Digest"
STEP_HEADER = "Aiockpt-Step"
LEASE_HEADER = "Aiockpt-Lease"
"""In a request: the receive that asks, so that its snapshot stays until it ends. In the
answer with the manifest: the seconds of silence after which the lease ends."""
INCARNATION_HEADER = "Aiockpt-Incarnation"
"""In an answer: which start of the sender gives it. In a request for `LATEST`: the
start that the follower knows; another one answers at once."""
SWARM_HEADER = "Aiockpt-Swarm"
"""In a request: `JOINS`, if the receiver can join a swarm. In the answer: the token for
the members of the swarm, if others receive the same snapshot."""
BUSY_HEADER = "Aiockpt-Busy"
"""In the answer with the manifest: why the sender may be slow; see `format_busy`."""
JOINS = "join"
PROBE_HEADER = "Aiockpt-Same-Host"
"""In a request for the manifest: the proof that a receiver is on this host."""
OFFER_HEADER = "Aiockpt-Lends"
"""In the answer: where to ask for the memory, and what to show there."""
NEXT_CHUNK_HEADER = "Aiockpt-Next-Chunk"
"""In an answer to a member: the chunk that it should request next."""
DELTA = "aiockpt-delta"
"""The name of our deltas as an instance manipulation (RFC 3229)."""
DELTA_BASE_HEADER = "Delta-Base"
"""The base of a delta. With a manifest: the base that the sender keeps."""
LATEST = "latest"
AFTER = "after"

MEMBER_PATH = "/checkpoint/"
"""The path of every member of a swarm: a member must not choose what others ask for."""

MAX_METADATA = 4096
"""Most characters: servers take lines of 8 KiB, torchft's Manager messages of 4 MiB."""
MAX_SENDERS = 4096
"""Most senders that joined metadata names."""
MAX_JOINED = MAX_SENDERS * 256
"""Most characters of joined metadata. A sender's own metadata has about 80."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_PORTS = {"http": 80, "https": 443}
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750 section 2.1, b64token
_BETWEEN_SENDERS = "|"  # of joined metadata: no token has it, so older peers refuse it
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")
_WAIT = re.compile(
    r'wait\s*=\s*"?([0-9]{1,9}(?:\.[0-9]{1,9})?)"?\s*(?:;.*)?', re.IGNORECASE
)
_BUSY = re.compile(r"nice=([0-9]{1,2}); load=([0-9]{1,6}\.[0-9]); cores=([0-9]{1,4})")
_MAX_LOAD = 1e5
_SILENCE = re.compile(r"silence=([0-9]{1,9}(?:\.[0-9]{1,9})?)")
_ETAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_ETAGS = re.compile(rf"[ \t,]*(?:{_ETAG.pattern}[ \t]*(?:,[ \t,]*|$))*")
_LEASE = re.compile(r"([0-9a-f]{32})[ \t]*;[ \t]*ttl=([0-9]{1,9}(?:\.[0-9]{1,3})?)")
_SWARM_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
_INCARNATION = re.compile(r"[0-9a-f]{1,64}")
_MAX_LEASE_S = 86_400.0  # a receive without a deadline asks again
# 19 digits hold every int64; longer ones only cost time.
_RANGE = re.compile(r"([0-9]{0,19})-([0-9]{0,19})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_URL_OF_STEP = re.compile(r"(.*/)(0|[1-9][0-9]{0,18})(?:/(?:full|metadata))?/")
_URL_OF_LATEST = re.compile(r"(.*/)latest(?:/(?:full|metadata))?/")
_BARE_URL = re.compile(r"[a-z]+://[^/]+")
_DIGEST = re.compile(
    "|".join(f"({name})=([0-9a-f]{{{digits_of(name)}}})" for name in ALGORITHMS)
)


class ResourceKind(enum.Enum):
    """What lies under ``{step}/``."""

    METADATA = "metadata"
    FULL = "full"
    FINGERPRINT = "fingerprint"
    HAVE = "have"
    MEMBERS = "members"
    CHUNK = "chunk"


_NAMED = frozenset(kind.value for kind in ResourceKind) - {ResourceKind.CHUNK.value}


@dataclass(frozen=True, slots=True)
class Resource:
    """One thing that a server offers for a step; ``chunk`` is set for chunks only."""

    kind: ResourceKind
    step: int
    chunk: int | None = None


def parse_resource(step_text: str, what_text: str) -> Resource:
    """Return the resource of ``{step}/{what}``.

    Raises:
        RemoteProtocolError: no canonical decimal number, or an unknown resource.
    """
    step = _number(step_text)
    if what_text in _NAMED:
        return Resource(ResourceKind(what_text), step)
    return Resource(ResourceKind.CHUNK, step, _number(what_text))


def _number(text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise RemoteProtocolError(
            f"no such resource: {text[:40]!r} is neither a number nor a known name"
        )
    return int(text)


def format_resource(resource: Resource) -> str:
    """Return the URL path below the prefix, such as ``"100/full"``."""
    what = resource.kind.value if resource.chunk is None else resource.chunk
    return f"{resource.step}/{what}"


def format_latest(after: int | None) -> str:
    """Return the URL path of what is being served, if newer than step ``after``."""
    return LATEST if after is None else f"{LATEST}?{AFTER}={after}"


def parse_after(values: Sequence[str]) -> int | None:
    """Return the step that ``after`` names; None if the query has none.

    Raises:
        RemoteProtocolError: no canonical decimal number, or given twice.
    """
    if not values:
        return None
    if len(values) > 1 or _NUMBER.fullmatch(values[0]) is None:
        given = "&".join(values)[:40]
        raise RemoteProtocolError(f"{AFTER} takes one step, not {given!r}")
    return int(values[0])


@dataclass(frozen=True, slots=True)
class Lease:
    """A receive's claim on a snapshot, which the sender keeps for it.

    Attributes:
        id: 32 random hex digits, drawn for each receive; the first 16 are those of
            the receiver, and are the same in all of its receives.
        until: When the receive ends at the latest, in loop time of this process.
        joins: Whether the receiver can join a swarm.
    """

    id: str
    until: float
    joins: bool = False

    @classmethod
    def begin(cls, until: float, *, receiver: str = "", joins: bool = False) -> Lease:
        """Return the lease of a new receive; without a receiver, that of a new one."""
        receiver = receiver or secrets.token_hex(8)
        return cls(receiver + secrets.token_hex(8), until, joins)

    @property
    def receiver(self) -> str:
        """The id of the receiver: the first half of the receive's id."""
        return self.id[:16]

    def header(self, now: float) -> str:
        """Return the value of `LEASE_HEADER`: the id, and the seconds that are left.

        The seconds are relative, so the two clocks need not agree.
        """
        left = min(max(self.until - now, 0.001), _MAX_LEASE_S)
        return f"{self.id}; ttl={left:.3f}"

    @property
    def end(self) -> str:
        """The value of `LEASE_HEADER` that ends the lease."""
        return f"{self.id}; ttl=0"


def format_silence(seconds: float) -> str:
    """Return the value of `LEASE_HEADER` in an answer."""
    return f"silence={seconds:.3f}"


def parse_silence(value: str | None) -> float | None:
    """Return the seconds in such a value; None from older peers, which send none."""
    found = _SILENCE.fullmatch(value or "")
    return None if found is None else float(found[1])


def format_busy(niceness: int, load: float, cores: int) -> str:
    """Return the value of `BUSY_HEADER`."""
    return f"nice={niceness}; load={min(load, _MAX_LOAD):.1f}; cores={cores}"


def parse_busy(value: str | None) -> str:
    """Return such a value as a sentence; empty if it has none."""
    found = _BUSY.fullmatch(value or "")
    if found is None:
        return ""
    niceness, load, cores = found.groups()
    return (
        f"its host is busy (a load of {load} on {cores} cores), and it serves with "
        f"niceness {niceness}; with Server(process=True, nice=0) it waits for nobody"
    )


def parse_lease(
    value: str | None, *, now: float, swarm: str | None = None
) -> Lease | None:
    """Return the lease that a request holds; None if it names none.

    ``swarm`` is the value of `SWARM_HEADER`.

    A lease that the request ends has ``until == now``.

    Raises:
        RemoteProtocolError: the value is malformed.
    """
    if value is None:
        return None
    match = _LEASE.fullmatch(value.strip())
    if match is None:
        raise RemoteProtocolError(
            f"{LEASE_HEADER} must be 32 hex digits and '; ttl=SECONDS', not "
            f"{value[:60]!r}"
        )
    until = now + min(float(match[2]), _MAX_LEASE_S)
    return Lease(match[1], until, joins=swarm == JOINS)


def check_incarnation(value: str | None) -> str | None:
    """Return an incarnation id; None if it is absent or odd. Older peers have none."""
    return value if value and _INCARNATION.fullmatch(value) else None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to fetch, and for which receive.

    Attributes:
        base_url: Where the paths of the wire format begin.
        token: Not shown by the repr.
        lease: Goes with every request for a checkpoint.
        step_wait: Seconds for which a step that is not served is waited for.
        within: The scope of the source that named this member of its swarm. None: the
            caller named it.
    """

    base_url: str
    token: str | None = field(default=None, repr=False)
    lease: Lease | None = None
    step_wait: float = math.inf
    within: Scope | None = None

    @property
    def place(self) -> tuple[str, str, int | None, str]:
        """What the base URL names, the same for each of its spellings."""
        parts = urlsplit(self.base_url)
        port = parts.port or _PORTS.get(parts.scheme)
        return parts.scheme, parts.hostname or "", port, parts.path


@discreet
def parse_metadata(text: str) -> Origin:
    """Return the sender that a transport's ``metadata()`` names.

    Raises:
        TypeError: not a string.
        LocalProtocolError: not an http(s) URL of the form that ``metadata()`` has, or
            the joined metadata of several senders.
    """
    if not isinstance(text, str):
        raise TypeError(
            "metadata= must be the string that the sender's metadata() returned, or a "
            f"list of such strings; it is of type {type(text).__name__}"
        )
    if (senders := _senders_in(text)) > 1:
        raise LocalProtocolError(
            f"this is the joined metadata of {senders} senders, and only one sender "
            "fits here: pass what that sender's metadata() returned; recv_checkpoint, "
            "prepare, follow and steps of an HTTPTransport take joined metadata, and "
            "the commands fetch, follow, verify and top"
        )
    if fault := _metadata_fault(text):
        raise _bad_metadata(fault)
    return _origin_of(text)


@discreet
def parse_joined(text: str) -> tuple[Origin, ...]:
    """Return the senders that `join_metadata` joined, in the same order.

    The metadata of one sender gives that sender alone.

    Raises:
        TypeError: not a string.
        LocalProtocolError: the part of a sender is not metadata, two have the same
            address, or the text exceeds `MAX_SENDERS` or `MAX_JOINED`.
    """
    if (senders := _senders_in(text)) == 1:
        return (parse_metadata(text),)
    if senders > MAX_SENDERS or len(text) > MAX_JOINED:
        raise _bad_joined(
            f"{senders} senders in {len(text)} characters are more than {MAX_SENDERS} "
            f"in {MAX_JOINED}"
        )
    location, _, rest = text.partition("#")
    token, *others = rest.split(_BETWEEN_SENDERS)
    origins: dict[tuple[object, ...], Origin] = {}
    for number, part in enumerate((f"{location}#{token}", *others), start=1):
        if fault := _metadata_fault(part) or _separator_fault(part):
            raise _bad_joined(f"sender {number} of {senders}: {fault}")
        origin = _origin_of(part)
        if (place := origin.place) in origins:
            raise _bad_joined(f"two of its {senders} senders are {origin.base_url}")
        origins[place] = origin
    return tuple(origins.values())


@discreet
def join_metadata(metadata: Sequence[str]) -> str:
    """Return one string that names all senders of a checkpoint's shards.

    Each rank of a trainer publishes the shards that it holds. A receiver that gets this
    string fetches what it needs from all of them. The string contains all tokens.

    Args:
        metadata: What ``metadata()`` or ``grant()`` returned on each rank, in the order
            of the ranks. The metadata of one sender is returned as it is.

    Raises:
        TypeError: not a list of strings, but perhaps a set, which has no order.
        ValueError: the list is empty.
        LocalProtocolError: a string is not metadata, or joined metadata already; two
            strings name the same address; there are more than 4,096 senders; the
            result is longer than 1 MiB.
    """
    given: object = metadata  # callers without types pass anything
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise TypeError("join_metadata takes a list of strings, one of each sender")
    texts = [*metadata]
    if not texts:
        raise ValueError("metadata is an empty list: name a sender at least")
    for number, text in enumerate(texts, start=1):
        if (senders := _senders_in(text)) > 1:
            raise LocalProtocolError(
                f"string {number} of {len(texts)} joins {senders} senders already: "
                "collect what metadata() returned on each rank, and join that once"
            )
    first, *others = map(parse_metadata, texts)
    if not others:
        return _text_of(first)
    start = f"{first.base_url}#{first.token or ''}"
    joined = _BETWEEN_SENDERS.join([start, *map(_text_of, others)])
    parse_joined(joined)
    return joined


def _senders_in(metadata: object) -> int:
    """Return how many senders a metadata string names; 1 unless it is joined."""
    if not isinstance(metadata, str):
        return 1
    return 1 + metadata.partition("#")[2].count(_BETWEEN_SENDERS)


def _metadata_fault(text: str) -> str | None:
    """Return why a text is not the metadata of one sender; None if it is."""
    if fault := url_fault(text):
        return fault
    path = urlsplit(text).path
    if (length := len(text) + (not path.endswith("/"))) > MAX_METADATA:
        return f"{length} characters are more than {MAX_METADATA}"
    return None


def _separator_fault(text: str) -> str | None:
    return (
        f"its address contains {_BETWEEN_SENDERS}" if _BETWEEN_SENDERS in text else None
    )


def _origin_of(text: str) -> Origin:
    """Return the sender that a text without a fault names."""
    parts = urlsplit(text)
    path = parts.path if parts.path.endswith("/") else f"{parts.path}/"
    token = Token(parts.fragment) if parts.fragment else None
    return Origin(f"{parts.scheme}://{parts.netloc}{path}", token)


def _text_of(origin: Origin) -> str:
    """Return the metadata of one sender."""
    return (
        origin.base_url if origin.token is None else f"{origin.base_url}#{origin.token}"
    )


def url_fault(text: str) -> str | None:
    """Return why a URL names no peer; None if it names one."""
    if _UNPRINTABLE.search(text):
        return "it contains blanks, control characters, or others than ASCII"
    try:
        return _fault_of(urlsplit(text))
    except ValueError as error:
        return str(error)


def member_fault(url: str) -> str | None:
    """Return why a URL is not that of a member of a swarm; None if it is one."""
    if fault := url_fault(url):
        return fault
    parts = urlsplit(url)
    if url != f"{parts.scheme}://{parts.netloc}{MEMBER_PATH}":
        return f"what follows its host and port is not {MEMBER_PATH}"
    return "it names an interface" if "%" in parts.netloc else None


def _fault_of(parts: SplitResult) -> str | None:
    if parts.scheme not in ("http", "https"):
        return f"its scheme is {parts.scheme[:20]!r}, neither http nor https"
    if not parts.hostname or parts.port == 0:
        return "it names no host and port"
    if "@" in parts.netloc:
        return "it contains user information"
    if parts.query:
        return "it contains a query"
    if parts.fragment and _TOKEN.fullmatch(parts.fragment) is None:
        return "its token contains forbidden characters"
    return None


def _bad_metadata(why: str) -> LocalProtocolError:
    # The text itself may hold the token, so the message does not show it.
    return LocalProtocolError(
        f"bad metadata: {why}; pass the string that the sender's metadata() returned, "
        "such as http://host:port/checkpoint/"
    )


def _bad_joined(why: str) -> LocalProtocolError:
    return LocalProtocolError(
        f"bad joined metadata: {why}; pass what aiockpt.join_metadata() returned"
    )


@discreet
def format_metadata(base_url: str, token: str | None) -> str:
    """Return the metadata string; `parse_metadata` is its inverse."""
    return _text_of(
        parse_metadata(base_url if token is None else f"{base_url}#{token}")
    )


@dataclass(frozen=True, slots=True)
class Address:
    """A peer, and the step that the URL names, if any."""

    origin: Origin
    step: int | None


@discreet
def parse_address(text: str) -> Address:
    """Parse what names a checkpoint: metadata, ``.../100`` or ``.../100/full``.

    Metadata always ends with a slash before its token, so a prefix that ends in
    a number is not taken for a step.

    Raises:
        LocalProtocolError: it is no such URL.
    """
    location, mark, token = text.partition("#")
    if _BARE_URL.fullmatch(location):
        location += "/checkpoint/"  # just host and port: the prefix by default
    origin = parse_metadata(f"{location}{mark}{token}")
    if location.endswith("/"):
        return Address(origin, None)
    if found := _URL_OF_STEP.fullmatch(origin.base_url):
        return Address(Origin(found[1], origin.token), int(found[2]))
    if found := _URL_OF_LATEST.fullmatch(origin.base_url):
        return Address(Origin(found[1], origin.token), None)
    return Address(origin, None)


@discreet
def parse_addresses(text: str) -> list[Address]:
    """Parse the joined metadata of several peers, or what `parse_address` takes.

    Raises:
        LocalProtocolError: it is neither.
    """
    if _senders_in(text) == 1:
        return [parse_address(text)]
    return [Address(origin, None) for origin in parse_joined(text)]


def parse_prefer_wait(value: str | None) -> float | None:
    """Return the seconds of ``Prefer: wait=N`` (RFC 7240 section 4.3), or None."""
    for preference in (value or "").split(","):
        if match := _WAIT.fullmatch(preference.strip()):
            return float(match[1])
    return None


def format_prefer_wait(seconds: float) -> str:
    """Return a ``Prefer`` value; whole seconds, or milliseconds where it matters."""
    wait = min(max(seconds, 0.0), 999_999_999.0)
    return f"wait={wait:.0f}" if wait >= 10 else f"wait={wait:.3f}"


def parse_invitation(value: str | None) -> Token | None:
    """Return the token in an answer's `SWARM_HEADER`; None if absent or odd."""
    return Token(value) if value and _SWARM_TOKEN.fullmatch(value) else None


def parse_next_chunk(value: str | None) -> int | None:
    """Return the chunk in `NEXT_CHUNK_HEADER`; None if absent or odd: it only helps."""
    return int(value) if value and _NUMBER.fullmatch(value) else None


def format_digest(algorithm: str, digest: str) -> str:
    """Return the value of `DIGEST_HEADER`."""
    return f"{algorithm}={digest}"


def parse_digest(value: str | None) -> tuple[str, str] | None:
    """Return the algorithm and the hex digest in `DIGEST_HEADER`.

    None if the header is absent or of another kind.
    """
    match = _DIGEST.fullmatch(value or "")
    if match is None:
        return None
    algorithm, digest = filter(None, match.groups())
    return algorithm, digest


def format_etag(snapshot_id: str) -> str:
    """Return the strong ``ETag`` of a snapshot."""
    return f'"{snapshot_id}"'


def parse_etag(value: str | None) -> str | None:
    """Return the snapshot id in a strong ``ETag``; None if absent, weak or odd."""
    match = _ETAG.fullmatch(value or "")
    return None if match is None or match[1] else match[2]


def if_match(header: str | None, snapshot_id: str) -> bool:
    """Whether ``If-Match`` lets the request proceed; if not, answer 412.

    Strong comparison (RFC 9110 section 13.1.1). A malformed list matches nothing.
    """
    if header is None or header.strip() == "*":
        return True
    return ("", snapshot_id) in _entity_tags(header)


def if_none_match(header: str | None, snapshot_id: str) -> bool:
    """Whether ``If-None-Match`` lets the request proceed; if not, answer 304.

    Weak comparison (RFC 9110 section 13.1.2). A malformed list matches nothing.
    """
    if header is None:
        return True
    if header.strip() == "*":
        return False
    return all(tag != snapshot_id for _, tag in _entity_tags(header))


def if_range(header: str | None, snapshot_id: str) -> bool:
    """Whether ``Range`` counts; if not, ignore it and send everything.

    Strong comparison (RFC 9110 section 13.1.5); a date never matches.
    """
    return header is None or header.strip() == format_etag(snapshot_id)


def format_delta(base: str) -> dict[str, str]:
    """Return the headers that ask for a delta from the snapshot ``base``."""
    return {"A-IM": DELTA, "If-None-Match": format_etag(base)}


def asks_for_delta(headers: Mapping[str, str], base: str) -> bool:
    """Say whether a request accepts a delta from the snapshot ``base``.

    ``A-IM`` has the names of the deltas that the receiver knows, and ``If-None-Match``
    has the snapshots that it may hold.
    """
    names = headers.get("A-IM", "").lower().split(",")
    known = DELTA in (name.partition(";")[0].strip() for name in names)
    return known and ("", base) in _entity_tags(headers.get("If-None-Match", ""))


def _entity_tags(header: str) -> list[tuple[str, str]]:
    return _ETAG.findall(header) if _ETAGS.fullmatch(header) else []


class RangeNotSatisfiable(LocalProtocolError):  # noqa: N818 (HTTP's own name for 416)
    """A well-formed ``Range`` asks for nothing that exists (HTTP 416)."""

    def __init__(self, value: str, size: int) -> None:
        super().__init__(f"range {value!r} lies outside the {size} bytes that exist")
        self.value = value
        self.size = size


def parse_range(value: str | None, size: int) -> tuple[int, int] | None:
    """Return the bytes that a ``Range`` header asks for, clamped to ``size``.

    None means *ignore it and send everything* (RFC 9110 section 14.2): absent,
    malformed, another unit, or several ranges.

    Raises:
        RangeNotSatisfiable: the range is well formed and holds no byte.
    """
    unit, _, specs = (value or "").partition("=")
    # RFC 9110 5.6.1: a list may hold blanks and empty elements.
    given = [spec for each in specs.split(",") if (spec := each.strip(" \t"))]
    is_one = unit.lower() == "bytes" and len(given) == 1
    match = _RANGE.fullmatch(given[0]) if is_one else None
    if value is None or match is None or match[0] == "-":
        return None
    first, last = match.groups()
    if first:
        start, stop = int(first), int(last) + 1 if last else size
        if last and stop <= start:
            return None
    else:  # the last bytes
        start, stop = max(size - int(last), 0), size
        if not size and int(last):
            return None  # they are satisfiable, and have no Content-Range
    if start >= size:
        raise RangeNotSatisfiable(value, size)
    return start, min(stop, size)


def format_range(start: int, stop: int) -> str:
    """Return the ``Range`` value of a non-empty ``[start, stop)``."""
    _require_bytes(start, stop)
    return f"bytes={start}-{stop - 1}"


def format_content_range(start: int, stop: int, size: int) -> str:
    """Return the ``Content-Range`` value of a 206."""
    _require_bytes(start, stop)
    return f"bytes {start}-{stop - 1}/{size}"


def format_unsatisfied_range(size: int) -> str:
    """Return the ``Content-Range`` value of a 416."""
    return f"bytes */{size}"


def _require_bytes(start: int, stop: int) -> None:
    if not 0 <= start < stop:
        raise LocalProtocolError(f"[{start}, {stop}) is no range of bytes")


def parse_content_range(value: str | None) -> tuple[int, int, int]:
    """Return ``(start, stop, size)`` of a 206's ``Content-Range``.

    Raises:
        RemoteProtocolError: absent, malformed, contradictory, or of unknown size.
    """
    match = _CONTENT_RANGE.fullmatch(value or "")
    if match is not None:
        start, last, size = map(int, match.groups())
        if start <= last < size:
            return start, last + 1, size
    raise RemoteProtocolError(f"bad Content-Range {(value or '')[:100]!r}")
