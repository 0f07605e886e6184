"""A pytest plugin that prints each failure at once, for runs that may be killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Print the traceback of each failure at once."""
    config.pluginmanager.register(_Failures(config.pluginmanager.get_plugin))


class _Failures:
    def __init__(self, plugin: Callable[[str], Any]) -> None:
        self._plugin = plugin

    @pytest.hookimpl(trylast=True)  # behind the line that names the test
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._print(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._print(report)

    def _print(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            terminal = self._plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(report.longreprtext)
            terminal.flush()
