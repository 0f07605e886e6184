"""Transports, checkpointers and events as metrics for Prometheus.

This needs ``pip install 'aiockpt[prometheus]'``; without it, an :class:`Exporter`
cannot be made. Each figure of a ``statistics()`` is a metric with the label ``name``,
which is read when Prometheus asks. Events of the whole process are counted as they
happen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from aiockpt.errors import MissingExtraError
from aiockpt.events import TransferEvent, add_hook

if TYPE_CHECKING:
    from types import ModuleType

    from aiohttp import web
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["Exporter", "Observed", "setup"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, float("inf"))


class Observed(Protocol):
    """An ``HTTPTransport`` or a checkpointer: an object with statistics."""

    def statistics(self) -> object:
        """Return the figures as a named tuple."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """One field of a record as a metric; ``total`` marks a counter."""

    field: str
    name: str
    text: str
    total: bool = False


_TRANSPORT = (
    _Figure("step", "step", "Step that is offered; absent where none is."),
    _Figure("readers", "readers", "Bodies that are being sent."),
    _Figure("oldest_reader", "oldest_reader_seconds", "Age of the oldest of them."),
    _Figure("superseded", "superseded_checkpoints", "Replaced, and still being read."),
    _Figure("waiting", "waiting_requests", "Requests that wait for a step."),
    _Figure("requests", "requests", "Requests that came.", total=True),
    _Figure("refused", "refused_requests", "Those answered with an error.", total=True),
    _Figure("bytes_sent", "sent_bytes", "Bytes of bodies.", total=True),
    _Figure("gone", "gone_bodies", "Bodies whose client left.", total=True),
    _Figure("stalled", "stalled_bodies", "Bodies of stalled clients.", total=True),
    _Figure("evicted", "evicted_readers", "Readers cut after their grace.", total=True),
    _Figure("lent", "lent_checkpoints", "Taken as memory on this host.", total=True),
    _Figure("threads.threads", "threads", "Threads that stage, verify and load."),
    _Figure("threads.running", "running_calls", "Calls in these threads."),
    _Figure("threads.waiting", "waiting_calls", "Calls that wait for a thread."),
    _Figure("threads.cancelling", "cancelling_calls", "Cancelled calls in a thread."),
)
_CHECKPOINTER = (
    _Figure("saves", "saves", "Calls of save.", total=True),
    _Figure("written", "written_saves", "Saves that are durable.", total=True),
    _Figure("failed", "failed_saves", "Saves that will not be.", total=True),
    _Figure("skipped", "skipped_saves", "Saves that did not begin.", total=True),
    _Figure("replaced", "replaced_saves", "Saves replaced by newer ones.", total=True),
    _Figure("under_way", "saves_under_way", "Saves that are not written yet."),
    _Figure("bytes_written", "written_bytes", "Bytes of written saves.", total=True),
    _Figure("stall_seconds", "stall_seconds", "How long the last save stalled."),
    _Figure("write_seconds", "write_seconds", "How long the last write took."),
    _Figure("restarts", "process_restarts", "New checkpoint processes.", total=True),
    _Figure("loads.ended", "loads", "Loads that have ended.", total=True),
    _Figure("loads.nbytes", "loaded_bytes", "Bytes that they read.", total=True),
    _Figure("loads.needed", "needed_bytes", "Bytes that they needed.", total=True),
    _Figure("loads.files", "loaded_files", "Files that they read from.", total=True),
    _Figure("loads.ranges", "loaded_ranges", "Ranges of these files.", total=True),
)
_KINDS: Mapping[str, tuple[str, tuple[_Figure, ...]]] = {
    "TransportStatistics": ("aiockpt_transport_", _TRANSPORT),
    "CheckpointerStatistics": ("aiockpt_checkpointer_", _CHECKPOINTER),
}
"""The key is the name of the record's class, so that its module need not be loaded."""


class Exporter:
    """Registers the metrics; :meth:`close` removes them.

    Args:
        sources: The objects to read, by the ``name`` that labels their metrics.
        registry: Where to register; a new registry by default. The registry of the
            process is ``prometheus_client.REGISTRY``.

    Raises:
        MissingExtraError: ``prometheus_client`` is not installed.
        ValueError: the registry has the metrics of another exporter already.
        TypeError: a source has no known statistics.
    """

    def __init__(
        self,
        sources: Mapping[str, Observed] | None = None,
        *,
        registry: CollectorRegistry | None = None,
    ) -> None:
        client = _library()
        self.registry: CollectorRegistry = registry or client.CollectorRegistry()
        self._sources: dict[str, dict[str, Observed]] = {kind: {} for kind in _KINDS}
        self._events = _Events()
        for name, source in (sources or {}).items():
            self.add(name, source)
        self.registry.register(self)
        self._remove: Callable[[], None] | None = add_hook(self._events.count)

    def __repr__(self) -> str:
        names = [name for sources in self._sources.values() for name in sources]
        return f"<Exporter {' '.join(names)}>"

    def add(self, name: str, source: Observed) -> None:
        """Export ``source`` too; it replaces one of its kind with the same name.

        Raises:
            TypeError: it has no known statistics.
        """
        read = getattr(source, "statistics", None)
        kind = type(read()).__name__ if callable(read) else ""
        if kind not in _KINDS:
            raise TypeError(
                f"{name}: {source!r} has no known statistics: pass a transport or a "
                "checkpointer"
            )
        self._sources[kind][name] = source

    def discard(self, name: str) -> None:
        """Stop exporting the sources with this name, if there are any."""
        for sources in self._sources.values():
            sources.pop(name, None)

    def close(self) -> None:
        """Stop counting and leave the registry. Idempotent."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()
            self.registry.unregister(self)

    def collect(self) -> Iterator[Metric]:
        """Read everything; the registry calls this."""
        for kind, (prefix, figures) in _KINDS.items():
            sources = tuple(self._sources[kind].items())
            records = {name: source.statistics() for name, source in sources}
            for figure in figures:
                yield _metric(prefix, figure, records)
        yield from self._events.collect()

    describe = collect  # so that a registry knows the names, and refuses duplicates


class _Events:
    """Counts events, on whatever thread they happen."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        self._number = Counter(
            "aiockpt_events", "Events.", ("stop", "level"), registry=None
        )
        self._bytes = Counter(
            "aiockpt_event_bytes", "Bytes that events moved.", ("stop",), registry=None
        )
        self._reused = Counter(
            "aiockpt_event_reused_bytes",
            "Bytes that were there already, and were not moved.",
            ("stop",),
            registry=None,
        )
        self._seconds = Histogram(
            "aiockpt_event_seconds",
            "How long what is over took.",
            ("stop",),
            registry=None,
            buckets=_SECONDS,
        )

    def count(self, event: TransferEvent) -> None:
        """Count one event; this is a hook."""
        level = logging.getLevelName(event.level).lower()
        self._number.labels(event.stop, level).inc()
        if event.nbytes:
            self._bytes.labels(event.stop).inc(event.nbytes)
        if event.reused:
            self._reused.labels(event.stop).inc(event.reused)
        if event.seconds:
            self._seconds.labels(event.stop).observe(event.seconds)

    def collect(self) -> Iterator[Metric]:
        for each in (self._number, self._bytes, self._reused, self._seconds):
            yield from each.collect()


def setup(
    app: web.Application,
    sources: Mapping[str, Observed],
    path: str = "/metrics",
    *,
    registry: CollectorRegistry | None = None,
) -> Exporter:
    """Answer ``GET path`` of an aiohttp application with the metrics of ``sources``.

    The page also shows whatever else is in ``registry``. The application's middlewares
    decide who may read it. The returned exporter is closed with the application.

    Raises:
        MissingExtraError, ValueError, TypeError: see :class:`Exporter`.
    """
    _library()
    from prometheus_client.aiohttp import make_aiohttp_handler

    exporter = Exporter(sources, registry=registry)

    async def close(_: web.Application) -> None:
        exporter.close()

    app.router.add_get(path, make_aiohttp_handler(exporter.registry))
    app.on_cleanup.append(close)
    return exporter


def _library() -> ModuleType:
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingExtraError("prometheus_client", extra="prometheus") from error
    return prometheus_client


def _metric(prefix: str, figure: _Figure, records: Mapping[str, object]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family = CounterMetricFamily if figure.total else GaugeMetricFamily
    metric = family(prefix + figure.name, figure.text, labels=["name"])
    for name, record in records.items():
        value = attrgetter(figure.field)(record)
        if value is not None:
            metric.add_metric([name], value)
    return metric
