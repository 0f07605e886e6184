"""The receiving half of an HTTPTransport: it asks its like, and serves nothing."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

from aiockpt._bridge import Bridge
from aiockpt._deadline import Deadline
from aiockpt._device import port_for
from aiockpt._here import failing_here
from aiockpt._lifetime import Lifetime
from aiockpt._selection import Select, listed
from aiockpt._warm import WarmArena
from aiockpt.destination import Terms
from aiockpt.errors import AiockptError, LocalProtocolError
from aiockpt.http.client import CheckpointClient
from aiockpt.http.origin import origin_of, sources_of
from aiockpt.http.receive import Receive, ReceiveOptions
from aiockpt.http.selecting import PartReceive
from aiockpt.http.steps import Steps
from aiockpt.http.supply import Sharing
from aiockpt.observe import Progress
from aiockpt.transport import CheckpointTransport, T, Timeout, exact_step, seconds
from aiockpt.wire.http import parse_metadata
from aiockpt.wire.limits import Limits

__all__ = ["Receiver"]


class Receiver(CheckpointTransport[T]):
    """What ``HTTPTransport`` inherits; whoever makes one sets the attributes."""

    _timeout: float
    _limits: Limits
    _allow_pickle: bool
    _lifetime: Lifetime
    _bridge: Bridge
    _same_host: bool | None
    _client: CheckpointClient
    _warm: WarmArena | None

    async def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str | Sequence[str],
        step: int,
        timeout: Timeout | None = None,
        *,
        into: T | None = None,
        direct: bool = False,
        have: T | bool | None = None,
        select: Select | None = None,
        share: bool = False,
        verify_shared: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> T:
        """Fetch ``step`` from the transport, or the transports, of ``metadata``.

        Waits for a step that is not there yet, resumes after broken connections, and
        returns only bytes whose digests matched the manifest.

        Args:
            src_rank: Not needed here; named in events.
            metadata: What the sender's :meth:`metadata` returned; or a list of what
                several returned that hold the same checkpoint. Each is asked for a
                share that fits its speed. Who fails for good, sends a wrong chunk, or
                has another checkpoint than most of them (or, where equal, than the
                first) is dropped, and the receive goes on while one is left.
            step: The step that the sender was given.
            timeout: Deadline of the whole call, in seconds or as a ``timedelta``.
            into: A state dict to fill: its tensors in place, its dicts and lists with
                the other values. It is checked before a byte moves, touched only
                when everything has been verified, and returned.
            direct: With ``into``: receive straight into its memory. A receive that
                fails then says in a note whether the template was modified. What
                accelerators have of it is copied there chunk by chunk, as each is
                fetched and verified, while later ones travel (but with ``select``),
                once the current stream has done what it was given before; leave it
                alone meanwhile. What comes from ``have`` is copied at the end.
            have: A state dict that holds some of it already, such as an earlier step;
                True: the template is one. Chunks of it that have the right digest are
                not fetched, and with True not even copied. What has another path,
                dtype or shape is fetched. It may be written to meanwhile only if it
                is not the template.
            select: Only these dotted paths, and what is below them; or a function of
                the path that is asked for each value. Chunks that hold none of it are
                not fetched. With ``into``, which may then have more or fewer keys,
                it is filled where selected, and returned; it is checked once the
                values that are no tensors have come.
            share: Return tensors in the sender's own memory, where it is a process of
                this user on this host that lends it (``same_host=True``). Nothing is
                copied but the pages that are written to, which then are this
                process's. The memory is sealed: it never changes, whatever the
                sender does. Elsewhere the bytes come over HTTP, as without it.
            verify_shared: Compare the digests of what is shared, too; that reads it
                all.
            progress: Called with :class:`.Progress` as bytes arrive.

        Raises:
            ValueError: ``share`` with ``into``, which has memory of its own.
            TransferTimeoutError: the deadline passed.
            StepNotFoundError: a newer step has taken its place.
            PeerFailedError: the sender could not send it.
            TemplateMismatchError: ``into`` does not fit.
            UnsupportedLeafError: ``into`` or ``have`` has what no checkpoint can hold.
            LocalProtocolError: ``have=True`` without a template.
            MissingKeysError: the checkpoint, or ``into``, lacks a path of ``select``.
            DeviceMeshError: a distributed tensor has no place among the ranks here.
            StagingError: this host cannot: a copy failed, or memory is short.
            TransportError, ProtocolError, AuthenticationError: see the error tree.
                Of several sources the most telling error, with the others as notes.
            ValueError: ``metadata`` is an empty list.
        """
        if share and into is not None:
            raise ValueError("share=True returns new tensors: leave out into=")
        if share and have is not None:
            raise ValueError("share=True moves no bytes: leave out have=")
        select = listed(select)
        try:
            origin = origin_of(self._client, sources_of(metadata))
        finally:
            del metadata  # a traceback with local variables would show the token
        limit = self._timeout if timeout is None else seconds(timeout)
        deadline = Deadline(limit, stop="fetch_manifest")
        terms = Terms(
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            direct=direct,
            ports=port_for,
            warm=self._warm,
        )
        sharing = Sharing(
            wanted=self._same_host is not False and have is None,
            keep=share,
            through=into is not None and not direct,
            verify=verify_shared,
        )
        options = ReceiveOptions(
            into=into,
            have=_known(have, into),
            select=select,
            progress=progress,
            terms=terms,
            sharing=sharing,
        )
        kind = Receive if select is None else PartReceive
        receive = kind(origin, self._bridge, options, deadline)
        with self._lifetime.call():
            try:
                with failing_here(f"receiving step {step}"):
                    async with deadline:
                        return cast("T", await receive.run(step))
            except AiockptError as error:
                receive.annotate(error)
                raise

    def steps(
        self,
        metadata: str,
        after: int | None = None,
        *,
        reconnect_timeout: Timeout | None = None,
    ) -> AsyncIterator[int]:
        """Return the steps that a peer publishes, to be iterated over as they come.

        The peer tells of each one at once, and nothing is polled. Only the newest is
        given: those that were published while nobody asked are skipped, and one that
        was given may be gone when it is received (``StepNotFoundError``); the next
        one is there then.

        A peer that breaks off, is silent or starts again at the same address is asked
        again, after random delays of 2 seconds at most. Silent is who sends nothing
        for the stall timeout after the 30 seconds for which it was asked to wait. The
        waiting itself has no deadline: put ``asyncio.timeout`` around it. If that, or
        a cancel, ends it, no step is lost, and the iterator can be used again. It is
        for one task: a second one that waits gets a ``LocalProtocolError``.

        Args:
            metadata: What the peer's :meth:`metadata` returned.
            after: A step; only later ones are given. None: whatever is served first.
            reconnect_timeout: How long a peer that does not answer is asked again, in
                seconds or as a ``timedelta``; None: for ever.

        Raises:
            AuthenticationError: the peer refuses; one that has started again has
                another capability in its metadata, unless both know a ``token``.
            TransportError: the peer did not answer for ``reconnect_timeout``.
            RemoteProtocolError: it is no aiockpt server, three times in a row.
            ClosedError: after, or because of, :meth:`shutdown`.
        """
        if after is not None:
            after = exact_step(after)
        silent = math.inf if reconnect_timeout is None else seconds(reconnect_timeout)
        try:
            source = parse_metadata(metadata)
        finally:
            del metadata  # a traceback with local variables would show the token
        self._lifetime.check()
        return Steps(
            self._client,
            source,
            self._lifetime,
            after=after,
            reconnect_timeout=silent,
        )


def _known(have: object, into: object) -> object:
    """Return the state dict that is meant by ``have``."""
    if not isinstance(have, bool):
        return have
    if not have:
        return None
    if into is None:
        raise LocalProtocolError(
            "have=True says that the template holds some of it: there is no into="
        )
    return into
