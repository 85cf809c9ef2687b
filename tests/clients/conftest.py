"""The fixture ``client``; what each test found becomes a row of docs/compatibility.md."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import programs_page
import pytest
from harness import Client

# the process from which ranks are forked imports torchvision_operators from here
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))


@pytest.fixture
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Client:
    """What runs a program in PyTorch and in ONNX Runtime; see harness.py."""
    client = Client(request.module.PACKAGES, tmp_path)
    case = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    test = case["program"].__name__ if "program" in case else request.node.originalname
    stages = {0: "without DeepSpeed", 2: "zero2", 3: "zero3", None: case.get("name", "")}
    client.row |= {"test": test, "case": stages[case.get("stage")]}
    return client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each program the time that it takes where other work keeps the cores busy."""
    for item in items:
        if item.get_closest_marker("clients") is not None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Keep the row of a test that has run."""
    report = yield
    client = getattr(item, "funcargs", {}).get("client")
    if call.when == "call" and client is not None:
        client.row["passed"] = report.passed
        programs_page.keep(item.module, client.row)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write docs/compatibility.md, in the process that all others report to."""
    if not hasattr(session.config, "workerinput"):
        programs_page.write()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many programs ran."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    ran = sum("clients" in report.keywords for report in reports)
    terminalreporter.write_line(f"{ran} programs ran in PyTorch and in ONNX Runtime: docs/compatibility.md")
