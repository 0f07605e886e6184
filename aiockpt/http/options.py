"""The options of a transport as frozen records, and checks of their values."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import aiohttp

from aiockpt.format.limits import Limits
from aiockpt.http.security import check_peers
from aiockpt.runtime.secrets import Token
from aiockpt.transport import check_fields, require, require_type

# Of a client without a transport, as in a command or a load from a URL.
READER_THREADS = 2
READER_CONNECTIONS = 4
READER_STALL_TIMEOUT_S = 10.0

_CONNECTIONS = min(4, os.cpu_count() or 4)
_MAX_NICE = 19
_MAX_PORT = 65535
_MIN_KEY_BYTES = 16
_MAX_ZONE_CHARACTERS = 64


def _float(number: float) -> float:
    """Return a number of any type as a float; infinity if it is too large."""
    try:
        return float(number)
    except OverflowError:
        return inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where and how a transport serves its checkpoints.

    Attributes:
        host: The address to listen on. None: every interface.
        port: The port to listen on. 0: any free port.
        interface: The network interface whose address the metadata names. Without it,
            and without ``advertise``, the transport reads the variables
            ``AIOCKPT_IFNAME``, ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``, and
            then the routing table.
        process: Serve from a separate process, so that the trainer and the server do
            not slow each other down. The process starts with the transport, is replaced
            if it dies, and serves from the shared memory of the snapshot. It excludes
            ``ssl_context`` and ``zero_copy``. What the transport receives in a swarm,
            it serves from its own event loop, at a free port.
        readers: How many response bodies the server sends at once. Further requests
            wait. If few bodies end meanwhile, the slowest ones are ended, and their
            receivers ask for the rest later. Manifests have as many places of their
            own, and answers of at most 64 KiB need none.
        grace: Seconds that receivers get to finish when a checkpoint is retracted.
        keep_superseded: How many replaced snapshots the server keeps for receivers that
            still read them. Each takes the memory of one checkpoint for as long as it
            is read. If receivers read more than that, the snapshots that have been read
            longest stay, and the other receivers must start again.
        keep_base: Keep the previous snapshot as the base of deltas. A receive with
            ``have=`` from a receiver that holds that step then fetches only the changed
            elements. This takes the memory of one more checkpoint, and of the deltas:
            at most half a checkpoint, and 1 % of one if few elements change. Both ends
            need the extra ``aiockpt[delta]``; a receiver without it fetches whole
            chunks.
        keep_last: If the trainer dies, the server process lives on until this many
            seconds after its last request. A successor of the trainer can fetch the
            last checkpoint from the same URL. An orderly shutdown ends the process at
            once.
        nice: The increase of the server process's niceness, 0 to 19. Where all cores
            are busy, 10 gets about a tenth of a thread's share, 0 an equal share, and
            19 next to nothing.
    """

    host: str | None = None
    port: int = 0
    interface: str | None = None
    process: bool = False
    readers: int = 256
    grace: float = 5.0
    keep_superseded: int = 1
    keep_base: bool = False
    keep_last: float = 0.0
    nice: int = 10

    def __post_init__(self) -> None:
        check_fields(self)
        require(at_least=1, readers=self.readers)
        if self.port > _MAX_PORT:
            raise ValueError(f"port must be at most {_MAX_PORT}, got {self.port}")
        if self.nice > _MAX_NICE:
            raise ValueError(f"nice must be at most {_MAX_NICE}, got {self.nice!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """How a receiver serves other receivers of the same checkpoint while it receives.

    Attributes:
        linger: Seconds for which the receiver goes on serving after a receive has
            returned new tensors. The next receive ends this, and so does the first
            chunk that you have changed. The memory of the tensors stays until then,
            also if you drop them. A receive into a template does not linger.
        slots: How many bodies the receiver sends at a time; further requests wait. The
            source of a swarm sends twice as many to receivers that can join. Try 8 if
            many small chunks make requests wait.
        rate: Bytes per second that the receiver sends at most. None: no limit. Only
            Linux can keep to it.
        zone: A name for a part of the network that has fast connections inside, such
            as a rack. Half of the members that a receiver is told of are in its zone.
    """

    linger: float = 30.0
    slots: int = 4
    rate: float | None = None
    zone: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "linger", _float(self.linger))
        require(at_least=1, slots=self.slots)
        if self.rate is not None:
            require(at_least=1, rate=self.rate)
            object.__setattr__(self, "rate", _float(self.rate))
            if self.rate == inf:
                raise ValueError("rate must be finite; None is for no limit")
        if len(self.zone) > _MAX_ZONE_CHARACTERS:
            most = _MAX_ZONE_CHARACTERS
            raise ValueError(f"zone must have at most {most} characters")
        try:
            self.zone.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"zone cannot be encoded: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """Who may read, and which senders a receive trusts.

    Attributes:
        token: A token that both ends know. Without it, the transport makes a random
            one, and the metadata carries it. The variables ``AIOCKPT_TOKEN`` (a token)
            and ``AIOCKPT_TOKEN_PATH`` (a file with a token) are the default. A receiver
            sends it to each host that metadata without a token names, so whoever
            chooses the metadata gets it. ``peers`` bounds these hosts.
        insecure: Ask for no token: everybody who reaches the port may read.
        ssl_context: The TLS context to serve with. None: serve without TLS.
        client_ssl_context: The TLS context that verifies senders. None: the system's
            certificate authorities.
        manifest_key: A key that both ends know, at least 16 bytes. The sender signs
            each manifest with it, and the receiver accepts no other manifest: it raises
            ``ForgedManifestError`` before any data moves. The key protects against
            another job that answers at the same address. Against an attacker who can
            change the traffic, use TLS as well.
        peers: The only hosts that a receive connects to: networks such as
            ``"10.0.0.0/8"``, addresses, and host names with ``*`` as a wildcard. None:
            every host that the metadata names, except cloud metadata services,
            multicast addresses, and link-local addresses that a host name resolves to.
    """

    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    ssl_context: ssl.SSLContext | None = None
    client_ssl_context: ssl.SSLContext | None = None
    manifest_key: str | bytes | None = field(default=None, repr=False)
    peers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.token is not None:  # printing this record does not show the token
            object.__setattr__(self, "token", Token(self.token))
        if self.key is not None and len(self.key) < _MIN_KEY_BYTES:
            raise ValueError(f"manifest_key must have at least {_MIN_KEY_BYTES} bytes")
        check_peers(self.peers)

    @property
    def key(self) -> bytes | None:
        """The manifest key as bytes."""
        given = self.manifest_key
        return given.encode() if isinstance(given, str) else given


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """What a receive accepts, and how it fetches.

    Attributes:
        limits: The largest sizes that a receive accepts.
        connections: How many ranges a receive fetches in parallel from one source.
            Senders of shards together count as one source. By default the number of
            cores, and at most 4. Try 8 to 16 on a long or lossy line.
        reconnect_timeout: Seconds for which a receive tries to reach a sender that no
            longer answers. 0: raise at once.
        keep_arena: Keep the memory of a receive for the next one, as soon as none of
            its tensors exists. Memory that was used before is faster to receive into.
        session: Your own ``ClientSession``. The transport uses it and never closes it.
    """

    limits: Limits = Limits()  # noqa: RUF009 - frozen
    connections: int = _CONNECTIONS
    reconnect_timeout: float = 10.0
    keep_arena: bool = False
    session: aiohttp.ClientSession | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        require_type(Limits, limits=self.limits)
        require(at_least=1, connections=self.connections)
