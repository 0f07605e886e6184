"""Metrics for Prometheus: every figure, every event, and a library that may lack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import prometheus_client
import pytest
from aiohttp import web
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from aiockpt.checkpointers.base import CheckpointerStatistics
from aiockpt.errors import MissingExtraError
from aiockpt.events import TransferEvent, emit
from aiockpt.http.transport import TransportStatistics
from aiockpt.prometheus import _CHECKPOINTER, _TRANSPORT, Exporter, setup
from aiockpt.runtime.bridge import BridgeStatistics
from tests.support.applications import running
from tests.support.transports import pair, receive, transport, weights

Samples = Mapping[tuple[str, str], float]


class Fixed:
    """A source whose figures are what they are."""

    def __init__(self, record: object) -> None:
        self.record = record

    def statistics(self) -> object:
        return self.record


TRANSPORT = TransportStatistics(
    7, 2, 1.5, 3, 4, 50, 6, 7000, 8, 9, 10, 15, BridgeStatistics(11, 12, 13, 14)
)
CHECKPOINTER = CheckpointerStatistics(1, 2, 3, 4, 5, 6, 7, 8.5, 9.5, 10)


def samples(text: str, parse: Any = parse_text) -> Samples:
    """Return values by the name of the sample and its first label."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def read(exporter: Exporter) -> Samples:
    """Return what a scrape finds."""
    return samples(prometheus_client.generate_latest(exporter.registry).decode())


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    """Return one that is closed in the end."""
    exporter = Exporter()
    yield exporter
    exporter.close()


class TestFigures:
    """What ``statistics()`` says."""

    def test_every_figure_of_a_transport_is_a_metric(self, exporter) -> None:
        """By its name, in base units, and with the label that it was given."""
        exporter.add("model", Fixed(TRANSPORT))
        found = read(exporter)
        assert [
            found[f"aiockpt_transport_{name}", "model"]
            for name in (
                "step",
                "readers",
                "oldest_reader_seconds",
                "superseded_checkpoints",
                "waiting_requests",
                "requests_total",
                "refused_requests_total",
                "sent_bytes_total",
                "gone_bodies_total",
                "stalled_bodies_total",
                "evicted_readers_total",
                "lent_checkpoints_total",
                "threads",
                "running_calls",
                "waiting_calls",
                "cancelling_calls",
            )
        ] == [*TRANSPORT[:-1], *TRANSPORT.threads]

    def test_every_figure_of_a_checkpointer_is_a_metric(self, exporter) -> None:
        """It may have the name of a transport."""
        exporter.add("model", Fixed(TRANSPORT))
        exporter.add("model", Fixed(CHECKPOINTER))
        found = read(exporter)
        assert [
            found[f"aiockpt_checkpointer_{name}", "model"]
            for name in (
                "saves_total",
                "written_saves_total",
                "failed_saves_total",
                "skipped_saves_total",
                "replaced_saves_total",
                "saves_under_way",
                "written_bytes_total",
                "stall_seconds",
                "write_seconds",
                "process_restarts_total",
            )
        ] == [*CHECKPOINTER]

    def test_no_field_of_a_record_is_forgotten(self) -> None:
        """A figure that is added there is missed here."""
        transports = {figure.field for figure in _TRANSPORT}
        threads = {f"threads.{field}" for field in BridgeStatistics._fields}
        assert transports == {*TransportStatistics._fields} - {"threads"} | threads
        checkpointers = {figure.field for figure in _CHECKPOINTER}
        assert checkpointers == set(CheckpointerStatistics._fields)

    def test_sources_come_go_and_replace_each_other(self, exporter) -> None:
        """A name stands for one of each kind."""
        exporter.add("a", Fixed(TRANSPORT))
        exporter.add("b", Fixed(TRANSPORT._replace(step=None)))
        exporter.add("a", Fixed(TRANSPORT._replace(step=8)))
        found = read(exporter)
        assert found["aiockpt_transport_step", "a"] == 8
        assert ("aiockpt_transport_step", "b") not in found
        assert found["aiockpt_transport_readers", "b"] == 2
        assert repr(exporter) == "<Exporter a b>"
        exporter.discard("a")
        exporter.discard("nobody")
        assert {name for _, name in read(exporter) if name} == {"b"}

    @pytest.mark.parametrize("source", [object(), Fixed(BridgeStatistics(1, 2, 3, 4))])
    def test_what_has_no_known_figures_is_refused(self, exporter, source) -> None:
        """At once, and not when somebody asks."""
        with pytest.raises(TypeError, match=r"^model: .* has no known statistics"):
            exporter.add("model", source)
        with pytest.raises(TypeError, match="model"):
            Exporter({"model": source})


class TestEvents:
    """What happens in the process."""

    def test_events_are_counted_until_it_is_closed(self, exporter) -> None:
        """By stop: how many and of which level, how many bytes, how long."""
        emit(TransferEvent(stop="serve", nbytes=100, seconds=0.02))
        emit(TransferEvent(stop="serve", nbytes=50, reused=7, seconds=5.0, level=30))
        emit(TransferEvent(stop="retract"))
        text = prometheus_client.generate_latest(exporter.registry).decode()
        assert 'aiockpt_events_total{level="debug",stop="serve"} 1.0' in text
        assert 'aiockpt_events_total{level="warning",stop="serve"} 1.0' in text
        assert 'aiockpt_events_total{level="debug",stop="retract"} 1.0' in text
        assert 'aiockpt_event_bytes_total{stop="serve"} 150.0' in text
        assert 'aiockpt_event_reused_bytes_total{stop="serve"} 7.0' in text
        assert 'aiockpt_event_seconds_count{stop="serve"} 2.0' in text
        assert 'aiockpt_event_seconds_bucket{le="0.03",stop="serve"} 1.0' in text
        assert 'stop="retract"' not in text.partition("aiockpt_event_bytes")[2]
        exporter.close()
        exporter.close()
        emit(TransferEvent(stop="serve"))
        again = Exporter(registry=exporter.registry)
        again.close()
        assert not read(exporter)

    def test_two_in_one_registry_are_refused(self, exporter) -> None:
        """Their series would be the same."""
        for first in (exporter, Exporter(registry=prometheus_client.REGISTRY)):
            with pytest.raises(ValueError, match="Duplicated"):
                Exporter(registry=first.registry)
            first.close()


@pytest.mark.asyncio
class TestEndpoint:
    """``GET /metrics`` of an application."""

    async def test_it_shows_what_a_transport_does(self) -> None:
        """In the text format, and as OpenMetrics for those who want it."""
        app = web.Application()
        async with pair() as (sender, receiver):
            sources = {"sender": sender, "receiver": receiver}
            exporter = setup(app, sources, "/internal/metrics")
            async with running(app) as host, aiohttp.ClientSession(host.url) as client:
                await sender.send_checkpoint([], 7, weights())
                await receive(sender, receiver, 7)
                async with client.get("/internal/metrics") as answer:
                    found = samples(await answer.text())
                    assert answer.content_type == "text/plain"
                wish = {"Accept": "application/openmetrics-text; version=1.0.0"}
                async with client.get("/internal/metrics", headers=wish) as answer:
                    modern = samples(await answer.text(), parse_openmetrics)
                    assert answer.content_type == "application/openmetrics-text"
            assert exporter._remove is None
        assert found == {key: modern[key] for key in found if key in modern}
        assert found["aiockpt_transport_step", "sender"] == 7
        assert found["aiockpt_transport_sent_bytes_total", "sender"] >= 1 << 20
        assert ("aiockpt_transport_step", "receiver") not in found
        assert found["aiockpt_event_bytes_total", "recv"] == 1 << 20

    async def test_middlewares_of_the_application_guard_it(self) -> None:
        """It is a route of theirs as any other."""

        @web.middleware
        async def closed(request: web.Request, handler: Any) -> web.StreamResponse:
            raise web.HTTPForbidden

        app = web.Application(middlewares=[closed])
        setup(app, {})
        async with (
            running(app) as host,
            aiohttp.ClientSession(host.url) as client,
            client.get("/metrics") as answer,
        ):
            assert answer.status == 403

    async def test_a_transport_that_has_ended_is_still_counted(self, exporter) -> None:
        """Counters do not vanish while a process shuts down."""
        async with transport() as sender:
            exporter.add("model", sender)
            await sender.send_checkpoint([], 7, weights())
        found = read(exporter)
        assert ("aiockpt_transport_step", "model") not in found
        assert found["aiockpt_transport_requests_total", "model"] == 0


class TestMissingLibrary:
    """``prometheus_client`` is an extra."""

    def test_the_error_names_it_and_the_remedy(self, monkeypatch) -> None:
        """It is an ImportError as well; and nothing is left behind."""
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(MissingExtraError) as caught:
            Exporter()
        error = caught.value
        assert isinstance(error, ImportError)
        assert (error.library, error.extra) == ("prometheus_client", "prometheus")
        assert "pip install 'aiockpt[prometheus]'" in str(error)
        with pytest.raises(MissingExtraError):
            setup(web.Application(), {})

    def test_importing_the_module_does_not_need_it(self) -> None:
        """Nor does it load anything heavy."""
        heavy = ("prometheus_client", "aiohttp", "torch")
        code = f"import sys, aiockpt.prometheus; print(sys.modules.keys() & {heavy!r})"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set()"
