"""The bar is seen on a terminal only, counts right from threads, and goes away."""

from __future__ import annotations

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ort_zero.utils.progress import bar, steps_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    # not a fixture: pytest puts its own stream there again between the set-up of a test and the test
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def test_a_bar_moves_under_changing_names_and_goes_away(monkeypatch):
    seen = terminal(monkeypatch)
    shown = bar(None, "planning", "run", delay=0)
    for done, what in enumerate(("without", "budget 65%")):
        shown.move(done, 2, what)
    assert "budget 65%" in seen.getvalue() and "1/2" in seen.getvalue()
    shown.move(2, 2, "done")
    assert shown.disable and seen.getvalue().rsplit("\r", 2)[-2].strip() == ""
    before = seen.getvalue()
    shown.move(1, 2, "again")
    assert seen.getvalue() == before


def test_bytes_are_scaled_and_counted_from_threads(monkeypatch):
    seen = terminal(monkeypatch)
    with bar(8 * 2**20, "aggregate", delay=0) as shown, ThreadPoolExecutor(8) as pool:
        for _ in range(800):
            pool.submit(shown.update, 2**20 // 100)
        pool.shutdown()
        assert shown.n == 800 * (2**20 // 100)
    assert "8.00M" in seen.getvalue()


@pytest.mark.parametrize("stream, shown", [(Terminal(), False), (io.StringIO(), True)], ids=["unwanted", "file"])
def test_nothing_is_written_where_nobody_looks(monkeypatch, stream, shown):
    monkeypatch.setattr("sys.stderr", stream)
    with bar(2, "verify", shown=shown, delay=0) as hidden:
        hidden.move(1, 2, "x")
        hidden.update()
    assert stream.getvalue() == ""


def test_a_bar_that_is_not_shown_counts_too():
    hidden = bar(3, "planning", "cluster", shown=False)
    hidden.update(2)
    hidden.update()
    assert hidden.n == 3


def test_long_steps_are_shown_after_a_while_with_a_clock_that_goes_on(monkeypatch):
    seen = terminal(monkeypatch)
    with steps_bar("Model training graph 1", 4, delay=0.2) as steps:
        steps.begin("export")
        time.sleep(0.1)
        assert seen.getvalue() == ""
        monkeypatch.setattr("sys.stderr", io.StringIO())  # as an export does
        time.sleep(1)
        steps.end()
        steps.begin("gradient graph")
        time.sleep(1)
    text = seen.getvalue()
    assert "Model training graph 1: export: 0/4" in text and "Model training graph 1: gradient graph: 1/4" in text
    assert "00:01" in text and text.rsplit("\r", 2)[-2].strip() == ""


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), False), (io.StringIO(), True)], ids=["unwanted", "file"])
def test_no_thread_is_started_where_nobody_looks(monkeypatch, stream, shown):
    monkeypatch.setattr("sys.stderr", stream)
    before = set(threading.enumerate())
    with steps_bar("building", 2, shown=shown, delay=0) as steps:
        steps.begin("one")
        steps.end()
        assert set(threading.enumerate()) <= before
    assert stream.getvalue() == "" and steps.done == 1


def test_a_thread_that_is_started_on_a_terminal_ends_with_the_bar(monkeypatch):
    terminal(monkeypatch)
    before = set(threading.enumerate())
    with steps_bar("building", 2, delay=100):
        (started,) = set(threading.enumerate()) - before
    assert not started.is_alive()
