"""Metrics for Prometheus: every figure, every event, and a library that may lack."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import aiohttp
import prometheus_client
import pytest
from aiohttp import web
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from aiockpt import TransferEvent
from aiockpt.checkpointers import CheckpointerStatistics, LoadStatistics
from aiockpt.errors import MissingExtraError
from aiockpt.events import emit
from aiockpt.http_transport import TransportStatistics
from aiockpt.prometheus import _CHECKPOINTER, _TRANSPORT, Exporter, setup
from aiockpt.runtime.bridge import BridgeStatistics
from tests.support.servers import running
from tests.support.transports import pair, receive, weights


class Fixed:
    """A source whose figures are what they are."""

    def __init__(self, record: Any) -> None:
        self.record = record

    def statistics(self) -> Any:
        return self.record


TRANSPORT = TransportStatistics(
    7, 2, 1.5, 3, 4, 50, 6, 7000, 8, 9, 10, 15, BridgeStatistics(11, 12, 13, 14)
)
TRANSPORT_METRICS = [
    "step", "readers", "oldest_reader_seconds", "superseded_checkpoints",
    "waiting_requests", "requests_total", "refused_requests_total", "sent_bytes_total",
    "gone_bodies_total", "stalled_bodies_total", "evicted_readers_total",
    "lent_checkpoints_total", "threads", "running_calls", "waiting_calls",
    "cancelling_calls",
]  # fmt: skip
CHECKPOINTER = CheckpointerStatistics(
    1, 2, 3, 4, 5, 6, 7, 8.5, 9.5, 10, LoadStatistics(11, 12, 13, 14, 15)
)
CHECKPOINTER_METRICS = [
    "saves_total", "written_saves_total", "failed_saves_total", "skipped_saves_total",
    "replaced_saves_total", "saves_under_way", "written_bytes_total", "stall_seconds",
    "write_seconds", "process_restarts_total", "loads_total", "loaded_bytes_total",
    "needed_bytes_total", "loaded_files_total", "loaded_ranges_total",
]  # fmt: skip


def samples(text: str, parse: Any = parse_text) -> dict[tuple[str, str], float]:
    """Return values by the name of the sample and its first label."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def read(exporter: Exporter) -> str:
    """Return what a scrape finds."""
    return prometheus_client.generate_latest(exporter.registry).decode()


@pytest.fixture
def exporter():
    """Return one that is closed in the end."""
    exporter = Exporter()
    yield exporter
    exporter.close()


def test_every_figure_is_a_metric(exporter) -> None:
    """Each figure has a name in base units; two objects may share a label."""
    exporter.add("model", Fixed(TRANSPORT))
    exporter.add("model", Fixed(CHECKPOINTER))
    found = samples(read(exporter))
    for kind, names, figures in (
        ("transport", TRANSPORT_METRICS, [*TRANSPORT[:-1], *TRANSPORT.threads]),
        (
            "checkpointer",
            CHECKPOINTER_METRICS,
            [*CHECKPOINTER[:-1], *CHECKPOINTER.loads],
        ),
    ):
        metrics = [found[f"aiockpt_{kind}_{name}", "model"] for name in names]
        assert metrics == figures
    # A figure that is added to a record is missed here.
    transports = {figure.field for figure in _TRANSPORT}
    threads = {f"threads.{field}" for field in BridgeStatistics._fields}
    assert transports == {*TransportStatistics._fields} - {"threads"} | threads
    checkpointers = {figure.field for figure in _CHECKPOINTER}
    loads = {f"loads.{field}" for field in LoadStatistics._fields}
    assert checkpointers == {*CheckpointerStatistics._fields} - {"loads"} | loads


def test_sources_come_go_and_replace_each_other(exporter) -> None:
    """A name stands for one of each kind; what has no known figures is refused."""
    exporter.add("a", Fixed(TRANSPORT))
    exporter.add("b", Fixed(TRANSPORT._replace(step=None)))
    exporter.add("a", Fixed(TRANSPORT._replace(step=8)))
    found = samples(read(exporter))
    assert found["aiockpt_transport_step", "a"] == 8
    assert ("aiockpt_transport_step", "b") not in found
    assert found["aiockpt_transport_readers", "b"] == 2
    assert repr(exporter) == "<Exporter a b>"
    exporter.discard("a")
    exporter.discard("nobody")
    assert {name for _, name in samples(read(exporter)) if name} == {"b"}
    unknown: list[Any] = [object(), Fixed(BridgeStatistics(1, 2, 3, 4))]
    for source in unknown:
        with pytest.raises(TypeError, match=r"^model: .* has no known statistics"):
            exporter.add("model", source)
        with pytest.raises(TypeError, match="model"):
            Exporter({"model": source})


def test_events_are_counted_until_it_is_closed(exporter) -> None:
    """The exporter counts events, bytes and seconds for each phase and level."""
    emit(TransferEvent(stop="serve", nbytes=100, seconds=0.02))
    emit(TransferEvent(stop="serve", nbytes=50, reused=7, seconds=5.0, level=30))
    emit(TransferEvent(stop="retract"))
    text = read(exporter)
    for line in (
        'events_total{level="debug",stop="serve"} 1.0',
        'events_total{level="warning",stop="serve"} 1.0',
        'events_total{level="debug",stop="retract"} 1.0',
        'event_bytes_total{stop="serve"} 150.0',
        'event_reused_bytes_total{stop="serve"} 7.0',
        'event_seconds_count{stop="serve"} 2.0',
        'event_seconds_bucket{le="0.03",stop="serve"} 1.0',
    ):
        assert f"aiockpt_{line}" in text
    assert 'stop="retract"' not in text.partition("aiockpt_event_bytes")[2]
    exporter.close()
    exporter.close()
    emit(TransferEvent(stop="serve"))
    Exporter(registry=exporter.registry).close()
    assert not samples(read(exporter))


def test_two_in_one_registry_are_refused(exporter) -> None:
    """A second exporter is refused, since its series would be the same."""
    for first in (exporter, Exporter(registry=prometheus_client.REGISTRY)):
        with pytest.raises(ValueError, match="Duplicated"):
            Exporter(registry=first.registry)
        first.close()


@pytest.mark.asyncio
async def test_an_endpoint_shows_what_a_transport_does() -> None:
    """It does so as text and as OpenMetrics; counters outlive the transport."""
    app, path = web.Application(), "/internal/metrics"
    async with pair() as (sender, receiver):
        exporter = setup(app, {"sender": sender, "receiver": receiver}, path)
        async with running(app) as host, aiohttp.ClientSession(host.url) as client:
            await sender.send_checkpoint([], 7, weights())
            await receive(sender, receiver, 7)
            async with client.get(path) as answer:
                found = samples(await answer.text())
                assert answer.content_type == "text/plain"
            wish = {"Accept": "application/openmetrics-text; version=1.0.0"}
            async with client.get(path, headers=wish) as answer:
                modern = samples(await answer.text(), parse_openmetrics)
                assert answer.content_type == "application/openmetrics-text"
            await sender.shutdown()
            async with client.get(path) as answer:
                ended = samples(await answer.text())
        assert exporter._remove is None
    assert found == {key: modern[key] for key in found if key in modern}
    assert found["aiockpt_transport_step", "sender"] == 7
    sent = "aiockpt_transport_sent_bytes_total", "sender"
    assert ended[sent] >= found[sent] >= 1 << 20
    assert ("aiockpt_transport_step", "receiver") not in found
    assert ("aiockpt_transport_step", "sender") not in ended
    assert found["aiockpt_event_bytes_total", "recv"] == 1 << 20


@pytest.mark.usefixtures("fresh_interpreters")
def test_the_library_may_be_missing(monkeypatch) -> None:
    """The error names the remedy; importing the module loads nothing heavy."""
    heavy = ("prometheus_client", "aiohttp", "torch")
    code = f"import sys, aiockpt.prometheus; print(sys.modules.keys() & {heavy!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError) as caught:
        Exporter()
    error = caught.value
    assert isinstance(error, ImportError)
    assert (error.library, error.extra) == ("prometheus_client", "prometheus")
    assert "pip install 'aiockpt[prometheus]'" in str(error)
    with pytest.raises(MissingExtraError):
        setup(web.Application(), {})
