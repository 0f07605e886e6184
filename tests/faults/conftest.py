"""Every test of the matrix has a row, and what it measures is written down."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from faultrecord import EXHAUSTIVE, Record

_RECORD = pytest.StashKey[Record]()
_RESULT = pytest.StashKey[str]()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Give where the test counts its runs and states its figures."""
    return request.node.stash[_RECORD]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make the record before anything can fail."""
    if marker := item.get_closest_marker("row"):
        item.stash[_RECORD] = Record(marker.args[0], item.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other loop to the whole matrix."""
    if not EXHAUSTIVE:
        items[:] = [item for item in items if not _is_second(item)]


def _is_second(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    return "row" in item.keywords and call is not None and "uvloop" in call.id


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
