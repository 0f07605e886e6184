"""Metrics for Prometheus: every figure, every event, and a library that may lack."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from typing import Any

import aiohttp
import prometheus_client
import pytest
from aiohttp import web
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from aiockpt.checkpointers import CheckpointerStatistics, LoadStatistics
from aiockpt.errors import MissingExtraError
from aiockpt.prometheus import Exporter, setup
from tests.support.servers import running, settle
from tests.support.transports import pair, receive, told, transport, weights


class Fixed:
    """A source whose figures are what they are."""

    def __init__(self, record: Any) -> None:
        self.record = record

    def statistics(self) -> Any:
        return self.record


def figures(step: int | None = 7) -> Any:
    """Return statistics of a transport."""
    now = transport().statistics()
    threads = type(now.threads)(11, 12, 13, 14)
    return type(now)(step, 2, 1.5, 3, 4, 50, 6, 7000, 8, 9, 10, 15, threads)


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
    transports = figures()
    exporter.add("model", Fixed(transports))
    exporter.add("model", Fixed(CHECKPOINTER))
    found = samples(read(exporter))
    for kind, names, expected in (
        ("transport", TRANSPORT_METRICS, [*transports[:-1], *transports.threads]),
        (
            "checkpointer",
            CHECKPOINTER_METRICS,
            [*CHECKPOINTER[:-1], *CHECKPOINTER.loads],
        ),
    ):
        # A figure that is added to a record is missed here.
        metrics = [found[f"aiockpt_{kind}_{name}", "model"] for name in names]
        assert metrics == expected


def test_sources_come_go_and_replace_each_other(exporter) -> None:
    """A name stands for one of each kind; what has no known figures is refused."""
    exporter.add("a", Fixed(figures()))
    exporter.add("b", Fixed(figures(None)))
    exporter.add("a", Fixed(figures(8)))
    found = samples(read(exporter))
    assert found["aiockpt_transport_step", "a"] == 8
    assert ("aiockpt_transport_step", "b") not in found
    assert found["aiockpt_transport_readers", "b"] == 2
    assert repr(exporter) == "<Exporter a b>"
    exporter.discard("a")
    exporter.discard("nobody")
    assert {name for _, name in samples(read(exporter)) if name} == {"b"}
    unknown: list[Any] = [object(), Fixed(figures().threads)]
    for source in unknown:
        with pytest.raises(TypeError, match=r"^model: .* has no known statistics"):
            exporter.add("model", source)
        with pytest.raises(TypeError, match="model"):
            Exporter({"model": source})


@pytest.mark.asyncio
async def test_events_are_counted_until_it_is_closed(exporter) -> None:
    """The exporter counts events, bytes and seconds for each phase and level."""
    template = weights(0.0)
    async with told() as events, pair() as (sender, receiver):
        for step in (1, 2):  # the second one is told by a warning: nothing has changed
            await sender.send_checkpoint([], step, weights())
            await receive(sender, receiver, step, into=template, have=step == 2)
        await settle(lambda: sender.statistics().readers == 0)
        await sender.disallow_checkpoint()
    value = exporter.registry.get_sample_value
    assert {each.level for each in events} >= {10, 30}
    levels = Counter((each.stop, each.level) for each in events)
    for (stop, level), number in levels.items():
        labels = {"stop": stop, "level": logging.getLevelName(level).lower()}
        assert value("aiockpt_events_total", labels) == number
    for stop in {each.stop for each in events}:
        these, labels = [each for each in events if each.stop == stop], {"stop": stop}
        seconds = [each.seconds for each in these if each.seconds]
        found = [
            value(f"aiockpt_event_{name}", labels)
            for name in ("bytes_total", "reused_bytes_total", "seconds_count")
        ]
        nbytes = [sum(each.nbytes for each in these), sum(e.reused for e in these)]
        assert found == [figure or None for figure in (*nbytes, len(seconds))]
        if seconds:
            quick = value("aiockpt_event_seconds_bucket", {**labels, "le": "0.03"})
            assert quick == sum(each <= 0.03 for each in seconds)
    assert any(each.reused for each in events)
    exporter.close()
    exporter.close()
    async with told() as more, pair() as (sender, _):
        await sender.send_checkpoint([], 1, weights())
    assert more
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
        assert not samples(read(exporter))  # it has ended with the application
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
