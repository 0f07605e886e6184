"""Every test of the matrix has a row, and what it measures is written down."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.support.matrix import Record
from tests.support.proofs import faults_of

_RECORD = pytest.StashKey[Record]()
_RESULT = pytest.StashKey[str]()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Give where the test counts its runs and states its figures."""
    return request.node.stash[_RECORD]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make the record before anything can fail."""
    for row in faults_of(item)[:1]:
        item.stash[_RECORD] = Record(row, item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the record once the test and its check for what it leaves are over."""
    report = yield
    result = _result_of(report)
    if result != "pass" and item.stash.get(_RESULT, "pass") == "pass":
        item.stash[_RESULT] = result
    if report.when == "teardown" and _RECORD in item.stash:
        item.stash[_RECORD].write(item.stash.get(_RESULT, "pass"))
    return report


def _result_of(report: pytest.TestReport) -> str:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        return str(reason).removeprefix("Skipped: ") or "skipped"
    return "fail" if report.failed else "pass"
