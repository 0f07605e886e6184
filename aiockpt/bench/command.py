"""Runs the benchmark, from arguments to report."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from aiockpt.bench.delta import measure_delta, rows_of_delta
from aiockpt.bench.distant import measure_url, rows_of_url
from aiockpt.bench.embedded import measure_embedded, rows_of_embedded
from aiockpt.bench.footprint import Footprint, measure_footprint
from aiockpt.bench.group_measuring import (
    GroupPair,
    measure_group_footprint,
    measure_group_shape,
)
from aiockpt.bench.machine import describe_machine
from aiockpt.bench.measuring import Pair, Plan, measure_shape
from aiockpt.bench.options import Options, parse
from aiockpt.bench.plot import as_svg
from aiockpt.bench.process import BenchError, Worker
from aiockpt.bench.report import (
    Report,
    as_conclusion,
    as_json,
    as_markdown,
    as_text,
)
from aiockpt.bench.rival import is_installed
from aiockpt.bench.rows import (
    MAX_LAG,
    MAX_LAG_PG,
    Row,
    rows_of_cost,
    rows_of_footprint,
    rows_of_group,
    rows_of_many,
    rows_of_same_host,
    rows_of_speed,
    rows_of_ticker,
)
from aiockpt.bench.saving import measure_saving, rows_of_saving
from aiockpt.bench.serving import measure_serving, rows_of_serving
from aiockpt.bench.shapes import Shape, shape_of
from aiockpt.bench.statistics import Series
from aiockpt.runtime.system import available_memory

__all__ = ["run"]

_ROLES = {"http": ("sender", "receiver"), "pg": ("group sender", "group receiver")}

_COPIES = 5  # of the state dict, in both processes together, at most


def run(argv: Sequence[str]) -> int:
    """Do what ``argv`` says; return the exit code."""
    options = parse(argv)
    try:
        _require_memory(options)
        report = _measure(options)
        _write(report, options)
    except (BenchError, OSError) as error:
        sys.stderr.write(f"aiockpt bench: {error}\n")
        return 1
    return int(options.check and bool(report.missed))


def _require_memory(options: Options) -> None:
    if options.url is not None:
        return  # the receive itself refuses what does not fit
    needed, free = _COPIES * options.size, available_memory()
    if needed > free:
        raise BenchError(
            f"it needs {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} are "
            f"free: choose a smaller --size"
        )


def _measure(options: Options) -> Report:
    report = Report(machine=describe_machine(), options=_facts(options))
    if options.checkpointer:
        _measure_saving(report, options)
    elif options.embedded:
        _measure_embedded(report, options)
    elif options.trainer:
        _measure_serving(report, options)
    elif options.delta:
        _measure_delta(report, options)
    elif options.url is not None:
        _measure_url(report, options.url, options.repeat)
    else:
        _measure_transport(report, options)
    return report


def _plan(options: Options) -> Plan:
    return Plan(
        size=options.size,
        repeat=options.repeat,
        connections=options.connections,
        rival=options.torchft and is_installed(),
        brief=options.brief,
        seconds=math.inf if options.seconds is None else options.seconds,
    )


def _measure_transport(report: Report, options: Options) -> None:
    plan = _plan(options)
    measure = _over_http if options.transport == "http" else _over_group
    roles = _ROLES[options.transport]
    with Worker(roles[0]) as sender, Worker(roles[1]) as receiver:
        for shape in _shapes(options):
            measure(sender, receiver, shape, plan, report)
    order = list(dict.fromkeys(row.what for row in report.rows))
    report.rows.sort(key=lambda row: order.index(row.what))


def _measure_saving(report: Report, options: Options) -> None:
    for shape in _shapes(options):
        found = measure_saving(
            shape,
            options.size,
            options.repeat,
            partial(_note, shape),
            rivals=options.torchft,
        )
        report.series[shape] = dict(found.series())
        report.rows += rows_of_saving(shape, found)


def _measure_embedded(report: Report, options: Options) -> None:
    for shape in _shapes(options):
        found = measure_embedded(
            shape, options.size, options.repeat, partial(_note, shape)
        )
        report.series[shape] = found
        report.rows += rows_of_embedded(shape, found)


def _measure_serving(report: Report, options: Options) -> None:
    plan = _plan(options)
    for shape in _shapes(options):
        found = measure_serving(shape, plan, partial(_note, shape))
        report.series[shape] = found
        report.rows += rows_of_serving(shape, found)


def _measure_delta(report: Report, options: Options) -> None:
    for shape in _shapes(options):
        found = measure_delta(
            shape, options.size, options.repeat, partial(_note, shape)
        )
        report.series[shape] = found
        report.rows += rows_of_delta(shape, found)


def _measure_url(report: Report, url: str, repeat: int) -> None:
    def note(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    shape, found = measure_url(url, repeat, note)
    report.series[shape] = found
    report.rows += rows_of_url(shape, found)


def _facts(options: Options) -> dict[str, object]:
    """Return the options as they may be shown: without what is behind the #."""
    facts = {**asdict(options), "json": str(options.json), "plot": str(options.plot)}
    return facts | {"url": options.url and options.url.partition("#")[0]}


def _shapes(options: Options) -> Iterable[Shape]:
    """Return the shapes, each once: a small size makes one tensor of several."""
    shapes: dict[tuple[int, int], Shape] = {}
    for key in options.shapes:
        shape = shape_of(key, options.size)
        shapes.setdefault((shape.count, shape.tensor_bytes), shape)
    return shapes.values()


def _over_http(
    sender: Worker, receiver: Worker, shape: Shape, plan: Plan, report: Report
) -> None:
    pair = Pair(sender, receiver, shape, plan.size)
    found = measure_shape(pair, plan, partial(_note, shape))
    footprint = None
    if not plan.brief:
        _note(shape, "memory")
        footprint = measure_footprint(sender, shape, plan.size, rival=plan.rival)
    rows = [
        *rows_of_speed(shape, found),
        *rows_of_many(shape, found),
        *rows_of_same_host(shape, found),
        *rows_of_cost(shape, found),
        *rows_of_ticker(shape, found, MAX_LAG),
    ]
    _add(report, shape, found, rows, footprint)


def _over_group(
    sender: Worker, receiver: Worker, shape: Shape, plan: Plan, report: Report
) -> None:
    pair = GroupPair(sender, receiver, shape, plan.size)
    found = measure_group_shape(pair, plan, partial(_note, shape))
    _note(shape, "memory")
    footprint = measure_group_footprint(sender, shape, plan.size, rival=plan.rival)
    rows = [
        *rows_of_group(shape, found),
        *rows_of_ticker(shape, found, MAX_LAG_PG),
    ]
    _add(report, shape, found, rows, footprint)


def _add(
    report: Report,
    shape: Shape,
    found: Mapping[str, Series],
    rows: Iterable[Row],
    footprint: Footprint | None,
) -> None:
    report.series[shape] = found
    report.rows += rows
    if footprint is not None:
        report.rows += rows_of_footprint(shape, footprint)


def _note(shape: Shape, text: str) -> None:
    sys.stderr.write(f"{shape}, {text}\n")
    sys.stderr.flush()


def _write(report: Report, options: Options) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(report)) + "\n")
    if options.plot is not None:
        options.plot.write_text(as_svg(report))
    if options.markdown:
        sys.stdout.write(as_markdown(report))
    else:
        sys.stdout.write(as_conclusion(report) if options.brief else as_text(report))
