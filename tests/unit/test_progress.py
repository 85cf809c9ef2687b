"""The bar is seen on a terminal only, counts right from threads, and goes away."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ort_zero.utils.progress import bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    # not a fixture: pytest puts its own stream there again between the set-up of a test and the test
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


ERASED = "\x1b[2K"
"""What a terminal is told when the line of the bar goes away."""


def test_a_bar_moves_under_changing_names_and_goes_away(monkeypatch):
    seen = terminal(monkeypatch)
    shown = bar(None, "planning", "run", delay=0)
    for done, what in enumerate(("without", "[budget] 65%")):
        shown.move(done, 2, what)
        time.sleep(0.3)
    assert "[budget] 65%" in seen.getvalue() and "1/2" in seen.getvalue()
    shown.close()
    shown.close()
    assert seen.getvalue().endswith(ERASED)
    before = seen.getvalue()
    shown.move(1, 2, "again")
    assert seen.getvalue() == before


def test_bytes_are_scaled_and_counted_from_threads(monkeypatch):
    seen = terminal(monkeypatch)
    with bar(8 * 2**20, "aggregate", delay=0) as shown:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(800):
                pool.submit(shown.update, 2**20 // 100)
        assert shown.n == 800 * (2**20 // 100)
    assert "8.0/8.0 MiB" in seen.getvalue()


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), False), (io.StringIO(), True)], ids=["unwanted", "file"])
def test_nothing_is_written_and_no_thread_started_where_nobody_looks(monkeypatch, stream, shown):
    monkeypatch.setattr("sys.stderr", stream)
    before = set(threading.enumerate())
    with bar(3, "verify", shown=shown, delay=0) as quiet:
        quiet.move(1, 2, "x")
        quiet.update()
        assert quiet.n == 2 and set(threading.enumerate()) <= before
    assert stream.getvalue() == ""


IMPORTS = """
import io, random, sys
class Terminal(io.StringIO):
    def isatty(self): return True
random.seed(1)
expected = random.getstate()
sys.stderr = Terminal()
from ort_zero.utils.progress import bar
bar(2, "work", "run", delay=0).close()
print(random.getstate() == expected, "rich.style" in sys.modules)
"""


def test_pythons_random_numbers_stay_as_they_are():
    """rich draws one when it is imported, which a training would otherwise miss."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr
