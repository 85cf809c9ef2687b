"""A plugin of pytest that writes each result to a file at once, so that a crash or a limit of time loses none.

The file is named by the variable ``RESULT_LINES``; each line is a JSON object: a test that begins, or how a phase of
it ended.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest


def _write(**fields: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that started the worker hears the same
    with open(os.environ["RESULT_LINES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test begins."""
    _write(test=nodeid, outcome="begun")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write how a phase of a test ended: each call, and what was skipped or failed in its set-up or its end."""
    if report.when == "call" or report.outcome != "passed":
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        _write(test=report.nodeid, outcome=outcome, seconds=report.duration, text=report.longreprtext)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write what could not be collected, and which modules were skipped."""
    if report.outcome != "passed":
        _write(test=report.nodeid, outcome=report.outcome, seconds=0, text=report.longreprtext)
